"""What the command line says when something goes wrong, and with which exit status it ends."""

import logging
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from rich.console import Console
from rich.text import Text
from typer import Abort

TRACEBACK = "KVFOLD_TRACEBACK"
"""Set to anything, this environment variable shows tracebacks."""
VERSION = "--version"
FAILED = 1
PACKAGE = Path(__file__).parents[1]
LIBRARIES = ("transformers", "tokenizers", "jinja2", "mlx_lm", "lm_eval", "datasets", "torchao")
"""Packages that run what is a model's own: its code, its settings, its chat template."""


def run(arguments: Sequence[str]) -> int:
    """The command line; its exit status."""
    for stream in (sys.stdout, sys.stderr):  # what a terminal has no letters for is spelled, and is no error
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        _end_by_exceptions()
        if sys.stdout is None:
            raise OSError("standard output is closed, so nobody would see an answer")
        status = _run(arguments or ["--help"])
        sys.stdout.flush()  # a full disk is told here, and not after the end
        return status
    except (KeyboardInterrupt, Abort):
        raise KeyboardInterrupt from None
    except Exception as error:
        if _was_interrupted(error):
            raise KeyboardInterrupt from None
        if os.environ.get(TRACEBACK):
            traceback.print_exc()
        say(told(error))
        _drop_output()
        return int(getattr(error, "exit_code", FAILED))


def _end_by_exceptions() -> None:
    """Let requests to end come as exceptions, so that files that are half written go."""

    def end(number: int, frame: object) -> None:
        sys.exit(128 + number)

    if threading.current_thread() is threading.main_thread():
        for name in ("SIGTERM", "SIGHUP"):
            if hasattr(signal, name) and signal.getsignal(getattr(signal, name)) is signal.SIG_DFL:
                signal.signal(getattr(signal, name), end)


def _was_interrupted(error: BaseException | None) -> bool:
    """Whether an error is what a library made of Ctrl-C, as transformers does while it imports."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return True
        error = error.__cause__ or error.__context__
    return False


def _drop_output() -> None:
    """Let go of output that cannot be written: Python would try again at its end, and print a traceback."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())


def _run(arguments: Sequence[str]) -> int:
    if list(arguments[:1]) == [VERSION]:
        print(f"kvfold {version('kvfold')}")
        return 0
    from kvfold.cli.app import app

    logging.basicConfig(format="%(message)s", level=logging.WARNING, stream=sys.stderr)
    logging.getLogger("kvfold").setLevel(logging.INFO)
    warnings.filterwarnings("ignore", module="transformers")
    return app(list(arguments), prog_name="kvfold", standalone_mode=False) or 0


def told(error: Exception) -> str:
    """One line about an error: what is wrong, if the user can mend it, or that kvfold is at fault."""
    if hasattr(error, "format_message"):  # of the parser: the arguments are not understood
        context = getattr(error, "ctx", None)
        more = f" (try {context.command_path} --help)" if context is not None else ""
        return error.format_message() + more
    if isinstance(error, MemoryError) or _ran_out_of_memory(error):
        return f"there is not enough memory for this: {error or 'take less of what grows with it, such as tokens'}"
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{str(error.filename)!r}: {error.strerror}"
    if isinstance(error, OSError):
        return error.strerror or str(error)
    # kvfold raises ValueError for what is given to it, and an import fails where something is not installed.
    if isinstance(error, ValueError | ImportError) and str(error):
        return str(error)
    if library := _raised_by(error):
        return f"{library} failed on this model or input: {type(error).__name__}: {error}"
    return (
        f"kvfold is at fault, not what you gave it: {type(error).__name__}: {error} ({_place(error)}); with "
        f"{TRACEBACK}=1 before the command it shows where, for a report"
    )


def _ran_out_of_memory(error: Exception) -> bool:
    """Whether it is torch's way to say so."""
    return isinstance(error, RuntimeError) and any(
        words in str(error) for words in ("can't allocate memory", "out of memory", "not enough memory")
    )


def _raised_by(error: Exception) -> str:
    """The one of `LIBRARIES` in whose code, or below it, an error arose; "" if it was in kvfold's, or elsewhere."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if Path(frame.filename).is_relative_to(PACKAGE):
            return ""
        if frame.filename == "<template>":  # a model's chat template, as jinja2 names its code
            return "jinja2"
        for name in LIBRARIES:
            if name in Path(frame.filename).parts:
                return name
    return ""


def _place(error: Exception) -> str:
    """The last line of kvfold's own that the error came through."""
    frames = [each for each in traceback.extract_tb(error.__traceback__) if Path(each.filename).is_relative_to(PACKAGE)]
    return f"{Path(frames[-1].filename).relative_to(PACKAGE)}:{frames[-1].lineno}" if frames else "before kvfold's code"


def say(message: str) -> None:
    """One line on stderr."""
    words = Text.assemble(("error:", "bold red"), " ", " ".join(message.split()))
    Console(stderr=True).print(words, soft_wrap=True)
