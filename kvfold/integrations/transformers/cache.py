"""A transformers `Cache` whose full-attention layers are folded."""

import logging
import os
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicSlidingWindowLayer

from kvfold.attention import attend
from kvfold.cache.calibration import Calibration
from kvfold.cache.config import layer_configs
from kvfold.cache.files.contents import FLOATS, read, write
from kvfold.cache.layer import LayerCache
from kvfold.cache.policy import Policy
from kvfold.cache.report import CacheReport, held_bytes
from kvfold.cache.sketch import check_same
from kvfold.eviction import Eviction
from kvfold.eviction.evictor import Evictor
from kvfold.formats.numbers import LARGEST, truth, whole
from kvfold.integrations.transformers.changes import batch_of, change_all, check_layers_have, crop_all, rows_of
from kvfold.integrations.transformers.evicting import check_once, for_model
from kvfold.integrations.transformers.handle import appended_of
from kvfold.integrations.transformers.latent import LatentLayer
from kvfold.integrations.transformers.layer import FoldedLayer, FoldedSlidingLayer, ForwardPass
from kvfold.integrations.transformers.masks import where_allowed
from kvfold.integrations.transformers.operator import await_attention, not_taken, number_of
from kvfold.integrations.transformers.origin import Origin, check_kind
from kvfold.integrations.transformers.passes import Passes
from kvfold.integrations.transformers.reporting import report_of
from kvfold.integrations.transformers.rope import layer_frequencies
from kvfold.integrations.transformers.saving import KIND, VERSION, cache_from_saved, cache_to_saved, held_by_layer
from kvfold.integrations.transformers.shapes import cache_layers, check_shape, layer_shapes
from kvfold.integrations.transformers.states import WatchedStates
from kvfold.integrations.transformers.window import only_the_window, rounded
from kvfold.integrations.weights import sketch_of
from kvfold.kernels.graphs import outside_graphs

logger = logging.getLogger("kvfold")


class FoldedCache(WatchedStates):
    """A KV cache that stays folded.

    Pass it to a model's `forward` or `generate` as `cache` (`past_key_values` before transformers 5.24). After
    `kvfold.attach(model)`, attention reads it folded; otherwise it is unfolded at each read, which is right but slow.

    Layers with a sliding window are dense unless the policy folds them (`Policy.sliding`). Layers with linear attention
    or no cache of their own are those of `DynamicCache`, dense.

    Parameters
    ----------
    config
        The model's config.
    format
        Name of a format for keys and values, or of one each ("kvfold-4:turboquant-3"); `kvfold formats`
        lists them. "kvfold-4" if neither it nor a policy is given.
    policy
        Formats layer by layer, in the place of `format`.
    dense_dtype
        dtype of the tokens that stay dense, in sliding windows, too. None: the model's if it has 16 bits, else float16.
    calibration
        Statistics of this model (`kvfold.calibrate`, or a file that `kvfold calibrate` wrote) for formats that are
        fitted, such as "kvfold-4". "oscar-4" folds with one only. None: statistics come from the first 256 tokens of
        each sequence, and nothing of it folds before it has that many. These first tokens also choose the bits of each
        layer; with a calibration its losses do, if it has them (`kvfold.measure_losses`). With "kvfold-3" each layer's
        keys, and its values, have 2, 3 or 4 bits, and 3 on average. Sequences of one length in a batch share bits. A
        policy with `budgets=False` gives all layers equal bits.
    sharpen
        Whether attention scales scores to offset the effect of tbq and tbqp codes of keys (head_dim 64 and 256).
    eviction
        Which tokens folded layers forget, and when (`kvfold.TriAttention`, …); for an attached model. None: none.

    Raises
    ------
    ValueError
        On an unknown format, one that cannot take the config's head_dim, an encoder-decoder config, both a format and a
        policy, or a calibration or eviction policy that does not fit the model.
    TypeError
        If the config, the policy or the eviction policy is of another class.
    FileNotFoundError
        If there is no such calibration file.

    Examples
    --------
    >>> cache = FoldedCache(model.config, "kvfold-4")
    >>> kvfold.attach(model)
    >>> model.generate(**inputs, past_key_values=cache)
    >>> cache.bits_per_value()
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        format: str | None = None,
        *,
        policy: Policy | None = None,
        dense_dtype: torch.dtype | None = None,
        calibration: Calibration | str | os.PathLike[str] | None = None,
        sharpen: bool = False,
        eviction: Eviction | None = None,
    ) -> None:
        if not isinstance(config, PreTrainedConfig):
            raise TypeError(f"config is a {type(config).__name__}: give a model's config, such as model.config")
        if dense_dtype is not None and dense_dtype not in FLOATS.values():
            known = ", ".join(map(str, FLOATS.values()))
            raise ValueError(f"dense_dtype = {dense_dtype!r}: give one of {known}, or None")
        eviction = None if eviction is None else _checked(eviction)
        truth("sharpen", sharpen)
        policy = Policy.of(format, policy)
        self.text_config = config.get_text_config(decoder=True)
        self.forward_pass = ForwardPass()
        self.origin = Origin()
        self.ids: Tensor | None = None
        layers = cache_layers(config)
        measured = Calibration.of(calibration, self.text_config.model_type, self.text_config.num_hidden_layers)
        self.sketch = {} if measured is None else measured.sketch
        self.shapes = layer_shapes(config, layers)
        configs = layer_configs(
            self.shapes, policy, measured, dense_dtype=dense_dtype, sharpen=sharpen,
            frequencies=lambda index, format: layer_frequencies(self.text_config, self.shapes[index], format),
        )  # fmt: skip
        for i, own in configs.items():
            shape, folded = self.shapes[i], LayerCache(own)
            if shape.kind == "sliding":
                layers[i] = FoldedSlidingLayer(folded, self.forward_pass)
            elif shape.kind == "latent":
                layers[i] = LatentLayer(folded, self.forward_pass, rank=shape.key_dim, rope=shape.value_dim)
            else:
                layers[i] = FoldedLayer(folded, self.forward_pass)
        wanted = any(policy.format_of(i, len(layers)) is not None for i in range(len(layers)))
        if wanted and not any(isinstance(layer, FoldedLayer) for layer in layers):
            kinds = ", ".join(sorted({type(layer).__name__ for layer in layers}))
            logger.warning(
                "no layer of this %s config folds (its layers are %s), so this cache is dense: linear attention does "
                "not fold, and sliding windows do if the policy says so (kvfold.Policy(format, sliding=True))",
                self.text_config.model_type, kinds,
            )  # fmt: skip
        self.evictor: Evictor | None = None
        super().__init__(layers=layers)
        if eviction is not None:
            self._evict_by(eviction)
        self.passes = Passes(self.layers, self.shapes, self.forward_pass)
        self._columns = 0  # of all folded layers, when the pass began
        self.number: Tensor | None = None
        # Whether graphs can hold all layers' part of a pass.
        self.fits_graphs = all(type(layer) is FoldedLayer for layer in layers)

    def _folded(self) -> list[LayerCache]:
        return [layer.folded for layer in self.layers if isinstance(layer, FoldedLayer)]

    def _full(self) -> list[LayerCache]:
        """Folded layers whose tokens read all earlier ones."""
        return [layer for layer in self._folded() if not layer.config.sliding]

    def _stored_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of dense tokens that come as `dtype`; the same if no layer folds, as all is transformers' then."""
        folded = (layer.folded for layer in self.layers if isinstance(layer, FoldedLayer))
        return next((layer.config.stored_dtype(dtype) for layer in folded), dtype)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Add tokens to layer `layer_idx`.

        If that fails, all layers forget this forward pass's tokens, so that they hold the same ones.

        Raises
        ------
        ValueError
            On keys or values that this cache's config does not make, or that hold NaN or infinity.
        """
        if not 0 <= layer_idx < len(self.layers):
            raise ValueError(
                f"layer_idx = {layer_idx}, but this cache was made for a config with {len(self.layers)} layers"
            )
        if self.evictor is not None and not self.forward_pass.reads_folded:
            raise ValueError(
                "eviction is given, but this model does not read folded caches: kvfold.attach(model) first, or leave "
                "it out"
            )
        if torch.compiler.is_dynamo_compiling() and self.forward_pass.reads_folded and self.fits_graphs:
            return await_attention(self, layer_idx, key_states, value_states)
        with self.passes.touching(layer_idx, "update"):
            layer = self.layers[layer_idx]
            if isinstance(layer, FoldedLayer):
                if not layer.folded.columns:
                    check_shape(key_states, self.shapes[layer_idx], layer_idx, self.text_config)
                return layer.update(key_states, value_states, *args, **kwargs)
            if not isinstance(layer, DynamicSlidingWindowLayer):
                return super().update(key_states, value_states, layer_idx, *args, **kwargs)
            new = rounded(key_states, value_states, self._stored_dtype(key_states.dtype), layer_idx)
            read = super().update(*new, layer_idx, *args, **kwargs)
            return only_the_window(layer, read, key_states.shape[2], key_states.dtype)

    def append_and_attend(
        self, layer_idx: int, query: Tensor, key_states: Tensor, value_states: Tensor, *, mask: Tensor | None,
        **options: Any,
    ) -> Tensor:  # fmt: skip
        """`update`, then `kvfold.attention.attend` with `options`, as a compiled graph calls them."""
        appended = appended_of(*FoldedCache.update(self, key_states, value_states, layer_idx))  # a subclass's has run
        assert appended is not None
        mask = where_allowed(mask)
        return attend(query, appended, mask=mask, **options).transpose(1, 2).contiguous()

    @outside_graphs
    def begin_pass(
        self, model: PreTrainedModel, decoder: nn.Module, backend: str | None, attention_mask: object
    ) -> None:
        """Called when a forward pass of an attached model begins.

        Parameters
        ----------
        model, decoder
            What runs, and the part of it that attends.
        backend
            The backend that reads folded layers; None for the fastest.
        attention_mask
            The mask that the model was given.

        Raises
        ------
        ValueError
            If this cache is of another model's config or has another's calibration, or was loaded from a file and
            another model filled it.
        RuntimeError
            If an earlier pass of a model that is not attached did not get to its last layer.
        """
        check_kind(self.text_config, model.config.get_text_config(decoder=True))
        self.passes.forget_unended()
        if not self.origin.is_model(decoder):
            if not held_by_layer(self.layers, self.text_config):
                self.origin = Origin()
            self.origin.see(decoder)
            if self.sketch:
                check_same(self.sketch, sketch_of(decoder))
        if self.number is None and self.folds:
            self.number = number_of(self)
        self.forward_pass.reads_folded, self.forward_pass.backend = True, backend
        self.passes.begin()
        self._columns = sum(layer.columns for layer in self._folded())
        self.take_padding(attention_mask)

    def take_padding(self, attention_mask: object) -> None:
        """`set_padding`, if that is a mask of columns and some row awaits its first token."""
        if isinstance(attention_mask, Tensor) and attention_mask.ndim == 2 and self.awaits_rows:
            self.set_padding(attention_mask)

    @outside_graphs
    def end_pass(self, broken: bool) -> None:
        """Called when an attached model's forward pass ends; if it broke, all layers forget its tokens."""
        left, self.forward_pass.awaited = self.forward_pass.awaited, None
        begun = self.forward_pass.reads_folded
        if begun and (broken or left is not None):
            self.passes.roll_back()
        elif begun:
            self.forward_pass.wait_no_longer()
        # Choosing may fail, and then the pass is rolled back; what has been evicted cannot be.
        stays = begun and not broken and left is None
        plan = self.evictor.due(self._full()) if stays and self.evictor is not None else None
        self.forward_pass.reads_folded, self.forward_pass.padding = False, None
        self.forward_pass.unread.clear()
        self.passes.end()
        if left is not None and not broken:
            raise not_taken(left)
        if begun and not broken and self.folds and self._columns == sum(layer.columns for layer in self._folded()):
            raise ValueError(
                "the model was given this cache and did not use it: give it under the name of forward's argument, "
                "cache (past_key_values before transformers 5.24)"
            )
        if self.evictor is not None and plan is not None:
            self.evictor.act(plan)
        if stays:
            for layer in self.layers:
                if isinstance(layer, FoldedLayer):
                    layer.forget_outside()

    def evict(self, policy: Eviction) -> None:
        """Let a policy act once, now: what folded layers hold beyond its budget goes, whatever its interval.

        Raises
        ------
        ValueError
            If the policy does not fit the model, or it goes by queries and this cache kept none: make the cache with an
            `eviction` of that kind.
        """
        self.passes.end_unended("made to forget tokens")
        check_once(_checked(policy), None if self.evictor is None else self.evictor.policy)
        evictor = self._evictor(policy)
        evictor.act(evictor.plan(self._full()))

    def _evictor(self, policy: Eviction) -> Evictor:
        return Evictor(for_model(policy, self.text_config, self.shapes, self._full()))

    def _evict_by(self, policy: Eviction) -> None:
        self.evictor = self._evictor(policy)
        for layer in self._full():
            layer.keeps_queries = policy.asks_queries

    def crop(self, tokens_to_remove: int | Tensor) -> None:
        """Forget the newest -`tokens_to_remove` columns; a positive number is the length to keep.

        The cache is unchanged if it fails.

        Raises
        ------
        ValueError
            If tokens were evicted from what it would go back to.
        RuntimeError
            If a sliding-window or linear-attention layer does not hold what it would go back to.
        """
        # generation passes a tensor before transformers 5.20
        number: Any = tokens_to_remove
        if isinstance(number, Tensor) and number.numel() == 1:
            number = number.item()
        given = whole("tokens_to_remove", number, least=-LARGEST)
        self.passes.end_unended("cropped")
        columns = self.get_seq_length()
        remove = min(columns - given if given > 0 else -given, columns)
        if remove >= 0:
            crop_all(self.layers, remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let row i be what row `beam_idx[i]` was.

        Raises
        ------
        IndexError
            If there is no such row.
        """
        self.passes.end_unended("rearranged")
        rows = rows_of(beam_idx, "beam_idx", batch_of(self.layers), least=0)
        change_all(self.layers, lambda layer: layer.reorder_cache(rows))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times."""
        whole("repeats", repeats, least=1)
        self.passes.end_unended("repeated")
        check_layers_have(self.layers, "batch_repeat_interleave")
        change_all(self.layers, lambda layer: layer.batch_repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices`, counted from the end if negative, or those where a bool mask is True.

        Raises
        ------
        IndexError
            If there is no such row.
        """
        self.passes.end_unended("rearranged")
        batch = batch_of(self.layers)
        rows = rows_of(indices, "indices", batch, least=-batch)
        check_layers_have(self.layers, "batch_select_indices")
        change_all(self.layers, lambda layer: layer.batch_select_indices(rows))

    @property
    def folds(self) -> bool:
        """Whether any layer folds."""
        return any(isinstance(layer, FoldedLayer) for layer in self.layers)

    @property
    def is_initialized(self) -> bool:
        """Whether layers hold tokens."""
        folded = self._folded()
        return all(layer.columns > 0 for layer in folded) if folded else bool(super().is_initialized)

    @property
    def awaits_rows(self) -> bool:
        """Whether some row of the batch has not had its first token yet, so that padding matters."""
        return any(layer.folded.awaits_rows for layer in self.layers if isinstance(layer, FoldedLayer))

    def set_padding(self, attention_mask: Tensor) -> None:
        """Tell which columns at the left of each row are padding, so that they are never folded.

        An attached model does this by itself at each forward pass.

        Parameters
        ----------
        attention_mask
            (batch, columns), 0 where a column is padding.
        """
        present = attention_mask.to(torch.bool)
        first = torch.where(present.any(-1), present.int().argmax(-1), present.shape[-1])
        self.forward_pass.padding = first.tolist() if bool(first.any()) else None

    def reset(self) -> None:
        """Forget every token."""
        self.passes.end_unended("reset")
        super().reset()
        self.passes.end()
        self.forward_pass.padding = None
        if self.evictor is not None:
            self.evictor.clear()
        self.origin, self.ids, self.number = Origin(), None, None

    def __getstate__(self) -> dict[str, Any]:
        self.passes.check_between("copied")
        return dict(vars(self))

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.number is not None:  # a number of its own
            self.number = number_of(self)

    # Into a file and back

    def save(self, path: str | os.PathLike[str], *, ids: Tensor | None = None) -> None:
        """Write this cache into one safetensors file, whole or not at all.

        The file records formats, the model's config and, if an attached model filled the cache and still exists, a
        fingerprint of its weights.

        Parameters
        ----------
        path
            The file; one that is there is replaced once the new one is complete.
        ids
            The token ids that the cache holds, (batch, tokens) or (tokens,), for continuing the text: `load` gives them
            back as `ids`.

        Raises
        ------
        ValueError
            If a layer is of a class whose state is not known, `ids` are not of as many tokens as the cache holds, or
            a forward pass is under way.
        OSError
            If the file cannot be written.
        """
        self.passes.check_between("saved")
        write(path, KIND, VERSION, cache_to_saved(self, ids))

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], config: PreTrainedConfig | None = None, *, eviction: Eviction | None = None
    ) -> "FoldedCache":
        """Read a cache that `save` wrote, onto the CPU; it goes on as if it had never been saved.

        An attached model is compared with the one that filled the cache at its first forward pass, by the fingerprint
        in the file. The cache's `ids` are those that `save` was given: they do not grow with it.

        Parameters
        ----------
        path
            The file.
        config
            The config of the model that is to read it, which must agree with the saved one in all that shapes keys
            and values; None for the saved one, if transformers knows its `model_type`.
        eviction
            Which tokens it forgets from now on. What it had forgotten stays forgotten; a policy is not saved.

        Raises
        ------
        FileNotFoundError
            If there is no such file.
        ValueError
            If it is no saved cache, of another version, damaged, or of another model's config.
        """
        if config is not None and not isinstance(config, PreTrainedConfig):
            raise TypeError(f"config is a {type(config).__name__}: give a model's config, such as model.config")
        eviction = None if eviction is None else _checked(eviction)
        saved = read(path, KIND, VERSION)
        try:
            cache: FoldedCache = cache_from_saved(saved, cls, config)
        except ValueError as error:
            raise ValueError(f"path = {str(path)!r}: {error}") from None
        if eviction is not None:
            cache._evict_by(eviction)
        return cache

    def held_bytes(self) -> int:
        """Every byte that this cache owns: folded pages, dense tokens, dense layers, shared tables, statistics."""
        self.passes.forget_ended()
        return held_bytes(self.layers, *self._beside())

    def _beside(self) -> tuple[object, ...]:
        """What this cache owns beside its layers."""
        return self.ids, self.evictor, self.number, self.sketch

    def bits_per_value(self) -> float:
        """Held bits for each number that a dense cache would hold; NaN while empty."""
        return self.report().bits_per_value

    def report(self) -> CacheReport:
        """What is held, layer by layer, walked tensor by tensor."""
        self.passes.forget_ended()
        return report_of(self.layers, self._beside())


def _checked(policy: Eviction) -> Eviction:
    """A policy of eviction, or TypeError."""
    if not isinstance(policy, Eviction):
        raise TypeError(f"eviction = {policy!r}: give a policy such as kvfold.TriAttention(...)")
    return policy
