"""install: programs that know llama_cpp alone get ours, wherever they have its class from."""

from __future__ import annotations

import copy
import functools
import gc
import logging
import pickle
import threading
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import llama_cpp
import pytest
from llama_cpp import Llama as BoundEarly

import llamahybrid
from llamahybrid import installation
from llamahybrid.evaluate.compare import Stock
from tests.conftest import SETTINGS, TinyModel, take

Opener = Callable[..., Any]


def methods() -> dict[str, Any]:
    return {name: value for name, value in vars(llama_cpp.Llama).items() if callable(value)}


METHODS = methods()
PROMPT = "a" * 80
EDITED = "a" * 60 + "b" * 20


@pytest.fixture(autouse=True)
def taken_back() -> Iterator[None]:
    yield
    llamahybrid.uninstall()
    assert methods() == METHODS


class Counting(BoundEarly):
    """A program's own, as those are: some attributes first, some methods looked over."""

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
    """What is said to a prompt, to one that parts from it, and to the first again."""
    said = (llm(prompt, max_tokens=8, temperature=0) for prompt in (PROMPT, EDITED, PROMPT))
    return [answer["choices"][0]["text"] for answer in said]


@pytest.mark.parametrize("cls", [BoundEarly, Counting, ByName, Slotted, Mixed])
def test_whatever_class_the_program_has_reuses_and_says_the_same(open_model: Opener, cls: Any) -> None:
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


def test_methods_called_by_the_classs_name_are_right(
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


def test_sampling_by_the_classs_name_beside_others(
    open_model: Opener, fresh: Callable[..., list[int]]
) -> None:
    """More threads than slots: what this one decoded lies in none when it samples."""
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


def test_what_there_is_stays_stock_works_and_is_reported(
    open_model: Opener, caplog: pytest.LogCaptureFixture
) -> None:
    stock, own, mine = open_model(cls=BoundEarly), open_model(), open_model(cls=Counting)
    expected = texts(stock)
    bare = BoundEarly.__new__(BoundEarly)
    with caplog.at_level(logging.WARNING, "llamahybrid"):
        found = llamahybrid.install()
    assert {id(llm) for llm in found} >= {id(stock), id(mine)}
    assert id(own) not in {id(llm) for llm in found}
    assert id(bare) not in {id(llm) for llm in found}
    assert "stay stock" in caplog.text
    assert str(stock.model_path) in caplog.text
    assert type(stock) is BoundEarly
    assert type(mine) is Counting
    assert texts(stock) == texts(mine) == expected
    bare._stack = stock._stack.__class__()  # else upstream's __del__ complains


def test_subclasses_made_afterwards_and_their_subclasses(open_model: Opener) -> None:
    llamahybrid.install()

    class Later(Counting):
        @property
        def total(self) -> int:
            return self.n_tokens

    llm = open_model(cls=Later)
    assert type(llm).__mro__[1:4] == (Later, Counting, installation.Installed)
    assert llm.total == 0
    assert isinstance(open_model(cls=Later), type(llm))
    assert issubclass(type(llm), BoundEarly)


def test_uninstall_leaves_what_is_ours_working(open_model: Opener) -> None:
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


def test_defaults_fill_in_where_the_program_gives_none(open_model: Opener) -> None:
    cache = llamahybrid.PromptCache(ram_bytes=1 << 22)
    llamahybrid.install(prompt_cache=cache, n_parallel=2, last_n_tokens_size=7)
    llm = open_model(cls=BoundEarly)
    assert llm.prompt_cache is cache
    assert llm.last_n_tokens_size == 7
    assert len(llm.slots.all) == 2
    told = open_model(cls=BoundEarly, n_parallel=1, last_n_tokens_size=9, prompt_cache=False)
    assert told.prompt_cache is None
    assert told.last_n_tokens_size == 9
    by_our_name = open_model()
    assert by_our_name.prompt_cache is not cache
    llamahybrid.install()  # others in their place
    assert open_model(cls=BoundEarly).prompt_cache is not cache


@pytest.mark.parametrize(
    "options", [{"vocab_only": True}, {"embedding": True}, {"n_batch": 2}, {"prompt_cache": False}], ids=str
)
def test_several_slots_are_a_wish_where_they_were_no_argument(open_model: Opener, options: Any) -> None:
    llamahybrid.install(n_parallel=2)
    llm = open_model(cls=BoundEarly, **options)
    assert len(llm.slots.all) == 1


def test_several_slots_that_there_cannot_be_are_named(
    open_model: Opener, caplog: pytest.LogCaptureFixture
) -> None:
    llamahybrid.install(n_parallel=2)
    llm = open_model(cls=BoundEarly, n_batch=2)
    assert len(llm.slots.all) == 1
    assert "one request at a time" in caplog.text


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
def test_defaults_that_mean_nothing_change_nothing(defaults: Any, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        llamahybrid.install(**defaults)
    assert methods() == METHODS


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickles_name_the_programs_class(open_model: Opener, protocol: int) -> None:
    llamahybrid.install()
    for cls in (BoundEarly, Counting):
        llm = open_model(cls=cls)
        pickled = pickle.dumps(llm, protocol)
        assert b"llamahybrid" not in pickled
        again = pickle.loads(pickled)
        assert type(again) is type(llm)
        again.close()
    llamahybrid.uninstall()
    stock = pickle.loads(pickled)  # as in a process that never heard of us
    assert type(stock) is Counting
    stock.close()


def test_copies_are_models_of_their_own(open_model: Opener) -> None:
    llamahybrid.install()
    llm = open_model(cls=BoundEarly)
    twin = copy.copy(llm)
    assert twin.ctx is not llm.ctx
    assert texts(twin) == texts(llm)
    twin.close()


def test_a_constructor_called_twice(open_model: Opener, tiny_model: TinyModel) -> None:
    """With the GPU, and where that fails without: programs do it."""
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
        assert installation._OPENING not in vars(llm)
        assert texts(llm) == expected
        assert cls is ByName or llm.last_request.cached
        llm.close()


def test_somebody_elses_wrapper_stays_and_ours_goes(open_model: Opener, monkeypatch: Any) -> None:
    """A monitor wraps the constructor and a method, before or after us; nothing is lost."""
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


def test_a_class_that_wants_to_stay_stock(open_model: Opener) -> None:
    llamahybrid.install()
    assert type(open_model(cls=Stock)) is Stock


@pytest.mark.parametrize("name", ["cancel", "last_request", "requests", "slots", "evaluation", "_scores_"])
def test_a_class_with_names_of_ours_stays_stock_and_is_told(
    open_model: Opener, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    llamahybrid.install()
    clashing = type("Clashing", (BoundEarly,), {name: lambda self: "mine"})
    llm = open_model(cls=clashing)
    assert (type(llm) is clashing) == (name != "_scores_")
    assert getattr(llm, name)() == "mine"
    assert (name in caplog.text) == (name != "_scores_")
    assert texts(llm)


def test_names_that_ours_keeps_in_an_instance_are_known(open_model: Opener) -> None:
    """`_ATTRIBUTES` is what ours adds to an instance, beside names that begin with an underscore."""
    added = vars(open_model()).keys() - vars(open_model(cls=Stock)).keys()
    assert {name for name in added if not name.startswith("_")} <= installation._ATTRIBUTES


def test_a_class_of_which_no_other_can_be_made_stays_stock(
    open_model: Opener, caplog: pytest.LogCaptureFixture
) -> None:
    class Registered(BoundEarly):
        def __init_subclass__(cls, *, tag: str) -> None:
            pass

    llamahybrid.install()
    assert type(open_model(cls=Registered)) is Registered
    assert "stays stock" in caplog.text


def test_a_model_that_is_not_there(caplog: pytest.LogCaptureFixture) -> None:
    llamahybrid.install(n_parallel=2)
    for cls in (BoundEarly, Counting):
        with pytest.raises(ValueError, match="does not exist"):
            cls("/nowhere/model.gguf", verbose=False)
    gc.collect()


def test_installing_while_others_open_models(open_model: Opener, tiny_model: TinyModel) -> None:
    """Each is ours or upstream's, whole."""
    path, wrong, over = str(tiny_model("qwen35")), [], threading.Event()
    expected = texts(open_model(cls=Stock))

    def work() -> None:
        for _ in range(6):
            llm = BoundEarly(path, **SETTINGS)
            if texts(llm) != expected:
                wrong.append(type(llm))
            llm.close()

    def switch() -> None:
        while not over.wait(0.002):
            llamahybrid.install()
            llamahybrid.uninstall()

    switcher = threading.Thread(target=switch)
    workers = [threading.Thread(target=work) for _ in range(2)]
    switcher.start()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    over.set()
    switcher.join()
    assert not wrong


def test_adapted_classes_go_with_their_instances() -> None:
    llamahybrid.install()
    before = len(installation._adapted)
    passing = type("Passing", (BoundEarly,), {})
    with pytest.raises(ValueError, match="does not exist"):
        passing("/nowhere")
    gc.collect()
    assert len(installation._adapted) == before
