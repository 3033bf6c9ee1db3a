"""Batches of several sequences: what the engine of this run makes of them, and what the probe asks of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from llamahybrid.harness.hazards.batches import PROBES, batch_of_several
from llamahybrid.harness.hazards.context import Context, Item
from llamahybrid.harness.hazards.model import Bench
from llamahybrid.harness.hazards.outcome import Verdict
from tests.harness.hazards.verdicts import known_of

test_it_does_what_is_known_of_it = known_of(PROBES)


def _decoding(patch: pytest.MonkeyPatch, shared: Callable[[Callable[..., int], list[Item]], int]) -> None:
    """`shared` decodes batches of several sequences, given the native way to."""
    native = Context.decode

    def decode(context: Context, items: Iterable[Item]) -> int:
        rows = list(items)
        if len({seqs for _, _, seqs in rows}) == 1:
            return native(context, rows)
        return shared(lambda rows: native(context, rows), rows)

    patch.setattr(Context, "decode", decode)


def test_the_last_two_of_three_are_decoded_together_twice(
    bench: Callable[[str], Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    batches: list[list[Item]] = []

    def noted(native: Callable[..., int], rows: list[Item]) -> int:
        batches.append(rows)
        return native(rows)

    _decoding(monkeypatch, noted)
    llama = bench("llama")
    assert batch_of_several.run(llama).verdict is Verdict.EXACT
    assert batches == [[(llama.token(at, seq), at, (seq,)) for seq in (1, 2)] for at in (12, 13)]


@pytest.mark.parametrize("arch", ["llama", "jamba"])
def test_sequences_that_are_mixed_up_are_seen(
    bench: Callable[[str], Bench], monkeypatch: pytest.MonkeyPatch, arch: str
) -> None:
    def swapped(native: Callable[..., int], rows: list[Item]) -> int:
        (one, at, first), (two, _, second) = rows
        return native([(two, at, first), (one, at, second)])

    _decoding(monkeypatch, swapped)
    assert batch_of_several.run(bench(arch)).verdict is Verdict.WRONG


def test_a_batch_that_is_not_decoded_tells_nothing(
    bench: Callable[[str], Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    _decoding(monkeypatch, lambda native, rows: 1)
    with pytest.raises(RuntimeError, match="llama_decode returned 1 for a batch of 2 sequences"):
        batch_of_several.run(bench("llama"))
