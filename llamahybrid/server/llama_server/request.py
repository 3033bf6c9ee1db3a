"""Requests of `/completion` and `/infill`, and the completions that they become."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

import llama_cpp
from pydantic import BaseModel, Field

from llamahybrid.llama import Llama
from llamahybrid.server.bodies import CompletionRequest, First, RequestBody, Stops, Text
from llamahybrid.server.errors import Refusal, bad
from llamahybrid.server.llama_server.completion import CompletionFormat
from llamahybrid.server.request_fields import Route

_OFF: dict[str, dict[str, Any]] = {
    "top_k": {"top_k": 0},
    "top_p": {"top_p": 1.0},
    "min_p": {"min_p": 0.0},
    "typ_p": {"typical_p": 1.0},
    "temperature": {"temperature": 1.0},
    "dry": {"dry_multiplier": 0.0},
    "xtc": {"xtc_probability": 0.0},
    "top_n_sigma": {"top_n_sigma": -1.0},
    "penalties": {"repeat_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
}
"""Values that turn off a sampler which `samplers` leaves out."""

_SAME = {"typical_p": "typ_p", "temp": "temperature"}
_IDLE = ("infill",)
"""Unknown samplers that a request may name without effect."""

WINDOW = 2048
"""Most tokens of prefix and suffix if batches are smaller: llama-server's default batch."""

MOST_LETTERS = 32
"""Letters of a token, an upper estimate for cutting texts."""

SNIP = "\n\n--- snip ---\n\n"
"""Between chunks of other files, for a model without a token for it."""


class LlamaServerRequest(RequestBody):
    """Continue a prompt. Options of completions are validated when it becomes one."""

    route: ClassVar = Route.COMPLETION
    answer_format: ClassVar = CompletionFormat

    model: str | None = None
    prompt: Any = ""
    stream: bool = False
    n_predict: int = Field(default=-1, ge=-1, description="-1: to the end; 0: the prompt is only decoded.")
    samplers: Annotated[list[Text], First()] | None = Field(
        default=None, max_length=100, description="Those that are used, in this server's order."
    )
    n_indent: int = Field(default=0, ge=0, description="An answer ends before a line that is indented less.")
    t_max_predict_ms: float = Field(
        default=0, description="After that time an answer of several lines ends; 0: it does not."
    )
    response_fields: Annotated[list[Text], First()] = Field(
        default=[], max_length=1000, description="Only these: content, timings/prompt_n."
    )
    stops: Stops = Field(default=[], alias="stop")

    @classmethod
    def received(cls, said: dict[str, Any]) -> dict[str, Any]:
        """Take `max_tokens` as another name of `n_predict`, which has priority, as in llama-server."""
        return {"n_predict": said.pop("max_tokens", -1), **said}

    def completion(self) -> CompletionRequest:
        """See `RequestBody.completion`."""
        given = {**self.passed(), "model": self.model, "prompt": self.prompt, "stop": self.stops}
        given["n_predict"] = max(1, self.n_predict) if self.n_predict >= 0 else -1
        if self.samplers is not None:
            names = [name.replace("-", "_") for name in self.samplers]
            names = [_SAME.get(name, name) for name in names]
            if unknown := [name for name in names if name not in _OFF and name not in _IDLE]:
                raise ValueError(f"samplers: there is no {unknown[0]!r}")
            for name in _OFF.keys() - set(names):
                given |= _OFF[name]
        made = CompletionRequest.model_validate({**given, "stream": self.stream})
        if len(made.prompts()) > 1:
            raise bad("one prompt at a time; /v1/completions takes several", "prompt")
        return made


class Chunk(BaseModel):
    """A piece of another file."""

    text: str
    filename: Text = "tmp"


class InfillRequest(LlamaServerRequest):
    """Fill in between a prefix and a suffix."""

    route: ClassVar = Route.INFILL

    prompt: str = Field(default="", description="What the answer goes on from, behind the prefix.")
    input_prefix: str
    input_suffix: str
    input_extra: Annotated[list[Chunk], First()] = Field(default=[], max_length=1000)

    def completion(self) -> CompletionRequest:
        """See `LlamaServerRequest.completion`."""
        return super().completion().model_copy(update={"prompt": ""})

    def prepare(self, llm: Llama, body: CompletionRequest) -> None:
        """Set the prompt. Raises Refusal for a model without tokens for it."""
        body.prompt = infill_prompt(llm, self)


def infill_prompt(llm: Llama, asked: InfillRequest) -> list[int]:
    """Return the prompt, as llama-server (server-common.cpp, format_prompt_infill).

    Prefix and suffix share a batch, at least `WINDOW` tokens, three to one; other files have the rest of the
    context. Raises Refusal for a model without tokens for it.
    """
    vocab = llm._model.vocab
    names = ("pre", "suf", "mid", "rep", "sep")
    fim = {name: int(getattr(llama_cpp, f"llama_vocab_fim_{name}")(vocab)) for name in names}
    if missing := [name for name in ("pre", "suf", "mid") if fim[name] < 0]:
        message = f"infill is not supported by this model: it has no token for {', '.join(missing)}"
        raise Refusal(501, message, "not_supported_error")

    def ids(text: str) -> list[int]:
        return list(llm.tokenize(text.encode("utf-8"), add_bos=False, special=False))

    middle = ids(asked.prompt)
    room = min(max(llm.n_batch, WINDOW), llm.n_ctx() // 2) // 4
    prefix = _last(ids(asked.input_prefix[-3 * room * MOST_LETTERS :]), 3 * room)
    suffix = ids(asked.input_suffix[: room * MOST_LETTERS])[: max(0, room - 2 - len(middle))]
    left = max(0, llm.n_ctx() - 4 * room - 2 * max(0, asked.n_predict))
    extra = [fim["sep"], *ids("filename\n")] if fim["sep"] >= 0 else []
    for chunk in reversed(asked.input_extra):
        if len(extra) >= left:
            break
        head = [fim["sep"], *ids(f"{chunk.filename}\n")] if fim["sep"] >= 0 else ids(SNIP)
        extra = [*head, *ids(chunk.text[-left * MOST_LETTERS :]), *extra]
    if fim["rep"] >= 0:
        extra = [fim["rep"], *ids("myproject\n"), *extra]
    bos = [llm.token_bos()] if llm._model.add_bos_token() else []
    return [*_last(extra, left), *bos, fim["pre"], *prefix, *middle, fim["suf"], *suffix, fim["mid"]]


def _last(tokens: Sequence[int], most: int) -> list[int]:
    return list(tokens[max(0, len(tokens) - max(0, most)) :])
