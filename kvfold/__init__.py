"""kvfold keeps an LLM's KV cache folded to 2-4 bits a value, and attention reads it folded."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvfold.api import *  # noqa: F403

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Look `name` up in `kvfold.api`, imported on first use: it imports torch and transformers, which take seconds."""
    if name.startswith("__") and name != "__all__":
        raise AttributeError(name)
    api = import_module("kvfold.api")
    return globals()[name] if name in globals() else getattr(api, name)  # the import may have loaded a submodule `name`


def __dir__() -> list[str]:
    return sorted({*globals(), *import_module("kvfold.api").__all__})
