"""Signatures of methods that stand in for upstream's: what they hand on is in them, too.

Editors show them, and programs that keep only the arguments that a function takes read them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

Method = TypeVar("Method", bound=Callable[..., Any])


def as_of(upstream: Callable[..., Any], *ours: Callable[..., Any]) -> Callable[[Method], Method]:
    """To `inspect`, a method takes what `upstream` takes, and the keywords that it adds by name.

    `ours`: methods that it hands keywords on to, which they add.
    """

    def shown(method: Method) -> Method:
        theirs = inspect.signature(upstream)
        taken = {parameter.name: parameter for parameter in theirs.parameters.values()}
        rest = [taken.pop(name) for name, p in theirs.parameters.items() if p.kind is p.VAR_KEYWORD]
        own = {parameter.name: parameter for each in (method, *ours) for parameter in _added(each)}
        signature = theirs.replace(parameters=[*(taken | own).values(), *rest])
        setattr(method, "__signature__", signature)  # noqa: B010 - functions have no such field to mypy
        return method

    return shown


def _added(method: Any) -> Iterator[inspect.Parameter]:
    """Keywords of a method, and of those that it is put around."""
    while method is not None:
        parameters = inspect.signature(method, follow_wrapped=False).parameters.values()
        yield from (p for p in parameters if p.kind is p.KEYWORD_ONLY)
        method = getattr(method, "__wrapped__", None)
