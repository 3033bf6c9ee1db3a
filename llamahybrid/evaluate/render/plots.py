"""The plots of the page: SVG by matplotlib, in colours that the page's light and dark theme sets.

matplotlib is an extra: llamahybrid[report].
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from typing import Any

from llamahybrid.evaluate.render.bars import Bar

_THEME = {"text": "#000101", "line": "#000102", "ok": "#000103", "bad": "#000104", "untold": "#000105"}
_THEME |= {"reused": "#000106", "again": "#000107", "needed": "#000108"}
_THEME |= {f"series{i}": f"#0002{i:02x}" for i in range(8)}
"""Colours that stand for custom properties of the page (`--reused`), by name."""

_MARKERS = "osD^vPX*"
_PARTS = ("reused", "again", "needed")
PART_NAMES = {"reused": "reused", "again": "decoded again", "needed": "had to be decoded"}


def timeline(bars: Sequence[Bar], longest: int, key: str) -> str:
    """The requests of a workload on one target, from top to bottom; `longest` is the end of the axis."""
    with _figure(4.6, 0.55 + 0.19 * len(bars), key) as (figure, axes):
        for part in _PARTS:
            left = [bar.reused * (part != "reused") + bar.again * (part == "needed") for bar in bars]
            drawn = axes.barh(
                range(len(bars)), [getattr(bar, part) for bar in bars], 0.72, left, color=_THEME[part]
            )
            for row, patch in enumerate(drawn):
                patch.set_gid(f"tip{row}")
        axes.set_yticks(range(len(bars)), [bar.label for bar in bars])
        axes.invert_yaxis()
        axes.set_xlim(0, max(1, longest) * 1.02)
        axes.set_xlabel("tokens")
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.grid(axis="x")
        return figure.svg({f"tip{row}": bar.text for row, bar in enumerate(bars)})


def first_tokens(series: Mapping[str, Sequence[float | None]], labels: Sequence[str], key: str) -> str:
    """Milliseconds to the first token of each request, a line for each target."""
    from matplotlib.ticker import LogLocator

    with _figure(7.4, 2.9, key) as (figure, axes):
        tips = {}
        for i, (name, seconds) in enumerate(series.items()):
            points = [(x, s * 1e3) for x, s in enumerate(seconds, 1) if s is not None and s > 0]
            colour = _THEME[f"series{i % 8}"]
            xs, ys = [x for x, _ in points], [y for _, y in points]
            axes.plot(xs, ys, color=colour, marker=_MARKERS[i % 8], markersize=4, label=short(name))
            for x, milliseconds in points:
                gid = f"tip{i}-{x}"
                axes.plot([x], [milliseconds], "o", color=colour, alpha=0, markersize=9)[0].set_gid(gid)
                tips[gid] = f"{name}, {labels[x - 1] if x <= len(labels) else x}: {milliseconds:,.1f} ms"
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter("{x:,g}")
        axes.yaxis.set_minor_formatter("")
        axes.set_ylabel("ms to the first token")
        axes.set_xlabel("request")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(axis="y")
        axes.legend(loc="upper left", bbox_to_anchor=(0, 1.14), ncols=4, frameon=False, borderaxespad=0)
        return figure.svg(tips)


def hazards(counts: Mapping[str, Mapping[str, int]], key: str) -> str:
    """How many hazards came to which verdict, a bar for each target."""
    with _figure(7.4, 0.6 + 0.3 * len(counts), key) as (figure, axes):
        tips: dict[str, str] = {}
        for row, (name, counted) in enumerate(counts.items()):
            left = 0
            for outcome, colour in (("ok", "ok"), ("bad", "bad"), ("cannot tell", "untold")):
                count = counted.get(outcome, 0)
                (patch,) = axes.barh([row], [count], 0.66, left, color=_THEME[colour])
                patch.set_gid(f"tip{row}-{colour}")
                tips[f"tip{row}-{colour}"] = f"{name}: {count} {outcome}"
                if count:
                    axes.text(left + count / 2, row, str(count), ha="center", va="center", gid="inbar")
                left += count
        axes.set_yticks(range(len(counts)), [short(name) for name in counts])
        axes.invert_yaxis()
        axes.set_xlabel("hazards")
        axes.grid(axis="x")
        return figure.svg(tips)


def short(name: str, most: int = 30) -> str:
    """A target's name as it fits into a plot: the end of it, where paths differ."""
    return name if len(name) <= most else f"…{name[1 - most :]}"


@contextmanager
def _figure(width: float, height: float, key: str) -> Iterator[tuple[_Figure, Any]]:
    """A figure and its axes, in inches and without a window; `key` keeps its ids apart from other plots'."""
    import matplotlib
    from matplotlib.figure import Figure

    text, line = _THEME["text"], _THEME["line"]
    look = {
        "svg.fonttype": "none",  # text stays text
        "svg.hashsalt": key,
        "text.parse_math": False,  # names may hold a $
        "font.size": 8,
        "axes.edgecolor": line,
        "axes.labelcolor": text,
        "axes.spines.right": False,
        "axes.spines.top": False,
        "axes.axisbelow": True,
        "grid.color": line,
        "grid.linewidth": 0.5,
        "text.color": text,
        "xtick.color": text,
        "ytick.color": text,
        "xtick.major.size": 0,
        "ytick.major.size": 0,
        "ytick.minor.size": 0,
    }
    with matplotlib.rc_context(look):
        drawn = Figure(figsize=(width, height), layout="constrained")
        yield _Figure(drawn, key), drawn.add_subplot()


@dataclass(frozen=True)
class _Figure:
    drawn: Any
    key: str

    def svg(self, tips: Mapping[str, str]) -> str:
        """The `<svg>` element; `tips` are what is shown over the parts of these ids."""
        out = io.StringIO()
        self.drawn.savefig(out, format="svg", transparent=True, metadata={"Date": None})
        return themed(out.getvalue(), tips, self.key)


def themed(svg: str, tips: Mapping[str, str], key: str) -> str:
    """matplotlib's SVG as part of a page: its colours the page's, ids apart from other plots', with tips."""
    svg = svg[svg.index("<svg ") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, count=1, flags=re.S)
    for name, colour in _THEME.items():
        svg = svg.replace(colour, f"var(--{name})")
    for gid, tip in tips.items():
        svg = svg.replace(f'<g id="{gid}">', f'<g class="tip"><title>{escape(tip)}</title>')
    svg = svg.replace('id="inbar"', 'class="inbar"')
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{key}-\1"', svg)
    svg = re.sub(r'href="#([^"]+)"', rf'href="#{key}-\1"', svg)
    svg = re.sub(r"url\(#([^)]+)\)", rf"url(#{key}-\1)", svg)
    return re.sub(
        r'<svg ([^>]*?)width="[^"]*"', r'<svg role="img" \1', re.sub(r' height="[^"]*pt"', "", svg, count=1)
    )
