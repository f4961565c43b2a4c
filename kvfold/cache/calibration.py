"""Statistics of a model's layers, measured once and kept in a file."""

import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from reprlib import repr as short
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from kvfold.cache.files.paths import check_input, replacing
from kvfold.formats import KeyStatistics
from kvfold.formats.numbers import MOST_OF_A_MODEL, whole
from kvfold.quant.spectral import spectral_rotation

logger = logging.getLogger("kvfold")

KIND = "kvfold-calibration-1"
NAMES = ("query_energy", "key_variance")
"""What a file has of each layer's statistics."""
ENERGY = "energy"
"""What it may have, too."""
ROTATIONS = ("key_rotation", "value_rotation")
"""What it may have beside these, too."""
OPTIONAL = (ENERGY, *ROTATIONS)
SKETCH = "sketch."
"""How names of the model's weights begin there."""

PAGE_SIZE = 64
"""Tokens of the pages within which the keys' variance is taken. A format may have other pages: the order of channels,
which follows from the variance, hardly depends on the page size."""
SINKS = 16
"""The first tokens of a text are outliers, and mostly stay dense: they do not count."""

SHORTEST = SINKS + PAGE_SIZE
"""Tokens of the shortest passage that counts."""

LOSS_BITS = 2
"""Bits at which losses are measured: few, so that losses are large beside rounding errors."""


class Loss(NamedTuple):
    """What folding one side of a layer costs."""

    kl: float  # KL(dense ‖ folded) a token, in nats, with that side alone in kvfold's `LOSS_BITS`
    channels: int  # numbers of a token that the side holds, over all KV heads


class Observed:
    """Sums up statistics of one layer's keys, values and queries.

    Keys are rotated by C = E[q·qᵀ], over the queries of all heads that share a KV head: an error e of a key moves
    scores by q·e, in the mean square eᵀ·C·e. Values are rotated by Σ w·v·vᵀ / Σ w, with the weight w = kᵀ·C·k of a
    token's mean squared score. That is how OSCAR's authors compute both (arXiv 2605.17757); for w, C is of the queries
    up to the same call.
    """

    def __init__(self) -> None:
        self._energy: Any = 0.0  # Σ q², (kv_heads, head_dim)
        self._queries = 0
        self._key_energy: Any = 0.0  # Σ k²
        self._variance: Any = 0.0  # Σ over pages of the variance within
        self._pages = 0
        self._query_moment: Any = None  # Σ q·qᵀ / heads that share a KV head, (kv_heads, head_dim, head_dim)
        self._value_moment: Any = None  # Σ w·v·vᵀ, (kv_heads, value_dim, value_dim)

    def add(self, query: Tensor, key: Tensor, value: Tensor | None, *, begins: bool = True) -> None:
        """Add tokens of one text, its first ones if it `begins`; the keys' variance counts whole pages only.

        Queries are (1, heads, tokens, head_dim), rotated by position like the keys, (1, kv_heads, tokens, head_dim).
        Values are (1, kv_heads, tokens, value_dim), or None if they are a view of the keys: nothing is rotated then.
        """
        first = SINKS if begins else 0
        energy = query[0, :, first:].float().square().unflatten(0, (key.shape[1], -1))
        self._energy = self._energy + energy.mean(1).sum(1)
        self._queries += energy.shape[2]
        keys = key[0, :, first:]
        if value is not None and keys.shape[1]:
            self._add_moments(query[0, :, first:].float(), keys.float(), value[0, :, first:].float())
        self._key_energy = self._key_energy + keys.float().square().sum(1)
        pages = keys.shape[1] // PAGE_SIZE
        if pages:
            variance = KeyStatistics.of(keys, energy[:, 0], PAGE_SIZE).key_variance
            self._variance = self._variance + pages * variance
            self._pages += pages

    def _add_moments(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Add to the second moments that rotations follow from: queries (heads, T, D), others (kv_heads, T, ·)."""
        by_head = query.unflatten(0, (key.shape[0], -1))
        moment = (by_head.flatten(1, 2).mT @ by_head.flatten(1, 2)) / by_head.shape[1]
        self._query_moment = moment if self._query_moment is None else self._query_moment + moment
        weight = ((key @ (self._query_moment / self._queries)) * key).sum(-1, keepdim=True)
        weighted = (value * weight).mT @ value
        self._value_moment = weighted if self._value_moment is None else self._value_moment + weighted

    @property
    def enough(self) -> bool:
        """Whether there are queries and a whole page of keys."""
        return self._queries > 0 and self._pages > 0

    def statistics(self) -> KeyStatistics:
        """The means; raises ValueError if it has not seen enough."""
        if not self.enough:
            raise ValueError("nothing was attended through this layer: it has no statistics")
        tokens, moments = self._queries, (self._query_moment, self._value_moment)
        rotations = [None if moment is None else spectral_rotation(moment) for moment in moments]
        means = self._energy / tokens, self._variance / self._pages, self._key_energy / tokens
        return KeyStatistics(*means, *rotations)


@dataclass(frozen=True, eq=False)
class Calibration:
    """Statistics that fitted formats use in place of each prompt's own first tokens.

    Attributes
    ----------
    layers
        Statistics of each full-attention layer, tensors (kv_heads, head_dim), rotations (kv_heads, head_dim, head_dim),
        by the layer's index.
    about
        What they were measured on: model_type, text_sha, tokens.
    losses
        What folding each layer's keys and values costs (latents: both in one), by the layer's index; it decides their
        bits. Empty: all layers keep their formats' bits, whatever the prompt.
    sketch
        A few numbers of the model's weights (`kvfold.cache.sketch`), by which another model is refused. Empty: nobody
        can tell whose statistics these are.
    """

    layers: Mapping[int, KeyStatistics]
    about: Mapping[str, str] = field(default_factory=dict)
    losses: Mapping[int, tuple[Loss, ...]] = field(default_factory=dict)
    sketch: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for index, statistics in self.layers.items():
            whole("layers", index, most=MOST_OF_A_MODEL)
            for name in (*NAMES, ENERGY):
                tensor = getattr(statistics, name)
                if tensor is not None and not (tensor.isfinite().all() and (tensor >= 0).all()):
                    raise ValueError(f"layer {index}: {name} holds a NaN, an infinity, or a number below 0")
            for name in ROTATIONS:
                if (rotation := getattr(statistics, name)) is not None and not _orthogonal(rotation):
                    raise ValueError(f"layer {index}: {name} holds a matrix that is no rotation")
        for index, losses in self.losses.items():
            if not all(isfinite(loss.kl) and loss.channels > 0 for loss in losses):
                raise ValueError(f"layer {index}: losses = {losses} are no finite KL of one or more channels")
        if not all(part.ndim in (1, 2) and part.isfinite().all() for part in self.sketch.values()):
            raise ValueError("sketch holds a NaN, an infinity, or what is no vector or matrix")
        if not all(isinstance(text, str) for pair in self.about.items() for text in pair):
            raise ValueError(f"about = {dict(self.about)!r}: give texts by name, as a file has them")

    @classmethod
    def of(
        cls, given: "Calibration | str | os.PathLike[str] | None", model_type: str | None, layers: int
    ) -> "Calibration | None":
        """The calibration given, loaded if it is a file's path.

        Raises ValueError if it is plainly of another model than one with so many layers and, if known, this type.
        """
        if given is None:
            return None
        if not isinstance(given, Calibration | str | os.PathLike):
            raise TypeError(f"calibration = {short(given)}: give a kvfold.Calibration, or a file's path")
        calibration = given if isinstance(given, Calibration) else cls.load(given)
        if calibration is not given and not calibration.sketch:
            logger.warning(
                "calibration = %r does not say of which weights it is: nobody can tell whether it fits", given
            )
        measured, last = calibration.about.get("model_type"), max(calibration.layers, default=0)
        other = model_type is not None and measured not in (None, model_type)
        theirs = calibration.about.get("layers", str(layers))
        if other or last >= layers or theirs != str(layers):
            count = f"at least {last + 1}" if "layers" not in calibration.about else theirs
            raise ValueError(
                f"the calibration is of a {measured or 'model'} with {count} layers, this is a "
                f"{model_type or 'model'} with {layers}: calibrate this model"
            )
        return calibration

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file, float32: `layers.N.query_energy`, `layers.N.key_variance`, if they are known
        `layers.N.energy`, `layers.N.key_rotation` and `layers.N.value_rotation`, of losses `layers.N.loss`, (sides, 2),
        KL and channels, and of the model's weights `sketch.…`."""
        tensors = {}
        for index, statistics in self.layers.items():
            for name in (*NAMES, *OPTIONAL):
                if (tensor := getattr(statistics, name)) is not None:
                    tensors[f"layers.{index}.{name}"] = tensor.float().contiguous().clone()
        for index, losses in self.losses.items():
            tensors[f"layers.{index}.loss"] = torch.tensor(losses)
        for name, part in self.sketch.items():
            tensors[f"{SKETCH}{name}"] = part.float().contiguous().clone()
        with replacing(path) as file:
            file.write(save(tensors, {**self.about, "kind": KIND}))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Calibration":
        """Read what `save` wrote.

        Raises
        ------
        FileNotFoundError
            If there is no such file.
        ValueError
            If it is no calibration.
        """
        check_input(path, "calibration", "kvfold calibrate")
        damaged = f"calibration = {str(path)!r}: the file is damaged; kvfold calibrate makes a new one"
        parts: dict[int, dict[str, Tensor]] = {}
        sketch: dict[str, Tensor] = {}
        try:
            with safe_open(path, framework="pt") as file:
                about = dict(file.metadata() or {})
                if about.pop("kind", None) != KIND:
                    raise ValueError(f"calibration = {str(path)!r}: of another kind; kvfold calibrate makes one")
                for key in file.keys():  # noqa: SIM118
                    if key.startswith(SKETCH):
                        sketch[key.removeprefix(SKETCH)] = file.get_tensor(key)
                        continue
                    match = re.fullmatch(r"layers\.(0|[1-9][0-9]{0,4})\.(\w+)", key)
                    if match is None or match[2] not in (*NAMES, *OPTIONAL, "loss"):
                        raise ValueError(damaged)
                    parts.setdefault(int(match[1]), {})[match[2]] = file.get_tensor(key)
        except SafetensorError:
            raise ValueError(damaged) from None
        losses = {index: _losses(tensors.pop("loss"), damaged) for index, tensors in parts.items() if "loss" in tensors}
        for tensors in parts.values():
            if tensors.keys() - {*OPTIONAL} != {*NAMES} or any(x.dtype != torch.float32 for x in tensors.values()):
                raise ValueError(damaged)
            shape = tensors[NAMES[0]].shape
            for name, tensor in tensors.items():
                expected = (*shape[:1], *2 * tensor.shape[-1:]) if name in ROTATIONS else shape
                if tensor.ndim != (3 if name in ROTATIONS else 2) or tensor.shape != expected:
                    raise ValueError(damaged)
            if "key_rotation" in tensors and tensors["key_rotation"].shape[-1] != shape[-1]:
                raise ValueError(damaged)
        if any(part.dtype != torch.float32 for part in sketch.values()):
            raise ValueError(damaged)
        layers = {index: KeyStatistics(**tensors) for index, tensors in sorted(parts.items())}
        try:
            return cls(layers, about, dict(sorted(losses.items())), sketch)
        except ValueError:
            raise ValueError(damaged) from None


def _orthogonal(rotation: Tensor) -> bool:
    """Whether matrices (heads, D, D) turn vectors and do nothing else, up to rounding."""
    far = rotation @ rotation.mT - torch.eye(rotation.shape[-1], device=rotation.device)
    return bool((far.abs() < 1e-3).all())


def _losses(pairs: Tensor, damaged: str) -> tuple[Loss, ...]:
    """Losses of a layer's sides, from a tensor in a file; raises ValueError if it is malformed."""
    right = pairs.ndim == 2 and pairs.shape[0] in (1, 2) and pairs.shape[1] == 2
    if not right or not pairs.isfinite().all() or (pairs[:, 1] < 1).any():
        raise ValueError(damaged)
    return tuple(Loss(kl, int(channels)) for kl, channels in pairs.tolist())
