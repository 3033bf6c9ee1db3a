"""Your own prompts on stock llama-cpp-python and on llamahybrid, in one run: texts, tokens decoded, time.

Run: python examples/regression_test.py model.gguf

Exit status 1 if a text differs or a request decodes more than on stock: made for a CI job.
"""

import sys
from pathlib import Path

from llamahybrid.harness.check import Check, model_file
from llamahybrid.harness.conversation import Conversation, Request
from llamahybrid.harness.targets.choice import targets
from llamahybrid.harness.workloads.speech import Speech
from llamahybrid.harness.workloads.tokens import Workload

SYSTEM = "You are the help desk of a library. Members may borrow ten books for four weeks. " * 5
QUESTIONS = ("How long may I keep a book?", "May I renew it?", "What if I lose it?", "Thank you. Sum it up.")


def help_desk(_: Speech) -> Conversation:
    """A conversation as your program has it: each request is built from the answers before."""
    messages = [{"role": "system", "content": SYSTEM}]
    for question in QUESTIONS:
        messages = [*messages, {"role": "user", "content": question}]
        answer = yield Request(max_tokens=48, messages=messages)
        messages = [*messages, {"role": "assistant", "content": answer.text(start=16)}]  # thinking stripped


def main(model: str) -> int:
    """Run the workload on both, greedily; print the decoded tokens of each request."""
    workload = Workload("help desk", help_desk, n_ctx=4096, measured_from=0, template=True)
    file = model_file("model", Path(model))
    report = Check(targets(["stock", "ours"]), [file], [workload], probes=False).run()
    if errors := [target.error for target in report.targets if target.error]:
        raise SystemExit("; ".join(errors))
    stock, ours = (target.workloads[0] for target in report.targets)
    worse = different = 0
    for number, (theirs, our) in enumerate(zip(stock.requests, ours.requests, strict=True), 1):
        print(f"request {number}: prompt {our.total}, decoded {theirs.decoded} and {our.decoded}")
        worse += our.decoded > theirs.decoded
        different += our.text_hash != theirs.text_hash
    print(f"decoded in all: stock {stock.decoded}, ours {ours.decoded}, the least possible {ours.least}")
    seconds = [sum(request.seconds for request in side.requests) for side in (stock, ours)]
    print("seconds: stock {:.2f}, ours {:.2f}".format(*seconds))
    print("texts equal" if not different else "TEXTS DIFFER")
    return int(bool(worse or different))


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1]))
