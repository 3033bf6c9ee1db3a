"""Targets, sessions, requests and replies. None: the target hides the number."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llamahybrid.harness.conversation import Request
from llamahybrid.harness.report import Sameness
from llamahybrid.harness.workloads.speech import Vocabulary

TOLERANCE = 5e-3
"""Logits of two right runs lie at most so far apart, as a share of their range: batches cut elsewhere round
differently (f32 weights on a CPU 1e-5 to 1e-4, f16 up to 1e-3). On quantized weights they lie further apart;
`reference` and `http` measure how far."""

GPU_TOLERANCE = 2e-2
"""The same where there is a GPU: contexts of the stock library lie up to 6.5e-3 apart (H100, CUDA 13)."""

SECONDS = 600.0
"""Timeout of a request."""

LARGEST_TOLERANCE = 0.06
"""Beyond this a tie cannot be told from a fault."""


@dataclass(frozen=True)
class Reply:
    """An answer, and the work for it as the target reports it."""

    text: str
    seconds: float
    ttft: float | None = None
    prompt: tuple[int, ...] | None = None
    """Its token ids."""
    tokens: tuple[int, ...] | None = None
    """The answer's; the last one was never decoded."""
    total: int | None = None
    """Tokens of the prompt."""
    reported: int | None = None
    """Reused prompt tokens, as the target reports them."""
    worked: int | None = None
    """Decoded prompt tokens, as the target reports them."""
    decoded: int | None = None
    """Prompt and answer, by native counters."""
    reason: str | None = None
    """The target's own reason for reusing no more."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Data for `Session.sameness`."""

    @property
    def reused(self) -> int | None:
        """Prompt tokens that were not decoded, by counters, else by the reported decoded tokens."""
        if self.total is None:
            return None
        if self.decoded is not None and self.tokens:  # a request without an answer was not decoded completely
            return self.total - (self.decoded - (len(self.tokens) - 1))
        return None if self.worked is None else self.total - self.worked

    @property
    def all_decoded(self) -> int | None:
        """Decoded tokens of prompt and answer, by counters, else as reported."""
        if self.decoded is not None or self.worked is None or self.tokens is None:
            return self.decoded
        return self.worked + max(0, len(self.tokens) - 1)

    @property
    def cached(self) -> int | None:
        """Reused tokens as reported, else by counters."""
        return self.reused if self.reported is None else self.reported


@dataclass(frozen=True)
class Shape:
    """Context length and parallel clients that a target is opened for."""

    n_ctx: int
    parallel: int = 1
    """Clients at once."""


@dataclass(frozen=True)
class ModelFile:
    """A model under test and its options."""

    name: str
    path: Path
    options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `Llama`."""
    server: Sequence[str] = ()
    """Arguments of llama-server."""
    chats: bool = True
    """Run workloads of messages, too; several models with one template need them once."""


class Session(ABC):
    """A running target for one workload, with an empty cache (unless it is a URL)."""

    parallel: int = 1
    """Requests at once."""
    takes_tokens: bool = True
    """Takes token ids; otherwise chats alone."""
    takes_chats: bool = False
    """Has a chat template."""
    salts: bool | None = False
    """Claims to keep conversations of different salts apart; None: not reported."""
    vocabulary: Vocabulary | None = None
    nonce: str = ""
    """Part of all prompts, on servers whose cache may hold prompts of an earlier run."""
    pid: int | None = None
    """Its process; None: it is not ours."""

    @abstractmethod
    def ask(self, request: Request) -> Reply:
        """Answer. Raises TargetError."""

    @abstractmethod
    def sameness(self, request: Request, reply: Reply) -> tuple[Sameness, str]:
        """Compare `reply` with an answer to `request` that reuses nothing; describe a difference in words.

        The requests for that change the cache: call it after all measurements.
        """

    @property
    def state_bytes(self) -> int | None:
        """Size of the state of a conversation of `STATE_TOKENS`."""
        return None

    def keep_no_rows(self) -> None:  # noqa: B027 - most targets keep none
        """Keep no logits of later answers for `sameness`: those of a large vocabulary fill memory."""

    def resident(self) -> int | None:
        """Return the resident bytes of the process."""
        return None if self.pid is None else resident(self.pid)

    def decoded(self) -> int | None:
        """Return the tokens of all requests decoded since the last call, by native counters."""
        return None

    def spell(self, tokens: Sequence[int], special: bool = True) -> str | None:
        """Return the text of tokens; `special`: with control tokens."""
        return None


def resident(pid: int) -> int | None:
    """Return the resident bytes of a process; None: unknown on this system."""
    statm = Path(f"/proc/{pid}/statm")
    try:
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, AttributeError, ValueError):
        return None


STATE_TOKENS = 128
"""Tokens of the conversation that `Session.state_bytes` is measured on."""


class Target(ABC):
    """A system under test, on which sessions are opened."""

    needs_model: bool = True
    until: float | None = None
    """When requests are given up, by `time.monotonic`; None: each may take `SECONDS`."""

    def __init__(self, name: str, kind: str) -> None:
        self.name, self.kind = name, kind
        self.versions: dict[str, str] = {}
        """The versions that run, once a session was open."""

    def timeout(self) -> float:
        """Return the seconds that a request may take now."""
        return SECONDS if self.until is None else min(SECONDS, max(0.1, self.until - time.monotonic()))

    @abstractmethod
    def open(self, model: ModelFile | None, shape: Shape) -> AbstractContextManager[Session]:
        """Open a fresh session. Raises TargetError."""

    def close(self, patience: float = 20.0) -> None:  # noqa: B027 - most hold nothing between sessions
        """Free processes and connections; kill a process after `patience` seconds."""
