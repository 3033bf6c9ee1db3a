"""PromptBar: progress and remaining time of a long prompt, until its answer begins."""

from __future__ import annotations

from contextlib import AbstractContextManager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from llamahybrid.core.report import PromptProgress

LONG_TOKENS = 256
"""Prompts with at most this many tokens to decode are too short for a bar."""


class PromptBar(AbstractContextManager["PromptBar"]):
    """A bar that disappears when the prompt is decoded; invisible without a terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: Progress | None = None

    def __exit__(self, *_: object) -> None:
        self.end()

    def show(self, progress: PromptProgress) -> None:
        """Update the bar."""
        if not self._console.is_terminal:
            return
        bar = self._bar
        if bar is None:
            if progress.total - progress.processed <= LONG_TOKENS:
                return
            columns = (TextColumn("prompt"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            bar = self._bar = Progress(*columns, console=self._console, transient=True, auto_refresh=False)
            self._task = bar.add_task("", total=progress.total, completed=progress.cached)
            bar.start()
        bar.update(self._task, completed=progress.processed, refresh=True)
        if progress.processed >= progress.total:
            self.end()

    def end(self) -> None:
        """Remove the bar."""
        bar, self._bar = self._bar, None
        if bar is not None:
            bar.stop()
