"""Keys and values token by token, for programs that run models without transformers (SKaiNET's KV store)."""

import torch
from torch import Tensor

from kvfold.cache.config import LayerConfig
from kvfold.cache.layer import LayerCache
from kvfold.cache.report import CacheReport, held_bytes
from kvfold.formats.numbers import MOST_OF_A_MODEL, whole


class TokenStore:
    """Folded keys and values of one sequence in all layers of a model: append, read, evict.

    `keys` and `values` unfold a layer to read from it: use them to inspect it, not for attention at every step.

    Parameters
    ----------
    format
        One name for keys and values, "keys:values" with a name for each, or a pair's name (`kvfold.formats.PAIRS`).
    layers, kv_heads, head_dim
        The model's.

    Raises
    ------
    ValueError
        If the format is unknown or cannot take `head_dim`.

    Examples
    --------
    >>> store = TokenStore("balanced", layers=32, kv_heads=8, head_dim=128)
    >>> store.append(0, key, value)  # (8, 128) each, or (8, tokens, 128)
    >>> store.keys(0, 0, store.length(0))
    """

    def __init__(self, format: str, layers: int, kv_heads: int, head_dim: int) -> None:
        for name, number in (("layers", layers), ("kv_heads", kv_heads)):
            whole(name, number, 1, MOST_OF_A_MODEL)
        whole("head_dim", head_dim, 1)
        self.kv_heads, self.head_dim = kv_heads, head_dim
        self.layers = [LayerCache(LayerConfig(format, index)) for index in range(layers)]
        for layer in self.layers:
            layer.config.formats_of(head_dim, head_dim)  # raises now if there are none

    def append(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Add a token, or several, to a layer.

        Parameters
        ----------
        layer
            The layer's index, from 0.
        key, value
            Floating point, finite, (kv_heads, head_dim) or (kv_heads, tokens, head_dim).

        Raises
        ------
        ValueError
            On an index of no layer, another shape, a NaN or an infinity; nothing is added then.
        TypeError
            If the key or the value is not floating point; nothing is added then.
        """
        own = self._layer(layer)
        parts = []
        for name, x in (("key", key), ("value", value)):
            if x.shape[0] != self.kv_heads or x.shape[-1] != self.head_dim or x.ndim not in (2, 3):
                raise ValueError(
                    f"{name} has shape {tuple(x.shape)}: give ({self.kv_heads}, {self.head_dim}), or "
                    f"({self.kv_heads}, tokens, {self.head_dim})"
                )
            parts.append((x.unsqueeze(1) if x.ndim == 2 else x).unsqueeze(0))
        own.observe(None, own.append(parts[0], parts[1]))

    def length(self, layer: int) -> int:
        """Tokens that a layer holds."""
        return self._layer(layer).columns

    def keys(self, layer: int, start: int = 0, stop: int | None = None) -> Tensor:
        """Keys from `start` to before `stop` as attention reads them: float32, (kv_heads, stop − start, head_dim)."""
        return self._read(layer, 0, start, stop)

    def values(self, layer: int, start: int = 0, stop: int | None = None) -> Tensor:
        """Values likewise."""
        return self._read(layer, 1, start, stop)

    def evict(self, position: int) -> int:
        """Forget the tokens from `position` on, in every layer.

        Returns
        -------
        int
            How many kept tokens continue with folded values, although they would be dense if the others had never
            come (formats that fold by page, if more go than `Window.undo` of the newest pass); 0 for none.
        """
        if position < 0:
            raise ValueError(f"position = {position}: give 0 or more")
        return max(layer.crop(position) for layer in self.layers)

    def clear(self) -> None:
        """Forget everything."""
        for layer in self.layers:
            layer.clear()

    def report(self) -> CacheReport:
        """Bytes held, walked tensor by tensor, layer by layer."""
        rows = [layer.report(held_bytes(layer.own())) for layer in self.layers]
        return CacheReport(
            layers=tuple(rows),
            shared_bytes=held_bytes([layer.tables() for layer in self.layers]),
            held_bytes=held_bytes(self.layers),
            values=sum(row.values for row in rows),
        )

    def _layer(self, layer: int) -> LayerCache:
        if not 0 <= layer < len(self.layers):
            raise ValueError(f"layer = {layer}: this store has layers 0 to {len(self.layers) - 1}")
        return self.layers[layer]

    def _read(self, layer: int, part: int, start: int, stop: int | None) -> Tensor:
        own = self._layer(layer)
        stop = own.columns if stop is None else stop
        if not 0 <= start <= stop <= own.columns:
            raise ValueError(f"start = {start}, stop = {stop}: layer {layer} holds {own.columns} tokens")
        if not own.columns:
            return torch.empty(self.kv_heads, 0, self.head_dim)
        return own.unfold(torch.float32)[part][0, :, start:stop]
