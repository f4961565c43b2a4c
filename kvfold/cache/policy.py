"""Which layers fold, and into what."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvfold.formats import DEFAULT, Window, check_names
from kvfold.formats.numbers import LARGEST, truth, whole, whole_field


@dataclass(frozen=True)
class Policy:
    """Formats of a model's layers.

    Attributes
    ----------
    format
        The format of every layer without an exception: one name for keys and values ("kvfold-4"), or one of each
        ("kvfold-4:turboquant-3"). "dense" folds no layer.
    dense_first, dense_last
        How many layers at the start and the end of the model stay dense.
    exceptions
        Formats of single layers, (layer index, format) pairs; negative indices count from the last layer. "dense" keeps
        a layer dense.
    window
        What stays dense in folded layers, overriding their formats; tokens then fold by whole pages.
    budgets
        Whether bits of kvfold's formats differ by layer, with about the same total: by a calibration's losses, or else
        by the prompt's first tokens, in kvfold-4 and below (docs/quality.md). Layers with an exception keep it, and
        layers with a sliding window have the bits of their format.
    sliding
        Whether layers with a sliding window fold, too. If not, they hold the window's tokens dense. They keep no first
        tokens dense, and forget whole pages that the window has left behind.

    Raises
    ------
    ValueError
        On an unknown format, or a value of the wrong kind. A layer that the model lacks, or that cannot fold and is to,
        raises when a cache is made.
    """

    format: str
    dense_first: int = 0
    dense_last: int = 0
    exceptions: Sequence[tuple[int, str]] = ()
    window: Window | None = None
    budgets: bool = True
    sliding: bool = False

    def __post_init__(self) -> None:
        for name in ("dense_first", "dense_last"):
            whole_field(self, name)
        if not isinstance(self.exceptions, Sequence) or any(
            not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2 for pair in self.exceptions
        ):
            raise ValueError(f"exceptions = {self.exceptions!r}: give pairs of a layer and a format, [(0, 'dense')]")
        truth("budgets", self.budgets)
        truth("sliding", self.sliding)
        numbered = ((whole("exceptions: layer", index, least=-LARGEST), format) for index, format in self.exceptions)
        object.__setattr__(self, "exceptions", tuple(numbered))
        if self.window is not None and not isinstance(self.window, Window):
            raise ValueError(f"window = {self.window!r}: give a kvfold.formats.Window, or None")
        for format in (self.format, *(format for _, format in self.exceptions)):
            if format != "dense":
                check_names(format)

    @classmethod
    def of(cls, format: str | None, policy: "Policy | None") -> "Policy":
        """The policy given, or that of one format for all layers, `DEFAULT` if neither is given."""
        if format is not None and policy is not None:
            raise ValueError(f"format = {format!r} and a policy: give one of them, the policy names formats itself")
        if policy is not None and not isinstance(policy, Policy):
            raise TypeError(f"policy = {policy!r}: give a kvfold.Policy, or a format's name as format")
        return policy or cls(DEFAULT if format is None else format)

    def is_exception(self, layer: int, num_layers: int) -> bool:
        """Whether layer `layer` has an exception."""
        return any(index % num_layers == layer for index, _ in self.exceptions if -num_layers <= index < num_layers)

    def format_of(self, layer: int, num_layers: int) -> str | None:
        """The format of layer `layer`, or None if it stays dense."""
        for index, format in self.exceptions:
            if not -num_layers <= index < num_layers:
                raise ValueError(f"exceptions name layer {index}: the model has layers 0 to {num_layers - 1}")
            if index % num_layers == layer:
                return None if format == "dense" else format
        if layer < self.dense_first or layer >= num_layers - self.dense_last:
            return None
        return None if self.format == "dense" else self.format
