"""Reasons why known tokens were not reused: a sentence for each request.

There are two kinds: a target did not reuse tokens that it had decoded (`_lost`), or a client changed an
earlier part, so that equal text behind the change has to be decoded again (`_shifted`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from llamahybrid.harness.conversation import Request
from llamahybrid.harness.oracle import common_prefix
from llamahybrid.harness.runner import RequestResult

Spell = Callable[[Sequence[int]], str | None]

FEW = 8
"""Ignored number of tokens: servers decode the last few of a prompt anyway."""

SHARE = 0.15
"""Least share of a prompt behind a client's change for a sentence."""

_TIME = re.compile(r"\d{4}-\d\d-\d\d|\d{1,2}:\d\d|\b(19|20)\d\d\b|\d{9,}")
_THINK = re.compile(r"<\|?(think|thinking|thought|start_thinking)\b|◁think▷|<\|channel\|>\s*analysis", re.I)


def parting(
    prompt: Sequence[int], history: Sequence[RequestResult], salt: str | None = None
) -> tuple[int, RequestResult | None]:
    """Return the longest prefix in common with an earlier request, and the last one that has it.

    `salt`: of earlier requests; None: any.
    """
    best: tuple[int, RequestResult | None] = 0, None
    for past in history:
        at = common_prefix(prompt, past.tokens) if salt in (None, past.request.salt) else 0
        if at and at >= best[0]:
            best = at, past
    return best


def explain(
    new: RequestResult, history: Sequence[RequestResult], spell: Spell, sound: bool = True
) -> str | None:
    """Return the sentence on a request; None: nothing was missed, or nothing is known.

    `history`: earlier requests, in order; `sound`: False: the cache has faults, and lost tokens are no reason
    to advise the client.
    """
    matched, past = parting(new.prompt, history, new.request.salt)
    other, _ = parting(new.prompt, history)
    if other - max(matched, new.reply.cached or 0) > FEW:
        return (
            f"{other:,} tokens are known under another salt; requests of different salts share nothing "
            "by design: give them the same cache_salt if they may"
        )
    if past is None or new.reply.cached is None:
        return None
    if (lost := min(matched, len(new.prompt) - 1) - new.reply.cached) > FEW:
        return _lost(new, history, past, matched, lost, spell, sound)
    return _shifted(new, history, spell)


def _lost(
    new: RequestResult,
    history: Sequence[RequestResult],
    past: RequestResult,
    at: int,
    lost: int,
    spell: Spell,
    sound: bool,
) -> str:
    """Return the sentence on known tokens that the target did not reuse."""
    total, inside = len(new.prompt), at < min(len(new.prompt), len(past.tokens))
    said = [f"{lost:,} tokens that were decoded before were decoded again"]
    if inside:
        said.append(f"histories part at token {at:,} of {total:,}{_texts(new, past, at, spell)}")
    said.append(f"a restore point at {min(at, total - 1):,} would have served")
    between = history[history.index(past) + 1 :]
    after = [each for each in between if common_prefix(each.prompt, past.tokens) >= at]
    if new.reply.reason:
        said.append(f"the target says: {new.reply.reason}")
    elif any((each.reply.cached or 0) >= min(at, len(each.prompt)) - FEW for each in after):
        said.append("it was there, and has been evicted or overwritten since")
    elif others := {each.chat for each in between} - {past.chat}:
        chats = "another chat" if len(others) == 1 else f"{len(others)} other chats"
        said.append(f"{chats} took its place: it was not kept, or had been evicted")
    elif at < len(past.tokens):
        said.append("recurrent and windowed memories cannot go back there without a checkpoint")
    else:
        said.append("nothing was asked in between: it keeps none, or did not look")
    if sound and inside and (cause := _cause(new, past, at, spell)):
        said.append(cause)
    return "; ".join(said)


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
    if at >= min(len(last.tokens), len(new.prompt)):
        return None
    known, _ = parting(new.prompt, history)
    same = _again(new.prompt[max(at, known) :], last.tokens[at:])
    if same < max(FEW, SHARE * len(new.prompt)):
        return None
    where = f"the chat differs from its last turn at {unit} {at:,} of {len(new.prompt):,}"
    cause = _cause(new, last, at, spell) or "the client changed what came before"
    again = f"{same:,} {unit}s behind it stand in both and had to be decoded again"
    return f"{where}{_texts(new, last, at, spell)}; {again}: {cause}"


def _again(new: Sequence[int], old: Sequence[int], run: int = 8) -> int:
    """Return the number of tokens of `new` that are in `old`, too, in runs of `run` and more."""
    known = {tuple(old[i : i + run]) for i in range(len(old) - run + 1)}
    begins = (i for i in range(len(new) - run + 1) if tuple(new[i : i + run]) in known)
    return len({j for i in begins for j in range(i, i + run)})


def _texts(new: RequestResult, past: RequestResult, at: int, spell: Spell) -> str:
    """Quote the new and the old text at a position; empty if texts are unknown."""
    now, was = _around(new, past, at, spell, 8)
    return f": {now!r} was {was!r}" if now or was else ""


def _around(new: RequestResult, past: RequestResult, at: int, spell: Spell, width: int) -> tuple[str, str]:
    """Return the new and the old text at a position; empty: unknown."""
    return spell(new.prompt[at : at + width]) or "", spell(past.tokens[at : at + width]) or ""


def _cause(new: RequestResult, past: RequestResult, at: int, spell: Spell) -> str:
    """Return the usual cause of a difference inside an earlier history; empty: none of them."""
    now, was = (text.strip() for text in _around(new, past, at, spell, 24))
    before = spell(past.tokens[max(0, at - FEW) : at + FEW]) or ""
    if now and _THINK.search(before) and not _THINK.search(now[:12]):
        return (
            "the model's thinking stood there, and the client or its template drops it from the history: "
            "keep thinking in the history, or use a cache that puts a restore point where answers begin"
        )
    short = min(len(now), len(was), 12)
    if short >= 4 and now[:short] == was[:short]:
        return (
            "the text is the same, but in other tokens (a BOS, a space, or a word cut at the border of "
            "an answer): send back the token ids, or the text exactly as it came"
        )
    changed = _changed_message(new.request, past.request)
    line = _around(new, past, max(0, at - 12), spell, 30)
    if changed in (None, 0) and all(map(_TIME.search, line)):
        return "a date or time changes there: move what changes to the end of the prompt, or round it"
    if changed is None:
        return "" if at >= len(past.prompt) - FEW else "an earlier part of the prompt was changed"
    role = new.request.messages[changed].get("role", "")
    if changed == 0 and role in ("system", "developer"):
        return "the system prompt changes between turns: move what changes to the end of the prompt"
    return f"message {changed + 1} ({role}) is not what it was: it was edited, moved or taken out"


def _changed_message(new: Request, past: Request) -> int | None:
    """Return the number of the first changed message; None: there is none."""
    pairs = enumerate(zip(new.messages, past.messages, strict=False))
    return next((i for i, (now, was) in pairs if now != was), None)
