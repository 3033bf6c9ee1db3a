"""From a request's body to the arguments of `create_completion` and `create_chat_completion`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import llama_cpp
import numpy as np
import numpy.typing as npt
from llama_cpp.llama_chat_format import _grammar_for_response_format

from llamahybrid.client import json_schema
from llamahybrid.client.model_markers import markers_of
from llamahybrid.llama import Llama
from llamahybrid.server.bodies import CacheOptions, ChatCompletionRequest, CompletionRequest
from llamahybrid.server.errors import bad
from llamahybrid.server.messages import require_readable, with_mappings, with_thoughts
from llamahybrid.server.options import ReadingOptions, SamplingOptions, TemplateOptions
from llamahybrid.server.thinking import ContinuationOptions, ThinkingOptions, goes_on

Logits = npt.NDArray[np.single]

NEVER = -1e30
"""Added to a logit: what has it is sampled only where all else is forbidden."""

LARGEST_BIAS = 1e9

UNSTREAMED = ("functionary", "functionary-v1")
"""Chat formats that end on an assertion where they are to stream calls of tools (llama_chat_format.py,
functionary_chat_handler and functionary_v1_v2_chat_handler: "TODO: support stream mode")."""

_ends: WeakKeyDictionary[Llama, list[int]] = WeakKeyDictionary()

_OURS = {"best_of", "logit_bias_type", "user", "min_tokens", "add_special_tokens", *CacheOptions.model_fields}
_OURS |= {*SamplingOptions.model_fields, *TemplateOptions.model_fields, *ReadingOptions.model_fields}
_OURS |= {*ThinkingOptions.model_fields, *ContinuationOptions.model_fields}
_OURS -= {"typical_p"}
"""Fields of a request that are no arguments."""


def arguments(llm: Llama, body: CompletionRequest | ChatCompletionRequest, alias: str) -> dict[str, Any]:
    """The arguments. Raises Refusal for those that make no sense to this model."""
    options: dict[str, Any] = body.model_dump(include=set(type(body).model_fields) - _OURS)
    options["model"] = alias
    options["stop"] = [stop for stop in _listed(body.stop) if stop]  # an empty one says nothing
    for name in ("presence_penalty", "frequency_penalty"):  # null to OpenAI, a number to upstream
        options[name] = options[name] or 0.0
    if isinstance(body, CompletionRequest):
        options["prompt"] = prompt = body.prompts()[0]
        if not isinstance(prompt, str) and any(not 0 <= token < llm.n_vocab() for token in prompt):
            raise bad(f"token ids lie in [0, {llm.n_vocab()})", "prompt")
        if isinstance(prompt, str) and not body.add_special_tokens:
            options["prompt"] = llm.tokenize(prompt.encode("utf-8"), add_bos=False, special=True)
        if body.echo and body.max_tokens == 0:  # the prompt's scores alone, as vLLM's
            options["max_tokens"] = 1
        form: Any = options.pop("response_format") or {}
        if form.get("type") == "json_object":
            if form.get("schema") is not None:
                require_grammar(form["schema"], "response_format")
            schema = json_schema.schema_of({"response_format": form})
            followed = schema is not None and json_schema.available()
            options["grammar"] = (
                json_schema.SchemaGrammar(schema)
                if followed
                else _grammar_for_response_format(form, verbose=False)
            )
    else:
        require_readable(llm, body.messages)
        if any(message.get("tool_calls") for message in body.messages) and markers_of(llm).mapping:
            options["messages"] = with_mappings(options["messages"])
        if any(message.get("reasoning_content") for message in body.messages):
            rest = [options["messages"].pop()] if goes_on(llm, body) else []
            options["messages"] = [*with_thoughts(options["messages"], markers_of(llm).taken), *rest]
        if body.logprobs and body.top_logprobs is None:  # upstream gives none then
            options["top_logprobs"] = 0
        if body.tool_choice == "required":  # no format of upstream's makes the model choose
            options["tool_choice"] = the_only_tool(body)
        require_followed(body)
        require_streamed(llm, body)
    if body.logit_bias is not None:
        options["logit_bias"] = biases(llm, body)
    if body.grammar is not None:
        options["grammar"] = llama_cpp.LlamaGrammar.from_string(body.grammar, verbose=False)
    if processors := processors_of(llm, body):
        options["logits_processor"] = llama_cpp.LogitsProcessorList(processors)
    return options


def processors_of(llm: Llama, body: CompletionRequest | ChatCompletionRequest) -> list[Any]:
    """What forbids tokens."""
    made = list[Any]()
    if body.allowed_token_ids is not None:
        made.append(Only(body.allowed_token_ids))
    least = llm.n_ctx() if body.ignore_eos else 0
    if least or body.min_tokens > 0:
        ends = ends_of(llm) if body.min_tokens <= 0 else [*ends_of(llm), *body.stop_token_ids]
        made.append(AtLeast(max(least, body.min_tokens), ends))
    return made


def _listed(stop: str | list[str] | None) -> list[str]:
    return [stop] if isinstance(stop, str) else stop or []


def the_only_tool(body: ChatCompletionRequest) -> dict[str, Any]:
    """The choice of the tool there is. Raises Refusal where there is none, or several."""
    tools: list[Any] = body.tools or []
    if not tools:
        raise bad("there are no tools to choose from", "tool_choice")
    if len(tools) > 1:
        raise bad('"required" is for one tool here; of several, name one', "tool_choice")
    return {"type": "function", "function": {"name": tools[0]["function"]["name"]}}


def require_followed(body: ChatCompletionRequest) -> None:
    """Raise Refusal for a form that answers would not have: upstream takes any JSON, or any text, instead."""
    form: Any = body.response_format or {}
    if form.get("type") == "json_object" and form.get("schema") is not None:
        require_grammar(form["schema"], "response_format")
    choice: Any = the_only_tool(body) if body.tool_choice == "required" else body.tool_choice
    if isinstance(body.function_call, dict):
        choice = {"function": body.function_call}
    if isinstance(choice, dict):
        name = choice["function"]["name"]
        functions: list[Any] = [tool["function"] for tool in body.tools or ()] + list(body.functions or ())
        chosen = next((function for function in functions if function["name"] == name), None)
        if chosen is None:
            raise bad(f"there is no tool named {name!r}", "tool_choice")
        require_grammar(chosen["parameters"], "tools")


def require_streamed(llm: Llama, body: ChatCompletionRequest) -> None:
    """Raise Refusal for a stream that upstream's format does not make: it decodes the answer, then fails."""
    chosen = body.function_call if body.tool_choice is None else body.tool_choice
    plain = chosen == "none" and llm.chat_format == "functionary-v1"  # it streams what calls no tool
    if body.stream and (body.tools or body.functions) and llm.chat_format in UNSTREAMED and not plain:
        why = f"llama-cpp-python's chat format {llm.chat_format} does not stream answers that may call tools"
        raise bad(f"{why}; ask without stream", "stream")


def require_grammar(schema: Any, where: str) -> None:
    """Raise Refusal for a JSON schema that answers could break."""
    try:
        json_schema.compiled(schema)
    except ValueError as error:
        raise bad(f"this JSON schema cannot be followed: {str(error)[:500]}", where) from None


def biases(llm: Llama, body: CompletionRequest | ChatCompletionRequest) -> dict[int, float]:
    """What is added to which logits. Raises Refusal for tokens there are not."""
    told: dict[int, float] = {}
    for name, bias in (body.logit_bias or {}).items():
        if abs(bias) > LARGEST_BIAS:
            raise bad(f"a bias lies within {LARGEST_BIAS:g}, not {bias:g}", "logit_bias")
        if body.logit_bias_type == "tokens":
            tokens = llm.tokenize(name.encode("utf-8"), add_bos=False, special=True)
        else:
            tokens = [int(name)] if name.isascii() and name.isdecimal() and len(name) < 10 else [-1]
        if any(not 0 <= token < llm.n_vocab() for token in tokens):
            raise bad(f"{name!r} is no token id: they lie in [0, {llm.n_vocab()})", "logit_bias")
        told.update(dict.fromkeys(tokens, bias))
    return told


def ends_of(llm: Llama) -> list[int]:
    """The tokens that end an answer: most chat models have several."""
    found = _ends.get(llm)
    if found is None:
        vocab = llm._model.vocab
        found = [token for token in range(llm.n_vocab()) if llama_cpp.llama_vocab_is_eog(vocab, token)]
        _ends[llm] = found
    return found


class Only:
    """Forbids all tokens but some."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = np.array(tokens, dtype=np.intp)

    def __call__(self, ids: npt.NDArray[np.intc], scores: Logits) -> Logits:
        """`scores`, shape (n_vocab,), with what may come next."""
        allowed: Logits = scores + np.single(NEVER)
        allowed[self._tokens] = scores[self._tokens]
        return allowed


class AtLeast:
    """Keeps an answer from ending before it has so many tokens; one object serves several answers.

    Upstream's counts one prompt and forbids one end, for good: with a grammar that wants nothing else all
    tokens are forbidden then.
    """

    def __init__(self, tokens: int, ends: Sequence[int]) -> None:
        self._tokens = tokens
        self._ends = list(ends)
        self._prompt: int | None = None

    def __call__(self, ids: npt.NDArray[np.intc], scores: Logits) -> Logits:
        """`scores`, shape (n_vocab,), with what may come next."""
        if self._prompt is None or len(ids) < self._prompt:
            self._prompt = len(ids)
        if len(ids) - self._prompt < self._tokens:
            scores = np.array(scores)
            scores[self._ends] += NEVER
        return scores
