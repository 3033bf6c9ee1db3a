"""Your own prompts on stock llama-cpp-python and on llamahybrid, in one run: texts, tokens decoded, time.

Run: python examples/regression_test.py model.gguf

Exit status 1 if a text differs or a request decodes more than on stock: made for a CI job.
"""

import sys
from pathlib import Path

from llamahybrid.evaluate.compare import Comparer
from llamahybrid.evaluate.conversation import Conversation, Request
from llamahybrid.evaluate.speech import Speech
from llamahybrid.evaluate.workloads import Workload

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
    comparison = Comparer(Path(model)).run(workload)
    stock, ours = comparison.stock, comparison.ours
    worse = 0
    for number, (theirs, our) in enumerate(zip(stock.records, ours.records, strict=True), 1):
        print(f"request {number}: prompt {len(our.prompt)}, decoded {theirs.decoded} and {our.decoded}")
        worse += our.decoded > theirs.decoded
    print(f"decoded in all: stock {stock.decoded}, ours {ours.decoded}, the least possible {ours.least}")
    print(f"seconds: stock {stock.seconds:.2f}, ours {ours.seconds:.2f}")
    print("texts equal" if comparison.texts_equal else "TEXTS DIFFER")
    return int(worse > 0 or not comparison.texts_equal)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
