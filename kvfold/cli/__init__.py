"""The `kvfold` command: thin commands over the public API."""

import logging
import sys
import warnings

import typer
from rich.console import Console
from rich.markup import escape

from kvfold.cli.bench import bench
from kvfold.cli.calibrate import calibrate
from kvfold.cli.compare import compare
from kvfold.cli.convert import convert
from kvfold.cli.demo import demo
from kvfold.cli.eval import evaluate
from kvfold.cli.formats import formats
from kvfold.cli.generate import generate
from kvfold.cli.plan import plan_command
from kvfold.cli.report import report
from kvfold.cli.serve import serve
from kvfold.cli.sweep import sweep
from kvfold.cli.tasks import tasks

app = typer.Typer(
    name="kvfold",
    help="Keep an LLM's KV cache folded to 2-4 bits a value, and let attention read it folded.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(demo)
app.command()(generate)
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(serve)
app.command()(calibrate)
app.command("eval")(evaluate)
app.command()(bench)
app.command()(sweep)
app.command()(tasks)
app.command()(compare)
app.command()(report)
app.command("plan")(plan_command)
app.command()(formats)
app.command()(convert)


def main() -> None:
    """Run the command line; errors that a user can mend are one line on stderr, exit status 1."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING, stream=sys.stderr)
    logging.getLogger("kvfold").setLevel(logging.INFO)
    warnings.filterwarnings("ignore", module="transformers")
    try:
        app()
    except (OSError, ValueError) as error:
        Console(stderr=True).print(f"[bold red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(1)
