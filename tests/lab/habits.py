"""`make lint`: lines of pages that are too long; hints on wording and subjects. A hook: a commit's subject.

A sentence of a docstring or comment is hinted at if its subject is a pronoun ("What ...", "It ...").
A subject is refused when it is written (.pre-commit-config.yaml); lint hints at those that are not on main,
since commits that others have cannot be changed.
Run: python -m tests.lab.habits [--words]     --words lists the hints
     python -m tests.lab.habits --subject FILE    the message that git is about to commit
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

WRITTEN_BY_GIT = ("Merge ", "Revert ", "fixup! ", "squash! ", "amend! ")
"""Beginnings of subjects of any length."""


def git(*arguments: str) -> list[str]:
    """Lines of a git command's output; none outside a repository, or without a branch that it names."""
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


def long_subject(message: str) -> str | None:
    """The fault of a commit's message, if its subject is too long."""
    lines = (line.strip() for line in message.splitlines() if not line.startswith("#"))
    subject = next(filter(None, lines), "")
    if len(subject) <= SUBJECT or subject.startswith(WRITTEN_BY_GIT):
        return None
    return f"a subject of {len(subject)} letters, at most {SUBJECT}: {subject}"


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
    print(*found, sep="\n", end="\n" if found else "")
    modules = [n for n in names if n.startswith("llamahybrid/") and n.endswith(".py")]
    told = [(n, *hint) for n in modules for hint in hints((ROOT / n).read_text(encoding="utf-8"))]
    for name, line, sentence in told if words else ():
        print(f"{name}:{line}: {sentence[:100]}")
    if told:
        print(f"hint: {len(told)} sentences with a pronoun as subject (python -m tests.lab.habits --words)")
    for subject in git("log", "--no-merges", "--format=%s", "main..HEAD", "--"):
        if fault := long_subject(subject):
            print(f"hint: {fault}")
    return 1 if found else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="lengths of lines and subjects; hints on wording")
    parser.add_argument("--words", action="store_true", help="list the hints")
    parser.add_argument("--subject", type=Path, metavar="FILE", help="check a commit's message alone")
    parsed = parser.parse_args()
    if parsed.subject is not None:
        sys.exit(long_subject(parsed.subject.read_text(encoding="utf-8")))
    sys.exit(main(parsed.words))
