"""Requests forget blocks that attention hardly reads, so that each keeps to a budget of tokens.

The worker chooses blocks by a policy (`kvfold.eviction`), stops reading them, and reports them. The scheduler then
gives them back to the pool. In the tables of both, the null block (number 0) stands for a forgotten one, as vLLM has it
for blocks that a sliding window has left.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, UniformTypeKVCacheSpecs

from kvfold.cache.pool.blocks import BlockTokens
from kvfold.cache.pool.layer import PagedLayer
from kvfold.eviction import Eviction, TriAttention
from kvfold.eviction.policy import Candidates
from kvfold.integrations.vllm.options import Options

NULL = 0
"""vLLM's number of the block that no request has."""


@dataclass(frozen=True, kw_only=True)
class FoldedSpec(FullAttentionSpec):  # type: ignore[misc]
    """vLLM's description of a layer that folds."""

    @classmethod
    def of(cls, spec: FullAttentionSpec, **changes: Any) -> "FoldedSpec":
        """The same as another spec, but for some changes."""
        return cls(**{field.name: getattr(spec, field.name) for field in fields(spec)} | changes)

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """Bytes of the longest request, which takes no more than its budget where requests forget."""
        options = Options.of(vllm_config.additional_config)
        most = None if options is None else most_blocks(options, vllm_config, self.block_size)
        whole: int = super().max_memory_usage_bytes(vllm_config)
        return whole if most is None else min(whole, most * self.page_size_bytes)


def folds(spec: KVCacheSpec) -> bool:
    """Whether the layers of a group, of one spec or of several, fold."""
    several = spec.kv_cache_specs.values() if isinstance(spec, UniformTypeKVCacheSpecs) else (spec,)
    return any(isinstance(each, FoldedSpec) for each in several)


def most_blocks(options: Options, config: VllmConfig, block_size: int) -> int | None:
    """How many blocks a request holds at most; None if nothing bounds them."""
    if options.eviction is None or options.keep_prompt:
        return None
    between = config.scheduler_config.max_num_batched_tokens + (Eviction.interval or 0)  # so many may come
    return -(-(options.budget + between) // block_size) + 1


class Forgetting:
    """A policy at work on the requests of one worker.

    `layers` are those that fold, by their numbers; `groups` are the places of their block tables in a request's.
    """

    def __init__(
        self, policy: Eviction, keep_prompt: bool, layers: Mapping[int, tuple[int, PagedLayer]],
        across: Callable[[Tensor], Tensor] | None,
    ) -> None:  # fmt: skip
        self.policy, self.keep_prompt, self.layers, self.across = policy, keep_prompt, layers, across
        self.groups = sorted({group for group, _ in layers.values()})
        self.tokens = 0  # forgotten so far, in one layer
        self._acted_at: dict[str, int] = {}  # how many tokens each request had when the policy acted last

    def end(self, request: str) -> None:
        """A request is gone, or begins again."""
        self._acted_at.pop(request, None)

    def after(self, request: str, state: Any, seen: int) -> list[int]:
        """Which blocks a request forgets now that `seen` of its tokens have come, by their places in it.

        `state` is vLLM's state of the request. The numbers of forgotten blocks in it become `NULL`.
        """
        policy, acted = self.policy, self._acted_at.get(request, 0)
        if policy.interval is not None and seen - acted < policy.interval:
            return []
        self._acted_at[request] = seen
        if self.keep_prompt:
            prompt = state.num_prompt_tokens
            policy = replace(policy, keep_first=max(policy.keep_first, prompt), budget=policy.budget + prompt)
        candidates = list(self._candidates(policy, state.block_ids, seen))
        if not candidates:
            return []
        keep = policy.keep(candidates, self.across)[0]
        if keep is None:
            return []
        tokens = candidates[0].rows
        assert isinstance(tokens, BlockTokens)
        places = [tokens.places[unit] for unit, stays in enumerate(keep[0, 0].tolist()) if not stays]
        for group in self.groups:
            for place in places:
                state.block_ids[group][place] = NULL
        self.tokens += len(places) * tokens.page_size
        return places

    def _candidates(self, policy: Eviction, block_ids: tuple[list[int], ...], seen: int) -> Iterator[Candidates]:
        """What a request may forget, layer by layer; nothing if it is within its budget."""
        held: dict[int, tuple[list[int], list[int]]] = {}  # by group: numbers of blocks, and their places
        for index, (group, layer) in self.layers.items():
            size = layer.pool.pages_a_block * layer.pool.layout.page_size
            if group not in held:
                places = [place for place, number in enumerate(block_ids[group][: seen // size]) if number != NULL]
                held[group] = [block_ids[group][place] for place in places], places
            tokens = BlockTokens(layer, *held[group], seen)
            slots = (tokens.length - policy.recent) // size * size
            if slots <= 0 or tokens.length <= policy.budget_of(index) + (policy.slack or 0):
                return
            yield Candidates(index, tokens, slots)


def policy_for(options: Options, config: Any, layers: list[int], rank: int, ranks: int) -> Eviction:
    """The policy that options name, for one of `ranks` workers of a model whose layers of these numbers fold.

    `config` is transformers'. Raises ValueError if its statistics are of another model.
    """
    from kvfold.integrations.transformers.evicting import tri_attention_for
    from kvfold.integrations.transformers.shapes import layer_shapes

    policy = options.policy()
    if not isinstance(policy, TriAttention):
        return policy
    policy = tri_attention_for(policy, config, layer_shapes(config), layers)
    whole = policy.statistics
    heads = whole.heads // ranks
    own = whole.of_heads(slice(rank * heads, (rank + 1) * heads), max(1, whole.kv_heads // ranks))
    return replace(policy, statistics=own)


def without_forgotten(
    starts: list[int], lengths: list[int], block_table: NDArray[np.integer], block_size: int
) -> tuple[list[int], NDArray[np.integer]]:
    """Lengths and block table of a step, (sequences, blocks), as if forgotten tokens had never come.

    Keys have been rotated by their true positions, so attention over those that are left needs nothing but their order.
    """
    lengths, table = list(lengths), block_table
    for i, length in enumerate(lengths):
        before = (length - (starts[i + 1] - starts[i])) // block_size
        gone = np.flatnonzero(block_table[i, :before] == NULL)
        if len(gone):
            if table is block_table:
                table = block_table.copy()
            kept = np.delete(block_table[i], gone)
            table[i, : len(kept)] = kept
            lengths[i] = length - len(gone) * block_size
    return lengths, table
