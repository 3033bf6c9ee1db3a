"""Drafts (speculative decoding): the same text in fewer batches, guessed from the text or by a second model.

Run: python examples/drafts.py model.gguf [small.gguf]

How long guesses are is found out while running; where none can pay, as with a tiny model, none is made.
"""

import sys

from llamahybrid import Llama, ModelDraft  # before llama_cpp: it decides which engine that loads

# isort: split
from llama_cpp.llama_speculative import LlamaDraftModel, LlamaPromptLookupDecoding

POEM = "The river bends, the river sings, the river carries golden things. "
PROMPT = f"Repeat this poem without a change. {POEM * 3}\nThe poem: {POEM}"


def answer(model: str, draft: LlamaDraftModel | None) -> str:
    """The answer's text; prints what the drafts were worth."""
    llm = Llama(model, n_ctx=2048, verbose=False, draft_model=draft)
    text: str = llm.create_completion(PROMPT, max_tokens=96, temperature=0)["choices"][0]["text"]
    request = llm.last_request
    name = type(draft).__name__ if draft else "no draft"
    print(
        f"{name}: {request.generated} tokens in {request.steps} batches, "
        f"{request.accepted} of {request.drafted} guesses right"
    )
    llm.close()
    return text


def main(model: str, small: str) -> None:
    """The same answer without drafts, guessed from the prompt, and guessed by a second model."""
    plain = answer(model, None)
    looked_up = answer(model, LlamaPromptLookupDecoding(num_pred_tokens=10))
    with_model = answer(model, ModelDraft(Llama(small, n_ctx=2048, verbose=False), num_pred_tokens=8))
    print("the same text each time" if plain == looked_up == with_model else "the texts differ")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[-1])  # a small model with the same vocabulary; itself, to try it out
