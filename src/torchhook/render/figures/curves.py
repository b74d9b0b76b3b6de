"""Numbers by step: the loss with its findings, curves of several runs or parameters, the distribution of values."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import cycle
from operator import itemgetter
from typing import Any

from torchhook.core.findings import Finding, Report
from torchhook.render.figures.layers import HEALTHY_UPDATES
from torchhook.render.figures.style import (
    LEGEND,
    LONG,
    ODD,
    is_number,
    label,
    new_figure,
    not_measured,
    odd_kind,
    quiet,
    usual_gap,
)
from torchhook.render.palette import BLUE, GREEN, LINES, NONFINITE, SEVERITY
from torchhook.render.words import since

POINTS = 2000  # more than a screen is wide, few enough to draw at once
FEW = 30  # points that are marked each: between them, nothing was measured
FAINT = 0.35  # opacity of the loss behind its running mean
WIDE = 1000  # times the median size of values: where the largest is beyond, a linear scale would hide most
MARKED = 12  # steps with a vertical line

Point = tuple[int, float]
Curves = Mapping[str, tuple[Sequence[int], Sequence[float | None]]]
"""Steps and values by the name of the curve."""


def loss_curve(report: Report, rates: Mapping[int, float] | None = None, smoothing: float = 0.0) -> Any:
    """The loss by step. Findings are diamonds on the curve; crosses above it are losses that are not finite.

    With `smoothing` above 0, the loss is faint behind its running mean. `rates` are drawn below it, on the same steps.

    >>> curve, *_, means, rates = loss_curve(Report(losses={0: 2.0, 1: 1.0}), {0: 0.1}, smoothing=0.5).data
    >>> curve.y, means.y, rates.y
    ((2.0, 1.0), (2.0, 1.333), (0.1,))
    """
    points = sorted((step, loss) for step, loss in report.losses.items() if loss is not None)
    if not points:
        return None
    finite = [point for point in points if is_number(point[1])]
    broken = [point for point in points if not is_number(point[1])]
    shares = {"row_heights": [0.78, 0.22], "vertical_spacing": 0.06} if rates else {}
    figure = new_figure(2 if rates else 1, shared_xaxes=True, **shares)
    _draw_curve(figure, _thinned(finite), opacity=FAINT if smoothing else 1.0)
    _draw_crosses(figure, broken[:POINTS], top=max((loss for _, loss in finite), default=1.0))
    _mark_findings(figure, report, finite or broken)
    figure.add_scatter(
        x=[step for step, _ in finite],
        y=smoothed([loss for _, loss in finite], smoothing) if smoothing else [],
        mode="lines",
        line={"color": BLUE, "width": 2},
        hoverinfo="skip",
    )
    if rates:
        line = {"color": GREEN, "width": 1.5, "shape": "hv"}
        below = {"hovertemplate": "step %{x}: %{y:.3g}<extra></extra>", "row": 2, "col": 1}
        figure.add_scatter(x=list(rates), y=list(rates.values()), mode="lines", line=line, **below)
    heights = [loss for _, loss in finite]
    _with_axes(figure, "loss", log=_is_wide(heights), height=420 if rates else 320)
    if _is_wide(heights):
        figure.update_yaxes(**_powers(min(heights), max(heights)), row=1)
    if rates:
        figure.update_xaxes(title_text="", row=1).update_yaxes(
            title_text="learning rate", type="linear", nticks=3, tickformat=".2g", rangemode="tozero", row=2
        )
    return figure


def smoothed(values: Sequence[float], weight: float) -> list[float]:
    """The running mean in which each value counts `weight` times as much as the next one.

    On a log scale, it is the mean of logarithms: otherwise one high value would hide those after it.

    >>> smoothed([2.0, 1.0, 1.0], 0.5), smoothed([1e4, 1.0], 0.5)
    ([2.0, 1.333, 1.143], [10000.0, 21.54])
    """
    is_wide = _is_wide(values)
    total = share = 0.0
    means = []
    for value in map(math.log, values) if is_wide else values:
        total, share = weight * total + (1 - weight) * value, weight * share + 1 - weight
        mean = math.exp(total / share) if is_wide else total / share
        means.append(float(f"{mean:.4g}"))
    return means


def loss_curves(by_run: Curves) -> Any:
    """The losses of several runs."""
    known = [value for _, values in by_run.values() for value in values if value is not None and is_number(value)]
    return curves(by_run, "loss", log=_is_wide(known))


def update_curves(by_parameter: Curves) -> Any:
    """The size of each update relative to its parameter, by step, over the healthy band."""
    if not by_parameter:
        return not_measured("no parameter of this layer was measured")
    return curves(by_parameter, "relative update").add_hrect(
        *HEALTHY_UPDATES, fillcolor=GREEN, opacity=0.1, line_width=0
    )


def curves(by_name: Curves, title: str, log: bool = True) -> Any:
    """One line per name. None was not measured; a zero on a log scale is a triangle, what is not finite a cross.

    >>> line, zeros = curves({"fc.weight": ([0, 10, 20], [0.5, None, 0.0])}, "gradient norm").data
    >>> line.y, zeros.x, zeros.marker.symbol
    ((0.5, None), (20,), 'triangle-down')
    """
    known = {
        name: [(step, value) for step, value in zip(*columns, strict=False) if value is not None]
        for name, columns in by_name.items()
    }
    if not any(known.values()):
        return not_measured()
    figure, most = new_figure(), max(map(len, known.values()))
    for number, (name, points) in enumerate(known.items()):
        is_sparse = len(points) < most / 4  # a line would claim that values between two points were measured
        broken = _broken(points)
        figure.add_scatter(
            x=[step for step, _ in broken],
            y=[None if odd_kind(value, log) else value for _, value in broken],
            name=label(name),
            mode="markers" if is_sparse else "lines+markers" if len(points) < FEW or broken != points else "lines",
            marker={"size": 6 if len(points) < FEW else 4},
            line={"color": LINES[number % len(LINES)], "width": 1.5},
            hovertemplate="step %{x}: %{y:.4g}",
        )
    placed = [value for points in known.values() for _, value in points if not odd_kind(value, log)]
    log = log and bool(placed)
    low, high = (min(placed, default=0.0), max(placed, default=1.0))
    beyond = (high / low) ** 0.08 * 1.5 if log else 0.08 * (high - low)
    heights = {"zero": low / beyond if log else 0.0, "not finite": high * beyond if log else high + (beyond or 1.0)}
    colours = dict(zip(known, cycle(LINES), strict=False))
    for kind, symbol in (("zero", "triangle-down"), ("not finite", "x")):
        odd = [(step, name) for name, points in known.items() for step, value in points if odd_kind(value) == kind]
        if odd and (kind != "zero" or log or not placed):
            figure.add_scatter(
                x=[step for step, _ in odd],
                y=[heights[kind]] * len(odd),
                name=kind,
                text=[label(name) for _, name in odd],
                mode="markers",
                marker={"color": ODD[kind], "symbol": symbol, "size": 8},
                marker_line={"color": [colours[name] for _, name in odd], "width": 0 if len(known) == 1 else 1.5},
                hovertemplate=f"step %{{x}}: %{{text}} is {kind}<extra></extra>",
            )
    _with_axes(figure, title, log, height=300).update_layout(showlegend=len(figure.data) > 1, legend=LEGEND)
    return figure.update_yaxes(**_powers(low, high)) if log else figure


def _powers(low: float, high: float) -> dict[str, Any]:
    """The ticks of a log scale: powers of ten, or 1, 2 and 5 where there would be few; not every digit."""
    orders = math.log10(high) - math.log10(low)
    if orders >= 2:
        return {"tick0": 0, "dtick": math.ceil(orders / 6)}
    return {"nticks": 3} if orders >= 1 else {}


def _broken(points: list[tuple[int, float]]) -> list[tuple[int, float | None]]:
    """The points, with an empty one in each long gap, so that no line claims to know what happened there.

    >>> _broken([(0, 1.0), (1, 2.0), (2, 3.0), (50, 4.0)])
    [(0, 1.0), (1, 2.0), (2, 3.0), (26, None), (50, 4.0)]
    """
    usual = usual_gap([step for step, _ in points])
    found: list[tuple[int, float | None]] = []
    for step, value in points:
        if found and step - found[-1][0] > LONG * usual:
            found.append(((step + found[-1][0]) // 2, None))
        found.append((step, value))
    return found


def distributions(steps: Sequence[int], quantiles: Sequence[Sequence[float]]) -> Any:
    """A box from 25 % to 75 % of the values with whiskers from 1 % to 99 %, for each step at which they were measured.

    Steps are side by side, however far apart: what happened between them is not known. A step has seven quantiles; NaN
    where no value was finite, which is a cross. Values that span many orders have a scale that is linear around zero
    and logarithmic beyond.

    >>> distributions([0, 500], [[0, 1, 2, 3, 4, 5, 6]] * 2).data[0].median
    (3.0, 3.0)
    """
    if not steps:
        return not_measured()
    names = [f"{step:,}" for step in steps]
    known = [number for number, row in enumerate(quantiles) if all(map(is_number, row))]
    scale, ticks = _signed_scale([value for number in known for value in quantiles[number]])
    columns = [[scale(quantiles[number][at]) for number in known] for at in range(7)]
    low, _, left, middle, right, _, high = columns
    figure = new_figure().add_box(
        x=[names[number] for number in known],
        lowerfence=low,
        q1=left,
        median=middle,
        q3=right,
        upperfence=high,
        line={"color": BLUE, "width": 1.5},
        hoverinfo="skip" if ticks else "y",
        showlegend=False,
    )
    odd = [name for number, name in enumerate(names) if number not in known]
    figure.add_scatter(
        x=odd,
        y=[1.08 * max(high, default=1.0)] * len(odd),
        name="not finite",
        mode="markers",
        marker={"color": NONFINITE, "symbol": "x", "size": 8},
        hovertemplate="step %{x}: no value is finite<extra></extra>",
        showlegend=bool(odd),
    )
    _with_axes(figure, "value", log=False, height=300).update_layout(showlegend=bool(odd), legend=LEGEND)
    if ticks:
        figure.update_yaxes(
            tickvals=list(map(scale, ticks)), ticktext=[f"{tick:.0e}" if tick else "0" for tick in ticks]
        )
    return figure.update_xaxes(type="category", categoryorder="array", categoryarray=names)


def _signed_scale(values: Sequence[float]) -> tuple[Callable[[float], float], list[float]]:
    """Where values are drawn, and the ticks: as they are, without ticks, or with asinh if they span many orders.

    >>> scale, ticks = _signed_scale([-1e8, 1.0, 2.0, 1e4])
    >>> ticks, scale(0.0)
    ([-100000000.0, -1000000.0, -10000.0, 0.0, 10000.0, 1000000.0, 100000000.0], 0.0)
    """
    sizes = sorted(abs(value) for value in values if value)
    if not sizes or sizes[-1] < WIDE * sizes[len(sizes) // 2]:
        return float, []
    usual, top = math.log10(sizes[len(sizes) // 2]), math.floor(math.log10(sizes[-1]))
    powers = [10.0**power for power in range(top, math.ceil(usual) - 1, -math.ceil((top - usual) / 3))]
    negative = [-power for power in powers] if min(values) < 0 else []
    return lambda value: math.asinh(value / 10**usual), sorted({*negative, 0.0, *powers})


def _with_axes(figure: Any, title: str, log: bool, height: int) -> Any:
    figure.update_xaxes(title_text="step")
    figure.update_yaxes(title_text=title, type="log" if log else "linear")
    return quiet(figure, height)


def _draw_curve(figure: Any, points: list[Point], opacity: float) -> None:
    figure.add_scatter(
        x=[step for step, _ in points],
        y=[loss for _, loss in points],
        mode="lines" if len(points) > 1 else "lines+markers",
        opacity=opacity,
        line={"color": BLUE, "width": 1.5},
        hovertemplate="step %{x}: %{y:.4g}<extra></extra>",
    )


def _draw_crosses(figure: Any, points: list[Point], top: float) -> None:
    figure.add_scatter(
        x=[step for step, _ in points],
        y=[top] * len(points),
        mode="markers",
        marker={"color": NONFINITE, "symbol": "x", "size": 7},
        text=[f"step {step}: {loss}" for step, loss in points],
        hovertemplate="%{text}<extra></extra>",
    )


def _mark_findings(figure: Any, report: Report, points: list[Point]) -> None:
    """A diamond at each step with findings, in the colour of the worst one, and a vertical line."""
    steps = _by_step(report.findings)
    colours = [SEVERITY[max(finding.severity for finding in found)] for found in steps.values()]
    for step, colour in list(zip(steps, colours, strict=True))[:MARKED]:
        figure.add_vline(step, line={"color": colour, "width": 1, "dash": "dot"}, opacity=0.6, row=1, col=1)
    figure.add_scatter(
        x=list(steps),
        y=[_height_at(step, points) for step in steps],
        mode="markers",
        marker={"color": colours, "symbol": "diamond", "size": 10},
        text=[_hover_text(found) for found in steps.values()],
        hovertemplate="step %{x}<br>%{text}<extra></extra>",
    )


def _height_at(step: int, points: list[Point]) -> float:
    """The height of the curve at a step, or at the next one that it has; 1 if it is not finite anywhere."""
    height = points[min(bisect_left(points, (step,)), len(points) - 1)][1]
    return height if is_number(height) else 1.0


def _by_step(findings: Iterable[Finding]) -> dict[int, list[Finding]]:
    steps: dict[int, list[Finding]] = {}
    for finding in findings:
        step = since(finding)
        if step is not None:
            steps.setdefault(step, []).append(finding)
    return dict(sorted(steps.items()))


def _hover_text(found: list[Finding]) -> str:
    lines = [label(f"{finding.code} {finding.place}") for finding in found[:5]]
    return "<br>".join(lines + [f"… and {len(found) - 5} more"] * (len(found) > 5))


def _thinned(points: list[Point]) -> list[Point]:
    """The lowest and the highest point of each stretch, so that spikes stay; and the last point."""
    if len(points) <= POINTS:
        return points
    width = -(-2 * len(points) // POINTS)
    stretches = [points[start : start + width] for start in range(0, len(points), width)]
    loss = itemgetter(1)
    kept = [point for some in stretches for point in sorted({min(some, key=loss), max(some, key=loss)})]
    return kept if kept[-1] == points[-1] else [*kept, points[-1]]


def _is_wide(losses: Sequence[float]) -> bool:
    """Whether a linear axis would hide most of the curve."""
    return bool(losses) and min(losses) > 0 and max(losses) / min(losses) > 50
