"""All commands under one name."""

from typing import Annotated

import typer

from kvfold.cli.bench import bench
from kvfold.cli.calibrate import calibrate
from kvfold.cli.compare import compare
from kvfold.cli.convert import convert
from kvfold.cli.demo import demo
from kvfold.cli.errors import VERSION
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
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def options(
    version: Annotated[bool, typer.Option(VERSION, help="Print the version, and nothing else.")] = False,
) -> None:
    """Keep an LLM's KV cache folded to 2-4 bits a value, and let attention read it folded."""
    # `kvfold.cli.errors.run` prints the version, before anything is imported.


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
