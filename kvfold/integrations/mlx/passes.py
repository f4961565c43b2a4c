"""What the layers of one prompt cache must know of each other: mlx-lm hands them on as a plain list."""

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import inf
from typing import Any
from weakref import WeakValueDictionary

from kvfold.cache.budgets import PromptBudgets
from kvfold.cache.mlx import ArrayLayer


class Passes:
    """Checks that each pass of a model, and each trim, reaches all layers of a prompt cache.

    An interrupt may end a pass in a model's own code, between two layers. So the check comes when the next pass begins.
    Layers of the same prompt cache find each other by its `name` once they are loaded, one by one.
    """

    def __init__(self, name: str | None = None) -> None:
        self.name = name or secrets.token_hex(8)
        self.broken: str | None = None  # why one of the layers did not take the tokens that others took
        self.trace = False  # whether the log has said that a trim left a trace
        self.budgets: PromptBudgets | None = None  # those that give bits to layers that were loaded
        self._copy: Passes | None = None  # those of a copy that is being made, layer by layer
        self._layers: WeakValueDictionary[int, ArrayLayer] = WeakValueDictionary()
        self._last: tuple[float, int, int] = inf, 0, 0  # the layer that changed last, and its tokens before and after

    def __getstate__(self) -> dict[str, Any]:
        return {name: x for name, x in vars(self).items() if name not in ("_layers", "_last", "_copy")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]
        vars(self).update(state)

    @classmethod
    def loaded(cls, name: str, layer: ArrayLayer) -> "Passes":
        """The passes of the prompt cache that `layer` is from: of the same name, and without a layer of this index."""
        passes = _LOADED.get(name)
        if passes is None or layer.index in passes._layers:
            passes = _LOADED[name] = cls(name)
        passes.join(layer)
        if layer.config.budgets is not None:
            own, passes.budgets = layer.config.budgets, passes.budgets or layer.config.budgets
            passes.budgets.join(own.formats)
            layer.config = replace(layer.config, budgets=passes.budgets)
        return passes

    def of_copy(self, index: int) -> "Passes":
        """The passes of a copy of the whole prompt cache, to which its layer `index` is about to be added."""
        if self._copy is None or index in self._copy._layers:
            self._copy = Passes()
        self._copy.broken, self._copy.trace = self.broken, self.trace
        return self._copy

    def join(self, layer: ArrayLayer) -> None:
        """Let this layer take part."""
        self._layers[layer.index] = layer

    def check(self) -> None:
        """Raise ValueError if a pass is known to have failed."""
        if self.broken is not None:
            raise ValueError(f"this prompt cache lost tokens in an earlier pass, make a new one: {self.broken}")

    def check_whole(self) -> None:
        """Raise ValueError if a pass failed or did not come to all layers."""
        self.check()
        held = {index: layer.columns for index, layer in self._layers.items()}
        if len({*held.values()}) > 1:
            most, least = (how(held, key=held.__getitem__) for how in (max, min))
            self.broken = f"layer {most} holds {held[most]} tokens, layer {least} holds {held[least]}"
            self.check()

    @contextmanager
    def one(self, layer: ArrayLayer) -> Iterator[None]:
        """Guard the part of a pass, or of a trim, that changes `layer`; if it fails, the whole pass has failed."""
        self.check()
        index, *last = self._last
        if layer.index <= index:  # another pass
            self.check_whole()
        before = layer.columns
        with self.reading():
            yield
            changed = [before, layer.columns]
            if layer.index > index and changed != last:
                raise ValueError(
                    f"layer {layer.index} went from {before} to {layer.columns} tokens, layer {index} from "
                    f"{last[0]} to {last[1]}"
                )
        self._last = layer.index, before, layer.columns

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Guard any part of a pass; if it fails, the whole pass has failed."""
        self.check()
        self.broken = "it was interrupted"  # until it has ended
        try:
            yield
        except Exception as error:
            self.broken = str(error)
            raise
        self.broken = None


_LOADED: WeakValueDictionary[str, Passes] = WeakValueDictionary()
"""By name: mlx-lm loads layers one by one."""
