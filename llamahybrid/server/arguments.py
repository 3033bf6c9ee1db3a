"""The arguments of `create_completion` and `create_chat_completion` for a request's body, and its prompt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import llama_cpp
import numpy as np
from llama_cpp.server import types as upstream

from llamahybrid.capi.samplers import TokenBias
from llamahybrid.client import json_schema
from llamahybrid.client.chat_template import Prompt, template_of
from llamahybrid.client.chat_template import chat_prompt as render
from llamahybrid.client.chat_way import Continuing, continuation_of
from llamahybrid.client.markers import markers_of
from llamahybrid.llama import Llama
from llamahybrid.server.bodies import ChatCompletionRequest, CompletionRequest
from llamahybrid.server.errors import bad, require_tokens
from llamahybrid.server.messages import require_readable, with_mappings, with_thoughts
from llamahybrid.server.options import goes_on, template_kwargs
from llamahybrid.server.prompts import PromptRules, prompt_rules

NEVER = -1e30
"""Added to a logit: the token is sampled only if every other is forbidden."""

LARGEST_BIAS = 1e9

UNSTREAMED = ("functionary", "functionary-v1")
"""Chat formats that fail with an assertion if they should stream calls of tools (llama_chat_format.py,
functionary_chat_handler and functionary_v1_v2_chat_handler: "TODO: support stream mode")."""

_ends: WeakKeyDictionary[Llama, list[int]] = WeakKeyDictionary()

_ARGUMENTS = {
    *upstream.CreateCompletionRequest.model_fields,
    *upstream.CreateChatCompletionRequest.model_fields,
}
_ARGUMENTS = _ARGUMENTS - {"best_of", "logit_bias_type", "min_tokens", "user"} | {"typical_p"}
"""Fields of requests that are arguments."""


def arguments(llm: Llama, body: CompletionRequest | ChatCompletionRequest, alias: str) -> dict[str, Any]:
    """Return the arguments. Raises Refusal for fields that this model cannot obey."""
    options: dict[str, Any] = body.model_dump(include=_ARGUMENTS & type(body).model_fields.keys())
    options["model"] = alias
    options["stop"] = [stop for stop in body.stop or () if stop]  # an empty one would end nothing
    for name in ("presence_penalty", "frequency_penalty"):  # null to OpenAI, a number to upstream
        options[name] = options[name] or 0.0
    if isinstance(body, CompletionRequest):
        options["prompt"] = prompt = body.prompts()[0]
        if not isinstance(prompt, str):
            require_tokens(llm.n_vocab(), prompt, "prompt")
        elif not body.add_special_tokens:
            options["prompt"] = llm.tokenize(prompt.encode("utf-8"), add_bos=False, special=True)
        if body.echo and body.max_tokens == 0:  # scores of the prompt only, as vLLM's
            options["max_tokens"] = 1
        form: Any = options.pop("response_format") or {}
        if form.get("type") == "json_object":
            schema = json_schema.schema_of({"response_format": form})
            options["grammar"] = compiled_form(json_schema.SchemaGrammar, schema, "response_format")
    else:
        require_readable(llm, body.messages)
        if llm.chat_handler is None and template_of(llm) is None:  # those formats read each one's content
            options["messages"] = [{"content": None, **message} for message in options["messages"]]
        if any(message.get("tool_calls") for message in body.messages) and markers_of(llm).mapping:
            options["messages"] = with_mappings(options["messages"])
        if any(message.get("reasoning_content") for message in body.messages):
            rest = [options["messages"].pop()] if goes_on(llm, body) else []
            options["messages"] = [*with_thoughts(options["messages"], markers_of(llm).taken), *rest]
        if body.logprobs and body.top_logprobs is None:  # upstream would return none
            options["top_logprobs"] = 0
        if body.tool_choice == "required":  # upstream's formats cannot force a choice
            options["tool_choice"] = the_only_tool(body)
        require_followed(body)
        require_streamed(llm, body)
    if body.logit_bias is not None:
        options["logit_bias"] = biases(llm, body)
    if body.grammar is not None:
        options["grammar"] = llama_cpp.LlamaGrammar.from_string(body.grammar, verbose=False)
    if body.guided_regex is not None:
        options["grammar"] = compiled_form(json_schema.RegexGrammar, body.guided_regex, "guided_regex")
    if never := forbidden(llm, body):
        options["logits_processor"] = llama_cpp.LogitsProcessorList(never)
    return options


def chat_prompt(llm: Llama, body: ChatCompletionRequest) -> Prompt:
    """Return the prompt of a chat.

    Raises Refusal if the format of this model decodes by itself, ContextOverflow for a prompt whose beginning
    alone fills the context, ValueError and what formats raise at messages.
    """
    if llm.chat_handler is not None:
        raise bad("the chat format of this model makes no prompt of text alone", "messages")
    options, template = arguments(llm, body, ""), template_kwargs(llm, body)
    del options["n"]
    token = prompt_rules.set(PromptRules())
    try:
        if not goes_on(llm, body):
            return render(llm, template, **options)
        continuation = continuation_of(llm, options["messages"])
        stand_in: Any = Continuing(llm, continuation)
        prompt = render(stand_in, template, **{**options, "messages": options["messages"][:-1]})
        return Prompt(prompt.text + continuation.after(prompt.text), prompt.tokens)
    finally:
        prompt_rules.reset(token)


def forbidden(llm: Llama, body: CompletionRequest | ChatCompletionRequest) -> list[TokenBias]:
    """Return the tokens that a request forbids, all along or at first.

    An end that a grammar demands is sampled nevertheless, as the only token that is left.
    """
    made = []
    if body.allowed_token_ids is not None:
        others = np.setdiff1d(np.arange(llm.n_vocab()), body.allowed_token_ids)
        made.append(TokenBias(others, NEVER))
    if body.ignore_eos or body.min_tokens > 0:
        ends = ends_of(llm) if body.min_tokens <= 0 else [*ends_of(llm), *body.stop_token_ids]
        made.append(TokenBias(ends, NEVER, None if body.ignore_eos else body.min_tokens))
    return made


def the_only_tool(body: ChatCompletionRequest) -> dict[str, Any]:
    """Return the choice of the only tool. Raises Refusal for none, or several."""
    tools: list[Any] = body.tools or []
    if not tools:
        raise bad("there are no tools to choose from", "tool_choice")
    if len(tools) > 1:
        raise bad('"required" is for one tool here; of several, name one', "tool_choice")
    return {"type": "function", "function": {"name": tools[0]["function"]["name"]}}


def require_followed(body: ChatCompletionRequest) -> None:
    """Raise Refusal for a form that upstream would replace by any JSON, or any text."""
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
    """Raise Refusal for a stream that upstream's chat format cannot make: it fails at the answer's end."""
    chosen = body.function_call if body.tool_choice is None else body.tool_choice
    plain = chosen == "none" and llm.chat_format == "functionary-v1"  # it streams answers without calls
    if body.stream and (body.tools or body.functions) and llm.chat_format in UNSTREAMED and not plain:
        why = f"llama-cpp-python's chat format {llm.chat_format} does not stream answers that may call tools"
        raise bad(f"{why}; ask without stream", "stream")


def require_grammar(schema: Any, where: str) -> None:
    """Raise Refusal for a JSON schema that answers could break."""
    compiled_form(json_schema.compiled, schema, where)


def compiled_form(compile_form: Callable[[Any], Any], form: Any, where: str) -> Any:
    """Return a compiled form of answers. Raises Refusal for one that answers could break."""
    try:
        return compile_form(form)
    except ValueError as error:
        raise bad(f"this form of answers cannot be followed: {str(error)[:500]}", where) from None


def biases(llm: Llama, body: CompletionRequest | ChatCompletionRequest) -> dict[int, float]:
    """Return the bias of each token. Raises Refusal for unknown tokens."""
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
    """Return the tokens that end an answer; most chat models have several."""
    found = _ends.get(llm)
    if found is None:
        vocab = llm._model.vocab
        found = [token for token in range(llm.n_vocab()) if llama_cpp.llama_vocab_is_eog(vocab, token)]
        _ends[llm] = found
    return found
