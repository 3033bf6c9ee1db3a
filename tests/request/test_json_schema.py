"""Chats whose answers follow a JSON schema: what they say is checked by the jsonschema package."""

import json
import logging
import re

import jsonschema
import llama_cpp
import numpy as np
import pytest

from llamahybrid.client.json_schema import RegexGrammar, SchemaGrammar, closed
from llamahybrid.errors import LlamaHybridError
from tests.request.asking import each, said

ASK = [{"role": "user", "content": "Describe it."}]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 2, "maxLength": 8},
        "age": {"type": "integer", "minimum": 3, "maximum": 17},
        "tags": {"type": "array", "items": {"enum": ["a\nb", 'say "x"', "\U0001f600"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "note", "description": "", "parameters": PERSON}}


def form(schema):
    return {
        "response_format": {"type": "json_object", "schema": schema},
        "max_tokens": 300,
        "temperature": 1.5,
    }


def content(answer):
    return answer["choices"][0]["message"]["content"]


def require_valid(text, schema):
    jsonschema.validate(json.loads(text), schema)


@pytest.fixture
def llm(open_model):
    return open_model("qwen35", n_ctx=1024)


@pytest.mark.parametrize("slots", [1, 3])
def test_answers_follow_schemas_of_their_own_at_high_temperature(open_model, slots):
    llm = open_model("qwen35", n_ctx=1024, n_parallel=slots)
    schemas = [PERSON, {"type": "integer", "minimum": 5, "maximum": 9}, {"const": "a\nb"}]

    def ask(seed):
        asked = form(schemas[seed % 3])
        text = content(llm.create_chat_completion(ASK, seed=seed, **asked))
        assert said(llm.create_chat_completion(ASK, seed=seed, stream=True, **asked)) == text
        require_valid(text, schemas[seed % 3])

    each(ask, range(9))


def test_arguments_of_a_chosen_tool_follow_its_parameters(llm):
    choice = {"type": "function", "function": {"name": "note"}}
    for seed in range(4):
        answer = llm.create_chat_completion(
            ASK, tools=[TOOL], tool_choice=choice, max_tokens=300, temperature=1.5, seed=seed
        )
        require_valid(answer["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"], PERSON)


def test_json_object_without_a_schema_is_an_object(llm):
    options = {**form(None), "response_format": {"type": "json_object"}}
    for seed in range(20):
        answer = llm.create_chat_completion(ASK, seed=seed, **options)
        if answer["choices"][0]["finish_reason"] == "stop":
            assert isinstance(json.loads(content(answer)), dict)


def test_a_schema_serves_as_grammar_of_a_completion(llm):
    text = llm.create_completion("It is ", grammar=SchemaGrammar({"enum": [12, 13]}), max_tokens=20)
    assert json.loads(text["choices"][0]["text"]) in (12, 13)


@pytest.mark.parametrize("arch", ["qwen35", "llama"])
def test_a_prompt_that_was_answered_in_a_form_keeps_its_logits(open_model, arch):
    asked = {"prompt": "It is ", "temperature": 0.0}
    llm, other = open_model(arch), open_model(arch)
    llm.create_completion(grammar=SchemaGrammar({"enum": [12, 13]}), max_tokens=1, **asked)
    assert said(llm.create_completion(max_tokens=8, **asked)) == said(
        other.create_completion(max_tokens=8, **asked)
    )


def test_a_chat_handler_keeps_a_grammar_of_its_own(llm):
    inner = llama_cpp.LlamaGrammar.from_string('root ::= "yes"', verbose=False)

    def handler(*, llama, messages, **options):
        return llama.create_completion("?", grammar=inner, max_tokens=8)

    llm.chat_handler = handler
    assert llm.create_chat_completion(ASK, **form(PERSON))["choices"][0]["text"] == "yes"


def test_processors_of_the_caller_still_apply(llm):
    digits = [llm.tokenize(str(digit).encode(), add_bos=False)[-1] for digit in (5, 6, 7, 8)]

    def forbid(ids, scores):
        scores = np.array(scores)
        scores[digits] = -np.inf
        return scores

    answer = llm.create_chat_completion(
        ASK,
        logits_processor=llama_cpp.LogitsProcessorList([forbid]),
        **form({"type": "integer", "minimum": 5, "maximum": 9}),
    )
    assert json.loads(content(answer)) == 9


def test_a_schema_that_cannot_be_followed_warns_and_keeps_the_rules_of_upstream(llm, caplog):
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True, "maxItems": 2}
    with caplog.at_level(logging.WARNING, "llamahybrid"):
        answer = llm.create_chat_completion(ASK, seed=1, **form(schema))
    assert any("uniqueItems" in record.getMessage() for record in caplog.records)
    assert content(answer).startswith("[")


def test_a_grammar_object_of_such_a_schema_is_refused():
    with pytest.raises(ValueError, match="uniqueItems"):
        SchemaGrammar({"uniqueItems": True})
    with pytest.raises(ValueError, match="object"):
        SchemaGrammar("string")


def test_a_vocabulary_that_cannot_spell_a_value_raises(llm, monkeypatch):
    """The constraint runs in a callback of ctypes, where an exception is lost: the sampler raises it."""
    from llamahybrid.client import json_schema

    monkeypatch.setattr(json_schema.Constraint, "error", "no token continues\n<state>\nlexemes\n</state>")
    with pytest.raises(LlamaHybridError, match=r"as its form demands: no token continues\Z"):
        llm.create_chat_completion(ASK, **form(PERSON))
    monkeypatch.undo()
    require_valid(content(llm.create_chat_completion(ASK, seed=1, **form(PERSON))), PERSON)


OPEN = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
SHUT = {**OPEN, "additionalProperties": False}


def test_objects_are_closed_where_the_schema_leaves_it_open():
    nested = {"type": "array", "items": {"anyOf": [OPEN, {"type": "null"}]}}
    assert closed(OPEN) == SHUT
    assert closed(nested) == {"type": "array", "items": {"anyOf": [SHUT, {"type": "null"}]}}
    assert closed({"$ref": "#/$defs/x", "$defs": {"x": OPEN}}) == {"$ref": "#/$defs/x", "$defs": {"x": SHUT}}
    assert closed({"allOf": [OPEN]}) == {"allOf": [SHUT]}


@pytest.mark.parametrize(
    "schema",
    [
        {**OPEN, "additionalProperties": {"type": "string"}},
        {**OPEN, "required": ["b"]},
        {**OPEN, "minProperties": 3},
        {"allOf": [OPEN, {"properties": {"b": {"type": "integer"}}}]},
        {"anyOf": [OPEN], "required": ["b"]},
        {"allOf": [{"$ref": "#/$defs/x"}, {"required": ["b"]}], "$defs": {"x": OPEN}},
        {"$ref": "#/$defs/x", "properties": {"b": {}}, "$defs": {"x": OPEN}},
        {**OPEN, "required": [["a"]]},
    ],
    ids=json.dumps,
)
def test_objects_that_are_combined_or_say_otherwise_stay_open(schema):
    assert closed(schema) == schema


@pytest.mark.filterwarnings("ignore::FutureWarning")  # Python may read `[[`, `--`, `&&`, `~~` as sets one day
@pytest.mark.parametrize(
    ("pattern", "right", "wrong"),
    [
        (r"[^[]+", ["a]"], ["[", "a["]),
        (r'{"a": \d+}', ['{"a": 12}'], ['"a": 12']),
        (r"ab\Z", ["ab"], ["abc"]),
        (r"a{,3}b", ["b", "aaab"], ["aaaab"]),
        (r"[a[b]c", ["ac", "[c", "bc"], ["a", "ab"]),
        (r"[a&&b]", ["a", "&", "b"], ["c"]),
        (r"[+--z]", ["+", ",", "-", "z"], ["a", "."]),
        (r"[--/a]", ["-", ".", "/", "a"], ["b"]),
        (r"[~~\]\d]", ["~", "]", "7"], ["a"]),
        (r"[]a]{2}", ["]a"], ["a", "]"]),
        (r"a{2}{x}", ["aa{x}"], ["aax"]),
    ],
)
def test_regular_expressions_are_read_as_python_reads_them(llm, pattern, right, wrong):
    def matches(text):
        constraint = RegexGrammar(pattern).constraint(llm)
        for token in (*llm.tokenize(text.encode(), add_bos=False), llm.token_eos()):
            constraint.mask(scores := np.zeros(llm.n_vocab(), np.single))
            if not np.isfinite(scores[token]):
                return False
            constraint.took(token)
        return True

    assert [text for text in (*right, *wrong) if re.fullmatch(pattern, text)] == right
    assert [text for text in (*right, *wrong) if matches(text)] == right


def test_a_form_that_has_begun_applies_whatever_its_text_looks_like(opened):
    """The text of an answer may have the begin of a thought in it."""
    llm = opened()
    form, thinks = RegexGrammar("[ab]+").constraint(llm), iter([True, False])
    form.waits = lambda: next(thinks, True)

    def allowed():
        row = np.zeros(llm.n_vocab(), np.float32)
        form.mask(row)
        return int(np.isfinite(row).sum())

    assert allowed() == llm.n_vocab()
    assert 0 < allowed() < llm.n_vocab()
    form.took(llm.tokenize(b"a", add_bos=False)[0])
    assert 0 < allowed() < llm.n_vocab()
