"""Planted faults: small edits of the product that a user would suffer from, each of which a test must show.

`tests.lab.mutations` applies them one at a time. The text that goes must occur exactly once in its file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Fault:
    """One edit, and where to look first for a test that shows it."""

    name: str
    """The fault in plain words."""
    file: str
    edits: tuple[tuple[str, str], ...]
    """(text that goes, text that comes), applied in order."""
    tests: str
    """Arguments of pytest: the tests that show it soonest."""
    engine: Literal["stock", "patched"] = "stock"
    hangs: bool = False
    """The product waits for ever with this fault: a test that does not end shows it, too."""


def _fault(
    name: str,
    file: str,
    old: str,
    new: str,
    tests: str,
    *,
    engine: Literal["stock", "patched"] = "stock",
    hangs: bool = False,
) -> Fault:
    return Fault(name, f"llamahybrid/{file}", ((old, new),), tests, engine, hangs)


MEMORY = (
    _fault(
        "a restore does not cut what lies behind the restored state",
        "memory/restore.py",
        "if not native.cut(saved.position):",
        "if False:",
        "tests/memory/test_restore.py tests/memory",
    ),
    _fault(
        "memory is not verified after a restore",
        "memory/restore.py",
        "fault = live.fault()\n    if fault is None and payload is not None",
        "fault: str | None = None\n    if fault is None and payload is not None",
        "tests/memory/test_restore.py tests/memory",
    ),
    _fault(
        "verification does not notice cells that are missing",
        "memory/verification.py",
        "return None if size == expected else",
        "return None if size <= expected else",
        "tests/memory/test_verification.py tests/memory",
    ),
    _fault(
        "verification does not look at positions",
        "memory/verification.py",
        "    if fault or not deep or state.n == 0",
        "    fault = None\n    if not deep or state.n == 0",
        "tests/memory/test_verification.py tests/memory",
    ),
    _fault(
        "logits that are not numbers end no prompt",
        "request/runner.py",
        "not bool(np.isfinite(logits).all())",
        "bool(np.isinf(logits).all())",
        "tests/request/test_runner.py tests/request",
    ),
    _fault(
        "a state with NaN in it is stored during an answer",
        "memory/output_row.py",
        "return row is not None and bool(np.isfinite(row).all())",
        "return row is not None",
        "tests/memory/test_output_row.py tests/request",
    ),
    _fault(
        "buffers that hold NaN are not zeroed",
        "memory/sequence.py",
        "self.state.needs_zeroing = True",
        "self.state.needs_zeroing = False",
        "tests/memory/test_sequence.py tests/request",
    ),
    Fault(
        "the recurrent state is loaded before its attention",
        "llamahybrid/memory/restore.py",
        (
            (
                "    live.invalidate()\n    if saved.attention:\n",
                "    live.invalidate()\n    payload = saved.payload\n"
                "    if payload is not None and not native.load_partial(payload):\n"
                '        return "not read"\n'
                "    if saved.attention:\n",
            ),
            (
                "    payload = saved.payload\n"
                "    if payload is not None and not native.load_partial(payload):\n"
                '        return f"the',
                '    if native is None:\n        return f"the',
            ),
            ("{payload.nbytes} snapshot bytes", "snapshot bytes"),
        ),
        "tests/memory/test_paging.py tests/memory",
    ),
    _fault(
        "a draft's rollback is not ended before a state is loaded",
        "memory/restore.py",
        "    live.release_planes()\n",
        "",
        "tests/memory/test_planes.py tests/memory tests/speculation",
        engine="patched",
    ),
    _fault(
        "rollback planes are kept when drafts are over",
        "memory/planes.py",
        "        self._resize(self._base)\n",
        "",
        "tests/memory/test_planes.py tests/speculation/test_resize.py",
        engine="patched",
    ),
    _fault(
        "a rollback goes to a plane of another history",
        "memory/sequence.py",
        "state.n - position > self.planes.reach",
        "state.n - position > self.planes.count",
        "tests/memory/test_planes.py tests/memory tests/speculation",
    ),
    _fault(
        "stored attention is loaded behind one live token too many",
        "memory/restore.py",
        "profile.pager.keep_attention(kept)",
        "profile.pager.keep_attention(kept + 1)",
        "tests/memory/test_paging.py tests/memory",
    ),
    _fault(
        "attention of other tokens counts as the prompt's",
        "memory/restore.py",
        "if starts != ends or common_prefix(live, tokens) < ends[0]:",
        "if starts != ends:",
        "tests/memory/test_restore.py tests/memory",
    ),
    _fault(
        "states of one model serve another one",
        "memory/fingerprint.py",
        "            model,\n            self.settings,",
        "            self.settings,",
        "tests/memory/test_fingerprint.py tests/memory",
    ),
    _fault(
        "states that were computed with an adapter serve without it",
        "memory/fingerprint.py",
        "            self.adapters.digest(),\n",
        "",
        "tests/memory/test_adapters.py tests/memory",
    ),
    _fault(
        "what others decoded on the context goes unnoticed",
        "memory/sequence.py",
        "return counters != shared.counters",
        "return False",
        "tests/memory/test_sequence.py tests/request/test_runner.py tests/memory",
    ),
    _fault(
        "cells of a shared prefix are counted for each sequence",
        "memory/shared.py",
        "return held - held_twice(m for m in members if m is not without) if sharing else held",
        "return held",
        "tests/memory/test_sharing.py tests/memory/test_shared.py tests/request/test_cells.py",
    ),
)

PROMPT_CACHE = (
    _fault(
        "a checkpoint serves a prompt that parted before it",
        "prompt_cache/nodes.py",
        "for p in sorted(entries) if p <= self.length]",
        "for p in sorted(entries)]",
        "tests/prompt_cache/test_cache.py tests/prompt_cache/test_tree.py",
    ),
    _fault(
        "a checkpoint at a prompt's end serves without its logits",
        "prompt_cache/selection.py",
        "if e.position < total or e.checkpoint.logits is not None), None)",
        "if e.position <= total), None)",
        "tests/prompt_cache/test_selection.py tests/prompt_cache",
    ),
    _fault(
        "a repeated prompt is answered from the logits of a shorter one",
        "prompt_cache/selection.py",
        "for e in reversed(entries) if e.position == total), None)",
        "for e in reversed(entries) if e.position <= total), None)",
        "tests/prompt_cache/test_selection.py tests/prompt_cache",
    ),
    _fault(
        "attention with a hole in it counts as whole",
        "prompt_cache/selection.py",
        "if segment.start <= reach < segment.end:",
        "if reach < segment.end:",
        "tests/prompt_cache/test_selection.py tests/prompt_cache/test_segments.py tests/prompt_cache",
    ),
    _fault(
        "the salt of a request is ignored by the store",
        "memory/identity.py",
        'self._unsalted.hex() + (f"+{salt_tag(salt)}" if salt else "")',
        "self._unsalted.hex()",
        "tests/request/test_salt.py",
    ),
    _fault(
        "live tokens of one salt serve another",
        "memory/identity.py",
        "return self.salt == salt and self.fingerprint == with_salt(self._unsalted, salt)",
        "return True",
        "tests/request/test_salt.py",
    ),
    _fault(
        "the RAM budget counts half of what is stored",
        "prompt_cache/ram_store.py",
        "return stored + doomed + self.account.nbytes",
        "return stored // 2 + doomed + self.account.nbytes",
        "tests/prompt_cache/test_budget.py tests/prompt_cache/test_ram.py",
    ),
    _fault(
        "eviction takes what is worth most",
        "prompt_cache/eviction.py",
        "return sorted(line, key=_worth)",
        "return sorted(line, key=_worth, reverse=True)",
        "tests/prompt_cache/test_eviction.py",
    ),
    _fault(
        "eviction takes what the user pinned",
        "prompt_cache/eviction.py",
        "free = [e for e in ranked if not e.pins and not e.user_pinned]",
        "free = [e for e in ranked if not e.pins]",
        "tests/prompt_cache/test_pins.py tests/prompt_cache",
    ),
    _fault(
        "eviction takes the bytes that a request is about to load",
        "prompt_cache/pins.py",
        "entry.pins += 1",
        "pass",
        "tests/prompt_cache/test_pins.py tests/prompt_cache",
    ),
    _fault(
        "forget leaves longer conversations in RAM",
        "prompt_cache/ram_store.py",
        "leaf = top.leaf()",
        "leaf = top",
        "tests/prompt_cache/test_forget.py",
    ),
    _fault(
        "forget leaves longer conversations on disk",
        "prompt_cache/disk_index.py",
        "if p.position > stays]\n                nodes.extend(node.children.values())",
        "if p.position > stays]",
        "tests/prompt_cache/test_forget.py tests/prompt_cache/test_disk_index.py",
    ),
    _fault(
        "forget leaves what is live",
        "prompt_cache/ram_tier.py",
        "state.forget(tokens)",
        "pass",
        "tests/prompt_cache/test_forget.py tests/request/test_runner.py",
    ),
    _fault(
        "what waits to be written is written although it was forgotten",
        "prompt_cache/disk_tier.py",
        "stopped = self.writer.cancel(tokens, seconds, stays)",
        "stopped = True",
        "tests/prompt_cache/test_forget.py tests/prompt_cache/test_disk_writer.py tests/prompt_cache",
    ),
    _fault(
        "no checksum of a state is looked at",
        "prompt_cache/envelope.py",
        "if xxhash.xxh3_64_intdigest(payload.data) != self.payload_digest:",
        "if payload.nbytes < 0:",
        "tests/prompt_cache/test_envelope.py tests/prompt_cache/test_records.py",
    ),
    _fault(
        "a damaged state in RAM reaches the library",
        "prompt_cache/envelope.py",
        "    header.check(payload)\n    return payload",
        "    return payload",
        "tests/prompt_cache/test_envelope.py tests/memory/test_restore.py",
    ),
    _fault(
        "damaged logits of a record are sampled from",
        "prompt_cache/records.py",
        "if xxhash.xxh3_64_intdigest(row) != head.logits_digest:",
        "if False:",
        "tests/prompt_cache/test_records.py",
    ),
    _fault(
        "a truncated record counts as there",
        "prompt_cache/records.py",
        "if head.nbytes != file_bytes:",
        "if head.nbytes < file_bytes:",
        "tests/prompt_cache/test_records.py tests/prompt_cache/test_disk_store.py",
    ),
    _fault(
        "a state of other tokens is opened",
        "prompt_cache/envelope.py",
        "if header.digest != path_digest(namespace, tokens):",
        "if header.end != len(tokens):",
        "tests/prompt_cache/test_envelope.py tests/memory/test_restore.py",
    ),
    _fault(
        "the write budget is ignored",
        "prompt_cache/write_policy.py",
        "return self._left > 0",
        "return True",
        "tests/prompt_cache/test_write_policy.py",
    ),
    _fault(
        "the disk limit is ignored",
        "prompt_cache/disk_store.py",
        "return self._index.nbytes + self._refused.nbytes + n_bytes - self.limit",
        "return n_bytes - self.limit",
        "tests/prompt_cache/test_disk_store.py tests/prompt_cache/test_disk_tier.py",
    ),
    _fault(
        "the disk gives up what was used last",
        "prompt_cache/disk_index.py",
        "next((r for r in self._checkpoints if r.place not in places), None)",
        "next((r for r in reversed(self._checkpoints) if r.place not in places), None)",
        "tests/prompt_cache/test_disk_index.py tests/prompt_cache",
    ),
    _fault(
        "a full disk fails a request",
        "prompt_cache/disk_writer.py",
        "        except OSError as error:\n            store.refused(WRITE, error)",
        "        except ZeroDivisionError as error:\n            store.refused(WRITE, error)",
        "tests/prompt_cache/test_disk_writer.py tests/prompt_cache/test_disk_tier.py",
    ),
    _fault(
        "requests wait for a remote store that is away",
        "prompt_cache/remote_link.py",
        "if self._away(self.server.answered):",
        "if False:",
        "tests/prompt_cache/test_remote_link.py tests/prompt_cache/test_remote_faults.py",
        hangs=True,
    ),
    _fault(
        "a remote store that fails fails the request",
        "prompt_cache/remote_link.py",
        'raise OSError(f"the remote cache: {read.error}")',
        'raise RuntimeError(f"the remote cache: {read.error}")',
        "tests/prompt_cache/test_remote_faults.py tests/prompt_cache/test_remote_link.py",
    ),
    _fault(
        "prompts are never cut for a ladder of checkpoints",
        "prompt_cache/ladder.py",
        "    if most <= 0:\n        return ()",
        "    if total > 0:\n        return ()",
        "tests/prompt_cache/test_ladder.py tests/prompt_cache/test_placement.py",
    ),
    _fault(
        "no checkpoint is taken during an answer",
        "request/schedule.py",
        "self.next_due = next_decode_checkpoint(position, self._total, self._measured(), self._together())",
        "self.next_due = NEVER",
        "tests/request/test_schedule.py tests/request/test_runner.py",
    ),
    _fault(
        "no checkpoint is taken at a prompt's end",
        "request/schedule.py",
        "            yield Action.CHECKPOINT_WITH_LOGITS\n",
        "            yield Action.REMEMBER\n",
        "tests/request/test_schedule.py tests/request/test_runner.py",
    ),
    _fault(
        "attention is never stored",
        "request/checkpoints.py",
        "case Action.PAGE_OUT | Action.PAGE_OUT_LATER:",
        "case Action.PAGE_OUT | Action.PAGE_OUT_LATER if after < 0:",
        "tests/request/test_checkpoints.py tests/request/test_runner.py tests/memory/test_paging.py",
    ),
    _fault(
        "a forked process waits for a lock of its parent",
        "prompt_cache/guard.py",
        "        guard.lock = threading.RLock()\n\n\nif hasattr",
        "        guard.tell()\n\n\nif hasattr",
        "tests/prompt_cache/test_guard.py",
        hangs=True,
    ),
    _fault(
        "an interrupt leaves half a change in the store",
        "prompt_cache/guard.py",
        "            store.restart()\n",
        "",
        "tests/prompt_cache/test_guard.py tests/prompt_cache",
    ),
)

REQUEST = (
    _fault(
        "a cancel ends other requests, too",
        "request/gate.py",
        "for each in self.seated if ticket is None else (ticket,):",
        "for each in self.seated if ticket is None else (ticket, *self.seated):",
        "tests/request/test_cancel.py tests/request/test_handle.py",
    ),
    _fault(
        "a stop outlives the request that it was for",
        "capi/shim.py",
        "number = next(self._numbers)",
        "number = 1",
        "tests/capi/test_shim.py tests/request/test_cancel.py",
    ),
    _fault(
        "a prompt that is stopped inside a batch loses all that was decoded",
        "request/stoppable.py",
        "                recover(live, undo)",
        "                live.invalidate()",
        "tests/request/test_stoppable.py tests/request/test_cancel.py",
    ),
    _fault(
        "a cancelled prompt keeps no checkpoint",
        "request/schedule.py",
        "        yield Action.ADMIT_STAGED\n        if opaque:",
        "        if opaque:",
        "tests/request/test_schedule.py tests/request/test_cancel.py",
    ),
    _fault(
        "a request is sampled from another one's row of a merged batch",
        "memory/shared.py",
        "live.row.lies_at(index)",
        "live.row.lies_at(len(lives) - 1 - index)",
        "tests/request/test_parallel.py tests/request/test_batcher.py",
    ),
    _fault(
        "logits that wait are overwritten by another request's batch",
        "memory/output_row.py",
        "np.copyto(self._copy, row)\n            self._copied = True",
        "self._copy = row\n            self._copied = True",
        "tests/memory/test_output_row.py tests/request/test_parallel.py tests/request/test_batcher.py",
    ),
    _fault(
        "tokens of two requests change places in a merged batch",
        "memory/shared.py",
        "native.decode_rows(tokens, positions,",
        "native.decode_rows(tokens[::-1], positions,",
        "tests/request/test_parallel.py tests/memory/test_shared.py",
    ),
    _fault(
        "a request is given a slot that another one has",
        "request/slots.py",
        "return [slot for slot in self.all if slot not in taken]",
        "return [slot for slot in self.all if slot not in taken or len(taken) > 1]",
        "tests/request/test_slots.py tests/request/test_parallel.py",
        hangs=True,
    ),
    _fault(
        "usage tells what was matched, not what was cached",
        "request/ticket.py",
        "cached = 0 if self.request is None else self.request.plan.cached",
        "cached = 0 if self.request is None else self.request.plan.matched",
        "tests/request/test_completion.py tests/request/test_report.py tests/test_llama.py",
    ),
    _fault(
        "a stream loses its last piece",
        "request/answer.py",
        "    if piece or logprobs:\n        yield chunk(piece, logprobs)\n",
        "",
        "tests/request/test_answer.py",
    ),
    _fault(
        "a stream hands out the beginning of a stop string",
        "request/answer.py",
        "self._longest = max(map(len, self._stops), default=0)",
        "self._longest = 0",
        "tests/request/test_answer.py",
    ),
    _fault(
        "a stream that the model ended says that it was cut short",
        "request/answer.py",
        '            finish_reason = "stop"\n            break\n        odds.add',
        "            break\n        odds.add",
        "tests/request/test_answer.py",
    ),
    _fault(
        "a cancelled completion says that it was complete",
        "request/ticket.py",
        'choice["finish_reason"] and "cancelled"',
        'choice["finish_reason"] and "stop"',
        "tests/request/test_cancel.py tests/request/test_completion.py",
    ),
    _fault(
        "several answers share a seed",
        "request/answers.py",
        "own = dict(options, seed=each[index])",
        "own = dict(options, seed=each[0])",
        "tests/request/test_answers.py",
    ),
    _fault(
        "a request that made room begins its random numbers again",
        "request/arrays.py",
        "            sampler=self.sampler,\n",
        "            sampler=None,\n",
        "tests/request/test_arrays.py tests/request/test_requests.py tests/request",
    ),
    _fault(
        "a request that made room goes on without its logits",
        "request/arrays.py",
        "self.requires_eval = saved.requires_eval",
        "self.requires_eval = False",
        "tests/request/test_arrays.py tests/request/test_requests.py tests/request",
    ),
    _fault(
        "an interrupt in a request leaves its model unusable",
        "request/gate.py",
        "if self.inside and not self._frames.run_in():",
        "if False:",
        "tests/request/test_interrupts.py tests/request/test_gate.py tests/request",
        hangs=True,
    ),
    _fault(
        "a stream that was given up keeps others out",
        "request/gate.py",
        "            self._ends.tell(ticket)\n        self.seats.leave(ticket)",
        "            self._ends.tell(ticket)\n        ticket.over = False",
        "tests/request/test_gate.py tests/request/test_given_up.py",
        hangs=True,
    ),
    _fault(
        "nobody is told that a model is busy",
        "request/gate.py",
        "deadline = None if later or self.wait is True else",
        "deadline = None if later or self.wait is not None else",
        "tests/request/test_gate.py tests/request/test_requests.py",
        hangs=True,
    ),
    _fault(
        "the vocabulary of a closed model is read",
        "request/native_calls.py",
        "            if calls.closed:\n                raise",
        "            if calls is None:\n                raise",
        "tests/request/test_native_calls.py",
    ),
    _fault(
        "logprobs are those of tokens that are gone",
        "request/evaluation.py",
        "rows = min(arrays.true_rows, common_prefix(live.tokens, prompt))",
        "rows = arrays.true_rows",
        "tests/request/test_evaluation.py tests/request/test_arrays.py tests/test_llama.py",
    ),
    _fault(
        "messages begin one token later than they do",
        "request/boundaries.py",
        "return positions[1:] if positions[:1] == [0] else positions",
        "return [position + 1 for position in positions]",
        "tests/request/test_boundaries.py",
    ),
    _fault(
        "an answer counts the text of another thread's as its own",
        "request/answer_text.py",
        "if n and tokens[:n] == known and not",
        "if n and len(tokens) >= n and not",
        "tests/request/test_answer_text.py",
    ),
    _fault(
        "closing a model leaves states unwritten",
        "llama.py",
        "            self.evaluation.runner.cache.flush()",
        "            self.evaluation.runner.cache.stats()",
        "tests/prompt_cache/test_disk_tier.py tests/request tests/test_llama.py",
    ),
    _fault(
        "a damaged saved state is loaded",
        "saved_state.py",
        "if not same or seal.checksum != _checksum(",
        "if not same or seal.checksum == (",
        "tests/test_saved_state.py",
    ),
)

SPECULATION = (
    _fault(
        "tokens that were guessed wrong stay in memory",
        "request/evaluation.py",
        "if not (ahead and self.drafts.go_back(n)):",
        "if not ahead:",
        "tests/speculation/test_drafts.py",
    ),
    _fault(
        "a wrong guess is taken back to a state of another history",
        "speculation/drafts.py",
        "if self._tokens is None or not self._live.state.starts_with(self._tokens):",
        "if self._tokens is None:",
        "tests/speculation/test_drafts.py",
    ),
    _fault(
        "tokens that were guessed wrong count as accepted",
        "speculation/drafts.py",
        "accepted = min(max(gained - 1, 0), pending)",
        "accepted = pending",
        "tests/speculation/test_drafts.py",
    ),
    _fault(
        "a guess outside the vocabulary is decoded",
        "speculation/drafts.py",
        "wrong = np.flatnonzero((guess < 0) | (guess >= self._live.n_vocab))",
        "wrong = np.flatnonzero(guess < -(2**31))",
        "tests/speculation/test_drafts.py",
    ),
)

SERVER = (
    _fault(
        "API keys are compared by their beginning",
        "server/keys.py",
        "return hashlib.blake2b(_bytes(key), digest_size=32).digest()",
        "return hashlib.blake2b(_bytes(key)[:4], digest_size=32).digest()",
        "tests/server/test_keys.py tests/server/test_limits.py",
    ),
    _fault(
        "tenants with keys of their own share a cache",
        "server/keys.py",
        'own = salt_of(key) if by_key else ""',
        'own = ""',
        "tests/server/test_keys.py tests/server/test_tenants.py",
    ),
    _fault(
        "a body without a length has no limit",
        "server/limits.py",
        "if body.size > self._max_body:",
        "if body.size < 0:",
        "tests/server/test_limits.py",
    ),
    _fault(
        "a client that hung up goes on decoding",
        "server/job.py",
        "            self._dropped = self.cancelled = True\n            handle = self._handle",
        "            self.cancelled = True\n            handle = None",
        "tests/server/test_job.py tests/server/test_answer.py",
        hangs=True,
    ),
    _fault(
        "an error inside a stream is not told",
        "server/answer.py",
        "event(refusal(item.error).body), None",
        "END, None",
        "tests/server/test_answer.py tests/server/test_errors.py",
    ),
    _fault(
        "a stream over HTTP ends without its last chunk",
        "server/answer.py",
        "return event({**last, **told}) + END",
        "return END",
        "tests/server/test_answer.py",
    ),
    _fault(
        "a prompt that is too long is refused without a code",
        "server/errors.py",
        'return bad(_overflow(error, overflow), "messages", "context_length_exceeded")',
        'return bad(_overflow(error, overflow), "messages")',
        "tests/server/test_errors.py",
    ),
    _fault(
        "requests are counted twice",
        "server/metrics.py",
        "self._requests.labels(end).inc()",
        "self._requests.labels(end).inc(2)",
        "tests/server/test_metrics.py",
    ),
    _fault(
        "the server's usage tells what was matched",
        "server/usage.py",
        '"cached_tokens": reports[0].cached}',
        '"cached_tokens": reports[0].matched}',
        "tests/server/test_usage.py",
    ),
    _fault(
        "the server's queue has no end",
        "server/admission.py",
        "return len(self._queue) >= self.max_queue and",
        "return len(self._queue) < 0 and",
        "tests/server/test_admission.py",
        hangs=True,
    ),
)

HARNESS = (
    _fault(
        "check never fails",
        "cli/check.py",
        'if any(outcome(each) == "bad" for each in report.targets):',
        "if not report.targets:",
        "tests/cli/test_check.py",
    ),
    _fault(
        "hazards call right logits wrong and wrong ones right",
        "hazards/outcome.py",
        "verdict = Verdict.EXACT if gap.exact else Verdict.WRONG",
        "verdict = Verdict.WRONG if gap.exact else Verdict.EXACT",
        "tests/hazards/test_outcome.py",
    ),
    _fault(
        "a library whose process dies is called sound",
        "hazards/outcome.py",
        "return self in (Verdict.EXACT, Verdict.REFUSED,",
        "return self in (Verdict.EXACT, Verdict.REFUSED, Verdict.DIED,",
        "tests/hazards/test_outcome.py tests/hazards/test_runner.py",
    ),
    _fault(
        "a target that stopped counts as one that ran to its end",
        "evaluate/check.py",
        'errors.append(f"{before}{error}")',
        "str(error)",
        "tests/evaluate/test_check.py",
    ),
    _fault(
        "a report leaves out that answers are wrong",
        "evaluate/figures.py",
        "        exact_verdict(played, checked),\n        reports_verdict",
        "        reports_verdict",
        "tests/evaluate/test_figures.py tests/evaluate/test_planted.py",
    ),
    _fault(
        "compare lets twice as much go by",
        "evaluate/changes.py",
        "GRAIN = 0.01\n",
        "GRAIN = 0.02\n",
        "tests/evaluate/test_changes.py",
    ),
    _fault(
        "pytest plugin: a reuse that is too low passes",
        "assertions.py",
        "if reused < at_least * known:",
        "if reused < at_least:",
        "tests/test_assertions.py tests/test_pytest_plugin.py",
    ),
    _fault(
        "pytest plugin: a wrong answer passes",
        "assertions.py",
        'if request.answer == "different":',
        'if request.answer == "tie":',
        "tests/test_assertions.py tests/test_pytest_plugin.py",
    ),
)

COMMANDS = (
    _fault(
        "cache prune removes the newest first",
        "cli/cache.py",
        "found.sort(key=lambda one: one[1].written if isinstance(one[1], Head) else -1)",
        "found.sort(key=lambda one: -one[1].written if isinstance(one[1], Head) else -1)",
        "tests/cli/test_cache.py",
    ),
    _fault(
        "cache prune removes what is younger than it was told",
        "cli/cache.py",
        "head.written < before",
        "head.written > before",
        "tests/cli/test_cache.py",
    ),
    _fault(
        "cache verify says that damaged records are fine",
        "cli/cache.py",
        "if (damaged and not remove) or stored.unread or stored.stuck:",
        "if stored.unread or stored.stuck and not remove:",
        "tests/cli/test_cache.py",
    ),
)

ENGINE = (
    _fault(
        "an engine of older patches is loaded",
        "engine/choice.py",
        "if dict(engine.patches) != series.patches(engine.version):",
        "if not engine.patches:",
        "tests/engine/test_choice.py",
    ),
    _fault(
        "a patch that changed builds no new engine",
        "engine/patched.py",
        "return short_name([asdict(recipe), patches, origin, CMAKE_ARGS])",
        "return short_name([asdict(recipe), list(patches), origin, CMAKE_ARGS])",
        "tests/engine/test_patched.py",
    ),
    _fault(
        "a damaged engine is loaded",
        "engine/installed.py",
        "if (thorough or size <= _QUICK) and sdist.sha256(path) != digest:",
        "if thorough and sdist.sha256(path) != digest:",
        "tests/engine/test_installed.py tests/engine/test_choice.py",
    ),
    _fault(
        "install changes nothing",
        "installation.py",
        "if not _leads_to_ours(there):",
        "if _leads_to_ours(there):",
        "tests/test_installation.py",
    ),
    _fault(
        "the defaults that install was given are ignored",
        "installation.py",
        "options = {**defaults, **kwargs}",
        "options = dict(kwargs)",
        "tests/test_installation.py",
    ),
    _fault(
        "native code never asks whether to stop",
        "capi/shim.py",
        "        self._api.llama_set_abort_callback(ctx, ctypes.cast(function, "
        "self._api.ggml_abort_callback), data)\n",
        "",
        "tests/capi/test_shim.py tests/request/test_cancel.py",
    ),
    _fault(
        "a state that the library refused counts as loaded",
        "capi/shim.py",
        "return bool(0 < read == data.nbytes)",
        "return bool(0 <= read <= data.nbytes)",
        "tests/capi/test_shim.py tests/memory/test_restore.py",
    ),
    _fault(
        "a decode that failed counts as done",
        "memory/context.py",
        "        if code != 0:",
        "        if code < 0:",
        "tests/memory/test_context.py tests/memory",
    ),
)

FAULTS = (*MEMORY, *PROMPT_CACHE, *REQUEST, *SPECULATION, *SERVER, *HARNESS, *COMMANDS, *ENGINE)
