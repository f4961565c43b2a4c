"""kvfold inside Hugging Face transformers."""

from kvfold.integrations.transformers.attach import attach, detach
from kvfold.integrations.transformers.cache import FoldedCache
from kvfold.integrations.transformers.calibrate import calibrate, measure_queries
from kvfold.integrations.transformers.conversation import Conversation
from kvfold.integrations.transformers.generating import generate, make_default
from kvfold.integrations.transformers.losses import measure_losses

__all__ = [
    "Conversation",
    "FoldedCache",
    "attach",
    "calibrate",
    "detach",
    "generate",
    "make_default",
    "measure_losses",
    "measure_queries",
]
