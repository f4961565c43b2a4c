"""What is done to every cache alike, and how the bytes that it holds are counted."""

import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass
class Subject:
    """One cache under test.

    Attributes
    ----------
    cache
        What the model is called with.
    owned
        Objects whose reachable data is what the cache holds for this sequence. Empty: `cache` itself.
    at_best
        Bytes by the kindest account of what the package promises, computed after the last step. None: the bytes held,
        with the tokens that stay dense counted at 16 bits, as they would be in a 16-bit model.
    """

    cache: Any
    owned: tuple[object, ...] = ()
    at_best: Callable[[], int] | None = field(default=None, kw_only=True)

    def held(self, dense_width: int = 4) -> int:
        """Bytes held, see `held_bytes`."""
        return held_bytes(*(self.owned or (self.cache,)), dense_width=dense_width)


def held_bytes(*roots: object, dense_width: int = 4) -> int:
    """Bytes of everything numeric that can be reached from `roots`, each piece of memory counted once.

    A view counts with the whole memory that it keeps alive.

    Parameters
    ----------
    roots
        Objects to start from.
    dense_width
        Bytes to count for each number of a float32 tensor of (batch, heads, tokens, channels): a dense window.
    """
    pieces: dict[int, int] = {}
    for item in walk(roots):
        if isinstance(item, Tensor):
            storage = item.untyped_storage()
            size = storage.nbytes()
            if item.dtype == torch.float32 and item.ndim == 4 and item.shape[-1] > 1:
                size = size * dense_width // 4
            address = storage.data_ptr()
        elif isinstance(item, np.ndarray):
            address, size = item.__array_interface__["data"][0], item.nbytes
        else:
            address, size = id(item), len(item)
        # Two arrays may start at the same address and differ in length when one is a view of the other.
        pieces[address] = max(size, pieces.get(address, 0))
    return sum(pieces.values())


def walk(roots: object) -> Iterator[Tensor | np.ndarray | bytes | bytearray]:
    """Tensors, arrays and byte strings reachable through containers, attributes, slots, closures and bound methods."""
    seen: dict[int, object] = {}  # keeps what it saw alive, so that no id is used twice
    stack = [roots]
    while stack:
        item = stack.pop()
        if id(item) in seen or isinstance(item, type | types.ModuleType):
            continue
        seen[id(item)] = item
        if isinstance(item, Tensor | bytes | bytearray):
            yield item
        elif isinstance(item, np.ndarray):
            if isinstance(item.base, np.ndarray):
                stack.append(item.base)
            else:
                yield item
                stack.extend(item.tolist() if item.dtype == object else ())
        elif isinstance(item, dict):
            stack.extend(item.values())
        elif isinstance(item, list | tuple | set | frozenset):
            stack.extend(item)
        elif isinstance(item, types.FunctionType):
            stack.extend(cell.cell_contents for cell in item.__closure__ or ())
        elif isinstance(item, types.MethodType):
            stack.append(item.__self__)
        else:
            stack.append(getattr(item, "__dict__", None))
            stack.extend(
                getattr(item, slot, None)
                for kind in type(item).__mro__
                for slot in (kind.__dict__.get("__slots__") or ())
                if isinstance(slot, str)
            )


@torch.no_grad()
def decode(model: Any, cache: Any, ids: Tensor, context: int, progress: Callable[[], None]) -> tuple[Tensor, float]:
    """Prefill in one pass, then teacher-forced steps of one token.

    Parameters
    ----------
    model, cache
        What to run, and what it remembers with.
    ids
        Tokens, (1, context + steps + 1); the last is only predicted.
    context
        Tokens of the prefill.
    progress
        Called after each forward pass.

    Returns
    -------
    tuple[Tensor, float]
        Logits of the steps' predictions, (steps, vocabulary), and seconds a step.
    """
    model(ids[:, :context], past_key_values=cache, use_cache=True, logits_to_keep=1)
    progress()
    logits = []
    begin = perf_counter()
    for i in range(context, ids.shape[1] - 1):
        logits.append(model(ids[:, i : i + 1], past_key_values=cache, use_cache=True).logits[0, -1].float())
        progress()
    return torch.stack(logits), (perf_counter() - begin) / len(logits)
