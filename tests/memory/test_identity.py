"""State belongs to the model that computed it: an edit of the model's files makes it another's."""

import os
import shutil

import pytest

from llamahybrid import Llama, PromptCache
from llamahybrid.engine import loaded
from llamahybrid.memory.fingerprint import Computation
from llamahybrid.memory.identity import Identity
from llamahybrid.memory.model_files import ModelFiles
from llamahybrid.memory.state import SequenceState
from tests.conftest import SETTINGS, take

from .conftest import LONGER, PROMPT, overwritten, replaced, stock, wait_for_tick

pytestmark = pytest.mark.usefixtures("user_folder")


def test_a_model_edited_while_it_is_mapped_is_another(tiny_model, tmp_path, caplog):
    path, folder = tmp_path / "model.gguf", tmp_path / "disk"
    shutil.copy(tiny_model("qwen35"), path)
    llm = Llama(str(path), prompt_cache=PromptCache(1 << 28, folder), **SETTINGS)
    take(llm, PROMPT)
    wait_for_tick(path)
    overwritten(path, tiny_model("qwen35", seed=1))
    assert take(llm, PROMPT) == stock(path, PROMPT)
    assert llm.last_request.cached == 0
    assert "written to while the model is in use" in caplog.text
    assert take(llm, LONGER) == stock(path, LONGER)
    assert llm.last_request.cached == len(PROMPT)
    llm.prompt_cache.close()
    for other in (path, tiny_model("qwen35")):
        later = Llama(str(other), prompt_cache=PromptCache(1 << 28, folder), **SETTINGS)
        assert take(later, LONGER) == stock(other, LONGER)
        later.prompt_cache.close()


def test_live_state_is_of_the_weights_before_the_edit(tiny_model, tmp_path):
    path = tmp_path / "model.gguf"
    shutil.copy(tiny_model("llama"), path)
    llm = Llama(str(path), **SETTINGS)
    take(llm, PROMPT)
    wait_for_tick(path)
    overwritten(path, tiny_model("llama", seed=1))
    assert take(llm, LONGER) == stock(path, LONGER)
    assert llm.last_request.cached == 0


def test_an_edit_in_the_middle_of_an_answer_leaves_nothing_stored(tiny_model, tmp_path):
    path = tmp_path / "model.gguf"
    shutil.copy(tiny_model("qwen35"), path)
    llm = Llama(str(path), **SETTINGS)
    stream = llm.generate(PROMPT, temp=0.0)
    next(stream)
    entries = llm.prompt_cache.stats().entries
    wait_for_tick(path)
    overwritten(path, tiny_model("qwen35", seed=1))
    for _ in range(200):
        next(stream)
    stream.close()
    assert llm.prompt_cache.stats().entries == entries


@pytest.mark.parametrize("away", [os.unlink, lambda path: replaced(path, path)])
def test_a_model_that_is_replaced_stays_what_was_loaded(tiny_model, tmp_path, away):
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


# -- what has no name ------------------------------------------------------------------------------


def test_state_that_no_other_process_can_use_is_not_written_to_disk(tiny_model, tmp_path):
    path = tmp_path / "model.gguf"
    shutil.copy(tiny_model("qwen35"), path)
    llm = Llama(str(path), prompt_cache=PromptCache(1 << 28, tmp_path / "disk"), **SETTINGS)
    take(llm, PROMPT)
    llm.prompt_cache.flush()
    records = llm.prompt_cache.stats().extra["disk_records"]
    assert records > 0
    wait_for_tick(path)
    overwritten(path, tiny_model("qwen35", seed=1))
    take(llm, PROMPT)
    take(llm, LONGER)
    assert llm.last_request.cached == len(PROMPT), "RAM serves it"
    llm.prompt_cache.flush()
    assert llm.prompt_cache.stats().extra["disk_records"] == records
    llm.prompt_cache.close()


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


def bare(tmp_path):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"weights")
    computation = Computation(ModelFiles(file, by_content=False), b"settings")
    identity = Identity(computation.fingerprint, SequenceState.empty(8), None)
    identity.computation = computation
    return identity


def test_a_salt_names_what_is_decoded_until_there_is_another(tmp_path):
    identity = bare(tmp_path)
    names = {salt: identity.namespace_of(salt) for salt in (b"", b"a" * 16, b"b" * 16)}
    assert len(set(names.values())) == 3
    found = []
    for salt in (b"a" * 16, b"b" * 16, b"", b"a" * 16):
        assert not identity.serves(salt)
        identity.serve(salt)
        assert identity.serves(salt)
        assert identity.namespace == names[salt]
        found.append(identity.fingerprint)
    assert found[0] == found[3]
    assert len(set(found)) == 3
    assert found[2] == identity.computation.fingerprint


def test_what_is_live_cannot_be_given_to_another_salt(tmp_path):
    identity = bare(tmp_path)
    identity._state.n = 1
    with pytest.raises(ValueError, match="another salt"):
        identity.serve(b"a" * 16)
    assert identity.serves(b"")
