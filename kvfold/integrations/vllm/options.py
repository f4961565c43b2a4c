"""What a user asks of kvfold in vLLM: `--additional-config '{"kvfold": {"format": "kvfold-4"}}'`."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from kvfold.cache.pool.firsts import places_for
from kvfold.cache.pool.layout import PageLayout, why_not_paged
from kvfold.cache.pool.plan import slots_for
from kvfold.eviction import Eviction, QueryStatistics, StreamingLLM, TriAttention
from kvfold.formats import DEFAULT, FormatPair, check_names, get_formats

KEY = "kvfold"
FEWEST = 128
"""Tokens that an engine must read at a time to fit formats to them."""
KEEP_LIMIT = 20 * 10**9
"""Bytes of kept pages."""
BUDGET = 2048
"""Tokens that a request keeps where it forgets: the number of TriAttention's paper."""
STREAMING = "streaming"
"""The name of `StreamingLLM` among ways to forget; others are files."""
FOLDING = ("full_attention", "attention")
"""Names of layers that fold, in configs that name kinds of layers."""


@dataclass(frozen=True)
class Options:
    """The options under "kvfold" in vLLM's additional config."""

    format: str = DEFAULT  # a name for keys and values, or "keys:values" with one each (`kvfold.formats.FORMATS`)
    # Path of a file of `kvfold calibrate`. None: the engine measures statistics for formats that are fitted at its
    # start.
    calibration: str | None = None
    # Folder of pages that outlive the engine (`kvfold.integrations.vllm.keeping`), and how many bytes it may take.
    keep: str | None = None
    keep_limit: int = KEEP_LIMIT
    # What requests forget by: a TRIA file of `kvfold calibrate --eviction`, or `STREAMING`; None: nothing is forgotten.
    # How many tokens each keeps, and whether its prompt stays beside those.
    eviction: str | None = None
    budget: int = BUDGET
    keep_prompt: bool = False

    def __post_init__(self) -> None:
        if self.eviction is None and (self.keep_prompt or self.budget != BUDGET):
            name = "keep_prompt" if self.keep_prompt else "budget"
            raise ValueError(f"{name} = {getattr(self, name)}, but no eviction: give a TRIA file, or {STREAMING!r}")

    @classmethod
    def of(cls, additional_config: object) -> "Options | None":
        """The options in vLLM's additional config; None if it does not mention kvfold.

        Raises ValueError on an unknown option, or an invalid value.
        """
        if not isinstance(additional_config, Mapping) or KEY not in additional_config:
            return None
        given = additional_config[KEY]
        names = [field.name for field in fields(cls)]
        if not isinstance(given, Mapping) or not set(given) <= set(names):
            raise ValueError(f"additional_config[{KEY!r}] = {given!r}: give a mapping with some of {', '.join(names)}")
        for name, value in given.items():
            what, right = _KINDS.get(name, _TEXT)
            if not right(value) and not (name in ("calibration", "keep", "eviction") and value is None):
                raise ValueError(f"additional_config[{KEY!r}][{name!r}] = {value!r}: give {what}")
        options = cls(**given)
        check_names(options.format)
        return options

    def policy(self) -> Eviction:
        """What `eviction` names.

        Raises FileNotFoundError or ValueError if its file is not there or is damaged, or the budget is too small.
        """
        assert self.eviction is not None
        if self.eviction == STREAMING:
            return StreamingLLM(budget=self.budget)
        return TriAttention(QueryStatistics.load(self.eviction), budget=self.budget)

    def formats(self, head_dim: int) -> FormatPair:
        """The formats of heads of `head_dim` channels, not fitted; ValueError if a pool cannot share such pages."""
        pair = get_formats(self.format, head_dim, head_dim)
        if (why := why_not_paged(pair)) is not None:
            raise ValueError(f"format = {self.format!r} cannot be served: {why}; take kvfold-4")
        return pair

    def slot_bytes(self, head_dim: int, itemsize: int) -> int:
        """Bytes of the pool for a token and KV head."""
        return PageLayout(self.formats(head_dim)).slot_bytes(itemsize)

    def tail_bytes(self, head_dim: int, kv_heads: int, itemsize: int, drafts: int) -> int:
        """Bytes of the unfinished pages and first tokens that one layer keeps for a sequence."""
        tokens = slots_for(1, drafts) * self.formats(head_dim).keys.page_size + places_for(1)
        return tokens * kv_heads * 2 * head_dim * itemsize

    def to_config(self) -> dict[str, Any]:
        """The options as `of` reads them."""
        told = {"keep_limit": self.keep, "budget": self.eviction, "keep_prompt": self.eviction}
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        return {KEY: {name: x for name, x in own.items() if x is not None and told.get(name, x) is not None}}


_TEXT = "a string", lambda value: isinstance(value, str)
_KINDS = {
    "keep_limit": ("a number of bytes", lambda value: type(value) is int and value > 0),
    "budget": ("a number of tokens", lambda value: type(value) is int and value > 0),
    "keep_prompt": ("true or false", lambda value: isinstance(value, bool)),
}
"""What values options may have, in words, and whether one is such a value."""


def folding_layers(model: Any) -> int:
    """How many layers of a model fold, by vLLM's config of it: those without a sliding window or a state."""
    kinds = getattr(model.hf_text_config, "layer_types", None)
    return sum(kind in FOLDING for kind in kinds) if kinds else model.get_total_num_hidden_layers()


def drafts_of(config: Any) -> int:
    """How many tokens an engine may take back after a step, by vLLM's config of it."""
    return 0 if config.speculative_config is None else config.speculative_config.num_speculative_tokens
