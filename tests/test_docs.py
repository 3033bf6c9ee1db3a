"""Pages: examples run on a tiny model, links lead somewhere, measured tables are those of the results."""

from __future__ import annotations

import inspect
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import llamahybrid

# isort: split
import llama_cpp
import pytest
import typer

from benchmarks.figures import filled
from llamahybrid.cli.main import app
from llamahybrid.server.settings import Settings
from tests.conftest import TinyModel
from tests.lab.serving import serving

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCKS = [
    pytest.param(block, id=f"{page.name} {number}")
    for page in PAGES
    if page.name != "api.md"  # its blocks are signatures
    for number, block in enumerate(
        re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    )
]
SERVER = "http://localhost:8000"


@pytest.mark.parametrize("block", BLOCKS)
def test_python_in_the_docs_runs(
    block: str,
    tiny_model: TinyModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in re.findall(r'"([\w.-]+\.gguf)"', block):
        (tmp_path / name).symlink_to(tiny_model("qwen35"))
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    small = block.replace("n_ctx=32768", "n_ctx=1024, n_threads=1")
    if SERVER in block:
        with serving(tiny_model("qwen35")) as server:
            exec(small.replace(SERVER, server.url), names)
    else:
        exec(small, names)
    if "answer" in names:  # README's second turn reuses the first
        request = names["llm"].last_request
        assert request.left == request.total - request.cached
        assert request.cached == names["answer"]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        shown = re.findall(r"^```text\n(.*?)^```", PAGES[0].read_text(encoding="utf-8"), re.M | re.S)
        assert without_numbers(capsys.readouterr().out) in map(without_numbers, shown)
    if "llm" in names:
        names["llm"].close()


def without_numbers(text: str) -> str:
    """Text whose numbers, and the token that differs, may be others."""
    return re.sub(r"\d+|, '.*?'", "N", text)


LINK = re.compile(r"\[[^\]]*\]\((?!https?:)([^)#]*)(?:#([\w-]+))?\)")


def anchors(page: Path) -> set[str]:
    """Names of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_of_a_page_lead_to_a_file_and_a_heading(page: Path) -> None:
    for path, heading in LINK.findall(page.read_text(encoding="utf-8")):
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), path
        assert not heading or heading in anchors(there), f"{path}#{heading}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_files_and_modules_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for path in re.findall(r"`((?:[\w-]+/)+[\w-]+\.py)`", text):
        assert (ROOT / path).exists() or (ROOT / "llamahybrid" / path).exists(), path
    for module in re.findall(r"-m ((?:benchmarks|tests)\.[\w.]+\w)", text):
        assert (ROOT / module.replace(".", "/")).with_suffix(".py").exists(), module


COMMAND = re.compile(
    r"(?:^|[`(])(?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?llamahybrid ([a-z-][^`#|)\n]*)", re.MULTILINE
)
OF_SERVE = {"help", "config_file", *Settings.model_fields}


def commands_of(page: Path) -> list[str]:
    """Command lines of llamahybrid in a page's shell blocks and in its text."""
    text = page.read_text(encoding="utf-8")
    code = re.findall(r"^```sh\n(.*?)^```|(`[^`\n]+`)", text, re.DOTALL | re.MULTILINE)
    return [line.split(" -- ")[0] for parts in code for line in COMMAND.findall("".join(parts))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_commands_and_options_that_a_page_names_exist(page: Path) -> None:
    for line in commands_of(page):
        command: Any = typer.main.get_command(app)
        words = line.split()
        while words and words[0] in getattr(command, "commands", ()):
            command = command.commands[words.pop(0)]
        assert words == line.split() or command.name, line
        known = {option for each in command.params for option in (*each.opts, *each.secondary_opts)}
        for option in (word for word in words if re.match(r"--?[a-z]", word)):
            named = option.lstrip("-").replace("-", "_")
            assert option in known or (command.name == "serve" and named in OF_SERVE), line


def test_commands_of_the_pages_are_found() -> None:
    assert sum(len(commands_of(page)) for page in PAGES) > 60


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_make_targets_that_a_page_names_exist(page: Path) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    named = re.findall(r"(?:^|`)make ([a-z-]+)\b", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert set(named) <= set(targets)


def test_names_in_the_table_of_settings_exist() -> None:
    page = (ROOT / "docs" / "reference" / "configuration.md").read_text(encoding="utf-8")
    arguments = re.findall(r"`(\w+)\((\w+)=\)", page)
    assert len(arguments) > 15
    for owner, name in arguments:
        known = {*inspect.signature(getattr(llamahybrid, owner)).parameters}
        known |= {*inspect.signature(llama_cpp.Llama).parameters} if owner == "Llama" else set()
        assert name in known, f"{owner}({name}=)"
    rows = [line.split("|") for line in page.splitlines() if line.startswith("| ")][1:]
    options = {name for row in rows for name in re.findall(r"`([a-z_]+)`", row[3])}
    assert options - OF_SERVE == {"cache_salt"}, "a field of requests"


def test_own_options_of_the_server_are_in_the_pages() -> None:
    from llama_cpp.server.settings import ModelSettings, ServerSettings

    own = (
        Settings.model_fields.keys() - ModelSettings.model_fields.keys() - ServerSettings.model_fields.keys()
    )
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert {name for name in own if not re.search(rf"\b{name.replace('_', '[_-]')}\b", text)} == set()


def test_variables_of_the_environment_are_in_the_table_of_settings() -> None:
    page = (ROOT / "docs" / "reference" / "configuration.md").read_text(encoding="utf-8")
    code = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "llamahybrid").rglob("*.py"))
    named = re.compile(r"\bLLAMAHYBRID_[A-Z_]*[A-Z]\b")
    assert {*named.findall(code), "LLAMAHYBRID_TEST_LIB"} == {*named.findall(page)}


def test_the_page_of_public_names_is_that_of_the_docstrings() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "api_page.py"))
    assert made["page"]() == made["PAGE"].read_text(encoding="utf-8"), "run `make docs`"


def test_every_page_is_in_the_readme() -> None:
    linked = {(ROOT / path).resolve() for path, _ in LINK.findall(PAGES[0].read_text(encoding="utf-8"))}
    assert set(PAGES[1:]) <= linked


def test_measured_tables_are_those_of_the_results() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert filled(text) == text, f"{page.name}: run `make docs`"


EXAMPLES = sorted(path for path in (ROOT / "examples").glob("*.py") if not path.name.startswith("test_"))
"""Programs; the examples for pytest are run in tests/test_pytest_plugin.py."""

PRINTED = {
    "cancel.py": r"ended by 'cancelled' after \d+ pieces\nasked again: 0 prompt tokens decoded\n",
    "disk.py": r"(\d+) of \1 .* from: none\n\d of \1 .* from: disk\n",
    "drafts.py": r"no draft: .*\nLlamaPromptLookupDecoding: .*\nModelDraft: .*\nthe same text each time\n",
    "drop_in.py": r".* (\d+) of \1 prompt tokens .*\n(.* (?!(\d+) of \3 )\d+ of \d+ prompt tokens .*\n){2}",
    "regression_test.py": r"(request \d: .*\n){4}decoded in all: .*\nseconds: .*\ntexts equal\n",
    "several_users.py": r"((Ada|Ben|Cleo): [1-9]\d* of \d+ tokens reused, [1-9]\d* of \d+ tokens .*\n){3}",
}


TEXT: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 300}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_programs_print_reused_tokens(example: Path, tiny_model: TinyModel, tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, example, tiny_model("qwen35")],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        **TEXT,
    )
    assert run.returncode == 0, run.stderr
    assert re.fullmatch(PRINTED[example.name], run.stdout), run.stdout
    assert "Traceback" not in run.stderr
    assert not list(tmp_path.iterdir()), "an example leaves nothing behind"
    alone = subprocess.run([sys.executable, example], env={**os.environ, "PYTHONPATH": str(ROOT)}, **TEXT)
    assert alone.returncode == 1
    assert "\nRun: python examples/" in alone.stderr, "without a model it says how it is run"
    assert "Traceback" not in alone.stderr
