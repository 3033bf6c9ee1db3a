"""Vocabularies for tiny models: a byte-level one of our own, and real ones from the sdist."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from llamahybrid.capi.gguf import Gguf, Value

VocabName: TypeAlias = Literal["tiny", "qwen35", "llama-spm", "bert-bge"]
VOCABULARIES: tuple[VocabName, ...] = get_args(VocabName)

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # llama_token_type of llama.h

_SPECIAL = {
    "<|endoftext|>": _CONTROL,
    "<|im_start|>": _CONTROL,
    "<|im_end|>": _CONTROL,
    "<think>": _USER_DEFINED,
    "</think>": _USER_DEFINED,
    "<tool_call>": _USER_DEFINED,
    "</tool_call>": _USER_DEFINED,
}

CHAT_TEMPLATE = """\
{%- macro said(message) -%}
{%- if message.content is string -%}{{ message.content }}
{%- else -%}{%- for part in message.content or [] -%}{{ part.text or '' }}{%- endfor -%}{%- endif -%}
{%- endmacro -%}
{%- set turn = namespace(query=-1) -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}{%- set turn.query = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- set lead = messages and messages[0].role == 'system' -%}
{%- if tools or lead -%}
{{- '<|im_start|>system\\n' -}}
{%- if lead -%}{{ said(messages[0]) }}{%- endif -%}
{%- if tools -%}
{{- '\\nTools you may call:' -}}
{%- for tool in tools -%}{{ '\\n' + tool | tojson }}{%- endfor -%}
{{- '\\nCall one as <tool_call>{"name": ..., "arguments": ...}</tool_call>.' -}}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{%- set text = said(message) -%}
{%- if loop.index0 < turn.query and '</think>' in text -%}
{%- set text = text.split('</think>')[-1].lstrip('\\n') -%}
{%- endif -%}
{{- '<|im_start|>assistant\\n' + text -}}
{%- for call in message.tool_calls or [] -%}
{{- '\\n<tool_call>{"name": ' + call.function.name | tojson + ', "arguments": ' -}}
{%- if call.function.arguments is string -%}{{ call.function.arguments }}
{%- else -%}{{ call.function.arguments | tojson }}{%- endif -%}
{{- '}</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- elif message.role == 'tool' -%}
{{- '<|im_start|>user\\n<tool_response>\\n' + said(message) + '\\n</tool_response><|im_end|>\\n' -}}
{%- elif not (loop.first and lead) -%}
{{- '<|im_start|>' + message.role + '\\n' + said(message) + '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n<think>\\n' }}{%- endif -%}
"""
"""ChatML as in Qwen3: an answer starts inside <think>, and later prompts leave thinking out."""


@dataclass(frozen=True)
class Vocabulary:
    """Tokenizer metadata, and the tokens that a random model should generate."""

    metadata: dict[str, Value]
    likely: npt.NDArray[np.bool_]
    """Shape (n_vocab,). False: tokens that would end or garble a text; their output rows are small."""


def vocabulary(name: VocabName) -> Vocabulary:
    """The vocabulary `name`; all but "tiny" come from the pinned sdist."""
    return _tiny() if name == "tiny" else _upstream(name)


def _byte_tokens() -> list[str]:
    """GPT-2's characters for the 256 bytes: printable ones unchanged, the others from U+0100 on."""
    shown = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = iter(range(0x100, 0x200))
    return [chr(byte if byte in shown else next(hidden)) for byte in range(256)]


def _tiny() -> Vocabulary:
    tokens = [*_byte_tokens(), *_SPECIAL]
    types = np.array([_NORMAL] * 256 + list(_SPECIAL.values()), np.int32)
    likely = np.zeros(len(tokens), np.bool_)
    likely[[*range(ord(" "), ord("~") + 1), ord("\n"), tokens.index("</think>")]] = True
    metadata: dict[str, Value] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.bos_token_id": tokens.index("<|endoftext|>"),
        "tokenizer.ggml.eos_token_id": tokens.index("<|im_end|>"),
        "tokenizer.ggml.padding_token_id": tokens.index("<|endoftext|>"),
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.token_type_count": 2,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }
    return Vocabulary(metadata, likely)


def _upstream(name: VocabName) -> Vocabulary:
    from llamahybrid.engine.sdist import member

    models = "vendor/llama.cpp/models"
    with Gguf(member(f"{models}/ggml-vocab-{name}.gguf")) as source:
        metadata = source.read("tokenizer.")
    if name == "qwen35":
        template = member(f"{models}/templates/Qwen3.5-4B.jinja").read_text(encoding="utf-8")
        metadata |= {"tokenizer.chat_template": template, "tokenizer.ggml.add_bos_token": False}
    types = metadata["tokenizer.ggml.token_type"]
    assert isinstance(types, np.ndarray)
    return Vocabulary(metadata, types == _NORMAL)
