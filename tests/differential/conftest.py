"""Fixtures of the differential tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

import llamahybrid

# isort: split
import llama_cpp

from tests.lab.reference import SETTINGS, Reference, Setting


@pytest.fixture
def opened() -> Iterator[Callable[..., Any]]:
    """`opened(model, setting=…, **arguments)`: our `Llama`, closed when the test ends."""
    with ExitStack() as stack:

        def open_one(model: Path, setting: Setting = SETTINGS[0], **arguments: Any) -> Any:
            return stack.enter_context(closing(setting.open(llamahybrid.Llama, model, **arguments)))

        yield open_one


@pytest.fixture
def reference() -> Iterator[Callable[..., Reference]]:
    """`reference(model, setting=…)`: fresh stock contexts to compare with."""
    with ExitStack() as stack:

        def open_one(model: Path, setting: Setting = SETTINGS[0]) -> Reference:
            return stack.enter_context(closing(Reference(model, setting)))

        yield open_one


class Forgetful(llama_cpp.Llama):
    """Says that memory was cut, and leaves it as it was: what a failed cut looks like when nobody checks."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._ctx.kv_cache_seq_rm = lambda seq, start, end: True


@pytest.fixture
def forgetful() -> type[Forgetful]:
    """A `Llama` whose answers go wrong, to prove that the runner sees it."""
    return Forgetful
