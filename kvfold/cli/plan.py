"""`kvfold plan`: what fits into a memory, before anything runs."""

from dataclasses import asdict
from pathlib import Path
from reprlib import repr as short
from typing import Annotated

import torch
import typer
from rich.table import Table

from kvfold.cache.shape import KINDS, LayerShape
from kvfold.cli.options import DTYPES, Dtype, Sliding, listed_formats, parse_bytes, parse_dtype
from kvfold.cli.output import Json, print_json, to_stdout
from kvfold.evaluate import plots
from kvfold.formats.numbers import LARGEST, MOST_OF_A_MODEL, whole
from kvfold.integrations.models import load_config
from kvfold.integrations.transformers.shapes import config_of_each_layer, layer_shapes, resolve_head_dim
from kvfold.integrations.weights import WEIGHTS, refuse_quantized, weight_bytes
from kvfold.planning import DENSE_DTYPES, held_bytes, plan

WEIGHT_FILES = ("model*.safetensors", "*.safetensors", "pytorch_model*.bin", "*.gguf")
"""Files that hold a model's weights, the ones that transformers takes first."""


def plan_command(
    model: Annotated[
        str | None,
        typer.Option(help="smollm2, a folder with a config.json or one GGUF file, or a GGUF file; or give numbers."),
    ] = None,
    layers: Annotated[int | None, typer.Option(help="Layers, if no model is named.")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="KV heads of a layer.")] = None,
    head_dim: Annotated[int | None, typer.Option(help="Coordinates of a key or value of one head.")] = None,
    memory: Annotated[
        str, typer.Option(help="What the cache may take, with --weights the model, too: 24GB, 512MiB, …")
    ] = "8GB",
    weights: Annotated[
        str | None,
        typer.Option(
            help="Count the weights, too: a dtype, int8 (of --dtype), a file or folder of weights at its size, or an "
            "amount such as 4.9GB. --memory is then for weights and cache."
        ),
    ] = None,
    dtype: Dtype = None,
    context: Annotated[int, typer.Option(help="Tokens of each user's sequence.")] = 32_768,
    formats: Annotated[str, typer.Option(help="Formats, keys:values, or dense dtypes, separated by commas.")] = (
        "bfloat16,float8,kvfold-4,turboquant-4,turboquant-3"
    ),
    sliding: Sliding = False,
    plot: Annotated[Path | None, typer.Option(help="Draw bytes against context into this .png, .svg or .pdf.")] = None,
    as_json: Json = False,
) -> None:
    """Project a cache: bytes a token, longest context, users at a given context.

    Held bytes count pages, scales, page metadata, dense windows and tables, as `FoldedCache.held_bytes` would, but for
    states of linear attention, whose size is fixed. Which layers fold is asked of the cache itself. Sliding-window
    layers are dense unless --sliding is given; those that do not fold are dense in the dtype that the model runs in.
    Latent attention holds its latents, folded once.

    kvfold plan --model ./my-model --memory 24GB --context 32768

    kvfold plan --model ./my-model --memory 24GB --weights bfloat16

    kvfold plan --layers 80 --kv-heads 8 --head-dim 128 --memory 40GB
    """
    plots.check(plot, (model,))
    names = listed_formats(formats, DENSE_DTYPES)
    room = parse_bytes(memory)
    whole("context", context, 1)
    shapes, evidence, own = _layers(model, layers, kv_heads, head_dim)
    runs_in = parse_dtype(dtype) or own or torch.bfloat16
    taken = 0 if weights is None else _weights(weights, model, runs_in)
    whole_room, room = room, room - taken
    if room <= 0:
        raise ValueError(
            f"memory = {memory!r}, but the weights take {taken / 1e6:,.0f} MB ({weights}): nothing is left for a cache"
        )
    rows = plan(shapes, names, room, context, runs_in.itemsize, sliding)
    if plot is not None:
        contexts = [2**n for n in range(10, 18)]
        held = {name: [held_bytes(shapes, name, n, runs_in.itemsize, sliding) for n in contexts] for name in names}
        plots.save(plots.memory_by_context(contexts, held, room), plot)
    kinds = {kind: sum(shape.kind == kind for shape in shapes) for kind in KINDS}
    runs_as = str(runs_in).removeprefix("torch.")
    if as_json:
        about = {
            "model": model, "memory": whole_room, "weights": None if weights is None else taken, "for_caches": room,
            "context": context, "dtype": runs_as, "sliding": sliding, "layers": kinds,
        }  # fmt: skip
        return print_json(about | {"head_dim": evidence, "rows": [asdict(row) for row in rows]})
    console = to_stdout()
    counted = ", ".join(f"{count} {kind}" for kind, count in kinds.items() if count)
    console.print(f"layers: {counted}", highlight=False)
    if evidence:
        console.print(f"head_dim: {'; '.join(evidence)}", highlight=False)
    if (kinds["sliding"] and not sliding) or kinds["dense"]:
        console.print(f"layers that do not fold: {runs_as}", highlight=False)
    if not any(shape.may_fold(sliding) for shape in shapes):
        console.print("no layer of this model folds: all formats hold the same", highlight=False)
    left = memory if weights is None else f"{room / 1e6:,.0f} MB"
    if weights is not None:
        console.print(f"weights ({weights}): {taken / 1e6:,.0f} MB; for caches: {left}", highlight=False)
    table = Table(title=f"{left} of cache, {context:,} tokens each")
    for column in ("format", "bytes/token", "one sequence", "longest context", "users"):
        table.add_column(column, justify="left" if column == "format" else "right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.format, f"{row.bytes_per_token:,.0f}", f"{row.held_bytes / 1e6:,.1f} MB", f"{row.longest_context:,}",
            f"{row.users:,}",
        )  # fmt: skip
    console.print(table)


def _layers(
    model: str | None, layers: int | None, kv_heads: int | None, head_dim: int | None
) -> tuple[tuple[LayerShape, ...], tuple[str, ...], torch.dtype | None]:
    """Shapes of all layers, why head dimensions are believed, and the dtype that the model loads in."""
    numbers = {"layers": layers, "kv_heads": kv_heads, "head_dim": head_dim}
    if model is not None:
        if any(number is not None for number in numbers.values()):
            raise ValueError("give --model, or --layers, --kv-heads and --head-dim, not both")
        config = load_config(model)
        text, shapes = config.get_text_config(decoder=True), layer_shapes(config)
        own = zip(config_of_each_layer(text, len(shapes)), shapes, strict=True)
        asked = [each for each, shape in own if shape.is_known and shape.kind != "latent"]
        evidence = dict.fromkeys(line for each in asked for line in resolve_head_dim(each).evidence)
        return shapes, tuple(evidence), config.dtype or text.dtype
    for name, number in numbers.items():
        if number is None:
            raise ValueError(
                f"--{name.replace('_', '-')} is missing: give --model, or --layers, --kv-heads and --head-dim"
            )
        whole(name, number, 1, LARGEST if name == "head_dim" else MOST_OF_A_MODEL)
    assert layers is not None
    assert kv_heads is not None
    assert head_dim is not None
    return (LayerShape("full", kv_heads, head_dim, head_dim, heads=kv_heads),) * layers, (), None


def _weights(weights: str, model: str | None, dtype: torch.dtype) -> int:
    """Bytes of a model's weights, which a dtype, a kind, a file, a folder or an amount names."""
    if weights in (*DTYPES, *WEIGHTS):
        if model is None:
            raise ValueError(f"weights = {weights!r}: name the --model that has them, or give an amount such as 4.9GB")
        config = load_config(model)
        refuse_quantized(config, weights)
        return weight_bytes(config, DTYPES.get(weights, dtype), weights if weights in WEIGHTS else None)
    if weights and (path := Path(weights)).exists():
        return sum(file.stat().st_size for file in _files(path, weights))
    try:
        return parse_bytes(weights)
    except ValueError:
        kinds = ", ".join((*DTYPES, *WEIGHTS))
        raise ValueError(
            f"weights = {short(weights)}: give {kinds}, a file or folder of weights, or an amount such as 4.9GB. "
            "transformers unpacks GGUF files, so there a quantisation's name says nothing about memory"
        ) from None


def _files(path: Path, weights: str) -> list[Path]:
    """The files of a model's weights: of a folder, those of the first of `WEIGHT_FILES` that it has."""
    if path.is_file():
        if not any(path.match(kind) for kind in WEIGHT_FILES):
            raise ValueError(f"weights = {weights!r} is no file of weights ({', '.join(WEIGHT_FILES)})")
        return [path]
    for kind in WEIGHT_FILES:
        if files := [*path.glob(kind)]:
            if kind == "*.gguf" and len(files) > 1:
                raise ValueError(f"weights = {weights!r}: the folder holds {len(files)} GGUF files; name one")
            return files
    raise ValueError(f"weights = {weights!r}: the folder holds no {', '.join(WEIGHT_FILES)}")
