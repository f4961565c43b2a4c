"""What a cache really holds: every tensor that can be reached from it, each storage once."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any

from torch import Tensor

from kvfold.quant.tables import copies_elsewhere


def walk_tensors(obj: object, kind: type = Tensor) -> Iterator[Any]:
    """Every tensor (or instance of `kind`) reachable from `obj` through attributes, fields and containers."""
    seen: set[int] = set()
    stack = [obj]
    while stack:
        item = stack.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, kind):
            yield item
        elif isinstance(item, dict):
            stack.extend(item.values())
        elif isinstance(item, list | tuple | set | frozenset):
            stack.extend(item)
        elif hasattr(item, "__dict__") and not isinstance(item, type):
            stack.extend(vars(item).values())
        elif is_dataclass(item) and not isinstance(item, type):
            stack.extend(getattr(item, field.name) for field in fields(item))


def held_bytes(*objects: object) -> int:
    """Bytes of all storages behind the tensors reachable from `objects`, each storage counted once.

    A view counts as the whole storage that it keeps alive. Tables that layers share count once, and so does each of
    their copies on other devices.
    """
    storages = {}
    for obj in objects:
        for tensor in walk_tensors(obj):
            for each in (tensor, *copies_elsewhere(tensor)):
                storage = each.untyped_storage()
                storages[each.device, storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


@dataclass(frozen=True)
class LayerReport:
    """One layer of a cache.

    Attributes
    ----------
    layer
        Its index.
    format
        Its format, or "dense".
    tokens
        Columns seen, padding included.
    evicted
        Tokens that each head has forgotten, summed over rows.
    values
        Numbers that a dense cache would hold for the tokens that came.
    held_bytes
        Bytes of its tensors, shared tables left out.
    """

    layer: int
    format: str
    tokens: int
    evicted: int
    values: int
    held_bytes: int


DERIVED = ("bits_per_value", "folded_bits_per_value", "ratio_to_bf16")
"""Figures of a `CacheReport` that follow from its fields."""


@dataclass(frozen=True)
class CacheReport:
    """A cache, layer by layer.

    Attributes
    ----------
    layers
        One entry a layer.
    shared_bytes
        Bytes of all that is no layer's own: rotations and level tables, which layers share, and beside them orders of
        channels, calibration statistics, token ids, and the statistics of an eviction policy.
    held_bytes
        Every byte that the cache owns.
    values
        Numbers that a dense cache would hold for the same tokens.
    """

    layers: tuple[LayerReport, ...]
    shared_bytes: int
    held_bytes: int
    values: int

    @property
    def bits_per_value(self) -> float:
        """8·held_bytes / values, over all layers, also those that stay dense; NaN for an empty cache."""
        return 8 * self.held_bytes / self.values if self.values else float("nan")

    @property
    def folded_bits_per_value(self) -> float:
        """Bits a value of the layers that fold, with what they share; NaN if none does.

        In a model with sliding windows, most layers hold a window of dense tokens, which no format makes smaller.
        """
        folding = [layer for layer in self.layers if layer.format != "dense"]
        values = sum(layer.values for layer in folding)
        held = self.shared_bytes + sum(layer.held_bytes for layer in folding)
        return 8 * held / values if values else float("nan")

    @property
    def ratio_to_bf16(self) -> float:
        """How many times smaller than a dense cache of the same model in bfloat16, whose windows are windows, too."""
        return 2 * self.values / self.held_bytes if self.held_bytes else float("nan")

    def to_json(self) -> dict[str, Any]:
        """Plain dicts and numbers."""
        return asdict(self) | {name: getattr(self, name) for name in DERIVED}
