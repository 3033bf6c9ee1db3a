"""A target whose sessions answer at once, for tests of what is run and in which order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from llamahybrid.errors import TargetError
from llamahybrid.harness.conversation import Request
from llamahybrid.harness.report import Sameness
from llamahybrid.harness.targets.base import ModelFile, Reply, Session, Shape, Target
from llamahybrid.harness.workloads.speech import Vocabulary


class PretendSession(Session):
    """Answers with as many tokens as are asked for; `asked` hears of each request."""

    takes_chats = True
    vocabulary = Vocabulary(tuple(range(16, 1016)), 1, 2)

    def __init__(self, asked: Callable[[Request], object], seconds: float = 0.5) -> None:
        self._asked, self._seconds = asked, seconds

    def ask(self, ask: Request) -> Reply:
        """Answer; half of the time goes to the first token."""
        self._asked(ask)
        tokens, seconds = tuple(range(16, 16 + ask.max_tokens)), self._seconds
        prompt = ask.tokens or tuple(range(len(str(ask.messages)) // 4))
        return Reply("a" * ask.max_tokens, seconds, seconds / 2, prompt, tokens, len(prompt), decoded=1)

    def sameness(self, ask: Request, reply: Reply) -> tuple[Sameness, str]:
        """Every answer is right."""
        return "same", ""

    def spell(self, tokens: Sequence[int], special: bool = True) -> str:
        """A letter a token."""
        return "a" * len(tokens)


class PretendTarget(Target):
    """Fails on models called "bad"."""

    kind = "pretend"

    def __init__(
        self, needs_model: bool = True, asked: Callable[[Request], object] = lambda ask: None
    ) -> None:
        self.name, self.needs_model, self.asked = "pretend", needs_model, asked
        self.opened: list[tuple[str | None, Shape]] = []
        self.closed = 0
        self.takes_tokens = True

    @contextmanager
    def open(self, model: ModelFile | None, shape: Shape) -> Iterator[Session]:
        """A session that answers at once. Raises TargetError."""
        if model is not None and model.name == "bad":
            raise TargetError("it died")
        self.opened.append((model.name if model else None, shape))
        session = PretendSession(self.asked)
        session.takes_tokens = self.takes_tokens
        yield session

    def versions(self) -> dict[str, str]:
        """None."""
        return {}

    def close(self, patience: float = 20.0) -> None:
        """Count it."""
        self.closed += 1
