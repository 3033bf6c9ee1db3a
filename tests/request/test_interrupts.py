"""Ctrl-C between two lines of what touches a context: nothing that is left behind is believed."""

from __future__ import annotations

import time
from itertools import islice

import llama_cpp
import numpy as np
import pytest
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from llamahybrid import Llama, PromptCache
from llamahybrid.capi.calls import NativeContext
from llamahybrid.memory.sequence import LiveSequence
from tests.lab import line_fuzz
from tests.lab.differential import Mismatch

OPTIONS = {"n_ctx": 512, "n_threads": 1, "verbose": False}
FIRST = [(7 * i + 1) % 200 for i in range(80)]
SECOND = [(11 * i + 5) % 200 for i in range(50)]


@pytest.fixture
def opened():
    made = []

    def open_one(model, kind=Llama, **more):
        made.append(kind(str(model), **{**OPTIONS, **more}))
        return made[-1]

    yield open_one
    for llm in made:
        llm.close()


def take(llm, prompt, n=12):
    return list(islice(llm.generate(prompt, temp=0.0), n))


def interrupt_after(monkeypatch, owner, name):
    """Ctrl-C right behind the next call, once."""
    real = getattr(owner, name)

    def once(self, *args, **kwargs):
        monkeypatch.setattr(owner, name, real)
        real(self, *args, **kwargs)
        raise KeyboardInterrupt

    monkeypatch.setattr(owner, name, once)


@pytest.mark.parametrize("arch", ["qwen35", "jamba", "mamba", "gemma3"])
@pytest.mark.parametrize("call", ["load_partial", "cut"])
def test_in_a_restore(tiny_model, opened, monkeypatch, tmp_path, arch, call):
    """Memory is the new chat's, or half of it; the old one was live before."""
    model = tiny_model(arch, **({"window": 16} if arch == "gemma3" else {}))
    more = {"swa_full": False, "n_batch": 64, "n_ubatch": 32}
    llm = opened(model, prompt_cache=PromptCache(1 << 26, tmp_path), **more)
    prompts = {"first": FIRST, "second": SECOND, "on": [*SECOND, 7, 8, 9]}
    wanted = {name: take(opened(model, llama_cpp.Llama, **more), p) for name, p in prompts.items()}
    assert take(llm, FIRST) == wanted["first"]
    assert take(llm, SECOND) == wanted["second"]
    interrupt_after(monkeypatch, NativeContext, call)
    with pytest.raises(KeyboardInterrupt):
        take(llm, FIRST)
    assert llm.runner.live.state.is_invalid
    assert not llm.runner.live.state.starts_with(np.array(SECOND[:1]))
    for name in ("second", "on", "first", "on"):
        assert take(llm, prompts[name]) == wanted[name]
    llm.close()
    later = opened(model, prompt_cache=PromptCache(1 << 26, tmp_path), **more)
    for name in ("on", "second", "first"):
        assert take(later, prompts[name]) == wanted[name]


def test_between_a_decode_and_what_is_known_of_it(tiny_model, opened, monkeypatch):
    """The planes and logits of the batch before are not taken for this one's."""
    live = opened(tiny_model("qwen35"), draft_planes=4).runner.live
    live.decode(np.array(FIRST[:20], dtype=np.int32), "last")
    assert live.planes.reach == 4
    interrupt_after(monkeypatch, NativeContext, "positions")
    with pytest.raises(KeyboardInterrupt):
        live.decode([5], "none")
    assert live.planes.reach == 0
    assert live.row.logits() is None


def test_between_a_cut_and_what_is_known_of_it(tiny_model, opened, monkeypatch):
    live = opened(tiny_model("llama")).runner.live
    live.decode(np.array(FIRST[:20], dtype=np.int32), "last")
    interrupt_after(monkeypatch, NativeContext, "cut")
    with pytest.raises(KeyboardInterrupt):
        live.cut(10)
    assert live.row.logits() is None
    assert live.fault() is not None


def test_between_a_rollback_and_what_is_known_of_it(tiny_model, opened, monkeypatch):
    live = opened(tiny_model("qwen35"), draft_planes=4).runner.live
    live.decode(np.array(FIRST[:20], dtype=np.int32), "last")
    live.recount()
    interrupt_after(monkeypatch, NativeContext, "cut")
    with pytest.raises(KeyboardInterrupt):
        live.cut(18)
    assert live.planes.reach == 0
    assert live.planes.pending


def test_while_the_state_before_a_draft_is_saved(tiny_model, opened, monkeypatch):
    draft = LlamaPromptLookupDecoding(num_pred_tokens=4)
    llm = opened(tiny_model("jamba"), draft_model=draft)
    live, undo = llm.runner.live, llm.drafts.undo
    live.decode(np.array(FIRST[:20], dtype=np.int32), "last")
    undo.take()
    live.decode([5], "last")
    interrupt_after(monkeypatch, LiveSequence, "snapshot")
    with pytest.raises(KeyboardInterrupt):
        undo.take()
    assert undo.position is None, "the bytes of one state under the tokens of another"


@pytest.mark.parametrize("mode", line_fuzz.MODES)
@pytest.mark.parametrize("arch", line_fuzz.ARCHITECTURES)
def test_at_lines_drawn_at_random(tiny_model, arch, mode):
    lines, made = line_fuzz.run(tiny_model(arch, window=16), 1, mode, time.monotonic() + 100, most=12)
    assert lines > 300
    assert made > 0


def test_a_wrong_answer_after_an_interrupt_is_noticed(tiny_model, monkeypatch):
    sweep = line_fuzz.Sweep(tiny_model("qwen35", window=16), 1, "plain")
    ask = line_fuzz._ask
    monkeypatch.setattr(line_fuzz, "_ask", lambda llm, chat: [(t + 7) % 200 for t in ask(llm, chat)])
    with pytest.raises(Mismatch, match="interrupted at"):
        sweep.interrupt(sweep.lines()[0], 1)
    sweep.llm.close()
