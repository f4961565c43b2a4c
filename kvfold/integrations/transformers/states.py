"""States of transformers' own layers, which models read and write through the cache."""

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache

from kvfold.integrations.transformers.passes import Passes


class WatchedStates(Cache):  # type: ignore[misc]
    """A `Cache` whose states of linear attention and of sparse selection change within a pass that is watched.

    A model that is not attached tells nobody when its passes begin and end. So each read or write of a state says
    which layer it touches.
    """

    passes: Passes

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """As transformers' own, for a layer of linear attention; all layers forget the pass if it fails."""
        with self.passes.touching(layer_idx, ("updated conv", state_idx)):
            return super().update_conv_state(conv_states, layer_idx, state_idx, **kwargs)

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        """As `update_conv_state`."""
        with self.passes.touching(layer_idx, ("updated recurrent", state_idx)):
            return super().update_recurrent_state(recurrent_states, layer_idx, state_idx, **kwargs)

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Tensor:
        """As `update_conv_state`, for a layer with sparse selection."""
        with self.passes.touching(layer_idx, "indexer"):
            return super().update_indexer(indexer_key_states, layer_idx, *args, **kwargs)

    def get_conv_state(self, layer_idx: int, *args: Any, **kwargs: Any) -> Tensor | None:
        """As transformers' own; models write to the tensor that it returns, so this counts as a change of the layer."""
        self.passes.touch(layer_idx, ("conv", *args, *kwargs.values()))
        return super().get_conv_state(layer_idx, *args, **kwargs)

    def get_recurrent_state(self, layer_idx: int, *args: Any, **kwargs: Any) -> Tensor | None:
        """As `get_conv_state`."""
        self.passes.touch(layer_idx, ("recurrent", *args, *kwargs.values()))
        return super().get_recurrent_state(layer_idx, *args, **kwargs)

    def has_previous_state(self, layer_idx: int | None = None, *args: Any, **kwargs: Any) -> bool:
        """As transformers' own; before 5.20 models ask it before they write to a layer's states."""
        if layer_idx is not None:
            self.passes.touch(layer_idx, ("asked", *args, *kwargs.values()))
        return super().has_previous_state(layer_idx, *args, **kwargs)
