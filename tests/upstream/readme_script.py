"""A user's script, written for llama-cpp-python: one call after another of what its README shows.

Usage: python readme_script.py MODELS OUT. MODELS is a JSON file, kind -> GGUF path; OUT receives every
result as JSON, without what differs from run to run (ids, times). Requests are seeded or greedy.
"""

import json
import pickle
import sys
from itertools import islice
from pathlib import Path

import numpy as np
from llama_cpp import Llama, LlamaGrammar, LlamaRAMCache, LogitsProcessorList, StoppingCriteriaList
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

models = json.loads(Path(sys.argv[1]).read_text())
results = {}
common = {"n_ctx": 1024, "n_threads": 1, "n_threads_batch": 1, "verbose": False, "seed": 7}


def keep(name, value):
    """Store a result; what is new each time goes, and what was cached (an extension) with it."""
    if isinstance(value, dict):
        value = {k: v for k, v in value.items() if k not in ("id", "created")}
        if "usage" in value:
            value["usage"] = {k: v for k, v in value["usage"].items() if not k.endswith("_details")}
    assert name not in results
    results[name] = value


def text_of(chunks):
    """The pieces of a streamed chat, joined."""
    return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)


for kind in ("hybrid", "recurrent", "plain"):
    llm = Llama(model_path=models[kind], **common)

    # Completion
    question = "Q: Name the planets in the solar system? A: "
    keep(f"{kind} completion", llm(question, max_tokens=24, stop=["Q:", "\n"], echo=True, seed=3))
    keep(f"{kind} greedy", llm.create_completion(question, max_tokens=24, temperature=0))
    keep(f"{kind} again", llm.create_completion(question, max_tokens=24, temperature=0))
    keep(f"{kind} seeded", llm.create_completion(question, max_tokens=24, temperature=0.9, seed=11))
    pieces = [chunk["choices"][0]["text"] for chunk in llm(question, max_tokens=24, stream=True, seed=5)]
    keep(f"{kind} stream", pieces)
    keep(
        f"{kind} penalties",
        llm(question, max_tokens=24, seed=5, repeat_penalty=1.2, frequency_penalty=0.3, presence_penalty=0.1),
    )
    keep(f"{kind} mirostat", llm(question, max_tokens=24, seed=5, mirostat_mode=2))
    keep(f"{kind} bias", llm(question, max_tokens=8, temperature=0, logit_bias={"65": 50.0}))

    # Chat
    chat = [
        {"role": "system", "content": "You are an assistant who perfectly describes images."},
        {"role": "user", "content": "Describe this city in detail please."},
    ]
    first = llm.create_chat_completion(messages=chat, max_tokens=24, temperature=0)
    keep(f"{kind} chat", first)
    chat += [first["choices"][0]["message"], {"role": "user", "content": "Shorter."}]
    keep(f"{kind} chat, second turn", llm.create_chat_completion(messages=chat, max_tokens=24, seed=9))
    keep(
        f"{kind} chat stream",
        text_of(llm.create_chat_completion(messages=chat, max_tokens=24, temperature=0, stream=True)),
    )
    edited = [chat[0], {"role": "user", "content": "Describe that village instead."}]
    keep(f"{kind} chat edited", llm.create_chat_completion(messages=edited, max_tokens=24, temperature=0))

    # JSON and JSON schema
    keep(
        f"{kind} json",
        llm.create_chat_completion(
            messages=edited, response_format={"type": "json_object"}, max_tokens=30, temperature=0.7, seed=2
        ),
    )
    schema = {
        "type": "object",
        "properties": {"team": {"enum": ["red", "blue"]}, "ready": {"type": "boolean"}},
        "required": ["team", "ready"],
    }
    keep(
        f"{kind} json schema",
        llm.create_chat_completion(
            messages=edited,
            response_format={"type": "json_object", "schema": schema},
            max_tokens=60,
            temperature=0.7,
            seed=2,
        ),
    )

    # Grammar, processors, criteria
    grammar = LlamaGrammar.from_string('root ::= "yes" | "no" | "perhaps"', verbose=False)
    keep(f"{kind} grammar", llm(question, grammar=grammar, max_tokens=12, temperature=0.8, seed=4))

    def only_letters(input_ids, scores):
        allowed = np.full_like(scores, -np.inf)
        allowed[97:123] = scores[97:123]
        return allowed

    keep(
        f"{kind} processor",
        llm(question, logits_processor=LogitsProcessorList([only_letters]), max_tokens=12, temperature=0),
    )
    short = StoppingCriteriaList([lambda ids, logits: len(ids) > 60])
    keep(f"{kind} criteria", llm(question, stopping_criteria=short, max_tokens=40, temperature=0))

    # State and caches
    llm.reset()
    llm.eval(llm.tokenize(b"The story so far."))
    state = llm.save_state()
    keep(f"{kind} after save", llm("The story so far. And then", max_tokens=12, temperature=0))
    llm.load_state(state)
    keep(f"{kind} loaded tokens", llm.input_ids[: llm.n_tokens].tolist())
    keep(f"{kind} after load", llm("The story so far. But", max_tokens=12, temperature=0))
    llm.set_cache(LlamaRAMCache(capacity_bytes=64 << 20))
    for turn in ("one", "two", "one"):
        name = f"{kind} RAM cache {turn} {len(results)}"
        keep(name, llm(f"Counting: {turn}", max_tokens=8, temperature=0))
    llm.set_cache(None)

    # Low level
    tokens = llm.tokenize(b"Hello, world!")
    keep(
        f"{kind} tokens",
        [tokens, llm.detokenize(tokens).decode(), llm.token_eos(), llm.n_vocab(), llm.n_ctx()],
    )
    keep(f"{kind} generate", list(islice(llm.generate(tokens, top_k=40, top_p=0.95, temp=0.0), 10)))
    keep(f"{kind} generate on", list(islice(llm.generate(tokens[:3], temp=0.0, reset=False), 5)))
    llm.reset()
    llm.eval(tokens)
    sampled = [llm.sample(temp=0.0)]
    for _ in range(5):
        llm.eval(sampled[-1:])
        sampled.append(llm.sample(temp=0.0))
    keep(f"{kind} sample", [sampled, llm.n_tokens])

    # A copy through pickle answers alike
    with_state = pickle.loads(pickle.dumps(llm))
    keep(f"{kind} pickled", with_state(question, max_tokens=12, temperature=0))
    with_state.close()
    llm.close()

    # Log probabilities
    llm = Llama(model_path=models[kind], logits_all=True, **common)
    for turn in ("first", "second"):
        keep(
            f"{kind} logprobs {turn}",
            llm("The quick brown fox", max_tokens=6, logprobs=3, echo=True, temperature=0),
        )
    keep(
        f"{kind} chat logprobs",
        llm.create_chat_completion(
            messages=edited, logprobs=True, top_logprobs=2, max_tokens=6, temperature=0
        ),
    )
    llm.close()

# Function calling
tools = [
    {
        "type": "function",
        "function": {
            "name": "UserDetail",
            "parameters": {
                "type": "object",
                "properties": {"name": {"enum": ["Jason", "Kim"]}, "adult": {"type": "boolean"}},
                "required": ["name", "adult"],
            },
        },
    }
]
llm = Llama(model_path=models["hybrid"], chat_format="chatml-function-calling", **common)
keep(
    "function call",
    llm.create_chat_completion(
        messages=[{"role": "user", "content": "Extract Jason is 25 years old"}],
        tools=tools,
        tool_choice={"type": "function", "function": {"name": "UserDetail"}},
        max_tokens=60,
        seed=6,
    )["choices"][0]["message"]["tool_calls"][0]["function"],
)
llm.close()

# Speculative decoding
draft = LlamaPromptLookupDecoding(num_pred_tokens=4)
llm = Llama(model_path=models["plain"], draft_model=draft, **common)
keep("speculative", llm("one two one two one two one", max_tokens=32, temperature=0))
llm.close()

# Embeddings
llm = Llama(model_path=models["embedding"], embedding=True, **{**common, "n_ctx": 128, "n_batch": 128})
keep("embedding", llm.create_embedding("Hello, world!"))
keep("embeddings", llm.create_embedding(["Hello", "Goodbye"]))
llm.close()
llm = Llama(model_path=models["hybrid"], embedding=True, **{**common, "n_batch": 128})
keep("token embeddings", llm.embed("Hello, world!"))
llm.close()

Path(sys.argv[2]).write_text(json.dumps(results, default=float))
