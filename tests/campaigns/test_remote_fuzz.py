"""A sample of the campaign on a shared store (`make fuzz` has more)."""

from __future__ import annotations

import pytest

from tests.lab.redis_server import PROGRAM
from tests.lab.remote_fuzz import BLOWS, play

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="neither redis-server nor valkey-server is installed")


def test_a_store_that_is_paused_killed_and_damaged() -> None:
    happened = play(blows=8, machines=2, seed=5)
    assert sum(happened[how] for how in ("missed", *set(BLOWS))) == 8
    assert happened["remote"] > 0
