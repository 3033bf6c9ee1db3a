"""What the library refuses, or does by halves, becomes neither a segment nor live attention."""

import numpy as np
import pytest
from llama_cpp import llama_cpp as native

from llamahybrid import Llama
from llamahybrid.capi.shim import Library
from llamahybrid.errors import SnapshotError
from llamahybrid.memory import paging
from llamahybrid.memory.paging import Pager, RangePager
from llamahybrid.memory.restore import restore
from llamahybrid.memory.segment import SegmentLayout
from llamahybrid.prompt_cache.envelope import HEADER_BYTES

SCRATCH = 1  # the last sequence of a context with one slot
PROMPT = [(7 * i + 1) % 200 for i in range(60)]


def new(n):
    return np.empty(n, dtype=np.uint8)


@pytest.fixture(params=["transposed", "flash"])
def live(request, tiny_model, monkeypatch):
    """A live sequence that pages through the scratch sequence, with either library."""
    monkeypatch.setattr(RangePager, "available", staticmethod(lambda: False))
    flash = request.param == "flash"
    llm = Llama(str(tiny_model("qwen35")), n_ctx=256, n_threads=1, verbose=False, flash_attn=flash)
    llm.eval(PROMPT)
    yield llm.runner.live
    llm.close()


@pytest.fixture
def pager(live):
    found = live.profile.pager
    assert type(found) is Pager
    return found


@pytest.fixture
def scratch_is_empty(live):
    """By its size: the last position of a hybrid is the lesser of two, so that it hides attention."""

    def size():
        return paging._size(live.native._ctx, SCRATCH, paging.FULL)

    empty = size()
    return lambda: size() == empty


def halfway(monkeypatch, name, result):
    """Let a native call do its work and then report `result`, or raise it."""
    real = getattr(paging, name)

    def call(*arguments):
        real(*arguments)
        if isinstance(result, BaseException):
            raise result
        return result

    monkeypatch.setattr(paging, name, call)


# -- out of the context ----------------------------------------------------------------------------


def test_what_was_not_written_whole_is_no_segment(live, scratch_is_empty, monkeypatch):
    halfway(monkeypatch, "_get", 1)
    assert live.page_out(0, 40, new) is None
    assert scratch_is_empty()
    assert live.fault() is None


def test_a_range_of_another_size_than_learnt_is_no_segment(live, scratch_is_empty):
    assert live.page_out(0, 40, lambda n: new(n - 1)) is None
    assert scratch_is_empty()


def test_an_interrupt_leaves_the_scratch_sequence_empty(live, scratch_is_empty, monkeypatch):
    halfway(monkeypatch, "_get", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        live.page_out(0, 40, new)
    assert scratch_is_empty()


@pytest.mark.parametrize(
    ("name", "answer"), [("llama_memory_seq_rm", False), ("llama_memory_seq_pos_max", 3)]
)
def test_a_scratch_sequence_that_stays_full_is_not_trusted(live, pager, monkeypatch, name, answer):
    payload = live.page_out(0, 40, new).record[HEADER_BYTES:]
    real = getattr(native, name)

    def stuck(memory, seq, *positions):
        done = real(memory, seq, *positions)
        return answer if seq == SCRATCH else done

    monkeypatch.setattr(native, name, stuck)
    assert live.page_out(0, 40, new) is None
    assert not pager.append([payload])


@pytest.mark.parametrize("span", [(0, 61), (20, 90)])
def test_what_is_not_in_the_sequence_is_no_segment(live, span):
    assert live.page_out(*span, new) is None


def test_memory_that_is_not_as_believed_gives_no_segment(live, lose_cells):
    lose_cells(live.native._ctx.ctx, 2, 5)
    assert live.page_out(0, 40, new) is None


def test_memory_that_paging_left_changed_is_not_built_on(live, pager, lose_cells, monkeypatch):
    save = pager.save

    def lossy(*arguments):
        saved = save(*arguments)
        lose_cells(live.native._ctx.ctx, 2, 5)
        return saved

    monkeypatch.setattr(pager, "save", lossy)
    assert live.page_out(0, 40, new) is None
    assert live.state.is_invalid


def test_where_there_is_no_room_nothing_is_saved(live):
    before = live.snapshot(new)
    assert live.page_out(0, 40, lambda n: None) is None
    assert not live.state.is_invalid
    assert np.array_equal(live.snapshot(new), before)
    assert live.page_out(0, 40, new) is not None


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
@pytest.mark.parametrize(("name", "answer"), [("_get", 1), ("llama_memory_seq_pos_max", 3)])
def test_of_a_plain_model_too_what_was_not_written_whole_is_no_segment(
    tiny_model, monkeypatch, arch, name, answer
):
    monkeypatch.setattr(RangePager, "available", staticmethod(lambda: False))
    made = {"window": 16} if arch == "gemma3" else {}
    llm = Llama(str(tiny_model(arch, **made)), n_ctx=256, n_threads=1, verbose=False)
    llm.eval(PROMPT)
    live = llm.runner.live
    assert live.page_out(0, 40, new) is not None
    with monkeypatch.context() as patched:
        if name == "_get":
            halfway(patched, name, answer)
        else:
            real = getattr(native, name)
            patched.setattr(native, name, lambda memory, seq: answer if seq == SCRATCH else real(memory, seq))
        assert live.page_out(0, 40, new) is None
        assert live.page_out(0, 10, new) is None
    assert live.fault() is None
    llm.close()


# -- into the context ------------------------------------------------------------------------------


@pytest.mark.parametrize("result", [0, KeyboardInterrupt()])
def test_what_was_not_read_whole_is_refused_and_leaves_nothing_behind(
    live, scratch_is_empty, pager, monkeypatch, result
):
    payload = live.page_out(0, 40, new).record[HEADER_BYTES:]
    live.empty()
    halfway(monkeypatch, "_set", result)
    if isinstance(result, BaseException):
        with pytest.raises(KeyboardInterrupt):
            pager.append([payload])
    else:
        assert not pager.append([payload])
    assert scratch_is_empty()
    assert live.native.positions() == (-1, -1)


def test_attention_that_waited_in_the_scratch_sequence_leaves_it(pager, scratch_is_empty):
    pager.keep_attention(30)
    assert scratch_is_empty()


def test_a_segment_of_another_range_is_refused(live):
    record = live.snapshot(new)
    segment = live.page_out(10, 60, new)
    segment = type(segment)(0, 60, segment.record)
    live.empty()
    with pytest.raises(SnapshotError, match="another range"):
        restore(live, record, np.array(PROMPT, np.int32), [segment], 0)


# -- through the functions for ranges --------------------------------------------------------------


@pytest.mark.parametrize(("size", "checksum", "length"), [(0, 5, 0), (100, None, 100), (100, 5, 99)])
def test_a_range_that_is_not_handed_out_whole_is_no_segment(live, pager, monkeypatch, size, checksum, length):
    monkeypatch.setattr(paging, "range_function", lambda what: lambda *_: size)
    monkeypatch.setattr(Library, "save_range", lambda *_: checksum)
    ranges = RangePager(live.native._ctx, pager.layout, new(0))
    assert ranges._read(0, 40, lambda n: new(length)) is None


@pytest.mark.parametrize(("read", "taken"), [(0, False), (-1, True)])
def test_a_range_counts_as_loaded_when_all_of_it_was_read(live, pager, monkeypatch, read, taken):
    payload = live.page_out(0, 40, new).record[HEADER_BYTES:]
    monkeypatch.setattr(paging, "range_function", lambda *_: lambda *_: payload.nbytes if read < 0 else read)
    assert RangePager(live.native._ctx, pager.layout, new(0)).append([payload]) is taken


# -- a layout that is not as we know it ------------------------------------------------------------


@pytest.fixture
def learn(live, pager):
    """`learn(change)`: the layout of 20 cells after `change(payload)`."""
    layout = pager.layout
    payload = live.page_out(5, 25, new).record[HEADER_BYTES:]

    def learnt(change):
        cells, rest = np.split(payload.copy(), [payload.nbytes - layout.rest_bytes])
        return SegmentLayout.learn(
            np.concatenate([change(cells, layout), rest]), 20, layout.head_bytes, layout.rest_bytes
        )

    return learnt


def changed(offset, value):
    """Write an int32 at `offset`, counted from the end of the cells' metadata; below zero: from the front."""

    def change(cells, layout):
        start = layout.head_bytes + (20 * layout.cell_bytes if offset >= 0 else 0)
        cells[start + offset : start + offset + 4] = np.array([value], np.int32).view(np.uint8)
        return cells

    return change


def twice_the_same_position(cells, layout):
    first, second = layout.head_bytes, layout.head_bytes + layout.cell_bytes
    cells[second : second + 4] = cells[first : first + 4]
    return cells


def test_a_layout_is_learnt_from_any_range(pager, learn):
    assert learn(lambda cells, _: cells) == pager.layout


@pytest.mark.parametrize(
    "change",
    [
        changed(-4, 19),  # another number of cells
        changed(0, 2),  # neither transposed nor not
        changed(4, 100),  # more layers than there are
        changed(4, 0),  # fewer
        lambda cells, layout: cells[: layout.head_bytes + 2],
        lambda cells, _: cells[:-8],
        lambda cells, _: np.append(cells, np.zeros(3, np.uint8)),
        twice_the_same_position,
    ],
)
def test_an_unknown_layout_is_not_learnt(learn, change):
    assert learn(change) is None


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_a_plain_model_whose_layout_is_unknown_works_without_paging(tiny_model, monkeypatch, arch):
    monkeypatch.setattr(RangePager, "available", staticmethod(lambda: False))
    monkeypatch.setattr(SegmentLayout, "learn", lambda *_: None)
    llm = Llama(str(tiny_model(arch)), n_ctx=256, n_threads=1, verbose=False)
    profile = llm.runner.live.profile
    assert (profile.pager, profile.attention_is_all, profile.keeps_chats) == (None, False, False)
    llm.eval(PROMPT)
    llm.close()


def test_a_payload_of_another_length_has_no_cells_to_count(live, pager):
    payload = live.page_out(5, 25, new).record[HEADER_BYTES:]
    assert pager.layout.count(payload) == 20
    with pytest.raises(ValueError, match="no 20 cells"):
        pager.layout.count(payload[:-8])


@pytest.mark.parametrize(("what", "name"), [(SegmentLayout, "learn"), (Pager, "_read")])
def test_a_model_whose_layout_is_unknown_works_without_paging(tiny_model, monkeypatch, what, name):
    monkeypatch.setattr(RangePager, "available", staticmethod(lambda: False))
    monkeypatch.setattr(what, name, lambda *_: None)
    llm = Llama(str(tiny_model("qwen35")), n_ctx=256, n_threads=1, verbose=False)
    assert llm.runner.live.profile.pager is None
    llm.eval(PROMPT)
    assert llm.runner.live.page_out(0, 40, new) is None
    assert llm.runner.live.snapshot(new) is not None
    llm.close()
