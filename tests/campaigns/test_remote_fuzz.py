"""A sample of the campaign on a shared store (`make fuzz` has more)."""

from __future__ import annotations

import pytest

from tests.lab.redis_server import PROGRAM
from tests.lab.remote_fuzz import play

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="neither redis-server nor valkey-server is installed")


def test_a_store_that_is_paused_killed_and_damaged() -> None:
    happened = play(blows=8, machines=2, seed=5, most_seconds=400)
    assert sum(happened["blows"].values()) == 8
    assert happened["turns"]["remote"] > 0
