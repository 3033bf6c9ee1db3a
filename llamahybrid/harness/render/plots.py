"""The plots of the page: SVG by matplotlib, in colours that the page's light and dark theme sets.

matplotlib is an extra: llamahybrid[report].
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from llamahybrid.harness.render.bars import Bar
from llamahybrid.harness.render.svg import THEME, Sheet

_MARKERS = "osD^vPX*"
_MARKER = {"markersize": 5, "markeredgewidth": 8, "markeredgecolor": (0, 0, 0, 0)}
"""The wide edge is not seen, and met by a pointer that is near."""


def timeline(bars: Sequence[Bar], longest: int, sheet: Sheet) -> str:
    """The requests of a workload on one target, from top to bottom; `longest` is the end of the axis."""
    with _figure(4.6, 0.55 + 0.19 * len(bars), sheet) as (figure, axes):
        for row, bar in enumerate(bars):
            spans, colours = list(bar.spans.values()), [THEME[part] for part in bar.spans]
            axes.broken_barh(spans, (row - 0.36, 0.72), facecolors=colours, gid=f"tip{row}")
        axes.set_yticks(range(len(bars)), [bar.label for bar in bars])
        axes.set_ylim(len(bars) - 0.4, -0.6)
        axes.set_xlim(0, max(1, longest) * 1.02)
        axes.set_xlabel("tokens")
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.locator_params(axis="x", nbins=5)
        axes.grid(axis="x")
        return figure.svg({f"tip{row}": [bar.text] for row, bar in enumerate(bars)})


def first_tokens(series: Mapping[str, Sequence[float | None]], labels: Sequence[str], sheet: Sheet) -> str:
    """Milliseconds to the first token of each request, a line for each target."""
    from matplotlib.ticker import LogLocator

    with _figure(7.4, 2.9, sheet) as (figure, axes):
        tips: dict[str, list[str]] = {}
        for i, (name, seconds) in enumerate(series.items()):
            points = [(x, s * 1e3) for x, s in enumerate(seconds, 1) if s is not None and s > 0]
            xs, ys = [x for x, _ in points], [y for _, y in points]
            look = {"color": THEME[f"series{i % 8}"], "marker": _MARKERS[i % 8], **_MARKER}
            axes.plot(xs, ys, label=short(name), gid=f"tips{i}", **look)
            named = ((labels[x - 1] if x <= len(labels) else x, ms) for x, ms in points)
            tips[f"tips{i}"] = [f"{name}, {label}: {ms:,.1f} ms" for label, ms in named]
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


def hazards(counts: Mapping[str, Mapping[str, int]], sheet: Sheet) -> str:
    """How many hazards came to which verdict, a bar for each target."""
    with _figure(7.4, 0.6 + 0.3 * len(counts), sheet) as (figure, axes):
        tips: dict[str, list[str]] = {}
        for row, (name, counted) in enumerate(counts.items()):
            left = 0
            for outcome, colour in (("ok", "ok"), ("bad", "bad"), ("cannot tell", "untold")):
                count = counted.get(outcome, 0)
                (patch,) = axes.barh([row], [count], 0.66, left, color=THEME[colour])
                patch.set_gid(f"tip{row}-{colour}")
                tips[f"tip{row}-{colour}"] = [f"{name}: {count} {outcome}"]
                if count:
                    look = {"ha": "center", "va": "center", "color": THEME["page"], "weight": "bold"}
                    axes.text(left + count / 2, row, str(count), **look)
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
def _figure(width: float, height: float, sheet: Sheet) -> Iterator[tuple[_Figure, Any]]:
    """A figure and its axes, in inches and without a window."""
    import matplotlib
    from matplotlib.figure import Figure

    text, line = THEME["text"], THEME["line"]
    look = {
        "svg.fonttype": "none",  # text stays text
        "svg.hashsalt": "",
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
        axes = drawn.add_subplot()
        for background in (drawn.patch, axes.patch):
            background.set_visible(False)
        yield _Figure(drawn, sheet), axes


@dataclass(frozen=True)
class _Figure:
    drawn: Any
    sheet: Sheet

    def svg(self, tips: Mapping[str, Sequence[str]]) -> str:
        """The `<svg>` element, with tips over the parts of these ids."""
        out = io.StringIO()
        self.drawn.savefig(out, format="svg")
        return self.sheet.plot(out.getvalue(), tips)
