"""What a run of the harness found, as plain values: per request, per workload, per target.

Written and read as JSON. Whatever a target hides is None, never a guess.
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar, Union, get_args, get_origin, get_type_hints

from llamahybrid.errors import ReportError
from llamahybrid.files import write_json

FORMAT = 2
"""Of the JSON; a reader takes no other."""

Sameness: TypeAlias = Literal["same", "tie", "different", "unknown"]
"""How an answer compares with one that reused nothing; a tie parted where two tokens were as likely."""

Outcome: TypeAlias = Literal["ok", "bad", "cannot tell"]

PROBE = "probe: "
"""In the names of directed probes, which measure nothing."""

_T = TypeVar("_T")


class _Json:
    """Plain data and back, by the fields' types."""

    def as_json(self) -> dict[str, Any]:
        """Plain data for `json.dumps`."""
        plain: dict[str, Any] = dataclasses.asdict(self)  # type: ignore[call-overload]
        return plain

    @classmethod
    def from_json(cls: type[_T], data: object) -> _T:
        """What `as_json` gave. Raises ReportError where `data` is not that."""
        value: _T = _read(cls, data, cls.__name__)
        return value


@dataclass(frozen=True)
class Verdict(_Json):
    """One thing that was looked at."""

    name: str
    """The same in every run: "reuse", "exact", "memory-flat", "hazard:<probe>" and so on."""
    outcome: Outcome
    detail: str


@dataclass(frozen=True)
class RequestFigures(_Json):
    """One request. Tokens are of the prompt, where nothing else is said."""

    workload: str
    chat: str
    """Whose conversation it is, among those of the workload."""
    turn: int
    """Of that chat, from 0."""
    total: int | None
    matched: int | None
    """In common, from the start, with something that the target had decoded before."""
    cached: int | None
    """Reused, as the target reports it."""
    left: int | None
    """total - cached."""
    decoded: int | None
    """Prompt and answer, by the target's own counters."""
    ttft: float | None
    """Seconds to the first token."""
    seconds: float
    answer: Sameness
    text_hash: str
    miss: str | None
    """Why tokens that could have been reused were not; None: none was missed."""


@dataclass(frozen=True)
class WorkloadFigures(_Json):
    """One workload on one target."""

    workload: str
    requests: tuple[RequestFigures, ...]
    least: int | None
    """Tokens that had to be decoded by anyone; of the requests that count."""
    decoded: int | None
    """Tokens that were; of the same requests."""
    ratio: float | None
    """decoded / least."""
    bound: float | None
    """The ratio that this workload should stay below."""
    memory_growth: int | None
    """Bytes a request."""
    verdicts: tuple[Verdict, ...]
    scale: float = 1.0
    """Length of its messages and answers, as a share of the full one; see `harness.plan`."""


@dataclass(frozen=True)
class TargetFigures(_Json):
    """One target."""

    name: str
    """As given on the command line."""
    kind: str
    versions: dict[str, str]
    workloads: tuple[WorkloadFigures, ...]
    hazards: tuple[Verdict, ...]
    error: str | None
    """Why there is no more of it; None: it ran to the end."""


@dataclass(frozen=True)
class Report(_Json):
    """A run."""

    made: str
    """ISO 8601 date and time."""
    machine: dict[str, str]
    models: tuple[str, ...]
    targets: tuple[TargetFigures, ...]
    complete: bool = True
    """False: the run was stopped, and this is what it had found."""
    format: int = FORMAT

    @classmethod
    def from_json(cls, data: object) -> Report:
        """What `as_json` gave. Raises ReportError where `data` is not that, or of another format."""
        found = data.get("format") if isinstance(data, Mapping) else None
        if found != FORMAT:
            raise ReportError(f"format {found!r}: this llamahybrid reads reports of format {FORMAT}")
        report: Report = _read(cls, data, cls.__name__)
        return report

    def write(self, path: Path) -> None:
        """Write it as JSON, without the user's home folder in it."""
        write_json(path, self.as_json())

    @classmethod
    def read(cls, path: Path) -> Report:
        """Read what `write` wrote. Raises ReportError where the file is not that, OSError without one."""
        try:
            return cls.from_json(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, OverflowError, RecursionError) as error:
            raise ReportError(f"{path}: {error}") from error


def whose(chat: str) -> str:
    """Name of a chat; a number alone becomes "chat NUMBER"."""
    return f"chat {chat}" if chat.replace("/", "").isdigit() else chat


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _read(kind: Any, data: object, where: str) -> Any:
    """`data` as a `kind`: dataclasses, tuples of one type, str to str, unions, literals and plain values."""
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        if data is None:
            return None
        return _read(next(one for one in get_args(kind) if one is not type(None)), data, where)
    if origin is Literal:
        if data in get_args(kind):
            return data
    elif origin is tuple:
        if isinstance(data, (list, tuple)):
            return tuple(_read(get_args(kind)[0], each, f"{where}[{i}]") for i, each in enumerate(data))
    elif origin is dict:
        if isinstance(data, Mapping) and all(isinstance(each, str) for pair in data.items() for each in pair):
            return dict(data)
    elif isinstance(kind, type) and dataclasses.is_dataclass(kind):
        hints = _hints(kind)
        if isinstance(data, Mapping) and set(data) == set(hints):
            return kind(**{name: _read(hint, data[name], f"{where}.{name}") for name, hint in hints.items()})
        if isinstance(data, Mapping):
            odd = sorted(set(map(str, data)) ^ set(hints))
            raise ReportError(f"{where}: missing or unknown: {', '.join(odd)}")
    elif kind is float:
        if isinstance(data, (int, float)) and not isinstance(data, bool) and math.isfinite(data):
            return float(data)
    elif type(data) is kind:
        return data
    raise ReportError(f"{where}: {str(data)[:40]!r} is not what stands there in a report")
