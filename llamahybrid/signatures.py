"""Signatures of methods that replace upstream's, with the keywords that they pass on.

Editors show them, and programs that filter arguments by signature read them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

Method = TypeVar("Method", bound=Callable[..., Any])


def as_of(upstream: Callable[..., Any], *ours: Callable[..., Any]) -> Callable[[Method], Method]:
    """Give a method the signature of `upstream`, extended by its own keyword-only arguments.

    `ours`: methods that receive its keywords; their keyword-only arguments are added, too.
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
    """Keyword-only arguments of a method and of the methods that it wraps."""
    while method is not None:
        parameters = inspect.signature(method, follow_wrapped=False).parameters.values()
        yield from (p for p in parameters if p.kind is p.KEYWORD_ONLY)
        method = getattr(method, "__wrapped__", None)
