"""Changes of llama-cpp-python that break llamahybrid are named."""

from __future__ import annotations

import ctypes
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import llama_cpp
import pytest
from llama_cpp import _internals
from llama_cpp import llama_cpp as native

from llamahybrid import upstream
from llamahybrid.engine import doctor
from llamahybrid.errors import EngineError


def of_upstream(function: Any) -> Any:
    """As if a release of llama_cpp had brought this function."""
    function.__module__ = "llama_cpp.llama"
    return function


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    upstream.require.cache_clear()
    yield
    upstream.require.cache_clear()


def structure(*left_out: str) -> type[ctypes.Structure]:
    fields = [field for field in native.llama_context_params._fields_ if field[0] not in left_out]
    return type("llama_context_params", (ctypes.Structure,), {"_fields_": fields})


def test_the_release_that_is_installed_is_known() -> None:
    assert not list(upstream.differences())
    upstream.require()


def test_paging_is_not_switched_off_without_a_word(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """ctypes takes `params.kv_unified = True` whether there is such a field or not."""
    monkeypatch.setattr(native, "llama_context_params", structure("kv_unified"))
    with caplog.at_level(logging.WARNING, "llamahybrid"):
        upstream.require()
        upstream.require()
    (said,) = caplog.messages
    assert "llama_context_params has no kv_unified" in said
    assert "(paging)" in said


def other_arguments(*types: Any) -> Any:
    """A function of the library that takes these."""
    made = ctypes.CFUNCTYPE(None, *types)()
    made.argtypes = [*types]
    return made


@pytest.mark.parametrize(
    ("owner", "name", "changed", "said"),
    [
        (llama_cpp.Llama, "_create_completion", None, "Llama._create_completion is not there"),
        (llama_cpp.Llama, "eval", lambda self, ids: None, "Llama.eval takes (self, ids)"),
        (llama_cpp.Llama, "generate", lambda self, tokens: None, "Llama.generate does not take reset"),
        (
            llama_cpp.Llama,
            "create_completion",
            lambda self, *args, **kwargs: self._complete(*args, **kwargs),
            "Llama.create_completion does not use _create_completion",
        ),
        (
            _internals.LlamaContext,
            "kv_cache_seq_rm",
            lambda self, seq, p0, p1: None,
            "expected (self, seq_id",
        ),
        (
            native,
            "llama_set_adapters_lora",
            other_arguments(ctypes.c_void_p),
            "llama_set_adapters_lora takes 1 arguments, expected 4",
        ),
    ],
)
def test_a_changed_name_is_told(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, changed: Any, said: str
) -> None:
    if changed is None:
        monkeypatch.delattr(owner, name)
    else:
        monkeypatch.setattr(owner, name, changed if owner is native else of_upstream(changed))
    (found,) = upstream.differences()
    assert said in str(found)
    with pytest.raises(EngineError, match=re.escape(said)):
        upstream.require()


def test_differences_are_told_when_the_model_class_is_imported() -> None:
    code = (
        "import llamahybrid, llama_cpp\n"
        "del llama_cpp.Llama._input_ids\n"
        "try: import llamahybrid.llama\n"
        "except llamahybrid.EngineError as error: print(error)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "Llama._input_ids is not there" in run.stdout


def test_wrapped_methods_are_no_change_of_llama_cpp(monkeypatch: pytest.MonkeyPatch) -> None:
    generate = llama_cpp.Llama.generate
    monkeypatch.setattr(llama_cpp.Llama, "generate", lambda *args, **kwargs: generate(*args, **kwargs))
    assert not list(upstream.differences())


def test_the_doctor_prints_what_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    def names() -> list[doctor.Finding]:
        return [finding for finding in doctor.examine(tuple, True, list) if finding.topic == "private names"]

    assert [finding.advice for finding in names()] == [""]
    monkeypatch.delattr(llama_cpp.Llama, "_scores")
    (told,) = names()
    assert "Llama._scores is not there" in told.text
    assert "0.3.36" in told.advice
