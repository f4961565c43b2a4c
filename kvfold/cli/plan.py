"""`kvfold plan`: what fits into a memory, before anything runs."""

import re
from dataclasses import asdict
from pathlib import Path
from reprlib import repr as short
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from kvfold.cli.options import Json, listed_formats, print_json
from kvfold.evaluate import plots
from kvfold.formats.numbers import LARGEST, MOST_OF_A_MODEL, whole
from kvfold.integrations.models import read_config
from kvfold.planning import DENSE_DTYPES, held_bytes, model_layers, plan, resolve_head_dim

UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


def plan_command(
    model: Annotated[
        str | None, typer.Option(help="smollm2, or a folder with a config.json or one GGUF file; or give numbers.")
    ] = None,
    layers: Annotated[int | None, typer.Option(help="Layers, if no model is named.")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="KV heads of a layer.")] = None,
    head_dim: Annotated[int | None, typer.Option(help="Coordinates of a key or value of one head.")] = None,
    memory: Annotated[str, typer.Option(help="What the cache may take: 24GB, 512MiB, …")] = "8GB",
    context: Annotated[int, typer.Option(help="Tokens of each user's sequence.")] = 32_768,
    formats: Annotated[str, typer.Option(help="Formats, keys:values, or dense dtypes, separated by commas.")] = (
        "bfloat16,float8,kvfold-4,turboquant-4,turboquant-3"
    ),
    plot: Annotated[Path | None, typer.Option(help="Draw bytes against context into this .png, .svg or .pdf.")] = None,
    as_json: Json = False,
) -> None:
    """Project a cache: bytes a token, longest context, users at a given context.

    Held bytes count pages, scales, page metadata, dense windows and tables, as `FoldedCache.held_bytes` would.
    Sliding-window layers hold their window, dense in 16 bits; latent attention holds its latents, folded once.

    kvfold plan --model ./my-model --memory 24GB --context 32768

    kvfold plan --layers 80 --kv-heads 8 --head-dim 128 --memory 40GB
    """
    plots.check(plot, (model,))
    names = listed_formats(formats, DENSE_DTYPES)
    room = _bytes(memory)
    whole("context", context, 1)
    config = _config(model, layers, kv_heads, head_dim)
    shapes = model_layers(config)
    rows = plan(shapes, names, room, context)
    if plot is not None:
        contexts = [2**n for n in range(10, 18)]
        held = {name: [held_bytes(shapes, name, tokens) for tokens in contexts] for name in names}
        plots.save(plots.memory_by_context(contexts, held, room), plot)
    kinds = {kind: sum(shape.kind == kind for shape in shapes) for kind in ("full", "sliding", "latent", "none")}
    latent = kinds["latent"] > 0
    evidence = () if latent else resolve_head_dim(config).evidence
    if as_json:
        about = {"model": model, "memory": room, "context": context, "layers": kinds, "head_dim": evidence}
        print_json(about | {"rows": [asdict(row) for row in rows]})
        return
    console = Console()
    counted = ", ".join(f"{count} {kind}" for kind, count in kinds.items() if count)
    console.print(f"layers: {counted}", highlight=False)
    if evidence:
        console.print(f"head_dim: {'; '.join(evidence)}", highlight=False)
    if kinds["full"] == 0:
        console.print("no layer of this model folds: all formats hold the same", highlight=False)
    table = Table(title=f"{memory} of cache, {context:,} tokens each")
    for column in ("format", "bytes/token", "one sequence", "longest context", "users"):
        table.add_column(column, justify="left" if column == "format" else "right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.format, f"{row.bytes_per_token:,.0f}", f"{row.held_bytes / 1e6:,.1f} MB", f"{row.longest_context:,}",
            f"{row.users:,}",
        )  # fmt: skip
    console.print(table)


def _config(model: str | None, layers: int | None, kv_heads: int | None, head_dim: int | None) -> dict[str, Any]:
    numbers = {"layers": layers, "kv_heads": kv_heads, "head_dim": head_dim}
    if model is not None:
        if any(number is not None for number in numbers.values()):
            raise ValueError("give --model, or --layers, --kv-heads and --head-dim, not both")
        return read_config(model)
    for name, number in numbers.items():
        if number is None:
            raise ValueError(
                f"--{name.replace('_', '-')} is missing: give --model, or --layers, --kv-heads and --head-dim"
            )
        whole(name, number, 1, LARGEST if name == "head_dim" else MOST_OF_A_MODEL)
    return {
        "num_hidden_layers": layers, "num_attention_heads": kv_heads, "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
    }  # fmt: skip


def _bytes(amount: str) -> int:
    match = re.fullmatch(r"\s*([0-9]{0,18}\.?[0-9]{1,18})\s*([A-Za-z]*)\s*", amount)
    if match is None or match[2].upper() not in UNITS:
        units = "B, KB, MB, GB, TB, KiB, MiB, GiB, TiB"
        raise ValueError(f"memory = {short(amount)}: write a number and a unit ({units}), such as 24GB or 512MiB")
    room = int(float(match[1]) * UNITS[match[2].upper()])
    if not 1 <= room < 2**63:
        raise ValueError(f"memory = {amount!r} is {room} bytes: give at least 1, and less than 2**63")
    return room
