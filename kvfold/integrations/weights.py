"""Weights of a model beside its cache: quantised when it is loaded, and counted before it is."""

import logging

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from kvfold.cache.report import walk_tensors
from kvfold.cache.sketch import EMBEDDINGS, sketch

logger = logging.getLogger("kvfold")

INT8 = "int8"
WEIGHTS = (INT8,)
"""What `quantize_weights` makes."""


def check_weights(weights: str | None) -> None:
    """Raise ValueError unless weights of this kind can be made, and ImportError if what makes them is missing."""
    if weights is None:
        return
    if weights not in WEIGHTS:
        raise ValueError(
            f"weights = {weights!r}: choose {', '.join(WEIGHTS)}, or leave it out: a folder whose weights are "
            "quantised already is loaded as it is"
        )
    try:
        import torchao.quantization  # noqa: F401
    except ImportError as error:
        raise ImportError(f"weights = {weights!r} needs torchao (pip install 'kvfold[weights]'): {error}") from error


def quantize_weights(model: PreTrainedModel, weights: str) -> None:
    """Quantise the weights of a loaded model in place, as torchao does.

    Parameters
    ----------
    model
        In a floating dtype. Its activations, and so its keys and values, keep that dtype.
    weights
        "int8": whole numbers of 8 bits with a scale for each output of a linear layer. Embeddings, an output layer that
        shares theirs, and experts that a model holds in one tensor stay as they are.

    Raises
    ------
    ValueError
        On another name; if the model is quantised already, or has no linear layer.
    ImportError
        If torchao is missing.
    """
    check_weights(weights)
    refuse_quantized(model.config, weights)
    taken = [module.weight.numel() for module in model.modules() if _is_quantized(model, module)]
    every = sum(weight.numel() for weight in model.parameters())
    if not taken:
        raise ValueError(f"weights = {weights!r}, but {type(model).__name__} has no linear layer: leave it out")
    if 2 * sum(taken) < every:
        share = 100 * sum(taken) / every
        logger.warning("%s: only %.0f %% of the weights are in linear layers; others stay", weights, share)
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(model, Int8WeightOnlyConfig(), filter_fn=lambda module, name: _is_quantized(model, module))


def refuse_quantized(config: PreTrainedConfig, weights: str) -> None:
    """Raise ValueError if a model's weights are quantised already. Those from GGUF files are unpacked."""
    own = getattr(config, "quantization_config", None)
    method = own.get("quant_method") if isinstance(own, dict) else getattr(own, "quant_method", None)
    if own is not None and str(getattr(method, "value", method)) != "gguf":
        raise ValueError(f"weights = {weights!r}, but this model is quantised already ({method}): leave it out")


def weight_bytes(config: PreTrainedConfig, dtype: torch.dtype, weights: str | None = None) -> int:
    """Bytes that a model's weights take once it is loaded, without loading it.

    Parameters
    ----------
    config
        The model's.
    dtype
        In which it is loaded.
    weights
        What `quantize_weights` makes of them; None: nothing.

    Raises
    ------
    ValueError
        If it is no causal language model.
    """
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
            model.tie_weights()
    except ValueError:
        kind = config.model_type
        raise ValueError(f"weights of a {kind} model, which is no causal language model: give an amount") from None
    total = dtype.itemsize * sum(weight.numel() for weight in model.parameters())  # shared ones once
    if weights == INT8:
        for module in model.modules():
            if _is_quantized(model, module):
                rows, numbers = module.weight.shape[0], module.weight.numel()
                total += numbers + dtype.itemsize * (rows - numbers)
    return total


def weights_held(model: nn.Module) -> int:
    """Bytes of a loaded model's weights, shared ones once; of quantised ones, their codes and scales."""
    parts = [part for _, weight in saved_tensors(model) for part in plain_parts(weight)]
    return sum({part.data_ptr() or id(part): part.numel() * part.element_size() for part in parts}.values())


def saved_tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Parameters by name, and buffers that are saved with them: some quantised layers hold their codes in these."""
    saved = model.state_dict().keys()
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if name in saved]
    return sorted([*model.named_parameters(), *buffers], key=lambda item: item[0])


def sketch_of(model: nn.Module, first_shard: bool = True) -> dict[str, torch.Tensor]:
    """A few numbers of a model's weights (`kvfold.cache.sketch`), without those that are quantised or offloaded.

    A worker that has only a later part of the vocabulary is no `first_shard`: its embeddings are of other tokens.
    """

    def read(weight: torch.Tensor, where: tuple[slice, ...]) -> torch.Tensor | None:
        if weight.is_meta or not weight.is_floating_point() or hasattr(weight, "__tensor_flatten__"):
            return None
        return weight.detach()[where]

    found = sketch(model.named_parameters(), read)
    if not first_shard:
        found.pop(EMBEDDINGS, None)
    return found


def plain_parts(weight: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors that a tensor is made of: torchao's hold codes and scales, bitsandbytes' have scales beside."""
    if hasattr(weight, "__tensor_flatten__"):
        return [part for name in weight.__tensor_flatten__()[0] for part in plain_parts(getattr(weight, name))]
    beside = [getattr(weight, name, None) for name in ("quant_state", "SCB")]
    return [weight, *(part for each in beside if each is not None for part in walk_tensors(each))]


def _is_quantized(model: PreTrainedModel, module: nn.Module) -> bool:
    """Whether `quantize_weights` takes a layer of `model`."""
    shared = module is model.get_output_embeddings() and model.config.get_text_config(decoder=True).tie_word_embeddings
    return isinstance(module, nn.Linear) and not shared
