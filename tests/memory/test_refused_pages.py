"""Attention that the library hands out or takes by halves becomes neither a segment nor live."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from llama_cpp import llama_cpp as native

from llamahybrid.capi.shim import Library
from llamahybrid.memory.paging import RangePager
from llamahybrid.memory.segment import SegmentLayout
from llamahybrid.prompt_cache.envelope import HEADER_BYTES

from .conftest import PROMPT, ids, new, sequences

SCRATCH = 1
"""The last sequence of a context with one slot."""

Opener = Callable[..., Any]


@pytest.fixture(params=["qwen35", "qwen35-flash", "gemma3"])
def llm(request: pytest.FixtureRequest, open_model: Opener, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A model that pages through the scratch sequence, on either library."""
    monkeypatch.setattr(RangePager, "available", staticmethod(lambda: False))
    arch, _, flash = request.param.partition("-")
    return open_model(arch, n_ctx=256, flash_attn=bool(flash))


def payload(live: Any, start: int, end: int) -> Any:
    return live.page_out(start, end, new).record[HEADER_BYTES:]


def scratch_size(llm: Any) -> int:
    """The last position of a hybrid is the lesser of two, so that it hides attention; the size does not."""
    return int(native.llama_state_seq_get_size_ext(llm.ctx, SCRATCH, 0))


def halfway(monkeypatch: pytest.MonkeyPatch, name: str, result: Any) -> None:
    """Let a method of the library do its work and then report `result`, or raise it."""
    real = getattr(Library, name)

    def call(*arguments: Any) -> Any:
        real(*arguments)
        if isinstance(result, BaseException):
            raise result
        return result

    monkeypatch.setattr(Library, name, call)


# -- out of the context ----------------------------------------------------------------------------


def test_a_range_that_was_not_written_whole_is_no_segment(live: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = live.snapshot(new)
    with monkeypatch.context() as patch:
        halfway(patch, "save_state", False)
        assert live.page_out(0, 40, new) is None
    assert live.fault() is None
    assert np.array_equal(live.snapshot(new), before)
    assert live.page_out(0, 40, new) is not None


def test_an_interrupt_while_paging_leaves_the_sequence_usable(
    live: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        halfway(patch, "save_state", KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            live.page_out(0, 40, new)
    assert live.fault() is None
    assert live.page_out(0, 40, new) is not None


@pytest.mark.parametrize(
    ("name", "answer"), [("llama_memory_seq_rm", False), ("llama_memory_seq_pos_max", 3)]
)
def test_a_scratch_sequence_that_stays_full_is_not_trusted(
    live: Any, monkeypatch: pytest.MonkeyPatch, name: str, answer: Any
) -> None:
    stored = payload(live, 0, 40)
    real = getattr(native, name)

    def stuck(memory: Any, seq: int, *positions: int) -> Any:
        done = real(memory, seq, *positions)
        return answer if seq == SCRATCH else done

    monkeypatch.setattr(native, name, stuck)
    assert live.page_out(0, 40, new) is None
    assert not live.profile.pager.append([stored])


@pytest.mark.parametrize("span", [(0, 61), (20, 90)])
def test_tokens_that_are_not_in_the_sequence_are_no_segment(live: Any, span: tuple[int, int]) -> None:
    assert live.page_out(*span, new) is None


def test_memory_that_paging_left_changed_is_not_built_on(
    llm: Any, live: Any, lose_cells: Callable[[Any, int, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    pager = live.profile.pager
    save = pager.save

    def lossy(*arguments: Any) -> Any:
        saved = save(*arguments)
        lose_cells(llm.ctx, 2, 5)
        return saved

    monkeypatch.setattr(pager, "save", lossy)
    assert live.page_out(0, 40, new) is None
    assert live.state.is_invalid


def test_where_there_is_no_room_nothing_is_saved(live: Any) -> None:
    before = live.snapshot(new)
    assert live.page_out(0, 40, lambda n: None) is None
    assert np.array_equal(live.snapshot(new), before)


# -- into the context ------------------------------------------------------------------------------


@pytest.mark.parametrize("result", [False, KeyboardInterrupt()])
def test_attention_that_was_not_read_whole_is_refused_and_leaves_nothing_behind(
    llm: Any, live: Any, monkeypatch: pytest.MonkeyPatch, result: Any
) -> None:
    stored, empty = payload(live, 0, 40), scratch_size(llm)
    live.empty()
    halfway(monkeypatch, "load_state", result)
    if result is False:
        assert not live.profile.pager.append([stored])
    else:
        with pytest.raises(KeyboardInterrupt):
            live.profile.pager.append([stored])
    assert scratch_size(llm) == empty
    assert live.native.positions() == (-1, -1)


# -- a layout that nobody knows --------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["qwen35", "gemma3", "llama"])
def test_a_model_whose_layout_is_unknown_works_without_paging(
    open_model: Opener, monkeypatch: pytest.MonkeyPatch, arch: str
) -> None:
    monkeypatch.setattr(SegmentLayout, "learn", lambda *_: None)
    llm = open_model(arch, n_ctx=256)
    llm.eval(PROMPT)
    live = llm.runner.live
    assert not live.profile.attention_is_all
    assert live.page_out(0, 40, new) is None
    assert live.fault() is None


def changed(offset: int, value: int, front: bool = False) -> Callable[..., Any]:
    """Write an int32 at `offset` behind the cells' metadata, or behind the head."""

    def change(cells: Any, layout: Any) -> Any:
        (head, *_), ((_, cell_bytes), *_) = layout.fixed, layout.planes
        start = head + (0 if front else 20 * cell_bytes) + offset
        cells[start : start + 4] = np.array([value], np.int32).view(np.uint8)
        return cells

    return change


DAMAGE: dict[str, Callable[..., Any]] = {
    "neither transposed nor not": changed(0, 2),
    "more layers than there are": changed(4, 100),
    "cut at the end": lambda cells, _: cells[:-8],
    "bytes behind the end": lambda cells, _: np.append(cells, np.zeros(3, np.uint8)),
    "a position twice": changed(0, 6, front=True),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("flash", [False, True])
def test_an_unknown_layout_is_not_learnt(
    open_model: Opener, monkeypatch: pytest.MonkeyPatch, damage: str, flash: bool
) -> None:
    monkeypatch.setattr(RangePager, "available", staticmethod(lambda: False))
    live = open_model("qwen35", n_ctx=256, flash_attn=flash).runner.live
    live.decode(ids(PROMPT), "last")
    layout, written = live.profile.pager.layout, payload(live, 5, 25)

    def learn(change: Callable[..., Any]) -> Any:
        cells, rest = np.split(written.copy(), [written.nbytes - layout.fixed[-1]])
        whole = np.concatenate([change(cells, layout), rest])
        return SegmentLayout.learn(whole, 20, layout.fixed[0], layout.fixed[-1])

    assert learn(lambda cells, _: cells) == layout
    assert learn(DAMAGE[damage]) is None
    with pytest.raises(ValueError, match="no 20 cells"):
        layout.count(written[:-8])


@pytest.mark.patched
@pytest.mark.parametrize("arch", ["qwen35", "gemma3", "llama"])
def test_cells_that_lie_in_disorder_are_stored_in_order(open_model: Opener, arch: str) -> None:
    """The later tokens of a sequence take the cells that another one has left, in front of its first."""
    one, other = sequences(open_model(arch, n_ctx=512, n_parallel=2))
    for live, tokens in ((other, PROMPT * 3), (one, PROMPT[:20])):
        live.decode(ids(tokens), "last")
    other.empty()
    one.decode(ids(PROMPT[20:]), "last")
    whole, *direct = (one.page_out(a, b, new) for a, b in ((0, 60), (0, 30), (30, 60)))
    parts = one.view().split.parts(whole, ids(PROMPT), [(0, 30), (30, 60)])
    for part, wanted in zip(parts, direct, strict=True):
        assert np.array_equal(part.record, wanted.record)
