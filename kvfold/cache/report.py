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
        Numbers that a dense cache would hold for the tokens that came; of a layer that stays dense, those that it
        holds, a state or room for more tokens among them.
    dense_values
        Those of them that are held dense: of a layer that folds, the first tokens, and those whose page is not folded
        yet.
    held_bytes
        Bytes of its tensors, shared tables left out.
    """

    layer: int
    format: str
    tokens: int
    evicted: int
    values: int
    dense_values: int
    held_bytes: int


DERIVED = ("bits_per_value", "folded_bits_per_value", "dense_share", "ratio_to_bf16")
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
        Numbers that a dense cache would hold.
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
        values = sum(layer.values for layer in self._folding)
        held = self.shared_bytes + sum(layer.held_bytes for layer in self._folding)
        return 8 * held / values if values else float("nan")

    @property
    def dense_share(self) -> float:
        """The share of values in layers that fold that are held dense: 1 while nothing is folded; NaN if none folds.

        While it is large, bits a value say what room, tables and queries take, and not what a format does.
        """
        values = sum(layer.values for layer in self._folding)
        return sum(layer.dense_values for layer in self._folding) / values if values else float("nan")

    @property
    def _folding(self) -> list[LayerReport]:
        return [layer for layer in self.layers if layer.format != "dense"]

    @property
    def ratio_to_bf16(self) -> float:
        """How many times smaller than a dense cache of the same model in bfloat16, whose windows are windows, too.

        Below 1, it is larger.
        """
        return 2 * self.values / self.held_bytes if self.held_bytes else float("nan")

    def to_json(self) -> dict[str, Any]:
        """Plain dicts and numbers."""
        return asdict(self) | {name: getattr(self, name) for name in DERIVED}
