"""A report as Markdown for a pull request."""

from __future__ import annotations

from collections.abc import Iterator

from llamahybrid.harness.render.document import TEXTS, Section, Table, footer, sections
from llamahybrid.harness.render.sentences import headline
from llamahybrid.harness.report import Report

_MARKS = {"ok": "✅", "bad": "❌", "cannot tell": "❔"}
_SPECIAL = frozenset("\\`*_{}[]<>()#+!|~$&-")


def markdown(report: Report) -> str:
    """Return the document."""
    lines = [f"## Prefix reuse: {_escaped(headline(report))}"]
    for section in sections(report):
        lines += ["", *_section(section)]
    return "\n".join((*lines, "", f"<sub>{_escaped(footer(report))}</sub>")) + "\n"


def _section(section: Section) -> Iterator[str]:
    yield f"### {_MARKS.get(section.outcome or '', '')} {_escaped(section.title)}"
    yield ""
    yield from (f"- {_MARKS[said.outcome]} {_escaped(said.text)}" for said in section.sentences)
    for table in section.tables:
        yield from _table(table)
    for title, texts in section.lists.items():
        yield from ("", f"<details><summary>{title} ({len(texts)})</summary>", "")
        yield from (f"- {_escaped(text)}" for text in texts)
        yield from ("", "</details>")
    yield from ("", f"<sub>{_escaped(section.about)}</sub>")


def _table(table: Table) -> Iterator[str]:
    yield from ("", *([f"**{_escaped(table.title)}**", ""] if table.title else []))
    yield f"| {' | '.join(map(_escaped, table.head))} |"
    yield f"|{'|'.join('---' if name in TEXTS else '---:' for name in table.head)}|"
    for row in table.rows:
        yield f"| {' | '.join(_MARKS.get(cell) or _escaped(cell) for cell in row)} |"


def _escaped(text: str) -> str:
    """Return `text` in one line, without markup and mentions."""
    plain = "".join(f"\\{letter}" if letter in _SPECIAL else letter for letter in " ".join(text.split()))
    return plain.replace("@", "@<!-- -->")
