"""kvfold inside Hugging Face transformers."""

from kvfold.integrations.transformers.attach import attach, detach
from kvfold.integrations.transformers.cache import FoldedCache

__all__ = ["FoldedCache", "attach", "detach"]
