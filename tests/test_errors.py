"""Errors as callers catch them: by our base, by upstream's kinds, with what they carry."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import llamahybrid
from llamahybrid import errors
from llamahybrid.errors import DecodeError, LlamaHybridError, SnapshotError

PACKAGE = Path(errors.__file__).parent
OURS = {
    name: value
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, LlamaHybridError)
}
CAUGHT_AS: dict[str, set[type[BaseException]]] = {
    "LlamaHybridError": set(),
    "Busy": set(),
    "RequestSuperseded": set(),
    "RequestCancelled": set(),
    "ModelClosed": {RuntimeError},
    "DecodeError": {RuntimeError},  # what upstream raises where llama_decode fails
    "ContextOverflow": {ValueError, RuntimeError},  # either, depending on where
    "SnapshotError": {ValueError, RuntimeError},  # upstream's load_state: the latter
    "RecordError": {ValueError},
    "RecordGone": {ValueError, errors.RecordError},
    "UnknownArchitecture": {ValueError},
    "EngineError": {RuntimeError},
    "FolderRefused": {OSError},
    "ConfigurationError": {ValueError},
    "ReportError": {ValueError},
    "TargetError": {RuntimeError},
    "DeviceError": {RuntimeError},
    "DeviceLost": {RuntimeError},
}
INTERNAL = {
    *(
        "Abandoned",
        "BatchLost",
        "_Asked",
        "Taken",
        "NotApplicable",
        "Refused",
        "Refusal",
        "PromptTooLong",
        "PromptEmpty",
    ),
    "ReadLate",
}
"""Raised and caught within one room."""


def test_each_is_caught_as_ours_and_as_what_callers_of_upstream_catch() -> None:
    assert OURS.keys() == CAUGHT_AS.keys()
    builtin = (ValueError, RuntimeError, OSError, errors.RecordError)
    found = {n: {b for b in builtin if issubclass(error, b) and error is not b} for n, error in OURS.items()}
    assert found == CAUGHT_AS


def test_no_room_has_an_error_of_its_own_that_users_could_meet() -> None:
    elsewhere = {
        node.name
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
        and any(ast.unparse(base).endswith(("Error", "Exception")) for base in node.bases)
        and path != Path(errors.__file__)
    }
    assert elsewhere == INTERNAL


def test_a_failed_decode_carries_the_native_result() -> None:
    with pytest.raises(RuntimeError, match="no room") as caught:
        raise DecodeError(1, "no room")
    assert isinstance(caught.value, DecodeError)
    assert caught.value.code == 1


def test_a_damaged_state_may_say_which_part_it_is() -> None:
    error = SnapshotError("damaged")
    assert error.segment is None
    error.segment = "the stored attention"
    assert SnapshotError("another").segment is None, "it says so of this one alone"


def test_what_users_meet_is_exported() -> None:
    inside = {"RecordError", "RecordGone", "FolderRefused"}  # of a folder on disk, whose commands catch them
    assert OURS.keys() - inside == {name for name in llamahybrid.__all__ if name in OURS}
