"""A parser of answers in OpenAI's harmony format: several messages, each in a channel.

`<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.`; a call names its
recipient in the header: `<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from llamahybrid.client.markers import Channels
from llamahybrid.server.answer_parser import Delta, marker_start, tool_call

_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")


class HarmonyParser:
    """Parses one answer."""

    def __init__(self, channels: Channels, tools: bool, think: bool, header: str | None = None) -> None:
        """`tools`: calls become `tool_calls`. `think`: thinking becomes `reasoning_content`.

        `header`: the header of the message that the prompt ends inside; None: the prompt ends before one.

        Otherwise thoughts and calls stay content, with their headers.
        """
        self._channels = channels
        self._tools = tools
        self._think = think
        self._text = ""
        """Text that is not returned yet."""
        self._header = header
        """The header of the message that `_text` belongs to; None: `_text` begins with one."""
        self.calls = 0

    def feed(self, text: str) -> Iterator[Delta]:
        """Add a piece of text; return the deltas that are certain now."""
        self._text += text
        while True:
            if self._header is None:
                header, found, rest = self._text.partition(self._channels.message)
                if not found:
                    return
                self._header, self._text = header, rest
                yield from self._as_text(f"{header}{found}")
            end = self._channels.end
            at = self._text.find(end)
            if at < 0:
                if not self._calls_a_tool:
                    at = marker_start(self._text, end)
                    piece, self._text = self._text[:at], self._text[at:]
                    yield from self._said(piece)
                return
            piece, self._text = self._text[:at], self._text[at + len(end) :]
            yield from self._message(piece)
            yield from self._as_text(end)
            self._header = None

    def end(self) -> Iterator[Delta]:
        """Return the deltas of the rest, at the end of the answer."""
        text, self._text = self._text, ""
        if self._header is not None:
            yield from self._message(text)
        elif text and self._channels.start[0] != text[0] and self._channels.channel[0] != text[0]:
            yield {"content": text}  # an answer without any header

    @property
    def _thinks(self) -> bool:
        header = (self._header or "").rpartition(self._channels.channel)[2].strip()
        return header.split(" ")[0] == self._channels.thought

    @property
    def _calls_a_tool(self) -> bool:
        return self._tools and _RECIPIENT.search(self._header or "") is not None

    def _as_text(self, marker: str) -> Iterator[Delta]:
        """Yield a marker if the thought stays content."""
        if self._thinks and not self._think:
            yield {"content": marker}

    def _message(self, text: str) -> Iterator[Delta]:
        """Yield the deltas of the rest of a message."""
        found = _RECIPIENT.search(self._header or "")
        if found is None or not self._tools:
            yield from self._said(text)
            return
        try:
            called = isinstance(json.loads(text), dict)
        except (ValueError, RecursionError):
            called = False
        if not called:
            yield {"content": f"{self._header}{self._channels.message}{text}"}
            return
        yield {"tool_calls": [tool_call(self.calls, found[1], text.strip())]}
        self.calls += 1

    def _said(self, text: str) -> Iterator[Delta]:
        if text:
            yield {"reasoning_content" if self._thinks and self._think else "content": text}
