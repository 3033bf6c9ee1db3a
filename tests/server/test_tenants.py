"""What separates users."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from llamahybrid.server import tenants
from llamahybrid.server.errors import Refusal
from llamahybrid.server.keys import salt_of
from llamahybrid.server.tenants import handle_maker, salt


def test_a_salt_is_the_request_s_own_below_its_key_s() -> None:
    assert salt(None, "key", by_key=False) == ""
    assert salt("mine", "key", by_key=False) == "mine"
    assert salt(None, "key", by_key=True) == salt_of("key")
    assert salt("mine", "key", by_key=True) == f"{salt_of('key')}/mine"
    assert salt("mine", "key", by_key=True) != salt("mine", "other", by_key=True)


class Model:
    """Notes what its requests are asked for with."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    @contextmanager
    def request(self, **options: Any) -> Iterator[None]:
        self.asked.append(options)
        yield


@pytest.mark.parametrize("supported", [False, True])
def test_a_salt_is_used_or_refused(monkeypatch: pytest.MonkeyPatch, supported: bool) -> None:
    monkeypatch.setattr(tenants, "salts_requests", lambda: supported)
    model: Any = Model()
    with handle_maker(model, "")():
        assert model.asked == [{}]
    if supported:
        with handle_maker(model, "mine")():
            assert model.asked[1:] == [{"cache_salt": "mine"}]
    else:
        with pytest.raises(Refusal) as refused:
            handle_maker(model, "mine")
        assert refused.value.param == "cache_salt"
