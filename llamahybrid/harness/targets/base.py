"""What a target can be asked, and what it tells; whatever it hides is None."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from llamahybrid.harness.conversation import Message, Request
from llamahybrid.harness.report import Sameness, Saving
from llamahybrid.harness.workloads.speech import Vocabulary

TOLERANCE = 5e-3
"""Logits of two right runs lie at most so far apart, as a share of their range: batches cut elsewhere round
differently (f32 weights on a CPU 1e-5 to 1e-4, f16 up to 1e-3). On quantized weights they lie further apart;
`reference` and `http` measure how far."""

LARGEST_TOLERANCE = 0.06
"""Beyond this a tie cannot be told from a fault."""


@dataclass(frozen=True)
class Ask:
    """One request; tokens, messages or a text."""

    max_tokens: int
    tokens: tuple[int, ...] = ()
    messages: tuple[Message, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    text: str = ""
    seed: int | None = None
    """None: greedy; otherwise temperature 1 with this seed."""
    salt: str = ""

    @classmethod
    def of(cls, request: Request) -> Ask:
        """A workload's request."""
        messages, tools = tuple(request.messages), tuple(request.tools)
        return cls(request.max_tokens, tuple(request.tokens), messages, tools, seed=request.seed)

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Ask:
        """What `as_json` gave, after a way through JSON."""
        lists = {name: tuple(data[name]) for name in ("tokens", "messages", "tools")}
        return cls(**{**data, **lists})


@dataclass(frozen=True)
class Reply:
    """What came back, and what the target tells of the work."""

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
    """Tokens of it that were reused, as the target says."""
    worked: int | None = None
    """Tokens of it that were decoded, as the target says beside that."""
    decoded: int | None = None
    """Prompt and answer, by native counters."""
    reason: str | None = None
    """Why it was so, in the target's words."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """For the session's own checks."""

    @property
    def reused(self) -> int | None:
        """Prompt tokens that were not decoded, by counters, or by what the target says was decoded."""
        if self.total is None:
            return None
        if self.decoded is not None and self.tokens:  # without an answer some was left undone
            return self.total - (self.decoded - (len(self.tokens) - 1))
        return None if self.worked is None else self.total - self.worked

    @property
    def cached(self) -> int | None:
        """Reused, as the target reports it; by counters where it reports nothing."""
        return self.reused if self.reported is None else self.reported


@dataclass(frozen=True)
class Shape:
    """How a target is opened for a workload."""

    n_ctx: int
    parallel: int = 1
    """Clients that ask at once."""


@dataclass(frozen=True)
class ModelFile:
    """A model under test, and what it is opened with."""

    name: str
    path: Path
    options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `Llama`."""
    server: Sequence[str] = ()
    """Arguments of llama-server."""
    chats: bool = True
    """Workloads of messages run on it, too; one of several models of one template is enough for those."""


class Session(ABC):
    """A target that runs, for one workload; nothing is in its cache yet, but for a URL's."""

    parallel: int = 1
    """Requests that it takes at once."""
    takes_tokens: bool = True
    """Prompts of token ids; otherwise chats alone."""
    takes_chats: bool = False
    """There is a chat template."""
    salts: bool | None = False
    """Keeps conversations of different salts apart, as it says; None: it does not say."""
    vocabulary: Vocabulary | None = None
    state_bytes: int | None = None
    """Of a conversation of `STATE_TOKENS`, where it is known."""
    nonce: str = ""
    """Goes into what is said, where others (or an earlier run) may have asked the same."""

    @abstractmethod
    def ask(self, ask: Ask) -> Reply:
        """Answer. Raises TargetError."""

    @abstractmethod
    def sameness(self, ask: Ask, reply: Reply) -> tuple[Sameness, str]:
        """How `reply` compares with an answer to `ask` that reuses nothing, and in words where it differs.

        What it asks for that may disturb the cache: call it when all is measured.
        """

    def resident(self) -> int | None:
        """Bytes of memory of the process."""
        return None

    def decoded(self) -> int | None:
        """Tokens decoded since the last call, by native counters, all requests together."""
        return None

    def saving(self, tokens: Sequence[int]) -> Saving | None:
        """What it takes to save and restore the state of `tokens`; None where the target hides it.

        Raises TargetError. Whatever was live is gone afterwards.
        """
        return None

    def spell(self, tokens: Sequence[int], special: bool = True) -> str | None:
        """Their text; `special`: control tokens, too."""
        return None


STATE_TOKENS = 128
"""`Session.state_bytes` is that of so many tokens."""


class Target(ABC):
    """Something that sessions can be opened on."""

    name: str
    kind: str
    needs_model: bool = True
    kept_in: str | None = None
    """A folder in which processes that are started keep conversations, where the target can."""

    @abstractmethod
    def open(self, model: ModelFile | None, shape: Shape) -> AbstractContextManager[Session]:
        """A fresh session. Raises TargetError."""

    @abstractmethod
    def versions(self) -> dict[str, str]:
        """What runs, once a session was open."""

    def close(self, patience: float = 20.0) -> None:  # noqa: B027 - most hold nothing between sessions
        """Free what it holds; kill a process that takes more seconds."""
