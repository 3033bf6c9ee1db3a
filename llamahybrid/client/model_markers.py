"""Model markers: those of an open model, found once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import llama_cpp
from llama_cpp.llama_tokenizer import LlamaTokenizer

from llamahybrid.client.chat_prompt import chat_text
from llamahybrid.client.chat_template import template_of
from llamahybrid.client.markers import Markers
from llamahybrid.client.template_probe import probe

_known: WeakKeyDictionary[Any, Markers] = WeakKeyDictionary()


def markers_of(llm: Any) -> Markers:
    """The markers of an open model. None has a chat format that is no template: it reads its own answers."""
    if template_of(llm) is None:
        return Markers()
    found = _known.get(llm)
    if found is None:

        def render(messages: list[Any], tools: list[Any]) -> str:
            return chat_text(llm, {}, messages=messages, tools=tools)

        found = _known[llm] = probe(render, lambda text: _spelt(llm, text), lambda text: _control(llm, text))
    return found


def begins_thinking(llm: Any, template: Mapping[str, Any]) -> bool:
    """Prompts of a model end with what begins its thinking, with these variables of the template."""
    think = markers_of(llm).think
    if think is None:
        return False
    return (
        chat_text(llm, template, messages=[{"role": "user", "content": "Hi"}]).rstrip().endswith(think.begin)
    )


def _spelt(llm: Any, text: str) -> bool:
    """An answer that holds it has it in its text, where control tokens are spelt if that can be."""
    tokens = llm.tokenize(text.encode("utf-8"), add_bos=False, special=True)
    own = type(llm.tokenizer_) is LlamaTokenizer
    return text in llm.detokenize(tokens, special=own).decode("utf-8", "replace")


def _control(llm: Any, text: str) -> frozenset[int]:
    """The control tokens of a text, which `detokenize` leaves out."""
    vocab, tokens = llm._model.vocab, llm.tokenize(text.encode("utf-8"), add_bos=False, special=True)
    control = llama_cpp.LLAMA_TOKEN_ATTR_CONTROL
    return frozenset(each for each in tokens if llama_cpp.llama_vocab_get_attr(vocab, each) & control)
