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


def calibrate(
    model: Model = "smollm2",
    out: Annotated[Path, typer.Option(help="Where to write, a safetensors file.")] = Path("calibration.safetensors"),
    text: Annotated[
        Path | None, typer.Option(help="A UTF-8 text file; by default the language reference in Python's library.")
    ] = None,
    passage: Annotated[int, typer.Option(min=64, help="Tokens of each passage.")] = 1_024,
    passages: Annotated[int, typer.Option(min=1, help="How many passages, spread evenly over the text.")] = 4,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; by default the model's.")] = None,
) -> None:
    """Measure which channels of a model's keys its queries look at, for formats that are fitted (kvfold-4, 3, 2).

    Without a calibration these formats go by the first 256 tokens of each sequence, which stay dense until then; that
    is about as good. A calibration lets folding start with the first page, and makes all sequences fold alike.

    kvfold calibrate --model FOLDER --out model.safetensors

    kvfold generate --model FOLDER --calibration model.safetensors --prompt "Why is the sky blue?"
    """
    weights = parse_dtype(dtype)
    words = read_text(text)
    if out.is_dir() or not out.parent.is_dir():
        raise ValueError(f"out = {str(out)!r}: give the name of a file in a folder that exists")
    network, tokenizer = load_model(model, weights)
    parts = split_passages(tokenizer(words, return_tensors="pt").input_ids, passage, passages)
    with token_progress() as progress:
        task = progress.add_task("reading", total=sum(part.shape[1] for part in parts))
        result = measure(
            network, parts, about={"text_sha": text_sha256(words)}, progress=lambda n: progress.advance(task, n)
        )
    result.save(out)
    Console(stderr=True).print(f"{out}: {len(result.layers)} layers, {result.about['tokens']} tokens", highlight=False)
