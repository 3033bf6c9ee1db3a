"""Write docs/reference/api.md, the public names, from their docstrings: `python docs/api_page.py`.

By `inspect` alone: what is public here is part of a class whose other half is upstream's, and a generator of
pages would have to be told of every name of that half. Markdown is read where the code is.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import llamahybrid

# isort: split
import llama_cpp

from llamahybrid import errors
from llamahybrid.client.handle import RequestHandle
from llamahybrid.core.report import PromptProgress, RequestReport
from llamahybrid.prompt_cache import CacheStats

PAGE = Path(__file__).parent / "reference" / "api.md"

DIAGNOSTICS = {"last", "plan_seconds", "restore_seconds", "unreached"}
"""Fields of reports for the package itself and its tests."""

HANDED_OUT = (RequestReport, PromptProgress, RequestHandle, CacheStats)
"""Classes that users get and do not make."""

FOR_USERS = {
    llamahybrid.PromptCache: ("ram_bytes", "pin", "unpin", "forget", "clear", "flush", "close", "stats"),
    RequestHandle: ("cancel", "reports"),
    llamahybrid.ModelDraft: (),
}
"""Members of a class for its users; the others are for the models that use the class."""

SEAMS = {"drafts", "embeds", "evaluation", "requests", "runner"}
"""Members of `Llama` for the package itself and its tests."""

AS_UPSTREAM = {"__call__", "cache", "context_params", "detokenize", "draft_model", "input_ids"}
AS_UPSTREAM |= {"model_params", "n_ctx", "n_tokens", "reset", "sample", "scores"}
"""Members of `Llama` that upstream's documentation describes."""

INTERNAL_ERRORS = {"FolderRefused", "RecordError", "RecordGone"}
INTERNAL_ERRORS |= {"ReportError", "TargetError", "UnknownArchitecture"}
"""Errors that end as a miss, a warning, or a message of the command line."""

HEAD = """\
# The public names

Made from the docstrings by `python docs/api_page.py`. Other names may change with any version.
"""

_NAMED = re.compile(r"^(?=`\w+`: )", re.MULTILINE)


def public(kind: Callable[[object], bool]) -> list[Any]:
    """Every function or class that is exported, by name."""
    return [thing for name in llamahybrid.__all__ if kind(thing := getattr(llamahybrid, name))]


def failures() -> list[type]:
    """Every error that a user may meet."""
    ours = [c for c in vars(errors).values() if inspect.isclass(c) and c.__module__ == errors.__name__]
    return [c for c in ours if c.__name__ not in INTERNAL_ERRORS]


def members(owner: type) -> dict[str, Any]:
    """Public methods and properties that our own code defines on a class, by name.

    Not those of upstream that it only wraps (`held`).
    """
    ours = [c for c in reversed(owner.__mro__) if c.__module__.startswith("llamahybrid.")]
    found = {name: thing for c in ours for name, thing in vars(c).items()}
    return {
        name: thing
        for name, thing in found.items()
        if (not name.startswith("_") or name == "__call__")
        and not (getattr(thing, "__module__", None) or "").startswith("llama_cpp.")
        and (inspect.isroutine(thing) or is_property(thing))
    }


def described_fields(owner: type) -> dict[str, str]:
    """Annotated attributes of our classes, each with the docstring that stands below it, or ""."""
    found: dict[str, str] = {}
    for c in reversed(owner.__mro__):
        if not c.__module__.startswith("llamahybrid."):
            continue
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(c))).body
        assert isinstance(tree, ast.ClassDef)
        for node, after in zip(tree.body, [*tree.body[1:], None], strict=True):
            match node, after:
                case ast.AnnAssign(ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                    found[name] = " ".join(text.split())
                case ast.AnnAssign(ast.Name(name)), _:
                    found[name] = ""
    return found


def page() -> str:
    """The whole page, as Markdown."""
    parts = [HEAD]
    for owner in [*(c for c in public(inspect.isclass) if not issubclass(c, Exception)), *HANDED_OUT]:
        parts.append(f"## {owner.__name__}\n")
        if owner not in HANDED_OUT:
            parts.append(f"```python\n{_call(owner.__name__, owner)}\n```\n")
        parts.append(markdown(inspect.getdoc(owner) or ""))
        if owner not in HANDED_OUT and (text := vars(owner)["__init__"].__doc__):
            parts.append(markdown(inspect.cleandoc(text)))
        parts += _fields(owner)
        parts += _members(owner)
    for function in public(inspect.isfunction):
        parts.append(f"## {function.__name__}\n\n```python\n{_call(function.__name__, function)}\n```\n")
        parts.append(markdown(inspect.getdoc(function) or ""))
    parts.append("## Errors\n\nAll of them are in `llamahybrid.errors`.\n")
    for owner in failures():
        others = [f"`{base.__name__}`" for base in owner.__bases__ if base is not errors.LlamaHybridError]
        also = f" (also {', '.join(others)})" if others else ""
        parts.append(f"**{owner.__name__}**{also}: {markdown(inspect.getdoc(owner) or '')}")
    return "\n".join(parts)


def markdown(text: str) -> str:
    """A docstring as Markdown: lines that explain one name become a list, examples a code block."""
    blocks = []
    for block in text.split("\n\n"):
        if block.lstrip().startswith(">>>"):
            blocks.append(f"```python\n{block}\n```")
        else:
            if _NAMED.match(block):
                block = re.sub(r"(?<=[.;)])\s+(?=`\w+`: )", "\n", block)
            blocks.append(_NAMED.sub("- ", block))
    return "\n\n".join(blocks) + "\n"


def _members(owner: type) -> Iterator[str]:
    """Yield a section for each member; those that upstream's class has, too, come last."""
    chosen = members(owner)
    chosen = {name: chosen[name] for name in FOR_USERS.get(owner, chosen)}
    if owner is llamahybrid.Llama:
        chosen = {name: member for name, member in chosen.items() if name not in SEAMS | AS_UPSTREAM}
    theirs = [c for c in owner.__mro__ if c.__module__.startswith("llama_cpp.llama")]
    also = {name for name in chosen if any(name in vars(c) for c in theirs)}
    for group in (chosen.keys() - also, also):
        if group is also and also:
            yield f"Of `llama_cpp.{theirs[0].__name__}`, with what is different here:\n"
        for name in (name for name in chosen if name in group):
            title = f"`{name}`" if is_property(chosen[name]) else f"`{_call(name, chosen[name])}`"
            yield f"### {title}\n\n{markdown(inspect.getdoc(chosen[name]) or '')}"


def _fields(owner: type) -> list[str]:
    """The fields of a dataclass as a list."""
    if not is_dataclass(owner):
        return []
    texts = described_fields(owner)
    shown = [f.name for f in fields(owner) if f.name not in DIAGNOSTICS]
    return ["\n".join(f"- `{name}`: {texts[name]}" for name in shown) + "\n"]


def _call(name: str, thing: Any) -> str:
    """A signature without what only type checkers read."""
    signature = inspect.signature(thing)
    function = thing.__init__ if inspect.isclass(thing) else thing
    shown = [
        p.replace(annotation=inspect.Parameter.empty)
        for p in (_short(function) if hasattr(function, "__signature__") else signature.parameters.values())
        if p.name != "self"
    ]
    signature = signature.replace(parameters=shown, return_annotation=inspect.Signature.empty)
    return f"{name}{signature}".replace("=Ellipsis", "=...")


def _short(method: Any) -> list[inspect.Parameter]:
    """Parameters of a method of `Llama`; those of upstream's that may be left out are `args` and `kwargs`."""
    made = inspect.Parameter
    theirs = inspect.signature(getattr(llama_cpp.Llama, method.__name__)).parameters.values()
    required = [p for p in theirs if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    left_out = any(p.kind is p.POSITIONAL_OR_KEYWORD for p in theirs if p not in required)
    known = {p.name for p in theirs}
    return [
        *required,
        *([made("args", made.VAR_POSITIONAL)] if left_out else []),
        *(p for p in inspect.signature(method).parameters.values() if p.name not in known),
        made("kwargs", made.VAR_KEYWORD),
    ]


def is_property(thing: object) -> bool:
    """A member that is read without a call."""
    return isinstance(thing, property | cached_property)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
