"""PromptBar: how far a long prompt is, and the time that is left, while nothing of its answer is there."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from llamahybrid.core.report import PromptProgress

LONG_TOKENS = 256
"""A prompt of which no more is left is decoded before a bar could be read."""


class PromptBar:
    """A bar in the terminal, gone when the prompt is decoded; nothing where there is no terminal."""

    def __init__(self, console: Console) -> None:
        columns = (TextColumn("prompt"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._shows = console.is_terminal
        self._bar = Progress(*columns, console=console, transient=True, auto_refresh=False)
        self._began = False

    def __enter__(self) -> PromptBar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def show(self, progress: PromptProgress) -> None:
        """The prompt is that far."""
        if not self._shows:
            return
        if not self._began:
            if progress.total - progress.processed <= LONG_TOKENS:
                return
            self._began = True
            self._bar.start()
            self._task = self._bar.add_task("", total=progress.total, completed=progress.cached)
        self._bar.update(self._task, completed=progress.processed, refresh=True)
        if progress.processed >= progress.total:
            self.end()

    def end(self) -> None:
        """Take the bar away."""
        if self._began:
            self._began = False
            self._bar.stop()
