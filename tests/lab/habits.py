"""`make lint`: lines of pages and subjects of commits that are too long; hints on wording.

A sentence of a docstring or comment is hinted at if its subject is a pronoun ("What ...", "It ...").
Run: python -m tests.lab.habits [--words]   (--words lists the hints)
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]

LINE = 120
"""Letters of a line of a page; tables, links and code are left out. ruff checks Python (110)."""

SUBJECT = 72
"""Letters of a commit's subject."""

WRITTEN_BY_SCRIPTS = {"docs/reference/api.md"}

PRONOUN = re.compile(
    r"(What|Who|Whoever|Whatever|Whose|It|It's|Those|These|That|One|Nobody|Somebody|Others|Nor|Neither|How"
    r"|Where|Whether|So (long|many|much)|All but|As far as)\b"
)

SINCE = "2026-11-27"
"""The day from which on subjects of commits are checked."""


def git(*arguments: str) -> list[str]:
    """Lines of a git command's output; none outside a repository, or where it knows no such commit."""
    try:
        run = subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, text=True)
    except FileNotFoundError:
        return []
    return run.stdout.splitlines() if run.returncode == 0 else []


def long_lines(name: str, text: str) -> Iterator[str]:
    """Lines of a page that are too long."""
    fenced = False
    for number, line in enumerate(text.splitlines(), 1):
        fenced ^= line.startswith("```")
        exempt = fenced or line.startswith("|") or "](" in line
        if len(line) > LINE and not exempt:
            yield f"{name}:{number}: {len(line)} letters, at most {LINE}"


def long_subjects() -> Iterator[str]:
    """Commits that are not on main yet and whose subject is too long."""
    for line in git("log", "--no-merges", f"--since={SINCE}", "--format=%h %s", "main..HEAD"):
        commit, _, subject = line.partition(" ")
        if len(subject) > SUBJECT:
            yield f"commit {commit}: a subject of {len(subject)} letters, at most {SUBJECT}"


def remarks(source: str) -> Iterator[tuple[int, str]]:
    """Docstrings and comments of a module, with their lines."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield node.lineno, text
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# ")


def hints(source: str) -> Iterator[tuple[int, str]]:
    """Sentences of a module whose subject is a pronoun."""
    for line, text in remarks(source):
        for sentence in re.split(r"(?<=[.;:?!])\s+", " ".join(text.split())):
            if PRONOUN.match(sentence):
                yield line, sentence


def main(words: bool) -> int:
    """Print what is found; 1 where something is too long."""
    names = git("ls-files")
    texts = [n for n in names if n.endswith(".md") and n not in WRITTEN_BY_SCRIPTS]
    found = [fault for n in texts for fault in long_lines(n, (ROOT / n).read_text(encoding="utf-8"))]
    found += long_subjects()
    print(*found, sep="\n", end="\n" if found else "")
    modules = [n for n in names if n.startswith("llamahybrid/") and n.endswith(".py")]
    told = [(n, *hint) for n in modules for hint in hints((ROOT / n).read_text(encoding="utf-8"))]
    for name, line, sentence in told if words else ():
        print(f"{name}:{line}: {sentence[:100]}")
    if told:
        print(f"hint: {len(told)} sentences with a pronoun as subject (python -m tests.lab.habits --words)")
    return 1 if found else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--words", action="store_true", help="list the hints")
    sys.exit(main(parser.parse_args().words))
