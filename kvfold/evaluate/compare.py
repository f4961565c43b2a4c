"""Two executors, one truth: the same prompt through two ways to compute, layer by layer.

After seed 000, which validated its device path against another by the share of equal indices, the cosine of hidden
states, and the text.
"""

import copy
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity
from transformers import PreTrainedModel

from kvfold.attention import BACKENDS
from kvfold.cache.store import PageStore, StoreView
from kvfold.integrations.transformers import FoldedCache, attach
from kvfold.integrations.transformers.calls import cache_argument
from kvfold.integrations.transformers.layer import FoldedLayer
from kvfold.kernels import ops
from kvfold.quant.transforms import ChannelOrder

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


@dataclass(frozen=True)
class Executor:
    """A way to compute.

    Attributes
    ----------
    dtype
        Of the weights and activations: a name of torch's.
    device
        "cpu", "cuda", "cuda:1", ….
    backend
        Of attention: one of `kvfold.attention.BACKENDS`, by default the fastest. The device "cpu" and the backend
        "cpu" share their name, so that the default on a CPU is its kernel.
    """

    dtype: str = "float32"
    device: str = "cpu"
    backend: str | None = None

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
                    torch.empty(0, device=part)
                except (RuntimeError, AssertionError) as error:
                    reason = str(error).split("\n")[0]
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
    """One layer under two executors.

    Attributes
    ----------
    layer
        Its number.
    key_match, value_match
        Share of equal codes; None where a layer folds nothing.
    scale_error
        Mean of |s_a − s_b| / |s_a| over keys and values.
    hidden_cosine, hidden_cosine_min
        Cosine of the layer's output, mean and smallest over tokens.
    """

    layer: int
    key_match: float | None
    value_match: float | None
    scale_error: float | None
    hidden_cosine: float
    hidden_cosine_min: float


@dataclass(frozen=True)
class Comparison:
    """Two executors on one prompt.

    Attributes
    ----------
    layers
        Layer by layer.
    tokens
        Of the prompt.
    generated
        Of the greedy continuation.
    first_divergence
        The first token of the continuation that differs, from 0; None if none does.
    texts
        The continuations' tokens.
    """

    layers: tuple[LayerComparison, ...]
    tokens: int
    generated: int
    first_divergence: int | None
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
    chunk: int = 256,
    progress: Callable[[int], None] = lambda tokens: None,
) -> Comparison:
    """Read `ids` (1, T) with each executor, and let each go on greedily.

    The model is copied, not changed. `progress` is called with tokens read and written, which add up to
    2·(T + generate).
    """
    runs = [_run(model, ids, format, executor, generate, chunk, progress) for executor in executors]
    (cache_a, hidden_a, text_a), (cache_b, hidden_b, text_b) = runs
    layers = []
    for i, (a, b) in enumerate(zip(cache_a.layers, cache_b.layers, strict=True)):
        cosine = cosine_similarity(hidden_a[i].double(), hidden_b[i].double(), dim=-1)
        sides: list[tuple[float, float]] = []
        if isinstance(a, FoldedLayer) and isinstance(b, FoldedLayer):
            for group_a, group_b in zip(a.folded.groups, b.folded.groups, strict=True):
                rows_a, rows_b = group_a.rows, group_b.rows
                if rows_a.keys.count:
                    sides = [_side(rows_a.keys, rows_b.keys), _side(rows_a.values, rows_b.values)]
        layers.append(
            LayerComparison(
                layer=i,
                key_match=sides[0][0] if sides else None,
                value_match=sides[1][0] if sides else None,
                scale_error=(sides[0][1] + sides[1][1]) / 2 if sides else None,
                hidden_cosine=cosine.mean().item(),
                hidden_cosine_min=cosine.min().item(),
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
    chunk: int,
    progress: Callable[[int], None],
) -> tuple[FoldedCache, list[Tensor], list[int]]:
    own = copy.deepcopy(model).to(executor.device, DTYPES[executor.dtype])
    attach(own, executor.backend)
    # The dtype of dense tokens would otherwise follow the executor's, and both are to hold the same.
    cache = FoldedCache(own.config, format, dense_dtype=torch.float32)
    outputs: dict[int, list[Tensor]] = {}
    hooks = [
        layer.register_forward_hook(lambda module, args, out, i=i: outputs.setdefault(i, []).append(_first(out).cpu()))
        for i, layer in enumerate(own.get_decoder().layers)
    ]
    ids = ids.to(executor.device)
    logits = None
    for start in range(0, ids.shape[1], chunk):
        part = ids[:, start : start + chunk]
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


def _first(output: Any) -> Tensor:
    tensor = output[0] if isinstance(output, tuple) else output
    assert isinstance(tensor, Tensor)
    return tensor


def _scale(store: PageStore | StoreView) -> Tensor:
    """Scales of a page's tokens, or else of its channels."""
    pages, transform = store.pages(), store.form.transform
    if pages.scale is not None:
        return pages.scale
    assert pages.channel_scale is not None
    scale = pages.channel_scale.unsqueeze(-2)
    return transform.invert(scale) if isinstance(transform, ChannelOrder) else scale


def _side(a: PageStore | StoreView, b: PageStore | StoreView) -> tuple[float, float]:
    """Share of equal codes, and mean relative difference of scales."""
    pages_a, pages_b, form = a.pages(), b.pages(), a.form
    if form.bits:
        shape = (form.page_size, form.code_dim, list(form.bits), form.lanes)
        codes = [ops.unpack(pages.code.cpu(), *shape) for pages in (pages_a, pages_b)]
        if isinstance(a.form.transform, ChannelOrder) and isinstance(b.form.transform, ChannelOrder):
            codes = [store.form.transform.invert(code) for store, code in ((a, codes[0]), (b, codes[1]))]
    else:
        codes = [pages.code.cpu() for pages in (pages_a, pages_b)]
    scale_a, scale_b = (_scale(store).float().cpu() for store in (a, b))
    used = scale_a != 0
    error = ((scale_a - scale_b).abs() / scale_a.abs())[used]
    return (codes[0] == codes[1]).double().mean().item(), error.mean().item() if used.any() else 0.0
