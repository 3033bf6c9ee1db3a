"""Fixtures shared by all tests."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any, TypeAlias

import pytest

import llamahybrid.engine.activation

os.environ.setdefault("LLAMAHYBRID_ENGINE", "stock")  # chosen, whatever was built on this machine
# Tiny models: a second thread costs more than it saves, and far more where it waits for a busy core.
os.environ.setdefault("OMP_THREAD_LIMIT", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# A session in the background, or under nohup, ignores signals, and so would the programs that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

llamahybrid.engine.activation.activate()  # before any test module imports llama_cpp

with suppress(ImportError):  # other packages' environments have none
    from hypothesis import HealthCheck, settings

    # An example takes as long as it takes: by default one of 200 ms fails, as it does where a machine stalls.
    slow = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile("same", slow, derandomize=True)
    settings.register_profile("random", slow, max_examples=1000)
    settings.load_profile("same")  # `make fuzz` draws other examples each time, and more

TinyModel: TypeAlias = Callable[..., Path]


@pytest.fixture(scope="session", autouse=True)
def _steady_costs() -> Iterator[None]:
    """No test depends on how fast the machine is just now, but for those of `measured_costs`."""
    from llamahybrid.memory.costs import CostMeter
    from tests.lab.costs import STEADY

    with pytest.MonkeyPatch.context() as patch:
        for name, value in STEADY.items():
            patch.setattr(CostMeter, name, value)
        yield


@pytest.fixture
def measured_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs as they are measured, for a test of that."""
    from llamahybrid.memory.costs import CostMeter
    from tests.lab.costs import MEASURED

    for name, value in MEASURED.items():
        monkeypatch.setattr(CostMeter, name, value)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """`tiny_model(arch, **kw)`: the path of such a model (arguments of `tiny.make`), made once a session."""
    from llamahybrid import tiny

    folder = tmp_path_factory.mktemp("tiny")
    made: dict[tuple[object, ...], Path] = {}

    def make(arch: str, **kw: Any) -> Path:
        key = (arch, *sorted(kw.items()))
        if key not in made:
            made[key] = tiny.make(arch, folder / f"{len(made)}-{arch}.gguf", **kw)
        return made[key]

    return make


EMBEDDING_ALONE: dict[str, Any] = {"embedding": True, "attention_type": 1}
"""Arguments of a model that does not chat: its attention is not causal (llama.h, llama_attention_type)."""

SETTINGS: dict[str, Any] = {"n_ctx": 512, "n_threads": 1, "n_threads_batch": 1, "verbose": False}


@pytest.fixture
def open_model(tiny_model: TinyModel) -> Iterator[Callable[..., Any]]:
    """`open_model(arch, cls=Llama, **arguments)`: a tiny model, closed when the test ends."""
    from llamahybrid import Llama

    with ExitStack() as stack:

        def opener(arch: str = "qwen35", cls: Any = Llama, **more: Any) -> Any:
            return stack.enter_context(closing(cls(str(tiny_model(arch)), **{**SETTINGS, **more})))

        yield opener


def take(llm: Any, prompt: Sequence[int], n: int = 8, **options: Any) -> list[int]:
    """The first n tokens of the greedy answer."""
    return list(itertools.islice(llm.generate(prompt, temp=0.0, **options), n))


@pytest.fixture
def fresh(open_model: Callable[..., Any]) -> Callable[..., list[int]]:
    """`fresh(prompt, n, arch)`: the greedy answer of a fresh stock context."""
    import llama_cpp

    def answer(prompt: Sequence[int], n: int = 8, arch: str = "qwen35", **more: Any) -> list[int]:
        return take(open_model(arch, llama_cpp.Llama, **more), prompt, n)

    return answer


@pytest.fixture
def logits_of(tiny_model: TinyModel) -> Iterator[Callable[..., Any]]:
    """`logits_of(tokens, arch)`: the logits behind tokens in a fresh context, shape (n_vocab,)."""
    from tests.lab.reference import Reference, Setting

    with ExitStack() as stack:

        def logits(tokens: list[int], arch: str = "qwen35") -> Any:
            reference = stack.enter_context(closing(Reference(tiny_model(arch), Setting("default"))))
            return reference.logits(tokens)[0]

        yield logits


@pytest.fixture(scope="session")
def lose_cells() -> Callable[[Any, int, int], None]:
    """`lose_cells(ctx, a, b)`: the attention cells of [a, b) go, and the positions do not show it.

    Through the second sequence, because a patched library refuses to cut a hole into a hybrid.
    """
    from llama_cpp import llama_cpp as native

    def lose(ctx: Any, start: int, end: int) -> None:
        memory = native.llama_get_memory(ctx)
        for first, last in ((0, start), (end, -1)):
            native.llama_memory_seq_cp(memory, 0, 1, first, last)
        native.llama_memory_seq_rm(memory, 0, -1, -1)
        native.llama_memory_seq_cp(memory, 1, 0, -1, -1)
        native.llama_memory_seq_rm(memory, 1, -1, -1)

    return lose


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep a file's tests in one worker under `--dist loadgroup`, unless they name a group themselves."""
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(str(item.path)))


def pytest_report_header() -> str:
    """Which engine this run is about."""
    return f"engine: {os.environ['LLAMAHYBRID_ENGINE']}"
