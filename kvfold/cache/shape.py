"""What one layer of a model's cache holds."""

from dataclasses import dataclass

KINDS = ("full", "latent", "dense", "sliding", "none")
"""Kinds of layers, as `LayerShape` describes them."""


@dataclass(frozen=True)
class LayerShape:
    """What one layer's cache holds for each token."""

    # "full": every token; folds. "latent": one latent and its rotary part a token (multi-head latent attention); folds.
    # "dense": every token, in a layer that does not fold. "sliding": the newest `window` - 1 tokens, dense. "none":
    # nothing that grows with the text. Any other: the class of an unknown layer, which does not fold.
    kind: str
    # Shape of a token's keys and values; for latents, one head of the latent's and the rotary part's channels. 0 if the
    # config does not tell them, or the layer holds none.
    kv_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    window: int = 0  # width of a sliding window; 0 for the other kinds
    heads: int = 0  # query heads; 0 if the config does not tell them
    beside: int = 0  # numbers a token beside keys and values
    plain: bool = True  # of a sliding window: whether it holds keys and values alone, so that it may fold

    @property
    def folds(self) -> bool:
        """Whether a cache can fold this layer."""
        return self.kind in ("full", "latent")

    def may_fold(self, sliding: bool) -> bool:
        """Whether a cache can fold this layer, `sliding` windows among them if they may."""
        return self.folds or (sliding and self.kind == "sliding" and self.plain)

    @property
    def is_known(self) -> bool:
        """Whether the config tells the shape of keys and values."""
        return self.kv_heads > 0 and self.key_dim > 0 and self.value_dim > 0

    @property
    def folded_dims(self) -> tuple[int, int]:
        """Coordinates of a key and of a value as they fold; a latent's key has both parts, its value is the first."""
        if self.kind == "latent":
            return self.key_dim + self.value_dim, self.key_dim
        return self.key_dim, self.value_dim

    @property
    def values_per_token(self) -> int:
        """Numbers a token."""
        return self.kv_heads * (self.key_dim + self.value_dim) + self.beside
