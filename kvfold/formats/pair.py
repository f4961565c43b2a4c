"""The formats of a layer's keys and values."""

from dataclasses import dataclass, replace
from functools import cached_property

from kvfold.formats.base import Format, Window
from kvfold.formats.latent import KeyView, latent
from kvfold.formats.names import check_names, get_format
from kvfold.formats.rules import log_stand_in
from kvfold.formats.statistics import FEWEST_FITTED, FIT_TOKENS, KeyStatistics


@dataclass(frozen=True)
class FormatPair:
    """The format of a layer's keys and that of its values.

    A token is dense or folded as a whole, so the pair has one window: the wider of the two.
    """

    keys: Format
    values: Format
    own_window: Window | None = None
    """A window in the place of the formats' own; tokens then fold by whole pages."""
    awaits_bits: bool = False
    """Whether the bits of keys and of values still depend on a prompt's first tokens."""

    @cached_property
    def awaits_fit(self) -> bool:
        """Whether a format must see statistics before it folds."""
        return self.awaits_bits or self.keys.awaits_fit or self.values.awaits_fit

    @property
    def needs_calibration(self) -> bool:
        """Whether a format must see a calibration before it folds."""
        return self.keys.needs_calibration or self.values.needs_calibration

    @property
    def fit_tokens(self) -> int:
        """Tokens of a sequence that statistics need before its first fold; 0 if nothing awaits statistics."""
        return max(FIT_TOKENS, self.window.sinks + FEWEST_FITTED) if self.awaits_fit else 0

    @cached_property
    def window(self) -> Window:
        if self.own_window is not None:
            return self.own_window
        k, v = self.keys.window, self.values.window
        return Window(max(k.sinks, v.sinks), max(k.recent, v.recent), max(k.undo, v.undo))

    @cached_property
    def folds_by_token(self) -> bool:
        return self.own_window is None and self.keys.folds_by_token and self.values.folds_by_token

    @property
    def shares_pages(self) -> bool:
        """Whether values are the first channels of keys, in the same pages."""
        return isinstance(self.values, KeyView)

    @property
    def dense_channels(self) -> int:
        """Numbers of a token that stays dense."""
        return self.keys.head_dim + (0 if self.shares_pages else self.values.head_dim)

    def with_formats(self, keys: Format, values: Format) -> "FormatPair":
        """The same pair with other formats; values that are a view of keys become a view of the new ones."""
        return replace(self, keys=keys, values=KeyView.of(keys, values.head_dim) if self.shares_pages else values)

    def calibrated(self, statistics: KeyStatistics) -> "FormatPair":
        """The formats, fitted to a calibration's statistics; values only if no prompt can fit them."""
        keys, values = self.keys, self.values
        if keys.awaits_fit or keys.needs_calibration:
            keys = keys.fitted(statistics)
        if values.needs_calibration:
            values = values.fitted(statistics)
        return self.with_formats(keys, values)

    def at(self, layer: int, frequencies: tuple[float, ...] | None) -> "FormatPair":
        """`Format.at` of both."""
        return self.with_formats(self.keys.at(layer, frequencies), self.values.at(layer, frequencies))


def get_formats(
    names: str, key_dim: int, value_dim: int, window: Window | None = None, *, values_of_keys: bool = False
) -> FormatPair:
    """Formats of keys and values by name, such as "kvfold-4" for both or "kvfold-4:turboquant-3" for one each.

    Parameters
    ----------
    names
        One name for both, one each, or one of `PAIRS`.
    key_dim, value_dim
        Coordinates of a key and of a value.
    window
        What stays dense; None: what the formats say.
    values_of_keys
        Whether a value is the first `value_dim` channels of its key (multi-head latent attention). Only the keys' name
        counts then, and the other channels stay float16.

    Raises
    ------
    ValueError
        If a name is unknown, or its format cannot take the dimension.
    """
    keys, values = check_names(names)
    if values_of_keys:
        if values != keys:
            log_stand_in(values, f"a view of {keys} keys", "values of latent attention are the latent again")
        form = latent(keys, key_dim, value_dim)
        return FormatPair(form, KeyView.of(form, value_dim), window)
    return FormatPair(get_format(keys, key_dim), get_format(values, value_dim, lanes="channels"), window)
