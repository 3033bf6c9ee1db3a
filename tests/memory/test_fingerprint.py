"""The name of a computation: each part of it counts, and no part runs into the next.

`test_model_files` tests that every bit of the model counts.
"""

from __future__ import annotations

import ctypes
import os
import shutil
from dataclasses import replace
from pathlib import Path

import llama_cpp
import pytest

from llamahybrid.devices.ggml import Device
from llamahybrid.engine import loaded
from llamahybrid.engine.content import Nameless
from llamahybrid.errors import DeviceError
from llamahybrid.memory import fingerprint
from llamahybrid.memory.fingerprint import Computation, Identity, settings
from llamahybrid.memory.model_files import ModelFiles
from llamahybrid.memory.state import SequenceState
from llamahybrid.prompt_cache.base import HERE_ONLY
from llamahybrid.prompt_cache.envelope import NAMESPACE_BYTES

from .conftest import named

pytestmark = pytest.mark.usefixtures("user_folder")


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
        replace(computation, adapters=b"lora 1.0"),
        replace(computation, adapters=b"lora 0.5"),
        replace(computation, salt="mine"),
    ]
    assert len({c.fingerprint for c in made}) == len(made)
    assert replace(computation).fingerprint == computation.fingerprint


def test_no_part_runs_into_the_next(computation: Computation) -> None:
    """Settings that end with a salt are not settings without that end and the salt."""
    a = replace(computation, settings=b"settings", salt="salt")
    b = replace(computation, settings=b"settingssalt", salt="")
    assert a.fingerprint != b.fingerprint


def test_settings_with_a_pointer_equal_nothing() -> None:
    model, context = llama_cpp.llama_model_default_params(), llama_cpp.llama_context_default_params()
    assert settings(model, context) == settings(model, context)
    context.cb_eval = llama_cpp.ggml_backend_sched_eval_callback(lambda *a: True)
    assert isinstance(settings(model, context), Nameless)


# -- parameters ------------------------------------------------------------------------------------


def defaults():
    return llama_cpp.llama_model_default_params(), llama_cpp.llama_context_default_params()


def plain_fields():
    for which, params in enumerate(defaults()):
        for name, kind in params._fields_:
            if issubclass(kind, ctypes._SimpleCData) and kind is not ctypes.c_void_p:
                yield which, name


def test_every_parameter_counts_but_those_known_to_be_without_effect():
    without, names = set(), set()
    for which, name in plain_fields():
        before, changed = defaults(), defaults()
        value = getattr(changed[which], name)
        setattr(changed[which], name, not value if isinstance(value, bool) else value + 1)
        names.add(name)
        if fingerprint.parameters(*before) == fingerprint.parameters(*changed):
            without.add(name)
    assert without == fingerprint.WITHOUT_EFFECT & names
    assert len(names - without) > 20


def test_every_override_and_its_type_count(tiny_model):
    made = [
        named(tiny_model("qwen35"), kv_overrides=overrides)
        for overrides in (
            None,
            {"qwen35.attention.layer_norm_rms_epsilon": 0.3},
            {"qwen35.attention.layer_norm_rms_epsilon": 0.25},
            {"general.name": "a"},
            {"general.name": "b"},
            {"other.key": 1},
            {"other.key": True},
            {"other.key": 1, "another.key": 1},
        )
    ]
    assert len(set(made)) == len(made)
    turned = {"another.key": 1, "other.key": 1}
    assert named(tiny_model("qwen35"), kv_overrides=turned) == made[-1]


@pytest.mark.parametrize("name", ["GGML_CPU_TILED_MM", "GGML_VK_DISABLE_F16", "NVIDIA_TF32_OVERRIDE"])
def test_variables_by_which_a_backend_computes_otherwise_count(monkeypatch, name):
    """GGML_CPU_TILED_MM=0 changes the logits of a model in K-quants; a folder outlives the process."""
    made = [fingerprint.parameters(*defaults())]
    for value in ("0", "1"):
        monkeypatch.setenv(name, value)
        made.append(fingerprint.parameters(*defaults()))
    assert len(set(made)) == 3


def test_the_gpus_that_llama_cpp_takes_by_itself_count(monkeypatch):
    """Machines that share a store have other ones, and CUDA_VISIBLE_DEVICES hides some."""
    made = [fingerprint.parameters(*defaults())]
    for found in (["CUDA0: A"], ["CUDA0: B"], ["CUDA0: A", "CUDA1: A"]):
        devices = [Device(1, identity) for identity in found]
        monkeypatch.setattr(fingerprint.ggml, "local", lambda devices=devices: devices)
        made.append(fingerprint.parameters(*defaults()))
    assert len(set(made)) == 4


def test_gpus_that_cannot_be_told_equal_nothing(monkeypatch):
    def untold():
        raise DeviceError("the libraries of llama.cpp cannot be found")

    monkeypatch.setattr(fingerprint.ggml, "local", untold)
    assert isinstance(settings(*defaults()), Nameless)


# -- the engine ------------------------------------------------------------------------------------


def test_an_engine_of_the_same_size_is_another(tiny_model, tmp_path, monkeypatch):
    before = named(tiny_model("llama"))
    copies = [shutil.copy(path, tmp_path) for path in loaded.libraries()]
    monkeypatch.setattr(loaded, "libraries", lambda: list(map(type(tmp_path), copies)))
    assert named(tiny_model("llama")) == before, "a copy is the same engine"
    with open(copies[0], "r+b") as file:
        file.seek(-1, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([byte ^ 1]))
    assert named(tiny_model("llama")) != before


def test_the_longest_namespace_fits_a_record(computation: Computation) -> None:
    identity = Identity(replace(computation, settings=Nameless()), SequenceState.empty(8), None)
    identity.serve(b"\xff" * 16)
    assert identity.namespace.endswith(HERE_ONLY)
    assert len(identity.namespace.encode()) <= NAMESPACE_BYTES
