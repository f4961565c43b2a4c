"""Statistics of keys, and of the queries that read them, for each channel."""

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

FIT_TOKENS = 256
"""How many of a prompt's first tokens give its statistics; as good as a calibration run's (docs/quality.md).

The sinks among them do not count, and keys count by whole pages."""

FEWEST_FITTED = 64
"""The fewest tokens after the sinks that give statistics."""


@dataclass(frozen=True, eq=False)
class KeyStatistics:
    """Second moments of one layer's keys and queries, for each KV head.

    An error e_c in channel c of a key moves a score by q_c·e_c. After coding with b bits E[e_c²] ∝ Var(k_c)·4^−b, so
    E[q_c²]·Var(k_c) says how much the channel's bits are worth.

    Attributes
    ----------
    query_energy
        E[q_c²] over the queries that read the head: float32, (heads, D) or (batch, heads, D).
    key_variance
        Mean variance of k_c within a page, of the same shape.
    energy
        E[k_c²], of the same shape. None if it is not known, as in statistics from a file that does not hold it.
    key_rotation, value_rotation
        R for keys and for values (`kvfold.quant.spectral`) by what attention does with them: float32, (heads, D, D).
        None if they are not known, as in statistics of a prompt.
    """

    query_energy: Tensor
    key_variance: Tensor
    energy: Tensor | None = None
    key_rotation: Tensor | None = None
    value_rotation: Tensor | None = None

    @classmethod
    def of(cls, keys: Tensor, query_energy: Tensor, page_size: int) -> "KeyStatistics":
        """Statistics of keys (…, heads, T, D) and of their queries' energies, (…, heads, any, D).

        Without queries, all channels count equally.

        Variances are those within a page. Tokens beyond the last whole page do not count, unless there is no whole
        page.
        """
        tokens = keys.shape[-2]
        size = min(page_size, tokens)
        pages = keys[..., : tokens // size * size, :].float().unflatten(-2, (-1, size))
        variance = pages.var(-2, correction=0).mean(-2)
        queries = query_energy.float().mean(-2) if query_energy.shape[-2] else torch.ones_like(variance)
        return cls(queries, variance, keys.float().square().mean(-2))

    def first(self, channels: int) -> "KeyStatistics":
        """The statistics of the first `channels` channels; a rotation of all is none of theirs, and is left out."""
        energy = None if self.energy is None else self.energy[..., :channels]
        return KeyStatistics(self.query_energy[..., :channels], self.key_variance[..., :channels], energy)

    def of_heads(self, heads: slice) -> "KeyStatistics":
        """The statistics of some KV heads, from those of a calibration."""
        parts = {field.name: getattr(self, field.name) for field in fields(self)}
        return KeyStatistics(**{name: part[heads] for name, part in parts.items() if part is not None})

    def with_rotations(self, *, keys: bool, values: bool) -> "KeyStatistics":
        """These statistics with only the rotations of the sides that want theirs."""
        kept = self.key_rotation if keys else None, self.value_rotation if values else None
        return replace(self, key_rotation=kept[0], value_rotation=kept[1])

    @property
    def importance(self) -> Tensor:
        """E[q_c²]·Var(k_c), of the shape of both."""
        return self.query_energy * self.key_variance

    def order(self) -> Tensor:
        """Channels from the most important to the least: int16, of the shape of both."""
        return self.importance.argsort(dim=-1, descending=True, stable=True).to(torch.int16)
