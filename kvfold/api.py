"""The names that `kvfold` offers, imported on first use: torch and transformers take seconds."""

from kvfold.cache.calibration import Calibration
from kvfold.cache.policy import Policy
from kvfold.cache.token_store import TokenStore
from kvfold.eviction import QueryStatistics, SnapKV, StreamingLLM, TriAttention
from kvfold.formats import FORMATS, PRESETS, get_format, get_formats
from kvfold.integrations.models import demo_model, load_model
from kvfold.integrations.transformers import (
    Conversation,
    FoldedCache,
    attach,
    calibrate,
    detach,
    generate,
    make_default,
    measure_losses,
    measure_queries,
)

__all__ = [
    "FORMATS",
    "PRESETS",
    "Calibration",
    "Conversation",
    "FoldedCache",
    "Policy",
    "QueryStatistics",
    "SnapKV",
    "StreamingLLM",
    "TokenStore",
    "TriAttention",
    "attach",
    "calibrate",
    "demo_model",
    "detach",
    "generate",
    "get_format",
    "get_formats",
    "load_model",
    "make_default",
    "measure_losses",
    "measure_queries",
]
