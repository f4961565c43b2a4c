"""Compare two executors: the same prompt computed in two ways, layer by layer.

After pypto-lib, which validated its device path against another by the share of equal indices, the cosine of hidden
states, and the text.
"""

import copy
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity
from transformers import PreTrainedModel

from kvfold.attention import BACKENDS
from kvfold.cache.store import PageStore
from kvfold.evaluate.records import Row
from kvfold.integrations.transformers import FoldedCache, attach
from kvfold.integrations.transformers.calls import cache_argument
from kvfold.integrations.transformers.layer import FoldedLayer
from kvfold.kernels import ops
from kvfold.quant.packing import TILE
from kvfold.quant.transforms import ChannelOrder

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
CHUNK = 256
"""Tokens of one forward pass."""
SIDES = ("key", "value")
COLUMNS = ("layer", "equal key codes", "equal value codes", "scale error", "hidden cosine", "smallest")


@dataclass(frozen=True)
class Executor:
    """A way to compute: the dtype of weights and activations, a device, and a backend of attention, or the fastest.

    `parse` reads "cpu" as the device, whose fastest backend is that of the same name.
    """

    dtype: str = "float32"
    device: str = "cpu"
    backend: str | None = None

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype = {self.dtype!r}: choose one of {', '.join(DTYPES)}")
        if self.backend is not None and self.backend not in BACKENDS:
            raise ValueError(f"backend = {self.backend!r}: choose one of {', '.join(BACKENDS)}")

    @classmethod
    def parse(cls, text: str) -> "Executor":
        """From parts between slashes in any order, such as "bfloat16", "float32/cuda", "reference"."""
        chosen: dict[str, str] = {}
        for part in text.split("/"):
            kind = "dtype" if part in DTYPES else "backend" if part in BACKENDS and part != "cpu" else "device"
            if kind in chosen:
                raise ValueError(f"executor = {text!r} names two {kind}s, {chosen[kind]} and {part}")
            if kind == "device":
                try:
                    torch.ones(1, device=part).item()  # "meta" has no numbers
                except (RuntimeError, AssertionError, ImportError) as error:
                    reason = re.split(r"\n|\. ", str(error))[0]
                    raise ValueError(
                        f"executor = {text!r}: {part!r} is neither a dtype ({', '.join(DTYPES)}), nor a backend "
                        f"({', '.join(BACKENDS)}), nor a device that works here ({reason})"
                    ) from None
            chosen[kind] = part
        return cls(**chosen)

    def __str__(self) -> str:
        return "/".join(part for part in (self.dtype, self.device, self.backend) if part)


@dataclass(frozen=True)
class LayerComparison:
    """One layer under two executors; None where it folds nothing.

    A match is the share of equal codes; codes with different bits count as different. Bits are the mean of a code under
    each executor: they may differ, as a layer's bits can depend on its computed values.
    """

    layer: int
    key_match: float | None
    value_match: float | None
    scale_error: float | None
    """Mean of |s_a − s_b| / |s_a| over keys and values."""
    hidden_cosine: float
    """Mean over tokens of the cosine between the layer's two outputs."""
    hidden_cosine_min: float
    """The smallest of these cosines."""
    key_bits: tuple[float, float] | None = None
    value_bits: tuple[float, float] | None = None


@dataclass(frozen=True)
class Comparison:
    """Two executors on one prompt of `tokens` tokens, and their greedy continuations."""

    layers: tuple[LayerComparison, ...]
    tokens: int
    generated: int
    first_divergence: int | None
    """The first token of the continuations that differs, from 0; None if none does."""
    texts: tuple[tuple[int, ...], tuple[int, ...]]

    def to_json(self, **about: Any) -> dict[str, Any]:
        """A plain dict."""
        return about | asdict(self)


@torch.no_grad()
def compare(
    model: PreTrainedModel,
    ids: Tensor,
    format: str,
    executors: tuple[Executor, Executor],
    *,
    generate: int = 64,
    progress: Callable[[int], None] = lambda tokens: None,
) -> Comparison:
    """Read `ids` (1, T) with each executor, and let each go on greedily.

    The model is copied, not changed. `progress` is called with tokens read and written, which add up to
    2·(T + generate).
    """
    runs = [_run(model, ids, format, executor, generate, progress) for executor in executors]
    (cache_a, hidden_a, text_a), (cache_b, hidden_b, text_b) = runs
    layers = []
    for i, (a, b) in enumerate(zip(cache_a.layers, cache_b.layers, strict=True)):
        cosine = cosine_similarity(hidden_a[i].double(), hidden_b[i].double(), dim=-1)
        sides: list[_StreamMatch] = []
        if isinstance(a, FoldedLayer) and isinstance(b, FoldedLayer):
            for group_a, group_b in zip(a.folded.groups, b.folded.groups, strict=True):
                rows_a, rows_b = group_a.rows, group_b.rows
                if rows_a.keys.count:
                    sides = [_side(rows_a.keys, rows_b.keys), _side(rows_a.values, rows_b.values)]
        layers.append(
            LayerComparison(
                layer=i,
                key_match=sides[0].match if sides else None,
                value_match=sides[1].match if sides else None,
                scale_error=(sides[0].scale_error + sides[1].scale_error) / 2 if sides else None,
                hidden_cosine=cosine.mean().item(),
                hidden_cosine_min=cosine.min().item(),
                key_bits=sides[0].bits if sides else None,
                value_bits=sides[1].bits if sides else None,
            )
        )
    first = next((i for i, (x, y) in enumerate(zip(text_a, text_b, strict=True)) if x != y), None)
    return Comparison(tuple(layers), ids.shape[1], generate, first, (tuple(text_a), tuple(text_b)))


def _run(
    model: PreTrainedModel,
    ids: Tensor,
    format: str,
    executor: Executor,
    generate: int,
    progress: Callable[[int], None],
) -> tuple[FoldedCache, list[Tensor], list[int]]:
    own = copy.deepcopy(model).to(executor.device, DTYPES[executor.dtype])
    attach(own, executor.backend)
    # By default dense tokens have the executor's dtype, but both caches must hold the same.
    cache = FoldedCache(own.config, format, dense_dtype=torch.float32)
    outputs: dict[int, list[Tensor]] = {}
    hooks = [
        layer.register_forward_hook(lambda module, args, out, i=i: outputs.setdefault(i, []).append(_first(out).cpu()))
        for i, layer in enumerate(_decoder_layers(own))
    ]
    ids = ids.to(executor.device)
    logits = None
    for part in ids.split(CHUNK, 1):
        logits = own(part, **cache_argument(own, cache), use_cache=True, logits_to_keep=1).logits
        progress(part.shape[1])
    for hook in hooks:
        hook.remove()
    hidden = [torch.cat(outputs[i], dim=1)[0] for i in sorted(outputs)]
    kept = copy.deepcopy(cache)
    text: list[int] = []
    for _ in range(generate):
        assert logits is not None
        token = logits[:, -1:].argmax(-1)
        text.append(int(token))
        logits = own(token, **cache_argument(own, cache), use_cache=True).logits
        progress(1)
    return kept, hidden, text


def _decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The layers of a model that a text goes through: the longest list of modules in its decoder."""
    decoder = model.get_decoder() or model
    lists = [module for module in decoder.modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        raise ValueError(f"{type(model).__name__} has no list of layers, whose outputs could be compared")
    return max(lists, key=len)


def _first(output: Any) -> Tensor:
    tensor = output[0] if isinstance(output, tuple) else output
    assert isinstance(tensor, Tensor)
    return tensor


def _scale(store: PageStore) -> Tensor:
    """Scales of a page's tokens, or else of its channels."""
    pages, transform = store.pages(), store.form.transform
    if pages.scale is not None:
        return pages.scale
    assert pages.channel_scale is not None
    scale = pages.channel_scale.unsqueeze(-2)
    return transform.invert(scale) if isinstance(transform, ChannelOrder) else scale


def cells(layer: Row) -> list[str]:
    """A layer's figures as text, in the order of `COLUMNS`."""
    error = layer.get("scale_error")
    return [
        str(layer["layer"]), *(_matched(layer.get(f"{side}_match"), layer.get(f"{side}_bits")) for side in SIDES),
        "–" if error is None else f"{error:.1e}",
        f"{layer['hidden_cosine']:.6f}", f"{layer['hidden_cosine_min']:.6f}",
    ]  # fmt: skip


def _matched(share: float | None, bits: Sequence[float] | None) -> str:
    """As text: the share of equal codes, or both numbers of bits where they differ; a dash where nothing folds."""
    if share is None:
        return "–"
    return f"{share:.2%}" if bits is None or len({*bits}) == 1 else " and ".join(f"{b:.3g}" for b in bits) + " bits"


class _StreamMatch(NamedTuple):
    """Keys, or values, under both executors."""

    match: float
    scale_error: float
    bits: tuple[float, float]


def _side(a: PageStore, b: PageStore) -> _StreamMatch:
    """Share of equal codes, mean relative difference of scales, and bits, each store read in its own form."""
    (codes_a, bits_a), (codes_b, bits_b) = _codes(a), _codes(b)
    scale_a, scale_b = (_scale(store).float().cpu() for store in (a, b))
    used = scale_a != 0
    error = ((scale_a - scale_b).abs() / scale_a.abs())[used]
    return _StreamMatch(
        match=((codes_a == codes_b) & (bits_a == bits_b)).double().mean().item(),
        scale_error=error.mean().item() if used.any() else 0.0,
        bits=(bits_a.double().mean().item(), bits_b.double().mean().item()),
    )


def _codes(store: PageStore) -> tuple[Tensor, Tensor]:
    """Codes of all pages, (…, pages, page size, channels) in the channels' own order, and how many bits each has."""
    pages, form = store.pages(), store.form
    if not form.bits:  # float16 numbers
        return pages.code.cpu(), torch.full_like(pages.code.cpu(), 16)
    code = ops.unpack(pages.code.cpu(), form.page_size, form.code_dim, list(form.bits), form.lanes)
    bits = torch.tensor(form.bits, dtype=code.dtype).repeat_interleave(TILE)[: form.code_dim].expand(code.shape)
    if isinstance(form.transform, ChannelOrder):
        return form.transform.invert(code), form.transform.invert(bits)
    return code, bits
