"""What the layers of a transformers cache hold, in bytes."""

from collections.abc import Sequence
from typing import Any

from kvfold.cache.report import CacheReport, LayerReport, held_bytes, walk_tensors
from kvfold.integrations.transformers.layer import FoldedLayer


def report_of(layers: Sequence[Any], beside: Sequence[object]) -> CacheReport:
    """Bytes of each layer, and of all together with the objects `beside` them, walked tensor by tensor."""
    rows, tables = [], list(beside)
    for i, layer in enumerate(layers):
        if isinstance(layer, FoldedLayer):
            own = layer.folded
            tables.append(own.tables())
            rows.append(own.report(held_bytes(own.own())))
        else:
            values = sum(tensor.numel() for tensor in walk_tensors(layer) if tensor.is_floating_point())
            rows.append(LayerReport(i, "dense", _tokens(layer), 0, values, values, held_bytes(layer)))
    return CacheReport(
        layers=tuple(rows),
        shared_bytes=held_bytes(tables),
        held_bytes=held_bytes(layers, *beside),
        values=sum(row.values for row in rows),
    )


def _tokens(layer: Any) -> int:
    """Tokens that one of transformers' own layers has seen; 0 if it holds no keys."""
    return 0 if getattr(layer, "keys", None) is None else int(layer.get_seq_length())
