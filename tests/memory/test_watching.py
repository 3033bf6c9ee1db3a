"""Calls of llama_cpp's functions are seen, and whose context they are of; nothing breaks where that fails."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from llama_cpp import llama_cpp as native

from llamahybrid import Llama
from llamahybrid.memory.watching import address, context_at, context_of_memory, watch

NAME = "llama_memory_seq_pos_max"


@pytest.fixture
def llm(tiny_model: Callable[..., Path]) -> Iterator[Llama]:
    with closing(Llama(str(tiny_model("llama")), n_ctx=64, n_threads=1, verbose=False)) as opened:
        opened.eval([1, 2, 3])
        yield opened


@pytest.fixture
def watched() -> Iterator[Callable[[Callable[[Any, Any], Any]], None]]:
    """`watched(notice)`: the function of this name is watched, until the test is over."""
    function = getattr(native, NAME)
    before = function.errcheck
    yield lambda notice: watch(NAME, notice)
    if before is None:
        del function.errcheck
    else:
        function.errcheck = before


def asked(llm: Llama) -> int:
    return int(getattr(native, NAME)(native.llama_get_memory(llm.ctx), 0))


@pytest.mark.parametrize("pointer", [7, ctypes.c_void_p(7), ctypes.cast(7, ctypes.POINTER(ctypes.c_int))])
def test_an_address_is_what_ctypes_takes_for_a_pointer(pointer: Any) -> None:
    assert address(pointer) == 7


@pytest.mark.parametrize("pointer", [None, ctypes.c_void_p()])
def test_no_pointer_has_no_address(pointer: Any) -> None:
    assert address(pointer) == 0


def test_a_context_is_known_by_itself_and_by_its_memory(llm: Llama) -> None:
    assert context_at(llm.ctx) is llm._ctx
    assert context_of_memory(native.llama_get_memory(llm.ctx)) is llm._ctx
    assert context_at(None) is None
    assert context_of_memory(None) is None


def test_a_closed_one_is_nobodys(llm: Llama) -> None:
    at = address(llm.ctx)
    llm.close()
    assert context_at(at) is None


def test_what_a_notice_says_is_the_result(llm: Llama, watched: Any) -> None:
    seen: list[int] = []
    watched(lambda result, arguments: seen.append(result))
    assert asked(llm) == 2
    watched(lambda result, arguments: 40)
    assert asked(llm) == 40
    assert seen == [2, 40], "who watched before is told, too"


def test_a_notice_that_fails_changes_nothing(
    llm: Llama, watched: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("a fault")

    watched(fail)
    assert asked(llm) == 2
    assert "could not be followed" in caplog.text


def test_a_function_that_this_release_does_not_have_is_left_alone() -> None:
    watch("llama_there_is_no_such_function", lambda result, arguments: None)
