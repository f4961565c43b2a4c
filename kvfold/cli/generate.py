"""`kvfold generate`: answer a prompt with a folded cache."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from transformers import TextStreamer

from kvfold.cli.options import CalibrationFile, Json, Model, parse_dtype, token_progress
from kvfold.formats import DEFAULT, check_names
from kvfold.integrations.models import load_model
from kvfold.integrations.transformers import FoldedCache, attach
from kvfold.integrations.transformers.prompt import answer, prompt_ids, read_prompt


def generate(
    model: Model = "smollm2",
    format: Annotated[str, typer.Option(help="A format, or keys:values; see `kvfold formats`.")] = DEFAULT,
    prompt: Annotated[str | None, typer.Option(help="The prompt; after the file's text if both are given.")] = None,
    file: Annotated[Path | None, typer.Option(help="A UTF-8 text file to put before the prompt.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="When to stop, if the model does not.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 decodes greedily; above, samples.")] = 0.0,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; by default the model's.")] = None,
    calibration: CalibrationFile = None,
    raw: Annotated[bool, typer.Option(help="Do not put the prompt into the model's chat template.")] = False,
    as_json: Json = False,
) -> None:
    """Answer a prompt, a document, or a document and a question, with the cache folded.

    kvfold generate --prompt "Why is the sky blue?"

    kvfold generate --file report.txt --prompt "Summarise this." --format kvfold-4:turboquant-3
    """
    check_names(format)
    weights = parse_dtype(dtype)
    parts = []
    if file is not None:
        if not file.is_file():
            raise FileNotFoundError(f"file = {str(file)!r}: there is no such file")
        parts.append(file.read_text(encoding="utf-8"))
    if prompt is not None:
        parts.append(prompt)
    if not "".join(parts).strip():
        raise ValueError("nothing to answer: give --prompt, --file, or both")

    network, tokenizer = load_model(model, weights)
    ids = prompt_ids(tokenizer, "\n\n".join(parts), raw)
    attach(network)
    cache = FoldedCache(network.config, format, calibration=calibration)
    with token_progress() as progress:
        task = progress.add_task("reading the prompt", total=ids.shape[1] - 1)
        read_prompt(network, ids, cache, progress=lambda n: progress.advance(task, n))
    streamer = None if as_json else TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    said = answer(network, tokenizer, ids, cache, max_new_tokens, temperature, streamer)
    report = cache.report()
    if as_json:
        row = {
            "model": model, "format": format, "prompt_tokens": ids.shape[1], "text": said.text,
            "new_tokens": said.tokens, "tokens_per_second": said.tokens_per_second, **report.to_json(),
        }  # fmt: skip
        print(json.dumps(row, indent=2, ensure_ascii=False))
        return
    Console(stderr=True).print(
        f"[dim]{ids.shape[1]} prompt + {said.tokens} new tokens, {said.tokens_per_second:.1f} tok/s; cache holds "
        f"{report.held_bytes / 1e6:.2f} MB, {report.bits_per_value:.2f} bits a value, "
        f"{report.ratio_to_bf16:.2f}x smaller than bf16[/]",
        highlight=False,
    )
