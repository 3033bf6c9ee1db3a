"""Swap the import, keep the code: a chat that decodes only the new part of each prompt.

Run: python examples/drop_in.py model.gguf
"""

import sys

from llamahybrid import Llama  # was: from llama_cpp import Llama

QUESTIONS = ("Which rivers flow through Vienna?", "And through Graz?", "Which of them is the longest?")


def main(model: str) -> None:
    """Ask three questions and print the number of prompt tokens decoded for each."""
    llm = Llama(model, n_ctx=4096, verbose=False)
    messages = [{"role": "system", "content": "You are a geography teacher. Answer in one sentence."}]
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        answer = llm.create_chat_completion(messages, max_tokens=64, temperature=0)
        messages.append(answer["choices"][0]["message"])

        request = llm.last_request
        print(f"{question} {request.left} of {request.total} prompt tokens decoded: {request.reason}")
    llm.close()


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(sys.argv[1])
