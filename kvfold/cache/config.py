"""Settings of each layer's cache, fixed before its first token."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from kvfold.cache.budgets import PromptBudgets, budgeted, prompt_budgets
from kvfold.cache.calibration import Calibration
from kvfold.cache.policy import Policy
from kvfold.cache.shape import LayerShape
from kvfold.formats import FormatPair, KeyStatistics, Window, get_formats
from kvfold.formats.base import PAGE_WINDOW


@dataclass(frozen=True, eq=False)
class LayerConfig:
    """How one layer folds its keys and values."""

    format: str  # a name for keys and values, or "keys:values" with one each (`kvfold.formats.FORMATS`)
    index: int = 0  # the layer's number, for messages
    # dtype of what stays dense. None: that of the keys if it has 16 bits, else float16.
    dense_dtype: torch.dtype | None = None
    window: Window | None = None  # what stays dense; None: what the formats say
    # Statistics for formats that are fitted; None: these wait for those of each sequence's first tokens.
    statistics: KeyStatistics | None = None
    frequencies: tuple[float, ...] | None = None  # RoPE's ω_f, for formats that undo RoPE on keys; None: not known
    # Whether a value is the first channels of its key, as in multi-head latent attention: it is held once.
    values_of_keys: bool = False
    sharpen: bool = False  # whether attention scales scores as the keys' format says (`Format.sharpness`)
    # Width of the layer's sliding window: a query reads itself and the sliding - 1 tokens before it. 0: all of them.
    sliding: int = 0
    # Decides this layer's bits by a sequence's first tokens; layers of a cache share one object. None: the layer has
    # its format's bits. Batch rows with equal padding get the same bits.
    budgets: PromptBudgets | None = None

    def formats_of(self, key_dim: int, value_dim: int) -> FormatPair:
        """The formats that each sequence starts with: not fitted, and awaiting bits if there are `budgets`.

        Raises ValueError if the format cannot take such keys or values, or there is no rule for how to sharpen it.
        """
        pair = self.formats_named(self.format, key_dim, value_dim)
        return pair if self.budgets is None else replace(pair, awaits_bits=True)

    def formats_named(self, names: str, key_dim: int, value_dim: int) -> FormatPair:
        """As `formats_of`, but of these names, for a layer whose bits the first tokens have decided."""
        pair = get_formats(names, key_dim, value_dim, self.window, values_of_keys=self.values_of_keys)
        if self.sharpen and pair.keys.sharpness(torch.ones(1)) is None:
            raise ValueError(
                f"sharpen = True, but there is no rule for keys of {key_dim} in {names!r}: it is for tbq and tbqp keys "
                "of 64 or 256"
            )
        return pair.at(self.index, self.frequencies)

    def calibrated(self, formats: FormatPair, kv_heads: int, key_dim: int) -> FormatPair:
        """`formats`, fitted to `statistics` if there are any and the formats await a fit.

        Raises ValueError if the statistics are of keys of another shape, or formats need a calibration, and there is
        none, or one that does not tell what they need.
        """
        if self.statistics is None and formats.needs_calibration:
            raise ValueError(
                f"layer {self.index}: {self.format!r} is fitted to the model, not to its prompt, and there is no "
                "calibration: give calibration=, what kvfold.calibrate returns or a file of kvfold calibrate (on the "
                "command line, --calibration FILE)"
            )
        if self.statistics is None or not (formats.keys.awaits_fit or formats.needs_calibration):
            return formats
        expected, given = (kv_heads, key_dim), tuple(self.statistics.key_variance.shape)
        if given != expected:
            raise ValueError(
                f"layer {self.index}: the calibration is of {given[0]} heads of {given[1]}, keys have {expected[0]} "
                f"heads of {expected[1]}: calibrate this model"
            )
        return formats.calibrated(self.statistics)

    def stored_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype that numbers of `dtype` are rounded to before they are stored."""
        if self.dense_dtype is not None:
            return self.dense_dtype
        return dtype if dtype.itemsize == 2 else torch.float16

    @property
    def kept_dense(self) -> str:
        """How to keep this layer dense, for messages."""
        windows = ", sliding=True" if self.sliding else ""
        return f"keep this layer dense: policy=Policy({self.format!r}, exceptions=[({self.index}, 'dense')]{windows})"


Frequencies = Callable[[int, str], tuple[float, ...] | None]
"""RoPE's ω_f of a layer, by its index and format; may raise ValueError if they are not known."""


def layer_configs(
    shapes: Sequence[LayerShape],
    policy: Policy,
    calibration: Calibration | None = None,
    *,
    dense_dtype: torch.dtype | None = None,
    sharpen: bool = False,
    frequencies: Frequencies = lambda index, format: None,
    planned: bool = False,
) -> dict[int, LayerConfig]:
    """How the layers of a cache fold, by index; those that stay dense are left out.

    `policy`, `calibration`, `dense_dtype` and `sharpen` are as `kvfold.FoldedCache` takes them. `frequencies` is called
    for layers whose format undoes RoPE on keys. What is only `planned` folds nothing and needs no calibration. Raises
    ValueError if a format does not fit a layer, or the calibration lacks a layer that needs it, or an exception folds a
    layer that cannot.
    """
    _check_exceptions(policy, shapes)
    policy = budgeted(policy, calibration, len(shapes))
    full = [index for index, shape in enumerate(shapes) if shape.kind == "full"]
    budgets = prompt_budgets(policy, calibration, len(shapes), full)
    configs = {}
    for index, shape in enumerate(shapes):
        format = policy.format_of(index, len(shapes))
        if format is None or not shape.may_fold(policy.sliding):
            continue
        config = LayerConfig(
            format, index, dense_dtype, policy.window if shape.kind != "sliding" else _without_sinks(policy.window),
            statistics=None if calibration is None else calibration.layers.get(index),
            values_of_keys=shape.kind == "latent" and shape.is_known,
            sharpen=sharpen,
            sliding=shape.window,
            budgets=budgets if budgets is not None and index in budgets.formats else None,
        )  # fmt: skip
        if shape.is_known:
            config = _checked(config, shape, calibration, frequencies, planned)
        configs[index] = config
    return configs


def _without_sinks(window: Window | None) -> Window:
    """What stays dense in a sliding window, which leaves the first tokens behind; tokens fold by whole pages there."""
    return replace(window or PAGE_WINDOW, sinks=0)


def _check_exceptions(policy: Policy, shapes: Sequence[LayerShape]) -> None:
    """Raise ValueError if an exception folds a layer that cannot fold, or a window is to fold that cannot."""
    for index, shape in enumerate(shapes):
        format = policy.format_of(index, len(shapes))
        if format is None or shape.may_fold(policy.sliding):
            continue
        if policy.sliding and shape.kind == "sliding":
            raise ValueError(
                f"policy: sliding = True, but the sliding window of layer {index} holds latents, or a state beside "
                f"keys and values, and does not fold: keep it dense, exceptions=[({index}, 'dense')]"
            )
        if policy.is_exception(index, len(shapes)):
            able = ", ".join(str(i) for i, other in enumerate(shapes) if other.may_fold(policy.sliding)) or "none"
            holds, remedy = "no keys and values that fold", f"name layers that fold ({able})"
            if shape.kind == "sliding":
                holds, remedy = "a sliding window", f"{remedy}, or let windows fold, too: sliding=True"
            raise ValueError(
                f"exceptions give layer {index} the format {format!r}, but it has {holds}, and stays dense: {remedy}"
            )


def _checked(
    config: LayerConfig, shape: LayerShape, calibration: Calibration | None, frequencies: Frequencies, planned: bool
) -> LayerConfig:
    """`config`, with RoPE's frequencies if its formats need them, and without rotations that they do not need.

    Raises ValueError if they do not fit the layer.
    """
    formats = config.formats_of(*shape.folded_dims)
    if formats.keys.turns_back:
        if config.sliding:
            raise ValueError(
                f"layer {config.index}: {config.format!r} turns keys back by their places, which tokens that a sliding "
                "window has left behind would shift: give another format, or keep windows dense (sliding=False)"
            )
        config = replace(config, frequencies=frequencies(config.index, config.format))
        formats = config.formats_of(*shape.folded_dims)
    if calibration is not None and formats.keys.awaits_fit and config.statistics is None and not config.sliding:
        raise ValueError(f"the calibration has no layer {config.index}: calibrate this model")
    if not planned:
        config.calibrated(formats, shape.kv_heads, shape.folded_dims[0])  # raises if it is of other keys, or missing
    if config.statistics is None:
        return config
    sides = {"keys": formats.keys.needs_calibration, "values": formats.values.needs_calibration}
    return replace(config, statistics=config.statistics.with_rotations(**sides))
