"""The plots of the page: pictures as matplotlib writes them, on no background, for light and dark pages.

matplotlib is an extra: llamahybrid[report].
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from llamahybrid.harness.report import RequestFigures, WorkloadFigures, place

_MARKERS = "osD^vPX*"
_GREY = "#7d8794"
"""Text and lines: readable on white and on black."""
_COLOURS = ("#3b82c4", "#e0702f", "#9aa3af")
"""Of reused tokens, of those decoded again, and of those that had to be decoded; page.html has the same."""
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
_MOST = 60
"""Largest number of drawn requests of a workload."""


@dataclass(frozen=True)
class Picture:
    """A plot as an `<img>` shows it."""

    source: str
    """A data URL."""
    width: int
    """CSS pixels."""
    text: str
    """The figures in words, as alternative text and tooltip."""


def parts(request: RequestFigures) -> tuple[int, int, int] | None:
    """Return the tokens of a request that were reused, decoded again though known, and had to be decoded.

    None: the target hides reused and decoded tokens.
    """
    total, cached, decoded = request.total, request.cached, request.decoded
    if total is None or (cached is None and decoded is None):
        return None
    reused = max(0, total - (decoded or 0)) if cached is None else cached
    decoded = max(0, total - reused) if decoded is None else decoded
    # The last token of a known prompt is decoded for its logits.
    known = min(request.matched or 0, total - 1)
    again = min(decoded, max(0, known - reused))
    return reused, again, decoded - again


def timeline(requests: Sequence[RequestFigures], every: Iterable[Sequence[RequestFigures]]) -> Picture | None:
    """Return the tokens of each request, from top to bottom; None: they are hidden.

    `every`: the requests of all targets, whose longest one ends the axis.
    """
    drawn = [(place(each), found) for each in requests[:_MOST] if (found := parts(each)) is not None]
    if not drawn:
        return None
    longest = max(sum(parts(each) or ()) for of in every for each in of)
    said = "\n".join(
        f"{name}: {reused:,} reused, {again:,} decoded again, {needed:,} had to be decoded"
        for name, (reused, again, needed) in drawn
    )
    with _drawn(4.6, 0.55 + 0.19 * len(drawn), said) as (axes, made):
        for row, (_, found) in enumerate(drawn):
            spans = [(sum(found[:i]), length) for i, length in enumerate(found)]
            axes.broken_barh(spans, (row - 0.36, 0.72), facecolors=_COLOURS)
        axes.set_yticks(range(len(drawn)), [name for name, _ in drawn])
        axes.set_ylim(len(drawn) - 0.4, -0.6)
        axes.set_xlim(0, max(1, longest) * 1.02)
        axes.set_xlabel("tokens")
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.locator_params(axis="x", nbins=5)
        axes.grid(axis="x")
    return made[0]


def first_tokens(figures: Mapping[str, WorkloadFigures]) -> Picture | None:
    """Return the milliseconds to the first token of each request, a line for each target; None: no times."""
    from matplotlib.ticker import LogLocator

    points = {
        name: [(x, place(r), r.ttft * 1e3) for x, r in enumerate(w.requests, 1) if r.ttft]
        for name, w in figures.items()
    }
    said = [f"{name}, {at}: {ms:,.1f} ms" for name, found in points.items() for _, at, ms in found]
    if not said:
        return None
    with _drawn(7.4, 2.9, "\n".join(said)) as (axes, made):
        for i, (name, found) in enumerate(points.items()):
            shown = name if len(name) <= 30 else f"…{name[-29:]}"
            xs, ys = [x for x, _, _ in found], [ms for _, _, ms in found]
            axes.plot(xs, ys, label=shown, color=f"C{i % 10}", marker=_MARKERS[i % 8], markersize=5)
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
