"""The engines of tests/engine, for what the commands say of them."""

from __future__ import annotations

from tests.engine.conftest import built, cache, wheel_with

__all__ = ["built", "cache", "wheel_with"]
