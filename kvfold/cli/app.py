"""All commands under one name, each imported when it is called: most import torch, which takes seconds."""

import ast
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from kvfold.cli.errors import VERSION

COMMANDS = {
    "demo": "demo",
    "generate": "generate",
    "chat": "chat",
    "serve": "serve",
    "calibrate": "calibrate",
    "eval": "evaluate",
    "bench": "bench",
    "sweep": "sweep",
    "tasks": "tasks",
    "harness": "harness",
    "compare": "compare",
    "report": "report",
    "plan": "plan_command",
    "formats": "formats",
    "convert": "convert",
    "doctor": "doctor",
}
"""Of each command, a module of this folder, the function that it is."""
PASSES_OPTIONS_ON = {"serve": {"allow_extra_args": True, "ignore_unknown_options": True}}


def described(name: str) -> Callable[[], None]:
    """A command's place in the list of all: its words, read from its source, and nothing else."""
    tree = ast.parse(Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8"))
    own = next(x for x in tree.body if isinstance(x, ast.FunctionDef) and x.name == COMMANDS[name])

    def listed() -> None:
        """Replaced before it is called."""

    listed.__doc__ = ast.get_docstring(own)
    return listed


def command(name: str) -> Any:
    """A command with its options, imported."""
    function = getattr(import_module(f"kvfold.cli.{name}"), COMMANDS[name])
    alone = typer.Typer(add_completion=False)
    alone.command(name, context_settings=PASSES_OPTIONS_ON.get(name))(function)
    return typer.main.get_command(alone)


class Commands(TyperGroup):
    """The list of commands, of which the one that is called is imported."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] in COMMANDS:
            self.commands[args[0]] = command(args[0])
        return super().resolve_command(ctx, args)


app = typer.Typer(name="kvfold", cls=Commands, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def options(
    version: Annotated[bool, typer.Option(VERSION, help="Print the version, and nothing else.")] = False,
) -> None:
    """Keep an LLM's KV cache folded to 2-4 bits a value, and let attention read it folded."""
    # `kvfold.cli.errors.run` prints the version, before anything is imported.


for name in COMMANDS:
    app.command(name)(described(name))
