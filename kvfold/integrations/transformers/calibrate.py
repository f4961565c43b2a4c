"""Measure the statistics that formats are fitted to, and those that tokens are evicted by, on a text."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvfold.cache.batch import Appended
from kvfold.cache.calibration import PAGE_SIZE, SHORTEST, Calibration, Observed
from kvfold.cache.config import LayerConfig
from kvfold.cache.layer import LayerCache
from kvfold.eviction import QueryStatistics
from kvfold.eviction.tria import POSITIVE
from kvfold.formats.numbers import real, whole
from kvfold.integrations.transformers.attach import attach
from kvfold.integrations.transformers.cache import FoldedCache
from kvfold.integrations.transformers.calls import cache_argument
from kvfold.integrations.transformers.evicting import head_shape, model_rope
from kvfold.integrations.transformers.layer import FoldedLayer
from kvfold.integrations.transformers.shapes import layer_shapes
from kvfold.integrations.weights import sketch_of

See = Callable[[int, Tensor, Tensor, Tensor, int], None]
"""Called with a layer's index, queries (batch, heads, n, D) and keys (batch, kv_heads, n, D) that RoPE has turned,
values (batch, kv_heads, n, ·), and the column of the first.
"""


class ObservedLayer(LayerCache):
    """A layer that keeps float16 numbers and passes its queries, keys and values to `see`."""

    def __init__(self, index: int, see: See) -> None:
        super().__init__(LayerConfig("float16", index))
        self.see = see
        self._new: tuple[Tensor, Tensor] | None = None

    def append(self, key: Tensor, value: Tensor, padding: Sequence[int] | None = None) -> Appended:
        self._new = key, value
        return super().append(key, value, padding)

    def observe(self, query: Tensor | None, new: Appended, scaling: float | None = None) -> None:
        assert self._new is not None
        if query is None or new.observed:
            return
        new.observed = True
        self.see(self.index, query, *self._new, new.first_column)


@torch.no_grad()
def calibrate(
    model: PreTrainedModel,
    passages: Sequence[Tensor],
    *,
    chunk: int = 512,
    about: dict[str, str] | None = None,
    progress: Callable[[int], None] = lambda tokens: None,
) -> Calibration:
    """Statistics of a model's layers over passages of a text.

    Parameters
    ----------
    model
        A model; it is attached.
    passages
        Tokens, (1, T) each; those of less than 80 are left out.
    chunk
        Tokens of one forward pass, at least 128. Keys count by whole pages of a chunk.
    about
        What to write beside the statistics.
    progress
        Called with numbers of tokens read.

    Raises
    ------
    ValueError
        If there is no passage of 80 tokens, or the model cannot be attached, or no layer of it folds.
    """
    whole("chunk", chunk, least=2 * PAGE_SIZE, what="tokens")
    check_passages(passages)
    if any(not isinstance(x, str) for pair in (about or {}).items() for x in pair):
        raise ValueError(f"about = {about}: give a dictionary of texts")
    passages = [ids for ids in passages if ids.shape[1] >= SHORTEST]
    if not passages:
        raise ValueError(f"passages: give at least one of {SHORTEST} tokens or more")
    seen: dict[int, Observed] = {}

    latent = {index for index, shape in enumerate(layer_shapes(model.config)) if shape.kind == "latent"}

    def see(layer: int, query: Tensor, key: Tensor, value: Tensor, first: int) -> None:
        own = None if layer in latent else value
        seen.setdefault(layer, Observed()).add(query, key, own, begins=first == 0)

    _read(model, passages, see, chunk, progress)
    # Some layers are never attended to.
    layers = {index: observed.statistics() for index, observed in seen.items() if observed.enough}
    tokens = sum(ids.shape[1] for ids in passages)
    config = model.config.get_text_config(decoder=True)
    known = {"model_type": config.model_type, "layers": str(config.num_hidden_layers), "tokens": str(tokens)}
    return Calibration(layers, {**known, **(about or {})}, sketch=sketch_of(model))


PLACES = (0, 1, 2, 7, 40, 300)
"""Positions at which one token is read alone to see whether its queries, turned back, agree."""
TOLERANCE = 0.02
"""How far those may differ, in units of their length: what float16 and bfloat16 models round away."""


@torch.no_grad()
def measure_queries(
    model: PreTrainedModel,
    passages: Sequence[Tensor],
    *,
    chunk: int = 512,
    progress: Callable[[int], None] = lambda tokens: None,
) -> QueryStatistics:
    """Statistics of a model's queries before RoPE, for `TriAttention`.

    The queries are those that attention gets, after all that the model does to them (Qwen3's q_norm, …), with RoPE
    turned back.

    Parameters
    ----------
    model, progress
        As for `calibrate`.
    passages
        Tokens, (1, T) each.
    chunk
        Tokens of one forward pass.

    Raises
    ------
    ValueError
        If there is no passage, the model cannot be attached, no layer of it folds, or it turns queries in a way that
        `rope_of` cannot describe.
    """
    whole("chunk", chunk, least=1, what="tokens")
    check_passages(passages)
    config = model.config.get_text_config(decoder=True)
    shapes = layer_shapes(model.config)
    rope, of = model_rope(config, shapes), head_shape(shapes)
    pairs = len(rope.frequencies)
    shape = (config.num_hidden_layers, of.heads, pairs)
    total, magnitude = torch.zeros(shape, dtype=torch.complex128), torch.zeros(shape, dtype=torch.float64)
    omega = torch.tensor(rope.frequencies, dtype=torch.float64)

    def turned_back(query: Tensor, positions: Tensor) -> Tensor:
        """(…, heads, n, F), complex, of queries at `positions` (…, 1, n)."""
        turned = query[..., : 2 * pairs].double().cpu() / rope.turned_by
        angle = positions.double().unsqueeze(-1) * omega
        return torch.complex(*turned.chunk(2, -1)) * torch.polar(torch.ones_like(angle), -angle)

    def see(layer: int, query: Tensor, key: Tensor, value: Tensor, first: int) -> None:
        before = turned_back(query[0], torch.arange(first, first + query.shape[2])[None])
        total[layer] += before.sum(1)
        magnitude[layer] += before.abs().sum(1)

    def check(layer: int, query: Tensor, key: Tensor, value: Tensor, first: int) -> None:
        before = turned_back(query, places[:, None])
        apart = (before - before[:1]).norm(dim=-1).amax() / before.norm(dim=-1).amax()
        if apart > TOLERANCE:
            raise ValueError(
                f"a {config.model_type} turns its queries in another way than its config tells (turned back, those of "
                f"one token at several positions differ by {apart:.0%}): TriAttention does not take it; StreamingLLM "
                "and SnapKV do. If model.to(...) took it to 16 bits, its RoPE's frequencies were rounded: load it with "
                "dtype=... instead"
            )

    places = torch.tensor(PLACES)[:, None]
    token = passages[0][:, :1].expand(len(PLACES), 1)
    model(
        token, position_ids=places.to(token.device), **cache_argument(model, _observed(model, check)), use_cache=True,
        logits_to_keep=1,
    )  # fmt: skip
    _read(model, passages, see, chunk, progress)
    tokens = sum(ids.shape[1] for ids in passages)
    scaling = getattr(config, "attention_multiplier", None)
    return QueryStatistics.of(
        total / tokens,
        magnitude / tokens,
        kv_heads=of.kv_heads,
        head_dim=2 * pairs,
        rope_theta=rope.theta,
        attn_scale=(2 * pairs) ** -0.5 if scaling is None else real("attention_multiplier", scaling, *POSITIVE),
    )


def check_passages(passages: Sequence[Tensor]) -> None:
    """Raise ValueError unless these are tokens, (1, T) each, of at least one text."""
    if not isinstance(passages, Sequence) or not passages:
        raise ValueError("passages: give at least one, in a list")
    for ids in passages:
        right = isinstance(ids, Tensor) and ids.ndim == 2 and ids.shape[0] == 1 and ids.shape[1] > 0
        if not right or ids.is_floating_point() or ids.dtype == torch.bool:
            given = f"{ids.dtype} of the shape {tuple(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
            raise ValueError(f"passages: one is {given}; give token ids, integers of the shape (1, T)")


def _read(
    model: PreTrainedModel, passages: Sequence[Tensor], see: See, chunk: int, progress: Callable[[int], None]
) -> None:
    """Let a model read passages; its folded layers call `see`."""
    for ids in passages:
        cache = _observed(model, see)
        for start in range(0, ids.shape[1], chunk):
            part = ids[:, start : start + chunk]
            model(part, **cache_argument(model, cache), use_cache=True, logits_to_keep=1)
            progress(part.shape[1])


def _observed(model: PreTrainedModel, see: See) -> FoldedCache:
    """A cache whose folded layers call `see`; the model is attached."""
    cache = FoldedCache(model.config, "float16")
    cache_argument(model, cache)  # raises if the model takes no cache
    if not attach(model):
        raise ValueError(
            f"{type(model).__name__} has its own attention code, so nobody sees its queries: it cannot be calibrated"
        )
    folded = [layer for layer in cache.layers if isinstance(layer, FoldedLayer)]
    if not folded:
        raise ValueError("no layer of this model folds, so there is nothing to calibrate")
    for layer in folded:
        layer.folded = ObservedLayer(layer.folded.index, see)
    return cache
