"""Prompt cache: checkpoints and token paths of earlier requests, and the rules for using them."""

from llamahybrid.prompt_cache.base import CacheStats, Checkpoint, Costs, LiveView, Plan
from llamahybrid.prompt_cache.cache import PromptCache

__all__ = [
    "CacheStats",
    "Checkpoint",
    "Costs",
    "LiveView",
    "Plan",
    "PromptCache",
]
