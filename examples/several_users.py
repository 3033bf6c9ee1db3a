"""Several users, one model: threads take turns, and each conversation finds its state again.

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
    """Hold one guest's conversation, in a thread of its own; return how much of each prompt was reused."""
    messages = [{"role": "system", "content": RULES}]
    with llm.request() as handle:  # collects the reports of all requests made in the block
        for said in GUESTS[name]:
            messages.append({"role": "user", "content": said})
            answer = llm.create_chat_completion(messages, max_tokens=24, temperature=0)
            messages.append(answer["choices"][0]["message"])
    return f"{name}: " + ", ".join(f"{r.cached} of {r.total} tokens reused" for r in handle.reports)


def main(model: str) -> None:
    """Hold three conversations at once, which share the state of the system prompt."""
    llm = Llama(model, n_ctx=4096, verbose=False, prompt_cache=PromptCache(ram_bytes=1 << 30))
    llm.warm([{"role": "system", "content": RULES}])  # decoded before the first guest asks
    with ThreadPoolExecutor() as pool:
        for line in pool.map(lambda name: talk(llm, name), GUESTS):
            print(line)
    llm.close()


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(sys.argv[1])
