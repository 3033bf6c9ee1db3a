"""docs/tour.md is true: its files and symbols exist, and a prompt really goes that way."""

from __future__ import annotations

import ast
import functools
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import pytest

from tests.lab import house_picture

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "llamahybrid"
TOUR = (ROOT / "docs" / "tour.md").read_text(encoding="utf-8")


@dataclass(frozen=True)
class Row:
    """A line of a table: a file below the package, and names in it."""

    file: str
    symbols: tuple[str, ...]


def rows(section: str) -> list[Row]:
    """The rows of the table under a heading."""
    _, found, rest = TOUR.partition(f"# {section}")
    assert found, f"the tour has no section {section!r}"
    rest = rest.partition("\n#")[0]
    table = re.findall(r"^\|.*?\| `([\w/]+\.py)` \| (`[^|]*`) \|", rest, re.MULTILINE)
    return [Row(file, tuple(re.findall(r"`([\w.]+)`", names))) for file, names in table]


DOWN, UP, TOGETHER, QUESTIONS = rows("Down"), rows("Up"), rows("Together"), rows("Ten questions")


@functools.cache
def symbols(file: str) -> dict[str, int]:
    """Classes and functions of a file, "Class.method" for a class's, and where the code of each starts."""

    def named(body: list[ast.stmt], before: str) -> Iterator[tuple[str, int]]:
        for node in body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                yield before + node.name, min([node.lineno, *(d.lineno for d in node.decorator_list)])
            if isinstance(node, ast.ClassDef):
                yield from named(node.body, f"{before}{node.name}.")

    return dict(named(ast.parse((PACKAGE / file).read_text(encoding="utf-8")).body, ""))


def missing(row: Row) -> list[str]:
    """Symbols of a row that its file does not define; the file itself if there is none."""
    if not (PACKAGE / row.file).is_file():
        return [row.file]
    return [f"{row.file}: {name}" for name in row.symbols if name not in symbols(row.file)]


@pytest.mark.parametrize(
    "row", [*DOWN, *UP, *TOGETHER, *QUESTIONS], ids=lambda row: f"{row.file}-{row.symbols[0]}"
)
def test_what_a_row_names_exists(row: Row) -> None:
    assert not missing(row)


def test_the_tables_are_read_whole_and_nothing_passes_for_a_symbol_that_is_none() -> None:
    lines = TOUR.partition("## The way")[2]
    read = len(DOWN) + len(UP) + len(TOGETHER) + len(QUESTIONS)
    assert read == len(re.findall(r"^\| (?:\d+|….*) \|", lines, re.MULTILINE))
    assert len(QUESTIONS) == 10
    assert missing(Row("request/nowhere.py", ("x",))) == ["request/nowhere.py"]
    assert missing(Row("llama.py", ("Llama", "Llama.nothing"))) == ["llama.py: Llama.nothing"]


def test_every_file_and_room_that_is_mentioned_exists() -> None:
    for path in re.findall(r"`([\w/]+(?:\.py|/))`", TOUR):
        base = ROOT if path.startswith(("tests/", "llamahybrid/")) else PACKAGE
        assert (base / path).exists(), path
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert rooms == set(re.findall(r"^\| `(\w+)/` \|", TOUR, re.MULTILINE))


@pytest.mark.parametrize("way", [DOWN, UP, TOGETHER], ids=["down", "up", "together"])
def test_each_module_is_entered_once_on_each_way(way: list[Row]) -> None:
    files = [row.file for row in way]
    assert len(set(files)) == len(files)


class Recorder:
    """Which of our functions this thread enters and leaves, in order: (file, line where its code starts)."""

    def __init__(self) -> None:
        self.entered: list[tuple[str, int]] = []
        self.left: list[tuple[str, int]] = []
        self._home = f"{PACKAGE}/"

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event in ("call", "return") and code.co_filename.startswith(self._home):
            place = code.co_filename[len(self._home) :], code.co_firstlineno
            (self.entered if event == "call" else self.left).append(place)


def strays(way: list[Row], events: list[tuple[str, int]]) -> list[str]:
    """What is not true of a way: first symbols that do not come in turn, others that do not come at all."""
    ahead, there = iter(events), set(events)
    found = []
    for row in way:
        if absent := missing(row):
            found += absent
            continue
        places = [(row.file, symbols(row.file)[name]) for name in row.symbols]
        found += [f"{row.file}: {row.symbols[0]}, in turn"] if places[0] not in ahead else []
        found += [
            f"{row.file}: {n}" for n, place in zip(row.symbols, places, strict=True) if place not in there
        ]
    return found


def told(events: list[tuple[str, int]]) -> str:
    """Every function in the order it first came: what a table that is not true any more is mended by."""
    names = {(file, line): name for file, _ in set(events) for name, line in symbols(file).items()}
    return "\n".join(f"{at[0]}: {names[at]}" for at in dict.fromkeys(events) if at in names)


@pytest.fixture(scope="module")
def recorded(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Recorder:
    """The request that the tour is about."""
    from llamahybrid import Llama, PromptCache

    rules = {"role": "system", "content": "You advise the guests of a hotel by a lake. " * 10}
    boat = [rules, {"role": "user", "content": "When does the boat leave? " * 5}]
    dessert = [rules, {"role": "user", "content": "What is for dessert? " * 5}]
    options = {"n_ctx": 2048, "n_threads": 1, "n_threads_batch": 1, "verbose": False}
    recorder = Recorder()
    cache = PromptCache(1 << 26, tmp_path_factory.mktemp("kept"))
    with closing(Llama(str(tiny_model("qwen35")), prompt_cache=cache, **options)) as llm:
        answer = llm.create_chat_completion(boat, max_tokens=8, temperature=0.0)
        llm.create_chat_completion(dessert, max_tokens=8, temperature=0.0)
        boat += [answer["choices"][0]["message"], {"role": "user", "content": "And back?"}]
        before = sys.getprofile()
        sys.setprofile(recorder)
        try:
            llm.create_chat_completion(boat, max_tokens=8, temperature=0.0)
            report = llm.last_request
            assert report is not None
            assert report.left < report.total
        finally:
            sys.setprofile(before)
        assert report.source == "ram"
    return recorder


@pytest.fixture(scope="module")
def recorded_together(tiny_model: Callable[..., Path]) -> Recorder:
    """Two answers to one prompt, in threads that are begun meanwhile."""
    from llamahybrid import Llama
    from llamahybrid.request import batcher

    recorder, before = Recorder(), sys.getprofile()
    with (
        pytest.MonkeyPatch.context() as patch,
        closing(Llama(str(tiny_model("qwen35")), n_ctx=1024, n_parallel=2, verbose=False)) as llm,
    ):
        llm.slots.close()  # what decodes is started again, and recorded
        patch.setattr(batcher, "GRACE_SECONDS", 60.0)  # threads are slow while they are recorded
        threading.setprofile(recorder)
        sys.setprofile(recorder)
        try:
            llm.create_completion(
                "When does the boat leave? " * 9, n=2, max_tokens=96, seed=4, temperature=1.0
            )
        finally:
            sys.setprofile(before)
            threading.setprofile(before)
    return recorder


def test_a_prompt_goes_down_that_way(recorded: Recorder) -> None:
    assert not strays(DOWN, recorded.entered), told(recorded.entered)


def test_an_answer_comes_up_that_way(recorded: Recorder) -> None:
    assert not strays(UP, recorded.left), told(recorded.left)


def test_answers_are_made_together_that_way(recorded_together: Recorder) -> None:
    assert not strays(TOGETHER, recorded_together.entered), told(recorded_together.entered)


def test_another_order_is_noticed(recorded: Recorder) -> None:
    assert strays(DOWN[::-1], recorded.entered)
    assert strays([Row("saved_state.py", ("seal_state",))], recorded.entered)


def test_the_picture_is_that_of_the_imports() -> None:
    (drawn,) = house_picture.BLOCK.findall(TOUR)
    assert drawn == house_picture.current(), "python -m tests.lab.house_picture"


def test_the_picture_leaves_out_what_follows() -> None:
    assert house_picture.reduced({("a", "b"), ("b", "c"), ("a", "c")}) == {("a", "b"), ("b", "c")}
