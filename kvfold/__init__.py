"""kvfold keeps an LLM's KV cache folded to 2-4 bits a value, and attention reads it folded."""

from kvfold.cache.calibration import Calibration
from kvfold.cache.policy import Policy
from kvfold.cache.token_store import TokenStore
from kvfold.formats import FORMATS, PRESETS, get_format, get_formats
from kvfold.integrations.models import demo_model, load_model
from kvfold.integrations.transformers import FoldedCache, attach, calibrate, detach

__all__ = [
    "FORMATS",
    "PRESETS",
    "Calibration",
    "FoldedCache",
    "Policy",
    "TokenStore",
    "attach",
    "calibrate",
    "demo_model",
    "detach",
    "get_format",
    "get_formats",
    "load_model",
]
__version__ = "0.1.0"
