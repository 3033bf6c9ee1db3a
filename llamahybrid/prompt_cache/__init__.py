"""What is remembered between requests: checkpoints, token paths and the rules for using them."""

from llamahybrid.prompt_cache.base import BasePromptCache, CacheStats, Checkpoint, Costs, LiveView, Plan
from llamahybrid.prompt_cache.cache import PromptCache
from llamahybrid.prompt_cache.naive import NaivePromptCache
from llamahybrid.prompt_cache.placement import final_due, next_decode_checkpoint

__all__ = [
    "BasePromptCache",
    "CacheStats",
    "Checkpoint",
    "Costs",
    "LiveView",
    "NaivePromptCache",
    "Plan",
    "PromptCache",
    "final_due",
    "next_decode_checkpoint",
]
