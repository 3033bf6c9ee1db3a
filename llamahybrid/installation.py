"""`install`: turn every `llama_cpp.Llama` opened from then on into ours, also where a name was bound before.

The class stays the same object; only its `__init__` is replaced, by one that turns the new, empty object into
an instance of ours (which derives from it) and continues there. So every holder of the class makes ours,
`isinstance` and `except` clauses see no difference, and Python's inheritance does the rest: `super()` in our
methods is upstream's methods. For a subclass `Mine` of `llama_cpp.Llama` a class is made in which methods are
looked up in `Mine`, then in ours, then in upstream's: overrides in `Mine` come first, and their `super()` is
ours.

Alternatives that fail:
- Replacing each method of the class by ours: `super()` in ours would find ours again, and existing instances,
  or those of `__new__` alone, would lack our attributes. Only methods that fail on an instance of ours when a
  subclass calls them by name, not by `super()`, are replaced (`_by_name`).
- `__new__`: also called by unpickling and for objects without `__init__`, and too early: a subclass sets
  attributes before it calls `super().__init__`, and our properties would not find their own attributes yet.
- `Mine.__bases__ = (ours,)`: existing instances of `Mine` would get methods, but not their attributes.
"""

from __future__ import annotations

import dis
import functools
import gc
import inspect
import logging
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar
from weakref import WeakKeyDictionary, WeakValueDictionary

import llama_cpp

from llamahybrid.core.assembly import Wish
from llamahybrid.llama import Llama
from llamahybrid.prompt_cache import PromptCache

logger = logging.getLogger("llamahybrid")

STOCK: Any = llama_cpp.Llama
"""The class of llama_cpp that ours derives from."""

_lock = threading.RLock()
_defaults: Mapping[str, Any] | None = None
"""Arguments that complete the program's constructor calls; None: nothing is installed."""
_replaced: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""Each function that was put into upstream's class -> the function that it replaces."""
_adapted: WeakValueDictionary[type, type] = WeakValueDictionary()
"""Class of the program's -> ours that stands for it."""
_OPENING = "_llamahybrid_opening"
_ATTRIBUTES = {
    *("offload", "on_progress", "on_request", "requests", "slots", "stock_logprobs"),
    *("_cache_salt", "_cache_stays", "_calls", "_context_params", "_draft_model", "_explain"),
    *("_made_with", "_model_params", "_prompt_cache", "_shape", "_token_bytes", "_vectors"),
}
"""Attributes of our instances whose names a subclass may use, too."""


class Installed(Llama):
    """Ours, as an instance of a class that was written for `llama_cpp.Llama`.

    `llm.__class__`, the class's name, and the class in a pickle are those of the program's class.
    """

    stands_for: ClassVar[type] = STOCK
    """The class that the program has asked for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        defaults = {name: value for name, value in (_defaults or {}).items() if name not in kwargs}
        options = {**defaults, **kwargs}
        if "n_parallel" in defaults:
            options["n_parallel"] = Wish(defaults["n_parallel"])
        self.__dict__[_OPENING] = True
        try:
            super(Installed, self).__init__(*args, **options)  # noqa: UP008 (the class body has a __class__)
        finally:
            del self.__dict__[_OPENING]

    def __get_class(self) -> type:
        return type(self).stands_for

    __class__ = property(__get_class)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """As of the class that it stands for: a pickle can be read without this package, too."""
        made = super(Installed, self).__reduce_ex__(protocol)  # noqa: UP008
        if not isinstance(made, tuple):
            return made
        function, arguments, *rest = made
        kind = type(self)
        return (function, tuple(kind.stands_for if a is kind else a for a in arguments), *rest)


Installed.__name__ = Installed.__qualname__ = STOCK.__qualname__
Installed.__module__ = STOCK.__module__
Installed.__doc__ = STOCK.__doc__
_adapted[STOCK] = Installed


def install(**defaults: Any) -> list[Any]:
    """Make every `llama_cpp.Llama` opened from now on a `llamahybrid.Llama`; return existing objects.

    Existing objects stay upstream's. Earlier imports, base classes and `isinstance` see the change.
    `defaults`: arguments of the constructor (`prompt_cache`, `n_parallel`, `wait`, `n_ctx`, ...) used if a
    program gives none; a second call replaces them. `n_parallel` becomes 1 if the model or its arguments do
    not allow several. Direct calls of `llamahybrid.Llama` ignore `defaults`.

    A subclass with `llamahybrid_install = False` stays upstream's; so does one that uses names of ours for
    methods or attributes, with a warning. A subclass that calls `Llama.generate(self, ...)` by name gets
    upstream's loop: right answers, reuse of live state only. Forked child processes inherit the change.

    Raises TypeError for a default that no constructor takes, ValueError for an `n_parallel` below 1.
    """
    global _defaults
    _check(defaults)
    with _lock:
        found = _existing()
        _defaults = dict(defaults)
        for name, make in _REPLACEMENTS.items():
            there = vars(STOCK)[name]
            if not _leads_to_ours(there):
                ours = make(there)
                _replaced[ours] = there
                setattr(STOCK, name, ours)
    if found:
        paths = ", ".join(str(vars(llm).get("model_path")) for llm in found)
        logger.warning("install() came after %d Llama objects, which stay stock: %s", len(found), paths)
    return found


def uninstall() -> None:
    """Undo `install` for models opened from now on."""
    global _defaults
    with _lock:
        _defaults = None
        for name in _REPLACEMENTS:
            original = _replaced.get(vars(STOCK)[name])
            if original is not None:  # else another wrapper is around ours, which passes calls through
                setattr(STOCK, name, original)


def _check(defaults: Mapping[str, Any]) -> None:
    known = {
        *inspect.signature(Llama.__init__).parameters,
        *inspect.signature(STOCK.__init__).parameters,
    } - {"self", "model_path", "kwargs"}
    if unknown := sorted(set(defaults) - known):
        raise TypeError(
            f"install() takes arguments of the constructor of Llama, which has no {', '.join(unknown)}"
        )
    cache = defaults.get("prompt_cache")
    if cache is not None and not isinstance(cache, (bool, PromptCache)):
        raise TypeError("install(prompt_cache=...) takes True, False or a PromptCache")
    slots = defaults.get("n_parallel", 1)
    if isinstance(slots, bool) or not isinstance(slots, int) or slots < 1:
        raise ValueError("install(n_parallel=...) counts requests that run at once: 1 or more")


def _existing() -> list[Any]:
    """Instances that are upstream's, and open as far as can be told.

    Of all objects, `gc.get_objects` would hold tuples that other threads are building, which then fails.
    """
    kinds = {kind for kind in _with_subclasses(STOCK) if not issubclass(kind, Llama)}
    found = (o for o in gc.get_referrers(*kinds) if type(o) in kinds)
    return [llm for llm in found if getattr(vars(llm).get("_ctx"), "ctx", None) is not None]


def _with_subclasses(kind: type) -> Iterator[type]:
    yield kind
    nearer: list[type] = kind.__subclasses__()
    for each in nearer:
        yield from _with_subclasses(each)


def _leads_to_ours(function: Any) -> bool:
    """Tell whether a function is one of ours, or wraps one."""
    while function is not None and function not in _replaced:
        function = getattr(function, "__wrapped__", None)
    return function is not None


def _constructor(original: Any) -> Any:
    """Return the `__init__` that opens ours, or upstream's where ours is not wanted."""

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        kind = type(self)
        opening = _OPENING in vars(self)
        if issubclass(kind, Installed) and not opening:  # made anew by name, `Llama.__init__(self, ...)`
            Installed.__init__(self, *args, **kwargs)
        elif opening or _defaults is None or issubclass(kind, Llama) or not _adapt(self):
            original(self, *args, **kwargs)
        else:
            Installed.__init__(self, *args, **kwargs)

    return __init__


def _by_name(name: str, original: Any) -> Any:
    """Return a wrapper of upstream's method that runs our method on our instances.

    Upstream's method would change the context without the record of live tokens.
    """

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self, Llama) and self.requests.loop is not None:
            return getattr(Llama, name)(self, *args, **kwargs)
        return original(self, *args, **kwargs)

    return method


_REPLACEMENTS: Mapping[str, Callable[[Any], Any]] = {
    "__init__": _constructor,
    **{name: functools.partial(_by_name, name) for name in ("eval", "reset")},
}


def _adapt(llm: Any) -> bool:
    """Make an instance one of ours; False if that is impossible or not wanted."""
    kind = type(llm)
    if not getattr(kind, "llamahybrid_install", True):
        return False
    try:
        object.__setattr__(llm, "__class__", _ours(kind))
    except Exception as error:
        logger.warning("%s.%s stays stock: %s", kind.__module__, kind.__qualname__, error)
        return False
    return True


def _ours(kind: type) -> type:
    """The class of ours that stands for a subclass of upstream's; TypeError where there can be none."""
    with _lock:
        made = _adapted.get(kind)
        if made is None:
            theirs = [each for each in kind.__mro__ if each not in STOCK.__mro__]
            taken = {name for each in theirs for name in vars(each)} & _own_names()
            taken |= {name for each in theirs for name in _attributes_set_in(each)} & _own_attributes()
            if taken:
                raise TypeError(
                    f"it defines or sets {', '.join(sorted(taken))}, "
                    "which mean something else in llamahybrid.Llama; "
                    "rename them, or derive from llamahybrid.Llama"
                )

            def fill(namespace: dict[str, Any]) -> None:
                namespace.update(stands_for=kind, __doc__=kind.__doc__)
                namespace.update(__module__=kind.__module__, __qualname__=kind.__qualname__)

            made = types.new_class(kind.__name__, (kind, Installed), exec_body=fill)
            _adapted[kind] = made
        return made


def _attributes_set_in(kind: type) -> Iterator[str]:
    """The names of attributes that the methods of a class set on their object."""
    for value in vars(kind).values():
        parts = (getattr(value, name, None) for name in ("fget", "fset", "func", "__func__"))
        for function in (part for part in (value, *parts) if isinstance(part, types.FunctionType)):
            code = getattr(inspect.unwrap(function), "__code__", None)
            if isinstance(code, types.CodeType) and code.co_argcount:
                yield from _set_by(code, code.co_varnames[0])


def _set_by(code: types.CodeType, owner: str) -> Iterator[str]:
    """The names of attributes that a method sets on `owner`, its first argument."""
    loaded: Any = None
    for each in dis.get_instructions(code):
        if each.opname == "STORE_ATTR" and loaded == owner:
            yield each.argval
        if each.opname not in ("CACHE", "EXTENDED_ARG", "NOP"):
            local = "FAST" in each.opname or "DEREF" in each.opname
            names = each.argval if isinstance(each.argval, tuple) else (each.argval,)  # two at once: 3.13
            loaded = names[-1] if local else None
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _set_by(inner, owner)


@functools.cache
def _own_attributes() -> frozenset[str]:
    """Return our names that upstream's methods do not set, as they set `n_tokens`."""
    return _own_names().difference(_attributes_set_in(STOCK))


@functools.cache
def _own_names() -> frozenset[str]:
    """Return the names that our class and its instances have and upstream's class has not."""
    above = Installed.__mro__[: Installed.__mro__.index(STOCK)]
    ours = {name for each in above for name in vars(each)} | _ATTRIBUTES
    return frozenset(name for name in ours if not hasattr(STOCK, name))
