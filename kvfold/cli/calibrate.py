"""`kvfold calibrate`: measure a model's keys and queries once, for all prompts."""

import re
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from kvfold.cache.budgets import budgeted
from kvfold.cache.calibration import LOSS_BITS, SHORTEST, Calibration
from kvfold.cache.files.paths import check_output
from kvfold.cache.policy import Policy
from kvfold.cli.options import Dtype, Model, TextFile, Weights, parse_dtype, text_of, token_progress
from kvfold.cli.output import Json, print_json, to_stdout
from kvfold.evaluate import text_passages
from kvfold.evaluate.quality import versions
from kvfold.formats.numbers import LARGEST
from kvfold.integrations.models import load_model, sources_of
from kvfold.integrations.text import text_sha256
from kvfold.integrations.transformers import calibrate as measure
from kvfold.integrations.transformers import measure_losses, measure_queries
from kvfold.integrations.transformers.losses import FEWEST, TAIL

SHOWN = ("kvfold-4", "kvfold-3", "kvfold-2")
"""Formats whose bits are told."""


def calibrate(
    model: Model = "smollm2",
    out: Annotated[
        Path | None,
        typer.Option(help="Where to write; by default calibration.safetensors, or queries.tria with --eviction."),
    ] = None,
    eviction: Annotated[
        bool, typer.Option("--eviction", help="Measure queries before RoPE instead, for TriAttention: a TRIA file.")
    ] = False,
    text: TextFile = None,
    passage: Annotated[
        int, typer.Option(min=SHORTEST, max=LARGEST, help=f"Tokens of each passage; {FEWEST} or more for budgets.")
    ] = 1_024,
    passages: Annotated[
        int, typer.Option(min=1, max=LARGEST, help="How many passages, spread evenly over the text.")
    ] = 4,
    budgets: Annotated[
        bool, typer.Option(help="Also measure what folding each layer costs, two short passes a layer and passage.")
    ] = True,
    dtype: Dtype = None,
    weights: Weights = None,
    as_json: Json = False,
) -> None:
    """Measure a model once, for kvfold-4, kvfold-3 and kvfold-2: which channels of keys its queries look at, and what
    folding the keys or values of each layer costs. And for oscar-4 and oscar-2: by which directions they rotate.

    Or, with --eviction, what queries are like before RoPE, for a cache that forgets tokens.

    By the costs, layers get bits of their own, with the mean that the format names; that lowers SmolLM2's divergence
    by a third. Without a calibration, each sequence's first 256 tokens tell channels and costs about as well, but
    nothing folds before they are there. With one, folding starts with the first page, and all sequences fold alike.
    With --no-budgets costs are not measured, and all layers have the bits that the format names.

    kvfold calibrate --model FOLDER --out model.safetensors

    kvfold generate --model FOLDER --calibration model.safetensors --prompt "Why is the sky blue?"

    kvfold calibrate --model FOLDER --eviction --out model.tria

    kvfold generate --model FOLDER --eviction model.tria --budget 2048 --file long.txt --prompt "What of it matters?"
    """
    held_in = parse_dtype(dtype)
    words = text_of(text)
    text_sha = text_sha256(words)
    out = out or Path("queries.tria" if eviction else "calibration.safetensors")
    check_output(out, "out", (text, *sources_of(model)))
    if budgets and not eviction and passage < FEWEST:
        raise ValueError(
            f"passage = {passage}: costs are measured on {FEWEST} tokens or more; give that, or --no-budgets"
        )
    network, tokenizer = load_model(model, held_in, weights)
    parts = text_passages(tokenizer, words, passage, passages)
    tokens = sum(part.shape[1] for part in parts)
    with token_progress() as progress:
        read = partial(progress.advance, progress.add_task("reading", total=tokens))
        if eviction:
            queries = measure_queries(network, parts, progress=read)
            queries.save(out)
            layers, rows = sum(map(queries.measured, range(queries.layers))), []
        else:
            result = measure(network, parts, about={"text_sha": text_sha}, progress=read)
            if budgets:
                passes = progress.add_task("folding one layer at a time", total=None)
                result = measure_losses(
                    network, parts, result,
                    progress=lambda done, total: progress.update(passes, completed=done * TAIL, total=total * TAIL),
                )  # fmt: skip
            result.save(out)
            layers = len(result.layers)
            rows = _rows(result, network.config.get_text_config(decoder=True).num_hidden_layers)
    if as_json:
        about = {"model": model, "out": str(out), "layers": layers, "tokens": tokens, "text_sha": text_sha}
        return print_json(about | {"losses": rows, "versions": versions()})
    if rows:
        _print(rows)
    Console(stderr=True).print(f"{out}: {layers} layers, {tokens} tokens", highlight=False, soft_wrap=True)


def _rows(calibration: Calibration, num_layers: int) -> list[dict[str, Any]]:
    """Each layer's losses, and its formats by them."""
    policies = {name: budgeted(Policy(name), calibration, num_layers) for name in SHOWN}
    return [
        {"layer": layer, "kl": [loss.kl for loss in losses]}
        | {name: policy.format_of(layer, num_layers) for name, policy in policies.items()}
        for layer, losses in calibration.losses.items()
    ]


def _print(rows: list[dict[str, Any]]) -> None:
    table = Table(title=f"KL with one layer's keys, or values, in {LOSS_BITS} bits; and the bits that both get")
    for column in ("layer", "keys", "values", *SHOWN):
        table.add_column(column, justify="right")
    for row in rows:
        bits = [":".join((re.findall(r"-(\d)", row[name]) * 2)[: len(row["kl"])]) for name in SHOWN]
        kl = [f"{each:.5f}" for each in row["kl"]] + [""]
        table.add_row(str(row["layer"]), *kl[:2], *bits)
    to_stdout().print(table)
