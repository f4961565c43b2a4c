"""What the layers of a transformers cache hold, in bytes."""

from collections.abc import Sequence
from typing import Any

from kvfold.cache.report import CacheReport, LayerReport, held_bytes
from kvfold.integrations.transformers.layer import FoldedLayer


def report_of(layers: Sequence[Any], beside: Sequence[object]) -> CacheReport:
    """Bytes of each layer, and of all together with the objects `beside` them, walked tensor by tensor."""
    rows, tables = [], list(beside)
    for i, layer in enumerate(layers):
        if isinstance(layer, FoldedLayer):
            own = layer.folded
            tables.append(own.tables())
            counts = own.columns, own.evicted_count, own.value_count
            rows.append(LayerReport(i, own.folded_as, *counts, held_bytes(own.own())))
        else:
            tokens, values = _dense_counts(layer)
            rows.append(LayerReport(i, "dense", tokens, 0, values, held_bytes(layer)))
    return CacheReport(
        layers=tuple(rows),
        shared_bytes=held_bytes(tables),
        held_bytes=held_bytes(layers, *beside),
        values=sum(row.values for row in rows),
    )


def _dense_counts(layer: Any) -> tuple[int, int]:
    """Tokens seen and numbers held by one of transformers' own layers."""
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    if keys is None or values is None:
        return 0, 0
    return layer.get_seq_length(), keys.numel() + values.numel()
