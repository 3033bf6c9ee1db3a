"""Defaults for a program that cannot be edited, by `configure` or by the environment.

`LLAMAHYBRID_RAM` and `LLAMAHYBRID_DISK` are sizes ("2GiB", "0": none), the disk's also a folder;
`LLAMAHYBRID_PARALLEL` is a number of requests, `LLAMAHYBRID_STOCK_LOGPROBS` "on" or "off". Precedence: an
argument of the constructor, arguments of `install`, `configure`, the environment, the default.
"""

from __future__ import annotations

import math
import os
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import EllipsisType
from typing import TYPE_CHECKING, Any

from llamahybrid.errors import ConfigurationError

if TYPE_CHECKING:
    from llamahybrid.prompt_cache import PromptCache

_UNITS = {"": 1, "b": 1} | {
    prefix + unit: base**power
    for power, prefix in enumerate("kmgt", start=1)
    for unit, base in (("ib", 1024), ("", 1024), ("b", 1000))
}
_SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]*)?|\.[0-9]+)\s*([a-z]*)")
_LEAST = 1 << 20
"""Smaller sizes are refused: the unit is probably missing."""
_OFF = ("off", "none", "no", "false")
_ON = ("on", "yes", "true")


@dataclass(frozen=True)
class Disk:
    """The folder that keeps conversations for later processes."""

    folder: Path
    n_bytes: int | None = None
    """The budget; None: a quarter of the free space, at most 32 GiB."""


@dataclass(frozen=True)
class Configuration:
    """Settings; None: not set."""

    ram: int | None = None
    """Bytes of the prompt cache that all `Llama` objects without one of their own share; 0: no cache."""
    disk: Disk | bool | None = None
    """The prompt cache's folder; False: no disk."""
    parallel: int | None = None
    """Requests that may run at once on each `Llama`."""
    stock_logprobs: bool | None = None
    """Log-probabilities with `echo` are those of llama-cpp-python."""


_lock = threading.Lock()
_configured = Configuration()
_shared: tuple[Configuration, PromptCache] | None = None


def configure(
    *,
    ram: int | str | EllipsisType | None = ...,
    disk: int | str | os.PathLike[str] | bool | EllipsisType | None = ...,
    parallel: int | str | EllipsisType | None = ...,
    stock_logprobs: bool | EllipsisType | None = ...,
) -> Configuration:
    """Set defaults for every `Llama` opened from now on; return the settings in effect.

    `ram`: bytes of one prompt cache for the process, as a number or as "2GiB" (KiB and K are 1024 bytes, kB
    1000); 0 or "off": no prompt cache.
    `disk`: a folder, "~/chats"; with a budget, "~/chats:20GiB"; a size alone or True: the folder `prompts`
    in the cache folder (`LLAMAHYBRID_CACHE_DIR`); 0, False or "off": no disk.
    `parallel`: slots of a `Llama`; reduced to one, with a warning, if the model or its arguments do not allow
    several, or if the program gives a draft model.
    `stock_logprobs`: see `Llama`.

    An argument that is left out stays; None removes the setting, so that the environment counts again
    (`LLAMAHYBRID_RAM`, `LLAMAHYBRID_DISK`, `LLAMAHYBRID_PARALLEL`, `LLAMAHYBRID_STOCK_LOGPROBS`).

    Raises ConfigurationError, with nothing changed, for a value that cannot be read.
    """
    global _configured
    given = {"ram": ram, "disk": disk, "parallel": parallel, "stock_logprobs": stock_logprobs}
    changes = {
        name: None if value is None else _parsed(name, value, f"configure({name}={value!r})")
        for name, value in given.items()
        if not isinstance(value, EllipsisType)
    }
    with _lock:
        wanted = replace(_configured, **changes)
        found = _over_environment(wanted)
        _configured = wanted
    return found


def current() -> Configuration:
    """Return the settings in effect: of `configure`, else of the environment.

    Raises:
        ConfigurationError: a value in the environment is invalid.
    """
    return _over_environment(_configured)


def own_cache() -> PromptCache | bool:
    """Return a prompt cache of the configured size and folder for one `Llama` alone; False: no cache.

    Raises:
        ConfigurationError: see `current`.
    """
    wanted = current()
    return wanted.ram != 0 and _made(wanted)


def _made(wanted: Configuration) -> PromptCache:
    from llamahybrid.prompt_cache import PromptCache  # imports numpy

    place = wanted.disk if isinstance(wanted.disk, Disk) else None
    folder, n_bytes = (None, None) if place is None else (place.folder, place.n_bytes)
    return PromptCache(wanted.ram, folder, n_bytes)


def _shared_cache(wanted: Configuration) -> PromptCache:
    """Return the process's prompt cache of these settings, made anew when they have changed."""
    global _shared
    wanted = replace(wanted, parallel=None, stock_logprobs=None)
    with _lock:
        if _shared is None or _shared[0] != wanted:
            _shared = (wanted, _made(wanted))
        return _shared[1]


def is_shared(cache: PromptCache | None) -> bool:
    """Return whether a prompt cache is the process's, which outlives each model."""
    return cache is not None and _shared is not None and _shared[1] is cache


def cache_for(given: bool | PromptCache | None, reusing: bool = True) -> PromptCache | None:
    """Return the prompt cache of a `Llama` for its argument `given`; None: no cache.

    `reusing`: False for a model opened for its vocabulary or for embeddings alone.

    Raises:
        TypeError: given was something else, a folder, say.
        ConfigurationError: see `current`.
    """
    from llamahybrid.prompt_cache import PromptCache

    if not (given is None or isinstance(given, (bool, PromptCache))):
        raise TypeError(f"prompt_cache={given!r}: give True, False or a PromptCache, which can have a folder")
    if given is False or not reusing:
        return None
    if isinstance(given, PromptCache):
        return given
    wanted = current()
    if wanted.ram == 0:
        return PromptCache() if given else None
    if wanted.ram is None and not isinstance(wanted.disk, Disk):
        return PromptCache()
    return _shared_cache(wanted)


def wait_timeout(given: bool | float | None) -> bool | float:
    """Validate `wait` of a `Llama`: True: no limit, False: do not wait, else seconds; None: the default.

    Raises:
        TypeError: not a number.
        ValueError: negative, or not a number (NaN).
    """
    if given is None or isinstance(given, bool):
        return given is not False
    if not isinstance(given, (int, float)):
        raise TypeError(f"wait={given!r}: give True, False, or seconds")
    if not given >= 0:
        raise ValueError(f"wait={given!r}: give True, False, or seconds from 0 on")
    return given if given < threading.TIMEOUT_MAX else True


def default_folder() -> Path:
    """The folder for conversations in the user's cache folder, or in that of `LLAMAHYBRID_CACHE_DIR`.

    Raises:
        EngineError: there is no home folder.
    """
    from llamahybrid.engine.sdist import cache_dir

    return cache_dir() / "prompts"


def _over_environment(configured: Configuration) -> Configuration:
    for name in _PARSERS:
        variable = f"LLAMAHYBRID_{name.upper()}"
        text = os.environ.get(variable, "").strip()
        if text and getattr(configured, name) is None:
            configured = replace(configured, **{name: _parsed(name, text, f"{variable}={text}")})
    return configured


def _parsed(name: str, value: object, said: str) -> Any:
    """Return the value of a setting. Raises ConfigurationError, which begins with `said`."""
    try:
        return _PARSERS[name](value)
    except (ValueError, RuntimeError) as error:  # the latter where there is no home folder
        raise ConfigurationError(f"{said}: {error}") from error


def _size(value: object) -> int:
    """Bytes."""
    found = None
    if isinstance(value, str):
        found = 0 if value.strip().lower() in _OFF else _bytes(value)
    elif isinstance(value, int):
        found = 0 if value is False else value
    if found is None or value is True or found < 0:
        raise ValueError('that is no size; give one like "2GiB", or 0 for none')
    if 0 < found < _LEAST:
        raise ValueError(f'that is {found} bytes; give a unit, as in "2GiB"')
    return found


def _bytes(text: str) -> int | None:
    """Parse a size like "2GiB"; None: not a size."""
    match = _SIZE.fullmatch(text.strip().lower())
    if match is None or match[2] not in _UNITS:
        return None
    unit: int = _UNITS[match[2]]
    return math.ceil(float(match[1]) * unit)  # "0.5" counts as one byte, not as "none"


def _disk(value: object) -> Disk | bool:
    """False: nothing on disk."""
    word = value.strip().lower() if isinstance(value, str) else value
    if word is False or word in _OFF:
        return False
    if word is True or word in _ON:
        return Disk(default_folder())
    if isinstance(value, str) and _bytes(value) is None:
        return _folder(value.strip())
    if isinstance(value, (str, int)):
        n_bytes = _size(value)
        return Disk(default_folder(), n_bytes) if n_bytes else False
    if isinstance(value, os.PathLike):
        return Disk(Path(value).expanduser().absolute())
    raise ValueError('give a folder, a size like "20GiB", or 0 for none')


def _folder(text: str) -> Disk:
    """Parse a folder, with an optional budget after a colon."""
    path, colon, size = text.rpartition(":")
    budget = None
    if colon and _bytes(size) is not None:
        text, budget = path, _size(size)
    if not text.startswith(("~", ".")) and not any(mark in text for mark in (os.sep, os.altsep) if mark):
        raise ValueError(
            f'that is neither a size like "20GiB" nor a folder; a folder here is written "./{text}"'
        )
    if budget == 0:
        raise ValueError("a folder for nothing; leave out its size, or give 0 alone")
    return Disk(Path(text).expanduser().absolute(), budget)


def _number(value: object) -> int:
    text = value.strip() if isinstance(value, str) else "" if isinstance(value, bool) else str(value)
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and int(text)):
        raise ValueError("give how many requests may run at once on a model, 1 or more")
    return int(text)


def _switch(value: object) -> bool:
    word = {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value).strip().lower()
    if word not in (*_ON, *_OFF, "0", "1"):
        raise ValueError('give "on" or "off"')
    return word in (*_ON, "1")


_PARSERS: dict[str, Callable[[object], Any]] = {
    "ram": _size,
    "disk": _disk,
    "parallel": _number,
    "stock_logprobs": _switch,
}
"""For each setting, a function of the value."""


def _forked() -> None:
    """Replace the lock in a forked child, where the thread that held it does not exist."""
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
