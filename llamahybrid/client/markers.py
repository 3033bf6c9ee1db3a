"""Markers: how a model writes calls of tools and its thinking."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from llamahybrid.client.thought import ThoughtMarkers

CONTROL = re.compile(r"<\|[^<>|]+\|>|\[[A-Z_]+\]")
"""A control token, as templates spell them."""

PROBED_ID = "probe1234"
"""The id of a call that a template is probed with. Mistral's take nine letters and digits, and no other."""


@dataclass(frozen=True)
class CallMarkers:
    """Markers of a call."""

    form: Literal["object", "named", "tagged"]
    """`{"name": N, "arguments": {...}}`; a name and the object of its arguments; or each argument in tags."""
    begin: str
    """Text before the JSON, or before the name; may be empty where the form is an object."""
    end: str
    """Text behind a call; empty: the end of the answer, or the next call."""
    after_name: str = ""
    before_key: str = ""
    after_key: str = ""
    after_value: str = ""

    @property
    def opens(self) -> str:
        """The text that begins calls; "" if a call has no marker and is all of an answer."""
        control = CONTROL.match(self.begin)
        return control[0] if control else next(iter(self.begin.splitlines()), "")

    @property
    def closes(self) -> str:
        """The text that ends calls; "" if the end of the answer does."""
        control = list(CONTROL.finditer(self.end))
        if control and control[-1].end() == len(self.end):
            return control[-1][0]
        return self.end.splitlines()[-1] if self.end else ""

    @property
    def named(self) -> re.Pattern[str]:
        """Text between a name and its arguments, where ids and numbers of calls may stand."""
        text = re.escape(self.after_name.strip()).replace(PROBED_ID, r"[^<>\[\]{}\s]*")
        return re.compile(re.sub(r"\\?:0", r":\\d+", text, count=1) if self.after_name[:2] == ":0" else text)


@dataclass(frozen=True)
class Channels:
    """Markers of answers of several messages, each to a channel: OpenAI's harmony format."""

    start: str
    """Text before the header of each message but the first."""
    channel: str
    message: str
    """Text between a header and what is said."""
    end: str
    thought: str
    """The channel of thinking."""


@dataclass(frozen=True)
class Markers:
    """Markers of a model's answers."""

    call: CallMarkers | None = None
    """None: calls stay content."""
    think: ThoughtMarkers | None = None
    """None: thinking stays content."""
    mapping: bool = False
    """The template takes the arguments of a call as a mapping, and no text."""
    channels: Channels | None = None
    """None: an answer is one message."""
    taken: Literal["reasoning_content", "thinking", "parts"] = "reasoning_content"
    """The place of an earlier answer's thought in the messages that the template reads."""
    control: frozenset[int] = field(default_factory=frozenset)
    """Control tokens that markers are made of, which are spelt in an answer that is read."""
