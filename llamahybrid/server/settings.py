"""Settings: those of llama_cpp.server, by the same names, and ours."""

# ruff: noqa: UP045 - upstream makes command-line options of these types, and reads Optional only

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from os.path import expanduser
from pathlib import Path
from typing import Any, Optional

from llama_cpp.server import settings as upstream
from pydantic import Field, SecretStr, ValidationError, field_validator, model_validator

DEFAULT_SLOTS = 4
"""llama-server's default."""


CACHE_TYPES = {
    **{0: ("f32", 4), 1: ("f16", 2), 30: ("bf16", 2), 2: ("q4_0", 18 / 32), 3: ("q4_1", 20 / 32)},
    **{6: ("q5_0", 22 / 32), 7: ("q5_1", 24 / 32), 8: ("q8_0", 34 / 32), 20: ("iq4_nl", 18 / 32)},
}
"""llama-server's types of a KV cache, and bytes of an element, by ggml's number. ggml aborts at others."""

PROMPT_LOOKUP = "prompt-lookup-decoding"

ORIGIN = re.compile(r"""\*|null|[a-z][a-z0-9+.-]*://[^\s/"',A-Z]+""")
"""An origin as browsers send it, in lower case and without a path; others would match no browser's."""


class ModelSettings(upstream.ModelSettings):  # type: ignore[misc]
    """Settings of one model.

    `cache`, `cache_type` and `cache_size` choose the place and the budget of the prompt cache: reuse is
    always on. `logits_all` allows `logprobs`; logits are stored only for requests with `logprobs`.
    """

    model_alias: Optional[str] = Field(
        default=None,
        description="Name of the model, or several with commas between: answers have the first. "
        "None: the name of its file.",
    )
    n_parallel: Optional[int] = Field(
        default=None,
        ge=1,
        description=f"Requests that run at once, each of n_ctx tokens at most. None: {DEFAULT_SLOTS}, "
        "or 1 where the model allows no more.",
    )
    ram_bytes: Optional[int] = Field(
        default=None, ge=0, description="Budget of the cache in RAM. None: an eighth of physical memory."
    )
    disk_dir: Optional[str] = Field(
        default=None, description="Folder of the cache on disk; several models may share it."
    )
    disk_bytes: Optional[int] = Field(default=None, ge=0, description="Budget of that folder; 0: read only.")
    disk_write_bytes: Optional[int] = Field(
        default=None, ge=0, description="Most bytes written to that folder in an hour. None: 8 GiB."
    )
    remote: Optional[SecretStr] = Field(
        default=None,
        description="Redis or Valkey server, for a cache that several machines share: redis://host:6379/0.",
    )
    remote_bytes: Optional[int] = Field(default=None, ge=0, description="Budget of that server. None: 8 GiB.")
    paging: bool = Field(default=True, description="Store the KV of conversations that lose their slot.")
    kv_events: Optional[str] = Field(
        default=None,
        description="Address for vLLM's KV events over ZMQ, for routers: tcp://127.0.0.1:5557.",
    )
    kv_events_topic: str = Field(default="", description="First frame of each event: kv@POD@MODEL, say.")
    kv_block_size: int = Field(default=16, ge=1, description="Tokens of a block in KV events.")
    verbose: bool = Field(default=False, description="Whether the log of llama.cpp is printed.")

    @model_validator(mode="after")
    def _within_native_types(self) -> ModelSettings:
        """Raise ValueError for numbers that llama.cpp would truncate to 32 bits, or abort at."""
        for name, value in self:
            of_ours = name.endswith("_bytes") or name in ("cache_size", "seed")
            if isinstance(value, int) and not of_ours and not -(2**31) <= value < 2**31:
                raise ValueError(f"{name}: {value} does not fit into 32 bits")
        if not -1 <= self.seed < 2**32:
            raise ValueError(f"seed: {self.seed} does not fit into 32 bits")
        for name in ("type_k", "type_v"):
            if (value := getattr(self, name)) is not None and value not in CACHE_TYPES:
                known = ", ".join(f"{number} ({text})" for number, (text, _) in sorted(CACHE_TYPES.items()))
                raise ValueError(f"{name}: {value} is no type of a KV cache; there are {known}")
        for name, most in (("split_mode", 3), ("rope_scaling_type", 3)):
            if not -1 <= getattr(self, name) <= most:
                raise ValueError(f"{name}: there is no {getattr(self, name)}")
        if self.draft_model not in (None, PROMPT_LOOKUP):
            raise ValueError(f"draft_model: {self.draft_model!r} is no method; there is {PROMPT_LOOKUP}")
        return self


class ServerSettings(upstream.ServerSettings):  # type: ignore[misc]
    """Settings of the server: addresses, keys and limits."""

    interrupt_requests: bool = Field(
        default=False,
        description="Whether a request that finds no free slot ends the stream that has run longest.",
    )
    api_keys: list[SecretStr] = Field(default=[], description="Further API keys, beside api_key.")
    api_key_file: Optional[str] = Field(default=None, description="File with an API key on each line.")
    operator_key: Optional[SecretStr] = Field(
        default=None,
        description="A further API key, whose holder sees all tenants and texts at /cache. "
        "None: the API key, if there is a single one.",
    )
    open_page: bool = Field(
        default=False,
        description="Without API keys: whether every user is the operator, who sees all tenants and texts at "
        "/cache, and may pin and forget.",
    )
    salt_by_key: bool = Field(
        default=False,
        description="Whether users share cached prompts only with users of the same API key.",
    )
    require_salt: bool = Field(
        default=False,
        description="Whether requests without a salt get 400: without a cache_salt, and without salt_by_key.",
    )
    cors_origins: list[str] = Field(
        default=[], description="Origins whose pages may use this server from a browser; * for all."
    )
    ignore_unknown_fields: bool = Field(
        default=False,
        description="Whether unknown fields, and variables that a chat template does not read, are ignored. "
        "Otherwise they get 400.",
    )
    max_body_bytes: int = Field(default=32 << 20, ge=1, description="Larger request bodies get 413.")
    max_prompt_tokens: Optional[int] = Field(
        default=None, ge=1, description="Longer prompts get 413. None: the size of the context."
    )
    max_queue: int = Field(
        default=128,
        ge=0,
        description="Further requests get 429: for a slot, or for embeddings in parallel to chats.",
    )
    max_n: int = Field(default=16, ge=1, description="Most answers of one request.")
    max_logprobs: int = Field(default=20, ge=0, description="Most logprobs of one token, as vLLM's.")
    models_bytes: Optional[int] = Field(
        default=None,
        ge=0,
        description="Memory for all open models, by the size of their files and contexts. "
        "None: three quarters of this machine's, or one model at a time if layers are offloaded.",
    )
    idle_unload: Optional[str] = Field(
        default=None,
        description="Time after which an unused model closes until its next use: 90s, 10m, 2h. None: never.",
    )
    max_connections: int = Field(
        default=4096, ge=1, description="Connections with a request in progress; more requests get 503."
    )
    body_seconds: float = Field(default=60.0, gt=0, description="Requests whose body takes longer get 408.")
    send_seconds: float = Field(
        default=60.0, gt=0, description="Seconds that one write of an answer may wait for its reader."
    )
    max_bodies_bytes: int = Field(
        default=512 << 20,
        ge=1,
        description="Bodies of all requests together; further requests get 503.",
    )
    ping_seconds: float = Field(
        default=15.0, gt=0, description="Seconds after which a silent stream gets a comment."
    )
    shutdown_seconds: float = Field(
        default=30.0, ge=0, description="Seconds after which shutdown cancels running requests."
    )

    @field_validator("cors_origins")
    @classmethod
    def _origins(cls, said: list[str]) -> list[str]:
        for origin in said:
            if ORIGIN.fullmatch(origin) is None:
                how = "such as https://example.org; on the command line spaces stand between several"
                raise ValueError(f"{origin!r} is no origin {how}")
        return said

    @field_validator("idle_unload")
    @classmethod
    def _a_duration(cls, said: Optional[str]) -> Optional[str]:
        if said is not None:
            seconds_of(said)
        return said

    @property
    def idle_seconds(self) -> float | None:
        """`idle_unload` in seconds."""
        return None if self.idle_unload is None else seconds_of(self.idle_unload)

    def keys(self) -> list[str]:
        """Return all API keys; none: every request is admitted. Raises ValueError for a file without keys."""
        given = [key.get_secret_value() for key in self.api_keys]
        if self.api_key is not None:
            given.append(self.api_key)
        if self.operator_key is not None:
            given.append(self.operator_key.get_secret_value())
        if self.api_key_file is not None:
            lines = Path(expanduser(self.api_key_file)).read_text(encoding="utf-8-sig").split("\n")
            read = [line.strip() for line in lines if line.strip()]
            if not read:
                raise ValueError(f"{self.api_key_file} holds no API key")
            given += read
        if any(not key for key in given):
            raise ValueError("an API key is empty")
        return given


class Settings(ServerSettings, ModelSettings):
    """Settings of a server with one model."""


class ConfigFileSettings(ServerSettings):
    """Settings in a config file."""

    models: list[ModelSettings] = Field(default=[], description="Model configs")


def seconds_of(said: str) -> float:
    """Return a duration in seconds: a number, or one with a unit (s, m, h). Raises ValueError otherwise."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", said.strip())
    if found is None:
        raise ValueError(f"{said!r} is no duration; say 90s, 10m or 2h")
    return float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[found[2]]


@contextmanager
def in_one_line(where: str = "") -> Iterator[None]:
    """Raise pydantic's errors of several lines as a ValueError of one line, which begins with `where`."""
    try:
        yield
    except ValidationError as error:
        raise ValueError(where + "; ".join(map(_fault, error.errors()))) from error


def _fault(found: Any) -> str:
    if found["type"] == "missing" and found["loc"][-1:] == ("model",):
        return "no model was given"
    name = ".".join(map(str, found["loc"]))
    said = str(found["msg"]).removeprefix("Value error, ")
    return f"{name}: {said}" if name else said


def from_file(path: Path) -> tuple[ServerSettings, list[ModelSettings]]:
    """Return the settings of a config file, JSON or YAML as upstream reads it.

    Raises ValueError for wrong contents, OSError for an unreadable file.
    """
    text = path.read_text(encoding="utf-8-sig")
    if path.suffix in (".yaml", ".yml"):
        import yaml

        try:
            text = json.dumps(yaml.safe_load(text), default=str)  # dates, say
        except (yaml.YAMLError, TypeError) as error:
            raise ValueError(f"{path} is no YAML: {error}") from error
    with in_one_line(f"{path}: "):
        config = ConfigFileSettings.model_validate_json(text)
    if not config.models:
        raise ValueError(f"{path} names no models")
    common: dict[str, Any] = {name: getattr(config, name) for name in ServerSettings.model_fields}
    return ServerSettings(**common), config.models
