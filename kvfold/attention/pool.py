"""Attention of an engine's step over pages in its pool.

A query at position t reads the pages before page t // P folded, but for the first token, and the tokens of its own page
up to t dense: older ones from the tails, new ones from the step itself (`kvfold.cache.pool`).
"""

from torch import Tensor

from kvfold.attention.backend import FASTEST, backend_of
from kvfold.cache.pool.layer import PagedLayer
from kvfold.cache.pool.plan import EngineStep


class PagedAttention:
    """Attention of one layer over its pool.

    There are `heads` query heads, a multiple of the pool's KV heads. `scaling`, `softcap` and `sink_logits` are as for
    `kvfold.attention.attend`. `backend` is one of `kvfold.attention.BACKENDS`; None for the kernel of the layer's
    device.
    """

    def __init__(
        self,
        layer: PagedLayer,
        heads: int,
        *,
        scaling: float,
        softcap: float | None = None,
        sink_logits: Tensor | None = None,
        backend: str | None = None,
    ) -> None:
        if heads % layer.pool.kv_heads:
            raise ValueError(f"heads = {heads}: give a multiple of the pool's {layer.pool.kv_heads} KV heads")
        self.layer, self.heads = layer, heads
        self.scaling, self.softcap = scaling, softcap
        self.sink_logits = None if sink_logits is None else sink_logits.detach().float().contiguous()
        self._run = backend_of(backend or FASTEST.get(layer.pool.pages.device.type, "reference"))

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, step: EngineStep) -> Tensor:
        """Fold what the step completes, attend, and keep what it leaves of unfinished pages.

        Queries are those of the new tokens of all sequences, (tokens, heads, key_dim), in the tails' dtype like keys
        and values, (tokens, kv_heads, dim). Returns float32, (tokens, heads, value_dim).

        Raises ValueError on another shape or dtype. A NaN, an infinity, or a scale beyond float16 in a sequence's keys
        or values makes its outputs NaN, in this step and later ones (`PagedLayer.broken`); in a query, those of the
        step. Other sequences are untouched.
        """
        layer = self.layer
        kv_heads, dim = layer.pool.kv_heads, layer.formats.values.head_dim
        expected = ((self.heads, layer.formats.keys.head_dim), (kv_heads, layer.formats.keys.head_dim), (kv_heads, dim))
        for name, x, shape in zip(("query", "key", "value"), (query, key, value), expected, strict=True):
            if x.shape != (step.tokens, *shape) or x.dtype != layer.tail_keys.dtype:
                raise ValueError(
                    f"{name} is {x.dtype} of the shape {tuple(x.shape)}: give {layer.tail_keys.dtype} of "
                    f"{(step.tokens, *shape)}"
                )
        return self._run.attend_pool(
            query, key, value, layer, step, scaling=self.scaling, softcap=self.softcap, sink_logits=self.sink_logits
        )
