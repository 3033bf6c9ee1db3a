"""Errors are caught by one base of ours, and as the kinds that callers of llama-cpp-python catch."""

from __future__ import annotations

import pytest

import llamahybrid
from llamahybrid import errors
from llamahybrid.errors import DecodeError, LlamaHybridError

OURS = {
    name: value
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, LlamaHybridError)
}
CAUGHT_AS = {
    "ModelClosed": {RuntimeError},
    "DecodeError": {RuntimeError},  # what upstream raises where llama_decode fails
    "ContextOverflow": {ValueError, RuntimeError},  # upstream raises either, depending on where
    "SnapshotError": {ValueError, RuntimeError},  # upstream's load_state raises the latter
    "UnknownArchitecture": {ValueError},
    "EngineError": {RuntimeError},
    "FolderRefused": {OSError},
    "ConfigurationError": {ValueError},
    "ReportError": {ValueError},
    "TargetError": {RuntimeError},
    "DeviceLost": {RuntimeError, DecodeError},
}


@pytest.mark.parametrize("name", CAUGHT_AS)
def test_errors_are_caught_as_what_callers_of_upstream_catch(name: str) -> None:
    assert all(issubclass(OURS[name], kind) for kind in CAUGHT_AS[name])


def test_errors_that_users_meet_are_exported() -> None:
    of_one_folder = {"RecordError", "RecordGone", "FolderRefused"}  # the commands of that folder catch them
    assert OURS.keys() - of_one_folder <= set(llamahybrid.__all__)


def test_failed_decode_carries_the_native_result() -> None:
    with pytest.raises(RuntimeError, match="no room") as caught:
        raise DecodeError(1, "no room")
    assert isinstance(caught.value, DecodeError)
    assert caught.value.code == 1
