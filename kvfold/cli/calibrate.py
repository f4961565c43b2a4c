"""`kvfold calibrate`: measure a model's keys and queries once, for all prompts."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kvfold.cli.options import Model, parse_dtype, read_text, token_progress
from kvfold.evaluate import split_passages
from kvfold.integrations.models import load_model
from kvfold.integrations.text import text_sha256
from kvfold.integrations.transformers import calibrate as measure
from kvfold.integrations.transformers import measure_queries


def calibrate(
    model: Model = "smollm2",
    out: Annotated[
        Path | None,
        typer.Option(help="Where to write; by default calibration.safetensors, or queries.tria with --eviction."),
    ] = None,
    eviction: Annotated[
        bool, typer.Option("--eviction", help="Measure queries before RoPE instead, for TriAttention: a TRIA file.")
    ] = False,
    text: Annotated[
        Path | None, typer.Option(help="A UTF-8 text file; by default the language reference in Python's library.")
    ] = None,
    passage: Annotated[int, typer.Option(min=64, help="Tokens of each passage.")] = 1_024,
    passages: Annotated[int, typer.Option(min=1, help="How many passages, spread evenly over the text.")] = 4,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; by default the model's.")] = None,
) -> None:
    """Measure which channels of a model's keys its queries look at, for formats that are fitted (kvfold-4, 3, 2).

    Or, with --eviction, what queries are like before RoPE, for a cache that forgets tokens.

    Without a calibration these formats go by the first 256 tokens of each sequence, which stay dense until then; that
    is about as good. A calibration lets folding start with the first page, and makes all sequences fold alike.

    kvfold calibrate --model FOLDER --out model.safetensors

    kvfold generate --model FOLDER --calibration model.safetensors --prompt "Why is the sky blue?"

    kvfold calibrate --model FOLDER --eviction --out model.tria

    kvfold generate --model FOLDER --eviction model.tria --budget 2048 --file long.txt --prompt "What of it matters?"
    """
    weights = parse_dtype(dtype)
    words = read_text(text)
    out = out or Path("queries.tria" if eviction else "calibration.safetensors")
    if out.is_dir() or not out.parent.is_dir():
        raise ValueError(f"out = {str(out)!r}: give the name of a file in a folder that exists")
    network, tokenizer = load_model(model, weights)
    parts = split_passages(tokenizer(words, return_tensors="pt").input_ids, passage, passages)
    with token_progress() as progress:
        task = progress.add_task("reading", total=sum(part.shape[1] for part in parts))

        def read(tokens: int) -> None:
            progress.advance(task, tokens)

        if eviction:
            queries = measure_queries(network, parts, progress=read)
            queries.save(out)
            layers = sum(map(queries.measured, range(queries.layers)))
        else:
            result = measure(network, parts, about={"text_sha": text_sha256(words)}, progress=read)
            result.save(out)
            layers = len(result.layers)
    tokens = sum(part.shape[1] for part in parts)
    Console(stderr=True).print(f"{out}: {layers} layers, {tokens} tokens", highlight=False, soft_wrap=True)
