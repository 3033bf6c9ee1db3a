"""Drafts (speculative decoding): the same text in fewer batches, guessed from the text or by a second model.

Run: python examples/drafts.py model.gguf [small.gguf]

The length of drafts is chosen at run time. With a tiny model drafts save no time, and none is made.
"""

import sys

from llamahybrid import Llama, ModelDraft  # before llama_cpp: chooses the engine that llama_cpp loads

# isort: split
from llama_cpp.llama_speculative import LlamaDraftModel, LlamaPromptLookupDecoding

POEM = "The river bends, the river sings, the river carries golden things. "
PROMPT = f"Repeat this poem without a change. {POEM * 3}\nThe poem: {POEM}"


def answer(model: str, draft: LlamaDraftModel | None) -> str:
    """Return the answer's text; print the batches and the share of accepted drafts."""
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
    """Answer without drafts, with drafts from the prompt, and with those of a second model."""
    plain = answer(model, None)
    looked_up = answer(model, LlamaPromptLookupDecoding(num_pred_tokens=10))
    with_model = answer(model, ModelDraft(Llama(small, n_ctx=2048, verbose=False), num_pred_tokens=8))
    print("the same text each time" if plain == looked_up == with_model else "the texts differ")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[-1])  # a small model with the same vocabulary; itself, to try it out
