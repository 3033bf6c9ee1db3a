"""Results of the harness as plain values: requests, workloads, targets and the report, in JSON and back.

A number that the target hides is None, never a guess.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias

from llamahybrid.errors import ReportError
from llamahybrid.files import write_json

FORMAT = 5
"""Of the JSON; a reader takes no other."""

Sameness: TypeAlias = Literal["same", "tie", "different", "unknown", "not compared"]
"""Comparison of an answer with one that reused nothing; a tie parted where two tokens were as likely."""

Outcome: TypeAlias = Literal["ok", "bad", "cannot tell"]

PROBE = "probe: "
"""In the names of directed probes, which measure nothing."""

HAZARD = "hazard:"
"""Prefix of the names of verdicts on native hazards."""

NOT_RUN = "it did not run: "
"""Prefix of the detail of a workload that did not run."""

_STRICT: dict[str, Any] = {"extra": "forbid", "strict": True, "allow_inf_nan": False}


@dataclass(frozen=True)
class Verdict:
    """The verdict on one property of a target."""

    __pydantic_config__: ClassVar = _STRICT
    name: str
    """The same in every run: "reuse", "exact", "memory-flat", "hazard:<probe>" and so on."""
    outcome: Outcome
    detail: str


def overall(found: Iterable[Verdict]) -> Outcome:
    """Return bad if one verdict is; ok if none is and one is ok."""
    outcomes = {verdict.outcome for verdict in found}
    return "bad" if "bad" in outcomes else "ok" if "ok" in outcomes else "cannot tell"


@dataclass(frozen=True)
class RequestFigures:
    """A request. Token counts are of the prompt unless stated otherwise."""

    __pydantic_config__: ClassVar = _STRICT
    workload: str
    chat: str
    """Name of the conversation within the workload."""
    turn: int
    """Of that chat, from 0."""
    total: int | None
    matched: int | None
    """Longest prefix in common with anything that the target had decoded before."""
    cached: int | None
    """Reused, as the target reports it."""
    decoded: int | None
    """Prompt and answer, by the target's own counters."""
    ttft: float | None
    """Seconds to the first token."""
    seconds: float
    answer: Sameness
    text_hash: str
    miss: str | None
    """The reason why known tokens were not reused; None: all were."""


@dataclass(frozen=True)
class Times:
    """Times and memory of a workload; of `llamahybrid bench` over its rounds."""

    __pydantic_config__: ClassVar = _STRICT
    ttft: float | None = None
    """Seconds to the first token, median over the counted requests, and over rounds."""
    tokens_per_second: float | None = None
    """Answers' tokens of all clients over wall time, median over rounds."""
    resident: int | None = None
    """Growth of the process in bytes a conversation, largest round."""


@dataclass(frozen=True)
class WorkloadFigures:
    """A workload on one target."""

    __pydantic_config__: ClassVar = _STRICT
    workload: str
    requests: tuple[RequestFigures, ...] = ()
    least: int | None = None
    """Least tokens that the counted requests could decode."""
    decoded: int | None = None
    """Tokens that the same requests decoded."""
    ratio: float | None = None
    """decoded / least."""
    bound: float | None = None
    """The largest ratio that is ok."""
    verdicts: tuple[Verdict, ...] = ()
    scale: float = 1.0
    """Length of messages and answers, as a share of the full one; see `harness.plan`."""
    times: Times | None = None

    @property
    def ran(self) -> bool:
        """False: it did not run, for the reason in its verdict."""
        return not any(verdict.name == "runs" for verdict in self.verdicts)

    @property
    def outcome(self) -> Outcome:
        """Of all verdicts."""
        return overall(self.verdicts)


@dataclass(frozen=True)
class TargetFigures:
    """A target."""

    __pydantic_config__: ClassVar = _STRICT
    name: str
    """As given on the command line."""
    kind: str
    versions: dict[str, str]
    workloads: tuple[WorkloadFigures, ...] = ()
    hazards: tuple[Verdict, ...] = ()
    error: str | None = None
    """The reason why the target did not run to its end."""

    @property
    def verdicts(self) -> list[Verdict]:
        """All verdicts: workload by workload, then hazards."""
        return [*(verdict for w in self.workloads for verdict in w.verdicts), *self.hazards]

    @property
    def outcome(self) -> Outcome:
        """Of all verdicts; bad if the target did not run to its end."""
        return "bad" if self.error is not None else overall(self.verdicts)


@dataclass(frozen=True)
class Report:
    """The results of a run."""

    __pydantic_config__: ClassVar = _STRICT
    made: str
    """ISO 8601 date and time."""
    machine: dict[str, str]
    """Machine and settings that the figures depend on."""
    models: tuple[str, ...]
    targets: tuple[TargetFigures, ...]
    complete: bool = True
    """False: the run was stopped before its end."""
    format: int = FORMAT

    @classmethod
    def now(
        cls,
        targets: Iterable[TargetFigures],
        models: Iterable[str] = (),
        complete: bool = True,
        settings: Mapping[str, str] | None = None,
    ) -> Report:
        """Return a report of this moment and this machine."""
        made = datetime.now(timezone.utc).isoformat(timespec="seconds")
        return cls(made, {**machine(), **(settings or {})}, tuple(models), tuple(targets), complete)

    def as_json(self) -> dict[str, Any]:
        """Return plain data for `json.dumps`."""
        return dataclasses.asdict(self)

    def write(self, path: Path) -> None:
        """Write the report as JSON, without the user's home folder in it."""
        write_json(path, self.as_json())

    @classmethod
    def parse(cls, text: str) -> Report:
        """Return the report in a JSON text. Raises ReportError."""
        import pydantic

        try:
            data = json.loads(text)
            found = data.get("format") if isinstance(data, dict) else None
            if found != FORMAT or isinstance(found, bool):
                raise ReportError(f"format {found!r}: this llamahybrid reads reports of format {FORMAT}")
            return pydantic.TypeAdapter(cls).validate_json(text)
        except pydantic.ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise ReportError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
        except (ValueError, OverflowError, RecursionError) as error:
            raise ReportError(str(error)) from error

    @classmethod
    def read(cls, path: Path) -> Report:
        """Read a JSON report. Raises ReportError for another file, OSError."""
        try:
            return cls.parse(path.read_text(encoding="utf-8"))
        except (ReportError, UnicodeDecodeError) as error:
            raise ReportError(f"{path}: {error}") from error


def machine() -> dict[str, str]:
    """Return the machine that figures depend on."""
    return {
        "system": platform.system(),
        "processor": platform.machine(),
        "cores": str(os.cpu_count()),
        "python": platform.python_version(),
    }


def place(request: Any) -> str:
    """Return `chat` and `turn` of a request in words; turns count from 1 there."""
    numbered = request.chat.replace("/", "").isdigit()
    return f"{'chat ' if numbered else ''}{request.chat}, turn {request.turn + 1}"
