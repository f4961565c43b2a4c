"""Which tokens a cache forgets: statistics, scores and policies."""

from kvfold.eviction.baselines import SnapKV, StreamingLLM
from kvfold.eviction.policy import Eviction
from kvfold.eviction.tria import QueryStatistics
from kvfold.eviction.triattention import TriAttention

__all__ = ["Eviction", "QueryStatistics", "SnapKV", "StreamingLLM", "TriAttention"]
