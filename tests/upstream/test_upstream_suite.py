"""llama-cpp-python's own test-suite, out of the pinned sdist, with stock `Llama` and with ours installed."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from xml.etree import ElementTree

import pytest

from llamahybrid.engine import sdist

pytestmark = [pytest.mark.patched]

HERE = Path(__file__).parent

# Models that the suite downloads -> (architecture, vocabulary) of the tiny model in their place.
MODELS = {
    "Qwen3.5-0.8B-Q8_0.gguf": ("qwen35", "qwen35"),
    "tinyllamas/stories15M-q4_0.gguf": ("llama", "llama-spm"),
    "bge-small-en-v1.5-q4_k_m.gguf": ("bert", "bert-bge"),
    "mamba-130m-hf.Q2_K.gguf": ("mamba", "tiny"),
    "Falcon-H1-Tiny-90M-Instruct-Q2_K.gguf": ("falcon-h1", "tiny"),
}

# Tests that ask what only the released model knows: they fail with stock and with ours alike.
NEEDS_THE_RELEASED_MODEL = {
    "test_llama::test_real_model": "expects its token ids; the sdist's qwen35 vocabulary has others",
    "test_llama::test_real_llama": "expects ' jumps over the lazy dog.'",
    "test_llama::test_real_llama_repeated_prompt_cache": "expects ' jumps over the lazy dog.'",
}


@dataclass(frozen=True)
class Outcome:
    result: str
    message: str


@pytest.fixture(scope="module")
def suite(tmp_path_factory) -> Path:
    """Upstream's tests and the one vocabulary file that they open, unpacked."""
    folder = tmp_path_factory.mktemp("suite")
    wanted = ("tests/", "vendor/llama.cpp/models/ggml-vocab-llama-spm.gguf")
    with tarfile.open(sdist.fetch()) as archive:
        for entry in archive:
            inside = PurePosixPath(entry.name).relative_to(sdist.PIN.folder)
            if entry.isfile() and str(inside).startswith(wanted):
                target = folder / inside
                target.parent.mkdir(parents=True, exist_ok=True)
                with archive.extractfile(entry) as source, target.open("wb") as out:
                    shutil.copyfileobj(source, out)
    shutil.copy(HERE / "suite_conftest.py", folder / "conftest.py")
    (folder / "pytest.ini").write_text("[pytest]\n")
    return folder


@pytest.fixture(scope="module")
def models(tiny_model) -> str:
    paths = {name: str(tiny_model(arch, vocab=vocab)) for name, (arch, vocab) in MODELS.items()}
    return json.dumps(paths)


def run_suite(folder: Path, models: str, llama: str) -> dict[str, Outcome]:
    """Test name -> outcome, of the whole suite with `llama` ("stock" or "install")."""
    report = folder / f"{llama}.xml"
    env = {**os.environ, "SUITE_LLAMA": llama, "SUITE_MODELS": models}
    root = str(HERE.parents[1])
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (root, env.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml", report, "tests"]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode in (0, 1), f"the suite did not run to its end:\n{done.stdout}\n{done.stderr}"
    outcomes = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        bad = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        outcomes[name] = Outcome(
            "passed" if bad is None else bad.tag, "" if bad is None else bad.get("message", "")
        )
    return outcomes


@pytest.fixture(scope="module")
def stock(suite, models) -> dict[str, Outcome]:
    return run_suite(suite, models, "stock")


@pytest.fixture(scope="module")
def ours(suite, models) -> dict[str, Outcome]:
    """With `llamahybrid.install()`: the methods are those of `llamahybrid.Llama`, the class is upstream's."""
    return run_suite(suite, models, "install")


def failures(outcomes: dict[str, Outcome]) -> set[str]:
    return {name for name, outcome in outcomes.items() if outcome.result != "passed"}


def test_stock_fails_only_where_the_released_model_is_needed(stock):
    assert len(stock) >= 25
    assert failures(stock) == set(NEEDS_THE_RELEASED_MODEL)


def test_ours_passes_the_tests_that_stock_passes(stock, ours):
    assert ours.keys() == stock.keys()
    assert sum("prefix_reuse" in name or "prompt_cache_reset" in name for name in ours) >= 3
    assert failures(ours) == failures(stock)


def test_failures_say_the_same(stock, ours):
    """The message holds the text that was generated: greedy text is equal where the suite looks at it."""
    for name in failures(stock):
        assert ours[name].message == stock[name].message
