"""`make demo`: an eight-turn chat whose thinking leaves the history, on stock and on ours, turn by turn."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from llamahybrid.harness.ab_test import Comparer, Comparison
from llamahybrid.harness.conversation import Conversation, Message, Request
from llamahybrid.harness.oracle import least_decodes
from llamahybrid.harness.tables import machine, milliseconds, table_of, yes
from llamahybrid.harness.workloads.speech import Speech
from llamahybrid.harness.workloads.tokens import Workload
from llamahybrid.tiny import make

_SYSTEM = """\
You are the guide of a small lighthouse museum. The tower was finished in 1878, stands 31 metres high and has
154 steps. Its first lamp burned colza oil, later paraffin; electric light came in 1932, and since 1986 nobody
has lived there. The lens is a first-order Fresnel lens by Barbier of Paris, turned by a clockwork that had to
be wound every four hours. The museum opens from April to October, Tuesday to Sunday, ten to five; groups of
more than twelve should write a week ahead. Answer briefly, say so when you do not know, and never invent
figures. Visitors ask about the keepers most of all: there were always three, and their logbooks are kept in
the old oil store, where they may be read on request. Photographs are welcome, drones are not."""

_QUESTIONS = (
    "When was the tower built, and how high is it?",
    "How did the lamp work before there was electricity?",
    "Who wound the clockwork at night?",
    "My children are four and seven. Can they manage the stairs?",
    "What did a keeper's day look like in winter?",
    "Is there anything left of the old logbooks?",
    "We would be fifteen people on a Sunday in May. What should we do?",
    "Please sum up what I need to know for our visit.",
)
_THINKING, _ANSWER = 64, 32
_ONE_THREAD = {"n_threads": 1, "n_threads_batch": 1}
"""Threads that wait for each other would make times on a busy machine meaningless."""


def museum_chat(speech: Speech) -> Conversation:
    """Eight questions; of each answer the first 64 tokens are thinking, which a client does not send back."""
    del speech
    messages: list[Message] = [{"role": "system", "content": _SYSTEM}]
    for question in _QUESTIONS:
        messages.append({"role": "user", "content": question})
        answer = yield Request(_THINKING + _ANSWER, messages=messages)
        messages.append({"role": "assistant", "content": answer.text(_THINKING)})


DEMO = Workload("eight-turn chat", museum_chat, measured_from=0, template=True)


def turn_table(comparison: Comparison) -> Table:
    """Turn by turn: prompt, tokens decoded by each, time to the first token of each, texts equal."""
    title = "a chat with thinking stripped from history, Qwen3.5 architecture and template"
    numbers = "prompt", "least", "stock decoded", "ours decoded", "stock TTFT ms", "ours TTFT ms"
    table = table_of(title, "turn", *numbers, "texts equal")
    pairs = zip(comparison.stock.records, comparison.ours.records, strict=True)
    for turn, (least, (stock, ours)) in enumerate(
        zip(least_decodes(comparison.ours.records), pairs, strict=True), 1
    ):
        table.add_row(
            str(turn),
            str(len(ours.prompt)),
            str(least),
            str(stock.decoded),
            str(ours.decoded),
            milliseconds(stock.first_token_seconds),
            milliseconds(ours.first_token_seconds),
            yes(stock.generated == ours.generated),
        )
    return table


def summary(comparison: Comparison) -> str:
    """Totals and ratios in one line."""
    stock, ours = comparison.stock, comparison.ours
    first = [sum(record.first_token_seconds for record in side.records) for side in (stock, ours)]
    return (
        f"decoded: stock {stock.decoded:,} ({stock.ratio:.2f} of the least), "
        f"ours {ours.decoded:,} ({ours.ratio:.2f}); "
        f"waiting for first tokens: {milliseconds(first[0])} ms, {milliseconds(first[1])} ms "
        f"({first[0] / first[1]:.1f} times faster)"
    )


def holds(comparison: Comparison) -> bool:
    """The texts are equal and no turn decodes more than stock does."""
    pairs = zip(comparison.stock.records, comparison.ours.records, strict=True)
    return comparison.texts_equal and all(ours.decoded <= stock.decoded for stock, ours in pairs)


def main() -> int:
    """Make the model, run the chat on both, print; 0 if the promise holds."""
    console = Console()
    making = console.status("making a model with Qwen3.5's architecture, vocabulary and template")
    with tempfile.TemporaryDirectory(prefix="llamahybrid-demo-") as folder, making as status:
        model = make("qwen35", Path(folder) / "qwen35.gguf", vocab="qwen35", params=90_000_000)
        comparison = Comparer(model, _ONE_THREAD, status.update).run(DEMO)
    console.print(turn_table(comparison))
    console.print(summary(comparison))
    console.print(machine(), style="dim")
    return 0 if holds(comparison) else 1


if __name__ == "__main__":
    sys.exit(main())
