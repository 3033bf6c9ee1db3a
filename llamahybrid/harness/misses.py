"""Reasons why known tokens were not reused: a sentence for each request.

There are two kinds: a target did not reuse tokens that it had decoded (`lost`), or a client changed an
earlier part, so that equal text behind the change has to be decoded again (`shifted`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llamahybrid.harness.conversation import Request
from llamahybrid.harness.oracle import common_prefix
from llamahybrid.harness.runner import RequestResult

Spell = Callable[[Sequence[int]], str | None]

FEW = 8
"""Ignored number of tokens: servers decode the last few of a prompt anyway."""

SHARE = 0.15
"""Least share of a prompt behind a client's change for a sentence."""

_GRAM = 8
_TIME = re.compile(r"\d{4}-\d\d-\d\d|\d{1,2}:\d\d|\b(19|20)\d\d\b|\d{9,}")
_THINK = re.compile(r"<\|?(think|thinking|thought|start_thinking)\b|◁think▷|<\|channel\|>\s*analysis", re.I)


@dataclass(frozen=True)
class Parting:
    """The position at which a prompt differs from an earlier history."""

    at: int
    past: RequestResult
    index: int
    """Number of the past request."""


def parting(
    prompt: Sequence[int], history: Sequence[RequestResult], salt: str | None = None
) -> Parting | None:
    """Return the longest prefix in common with an earlier request, of `salt` alone unless it is None."""
    best: Parting | None = None
    for index, past in enumerate(history):
        if salt is not None and past.request.salt != salt:
            continue
        at = min(common_prefix(prompt, past.tokens), len(prompt))
        if at and (best is None or at >= best.at):
            best = Parting(at, past, index)
    return best


def again(new: Sequence[int], old: Sequence[int]) -> int:
    """Return the number of tokens of `new` that are in `old`, too, in runs of eight and more."""
    grams = {tuple(old[i : i + _GRAM]) for i in range(len(old) - _GRAM + 1)}
    covered = [False] * len(new)
    for i in range(len(new) - _GRAM + 1):
        if tuple(new[i : i + _GRAM]) in grams:
            covered[i : i + _GRAM] = [True] * _GRAM
    return sum(covered)


def explain(
    new: RequestResult, history: Sequence[RequestResult], spell: Spell, sound: bool = True
) -> str | None:
    """Return the sentence on a request; None: nothing was missed, or nothing is known.

    `history`: earlier requests, in order; `sound`: False: the cache has faults, and lost tokens are no reason
    to advise the client.
    """
    total = len(new.prompt)
    found = parting(new.prompt, history, new.request.salt)
    matched = found.at if found else 0
    other = parting(new.prompt, history)
    if other is not None and other.at - max(matched, new.reply.cached or 0) > FEW:
        return (
            f"{other.at:,} tokens are known under another salt; requests of different salts share nothing "
            "by design: give them the same cache_salt if they may"
        )
    if found is None or new.reply.cached is None:
        return None
    if (lost := min(matched, total - 1) - new.reply.cached) > FEW:
        return _lost(new, history, found, lost, spell, sound)
    return _shifted(new, history, spell)


def _lost(
    new: RequestResult,
    history: Sequence[RequestResult],
    found: Parting,
    lost: int,
    spell: Spell,
    sound: bool,
) -> str:
    """Return the sentence on known tokens that the target did not reuse."""
    total, at, past = len(new.prompt), found.at, found.past
    where = f"{lost:,} tokens that were decoded before were decoded again"
    if at < total and at < len(past.tokens):
        where += f"; histories part at token {at:,} of {total:,}{_texts(new, past, at, spell)}"
        point = f"a restore point at {at:,} would have served"
    else:
        point = f"a restore point at {min(at, total - 1):,}, the end of what was said, would have served"
    between = history[found.index + 1 :]
    chats = {each.chat for each in between if each.chat != past.chat}
    served = any(
        each.reply.cached is not None and each.reply.cached >= min(at, len(each.prompt)) - FEW
        for each in between
        if common_prefix(each.prompt, past.tokens) >= at
    )
    if new.reply.reason:
        why = f"the target says: {new.reply.reason}"
    elif served:
        why = "it was there, and has been evicted or overwritten since"
    elif chats:
        many = "another chat" if len(chats) == 1 else f"{len(chats)} other chats"
        why = f"there was none: {many} took its place meanwhile, and it was not kept, or had been evicted"
    elif at < len(past.tokens):
        cut = len(past.tokens) - at
        behind = f"{cut:,} token{'' if cut == 1 else 's'} behind it"
        why = (
            f"there was none: {behind} would have had to be taken back, "
            "which recurrent and windowed memories cannot without a checkpoint there"
        )
    else:
        why = "nothing was asked in between: it keeps none, or did not look"
    cause = _cause(new, past, at, spell) if sound and at < min(total, len(past.tokens)) else ""
    return f"{where}; {point}; {why}{'; ' + cause if cause else ''}"


def explain_text(new: RequestResult, history: Sequence[RequestResult]) -> str | None:
    """Return a sentence as `explain`, for prompts without token ids: each "token" is a character."""
    return _shifted(new, history, lambda codes: "".join(map(chr, codes)), "character")


def _shifted(
    new: RequestResult, history: Sequence[RequestResult], spell: Spell, unit: str = "token"
) -> str | None:
    """Return the sentence on an earlier part that the client changed."""
    last = next((past for past in reversed(history) if past.chat == new.chat), None)
    if last is None or last.request.salt != new.request.salt:
        return None
    at = common_prefix(new.prompt, last.tokens)
    if at >= len(last.tokens) or at >= len(new.prompt):
        return None
    known = max((common_prefix(new.prompt, past.tokens) for past in history), default=0)
    same = again(new.prompt[max(at, known) :], last.tokens[at:])
    if same < max(FEW, SHARE * len(new.prompt)):
        return None
    where = f"the chat differs from its last turn at {unit} {at:,} of {len(new.prompt):,}"
    cause = _cause(new, last, at, spell) or "the client changed what came before"
    again_said = f"{same:,} {unit}s behind it stand in both and had to be decoded again"
    return f"{where}{_texts(new, last, at, spell)}; {again_said}: {cause}"


def _texts(new: RequestResult, past: RequestResult, at: int, spell: Spell) -> str:
    """Quote the new and the old text at a position; empty if texts are unknown."""
    pair = _around(new, past, at, spell, 8)
    return f": {pair[0]!r} was {pair[1]!r}" if pair else ""


def _around(
    new: RequestResult, past: RequestResult, at: int, spell: Spell, width: int
) -> tuple[str, str] | None:
    now, was = spell(new.prompt[at : at + width]), spell(past.tokens[at : at + width])
    return None if now is None or was is None else (now, was)


def _cause(new: RequestResult, past: RequestResult, at: int, spell: Spell) -> str:
    """Return the usual cause of a difference inside an earlier history; empty: none of them."""
    pair = _around(new, past, at, spell, 24)
    line = _around(new, past, max(0, at - 12), spell, 30)
    drops = _thinks(past, at, spell)
    if pair and drops and not _THINK.search(pair[0][:12]):
        return (
            "the model's thinking stood there, and the client or its template drops it from the history: "
            "keep thinking in the history, or use a cache that puts a restore point where answers begin"
        )
    if pair and (one := pair[0].strip()) and (two := pair[1].strip()):
        short = min(len(one), len(two), 12)
        if one[:short] == two[:short] and short >= 4:
            return (
                "the text is the same, but in other tokens (a BOS, a space, or a word cut at the border of "
                "an answer): send back the token ids, or the text exactly as it came"
            )
    changed = _changed_message(new.request, past.request)
    if line and _TIME.search(line[0]) and _TIME.search(line[1]) and (changed in (None, 0)):
        return "a date or time changes there: move what changes to the end of the prompt, or round it"
    if changed is None:
        return "" if at >= len(past.prompt) - FEW else "an earlier part of the prompt was changed"
    role = new.request.messages[changed].get("role", "")
    if changed == 0 and role in ("system", "developer"):
        return "the system prompt changes between turns: move what changes to the end of the prompt"
    return f"message {changed + 1} ({role}) is not what it was: it was edited, moved or taken out"


def _thinks(past: RequestResult, at: int, spell: Spell) -> bool:
    """Tell whether thinking begins at a position or shortly before it."""
    text = spell(past.tokens[max(0, at - FEW) : at + FEW])
    return bool(text and _THINK.search(text))


def _changed_message(new: Request, past: Request) -> int | None:
    """Return the number of the first changed message; None: there is none."""
    for i, was in enumerate(past.messages):
        if i >= len(new.messages) or new.messages[i] != was:
            return i if i < len(new.messages) else None
    return None
