"""`llamahybrid.ray.app`: settings are checked before anything starts; without Ray it says what to install."""

from __future__ import annotations

import sys
from importlib.util import find_spec

import pytest
from pydantic import ValidationError

import llamahybrid.ray


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"llamahybrid\[ray\]"):
        llamahybrid.ray.app("model.gguf")


@pytest.mark.skipif(
    find_spec("ray") is None, reason="Ray is in the environment of `make integrations ONLY=ray`"
)
def test_settings_that_mean_nothing_are_refused_at_once() -> None:
    with pytest.raises(ValidationError):
        llamahybrid.ray.app("model.gguf", n_parallel=-1)
    assert llamahybrid.ray.app("model.gguf", replicas=2, n_ctx=512) is not None
