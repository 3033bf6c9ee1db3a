"""A script written for llama-cpp-python runs unchanged, and says the same."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from llamahybrid.engine import bindings

pytestmark = [pytest.mark.patched]

HERE = Path(__file__).parent
SCRIPT = HERE / "readme_script.py"

MODELS = {"hybrid": "qwen35", "recurrent": "mamba", "plain": "llama", "embedding": "bert"}


@pytest.fixture(scope="module")
def results(tmp_path_factory, tiny_model) -> dict[str, dict[str, object]]:
    """Package -> the script's results with `Llama` imported from that package."""
    folder = tmp_path_factory.mktemp("readme")
    vocabularies = {"embedding": "bert-bge"}
    models = {
        kind: str(tiny_model(arch, vocab=vocabularies.get(kind, "tiny"))) for kind, arch in MODELS.items()
    }
    (folder / "models.json").write_text(json.dumps(models))
    return {package: run_script(folder, package) for package in ("llama_cpp", "llamahybrid")}


def run_script(folder: Path, package: str) -> dict[str, object]:
    """The script with one name in its import lines exchanged, if at all."""
    script, out = folder / f"{package}_script.py", folder / f"{package}.json"
    names = "Llama, LlamaGrammar, LlamaRAMCache, LogitsProcessorList, StoppingCriteriaList"
    stock_import = f"from llama_cpp import {names}\n"
    text = SCRIPT.read_text()
    assert stock_import in text
    if package != "llama_cpp":
        ours = f"from {package} import Llama\nfrom llama_cpp import {names.removeprefix('Llama, ')}\n"
        text = text.replace(stock_import, ours)
    script.write_text(text)
    path = os.pathsep.join(filter(None, (str(HERE.parents[1]), os.environ.get("PYTHONPATH"))))
    library = str(bindings.loaded_from())
    as_stock = {"LLAMAHYBRID_STOCK_LOGPROBS": "on"}
    same_engine = {"LLAMA_CPP_LIB_PATH": library, "MTMD_CPP_LIB": library}  # llama_cpp alone would take stock
    done = subprocess.run(
        [sys.executable, script, folder / "models.json", out],
        env={**os.environ, "PYTHONPATH": path, **same_engine, **as_stock},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(out.read_text())


def parts(value: object, path: str = "") -> dict[str, object]:
    """The leaves of nested JSON, by path."""
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    else:
        return {path: value}
    return {key: leaf for name, item in items for key, leaf in parts(item, f"{path}/{name}").items()}


def test_every_call_answers_as_stock_does(results):
    stock, ours = results["llama_cpp"], results["llamahybrid"]
    assert ours.keys() == stock.keys()
    for name in stock:
        expected, found = parts(stock[name]), parts(ours[name])
        assert found.keys() == expected.keys(), name
        for path, value in expected.items():
            if name.endswith((" json", " json schema")) and path.startswith(("/usage/", "/choices/0/")):
                continue  # stock's rules place spaces otherwise, so that other tokens are sampled behind them
            elif isinstance(value, float):
                assert found[path] == pytest.approx(value, rel=1e-3, abs=1e-3), f"{name}: {path}"
            else:
                assert found[path] == value, f"{name}: {path}"


def test_the_script_has_something_to_say(results):
    """Guards the comparison itself: the answers are neither empty nor all the same."""
    stock = results["llama_cpp"]
    for kind in ("hybrid", "recurrent", "plain"):
        texts = {stock[f"{kind} {name}"]["choices"][0]["text"] for name in ("completion", "greedy", "seeded")}
        assert len(texts) == 3
        assert stock[f"{kind} greedy"]["choices"][0]["text"] == stock[f"{kind} again"]["choices"][0]["text"]
        answer = json.loads(stock[f"{kind} json schema"]["choices"][0]["message"]["content"])
        assert answer["team"] in ("red", "blue")


def test_json_answers_follow_their_schema(results):
    for kind in ("hybrid", "recurrent", "plain"):
        ours = results["llamahybrid"]
        answer = json.loads(ours[f"{kind} json schema"]["choices"][0]["message"]["content"])
        assert answer["team"] in ("red", "blue")
        assert answer["ready"] in (True, False)
        assert ours[f"{kind} json"]["choices"][0]["message"]["content"].startswith("{")
