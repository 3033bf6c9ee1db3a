"""install: programs written for `llama_cpp.Llama` get ours, wherever they bound the class."""

from __future__ import annotations

import copy
import functools
import gc
import logging
import pickle
import threading
import time
import types
import weakref
import xmlrpc.client
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any
from unittest import mock

import llama_cpp
import pytest
from llama_cpp import Llama as BoundEarly

import llamahybrid
from tests.conftest import EMBEDDING_ALONE, SETTINGS, TinyModel, take
from tests.lab.in_process import Stock
from tests.request.asking import Started

Opener = Callable[..., Any]


def methods() -> dict[str, Any]:
    return {name: value for name, value in vars(llama_cpp.Llama).items() if callable(value)}


METHODS = methods()
PROMPT = "a" * 80
EDITED = "a" * 60 + "b" * 20


@pytest.fixture(autouse=True)
def uninstalled() -> Iterator[None]:
    yield
    llamahybrid.uninstall()
    assert methods() == METHODS


class Counting(BoundEarly):
    """A program's own class: attributes before `super().__init__`, overridden methods."""

    kind = "counting"

    def __init__(self, model_path: str, **options: Any) -> None:
        self.evaluated = 0
        self.n_tokens = 3  # which upstream sets, too
        super().__init__(model_path, **options)

    def eval(self, tokens: Any) -> None:
        self.evaluated += len(tokens)
        super().eval(tokens)

    def sample(self, *args: Any, **options: Any) -> int:
        return int(super().sample(*args, **options))

    def generate(self, tokens: Any, *args: Any, **options: Any) -> Any:
        yield from super().generate(tokens, *args, **options)


class ByName(BoundEarly):
    """Calls upstream's methods by the class's name."""

    def __init__(self, model_path: str, **options: Any) -> None:
        BoundEarly.__init__(self, model_path, **options)

    def generate(self, tokens: Any, *args: Any, **options: Any) -> Any:
        yield from BoundEarly.generate(self, tokens, *args, **options)

    def eval(self, tokens: Any) -> None:
        BoundEarly.eval(self, tokens)


class Slotted(BoundEarly):
    __slots__ = ("mark",)


class Mixin:
    def greet(self) -> str:
        return type(self).__name__


class Mixed(Mixin, BoundEarly):
    pass


def texts(llm: Any) -> list[str]:
    """Answers to a prompt, to an edited one, and to the first again."""
    said = (llm(prompt, max_tokens=8, temperature=0) for prompt in (PROMPT, EDITED, PROMPT))
    return [answer["choices"][0]["text"] for answer in said]


@pytest.mark.parametrize("cls", [BoundEarly, Counting, ByName, Slotted, Mixed])
def test_any_class_of_the_program_reuses_with_the_same_text(open_model: Opener, cls: Any) -> None:
    expected = texts(open_model(cls=Stock))
    stock = open_model(cls=cls)
    assert not isinstance(stock, llamahybrid.Llama)
    llamahybrid.install()
    llm = open_model(cls=cls)
    assert isinstance(llm, cls)
    assert isinstance(llm, llamahybrid.Llama)
    assert llm.__class__ is cls
    assert repr(llm).startswith(repr(stock).partition(" at ")[0])
    assert texts(llm) == expected
    if cls is not ByName:  # whose `generate` is upstream's loop
        assert llm.last_request.cached == len(llm.tokenize(PROMPT.encode()))
    if cls is Counting:
        texts(stock)
        assert 0 < llm.evaluated < stock.evaluated


def test_methods_called_by_class_name_give_right_answers(
    open_model: Opener, fresh: Callable[..., list[int]]
) -> None:
    """Upstream's `generate`, `eval` and `reset` on ours: as if the program had called them in a loop."""
    llamahybrid.install()
    llm = open_model()
    one, other = list(range(40, 100)), list(range(40, 70)) + [5] * 30
    for prompt in (one, other, one, one[:50], other):
        stream = BoundEarly.generate(llm, prompt, temp=0.0)
        assert list(islice(stream, 8)) == fresh(prompt)
        stream.close()
        assert take(llm, prompt[:-3]) == fresh(prompt[:-3])
    BoundEarly.reset(llm)
    BoundEarly.eval(llm, one)
    assert BoundEarly.sample(llm, temp=0.0) == fresh(one)[0]
    assert BoundEarly.create_completion(llm, PROMPT, max_tokens=4)["usage"]["prompt_tokens_details"]
    BoundEarly.reset(llm)
    BoundEarly.eval(llm, other)
    state = BoundEarly.save_state(llm)
    BoundEarly.reset(llm)
    BoundEarly.eval(llm, one)
    BoundEarly.load_state(llm, state)  # as many tokens, others
    assert take(llm, [*other, 9]) == fresh([*other, 9])
    BoundEarly.close(llm)
    with pytest.raises(Exception):  # noqa: B017, PT011 (stock: TypeError)
        take(llm, one)


def test_sampling_by_class_name_reads_its_own_logits(
    open_model: Opener, fresh: Callable[..., list[int]]
) -> None:
    """More threads than slots: this thread's tokens lie in no slot when it samples."""
    llamahybrid.install(n_parallel=2)
    llm = open_model(cls=BoundEarly)
    mine = list(range(40, 80))
    llm.reset()
    llm.eval(mine)
    for first in (5, 6, 7):
        other = threading.Thread(target=lambda first=first: (llm.reset(), llm.eval([first] * 30)))
        other.start()
        other.join()
    assert BoundEarly.sample(llm, temp=0.0) == fresh(mine)[0]


def test_existing_models_stay_stock_and_are_reported(
    open_model: Opener, caplog: pytest.LogCaptureFixture
) -> None:
    stock, own, mine = open_model(cls=BoundEarly), open_model(), open_model(cls=Counting)
    expected = texts(stock)
    with caplog.at_level(logging.WARNING, "llamahybrid"):
        found = llamahybrid.install()
    assert {id(llm) for llm in found} >= {id(stock), id(mine)}
    assert id(own) not in {id(llm) for llm in found}
    assert "stay stock" in caplog.text
    assert str(stock.model_path) in caplog.text
    assert type(stock) is BoundEarly
    assert type(mine) is Counting
    assert texts(stock) == texts(mine) == expected


def test_subclasses_defined_later_are_ours(open_model: Opener) -> None:
    llamahybrid.install()

    class Later(Counting):
        @property
        def total(self) -> int:
            return self.n_tokens

    llm = open_model(cls=Later)
    assert isinstance(llm, llamahybrid.Llama)
    assert llm.total == 0
    assert isinstance(open_model(cls=Later), type(llm))
    assert issubclass(type(llm), BoundEarly)


def test_uninstall_keeps_open_models_working(open_model: Opener) -> None:
    llamahybrid.install()
    llm, mine = open_model(cls=BoundEarly), open_model(cls=Counting)
    expected = texts(open_model(cls=Stock))
    llamahybrid.uninstall()
    llamahybrid.uninstall()
    assert type(open_model(cls=BoundEarly)) is BoundEarly
    assert type(open_model(cls=Counting)) is Counting
    assert texts(llm) == texts(mine) == expected
    assert llm.last_request.cached
    llamahybrid.install()
    assert isinstance(open_model(cls=Counting), type(mine))


def test_defaults_fill_in_missing_arguments(open_model: Opener) -> None:
    cache = llamahybrid.PromptCache(ram_bytes=1 << 22)
    llamahybrid.install(prompt_cache=cache, n_parallel=2, last_n_tokens_size=7)
    llm = open_model(cls=BoundEarly)
    assert llm.prompt_cache is cache
    assert llm.last_n_tokens_size == 7
    assert llm.n_parallel == 2
    told = open_model(cls=BoundEarly, n_parallel=1, last_n_tokens_size=9, prompt_cache=False)
    assert told.prompt_cache is None
    assert told.last_n_tokens_size == 9
    by_our_name = open_model()
    assert by_our_name.prompt_cache is not cache
    llamahybrid.install()  # others in their place
    assert open_model(cls=BoundEarly).prompt_cache is not cache


@pytest.mark.parametrize(
    "options", [{"vocab_only": True}, EMBEDDING_ALONE, {"n_batch": 2}, {"prompt_cache": False}], ids=str
)
def test_installed_slots_fall_back_to_one_where_several_cannot_be(
    open_model: Opener, caplog: pytest.LogCaptureFixture, options: Any
) -> None:
    llamahybrid.install(n_parallel=2)
    llm = open_model(cls=BoundEarly, **options)
    assert llm.n_parallel == 1
    assert ("one request at a time" in caplog.text) == ("n_batch" in options)


@pytest.mark.parametrize(
    ("defaults", "error", "words"),
    [
        ({"ram": 3}, TypeError, "ram"),
        ({"self": 3}, TypeError, "self"),
        ({"model_path": "x"}, TypeError, "model_path"),
        ({"prompt_cache": "2GiB"}, TypeError, "PromptCache"),
        ({"n_parallel": 0}, ValueError, "1 or more"),
        ({"n_parallel": True}, ValueError, "1 or more"),
    ],
)
def test_wrong_defaults_are_refused(defaults: Any, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        llamahybrid.install(**defaults)
    assert methods() == METHODS


def test_pickles_name_the_class_of_the_program(open_model: Opener) -> None:
    llamahybrid.install()
    for cls in (BoundEarly, Counting):
        llm = open_model(cls=cls)
        for protocol in (0, pickle.HIGHEST_PROTOCOL):
            pickled = pickle.dumps(llm, protocol)
            assert b"llamahybrid" not in pickled
            again = pickle.loads(pickled)
            assert type(again) is type(llm)
            again.close()
    llamahybrid.uninstall()
    stock = pickle.loads(pickled)  # as in a process that never heard of us
    assert type(stock) is Counting
    stock.close()


def test_copied_model_is_a_model_of_its_own(open_model: Opener) -> None:
    llamahybrid.install()
    llm = open_model(cls=BoundEarly)
    twin = copy.copy(llm)
    assert twin.ctx is not llm.ctx
    assert texts(twin) == texts(llm)
    twin.close()


def test_constructor_may_be_called_twice(open_model: Opener, tiny_model: TinyModel) -> None:
    """Programs try with the GPU, and without where that fails."""
    expected = texts(open_model(cls=Stock))
    llamahybrid.install(prompt_cache=(cache := llamahybrid.PromptCache(ram_bytes=1 << 24)))

    class Retrying(BoundEarly):
        def __init__(self, *args: Any, **options: Any) -> None:
            try:
                super().__init__("/nowhere.gguf")
            except ValueError:
                super().__init__(*args, **options)

    for cls in (Retrying, ByName, BoundEarly):
        llm = open_model(cls=cls)
        if cls is not Retrying:
            llm.close()
            BoundEarly.__init__(llm, str(tiny_model("qwen35")), **SETTINGS)
        assert llm.prompt_cache is cache
        assert texts(llm) == expected
        assert cls is ByName or llm.last_request.cached
        llm.close()


def test_uninstall_keeps_wrappers_of_others(open_model: Opener, monkeypatch: Any) -> None:
    """As a monitor does that wraps the constructor and a method."""
    seen = []

    def wrapped(function: Any, polite: bool) -> Any:
        def call(self: Any, *args: Any, **options: Any) -> Any:
            seen.append(function.__name__)
            return function(self, *args, **options)

        return functools.wraps(function)(call) if polite else call

    for polite in (True, False):
        llamahybrid.install()
        ours = vars(BoundEarly)["__init__"]
        outer = wrapped(ours, polite)
        with monkeypatch.context() as patch:
            patch.setattr(BoundEarly, "__init__", outer)
            patch.setattr(BoundEarly, "create_completion", wrapped(BoundEarly.create_completion, polite))
            llm = open_model(cls=BoundEarly)
            assert isinstance(llm, llamahybrid.Llama)
            llm(PROMPT, max_tokens=1)
            assert seen[-1] == "create_completion"
            llamahybrid.uninstall()
            assert vars(BoundEarly)["__init__"] is outer
            assert type(open_model(cls=BoundEarly)) is BoundEarly
            llamahybrid.install()
            again = open_model(cls=BoundEarly)
            assert isinstance(again, llamahybrid.Llama)
            assert texts(again) == texts(llm)
            llamahybrid.uninstall()
        BoundEarly.__init__ = METHODS["__init__"]


@pytest.mark.parametrize("name", ["__call__", "create_completion", "create_chat_completion"])
def test_methods_that_others_replace_later_are_called(
    open_model: Opener, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """By a monitor that calls the method, and by a test's stub that does not."""
    llamahybrid.install()
    llm, seen, method = open_model(cls=BoundEarly), [], getattr(BoundEarly, name)

    def watched(self: Any, *args: Any, **options: Any) -> Any:
        seen.append(self)
        return method(self, *args, **options)

    given = [{"role": "user", "content": "Hi"}] if "chat" in name else PROMPT
    tools: Any = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    call = llm if name == "__call__" else getattr(llm, name)
    said = call(given, max_tokens=4, temperature=0)["choices"]
    with monkeypatch.context() as patch:
        patch.setattr(BoundEarly, name, watched)
        assert call(given, max_tokens=4, temperature=0)["choices"] == said
        assert seen == [llm]
        if "chat" in name:
            chosen = {"tools": tools, "tool_choice": {"type": "function", "function": {"name": "f"}}}
            assert call(given, max_tokens=4, **chosen)["choices"][0]["message"]["tool_calls"]
            assert len(seen) == 2
        patch.setattr(BoundEarly, name, mock.Mock(return_value="stub"))
        assert call(given, stop=["x"]) == "stub"
        assert getattr(BoundEarly, name).call_args.kwargs["stop"] == ["x"]


def test_class_can_opt_out(open_model: Opener) -> None:
    llamahybrid.install()
    assert type(open_model(cls=Stock)) is Stock


def test_class_that_defines_names_of_ours_stays_stock(
    open_model: Opener, caplog: pytest.LogCaptureFixture
) -> None:
    added = vars(open_model()).keys() - vars(open_model(cls=Stock)).keys()
    llamahybrid.install()
    for name in ("cancel", "last_request", *sorted(name for name in added if not name.startswith("_"))):
        clashing = type("Clashing", (BoundEarly,), {name: lambda self: "mine"})
        caplog.clear()
        llm = open_model(cls=clashing)
        assert type(llm) is clashing, name
        assert getattr(llm, name)() == "mine"
        assert name in caplog.text
    assert texts(llm)


@pytest.mark.parametrize("first", [True, False])
def test_class_that_sets_attributes_of_ours_stays_stock(
    open_model: Opener, caplog: pytest.LogCaptureFixture, first: bool
) -> None:
    """As a count of requests, or a cache of prompts, which its program keeps in the model."""
    added = vars(open_model()).keys() - vars(open_model(cls=Stock)).keys()
    llamahybrid.install()
    for name in ("last_request", "prompt_cache", *sorted(added)):
        lines = [f"self.{name} = [5]", "super().__init__(*args, **options)"]
        body = "; ".join(lines if first else reversed(lines))
        setting = f"class Setting(Mixin, BoundEarly):\n def __init__(self, *args, **options):\n  {body}"
        names = {"BoundEarly": BoundEarly, "Mixin": Mixin}
        exec(setting, names)
        caplog.clear()
        llm = open_model(cls=names["Setting"])
        assert type(llm) is names["Setting"], name
        assert getattr(llm, name) == [5]
        assert name in caplog.text
    assert texts(llm)


def test_class_that_sets_such_attributes_of_others_is_ours(open_model: Opener) -> None:
    class Measured(BoundEarly):
        metrics = types.SimpleNamespace(requests=0)
        proxy = xmlrpc.client.ServerProxy("http://localhost")

        def create_completion(self, *args: Any, **options: Any) -> Any:
            self.metrics.requests += 1
            self.metrics.slots = found = super().create_completion(*args, **options)
            return found

    llamahybrid.install()
    llm = open_model(cls=Measured)
    assert isinstance(llm, llamahybrid.Llama)
    assert texts(llm)
    assert llm.metrics.requests


@pytest.mark.parametrize("kind", [property, functools.cached_property, classmethod])
def test_class_that_sets_attributes_of_ours_in_other_methods_stays_stock(
    open_model: Opener, kind: Any
) -> None:
    def counted(self: Any) -> int:
        def note(n: int) -> None:
            self.requests = n

        note(5)
        return 5

    llamahybrid.install()
    counting = type("Counting", (BoundEarly,), {"counted": kind(counted)})
    assert type(open_model(cls=counting)) is counting


def test_mixin_behind_upstreams_class_keeps_its_names(open_model: Opener) -> None:
    class Cancelling:
        def cancel(self) -> str:
            return "mine"

    llamahybrid.install()
    assert open_model(cls=type("Behind", (BoundEarly, Cancelling), {})).cancel() == "mine"


def test_class_that_cannot_be_subclassed_stays_stock(
    open_model: Opener, caplog: pytest.LogCaptureFixture
) -> None:
    class Registered(BoundEarly):
        def __init_subclass__(cls, *, tag: str) -> None:
            pass

    llamahybrid.install()
    assert type(open_model(cls=Registered)) is Registered
    assert "stays stock" in caplog.text


def test_install_and_uninstall_while_threads_open_models(open_model: Opener, tiny_model: TinyModel) -> None:
    path, wrong = str(tiny_model("qwen35")), []
    expected = texts(open_model(cls=Stock))

    def work() -> bool:
        for _ in range(4):
            llm = BoundEarly(path, **SETTINGS)
            if texts(llm) != expected:
                wrong.append(type(llm))
            llm.close()
        return True

    workers = [Started(work) for _ in range(2)]
    for worker in workers:
        while worker.is_alive():
            llamahybrid.install()
            llamahybrid.uninstall()
            worker.join(0.002)
    assert all(worker.result() for worker in workers)
    assert not wrong


def test_install_leaves_alone_what_other_threads_are_building() -> None:
    """A tuple that anybody refers to while it is built cannot grow."""
    over, failed = threading.Event(), list[BaseException]()

    def build() -> None:
        while not over.is_set():
            try:
                tuple(time.sleep(0) for _ in range(1000))
            except SystemError as error:
                failed.append(error)
                return

    builder = threading.Thread(target=build)
    builder.start()
    for _ in range(10):
        llamahybrid.install()
        llamahybrid.uninstall()
    over.set()
    builder.join()
    assert not failed


def test_classes_of_the_program_are_collected_with_their_instances() -> None:
    llamahybrid.install()
    passing = type("Passing", (BoundEarly,), {})
    with pytest.raises(ValueError, match="does not exist"):
        passing("/nowhere")
    gone = weakref.ref(passing)
    del passing
    for _ in range(2):  # first the class of ours that derives from it
        gc.collect()
    assert gone() is None
