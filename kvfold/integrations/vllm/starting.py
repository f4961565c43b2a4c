"""What is known of an engine before it starts, which takes minutes and prints hundreds of lines."""

import logging
from pathlib import Path

from kvfold.cache.calibration import Calibration
from kvfold.cache.shape import LayerShape
from kvfold.eviction import TriAttention
from kvfold.formats import get_formats
from kvfold.integrations.models import load_config
from kvfold.integrations.transformers.evicting import tri_attention_for
from kvfold.integrations.transformers.shapes import layer_shapes
from kvfold.integrations.vllm.options import FEWEST, Options
from kvfold.integrations.vllm.words import Words

logger = logging.getLogger("kvfold")

LEAST = 2**28
"""Bytes below which a cache is of no use."""
SHARE = 0.5
"""Of the memory that is free beside the weights. Activations, and all else that runs here, need some, too."""
TAILS = 1 / 8
"""Of the cache's memory, for unfinished pages, unless the user says how many sequences run at a time."""
FEWEST_SEQUENCES, MOST = 4, 256


def check_early(path: Path | None, options: Options, words: Words) -> None:
    """Raise what an engine of this model would raise after minutes; `path` is None if the model is not here yet."""
    shapes = () if path is None else _shapes_of(path)
    layers = len(shapes)
    if options.eviction is not None:
        policy = options.policy()
        if path is not None and layers and isinstance(policy, TriAttention):
            tri_attention_for(policy, load_config(path), shapes, [i for i, shape in enumerate(shapes) if shape.folds])
    if options.calibration is not None:
        calibration = Calibration.load(options.calibration)
        if layers:
            Calibration.of(calibration, None, layers)
    else:
        for option in ("--max-num-batched-tokens", "--max-model-len"):
            tokens = words.number(option)
            least = FEWEST + (option == "--max-model-len")
            if tokens is not None and tokens < least and _fits(options):
                raise ValueError(
                    f"{option} {tokens}: the engine fits {options.format} to a text of {FEWEST} tokens or more when it "
                    f"starts: give at least {least}, or a --calibration"
                )
    if (words.number("--pipeline-parallel-size") or 1) > 1 and words.given("--enforce-eager"):
        raise ValueError(
            "--enforce-eager with --pipeline-parallel-size: on CPUs, vLLM's stages then die at the first request; "
            "leave --enforce-eager out"
        )


def memory_for_cache(path: Path | None, words: Words) -> int:
    """Bytes for each worker's cache: a share of what is free beside the weights.

    vLLM's own default is .92 of the machine's memory, whatever else uses it. Raises ValueError if too little is left.
    """
    import psutil

    free, workers = psutil.virtual_memory().available, words.workers()
    files = [] if path is None else path.glob("*.safetensors")
    weights = sum(file.stat().st_size for file in files) * (words.number("--data-parallel-size") or 1)
    size = int(SHARE * (free - weights) / workers)
    if size < LEAST:
        raise ValueError(
            f"of {free / 2**30:.1f} GiB that are free here, the weights take {weights / 2**30:.1f}, which leaves too "
            "little for a cache: free some, or give --kv-cache-memory-bytes"
        )
    logger.warning(
        "the cache gets %.1f GiB%s, half of the memory that is free beside the weights; --kv-cache-memory-bytes says "
        "another size", size / 2**30, "" if workers == 1 else f" in each of {workers} workers",
    )  # fmt: skip
    return size


def sequences_for(path: Path | None, options: Options, words: Words, memory: int | None) -> int:
    """How many sequences to run at a time: their unfinished pages take at most `TAILS` of the cache's memory.

    `MOST` if nothing is known of the memory or the model's layers.
    """
    shapes = () if path is None else _shapes_of(path)
    workers = words.number("--tensor-parallel-size") or 1
    itemsize = 4 if words.value("--dtype") in ("float32", "float") else 2
    drafts = int(words.given("--speculative-config"))
    each = sum(
        options.tail_bytes(shape.key_dim, max(1, shape.kv_heads // workers), itemsize, drafts)
        for shape in shapes
        if shape.kind == "full" and shape.is_known
    ) // (words.number("--pipeline-parallel-size") or 1)
    return MOST if memory is None or not each else min(MOST, max(FEWEST_SEQUENCES, int(TAILS * memory) // each))


def _fits(options: Options) -> bool:
    """Whether formats are fitted to statistics."""
    pair = get_formats(options.format, 64, 64)
    return bool(pair.awaits_fit or pair.needs_calibration)


def _shapes_of(path: Path) -> tuple[LayerShape, ...]:
    """What a folder's model has as layers; nothing if vLLM reads its config and transformers does not."""
    try:
        return layer_shapes(load_config(path))
    except (ValueError, OSError):
        return ()
