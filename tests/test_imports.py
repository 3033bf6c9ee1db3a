"""Importing is cheap, goes only as far as it must, and points downward."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import llamahybrid

PACKAGE = Path(__file__).parents[1] / "llamahybrid"


def loaded_after(code: str) -> set[str]:
    """Names of the modules a fresh interpreter holds after running `code`."""
    script = f"{code}\nimport sys\nprint(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(run.stdout.split())


def test_the_package_alone_loads_neither_the_engine_nor_numpy() -> None:
    assert not {"llama_cpp", "numpy", "typer"} & loaded_after("import llamahybrid")


def test_building_the_engine_needs_platformdirs_and_rich_only() -> None:
    loaded = loaded_after("import llamahybrid.engine.__main__")
    assert not {"llama_cpp", "numpy", "cffi", "xxhash", "typer", "diskcache"} & loaded


def test_the_shim_is_bound_only_when_asked_for() -> None:
    assert "llama_cpp" not in loaded_after("import llamahybrid.capi.shim")


def test_the_prompt_cache_stands_apart() -> None:
    every = (
        "import importlib, pkgutil, llamahybrid.prompt_cache as room\n"
        "for module in pkgutil.iter_modules(room.__path__, room.__name__ + '.'):\n"
        "    importlib.import_module(module.name)"
    )
    loaded = loaded_after(every)
    ours = {name for name in loaded if name.startswith("llamahybrid.")}
    assert len(ours) > 20
    outside = {n for n in ours if not n.startswith(("llamahybrid.prompt_cache", "llamahybrid.engine"))}
    assert outside == {"llamahybrid.errors"}  # and the engine's choice, which the package itself makes
    assert not [name for name in loaded if name.startswith("llama_cpp")]


@pytest.mark.parametrize("name", llamahybrid.__all__)
def test_everything_exported_is_there(name: str) -> None:
    assert getattr(llamahybrid, name) is not None
    assert name in dir(llamahybrid)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nonsense"):
        llamahybrid.nonsense  # noqa: B018


# -- which way imports point ----------------------------------------------------------------------

ORDER = (
    "llamahybrid",  # the front door; `cli` is the other one
    "__main__",
    "cli",
    "assertions",
    "program",
    "installation",
    "ray",
    "server",
    "events",
    "evaluate",
    "hazards",
    "llama",
    "configuration",
    "saved_state",
    "request",
    "speculation",
    "memory",
    "tiny",
    "prompt_cache",  # handed data by all above; imports nothing of the package but its errors
    "devices",
    "capi",
    "engine",
    "children",
    "files",
    "signatures",
    "upstream",  # the names of llama_cpp that all of these lean on
    "errors",
)
"""Rooms and modules of the top folder: each imports only from those after it."""

FOR_TYPES_ONLY = {
    ("llamahybrid.capi.calls", "llamahybrid.prompt_cache.base"),
    ("llamahybrid.capi.sampling", "llamahybrid.prompt_cache.base"),
    ("llamahybrid.hazards.context", "llamahybrid.hazards.bench"),
    ("llamahybrid.memory.adapters", "llamahybrid.memory.context"),
    ("llamahybrid.memory.watching", "llamahybrid.memory.context"),
    ("llamahybrid.memory.shared", "llamahybrid.memory.sequence"),
    ("llamahybrid.request.answer", "llamahybrid.llama"),
    ("llamahybrid.request.answers", "llamahybrid.llama"),
    ("llamahybrid.request.arrays", "llamahybrid.llama"),
    ("llamahybrid.request.assembly", "llamahybrid.llama"),
    ("llamahybrid.request.batcher", "llamahybrid.request.slots"),
    ("llamahybrid.request.cells", "llamahybrid.request.runner"),
    ("llamahybrid.request.cells", "llamahybrid.request.slots"),
    ("llamahybrid.request.completion", "llamahybrid.llama"),
    ("llamahybrid.request.requests", "llamahybrid.llama"),
    ("llamahybrid.request.ticket", "llamahybrid.request.requests"),
    ("llamahybrid.request.ticket", "llamahybrid.request.slots"),
    ("llamahybrid.saved_state", "llamahybrid.llama"),
    ("llamahybrid.speculation.model_draft", "llamahybrid.llama"),
}
"""Imports under TYPE_CHECKING that go against the order, or would close a circle if they were run."""


@dataclass(frozen=True)
class Import:
    """One import statement's arrow between modules."""

    source: str
    target: str
    for_types: bool

    @property
    def pair(self) -> tuple[str, str]:
        return self.source, self.target


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in PACKAGE.rglob("*.py")}


def imports_of(module: str, source: str) -> Iterator[Import]:
    """Every import in a module's source, those inside functions, too."""
    nodes: list[tuple[ast.AST, bool]] = [(ast.parse(source), False)]
    while nodes:
        node, for_types = nodes.pop()
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively, line {node.lineno}"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield Import(module, inner if inner in MODULES else str(node.module), for_types)
        elif isinstance(node, ast.Import):
            yield from (Import(module, alias.name, for_types) for alias in node.names)
        elif isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            nodes += [(child, True) for child in node.body]
            nodes += [(child, for_types) for child in node.orelse]
        else:
            nodes += [(child, for_types) for child in ast.iter_child_nodes(node)]


IMPORTS = {i for name, path in MODULES.items() for i in imports_of(name, path.read_text(encoding="utf-8"))}
OWN = {i for i in IMPORTS if i.target in MODULES}


def place(module: str) -> int:
    """How far down the order a module's room is."""
    room = module.split(".")[min(1, module.count("."))]
    assert room in ORDER, f"{module}: a new room; give it a place in ORDER"
    return ORDER.index(room)


def upward(imports: Iterable[Import]) -> set[tuple[str, str]]:
    return {i.pair for i in imports if place(i.target) < place(i.source)}


def circles(imports: Iterable[Import]) -> set[tuple[str, ...]]:
    """Groups of modules that reach each other, each group in order of names."""
    follows: dict[str, set[str]] = {}
    for i in imports:
        follows.setdefault(i.source, set()).add(i.target)

    def reached(start: str) -> set[str]:
        found: set[str] = set()
        ahead = [start]
        while ahead:
            new = follows.get(ahead.pop(), set()) - found
            found |= new
            ahead += new
        return found

    reach = {module: reached(module) for module in follows}
    within = {m: {n for n in reach[m] if m in reach.get(n, ())} for m in reach if m in reach[m]}
    return {tuple(sorted(group)) for group in within.values()}


def test_imports_point_downward() -> None:
    assert upward(i for i in OWN if not i.for_types) == set()


def test_no_import_goes_round_in_a_circle() -> None:
    assert circles(i for i in OWN if not i.for_types) == set()


def test_what_is_imported_for_types_only_is_known_where_it_could_not_be_run() -> None:
    run = {i for i in OWN if not i.for_types}
    circling = {i.pair for i in OWN - run if circles(run | {i}) != circles(run)}
    assert upward(OWN - run) | circling == FOR_TYPES_ONLY


def test_the_prompt_cache_imports_nothing_of_the_package_but_errors_and_nothing_of_llama_cpp() -> None:
    room = "llamahybrid.prompt_cache"
    targets = {i.target for i in IMPORTS if i.source.startswith(room) and not i.target.startswith(room)}
    ours = {target for target in targets if target.startswith("llamahybrid")}
    assert ours <= {"llamahybrid.errors"}
    assert not {target for target in targets if target.startswith("llama_cpp")}


def test_the_package_imports_nothing_of_tests_or_benchmarks() -> None:
    outside = {i.pair for i in IMPORTS if i.target.split(".")[0] in ("tests", "benchmarks", "examples")}
    assert not outside


def test_arrows_and_circles_are_found_wherever_they_stand() -> None:
    """What the tests above rest on, on sources of its own."""
    deep = "def f():\n    if x:\n        from llamahybrid import llama\n    import llamahybrid.errors\n"
    found = set(imports_of("llamahybrid.memory.paging", deep))
    assert upward(found) == {("llamahybrid.memory.paging", "llamahybrid.llama")}
    types = "if TYPE_CHECKING:\n    from llamahybrid.llama import Llama\nelse:\n    import llamahybrid.cli\n"
    found = set(imports_of("llamahybrid.memory.paging", types))
    assert {(i.target, i.for_types) for i in found} == {
        ("llamahybrid.llama", True),
        ("llamahybrid.cli", False),
    }
    three = {Import(a, b, False) for a, b in ("ab", "bc", "ca", "cd", "de")}
    assert circles(three) == {("a", "b", "c")}
    assert circles(three | {Import("e", "d", False)}) == {("a", "b", "c"), ("d", "e")}
