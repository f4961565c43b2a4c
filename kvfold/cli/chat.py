"""`kvfold chat`: a conversation in a terminal, its cache folded."""

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from kvfold.cache.calibration import Calibration
from kvfold.cache.policy import Policy
from kvfold.cli.errors import told
from kvfold.cli.options import (
    CalibrationFile,
    Dtype,
    Format,
    Model,
    Sliding,
    Weights,
    check_format,
    counted,
    parse_dtype,
)
from kvfold.formats import DEFAULT
from kvfold.formats.numbers import LARGEST
from kvfold.integrations.models import load_model
from kvfold.integrations.text import check_text
from kvfold.integrations.transformers import FoldedCache, attach
from kvfold.integrations.transformers.conversation import Conversation

COMMANDS = {
    "/save FILE": "write the conversation, and its folded cache to FILE.kv",
    "/load FILE": "go on with a conversation that was saved",
    "/forget": "begin anew",
    "/format NAME": "fold into another format from the next turn on; what was said is read again",
    "/help": "show this",
    "/exit": "end; so does the end of input (Ctrl-D). Ctrl-C stops an answer",
}


def chat(
    model: Model = "smollm2",
    format: Format = DEFAULT,
    system: Annotated[str | None, typer.Option(help="What the model is told before the conversation.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, max=LARGEST, help="Longest answer.")] = 512,
    temperature: Annotated[float, typer.Option(min=0.0, max=100.0, help="0 decodes greedily; above, samples.")] = 0.0,
    dtype: Dtype = None,
    weights: Weights = None,
    calibration: CalibrationFile = None,
    sliding: Sliding = False,
) -> None:
    """Talk with a model, its cache folded; after each answer comes what the cache holds, and how fast it was.

    Lines are read from the terminal, or from a file or program. /help lists what can be asked of the program itself.
    """
    check_format(format)
    held_in = parse_dtype(dtype)
    before = [] if system is None else [{"role": "system", "content": check_text(system, "system")}]
    measured = None if calibration is None else Calibration.load(calibration)
    network, tokenizer = load_model(model, held_in, weights)
    attach(network)

    def cache_in(format: str) -> FoldedCache:
        return FoldedCache(network.config, policy=Policy(format, sliding=sliding), calibration=measured)

    talk = Conversation(network, tokenizer, partial(cache_in, format), before)
    screen = Console(stderr=True)
    screen.print(f"[dim]{escape(model)}, {format}; /help lists commands[/]", highlight=False)
    for line in _lines(screen):
        try:
            if not line.startswith("/"):
                _answer(talk, line, max_new_tokens, temperature, screen)
                continue
            word, _, rest = line.partition(" ")
            if word == "/exit":
                return
            _obey(talk, word, rest.strip(), before, cache_in, screen)
        except KeyboardInterrupt:
            print()
        except (ValueError, OSError) as error:  # a slip ends no conversation
            screen.print(f"[bold red]error:[/] {escape(told(error))}", highlight=False, soft_wrap=True)


def _lines(screen: Console) -> Iterator[str]:
    """Lines that are not empty, until input ends."""
    with suppress(ImportError):  # not on every system
        import readline  # noqa: F401  (arrows and history)
    while True:
        try:
            line = input("> ") if sys.stdin.isatty() else next(sys.stdin)
        except (EOFError, StopIteration):
            return
        except KeyboardInterrupt:
            screen.print("[dim]/exit ends[/]")
            continue
        if line.strip():
            yield line.strip()


def _answer(talk: Conversation, text: str, max_new_tokens: int, temperature: float, screen: Console) -> None:
    """One turn, and a line about what the cache holds then."""
    say, speed = partial(print, end="", flush=True), ""
    try:
        said = talk.ask(check_text(text, "text"), max_new_tokens, temperature, say, partial(counted, "reading"))
        speed = f" · {said.tokens_per_second:.1f} tok/s"
    finally:
        print(flush=True)
        if tokens := talk.cache.get_seq_length():
            report = talk.cache.report()
            screen.print(
                f"[dim]{tokens:,} tokens held · {report.held_bytes / 1e6:.1f} MB, {2 * report.values / 1e6:.1f} "
                f"MB in bf16{speed}[/]",
                highlight=False,
            )


def _obey(
    talk: Conversation, word: str, rest: str, before: list[dict[str, str]], cache_in: Callable[[str], FoldedCache],
    screen: Console,
) -> None:  # fmt: skip
    """One of `COMMANDS`."""
    if word == "/help":
        for command, what in COMMANDS.items():
            screen.print(f"{command:14} [dim]{what}[/]", highlight=False, soft_wrap=True)
        return
    if word in ("/save", "/load", "/format") and not rest:
        raise ValueError(f"{word}: name a {'format' if word == '/format' else 'file'} after it")
    if word == "/save":
        talk.save(Path(rest))
        did = f"saved {rest}"
    elif word == "/load":
        talk.load(Path(rest))
        did = f"{len(talk.messages)} messages, {talk.cache.get_seq_length():,} tokens held"
    elif word == "/forget":
        talk.forget(before)
        did = "forgotten"
    elif word == "/format":
        check_format(rest)
        talk.make_cache = partial(cache_in, rest)
        talk.forget(talk.messages)
        did = f"{rest} from now on"
    else:
        raise ValueError(f"{word}: choose one of {', '.join(COMMANDS)}")
    screen.print(f"[dim]{escape(did)}[/]", highlight=False)
