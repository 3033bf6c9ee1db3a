"""PromptBar: progress and remaining time of a long prompt, until its answer begins."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from llamahybrid.core.report import PromptProgress

LONG_TOKENS = 256
"""Prompts with at most this many tokens to decode are too short for a bar."""


class PromptBar:
    """A bar that disappears when the prompt is decoded; invisible without a terminal."""

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
        """Update the bar."""
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
        """Remove the bar."""
        if self._began:
            self._began = False
            self._bar.stop()
