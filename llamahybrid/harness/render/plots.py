"""The plots of the page: pictures as matplotlib writes them, on no background, for light and dark pages.

matplotlib is an extra: llamahybrid[report].
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from llamahybrid.harness.render.bars import Bar

_MARKERS = "osD^vPX*"
_GREY = "#7d8794"
"""Text and lines: readable on white and on black."""
COLOURS = {"reused": "#3b82c4", "again": "#e0702f", "needed": "#9aa3af"}
"""Of the parts of a bar; page.css has the same."""
OUTCOMES = {"ok": "#1f8a4c", "bad": "#c43d2f", "cannot tell": "#b57f0a"}
_LOOK = {
    "text.parse_math": False,  # names may hold a $
    "font.size": 8,
    "axes.edgecolor": _GREY,
    "axes.labelcolor": _GREY,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.axisbelow": True,
    "grid.color": _GREY,
    "grid.linewidth": 0.3,
    "text.color": _GREY,
    "xtick.color": _GREY,
    "ytick.color": _GREY,
    "ytick.major.size": 0,
}


@dataclass(frozen=True)
class Picture:
    """A plot as an `<img>` shows it."""

    source: str
    """A data URL."""
    width: int
    """CSS pixels."""
    text: str
    """The figures in words, as alternative text and tooltip."""


def timeline(bars: Sequence[Bar], longest: int) -> Picture:
    """Return the requests of a workload on a target, from top to bottom; `longest` ends the axis."""
    with _drawn(4.6, 0.55 + 0.19 * len(bars), "\n".join(bar.text for bar in bars)) as (axes, made):
        for row, bar in enumerate(bars):
            colours = [COLOURS[part] for part in bar.spans]
            axes.broken_barh(list(bar.spans.values()), (row - 0.36, 0.72), facecolors=colours)
        axes.set_yticks(range(len(bars)), [bar.label for bar in bars])
        axes.set_ylim(len(bars) - 0.4, -0.6)
        axes.set_xlim(0, max(1, longest) * 1.02)
        axes.set_xlabel("tokens")
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.locator_params(axis="x", nbins=5)
        axes.grid(axis="x")
    return made[0]


def first_tokens(series: Mapping[str, Sequence[float | None]], labels: Sequence[str]) -> Picture:
    """Return the milliseconds to the first token of each request, a line for each target."""
    from matplotlib.ticker import LogLocator

    points = {
        name: [(x, s * 1e3) for x, s in enumerate(seconds, 1) if s is not None and s > 0]
        for name, seconds in series.items()
    }
    said = (
        f"{name}, {labels[x - 1] if x <= len(labels) else x}: {ms:,.1f} ms"
        for name, found in points.items()
        for x, ms in found
    )
    with _drawn(7.4, 2.9, "\n".join(said)) as (axes, made):
        for i, (name, found) in enumerate(points.items()):
            xs, ys = [x for x, _ in found], [y for _, y in found]
            axes.plot(xs, ys, label=short(name), color=f"C{i % 10}", marker=_MARKERS[i % 8], markersize=5)
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter("{x:,g}")
        axes.yaxis.set_minor_formatter("")
        axes.set_ylabel("ms to the first token")
        axes.set_xlabel("request")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(axis="y")
        axes.legend(loc="upper left", bbox_to_anchor=(0, 1.14), ncols=4, frameon=False, borderaxespad=0)
    return made[0]


def hazards(counts: Mapping[str, Mapping[str, int]]) -> Picture:
    """Return a bar of the verdicts on hazards for each target."""
    said = (f"{name}: {counted.get(each, 0)} {each}" for name, counted in counts.items() for each in OUTCOMES)
    with _drawn(7.4, 0.6 + 0.3 * len(counts), "\n".join(said)) as (axes, made):
        for row, counted in enumerate(counts.values()):
            left = 0
            for outcome, colour in OUTCOMES.items():
                count = counted.get(outcome, 0)
                axes.barh([row], [count], 0.66, left, color=colour)
                if count:
                    look = {"ha": "center", "va": "center", "color": "white", "weight": "bold"}
                    axes.text(left + count / 2, row, str(count), **look)
                left += count
        axes.set_yticks(range(len(counts)), [short(name) for name in counts])
        axes.invert_yaxis()
        axes.set_xlabel("hazards")
        axes.grid(axis="x")
    return made[0]


def short(name: str, most: int = 30) -> str:
    """Return a target's name shortened to its end."""
    return name if len(name) <= most else f"…{name[1 - most :]}"


@contextmanager
def _drawn(width: float, height: float, text: str) -> Iterator[tuple[Any, list[Picture]]]:
    """Axes of a plot in inches, and its picture after the block."""
    import matplotlib
    from matplotlib.figure import Figure

    made: list[Picture] = []
    with matplotlib.rc_context(_LOOK):
        drawn = Figure(figsize=(width, height), layout="constrained")
        axes = drawn.add_subplot()
        yield axes, made
        out = io.BytesIO()
        drawn.savefig(out, format="png", dpi=160, transparent=True)
    data = base64.b64encode(out.getvalue()).decode()
    made.append(Picture(f"data:image/png;base64,{data}", round(96 * width), text))
