"""`kvfold compare`: the same prompt through two executors."""

from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table

from kvfold.cli.options import Format, Model, TextFile, check_format, counted, text_of
from kvfold.cli.output import Json, print_json, to_stdout
from kvfold.evaluate.compare import COLUMNS, Executor, cells
from kvfold.evaluate.compare import compare as compare_executors
from kvfold.evaluate.passages import text_passages
from kvfold.evaluate.quality import versions
from kvfold.formats import DEFAULT
from kvfold.formats.numbers import LARGEST
from kvfold.integrations.models import load_model
from kvfold.integrations.text import text_sha256


def compare(
    a: Annotated[str, typer.Argument(help="An executor: dtype, device and backend between slashes.")] = "float32",
    b: Annotated[str, typer.Argument(help="Another.")] = "bfloat16",
    model: Model = "smollm2",
    format: Format = DEFAULT,
    text: TextFile = None,
    tokens: Annotated[int, typer.Option(min=2, max=LARGEST, help="Tokens of the text to read.")] = 1_024,
    generate: Annotated[int, typer.Option(min=1, max=LARGEST, help="Tokens to write greedily after it.")] = 64,
    as_json: Json = False,
) -> None:
    """Run one prompt through two executors and say where they part.

    Prints the share of equal codes in each layer, the difference of scales, the cosine of each layer's output, and the
    first different token of a greedy continuation.

    kvfold compare float32 bfloat16

    kvfold compare float32/reference float32

    kvfold compare float32/cpu float32/cuda --format turboquant-4
    """
    check_format(format)
    executors = (Executor.parse(a), Executor.parse(b))
    words = text_of(text)
    network, tokenizer = load_model(model, None)
    (ids,) = text_passages(tokenizer, words, tokens, 1)
    with counted("computing", 2 * (tokens + generate)) as done:
        result = compare_executors(network, ids, format, executors, generate=generate, progress=done)
    names = [str(executor) for executor in executors]
    if as_json:
        about = {
            "model": model, "text_sha": text_sha256(words), "format": format, "executors": names, "versions": versions()
        }  # fmt: skip
        return print_json(result.to_json(**about))
    console = to_stdout()
    table = Table(title=f"{model}, {format}: {names[0]} and {names[1]}, {tokens:,} tokens")
    for column in COLUMNS:
        table.add_column(column, justify="right")
    for row in result.layers:
        table.add_row(*cells(asdict(row)))
    console.print(table)
    if result.first_divergence is None:
        console.print(f"The continuations agree in all {generate} tokens.", highlight=False)
        return
    console.print(f"The continuations part at token {result.first_divergence}:", highlight=False)
    for name, written in zip(names, result.texts, strict=True):
        console.print(f"{name}: {tokenizer.decode(written)!r}", highlight=False, markup=False)
