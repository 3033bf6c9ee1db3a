"""`make demo`: a chat whose thinking leaves the history, on stock and on llamahybrid, turn by turn.

Exit status 0 if the answers are the same and no turn decodes more than stock.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.figures import machine, milliseconds
from llamahybrid.harness.check import Check
from llamahybrid.harness.conversation import Conversation, Message, Request
from llamahybrid.harness.report import Report
from llamahybrid.harness.targets.base import ModelFile
from llamahybrid.harness.targets.choice import targets
from llamahybrid.harness.workloads.speech import Speech
from llamahybrid.harness.workloads.tokens import Workload
from llamahybrid.tiny import make

SYSTEM = """\
You are the guide of a small lighthouse museum. The tower was finished in 1878, stands 31 metres high and has
154 steps. Its first lamp burned colza oil, later paraffin; electric light came in 1932, and since 1986 nobody
has lived there. The lens is a first-order Fresnel lens by Barbier of Paris, turned by a clockwork that had to
be wound every four hours. The museum opens from April to October, Tuesday to Sunday, ten to five; groups of
more than twelve should write a week ahead. Answer briefly, say so when you do not know, and never invent
figures. Visitors ask about the keepers most of all: there were always three, and their logbooks are kept in
the old oil store, where they may be read on request. Photographs are welcome, drones are not."""

QUESTIONS = (
    "When was the tower built, and how high is it?",
    "How did the lamp work before there was electricity?",
    "Who wound the clockwork at night?",
    "My children are four and seven. Can they manage the stairs?",
    "What did a keeper's day look like in winter?",
    "Is there anything left of the old logbooks?",
    "We would be fifteen people on a Sunday in May. What should we do?",
    "Please sum up what I need to know for our visit.",
)
THINKING, ANSWER = 64, 32


def museum_chat(speech: Speech) -> Conversation:
    """Eight questions; the first 64 tokens of each answer are thinking, which a client does not send back."""
    del speech
    messages: list[Message] = [{"role": "system", "content": SYSTEM}]
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        answer = yield Request(THINKING + ANSWER, messages=messages)
        messages.append({"role": "assistant", "content": answer.text(THINKING)})


DEMO = Workload("eight-turn chat", museum_chat, measured_from=0, template=True)


def turn_table(report: Report) -> Table:
    """Turn by turn: prompt, tokens decoded by each, time to the first token of each, texts equal."""
    title = "a chat with thinking stripped from history, Qwen3.5 architecture and template"
    table = Table("turn", title=title)
    numbers = "prompt", "stock decoded", "ours decoded", "stock TTFT ms", "ours TTFT ms"
    for head in (*numbers, "texts equal"):
        table.add_column(head, justify="right")
    stock, ours = (target.workloads[0].requests for target in report.targets)
    for turn, (one, two) in enumerate(zip(stock, ours, strict=True), 1):
        counts = (str(count) for count in (two.total, one.decoded, two.decoded))
        times = (milliseconds(each.ttft or 0) for each in (one, two))
        equal = "[green]yes[/]" if one.text_hash == two.text_hash else "[red]no[/]"
        table.add_row(str(turn), *counts, *times, equal)
    return table


def main() -> int:
    """Make the model, run the chat on both, print."""
    console = Console()
    making = console.status("making a model with Qwen3.5's architecture, vocabulary and template")
    with tempfile.TemporaryDirectory(prefix="llamahybrid-demo-") as folder, making as status:
        path = make("qwen35", Path(folder) / "qwen35.gguf", vocab="qwen35", params=90_000_000)
        model = ModelFile("qwen35", path)  # with one thread, so that times on a busy machine mean something
        check = Check(targets(("stock", "ours")), [model], [DEMO], probes=False)
        check.progress = lambda text, done, of: status.update(text)
        report = check.run()
    if error := next((target.error for target in report.targets if target.error), None):
        console.print(error, style="red")
        return 1
    console.print(turn_table(report))
    stock, ours = (target.workloads[0] for target in report.targets)
    console.print(f"decoded: stock {stock.decoded:,} ({stock.ratio:.2f} times the least possible), ", end="")
    console.print(f"ours {ours.decoded:,} ({ours.ratio:.2f} times)")
    console.print(machine(), style="dim")
    pairs = list(zip(stock.requests, ours.requests, strict=True))
    same = all(one.text_hash == two.text_hash for one, two in pairs)
    return 0 if same and all((two.decoded or 0) <= (one.decoded or 0) for one, two in pairs) else 1


if __name__ == "__main__":
    sys.exit(main())
