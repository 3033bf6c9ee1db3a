"""Content that others put into context memory: taken where it really is there, and stored for nobody."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llama_cpp
import pytest

from llamahybrid import Llama, PromptCache
from llamahybrid.client.saved_state import SEAL
from llamahybrid.memory.restore import adopt_native, restore
from tests.conftest import SETTINGS, take

from .conftest import LONGER, PROMPT, foreign_decode, ids, new, stock

OTHER = [(11 * i + 5) % 200 for i in range(50)]


def image(llm: Any, live: Any) -> None:
    """An image of one cell that counts for three positions, as with M-RoPE."""
    foreign_decode(llm, [5], live.n, live.native.seq)
    assert adopt_native(live, live.n + 3)


# -- content without token ids ---------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["qwen35", "gemma3"])
def test_an_image_is_adopted_and_never_stored(open_model: Callable[..., Any], arch: str) -> None:
    llm = open_model(arch, n_ctx=256)
    llm.eval(PROMPT)
    live = llm.runner.live
    image(llm, live)
    assert live.fault() is None
    first, second = live.tokens[-2:]
    assert first < 0 > second
    assert first != second, "no two of them are alike"
    assert live.checkpoint(new) is None
    assert live.page_out(0, 40, new) is None


@pytest.mark.parametrize("n", [61, 10_000])
def test_content_that_is_not_there_is_not_adopted(llm: Any, live: Any, n: int) -> None:
    foreign_decode(llm, [5, 6], live.n)
    assert not adopt_native(live, n)
    live.invalidate()
    assert not adopt_native(live, len(PROMPT) + 2), "nor behind what is unknown"


@pytest.mark.parametrize("whole", [False, True])
def test_a_state_from_before_an_image_is_sound(llm: Any, live: Any, whole: bool) -> None:
    record, state = live.snapshot(new), llm.save_state()
    image(llm, live)
    if whole:
        llm.load_state(state)
    else:
        assert restore(live, record, ids(PROMPT)) is None
    assert live.state.holds(ids(PROMPT))
    assert live.fault() is None


# -- states that nothing says the owner of ---------------------------------------------------------


@pytest.fixture
def foreign(tiny_model: Callable[..., Path]) -> Callable[[str], Any]:
    """`foreign(arch)`: a state that stock saved of another model of the same shape, which is not sealed.

    With slots, which stock has none of: what it would look like.
    """

    def make(arch: str, **slots: int) -> Any:
        llm = (Llama if slots else llama_cpp.Llama)(str(tiny_model(arch, seed=1)), **slots, **SETTINGS)
        llm.eval(PROMPT)
        state = llm.save_state()
        vars(state).pop(SEAL, None)
        return state

    return make


FOREIGN = [
    *("qwen35", "gemma3", "mamba"),
    *(pytest.param(arch, marks=pytest.mark.full) for arch in ("llama", "rwkv7", "jamba")),
]


@pytest.mark.parametrize("arch", FOREIGN)
@pytest.mark.parametrize("saved_by", ["stock", "us"])
def test_nothing_that_rests_on_a_foreign_state_is_stored(
    tiny_model: Callable[..., Path], tmp_path: Path, foreign: Callable[[str], Any], arch: str, saved_by: str
) -> None:
    """The prompt cache, its folder and a seal would pass it on as this model's own."""
    path, state, cache = tiny_model(arch), foreign(arch), PromptCache(1 << 26, tmp_path)
    want = stock(path, LONGER)
    llm = Llama(str(path), prompt_cache=cache, **SETTINGS)
    llm.load_state(state)
    if saved_by == "us":
        state = pickle.loads(pickle.dumps(llm.save_state()))
        llm.load_state(state)
    assert take(llm, LONGER) != want, "its user has it where it was loaded"
    take(llm, OTHER)
    assert take(llm, LONGER) == want
    llm.load_state(state)
    llm.reset()
    assert take(llm, LONGER) == want
    llm.close()
    again = Llama(str(path), prompt_cache=PromptCache(1 << 26, tmp_path), **SETTINGS)
    assert take(again, LONGER) == want
    assert again.last_request.source == "disk", "what was computed here is stored"


@pytest.mark.parametrize("arch", ["qwen35", "llama"])
def test_a_foreign_state_that_prompts_have_left_keeps_nothing_from_being_stored(
    tiny_model: Callable[..., Path], foreign: Callable[[str], Any], arch: str
) -> None:
    """Prompts share a beginning: for that alone it would stay for ever."""
    llm = Llama(str(tiny_model(arch)), **SETTINGS)
    llm.load_state(foreign(arch))
    for prompt in ([*PROMPT[:9], *OTHER], OTHER[::-1]):
        assert take(llm, prompt) == stock(tiny_model(arch), prompt)
    take(llm, [*PROMPT[:9], *OTHER, 3])
    assert llm.last_request.cached >= len(PROMPT[:9])


@pytest.mark.parametrize("arch", ["qwen35", "gemma3"])
def test_a_foreign_state_is_not_shared_with_other_slots(
    tiny_model: Callable[..., Path], foreign: Callable[[str], Any], arch: str
) -> None:
    llm = Llama(str(tiny_model(arch)), n_parallel=3, **SETTINGS)
    want = stock(tiny_model(arch), LONGER)
    for prompt in (PROMPT, OTHER, OTHER[::-1], OTHER[20:]):
        take(llm, prompt)
    llm.load_state(foreign(arch, n_parallel=3))
    in_its_slot = llm.generate(LONGER, temp=0.0)
    answer = [next(in_its_slot)]
    assert take(llm, LONGER) == want
    assert [*answer, *itertools.islice(in_its_slot, 7)] != want
