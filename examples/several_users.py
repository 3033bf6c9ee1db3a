"""Several users, one model: threads take turns, each finds the state of its own conversation again.

Run: python examples/several_users.py model.gguf
"""

import sys
from concurrent.futures import ThreadPoolExecutor

from llamahybrid import Llama, PromptCache

RULES = "You advise guests of a hotel by a lake. Be brief, be kind, and never invent opening hours. " * 4
GUESTS = {
    "Ada": ("When does the boat leave?", "And the last one back?"),
    "Ben": ("Is there a vegetarian menu?", "What is for dessert?"),
    "Cleo": ("My room is cold.", "It is number twelve."),
}


def talk(llm: Llama, name: str) -> str:
    """One guest's conversation, in a thread of its own; what was reused for it."""
    messages = [{"role": "system", "content": RULES}]
    with llm.request() as handle:  # the requests that are made in here, and nobody else's
        for said in GUESTS[name]:
            messages.append({"role": "user", "content": said})
            answer = llm.create_chat_completion(messages, max_tokens=24, temperature=0)
            messages.append(answer["choices"][0]["message"])
    # not `llm.last_request`: that may be another guest's by now
    return f"{name}: " + ", ".join(f"{r.cached} of {r.total} tokens reused" for r in handle.reports)


def main(model: str) -> None:
    """Three conversations at once; all of them share the state of the system prompt."""
    llm = Llama(model, n_ctx=4096, verbose=False, prompt_cache=PromptCache(ram_bytes=1 << 30))
    llm.warm([{"role": "system", "content": RULES}])  # so that the first guest need not wait for it
    with ThreadPoolExecutor() as pool:
        for line in pool.map(lambda name: talk(llm, name), GUESTS):
            print(line)
    llm.close()


if __name__ == "__main__":
    main(sys.argv[1])
