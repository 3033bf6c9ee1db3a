"""Every field of the requests that OpenAI, llama-server, vLLM and Anthropic publish, and its effect here.

Sources: OpenAI's API reference; llama.cpp's tools/server/README.md and server-task.cpp; vLLM's
entrypoints/openai/{completion,chat_completion}/protocol.py and its pooling requests, and the guided_* fields
that older vLLM takes; message_create_params.py and message_count_tokens_params.py of the anthropic package,
its beta ones included.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from enum import Enum
from typing import Any, Final

from llamahybrid.server.errors import Refusal, bad

MOST_LETTERS = 100
"""Letters of an unknown name that are compared with known names."""


class Effect(Enum):
    """The effect of a field on a route."""

    OBEYED = "obeyed"
    REFUSED = "refused"
    """400, unless the value is the only supported one."""
    NONE = "without effect on the answer"
    UNKNOWN = "unknown"
    """No published request of this route has it."""


class Route(Enum):
    """The requests that have a table."""

    COMPLETIONS = "/v1/completions"
    CHAT = "/v1/chat/completions"
    EMBEDDINGS = "/v1/embeddings"
    MESSAGES = "/v1/messages"
    COUNT_TOKENS = "/v1/messages/count_tokens"
    COMPLETION = "/completion"
    INFILL = "/infill"
    RESPONSES = "/v1/responses"
    TOKENIZE = "/tokenize"
    DETOKENIZE = "/detokenize"


_EFFECTS: Final = {"o": Effect.OBEYED, "r": Effect.REFUSED, "n": Effect.NONE}

FIELDS: Final[dict[str, dict[Route, Effect]]] = {}
"""The effect of each field on the routes that know it."""

NEUTRAL: Final[dict[tuple[Route, str], tuple[Any, ...]]] = {}
"""Supported values of refused fields."""


def _fields(effects: str, names: str, *neutral: Any) -> None:
    """Add fields by their names, with one letter for each route; "-", or none: the route does not know them.

    llama-server's own routes take the options of completions: their letters are that unless given.
    """
    letters = effects.ljust(5, "-")
    for route, letter in zip(Route, letters.ljust(7, letters[0]), strict=False):
        for name in names.split() if letter != "-" else ():
            FIELDS.setdefault(name, {})[route] = _EFFECTS[letter]
            NEUTRAL[route, name] = neutral


# completions, chat completions, embeddings, messages, counts of their tokens, completion, infill,
# responses, tokenize, detokenize
_fields("ooooo", "model")
_fields("o", "prompt")
_fields("o------", "echo suffix best_of")
_fields("-o-", "messages tools tool_choice functions function_call top_logprobs max_completion_tokens")
_fields("oo-", "frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop stream")
_fields("oo-", "stream_options temperature top_p response_format")
_fields("--o", "input encoding_format")
_fields("nnn", "user metadata store service_tier safety_identifier request_id")
# The last prompt of each key is pinned in RAM, within a share of it; Ray routes by it, too.
_fields("oo-", "prompt_cache_key")
_fields("nn-", "prompt_cache_options prompt_cache_retention")
_fields("nn-", "session_id stream_interval")
# OpenAI
_fields("-o-", "reasoning_effort reasoning_format parse_tool_calls")
_fields("-n-", "prediction")
_fields("-r-", "audio web_search_options moderation")
_fields("-r-", "verbosity", "medium")
_fields("-r-", "modalities", ["text"])
_fields("-r-", "parallel_tool_calls", True)
_fields("--r", "dimensions")
# llama-server
_fields("oo-", "top_k min_p typical_p repeat_penalty repeat_last_n top_n_sigma seed ignore_eos grammar")
_fields("oo-", "dynatemp_range dynatemp_exponent mirostat mirostat_tau mirostat_eta json_schema n_predict")
_fields("oo-", "dry_multiplier dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers")
_fields("oo-", "xtc_probability xtc_threshold n_probs return_tokens n_cmpl cache_prompt id_slot")
_fields("-o-", "enable_thinking")
_fields("nn-", "n_keep timings_per_token sse_ping_interval backend_sampling")
_fields("rr-", "min_keep n_cache_reuse n_indent n_discard", 0)
_fields("rr-", "t_max_predict_ms t_max_prompt_ms", -1, 0)
_fields("rr-", "lora response_fields preserved_tokens", [])
_fields("oo-", "return_progress")
_fields("rr-", "post_sampling_probs verbose", False)
_fields("rr-", "samplers system_prompt image_data adaptive_target adaptive_decay")
_fields("rr-", "grammar_lazy", False)
_fields("rr-", "grammar_triggers", [])
_fields("rr-", "speculative.n_max speculative.n_min speculative.p_min speculative.type")
_fields("rr-", "speculative.ngram_size_n speculative.ngram_size_m speculative.ngram_m_hits")
_fields("rr-", "tfs_z", 1, 1.0)
_fields("rr-", "penalize_nl", False)
_fields("rr-", "penalty_prompt")
_fields("-r-", "chat_format generation_prompt")
_fields("-r-", "reasoning_in_content", True)
_fields("-r-", "thinking_forced_open", False)
_fields("oo-", "thinking_budget thinking_budget_tokens reasoning_budget reasoning_budget_tokens")
_fields("oo-", "reasoning_budget_message")
_fields("-r-", "reasoning_control", False)
_fields("--r", "content embd_normalize")
# vLLM
_fields("oo-", "repetition_penalty stop_token_ids min_tokens truncate_prompt_tokens allowed_token_ids")
_fields("oo-", "guided_json guided_regex guided_choice guided_grammar structured_outputs cache_salt")
_fields("-o-", "chat_template_kwargs documents")
_fields("o--", "add_special_tokens")
_fields("-o-", "continue_final_message add_generation_prompt")
_fields("-r-", "add_special_tokens echo", False)
_fields("-r-", "include_reasoning", True)
_fields("-r-", "chat_template media_io_kwargs mm_processor_kwargs")
_fields("-r-", "return_prompt_text", False)
_fields("r--", "prompt_embeds")
_fields("rr-", "use_beam_search include_stop_str_in_output watermarking", False)
_fields("rr-", "skip_special_tokens spaces_between_special_tokens", True)
_fields("rr-", "length_penalty", 1, 1.0)
_fields("rr-", "truncation_side", "left")
_fields("rr-", "bad_words logits_processors", [])
_fields("rr-", "prompt_logprobs logprob_token_ids structural_tag repetition_detection")
_fields("oo-", "thinking_token_budget")
_fields("rr-", "return_tokens_as_token_ids return_token_ids return_token_offsets", False)
_fields("nn-", "guided_decoding_backend return_mm_kwargs routed_experts_prompt_start")
_fields("rr-", "guided_whitespace_pattern vllm_xargs kv_transfer_params ec_transfer_params")
_fields("rrr", "priority", 0)
_fields("--r", "truncate_prompt_tokens", -1)
_fields("--r", "add_special_tokens normalize use_activation", True)
_fields("--r", "embed_dtype", "float32")
_fields("--r", "endianness", "native")
_fields("--r", "additional_data messages mm_processor_kwargs")
# Anthropic
_fields("---oo", "messages system tools tool_choice thinking output_config output_format")
_fields("---oo", "context_management chat_template_kwargs")
_fields("---on", "max_tokens stop_sequences stream temperature top_p top_k")
_fields("---on", "min_p repeat_penalty seed grammar cache_salt")  # llama-server's and vLLM's, taken here, too
_fields("---nn", "cache_control")  # checkpoints stand at the ends of system, tools and messages anyway
_fields("---nn", "metadata service_tier inference_geo speed diagnostics user_profile_id workspace_id")
_fields("---nn", "betas billing_policy fallbacks fallback_credit_token")
_fields("---rr", "mcp_servers", [])
_fields("---rr", "container compaction thread")
# Responses, and the options of chats that they take, too
_fields("-------o", "model input instructions stream max_output_tokens temperature top_p top_logprobs")
_fields("-------o", "tools tool_choice parallel_tool_calls text reasoning metadata")
_fields("-------o", "prompt_cache_key cache_salt cache_prompt id_slot top_k min_p repeat_penalty seed")
_fields("-------o", "presence_penalty frequency_penalty logit_bias stop grammar chat_template_kwargs")
_fields("-------o", "thinking_budget thinking_budget_tokens thinking_token_budget reasoning_budget")
_fields("-------o", "reasoning_budget_tokens reasoning_budget_message")
_fields("-------n", "include user safety_identifier service_tier stream_options client_metadata")
_fields("-------n", "prompt_cache_options prompt_cache_retention background_options")
_fields("-------n", "access_programs image")
_fields("-------r", "previous_response_id conversation prompt max_tool_calls moderation")
_fields("-------r", "context_management", [])
_fields("-------r", "store background", False)
_fields("-------r", "truncation", "disabled")
# llama-server's own routes
_fields("------o", "input_prefix input_suffix input_extra")
_fields("-----oo", "samplers n_indent t_max_predict_ms response_fields")
_fields("-----nn", "id_slot t_max_prompt_ms")
_fields("-----rr", "n n_cmpl", 1)
_fields("-----rr", "logprobs stream_options")
_fields("-----rr", "n_probs", 0)
_fields("--------oo", "model")
_fields("--------o-", "content add_special parse_special with_pieces")
_fields("---------o", "tokens")
# llama_cpp.server, and Copilot's clients of its route
_fields("n--", "nwo extra feature_flags")
_fields("oo-", "logit_bias_type mirostat_mode")


def effect(route: Route, name: str) -> Effect:
    """Return the effect of a field on a route."""
    return FIELDS.get(name, {}).get(route, Effect.UNKNOWN)


def known(route: Route) -> list[str]:
    """Return the names of a route's fields."""
    return [name for name, effects in FIELDS.items() if route in effects]


def fault(route: Route, given: Mapping[str, Any], ignore_unknown: bool = False) -> Refusal | None:
    """Return the refusal of the first unsupported or unknown field; None: there is none.

    `ignore_unknown`: unknown fields are ignored.
    """
    for name, value in given.items():
        if value is None:  # not given
            continue
        found = effect(route, name)
        if found is Effect.UNKNOWN and not ignore_unknown:
            return bad(f"there is no field {name!r}{_hint(route, name)}", name)
        neutral = NEUTRAL.get((route, name), ())
        if found is Effect.REFUSED and not any(type(value) is type(n) and value == n for n in neutral):
            only = f", or give {' or '.join(map(repr, neutral))}" if neutral else ""
            return bad(f"{name} is not supported; leave it out{only}", name)
    return None


def require_known(body: Any, ignore_unknown: bool) -> None:
    """Raise Refusal for an unsupported or unknown field of a body."""
    if (route := getattr(body, "route", None)) is not None:
        refused = fault(route, body.model_extra or {}, ignore_unknown)
        if refused is not None:
            raise refused


def _hint(route: Route, name: str) -> str:
    near = difflib.get_close_matches(name[:MOST_LETTERS], known(route), 1)
    return f"; did you mean {near[0]!r}?" if near else ""
