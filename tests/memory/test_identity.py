"""State belongs to the model that computed it: an edit of the model's files makes it another's."""

import os
import shutil

import pytest

from llamahybrid import Llama, PromptCache
from llamahybrid.engine import loaded
from tests.conftest import SETTINGS, take
from tests.lab.waiting import wait_until

from .conftest import LONGER, PROMPT, overwritten, replaced, stock, wait_for_tick

pytestmark = pytest.mark.usefixtures("user_folder")


@pytest.mark.parametrize("arch", ["qwen35", "llama"])
def test_a_model_edited_while_it_is_mapped_is_another(tiny_model, tmp_path, caplog, arch):
    path, folder = tmp_path / "model.gguf", tmp_path / "disk"
    shutil.copy(tiny_model(arch), path)
    llm = Llama(str(path), prompt_cache=PromptCache(1 << 28, folder), **SETTINGS)
    take(llm, PROMPT)
    llm.prompt_cache.flush()
    records = llm.prompt_cache.stats().extra["disk_records"]
    wait_for_tick(path)
    overwritten(path, tiny_model(arch, seed=1))
    assert take(llm, PROMPT) == stock(path, PROMPT)
    assert llm.last_request.cached == 0
    assert "written to while the model is in use" in caplog.text
    assert take(llm, LONGER) == stock(path, LONGER)
    assert llm.last_request.cached == len(PROMPT)
    llm.prompt_cache.flush()
    assert llm.prompt_cache.stats().extra["disk_records"] == records, "no other process can use it"
    llm.prompt_cache.close()
    for other in (path, tiny_model(arch)):
        later = Llama(str(other), prompt_cache=PromptCache(1 << 28, folder), **SETTINGS)
        assert take(later, LONGER) == stock(other, LONGER)
        later.prompt_cache.close()


def test_an_edit_in_the_middle_of_an_answer_leaves_nothing_stored(tiny_model, tmp_path):
    path = tmp_path / "model.gguf"
    shutil.copy(tiny_model("qwen35"), path)
    llm = Llama(str(path), **SETTINGS)
    stream = llm.generate(PROMPT, temp=0.0)
    next(stream)
    wait_until(lambda: llm.last_request.checkpoints)
    entries = llm.prompt_cache.stats().entries
    wait_for_tick(path)
    overwritten(path, tiny_model("qwen35", seed=1))
    for _ in range(200):
        next(stream)
    stream.close()
    assert llm.prompt_cache.stats().entries == entries


@pytest.mark.parametrize("away", [os.unlink, lambda path: replaced(path, path)])
def test_a_loaded_model_keeps_its_state_when_its_file_is_replaced(tiny_model, tmp_path, away):
    path = tmp_path / "model.gguf"
    shutil.copy(tiny_model("qwen35"), path)
    llm = Llama(str(path), **SETTINGS)
    take(llm, PROMPT)
    before = llm.runner.live.fingerprint
    wait_for_tick(path)
    away(path)
    take(llm, LONGER)
    assert llm.last_request.cached == len(PROMPT)
    assert llm.runner.live.fingerprint == before


def test_an_engine_without_a_name_stays_in_ram(tiny_model, tmp_path, monkeypatch):
    def gone():
        raise OSError("replaced")

    monkeypatch.setattr(loaded, "libraries", gone)
    llm = Llama(str(tiny_model("qwen35")), prompt_cache=PromptCache(1 << 28, tmp_path / "disk"), **SETTINGS)
    take(llm, PROMPT)
    take(llm, LONGER)
    assert llm.last_request.cached == len(PROMPT)
    llm.prompt_cache.flush()
    assert llm.prompt_cache.stats().extra["disk_records"] == 0
    llm.prompt_cache.close()
