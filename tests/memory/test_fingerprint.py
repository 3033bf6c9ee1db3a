"""The name of a computation: each part of it counts, and none runs into the next.

That every parameter, override, file and engine counts is in test_identity.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import llama_cpp
import pytest

from llamahybrid.engine.content import Nameless
from llamahybrid.memory import fingerprint
from llamahybrid.memory.adapters import Adapters
from llamahybrid.memory.fingerprint import Computation, settings
from llamahybrid.memory.model_files import ModelFiles


@pytest.fixture
def computation(tmp_path: Path) -> Computation:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"weights")
    return Computation(ModelFiles(file, by_content=False), b"settings")


def test_each_part_counts(computation: Computation, tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(b"weightz")
    made = [
        computation,
        replace(computation, model=ModelFiles(other, by_content=False)),
        replace(computation, settings=b"settingz"),
        replace(computation, adapters=Adapters(loras=((b"lora", 1.0),))),
        replace(computation, adapters=Adapters(loras=((b"lora", 0.5),))),
        replace(computation, salt="mine"),
    ]
    assert len({c.fingerprint for c in made}) == len(made)
    assert replace(computation).fingerprint == computation.fingerprint


def test_no_part_runs_into_the_next(computation: Computation) -> None:
    """Settings that end with a salt are not settings without that end and the salt."""
    a = replace(computation, settings=b"settings", salt="salt")
    b = replace(computation, settings=b"settingssalt", salt="")
    assert a.fingerprint != b.fingerprint


def test_any_text_is_a_salt(computation: Computation) -> None:
    lone = replace(computation, salt="\ud800")
    assert lone.fingerprint != replace(computation, salt="\ud801").fingerprint


@pytest.mark.parametrize("part", ["settings", "adapters"])
def test_what_cannot_be_named_makes_all_of_it_nameless(computation: Computation, part: str) -> None:
    assert not computation.nameless
    value = Nameless() if part == "settings" else Adapters(control=Nameless())
    assert replace(computation, **{part: value}).nameless


def test_settings_with_a_pointer_equal_nothing() -> None:
    model, context = llama_cpp.llama_model_default_params(), llama_cpp.llama_context_default_params()
    assert settings(model, context) == settings(model, context)
    context.cb_eval = llama_cpp.ggml_backend_sched_eval_callback(lambda *a: True)
    assert isinstance(settings(model, context), Nameless)


def test_settings_of_an_engine_that_cannot_be_read_equal_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreadable() -> bytes:
        raise OSError("gone")

    monkeypatch.setattr(fingerprint, "engine_digest", unreadable)
    model, context = llama_cpp.llama_model_default_params(), llama_cpp.llama_context_default_params()
    assert isinstance(settings(model, context), Nameless)
