"""Tiny models with another chat template or name, or with a BOS before each text."""

from __future__ import annotations

import re
import struct
from pathlib import Path

from llamahybrid.tiny.vocab import CHAT_TEMPLATE

SWITCHED_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{{ '<|im_start|>assistant\\n<think>\\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '\\n</think>\\n\\n' }}{% endif %}"
)
"""Closes the thought at once where `enable_thinking` is false."""

_ADD_BOS = b"tokenizer.ggml.add_bos_token" + struct.pack("<I", 7)  # a bool (gguf.h)


def with_template(model: Path, out: Path, template: str = SWITCHED_TEMPLATE) -> Path:
    """Write the model to `out` with this chat template, at most as long as the tiny models' own."""
    old, data = CHAT_TEMPLATE.encode(), model.read_bytes()
    filled = template.encode() + b"{#" + b"-" * (len(old) - len(template.encode()) - 4) + b"#}"
    assert data.count(old) == 1
    assert len(filled) == len(old)
    out.write_bytes(data.replace(old, filled))
    return out


def with_control_marks(model: Path, out: Path) -> Path:
    """Write the model to `out` with marks of thinking and calls that are control tokens: no text has them."""
    data = model.read_bytes()
    types, control = (struct.pack("<7i", *[3] * 3, *[kind] * 4) for kind in (4, 3))  # llama_token_type
    assert data.count(types) == 1
    out.write_bytes(data.replace(types, control))
    return out


def with_bos(model: Path, out: Path) -> Path:
    """Write the model to `out` with a tokenizer that begins each text with a BOS."""
    data = model.read_bytes()
    assert data.count(_ADD_BOS + b"\0") == 1
    out.write_bytes(data.replace(_ADD_BOS + b"\0", _ADD_BOS + b"\1"))
    return out


def with_name(model: Path, out: Path, name: str) -> Path:
    """Write the model to `out` with this name, filled up with spaces."""
    data = model.read_bytes()
    (old,) = re.findall(rb"general\.name.{12}(tiny [\w-]+)", data, re.DOTALL)
    out.write_bytes(data.replace(old, name.encode().ljust(len(old)), 1))
    return out
