"""Thinking budgets: a thought ends at the budget as the chat template writes it, and the answer goes on."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from weakref import ref

import llama_cpp
import pytest

from llamahybrid import Llama
from llamahybrid.client.thought import Thought, ThoughtLimit, ThoughtMarkers
from tests.lab.gguf_edits import with_control_marks, with_template
from tests.lab.waiting import wait_until
from tests.request.test_answer import says

OPTIONS: dict[str, Any] = {"n_ctx": 512, "n_threads": 1, "verbose": False}
HELLO: Any = [{"role": "user", "content": "Which papers does a boat need?"}]
ASKED: dict[str, Any] = {"temperature": 0.0, "max_tokens": 40}
CLOSE = "\n</think>\n\n"

TURN = "<|im_start|>' + m.role + '\\n"
OPENED = (
    "{% set last = namespace(user=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{% if m.reasoning_content and loop.index0 > last.user %}"
    "{{ '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}"
    "{{ m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{% if opens is not defined %}{{ '<think>\\n' }}{% endif %}{% endif %}"
)
"""Qwen3's way: the prompt opens the thought (unless `opens` is given), and earlier thoughts are left out."""


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(with_template(tiny_model("qwen35"), tmp_path_factory.mktemp("think") / "think.gguf", OPENED))


@pytest.fixture(scope="module")
def llm(model: str) -> Iterator[Llama]:
    with closing(Llama(model, n_parallel=2, **OPTIONS)) as llm:
        yield llm


def chat(llm: Llama, messages: Any = HELLO, stream: bool = False, **more: Any) -> str:
    made: Any = llm.create_chat_completion(messages, stream=stream, **{**ASKED, **more})
    if not stream:
        return str(made["choices"][0]["message"]["content"])
    return "".join(each["choices"][0]["delta"].get("content", "") for each in made)


def prompt(llm: Llama, text: str) -> list[int]:
    head = f"<|im_start|>user\n{HELLO[0]['content']}<|im_end|>\n<|im_start|>assistant\n"
    return llm.tokenize((head + text).encode(), add_bos=False, special=True)  # type: ignore[no-any-return]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("budget", [0, 1, 7])
def test_a_thought_ends_at_the_budget_and_the_answer_is_that_to_the_closed_thought(
    llm: Llama, model: str, budget: int, stream: bool
) -> None:
    free = chat(llm, max_tokens=budget) if budget else ""
    assert "</think>" not in free
    said = chat(llm, stream=stream, thinking_budget=budget)
    thought, found, answer = said.partition(CLOSE)
    assert (thought, found) == (free, CLOSE)
    assert llm.last_request.thinking == budget
    with closing(llama_cpp.Llama(model, **OPTIONS)) as stock:
        tokens = [*prompt(llm, f"<think>\n{thought}"), *stock.tokenize(CLOSE.encode(), False, True)]
        right = stock.create_completion(tokens, **{**ASKED, "max_tokens": len(answer)})
        assert len(answer) > 20
        assert right["choices"][0]["text"].startswith(answer)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_does_not_match_the_forced_end_of_a_thought(llm: Llama, stream: bool) -> None:
    whole = chat(llm, thinking_budget=0).removeprefix(CLOSE)
    stop = whole[8:10]
    for stops in (["\n", stop], ["\n\n", stop], ["k>", stop], [">\n\n" + whole[:2], stop]):
        said = chat(llm, stream=stream, thinking_budget=0, stop=stops)
        assert said == CLOSE + whole[: min(at for at in map(whole.find, stops) if at >= 0)]


def test_lock_step_and_drafts_say_the_same(llm: Llama, model: str) -> None:
    right = chat(llm, thinking_budget=5)
    idle = llama_cpp.LogitsProcessorList([lambda ids, scores: scores])
    assert chat(llm, thinking_budget=5, logits_processor=idle) == right
    draft = llama_cpp.llama_speculative.LlamaPromptLookupDecoding(num_pred_tokens=3)
    with closing(Llama(model, draft_model=draft, **OPTIONS)) as drafting:
        assert chat(drafting, thinking_budget=5) == right


def test_a_model_that_opens_the_thought_itself(llm: Llama) -> None:
    own: dict[str, Any] = {"chat_template_kwargs": {"opens": True}}
    marks = {text: llm.tokenize(text.encode(), False, True)[0] for text in ("<think>", "</think>")}
    spelt = {llm.detokenize([token]): token for token in range(256)}

    def ids(text: str) -> list[int]:
        head, found, rest = text.partition("<think>")
        plain = [spelt[bytes([byte])] for byte in (head if found else text).encode()]
        return [*plain, marks["<think>"], *ids(rest)] if found else plain

    def said(text: str, **more: Any) -> str:
        processor = says(llm, b"")
        processor[0]._tokens = ids(text)
        return chat(llm, logits_processor=processor, **own, **more)

    text = "<think>abcdefghij"
    assert said(text, thinking_budget=4) == "<think>abcd" + CLOSE + "ij"  # the script goes on
    assert said(text, thinking_budget=0) == "<think>" + CLOSE + "efghij"
    assert said("Say <think> abcdefghij", thinking_budget=4) == "Say <think> abcdefghij"
    assert llm.last_request.thinking == 0


def test_a_grammar_and_a_schema_hold_behind_the_thought(llm: Llama) -> None:
    grammar = llama_cpp.LlamaGrammar.from_string('root ::= "Yes."', verbose=False)
    for budget in (0, 6):
        said = chat(llm, grammar=grammar, thinking_budget=budget)
        assert said.partition(CLOSE)[2] == "Yes."
        form = {"type": "json_object", "schema": {"const": "no"}}
        said = chat(llm, response_format=form, thinking_budget=budget)
        assert said.partition(CLOSE)[2] == '"no"'
        assert len(said.partition(CLOSE)[0]) == budget


@pytest.mark.parametrize("stream", [False, True])
def test_the_arguments_of_a_chosen_call_are_behind_the_thought(
    llm: Llama, model: str, tmp_path: Path, stream: bool
) -> None:
    """Also where the markers are control tokens, which texts leave out."""
    parameters = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    choice = {"type": "function", "function": {"name": "f"}}
    asked: Any = {**ASKED, "tools": [tool], "tool_choice": choice, "stream": stream}

    def call(llm: Llama, **more: Any) -> tuple[str, str]:
        made: Any = llm.create_chat_completion(HELLO, **{**asked, **more})
        if not stream:
            (told,) = made["choices"]
            return told["message"]["tool_calls"][0]["function"]["arguments"], told["finish_reason"]
        choices = [each["choices"][0] for each in made]
        calls = [each for chosen in choices for each in chosen["delta"]["tool_calls"] or ()]
        return "".join(each["function"]["arguments"] for each in calls), choices[-1]["finish_reason"]

    control = with_control_marks(Path(model), tmp_path / "control.gguf")
    with closing(Llama(str(control), **OPTIONS)) as other:
        for each in (llm, other):
            for more in ({"thinking_budget": 0}, {"thinking_budget": 6}, {}):
                arguments, ended = call(each, **more)
                assert json.loads(arguments)["a"] in ("x", "y")
                assert ended == "tool_calls"
            assert call(each, max_tokens=5, thinking_budget=9) == ("", "length")
            assert call(each, max_tokens=4)[1] == "length"


def test_usage_counts_the_thoughts_of_all_answers(llm: Llama) -> None:
    made: Any = llm.create_chat_completion(HELLO, n=2, thinking_budget=3, **ASKED)
    assert made["usage"]["completion_tokens_details"] == {"reasoning_tokens": 6}
    assert made["usage"]["completion_tokens"] > 6
    plain: Any = llm.create_chat_completion(HELLO, temperature=0.0, max_tokens=6)
    assert plain["usage"]["completion_tokens_details"] == {"reasoning_tokens": 6}
    form: Any = {"type": "json_object", "schema": {"const": "yes"}}
    made = llm.create_chat_completion(HELLO, response_format=form, temperature=0.0)
    assert made["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


def test_a_message_stands_before_the_end(llm: Llama) -> None:
    said = chat(llm, thinking_budget=3, thinking_budget_message=" Enough.")
    assert said[3:].startswith(" Enough." + CLOSE)


def test_unused_model_with_budgets_is_freed(model: str) -> None:
    llm = Llama(model, **OPTIONS)
    chat(llm, thinking_budget=2)
    chat(llm, [*HELLO, {"role": "assistant", "content": "It"}], continue_final_message=True, max_tokens=3)
    chat(llm, thinking_budget=9)
    own = ref(llm)
    gc.disable()
    try:
        del llm
        wait_until(lambda: own() is None)  # its thread may still end the stream
    finally:
        gc.enable()


def test_a_template_without_thinking_takes_no_budget(templated: Any) -> None:
    llm = templated("{% for m in messages %}[{{ m.role }}]{{ m.content }}[end]{% endfor %}[assistant]")
    with pytest.raises(ValueError, match="thinking_budget"):
        chat(llm, thinking_budget=3)
    assert chat(llm, thinking_budget=-1) == chat(llm)


def test_streams_that_take_turns_in_one_slot_keep_their_budgets(model: str) -> None:
    def stream(llm: Llama, budget: int) -> Iterator[str]:
        made: Any = llm.create_chat_completion(HELLO, stream=True, thinking_budget=budget, **ASKED)
        return (each["choices"][0]["delta"].get("content", "") for each in made)

    with closing(Llama(model, **OPTIONS)) as llm:
        right = [chat(llm, thinking_budget=budget) for budget in (3, 9)]
        said = ["", ""]
        for pieces in zip(stream(llm, 3), stream(llm, 9), strict=False):
            said = [before + piece for before, piece in zip(said, pieces, strict=True)]
        assert all(whole.startswith(text) for whole, text in zip(right, said, strict=True))
        assert min(map(len, said)) > 30


# -- history -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["qwen35", "gemma3"])
def test_history_with_and_without_the_thought_reuses_the_common_part(templated: Any, arch: str) -> None:
    llm, head = templated(OPENED, arch=arch), [{"role": "system", "content": "You are brief."}, *HELLO]
    thought, _, answer = chat(llm, head, thinking_budget=9, max_tokens=30).partition(CLOSE)
    first, generated = llm.last_request.total, llm.last_request.generated
    more: Any = {"role": "tool", "content": "Go on."}  # a turn of the same question keeps its thought
    said = {"role": "assistant", "content": answer}

    chat(llm, [*head, {**said, "reasoning_content": thought}, more], max_tokens=1)
    kept = llm.last_request
    assert kept.matched >= first + generated - 1  # all but the last token, which was never decoded
    chat(llm, [*head, said, more], max_tokens=1)
    dropped = llm.last_request
    assert dropped.matched == first - 2  # up to the thought: "<think>" and the line break behind it
    assert dropped.cached == dropped.matched

    again = {"role": "user", "content": "And a car?"}  # a new question: the template drops the thought
    matched = []
    for turn in ({**said, "reasoning_content": thought}, said):
        chat(llm, [*head, turn, again], max_tokens=1)
        matched.append((llm.last_request.total, llm.last_request.matched))
    assert matched[0][0] == matched[1][0]
    assert min(each[1] for each in matched) >= dropped.matched


# -- going on from the beginning of an answer ----------------------------------------------------------


def test_an_answer_goes_on_from_the_last_message(llm: Llama) -> None:
    begun: Any = {"role": "assistant", "content": "It needs"}
    said = chat(llm, [*HELLO, begun], continue_final_message=True)
    right = llm.create_completion(prompt(llm, "<think>\n" + CLOSE + "It needs"), **ASKED)
    assert said == right["choices"][0]["text"]
    assert chat(llm, [*HELLO, begun], continue_final_message=True, stream=True) == said
    assert chat(llm, [*HELLO, begun]) != said
    thinks: Any = {"role": "assistant", "reasoning_content": "Papers", "content": ""}
    said = chat(llm, [*HELLO, thinks], continue_final_message=True, thinking_budget=4)
    assert llm.last_request.thinking == 4
    assert said[4:].startswith(CLOSE)
    whole = {**thinks, "content": "It needs"}
    said = chat(llm, [*HELLO, whole], continue_final_message=True)
    right = llm.create_completion(prompt(llm, "<think>\nPapers" + CLOSE + "It needs"), **ASKED)
    assert said == right["choices"][0]["text"]


def test_a_cut_answer_that_goes_on_is_the_whole_one(llm: Llama) -> None:
    whole = chat(llm, thinking_budget=4, max_tokens=30)
    thought, _, answer = whole.partition(CLOSE)
    begun = {"role": "assistant", "reasoning_content": thought, "content": answer[:5]}
    asked: Any = {"continue_final_message": True, "max_tokens": len(answer) - 5}
    assert chat(llm, [*HELLO, begun], **asked) == answer[5:]
    assert llm.last_request.matched == llm.last_request.total  # all of it is known


@pytest.mark.parametrize(
    "wrong",
    [
        HELLO,
        [*HELLO, {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}],
        [*HELLO, {"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}],
    ],
)
def test_messages_that_begin_no_answer_are_refused(llm: Llama, wrong: Any) -> None:
    with pytest.raises(ValueError, match="continue_final_message"):
        chat(llm, wrong, continue_final_message=True)


# -- the thought itself --------------------------------------------------------------------------------

MARKERS = ThoughtMarkers("<think>", "</think>", "\n", CLOSE)


def letters(token: int) -> bytes:
    return bytes([token])


@pytest.mark.parametrize("again", [False, True])
def test_markers_of_several_tokens(again: bool) -> None:
    thought = Thought(ThoughtMarkers("<t>", "</t>", again=again), letters, inside=False)
    for byte in b"<t>abc</t>yes <t>de</t>":
        thought.follow(byte)
    assert thought.tokens == (5 if again else 3)
    assert not thought.inside


def test_a_thought_does_not_end_inside_a_character() -> None:
    limit = ThoughtLimit(Thought(MARKERS, letters, inside=True), 4, CLOSE, lambda text: list(text.encode()))
    said = bytearray()
    script = iter("abcé\n later".encode())
    while limit.free:
        token = limit.next()
        said.append(next(script) if token is None else token)
        limit.took(said[-1])
    assert said.decode() == "abcé\n</think>"
    assert limit.next() == ord("\n")


def test_a_thought_of_broken_characters_ends_all_the_same() -> None:
    limit = ThoughtLimit(Thought(MARKERS, letters, inside=True), 4, CLOSE, lambda text: list(text.encode()))
    said = 0
    while limit.next() is None and said < 100:
        limit.took(0xF0)  # begins a character of four bytes
        said += 1
    assert said == 4 + 3
