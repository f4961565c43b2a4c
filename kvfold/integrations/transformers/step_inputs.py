"""What a model is given for a step of one token, as a graph of it reads that."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from kvfold.integrations.transformers.calls import cache_name


@dataclass(frozen=True, eq=False)
class StepInputs:
    """What a forward pass of one token is given: tensors that a graph reads, and what stays the same in it."""

    tensors: dict[str, Tensor]
    others: dict[str, Any]
    casts: tuple[bool, torch.dtype]  # whether autocast is on, and to what
    why_not: str | None

    @classmethod
    def of(cls, module: nn.Module, given: Mapping[str, Any]) -> "StepInputs | None":
        """None if it is more than one token."""
        token = given.get("input_ids")
        token = given.get("inputs_embeds") if token is None else token
        if not isinstance(token, Tensor) or token.ndim < 2 or token.shape[1] != 1:
            return None
        beside = (cache_name(type(module).forward), "attention_mask")
        tensors = {name: x.detach() for name, x in given.items() if isinstance(x, Tensor) and name not in beside}
        others = {name: x for name, x in given.items() if name not in tensors and name not in beside}
        if others.get("position_ids", 0) is None:
            del others["position_ids"]
        mask, why = given.get("attention_mask"), None
        if isinstance(mask, Tensor) and mask.ndim == 2:
            why = None if bool(mask.all()) else "attention_mask hides tokens"
        elif mask is not None:
            why = "attention_mask is no mask of columns, (batch, columns)"
        elsewhere = next((name for name, x in tensors.items() if x.device != token.device), None)
        held = next((name for name, x in others.items() if _holds_tensors(x)), None)
        if "position_ids" not in _parameters(type(module).forward):
            why = "the model's forward takes no position_ids, so a graph would repeat the first token's"
        elif elsewhere is not None:
            why = f"{elsewhere} is on another device than the token"
        elif held is not None:
            why = f"{held} holds tensors"
        device = token.device.type
        casts = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        return cls(tensors, others, casts, why)

    def with_positions(self, columns: int) -> dict[str, Tensor]:
        """The tensors, positions among them; `columns` came before the token."""
        if "position_ids" in self.tensors:
            return self.tensors
        token = self.tensors["input_ids" if "input_ids" in self.tensors else "inputs_embeds"]
        positions = torch.full(token.shape[:2], columns, dtype=torch.int64, device=token.device)
        return self.tensors | {"position_ids": positions}

    def kind(self) -> "Kind":
        """What one graph serves."""
        return Kind({name: (x.shape, x.dtype, x.device) for name, x in self.tensors.items()}, self.others, self.casts)


@dataclass(frozen=True)
class Kind:
    """Inputs that one graph serves."""

    tensors: dict[str, tuple[torch.Size, torch.dtype, torch.device]]
    others: dict[str, Any]
    casts: tuple[bool, torch.dtype]


def _holds_tensors(x: Any) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in tree_flatten(x)[0])


@cache
def _parameters(forward: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(forward).parameters)
