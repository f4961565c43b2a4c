"""Every decoder of transformers with a FoldedCache, beside its own dense cache: the table of docs/models.md.

Each is the smallest random model of its kind, in a process of its own.

    python benchmarks/architectures.py [--only llama,gemma2] [--jobs 2] [--json FILE] [--docs docs/models.md]
"""

import argparse
import copy
import inspect
import json
import logging
import multiprocessing
import multiprocessing.connection
import os
import resource
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.progress import Progress
from rich.table import Table
from tiny_models import MODEL_TYPES, tiny_model
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

import kvfold
from kvfold import FoldedCache
from kvfold.cache.shape import KINDS
from kvfold.cli.output import to_stdout
from kvfold.integrations.transformers.layer import FoldedLayer
from kvfold.integrations.transformers.shapes import layer_shapes

TOKENS = 320
CHUNKS = [200, 1, 1, 70, 48]
PADDING = 37
FINE, COARSE, LOSSLESS = "turboquant-8", "kvfold-4", "float16"
ROUNDING = 1e-4
CPU_SECONDS = 180
"""What one architecture may take."""
LIMITS = {LOSSLESS: 0.02, FINE: 0.3, COARSE: 0.8}
"""Relative errors of logits that a format explains in a model as sharp as these are."""


@dataclass
class Row:
    """What one architecture did."""

    model_type: str
    model: str = ""
    verdict: str = ""
    attached: bool | None = None
    layers: dict[str, int] = field(default_factory=dict)
    plan: dict[str, int] | str = ""
    plan_agrees: bool | None = None
    past: float = float("nan")
    errors: dict[str, float] = field(default_factory=dict)
    bits: float = float("nan")
    wrong: list[str] = field(default_factory=list)
    crashed: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def reads_folded(self) -> bool:
        """Whether it has read folded pages, and unfolded none. (What unfolds reads a prompt's own tokens dense.)"""
        return bool(self.attached) and not any("unfold" in message for message in self.said)


class Said(logging.Handler):
    """Collects what kvfold logs."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if message not in self.messages:
            self.messages.append(message)


def where(error: BaseException) -> str:
    """The error, and the line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    frame = frames[-1]
    path = frame.filename.split("site-packages/")[-1]
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]} ({path}:{frame.lineno})"


def relative(a: Tensor, b: Tensor) -> float:
    """|a - b| / |b|."""
    return float((a - b).double().norm() / b.double().norm().clamp_min(1e-300))


class Model:
    """A tiny model and how it is called."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        parameters = inspect.signature(model.forward).parameters
        self.cache_name = next((name for name in ("cache", "past_key_values") if name in parameters), None)
        self.keeps = "logits_to_keep" in parameters

    def __call__(self, ids: Tensor, cache: Cache | None = None, **options: Any) -> Tensor:
        if cache is not None:
            options |= {self.cache_name or "past_key_values": cache, "use_cache": True}
        elif "use_cache" in inspect.signature(self.model.forward).parameters:
            options["use_cache"] = False
        logits: Tensor = self.model(ids, **options).logits
        return logits

    def chunked(self, ids: Tensor, cache: Cache, mask: Tensor | None = None) -> Tensor:
        parts, end = [], 0
        for part in ids.split(CHUNKS, dim=1):
            end += part.shape[1]
            options = {} if mask is None else {"attention_mask": mask[:, :end]}
            parts.append(self(part, cache, **options))
        return torch.cat(parts, dim=1)

    def dense(self) -> DynamicCache:
        return DynamicCache(config=self.model.config)

    def folded(self, format: str = FINE) -> FoldedCache:
        return FoldedCache(self.model.config, format)


def ids_of(rows: int, tokens: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 250, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def padded_batch(tokens: int = TOKENS) -> tuple[Tensor, Tensor]:
    ids, mask = ids_of(2, tokens, 1), torch.ones(2, tokens, dtype=torch.long)
    ids[1, :PADDING], mask[1, :PADDING] = 0, 0
    return ids, mask


def check(model_type: str, make: Callable[..., PreTrainedModel] = tiny_model) -> Row:
    """Everything about one architecture."""
    row = Row(model_type)
    start = time.process_time()
    heard = Said()
    row.said = heard.messages
    logging.getLogger("kvfold").addHandler(heard)
    try:
        _check(row, make)
    except _Done:
        pass
    except Exception as error:
        row.crashed.append("the checks: " + where(error))
    finally:
        logging.getLogger("kvfold").removeHandler(heard)
    if not row.verdict and row.layers and not row.crashed:
        if not row.layers.get("folded") and not any("no layer" in message for message in row.said):
            row.wrong.append("nothing folds, and nothing is said")
        elif row.layers.get("folded") and row.attached is False and not any("unfold" in text for text in row.said):
            row.wrong.append("it is unfolded at each read, and nothing is said")
    row.verdict = row.verdict or _verdict(row)
    row.seconds = round(time.process_time() - start, 1)
    return row


class _Done(Exception):
    """Nothing more can be checked."""


def _build(row: Row, make: Callable[..., PreTrainedModel]) -> Model:
    try:
        model = Model(make(row.model_type))
        model(ids_of(1, 40))
    except Exception as error:
        row.verdict = "not built"
        row.notes.append(where(error))
        raise _Done from error
    row.model = type(model.model).__name__
    return model


def _check(row: Row, make: Callable[..., PreTrainedModel]) -> None:
    model = _build(row, make)
    ids = ids_of(1, TOKENS)
    batch, mask = padded_batch()
    if model.cache_name is None:
        row.notes.append("its forward takes no key-value cache")

    # What it computes before anything of kvfold touches it
    def outcomes() -> dict[str, Tensor | str]:
        cases: dict[str, Callable[[], Tensor]] = {"no cache": lambda: model(ids)}
        cases["no cache, padded"] = lambda: model(batch, attention_mask=mask)
        if model.cache_name is not None:
            cases["whole"] = lambda: model(ids, model.dense())
            cases["chunks"] = lambda: model.chunked(ids, model.dense())
            cases["padded"] = lambda: model(batch, model.dense(), attention_mask=mask)
            cases["padded chunks"] = lambda: model.chunked(batch, model.dense(), mask)
        if model.keeps and model.cache_name is not None:
            cases["logits_to_keep=3"] = lambda: model(ids, model.dense(), logits_to_keep=3)
        return {name: _tried(case) for name, case in cases.items()}

    before = outcomes()
    for name, x in before.items():
        if isinstance(x, Tensor) and not x[_shown(name, x)].isfinite().all():
            before[name] = "gives NaN or infinity"
    steady = {name for name, x in before.items() if isinstance(x, Tensor)}
    if isinstance(before["no cache"], Tensor) and not _same(before["no cache"], model(ids)):
        steady.clear()
    for name, x in before.items():
        if isinstance(x, str):
            row.notes.append(f"the model itself, {name}: {x}")
        elif name not in steady:
            row.notes.append(f"the model itself is not reproducible: {name}")

    try:
        row.attached = kvfold.attach(model.model)
    except Exception as error:
        row.crashed.append("attach: " + where(error))
        return
    for name, x in outcomes().items():
        if name not in steady:
            continue
        if isinstance(x, str):
            row.crashed.append(f"attached, dense cache, {name}: {x}")
        elif not _same(before[name], x):
            error = relative(x[_shown(name, x)], before[name][_shown(name, x)])
            row.errors[f"attach alone, {name}"] = error
            row.wrong.append(f"attach alone changes {name} by {error:.2g}")

    # The cache
    try:
        cache = model.folded(FINE)
    except ValueError as error:
        row.verdict = "refused"
        row.notes.append(where(error))
        return
    except Exception as error:
        row.crashed.append("FoldedCache: " + where(error))
        return
    row.layers = dict(Counter(_kind(layer) for layer in cache.layers))
    try:
        plan = layer_shapes(model.model.config)
        kinds = {"full": "folded", "latent": "folded"}
        row.plan = dict(Counter(kinds.get(layer.kind, layer.kind) for layer in plan))
        if any(layer.kind not in KINDS for layer in plan):
            row.notes.append("no plan")  # `kvfold plan` names layers of the model's own and counts none
        else:
            row.plan_agrees = all(row.plan.get(kind, 0) == row.layers.get(kind, 0) for kind in ("folded", "sliding"))
    except Exception as error:
        row.plan, row.plan_agrees = where(error), False
    if model.cache_name is None:
        row.verdict = "no cache"
        return
    if isinstance(before["whole"], str):  # its own kind of cache fails, or is another
        problem = _tried_any(lambda: model(ids, cache))
        if problem is None:
            row.notes.append("not compared, as its own cache fails")
        else:
            row.verdict = "refused"
            row.notes.append(problem)
        return
    folds = any(isinstance(layer, FoldedLayer) for layer in cache.layers)
    # How much another past changes: an error counts against that
    other_past = torch.cat((ids_of(1, TOKENS - 32, 9), ids[:, -32:]), 1)
    row.past = relative(model(other_past)[:, -32:], model(ids)[:, -32:])

    def compare(name: str, limit: float, run: Callable[[], Tensor], against: Tensor | str | None) -> Tensor | None:
        if not isinstance(against, Tensor):
            return None
        x = _tried(run)
        if isinstance(x, str):
            row.crashed.append(f"{name}: {x}")
            return None
        shown = _shown(name, x)
        row.errors[name] = error = relative(x[shown], against[shown])
        if not error <= limit * min(row.past, 1):
            row.wrong.append(f"{name}: off by {error:.2g}")
        return x

    # Its own way to compute may part from itself in chunks, or in a batch: then so may it here.
    for format in (LOSSLESS, FINE, COARSE):
        cases = {
            "whole": lambda f=format: model(ids, model.folded(f)),
            "chunks": lambda f=format: model.chunked(ids, model.folded(f)),
            "padded": lambda f=format: model(batch, model.folded(f), attention_mask=mask),
            "padded chunks": lambda f=format: model.chunked(batch, model.folded(f), mask),
        }
        got = {name: compare(f"{format}, {name}", LIMITS[format], run, before[name]) for name, run in cases.items()}
        whole, chunks = got["whole"], got["chunks"]
        if row.reads_folded and folds and whole is not None and chunks is not None:
            own_parts = relative(before["chunks"], before["whole"])
            row.errors[f"{format}, chunks against whole"] = parted = relative(chunks, whole)
            if own_parts < ROUNDING and parted > ROUNDING + 0.3 * row.errors[f"{format}, whole"]:
                row.wrong.append(f"{format}, chunks part from the whole prompt by {parted:.2g}")
    if "logits_to_keep=3" in before:
        compare(
            f"{LOSSLESS}, logits_to_keep=3", LIMITS[LOSSLESS],
            lambda: model(ids, model.folded(LOSSLESS), logits_to_keep=3), before["logits_to_keep=3"],
        )  # fmt: skip
    if folds:
        _check_bits(row, model, ids)
    _check_crop(row, model, ids)
    for format in (FINE, COARSE):
        _check_save(row, model, ids, format)
    _check_generate(row, model, batch, mask)
    # Having answered, it still computes what it computed
    x = _tried(lambda: model(ids, model.dense()))
    if "whole" in steady and not (isinstance(x, Tensor) and _same(x, before["whole"])):
        row.wrong.append("after folded passes, a dense cache gives something else")


def _check_bits(row: Row, model: Model, ids: Tensor) -> None:
    """Formats that wait for their first tokens fold in the end."""
    cache = model.folded(COARSE)
    x = _tried(lambda: model.chunked(ids, cache))
    if isinstance(x, str):
        return
    folded = [
        part for part, layer in zip(cache.report().layers, cache.layers, strict=True) if isinstance(layer, FoldedLayer)
    ]
    filled = [part for part in folded if part.values]
    if not filled:
        row.notes.append("its folded layers are never filled")
        return
    bits = [8 * part.held_bytes / part.values for part in filled]
    row.bits = round(max(bits), 2)
    if max(bits) > 14:
        row.wrong.append(f"{COARSE} does not fold: {max(bits):.1f} bits a value after {TOKENS} tokens")
    if len(filled) < len(folded):
        row.notes.append(f"{len(folded) - len(filled)} of {len(folded)} folded layers are never filled")


def _check_crop(row: Row, model: Model, ids: Tensor) -> None:
    """10 tokens are taken back and others follow; or crop is refused, and nothing has changed."""
    others = torch.cat((ids[:, : TOKENS - 10], ids_of(1, 10, 5)), 1)
    dense = model.dense()
    model(ids, dense)
    own = _tried_any(lambda: dense.crop(-10))
    expected = _tried(lambda: model(others[:, -10:], dense)) if own is None else own
    cache = model.folded(LOSSLESS)
    if isinstance(_tried(lambda: model(ids, cache)), str):
        return
    lengths = _lengths(cache)
    problem = _tried_any(lambda: cache.crop(-10))
    if problem is not None:
        if _lengths(cache) != lengths:
            row.wrong.append(f"crop is refused half way: {lengths} became {_lengths(cache)} ({problem})")
        elif own is None:
            row.crashed.append(f"crop is refused, the dense cache's is not: {problem}")
        else:
            row.notes.append(f"crop: {problem}")
        return
    if len({n for n in _lengths(cache) if n}) > 1:
        row.wrong.append(f"crop leaves layers of {_lengths(cache)} tokens")
    got = _tried(lambda: model(others[:, -10:], cache))
    if isinstance(expected, str):
        row.notes.append(f"the model itself, crop: {expected}")
    elif isinstance(got, str):
        row.crashed.append(f"crop: {got}")
    else:
        row.errors[f"{LOSSLESS}, crop"] = error = relative(got, expected)
        if not error <= LIMITS[LOSSLESS] * min(row.past, 1):
            row.wrong.append(f"crop: what follows is off by {error:.2g}")


def _check_save(row: Row, model: Model, ids: Tensor, format: str) -> None:
    """A saved and loaded cache goes on bit for bit; so does a deep copy, unless the model keeps states itself."""
    dense = model.dense()
    if isinstance(_tried(lambda: model(ids[:, :-4], dense)), str):
        return
    twin = copy.deepcopy(dense)
    own, copied = (_tried(lambda c=c: model(ids[:, -4:], c)) for c in (dense, twin))
    if isinstance(own, Tensor) and isinstance(copied, Tensor) and not torch.equal(own, copied):
        row.notes.append("copies of its own cache go on otherwise, too")
        return
    cache = model.folded(format)
    if isinstance(_tried(lambda: model(ids[:, :-4], cache)), str):
        return
    caches = {"copied": copy.deepcopy(cache)}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cache.kv"
        problem = _tried_any(lambda: cache.save(path))
        if problem is None:
            problem = _tried_any(
                lambda: caches.update({"saved and loaded": FoldedCache.load(path, model.model.config)})
            )
    if problem is not None:
        (row.notes if problem.startswith("ValueError: layer") else row.crashed).append(f"save: {problem}")
    expected = _tried(lambda: model(ids[:, -4:], cache))
    for name, other in caches.items():
        got = _tried(lambda other=other: model(ids[:, -4:], other))
        if isinstance(got, str) or isinstance(expected, str):
            if isinstance(got, str) != isinstance(expected, str):
                row.crashed.append(f"{format}, {name}: {got if isinstance(got, str) else expected}")
        elif not torch.equal(got, expected):
            row.wrong.append(f"{format}, {name}: goes on otherwise, by {relative(got, expected):.2g}")


def _check_generate(row: Row, model: Model, batch: Tensor, mask: Tensor) -> None:
    """Greedy tokens of a padded batch are those of a dense cache, until two logits are nearly equal."""
    if not model.model.can_generate():
        row.notes.append("it does not generate")
        return

    def generate(cache: Cache) -> Any:
        return model.model.generate(
            batch, attention_mask=mask, max_new_tokens=6, do_sample=False, return_dict_in_generate=True,
            output_logits=True, pad_token_id=0, **{model.cache_name or "past_key_values": cache},
        )  # fmt: skip

    results: dict[str, Any] = {}
    own = _tried_any(lambda: results.update(own=generate(model.dense())))
    if own is not None:
        row.notes.append(f"the model itself, generate: {own}")
        return
    for format in (LOSSLESS, COARSE):
        problem = _tried_any(lambda f=format: results.update({f: generate(model.folded(f))}))
        if problem is not None:
            row.crashed.append(f"{format}, generate: {problem}")
            continue
        worst = 0.0
        for i in range(batch.shape[0]):
            for a, b in zip(results[format].logits, results["own"].logits, strict=True):
                worst = max(worst, relative(a[i], b[i]))
                if a[i].argmax() != b[i].argmax():
                    break
        row.errors[f"{format}, generate"] = worst
        if not worst <= 3 * LIMITS[format] * min(row.past, 1):  # the worst of single tokens
            row.wrong.append(f"{format}, generate: off by {worst:.2g}")


def _kind(layer: Any) -> str:
    if isinstance(layer, FoldedLayer):
        return "folded"
    if isinstance(layer, DynamicSlidingWindowLayer):
        return "sliding"
    if isinstance(layer, DynamicLayer):
        return "dense"
    return "none"


def _lengths(cache: Cache) -> list[int]:
    lengths = []
    for layer in cache.layers:
        try:
            lengths.append(int(layer.get_seq_length()))
        except Exception:
            lengths.append(0)
    return lengths


def _shown(name: str, x: Tensor) -> Any:
    """Where an answer counts: not at padding."""
    if "padded" not in name or x.shape[0] != 2:
        return slice(None)
    keep = torch.ones(x.shape[:2], dtype=torch.bool)
    keep[1, :PADDING] = False
    return keep


def _same(a: Tensor | str, b: Tensor | str) -> bool:
    return (
        isinstance(a, Tensor)
        and isinstance(b, Tensor)
        and a.shape == b.shape
        and torch.equal(a.nan_to_num(), b.nan_to_num())
    )


def _tried(run: Callable[[], Tensor]) -> Tensor | str:
    try:
        return run()
    except Exception as error:
        return where(error)


def _tried_any(run: Callable[[], Any]) -> str | None:
    try:
        run()
    except Exception as error:
        return where(error)
    return None


def _verdict(row: Row) -> str:
    if row.wrong:
        return "WRONG"
    if row.crashed:
        return "CRASH"
    if not row.layers.get("folded"):
        return "dense"
    if row.reads_folded:
        return "folded"
    return "unfolded"


def run_all(names: list[str], jobs: int) -> Iterator[Row]:
    """Rows of `names`, each from a process of its own, as they come."""
    context = multiprocessing.get_context("fork")
    waiting, running = list(reversed(names)), {}
    while waiting or running:
        while waiting and len(running) < jobs:
            name = waiting.pop()
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_in_process, args=(name, theirs), daemon=True)
            process.start()
            theirs.close()
            running[ours] = name, process
        for ours in multiprocessing.connection.wait(list(running)):
            name, process = running.pop(ours)
            try:
                row = ours.recv()
            except EOFError:
                process.join()
                row = Row(name, verdict="CRASH", crashed=[f"its process ended with {process.exitcode}"])
            process.join()
            yield row


def _in_process(name: str, pipe: Any) -> None:
    torch.set_grad_enabled(False)
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    pipe.send(check(name))
    pipe.close()


VERDICTS = {
    "folded": "after `kvfold.attach`, its attention reads folded layers as codes, and answers are right",
    "unfolded": "its code cannot be replaced, or computes with keys and values itself: folded layers are unfolded at "
    "each read. Answers are right, memory is as small, and the log says so",
    "dense": "none of its layers hold keys and values that grow and fold (linear attention, sliding windows, sparse "
    "selection): the cache is transformers' own, answers are right, and the log says so",
    "refused": "one clear error says why",
    "no cache": "its forward takes no cache of transformers",
    "not built": "no random model of it can be made here, or it takes no text alone",
    "WRONG": "a fault: answers differ by more than codes explain, or formats do not fold",
    "CRASH": "a fault: an error that its own dense cache does not give",
}


def page(rows: list[Row]) -> str:
    """docs/models.md."""
    counts = Counter(row.verdict for row in rows)
    verdicts = "\n".join(f"| {name} | {counts[name]} | {text} |" for name, text in VERDICTS.items() if counts[name])
    table = "\n".join(_line(row) for row in rows)
    return f"""# Models

Each of the {len(rows)} model types of `AutoModelForCausalLM` in transformers {transformers.__version__} was run with a
`FoldedCache` and with its own dense cache. Each is a small random model with sharp attention, so
that it shows what a cache gets wrong; vision-language models are asked by their text. A script
makes this page:

```sh
python benchmarks/architectures.py --docs docs/models.md
```

| verdict | types | what it means |
| --- | --- | --- |
{verdicts}

What is compared: logits of a prompt of {TOKENS} tokens read whole, in chunks of {", ".join(map(str, CHUNKS))}, and
left-padded in a batch, whole and in chunks; the last logits alone (`logits_to_keep`); greedy
`generate` of a padded batch; what follows a `crop`; what follows `save` and `load`, and a copy, bit
for bit. It is also checked that `attach` alone changes nothing: with a dense cache, or none, an
attached model computes what it computed before, bit for bit.

Errors are the worst over these cases of |Δ logits| / |logits|, against the model's own
`DynamicCache`. `{LOSSLESS}` is nearly lossless, so it would show a fault of any other kind;
`{FINE}` and `{COARSE}` show what codes cost a model whose attention is as sharp as this.
Trained models lose far less: [quality.md](quality.md). Bits are those of a number in folded layers
after {TOKENS} tokens with `{COARSE}`, many of which are still dense; a dense cache has 16.

Notes: *no crop here* and *not saved* mean that the model's own cache, or a class of its layers,
cannot be cropped, or saved. *No plan* means that `kvfold plan` finds layers of a class of the
model's own, and counts nothing.

| model type | verdict | layers | `{LOSSLESS}` | `{FINE}` | `{COARSE}` | bits | note |
| --- | --- | --- | --- | --- | --- | --- | --- |
{table}
"""


def _line(row: Row) -> str:
    worst = [
        max((x for name, x in row.errors.items() if name.startswith(format) and "against" not in name), default=None)
        for format in (LOSSLESS, FINE, COARSE)
    ]
    layers = ", ".join(f"{number} {kind}" for kind, number in row.layers.items())
    numbers = [f"{error:.0e}" if error is not None and row.layers.get("folded") else "" for error in worst]
    bits = f"{row.bits:.1f}" if row.bits == row.bits else ""
    return f"| {row.model_type} | {row.verdict} | {layers} | {' | '.join(numbers)} | {bits} | {_note(row)} |"


def _note(row: Row) -> str:
    """What else to know, in one line."""
    if row.wrong or row.crashed:
        return _short("; ".join(row.wrong + row.crashed))
    if row.verdict in ("not built", "refused"):
        return _short(row.notes[-1])
    notes = [_short(note) for note in row.notes if not note.startswith(("crop", "save"))]
    if any(note.startswith("crop") for note in row.notes):
        notes.append("no crop here")
    if any(note.startswith("save") for note in row.notes):
        notes.append("not saved")
    return "; ".join(dict.fromkeys(notes))


def _short(text: str) -> str:
    """Without the line that raised it, and without what Markdown would take for a table."""
    text = text.split(" (/")[0].split(" (transformers/")[0].split(" (kvfold/")[0].replace("|", "/")
    return text if len(text) <= 120 else text[:117] + "…"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="model types, separated by commas; all of them if left out")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="how many at a time")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--docs", type=Path, help="also write the table to this page")
    args = parser.parse_args()
    names = args.only.split(",") if args.only else list(MODEL_TYPES)
    unknown = sorted(set(names) - set(MODEL_TYPES))
    if unknown:
        parser.error(f"--only {', '.join(unknown)}: not among AutoModelForCausalLM's model types")
    transformers.logging.set_verbosity_error()
    logging.getLogger("kvfold").propagate = False
    torch.set_num_threads(1)
    console = to_stdout()
    rows = []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("models", total=len(names))
        for row in run_all(names, args.jobs):
            rows.append(row)
            progress.update(task, advance=1, description=row.model_type)
            if args.json:
                args.json.write_text(
                    json.dumps([asdict(r) for r in sorted(rows, key=lambda r: r.model_type)], indent=1) + "\n"
                )
    rows.sort(key=lambda row: row.model_type)
    table = Table("model type", "verdict", "layers", "worst error", "note")
    for row in rows:
        worst = max(row.errors.items(), key=lambda item: item[1], default=("", 0.0))
        table.add_row(
            row.model_type,
            row.verdict,
            str(row.layers),
            f"{worst[1]:.2g} {worst[0]}",
            "; ".join((row.wrong + row.crashed or row.notes)[:2]),
        )
    console.print(table)
    console.print(dict(Counter(row.verdict for row in rows)))
    others = [row.model_type for row in rows if row.plan_agrees is False]
    console.print("kvfold plan counts other layers than the cache of: " + (", ".join(others) or "none"))
    if args.docs:
        args.docs.write_text(page(rows))


if __name__ == "__main__":
    main()
