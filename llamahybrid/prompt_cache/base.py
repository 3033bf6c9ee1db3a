"""The plain data that a prompt cache takes and gives.

Nothing in this package imports llama_cpp or `llamahybrid.memory`: tokens, numbers and bytes only. State comes
sealed in an `envelope`; what is inside is opaque here.
A *checkpoint* is a token position whose exact state can be restored; its *snapshot* is the bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

Tokens: TypeAlias = npt.NDArray[np.int32]
"""Token ids, shape (n,). Negative ids stand for content that was decoded natively (images, audio):
each is unique, so that it never equals anything in a prompt."""

Bytes: TypeAlias = npt.NDArray[np.uint8]

NOTHING: Bytes = np.empty(0, np.uint8)
"""The snapshot of a checkpoint whose attention is all of its state."""
NOTHING.flags.writeable = False

Logits: TypeAlias = npt.NDArray[np.float32]
Outside: TypeAlias = Literal["disk", "remote"]
"""A place outside this process: a folder, or a server that several machines share."""

OUTSIDE: Sequence[Outside] = get_args(Outside)

Source: TypeAlias = Literal["live", "ram", "disk", "remote", "none"]
Range: TypeAlias = tuple[int, int]
"""Tokens [start, end)."""


HERE_ONLY = "?"
"""Ends a namespace of this process alone, whose state is not written to disk."""


@dataclass(frozen=True, eq=False)
class Segment:
    """Stored attention KV of tokens [start, end) of one token path, as sealed bytes (`envelope`)."""

    start: int
    end: int
    record: Bytes
    split: Splitter | None = None
    """Cuts it in parts, and joins it with others; None: it stays as it is."""

    @property
    def nbytes(self) -> int:
        """Size of the record in bytes."""
        return self.record.nbytes

    def part(self, path: Tokens, start: int, end: int) -> Segment | None:
        """The part [start, end), where `path` is the tokens [0, its end); None where none can be cut.

        Raises ValueError when the segment is damaged.
        """
        if (start, end) == (self.start, self.end):
            return self
        return None if self.split is None else next(self.split.parts(self, path[: self.end], [(start, end)]))


class Splitter(Protocol):
    """Cuts and joins segments of one layout; raises ValueError for a damaged one."""

    def parts(self, segment: Segment, path: Tokens, ranges: Iterable[Range]) -> Iterator[Segment]:
        """Yield parts of a segment, which is checked once. `path`: the tokens before its end."""

    def join(self, segments: Sequence[Segment], path: Tokens) -> Segment:
        """Return one segment for adjoining ones. `path`: the tokens before the end of the last one."""


def clipped(ranges: Iterable[Range], end: int, start: int = 0) -> list[Range]:
    """Return the parts of ascending ranges that lie in [start, end)."""
    return [(max(a, start), min(b, end)) for a, b in ranges if a < end and start < b]


class LiveState:
    """Live tokens of one context, which the cache follows so that `forget` reaches them, too."""

    def __init__(self, tokens: Callable[[], Tokens]) -> None:
        """`tokens()`: the ids that are live now, from any thread."""
        self.tokens = tokens
        self.prompt: Tokens = np.empty(0, np.int32)
        """Prompt of the request that runs, or ran last; its tokens may be live soon."""
        self.forgotten = False
        """Tokens that are live, or are being decoded, were forgotten: nothing of them is stored any more."""

    def prompt_end(self, live: Tokens) -> int:
        """Return the length of the prompt if the live tokens begin with it, else 0."""
        n = len(self.prompt)
        return n if np.array_equal(live[:n], self.prompt) else 0

    def forget(self, prefix: Tokens) -> None:
        """Forget a path and all paths that continue it, also one that is being decoded."""
        if any(same_start(path, prefix) for path in (self.prompt, self.tokens())):
            self.forgotten = True
            self.prompt = self.prompt[:0].copy()


def same_start(a: Tokens, b: Tokens) -> bool:
    """Tell whether one token array begins with the other; an empty one begins nothing."""
    n = min(len(a), len(b))
    return n > 0 and np.array_equal(a[:n], b[:n])


@dataclass(frozen=True)
class LiveView:
    """The content of a context now, as far as the cache needs to know."""

    namespace: str
    """Names all that stored state depends on: model, engine, and the parameters that shape the state."""
    tokens: Tokens
    """The live sequence, shape (n,)."""
    cut_floor: int
    """The live memory can be cut to any c in [cut_floor, n] without a snapshot
    (0 for plain attention, n for recurrent memory, in between for a sliding window)."""
    needs_checkpoints: bool
    """False where every cut is possible: then no snapshot is ever planned."""
    needs_attention: bool
    """True where a snapshot leaves out attention KV, so that a checkpoint at c serves only if attention of
    [0, c) is live or stored in segments."""
    tip_logits: bool
    """The context's own logits are those of the last live token."""
    reuse_limit: int | None = None
    """No restore point beyond this position (rows of `logits_all` exist only up to here); None: no limit."""
    split: Splitter | None = None
    """Cuts segments of this context in two; None if it cannot save or load any."""
    state: LiveState | None = None
    """The handle by which the cache follows this context (see `RamStore.follow`)."""
    end_logits: tuple[int, Logits] | None = None
    """Position in `tokens` of the last prompt's end and the logits there, for memory without checkpoints."""
    attention_is_all: bool = False
    """Attention KV is all of the state: every position that live and stored attention reaches is a restore
    point. A checkpoint is then an empty snapshot, which says that attention before it is worth keeping."""

    foreign: bool = False
    """The live sequence may have been computed by something else than the namespace names."""

    @property
    def forgotten(self) -> bool:
        """The live sequence was forgotten."""
        return self.state is not None and self.state.forgotten

    @property
    def storable(self) -> bool:
        """The live sequence may be stored."""
        return not (self.foreign or self.forgotten)


@dataclass(frozen=True)
class Costs:
    """Measured costs of this context on this machine; zeros mean: not measured yet."""

    token_seconds: float = 0.0
    """A token decoded alone."""
    prefill_seconds: float = 0.0
    """A prompt token inside a large batch."""
    snapshot_seconds: float = 0.0
    restore_seconds: float = 0.0
    snapshot_bytes: int = 0
    segment_seconds: float = 0.0
    """Attention KV of one token loaded from a segment."""
    batch_tokens: int = 512
    """Tokens the context takes in one native batch (n_batch)."""
    batch_seconds: float = 0.0
    """A small batch of a prompt, beyond its tokens' share of a large one."""
    waiting: int = 0
    """Other requests that want to decode, too: cuts cost their time as well."""


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A stored restore point; `logits` (shape (n_vocab,)) exist where a prompt ended."""

    namespace: str
    position: int
    snapshot: Bytes
    logits: Logits | None = None


@dataclass(frozen=True, eq=False)
class Loaded:
    """A restore point that was read and checked, in memory."""

    snapshot: Bytes
    logits: Logits | None
    segments: tuple[Segment, ...]
    """Ascending."""


@dataclass(frozen=True)
class Outline:
    """Input of `placement.prefill_cuts`, besides costs."""

    total: int
    cached: int
    matched: int
    boundaries: tuple[int, ...] = ()
    most: int | None = None
    """Cuts whose snapshots there is room for; None: any number."""
    parted: bool = False
    """Known histories part right at `matched`."""
    growing: tuple[int, ...] = ()
    """Places, ascending, in front of a text that earlier prompts had moved back by putting more before it."""
    chance: float = 1.0
    """Chance that a later history parts inside what this prompt has behind `matched`, see `Match.chance`; 1
    where message starts are known."""
    keeps_asking: bool = False
    """Histories keep the tokens that ask for an answer: prompts went on behind them, none parted inside."""


@dataclass(frozen=True)
class Reason:
    """The reason of a plan's restore point; `core.report.sentence` puts it into words."""

    start: Literal["repeated", "extended", "unknown", "known"]
    """The prompt is cached as a whole; it extends the live sequence; none of it is known; it is known up to
    `Plan.matched`."""
    stored_logits: bool = False
    """A repeated prompt samples from stored logits, not from the context's own."""


@dataclass(frozen=True, eq=False)
class Plan:
    """The start of a request. Its checkpoint stays until `release`, or until the plan is collected."""

    total: int
    matched: int
    """Longest common prefix of the prompt with anything known."""
    cached: int
    """Position where decoding starts; tokens before it are not decoded again."""
    source: Source
    checkpoint: Checkpoint | None
    """Snapshot to load at `cached`; None: the live state itself serves, `segments` are all (or nothing does).
    """
    logits: Logits | None
    """Set iff cached == total and the context's own logits are not the prompt's."""
    cuts: tuple[int, ...] = ()
    """Positions in (cached, total), ascending, where the prefill is cut and a checkpoint taken, by the costs
    that were known when it was planned."""
    outline: Outline | None = None
    """Origin of the cuts, by which `placement.recut` chooses those still to come anew."""
    reason: Reason | None = None
    """None where nothing was looked up."""
    differs: tuple[int, int] | None = None
    """The prompt's token at `matched`, and the one that was there before; None where the prompt only adds."""
    stored: bool = False
    """A checkpoint at `cached` is stored already."""
    segments: tuple[Segment, ...] = ()
    """Attention to append behind the first `live_kept` live tokens, in order, before the snapshot."""
    live_kept: int = 0


@dataclass(frozen=True)
class CacheStats:
    """Sizes and counters of a prompt cache."""

    entries: int = 0
    """Checkpoints in RAM."""
    bytes_ram: int = 0
    """Bytes that count toward the budget, those handed out included."""
    hits: int = 0
    """Requests that resumed from something."""
    misses: int = 0
    """Requests decoded from their first token."""
    tokens_saved: int = 0
    """Prompt tokens that were not decoded again."""
    evictions: int = 0
    """Checkpoints evicted."""
    segments: int = 0
    """Pieces of attention in RAM."""
    refused: int = 0
    """Checkpoints and segments that did not fit into the budget."""
    extra: dict[str, int] = field(default_factory=dict)
    """Further counters by name."""
