"""README and docs are true: tables are the results', commands and paths exist, Python blocks run."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from benchmarks import figures
from llamahybrid.cli.main import app

ROOT = Path(__file__).parents[1]
PAGES = {page.name: page for page in (*figures.PAGES, ROOT / "CONTRIBUTING.md")}
MADE_LATER = re.compile(r"^(\.venv/|\.\./|OUT|DIR|~|patches/VERSION)")
"""Paths that are there after `make venv`, or are the reader's own."""

FILES = re.compile(r"(?:[\w.-]+/)*[\w.-]+\.(?:py|md|json|toml|patch|jsonl|svg)|(?:[\w.-]+/)+")
PLACES = ("", "llamahybrid", "llamahybrid/server", "docs", "tests")


def read(name: str) -> str:
    return PAGES[name].read_text(encoding="utf-8")


def code(text: str) -> Iterator[str]:
    """Lines of code blocks and pieces of `code`."""
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        if not language:
            yield from block.splitlines()
    yield from (piece.replace("\n", " ") for piece in re.findall(r"`([^`]+)`", without_blocks(text)))


def without_blocks(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("name", PAGES)
def test_its_tables_are_the_results(name: str) -> None:
    text = read(name)
    assert figures.filled(text) == text, "python -m benchmarks.figures"


@pytest.mark.parametrize("name", PAGES)
def test_its_files_and_links_exist(name: str) -> None:
    text = without_blocks(read(name))
    named = [piece for piece in re.findall(r"`([^`\s]+)`", text) if FILES.fullmatch(piece)]
    linked = [link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link]
    missing = [link for link in linked if not (PAGES[name].parent / link).exists()]
    for file in named:
        if not MADE_LATER.match(file) and not any((ROOT / place / file).exists() for place in PLACES):
            missing.append(file)
    assert not missing


def commands(text: str) -> Iterator[list[str]]:
    for line in code(text):
        found = re.match(r"(?:\$ )?(?:python -m |\.venv/bin/|LLAMAHYBRID_\w+=\S+ )*llamahybrid (.*)", line)
        if found and "=" not in found[1].split()[0]:
            yield shlex.split(
                found[1].partition(" #")[0].replace("[", "").replace("]", "").replace("...", "")
            )


def unknown(words: list[str]) -> list[str]:
    """Words of a command line that the program does not know: commands, and options of them."""
    command: Any = get_command(app)
    path: list[str] = []
    while words and (commands := getattr(command, "commands", None)) is not None:
        if words[0].startswith("-"):
            break
        if words[0] not in commands:
            return [" ".join([*path, words[0]])]
        path.append(words[0])
        command, words = commands[words[0]], words[1:]
    options = [word.partition("=")[0] for word in words[: words.index("--") if "--" in words else None]]
    options = [option for option in options if option.startswith("--")]
    known = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
    left = [option for option in options if option not in {*known, "--help"}]
    if left and command.context_settings.get("ignore_unknown_options"):  # it reads them itself
        run = [sys.executable, "-m", "llamahybrid", *path, "--help"]
        told = subprocess.run(run, capture_output=True, text=True, check=True).stdout
        left = [option for option in left if option not in told]
    return [f"{' '.join(path)} {option}" for option in left]


@pytest.mark.parametrize("name", PAGES)
def test_its_commands_exist(name: str) -> None:
    assert not [wrong for words in commands(read(name)) if words for wrong in unknown(words)]


@pytest.mark.parametrize("name", PAGES)
def test_its_make_targets_exist(name: str) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = {found for line in code(read(name)) for found in re.findall(r"^make ([\w-]+)", line)}
    assert not {target for target in targets if not re.search(rf"^{target}:", makefile, re.MULTILINE)}


def test_a_command_or_option_that_is_none_is_seen() -> None:
    assert unknown(["chatt", "MODEL"]) == ["chatt"]
    assert unknown(["chat", "MODEL", "--keeep"]) == ["chat --keeep"]
    assert unknown(["cache", "gone"]) == ["cache gone"]


BLOCKS = [
    pytest.param(block, id=f"{name} {number}")
    for name in PAGES
    if name != "api.md"  # signatures
    for number, block in enumerate(re.findall(r"^```python\n(.*?)^```", read(name), re.DOTALL | re.MULTILINE))
]


@pytest.mark.parametrize("block", BLOCKS)
def test_its_python_runs(
    block: str, tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.gguf").symlink_to(tiny_model("qwen35"))
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    small = block.replace("n_ctx=32768", "n_ctx=1024, n_threads=1, verbose=False")
    exec(small.replace("completion(messages)", "completion(messages, max_tokens=16)"), names)
    if "answer" in names:  # README's: its second turn reuses the first
        request = names["llm"].last_request
        assert request.left == request.total - request.cached
        assert request.cached == names["answer"]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    if "llm" in names:
        names["llm"].close()


SAMPLES = {
    **{path.name: path.read_text(encoding="utf-8") for path in sorted((ROOT / "examples").glob("*.py"))},
    **{
        f"{name} {number}": block
        for name in PAGES
        for number, block in enumerate(
            re.findall(r"^```\w*\n(.*?)^```", read(name), re.DOTALL | re.MULTILINE)
        )
    },
}


def too_early(sample: str) -> bool:
    """It imports llama_cpp before llamahybrid, which then cannot choose the engine."""
    first = re.search(r"^\s*(?:from|import) (llama_cpp|llamahybrid)\b", sample, re.MULTILINE)
    return first is not None and first[1] == "llama_cpp"


def test_who_copies_a_sample_gets_the_engine_that_was_chosen() -> None:
    assert not [name for name, sample in SAMPLES.items() if too_early(sample)]
    assert too_early("import sys\nfrom llama_cpp import x\nfrom llamahybrid import Llama")
    assert not too_early("from llamahybrid import Llama\nimport llama_cpp")
