"""One folded layer as transformers sees it."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvfold.cache.batch import Appended
from kvfold.cache.layer import LayerCache
from kvfold.integrations.transformers.handle import FoldedHandle
from kvfold.integrations.transformers.watch import calling_modules
from kvfold.kernels.graphs import outside_graphs

logger = logging.getLogger("kvfold")

ATTACHMENT = "_kvfold_attachment"
"""The attribute of attached models, and of their decoders."""


@dataclass
class ForwardPass:
    """What the layers of a cache must know of the current forward pass."""

    reads_folded: bool = False  # whether an attached model runs, whose attention takes handles
    backend: str | None = None  # the backend that reads them; None for the fastest
    unread: list[Appended] = field(default_factory=list)  # what folded layers have appended and still await queries of
    # Padding columns at the left of each row; None if there are none, or they are not known.
    padding: Sequence[int] | None = None
    warned: set[str] | None = None  # what has been logged, so that it is logged once
    # The layer whose new keys and values a compiled graph has yet to bring to attention; None if there is none.
    awaited: int | None = None

    def warn_once(self, message: str) -> None:
        """Log `message` unless this cache already has."""
        self.warned = self.warned or set()
        if message not in self.warned:
            self.warned.add(message)
            logger.warning(message)

    def wait_no_longer(self) -> None:
        """Fit formats to keys alone in layers whose queries folded attention did not see."""
        waited = False
        for appended in self.unread:
            waited |= appended.awaits_queries
            appended.layer.observe(None, appended)
        if waited:
            self.warn_once(
                "this model does not show its queries to the cache: all layers keep the bits of their format, and all "
                "channels count as read alike"
            )


class FoldedLayer(CacheLayerMixin):  # type: ignore[misc]
    """A `LayerCache` behind transformers' layer interface."""

    is_sliding = False
    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, folded: LayerCache, forward_pass: ForwardPass) -> None:
        super().__init__()
        self.folded = folded
        self.forward_pass = forward_pass

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: `is_initialized` would promise that there are dense `keys` and `values`."""

    @outside_graphs
    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append tokens; return handles for folded attention, or else dense keys and values.

        Dense ones are the unfolded past, followed by this call's own tokens unchanged.
        """
        key, value = self.as_stored(key_states, value_states)
        if self.forward_pass.reads_folded:
            appended = self.folded.append(key, value, self.forward_pass.padding)
            if appended.awaits_queries:  # the others would keep a prompt's dense tokens alive
                self.forward_pass.unread = [new for new in self.forward_pass.unread if new.awaits_queries] + [appended]
            how = self.forward_pass.warn_once, self.forward_pass.backend
            return FoldedHandle(appended, key_states, 0, *how), FoldedHandle(appended, value_states, 1, *how)
        if self.folded.config.sharpen:
            raise ValueError("sharpen = True, but this model does not read folded caches: kvfold.attach(model) first")
        if not self.forward_pass.warned and any(ATTACHMENT in vars(caller) for caller in calling_modules()):
            raise RuntimeError(
                "this model is attached, but did not find this cache among its arguments, and so does not read it "
                "folded: give the FoldedCache itself, or kvfold.detach(model) to unfold it at each read"
            )
        self.forward_pass.warn_once(
            "this model does not read the folded cache, so every step unfolds it into dense keys and values: "
            "answers are right, but it takes time and a dense copy of one layer. kvfold.attach(model), where it can, "
            "lets attention read it folded. Nor does the cache see queries so: all layers keep the bits of their "
            "format, and all channels count as read alike."
        )
        past = self.folded.unfold(key_states.dtype) if self.folded.columns else None
        self.folded.observe(None, self.folded.append(key, value, self.forward_pass.padding))
        self.forget_outside()
        if past is None:
            return key_states, value_states
        if self.folded.config.values_of_keys:
            past = past[1], past[0][..., past[1].shape[-1] :]
        return torch.cat((past[0], key_states), dim=2), torch.cat((past[1], value_states), dim=2)

    def as_stored(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values to fold, made from what the model gives."""
        return key_states, value_states

    def forget_outside(self) -> None:
        """Free what no later token reads: nothing, as each reads all."""

    def get_seq_length(self) -> int:
        """Columns seen, padding included."""
        return self.folded.columns

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the columns that a mask must cover."""
        return self.folded.columns + query_length, 0

    def get_max_length(self) -> int:
        """-1: no maximum."""
        return -1

    get_max_cache_shape = get_max_length  # its name before transformers 5.20

    def reset(self) -> None:
        """Forget everything."""
        self.folded.clear()

    def length_after(self, tokens_to_remove: int) -> int:
        """Columns that `crop` keeps."""
        tokens_to_remove = int(tokens_to_remove)  # generation passes a tensor before transformers 5.20
        return tokens_to_remove if tokens_to_remove > 0 else max(self.folded.columns + tokens_to_remove, 0)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the newest -`tokens_to_remove` columns; a positive number is the length to keep."""
        self.crop_to(self.length_after(tokens_to_remove))

    def crop_to(self, keep: int) -> None:
        """Forget all but the first `keep` columns."""
        if self.folded.crop(keep):
            self.forward_pass.warn_once(
                f"crop to {keep} tokens goes back further than what leaves no trace, up to {self.folded.undo} of the "
                "newest pass: tokens whose page had folded go on from their folded values"
            )

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let row i be what row `beam_idx[i]` was."""
        self.folded.select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times."""
        self.folded.select(torch.arange(self.folded.batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices` (or those where a bool mask is True)."""
        indices = torch.as_tensor(indices)
        self.folded.select(indices.nonzero().flatten() if indices.dtype == torch.bool else indices)

    def offload(self) -> None:
        """Not supported."""
        raise NotImplementedError("a folded cache is not offloaded: it is a quarter of the size already")

    def prefetch(self) -> None:
        """Not supported."""
        self.offload()


class FoldedSlidingLayer(FoldedLayer):
    """A folded layer whose tokens read a sliding window, with the mask that transformers makes for dense windows."""

    is_sliding = True

    def __init__(self, folded: LayerCache, forward_pass: ForwardPass) -> None:
        super().__init__(folded, forward_pass)
        self.record_past = False  # whether pages stay, whatever the window has left behind, until a crop

    def activate_past_recording(self) -> None:
        """Let pages stay until a crop, so that a draft of any length can be cropped."""
        self.record_past = True

    def forget_outside(self) -> None:
        """Free pages that the window has left behind."""
        if not self.record_past:
            self.folded.forget_outside()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the columns that a mask must cover, as a dense window has them."""
        start = self.folded.window_start(self.folded.columns)
        return self.folded.columns - start + query_length, start

    def get_max_length(self) -> int:
        """Width of the window."""
        return self.folded.config.sliding

    get_max_cache_shape = get_max_length

    def crop_to(self, keep: int) -> None:
        """Forget all but the first `keep` columns, and what the window has left behind of these."""
        super().crop_to(keep)
        self.folded.forget_outside()
