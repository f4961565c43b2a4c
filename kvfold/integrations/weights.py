"""Weights of a model beside its cache: quantised when it is loaded, and counted before it is."""

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

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
        "int8": whole numbers of 8 bits with a scale for each output of a linear layer. Embeddings, and an output layer
        that shares theirs, stay as they are.

    Raises
    ------
    ValueError
        On another name, or if the model is quantised already.
    ImportError
        If torchao is missing.
    """
    check_weights(weights)
    if getattr(model.config, "quantization_config", None) is not None:
        raise ValueError(f"weights = {weights!r}, but this model is quantised already: leave it out")
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(model, Int8WeightOnlyConfig(), filter_fn=lambda module, name: _is_quantized(model, module))


def weight_bytes(config: PreTrainedConfig, kind: str | torch.dtype) -> int:
    """Bytes that a model's weights take once it is loaded, without loading it.

    Parameters
    ----------
    config
        The model's.
    kind
        A dtype; or "int8", as `quantize_weights` makes it of bfloat16.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
        model.tie_weights()
    itemsize = (torch.bfloat16 if isinstance(kind, str) else kind).itemsize
    total = itemsize * sum(weight.numel() for weight in model.parameters())  # shared ones once
    if kind == INT8:
        for module in model.modules():
            if _is_quantized(model, module):
                rows = module.weight.shape[0]
                total += module.weight.numel() + itemsize * rows - itemsize * module.weight.numel()
    return total


def weights_held(model: nn.Module) -> int:
    """Bytes of a loaded model's weights, each once; of quantised ones, their codes and scales."""
    inner = [weight for each in model.parameters() for weight in plain_parts(each)]
    return sum({weight.data_ptr(): weight.numel() * weight.element_size() for weight in inner}.values())


def plain_parts(weight: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors that a tensor is made of: torchao's hold codes and scales."""
    if not hasattr(weight, "__tensor_flatten__"):
        return [weight]
    return [part for name in weight.__tensor_flatten__()[0] for part in plain_parts(getattr(weight, name))]


def _is_quantized(model: PreTrainedModel, module: nn.Module) -> bool:
    """Whether `quantize_weights` takes a layer of `model`."""
    shared = module is model.get_output_embeddings() and model.config.get_text_config(decoder=True).tie_word_embeddings
    return isinstance(module, nn.Linear) and not shared
