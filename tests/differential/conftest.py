"""What the differential tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

import llamahybrid
from llamahybrid.harness.differential import SETTINGS, Reference, Setting


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
