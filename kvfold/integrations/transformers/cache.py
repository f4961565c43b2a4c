"""A transformers `Cache` whose full-attention layers are folded."""

import logging
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import Cache, DynamicLayer

from kvfold.cache.calibration import Calibration
from kvfold.cache.layer import LayerCache
from kvfold.cache.policy import Policy
from kvfold.cache.report import CacheReport, LayerReport, held_bytes
from kvfold.formats import DEFAULT, get_formats
from kvfold.integrations.transformers.layer import FoldedLayer, ForwardPass

logger = logging.getLogger("kvfold")


class FoldedCache(Cache):  # type: ignore[misc]
    """A KV cache that stays folded.

    Pass it to a model's `forward` or `generate` as `past_key_values`. After `kvfold.attach(model)`,
    attention reads it folded; otherwise it is unfolded at each read, which is right but slow.

    Layers with a sliding window, linear attention, or no cache of their own are those of
    `DynamicCache`, dense.

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
        dtype of the tokens that stay dense. None: the model's if it has 16 bits, else float16.
    calibration
        Statistics of this model (`kvfold.calibrate`, or a file that `kvfold calibrate` wrote) for formats that are
        fitted, such as "kvfold-4". None: they go by the first 256 tokens of each sequence, which stay dense until
        then.

    Raises
    ------
    ValueError
        On an unknown format, one that cannot take the config's head_dim, or an encoder-decoder
        config.

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
    ) -> None:
        if format is not None and policy is not None:
            raise ValueError(f"format = {format!r} and a policy: give one of them, the policy names formats itself")
        if getattr(config, "is_encoder_decoder", False):
            raise ValueError("config is of an encoder-decoder model: FoldedCache folds decoder-only models")
        if dense_dtype is not None and not dense_dtype.is_floating_point:
            raise ValueError(f"dense_dtype = {dense_dtype}: give a floating-point dtype, or None")
        policy = policy or Policy(format or DEFAULT)
        if calibration is not None and not isinstance(calibration, Calibration):
            calibration = Calibration.load(calibration)
        self.text_config = config.get_text_config(decoder=True)
        if calibration is not None:
            self._check_calibration(calibration)
        self.forward_pass = ForwardPass()
        layers = DynamicCache(config=config).layers
        for i, layer in enumerate(layers):
            fmt = policy.format_of(i, len(layers))
            if fmt is not None and self._folds(layer, i):
                shape = self._expected_shape(i)
                fitted = False
                if shape is not None:  # raises if the format cannot take this head_dim
                    fitted = get_formats(fmt, shape[1], shape[1]).awaits_fit
                statistics = None
                if calibration is not None:
                    statistics = calibration.layers.get(i)
                    if statistics is None and fitted:
                        raise ValueError(f"the calibration has no layer {i}: calibrate this model")
                layers[i] = FoldedLayer(LayerCache(fmt, i, dense_dtype, policy.window, statistics), self.forward_pass)
        wanted = any(policy.format_of(i, len(layers)) is not None for i in range(len(layers)))
        if wanted and not any(isinstance(layer, FoldedLayer) for layer in layers):
            kinds = ", ".join(sorted({type(layer).__name__ for layer in layers}))
            logger.warning(
                "no layer of this %s config folds (its layers are %s), so this cache is dense: sliding-window, linear "
                "and latent attention are not folded",
                self.text_config.model_type, kinds,
            )  # fmt: skip
        super().__init__(layers=layers)
        self._before: list[Callable[[], None]] | None = None
        self._updated_last = len(layers)

    def _check_calibration(self, calibration: Calibration) -> None:
        """Raise if it is plainly of another model."""
        own, layers = self.text_config.model_type, self.text_config.num_hidden_layers
        measured, last = calibration.about.get("model_type", own), max(calibration.layers, default=0)
        if measured != own or last >= layers:
            raise ValueError(
                f"the calibration is of a {measured} with at least {last + 1} layers, the config of a {own} with "
                f"{layers}: calibrate this model"
            )

    def _folds(self, layer: object, index: int) -> bool:
        """Whether a layer holds plain keys and values that grow with every token."""
        latent = getattr(self.text_config, "kv_lora_rank", None) is not None
        cross = getattr(self.text_config, "cross_attention_layers", None) or ()
        return type(layer) is DynamicLayer and not latent and index not in cross

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
        if layer_idx <= self._updated_last:  # a new forward pass
            self._before = [_undo(layer) for layer in self.layers]
        self._updated_last = layer_idx
        try:
            if isinstance(self.layers[layer_idx], FoldedLayer):
                self._check_shape(key_states, layer_idx)
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)
        except BaseException:
            self._roll_back()
            raise

    def end_pass(self, broken: bool) -> None:
        """Called when an attached model's forward pass ends; if it broke, all layers forget its tokens."""
        if broken:
            self._roll_back()
        self.forward_pass.reads_folded, self.forward_pass.padding = False, None
        self._before, self._updated_last = None, len(self.layers)

    def _roll_back(self) -> None:
        for undo in self._before or ():
            undo()
        self._before, self._updated_last = None, len(self.layers)

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

    def _expected_shape(self, layer_idx: int) -> tuple[int, int] | None:
        """(kv_heads, head_dim) of a layer's keys by the config, or None if it is not told simply."""
        config = self.text_config
        per_layer = getattr(config, "per_layer_config", None)
        config = per_layer[layer_idx] if per_layer is not None else config
        heads = getattr(config, "num_attention_heads", None)
        kv_heads = getattr(config, "num_key_value_heads", None)
        hidden = getattr(config, "hidden_size", None)
        head_dim = getattr(config, "head_dim", None) or (hidden // heads if hidden and heads else None)
        if not isinstance(kv_heads, int) or not isinstance(head_dim, int):
            return None
        return kv_heads, head_dim

    def _check_shape(self, key: Tensor, layer_idx: int) -> None:
        expected = self._expected_shape(layer_idx)
        if expected is not None and key.ndim == 4 and (key.shape[1], key.shape[3]) != expected:
            raise ValueError(
                f"layer {layer_idx}: keys have {key.shape[1]} heads of {key.shape[3]}, but this cache was made for a "
                f"{self.text_config.model_type} config with {expected[0]} heads of {expected[1]}: "
                "make one with FoldedCache(model.config)"
            )

    def reset(self) -> None:
        """Forget every token."""
        super().reset()
        self.forward_pass.padding = None

    def held_bytes(self) -> int:
        """Every byte that this cache owns: folded pages, dense tokens, dense layers, shared tables."""
        return held_bytes(self.layers)

    def bits_per_value(self) -> float:
        """Held bits for each number that a dense cache would hold; NaN while empty."""
        return self.report().bits_per_value

    def report(self) -> CacheReport:
        """What is held, layer by layer, walked tensor by tensor."""
        rows = []
        tables: list[object] = []
        for i, layer in enumerate(self.layers):
            if isinstance(layer, FoldedLayer):
                own = [
                    (
                        group.batch_rows,
                        group.rows.sinks,
                        group.rows.tail,
                        group.rows.query_energy,
                        *group.rows.pages(),
                    )
                    for group in layer.folded.groups
                ]
                tables.extend((group.rows.formats, group.rows.unfitted) for group in layer.folded.groups)
                tables.append(layer.folded.statistics)
                name, tokens, values = layer.folded.format, layer.folded.columns, layer.folded.value_count
            else:
                own = [layer]
                name, tokens, values = "dense", *_dense_counts(layer)
            rows.append(LayerReport(i, name, tokens, values, held_bytes(own)))
        return CacheReport(
            layers=tuple(rows),
            shared_bytes=held_bytes(tables),
            held_bytes=self.held_bytes(),
            values=sum(row.values for row in rows),
        )


def _undo(layer: Any) -> Callable[[], None]:
    """A function that takes a layer back to what it holds now, when only `update` has been called since."""
    if isinstance(layer, FoldedLayer):
        state = layer.folded.state()
        return lambda: layer.folded.restore(state)
    if type(layer) is DynamicLayer:  # by its length: its old tensors are not to be kept alive
        length = layer.get_seq_length()

        def crop() -> None:
            if length:
                layer.crop(length - layer.get_seq_length())
            else:
                layer.reset()

        return crop
    attributes = dict(vars(layer))  # sliding windows: small, and replaced rather than written to
    return lambda: vars(layer).update(attributes)


def _dense_counts(layer: Any) -> tuple[int, int]:
    """Tokens seen and numbers held by one of transformers' own layers."""
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    if keys is None or values is None:
        return 0, 0
    return layer.get_seq_length(), keys.numel() + values.numel()
