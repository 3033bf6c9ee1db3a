"""The drop-in: prefixes are reused, faults leave nothing wrong, and everything else is upstream's."""

import itertools
import pickle

import llama_cpp
import numpy as np
import pytest
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from llamahybrid import Llama, PromptCache
from llamahybrid.errors import ContextOverflow, LlamaHybridError
from llamahybrid.harness.counters import DecodeCounter
from tests.conftest import SETTINGS, take
from tests.lab.integrity import check_integrity

PROMPT = [(7 * i + 1) % 200 for i in range(80)]
OTHER = [(11 * i + 5) % 200 for i in range(50)]

# -- reuse -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["llama", "gemma3", "mamba", "qwen35"])
def test_an_exact_repeat_decodes_no_prompt_token(open_model, fresh, arch):
    llm = open_model(arch, swa_full=False)
    first = take(llm, PROMPT)
    counter = DecodeCounter(llm)
    assert take(llm, PROMPT) == first == fresh(PROMPT, arch=arch, swa_full=False)
    answer_only = len(first) - 1  # the last token was sampled, not decoded
    assert counter.take() <= answer_only + (arch == "llama")  # stock replays one token there


def test_without_the_cache_everything_is_upstreams(open_model, fresh):
    llm = open_model(prompt_cache=False)
    assert take(llm, PROMPT) == fresh(PROMPT)
    assert llm.prompt_cache is None
    assert llm.last_request is None
    assert type(llm._ctx) is llama_cpp._internals.LlamaContext


# -- the cache -------------------------------------------------------------------------------------


def test_models_that_share_a_cache_never_serve_each_other(open_model, fresh):
    cache = PromptCache()
    first, second = open_model("mamba", prompt_cache=cache), open_model("mamba2", prompt_cache=cache)
    take(first, PROMPT)
    assert take(second, PROMPT) == fresh(PROMPT, arch="mamba2")
    assert second.last_request.cached == 0


@pytest.mark.parametrize("arch", ["qwen35", "mamba"])
def test_a_damaged_checkpoint_is_dropped_and_decoded_again(open_model, fresh, caplog, arch):
    llm = open_model(arch)
    take(llm, PROMPT)
    for entry in llm.prompt_cache.tree.entries():
        entry.checkpoint.snapshot.flags.writeable = True
        entry.checkpoint.snapshot[-1] ^= 1
        entry.checkpoint.snapshot.flags.writeable = False
    assert take(llm, PROMPT) == fresh(PROMPT, arch=arch)
    assert llm.last_request.cached == 0
    assert "damaged" in caplog.text


def test_a_state_with_nan_is_found_out_and_everything_decoded_again(open_model, fresh, monkeypatch):
    llm = open_model()
    save = llm.runner.live.native.save_partial

    def poisoned(out):
        save(out)
        out[-4000:] = np.full(1000, np.nan, dtype=np.float32).view(np.uint8)
        return True

    monkeypatch.setattr(llm.runner.live.native, "save_partial", poisoned)
    take(llm, PROMPT, 2)
    monkeypatch.undo()
    longer = [*PROMPT, *OTHER]
    assert take(llm, longer) == fresh(longer)
    assert len(PROMPT) not in [entry.position for entry in llm.prompt_cache.tree.entries()]
    assert take(llm, OTHER) == fresh(OTHER), "NaN stayed in memory"
    check_integrity(llm.prompt_cache)


def test_a_warmed_prompt_starts_where_it_was_warmed(open_model, fresh):
    llm = open_model()
    assert llm.warm(PROMPT).left == len(PROMPT)
    take(llm, OTHER)
    assert take(llm, [*PROMPT, 3, 4]) == fresh([*PROMPT, 3, 4])
    assert llm.last_request.cached >= len(PROMPT)


def test_a_system_prompt_is_warmed_for_every_chat(open_model):
    llm = open_model(chat_format="chatml")
    system = {"role": "system", "content": "You know all the rivers of Austria and their springs."}
    llm.warm([system])
    take(llm, OTHER)
    chat = llm.create_chat_completion([system, {"role": "user", "content": "Which?"}], max_tokens=2)
    assert chat["usage"]["prompt_tokens_details"]["cached_tokens"] > 20
    assert llm.warm("some text").total > 0


def test_without_a_cache_there_is_nothing_to_warm(open_model):
    with pytest.raises(LlamaHybridError, match="no prompt cache"):
        open_model(prompt_cache=False).warm(PROMPT)


# -- upstream's ways -------------------------------------------------------------------------------


def test_sent_tokens_are_checked_like_a_draft(open_model, fresh):
    llm = open_model()
    right = fresh(PROMPT, 12)
    generator = llm.generate(PROMPT, temp=0.0)
    answer = [next(generator)]
    answer.append(generator.send(right[1:3]))  # guessed right
    answer += itertools.islice(generator, 3)
    answer.append(generator.send([(right[5] + 1) % 200, 3]))  # guessed wrong
    answer += itertools.islice(generator, 4)
    assert answer == right[: len(answer)]


@pytest.mark.parametrize("draft", [False, True])
@pytest.mark.parametrize("logits_all", [False, True])
def test_sent_tokens_may_be_more_than_a_batch(open_model, fresh, logits_all, draft):
    drafts = {"draft_model": LlamaPromptLookupDecoding(num_pred_tokens=4)} if draft else {}
    llm = open_model(n_batch=16, logits_all=logits_all, **drafts)
    right = fresh(PROMPT, 60)
    generator = llm.generate(PROMPT, temp=0.0)
    answer = [next(generator), generator.send([*right[1:40], *OTHER])]
    answer += itertools.islice(generator, 50)
    assert answer == right[: len(answer)]


@pytest.mark.parametrize("draft", [False, True])
def test_sent_tokens_that_do_not_fit_are_refused(open_model, draft):
    drafts = {"draft_model": LlamaPromptLookupDecoding()} if draft else {}
    llm = open_model(**drafts)
    generator = llm.generate([5] * 500, temp=0.0)
    next(generator)
    with pytest.raises(ContextOverflow):
        generator.send([1] * 20)
    assert len(take(llm, PROMPT)) == 8


@pytest.mark.parametrize("arch", ["llama", "qwen35"])
def test_kept_logits_of_any_token_can_be_sampled_from(open_model, arch):
    tokens = []
    for kind, n_batch in ((llama_cpp.Llama, 512), (Llama, 512), (Llama, 32)):
        llm = open_model(arch, kind, logits_all=True, n_batch=n_batch)
        llm.eval(PROMPT)
        tokens.append([llm.sample(temp=0.0, idx=place) for place in range(len(PROMPT))])
    assert tokens[1] == tokens[2] == tokens[0]


def test_logits_of_tokens_before_are_not_sampled_from(open_model):
    llm = open_model("llama", logits_all=True)
    llm.eval(OTHER)
    llm.load_state(without_rows(open_model("llama"), PROMPT))
    with pytest.raises(LlamaHybridError, match="no logits"):
        llm.sample(temp=0.0, idx=1)
    assert 0 <= llm.sample(temp=0.0) < llm.n_vocab()


def without_rows(llm, tokens):
    """A state whose logits were kept for the last token alone."""
    llm.eval(tokens)
    return llm.save_state()


def test_unknown_arguments_are_swallowed_as_upstream_does(open_model):
    assert take(open_model(no_such_argument=1), PROMPT, 1)


def test_a_pickled_model_comes_back_with_its_settings(open_model):
    llm = open_model(prompt_cache=PromptCache(ram_bytes=123_456), wait=2.5, explain=True)
    again = pickle.loads(pickle.dumps(llm))
    assert take(again, PROMPT) == take(llm, PROMPT)
    assert again.prompt_cache.ram_bytes == 123_456
    assert (again.__getstate__()["wait"], again.__getstate__()["explain"]) == (2.5, True)


def test_a_verbose_model_prints_what_it_reuses_in_upstreams_words(open_model, capsys):
    llm, stock = open_model("llama"), open_model("llama", llama_cpp.Llama)
    said = []
    for each in (llm, stock):
        each.verbose = True
        for prompt in (PROMPT, PROMPT[:50] + OTHER[:7], OTHER):
            take(each, prompt, 2)
        said.append([line for line in capsys.readouterr().err.splitlines() if "Llama.generate" in line])
    assert said[0] == said[1] == ["Llama.generate: 50 prefix-match hit, remaining 7 prompt tokens to eval"]
    take(llm, OTHER, 1)
    assert "full prompt already cached" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["sample", "detokenize", "the tokenizer's", "of the tokenizer"])
@pytest.mark.parametrize("stream", [False, True])
def test_methods_that_a_program_replaced_in_upstream_make_the_answer(open_model, monkeypatch, name, stream):
    llm, stock = open_model("llama"), open_model("llama", llama_cpp.Llama)
    changed = []

    def ask(each):
        changed.clear()
        made = each("some words", max_tokens=6, temperature=0, stream=stream)
        text = (
            "".join(chunk["choices"][0]["text"] for chunk in made) if stream else made["choices"][0]["text"]
        )
        return text, bool(changed)

    def loud(method, tokens):
        changed.append(tokens)
        return method(tokens).upper()

    plain = ask(stock)
    if name == "sample":
        method = llama_cpp.Llama.sample
        monkeypatch.setattr(
            llama_cpp.Llama, "sample", lambda *a, **k: changed.append(1) or 5 + method(*a, **k) % 40
        )
    elif name == "detokenize":
        spell = llama_cpp.Llama.detokenize
        monkeypatch.setattr(
            llama_cpp.Llama, name, lambda llm, ids, **_: loud(lambda ids: spell(llm, ids), ids)
        )
    elif name == "the tokenizer's":
        kind = type(llm.tokenizer_)
        method = kind.detokenize
        monkeypatch.setattr(kind, "detokenize", lambda own, ids, **_: loud(lambda ids: method(own, ids), ids))
    else:
        for each in (llm, stock):
            spell = each.tokenizer_.detokenize
            each.tokenizer_.detokenize = lambda ids, spell=spell, **_: loud(spell, ids)
    assert ask(llm) == ask(stock) != plain


def test_ids_of_completions_are_those_that_a_test_of_the_program_sets(open_model, monkeypatch):
    monkeypatch.setattr("uuid.uuid4", lambda: "set")
    for cls in (Llama, llama_cpp.Llama):
        assert open_model("llama", cls)("some words", max_tokens=1)["id"] == "cmpl-set"


@pytest.mark.parametrize("ids", [[[5, 6]], [[5, 6], [7]], np.array([[5, 6], [7, 8]])])
def test_a_list_of_prompts_is_no_prompt(open_model, ids):
    llm = open_model("llama")
    for call in (llm.eval, lambda _: llm([[5, 6]]), lambda given: take(llm, given, 1)):
        with pytest.raises(TypeError):
            call(ids)
    assert llm.n_tokens == 0


@pytest.mark.parametrize("name", ["create_completion", "sample"])
def test_a_method_of_a_subclass_is_called_with_upstreams_arguments(open_model, name):
    def seen_by(base):
        seen = []

        def noted(self, *args, **options):
            seen.append((len(args), {key: each for key, each in options.items() if key != "idx"}))
            return getattr(base, name)(self, *args, **options)

        llm = open_model("llama", type("Noting", (base,), {name: noted}))
        said = llm("some words", None, 4, seed=3)["choices"][0]["text"]
        return seen, said, take(llm, PROMPT, 2)

    assert seen_by(Llama) == seen_by(llama_cpp.Llama)


def test_a_missing_model_is_upstreams_error():
    with pytest.raises(ValueError, match="does not exist"):
        Llama("/no/such/model.gguf", verbose=False)


def test_a_corrupt_model_is_upstreams_error(tmp_path):
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(ValueError, match="Failed to load"):
        Llama(str(tmp_path / "bad.gguf"), verbose=False)


def test_a_vocabulary_without_a_model(open_model):
    assert open_model(vocab_only=True).tokenize(b"hi")


# -- contexts that are opened, and arguments that are refused ------------------------------------------


@pytest.mark.parametrize(
    ("options", "sequences"),
    [
        ({}, 2),
        ({"n_batch": 2}, 2),
        ({"n_batch": 1}, 1),
        ({"n_ubatch": 1}, 1),
        ({"n_ubatch": 0}, 2),
        ({"n_ctx": 1}, 1),
        ({"n_ctx": 2}, 2),
        ({"paging": False}, 1),
        ({"n_parallel": 4}, 4),
        ({"n_parallel": 4, "paging": False}, 4),
        ({"prompt_cache": False}, 1),
    ],
)
def test_context_of_one_slot_has_a_sequence_for_paging_where_a_batch_has_room(open_model, options, sequences):
    llm = open_model(**options)
    assert llm.context_params.n_seq_max == sequences
    assert llm.create_completion([5], max_tokens=1)


@pytest.mark.parametrize("options", [{"n_batch": 4}, {"n_ubatch": 2}, {"n_ctx": 4}])
def test_more_slots_than_a_batch_has_room_for_are_refused(open_model, options):
    with pytest.raises(ValueError, match="n_parallel"):
        open_model(n_parallel=4, **options)


def test_the_smallest_contexts_open_as_upstreams(open_model):
    assert open_model("llama", n_ctx=1).n_ctx() == open_model("llama", llama_cpp.Llama, n_ctx=1).n_ctx()
    assert open_model("llama", n_ctx=3, n_parallel=2).create_completion([5], max_tokens=1)
    with pytest.raises(ValueError, match="n_parallel=2 needs"):
        open_model("llama", n_ctx=2, n_parallel=2)


@pytest.mark.parametrize("slots", [1, 2])
def test_a_context_of_less_than_nothing_is_refused(open_model, slots):
    with pytest.raises(ValueError, match="n_ctx counts tokens"):
        open_model(n_ctx=-1, n_parallel=slots)
    for name in ("n_batch", "n_ubatch"):
        with pytest.raises(ValueError, match="n_batch and n_ubatch count tokens"):
            open_model(n_parallel=slots, **{name: -1})


@pytest.mark.parametrize("prompt_cache", [None, False])
def test_an_adapter_that_cannot_be_read_is_refused(open_model, tmp_path, prompt_cache):
    (tmp_path / "no.gguf").write_bytes(b"GGUF" + bytes(100))
    for name in ("no.gguf", "missing.gguf"):
        with pytest.raises(RuntimeError, match=f"Failed to initialize LoRA adapter from lora path: .*{name}"):
            open_model("llama", lora_path=str(tmp_path / name), prompt_cache=prompt_cache)


NOT_CAUSAL = [{"attention_type": 1}, {"kv_overrides": {"qwen35.attention.causal": False}}]


@pytest.mark.parametrize("options", NOT_CAUSAL)
def test_attention_that_is_not_causal_reuses_no_prefix(open_model, options):
    """The state of a prefix depends on the tokens behind it."""
    llm, stock = open_model(**options), open_model(cls=llama_cpp.Llama, **options)
    for prompt in (PROMPT, [*PROMPT[:20], 9, 8, 7], PROMPT):
        assert take(llm, prompt) == take(stock, prompt)
    assert take(stock, PROMPT) != take(open_model(cls=llama_cpp.Llama), PROMPT)


def test_drafts_where_attention_is_not_causal_are_upstreams(open_model):
    options = {"attention_type": 1, "draft_model": LlamaPromptLookupDecoding()}
    llm, stock = open_model("llama", **options), open_model("llama", llama_cpp.Llama, **options)
    assert take(llm, PROMPT[:20] * 3, 20) == take(stock, PROMPT[:20] * 3, 20)


def test_a_model_without_memory_is_upstreams(tiny_model):
    llm = Llama(str(tiny_model("bert", vocab="bert-bge")), **{**SETTINGS, "n_ctx": 64})
    assert llm.prompt_cache is None
    assert llm.last_request is None
    llm.close()


@pytest.mark.parametrize("token", [-1, 100_000])
def test_text_of_ids_outside_the_vocabulary_is_an_error_and_not_the_end(open_model, token):
    """The library ends the process, and with it all other requests."""
    llm = open_model("llama")
    with pytest.raises(ValueError, match="token ids are from 0 to"):
        llm.detokenize([1, token])
    assert llm.detokenize(llm.tokenize(b"on it goes", add_bos=False)).strip() == b"on it goes"
