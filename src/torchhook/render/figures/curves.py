"""The loss over the steps, with the steps marked at which something was found."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from operator import itemgetter
from typing import Any

from torchhook.core.findings import Finding, Report
from torchhook.render.figures.style import BLUE, SEVERITY, VERMILLION, is_number, label, plotly, quiet

POINTS = 2000  # more than a screen is wide, few enough to draw at once
LINES = 12  # more would be a fence

Point = tuple[int, float]


def loss_curve(report: Report) -> Any:
    """The loss by step; findings are diamonds on the curve, a loss that is not finite is a cross above it.

    >>> loss_curve(Report(losses={0: 2.3, 1: 1.9})).data[0].y
    (2.3, 1.9)
    """
    points = sorted((step, loss) for step, loss in report.losses.items() if loss is not None)
    if not points:
        return None
    finite = [point for point in points if is_number(point[1])]
    broken = [point for point in points if not is_number(point[1])]
    figure = plotly("graph_objects").Figure()
    _curve(figure, _thinned(finite))
    _crosses(figure, broken[:POINTS], top=max((loss for _, loss in finite), default=1.0))
    _marks(figure, report, finite)
    figure.update_xaxes(title_text="step")
    figure.update_yaxes(title_text="loss", type="log" if _is_wide(finite) else "linear")
    return quiet(figure, height=320)


def _curve(figure: Any, points: list[Point]) -> None:
    figure.add_scatter(
        x=[step for step, _ in points],
        y=[loss for _, loss in points],
        mode="lines" if len(points) > 1 else "markers",
        line={"color": BLUE, "width": 1.5},
        hovertemplate="step %{x}: %{y:.4g}<extra></extra>",
    )


def _crosses(figure: Any, points: list[Point], top: float) -> None:
    figure.add_scatter(
        x=[step for step, _ in points],
        y=[top] * len(points),
        mode="markers",
        marker={"color": VERMILLION, "symbol": "x", "size": 7},
        text=[f"step {step}: {loss}" for step, loss in points],
        hovertemplate="%{text}<extra></extra>",
    )


def _marks(figure: Any, report: Report, finite: list[Point]) -> None:
    """A diamond at each step with findings, in the colour of the worst, and a line down through the plot."""
    steps = _by_step(report.findings)
    if not steps or not finite:
        return
    colours = [SEVERITY[max(finding.severity for finding in found)] for found in steps.values()]
    for step, colour in list(zip(steps, colours, strict=True))[:LINES]:
        figure.add_vline(step, line={"color": colour, "width": 1, "dash": "dot"}, opacity=0.6)
    figure.add_scatter(
        x=list(steps),
        y=[finite[min(bisect_left(finite, (step,)), len(finite) - 1)][1] for step in steps],
        mode="markers",
        marker={"color": colours, "symbol": "diamond", "size": 10},
        text=[_told(found) for found in steps.values()],
        hovertemplate="step %{x}<br>%{text}<extra></extra>",
    )


def _by_step(findings: Iterable[Finding]) -> dict[int, list[Finding]]:
    steps: dict[int, list[Finding]] = {}
    for finding in findings:
        if finding.step is not None:
            steps.setdefault(finding.step, []).append(finding)
    return dict(sorted(steps.items()))


def _told(found: list[Finding]) -> str:
    lines = [label(f"{finding.code} {finding.site or 'the model'}") for finding in found[:5]]
    return "<br>".join(lines + [f"… and {len(found) - 5} more"] * (len(found) > 5))


def _thinned(points: list[Point]) -> list[Point]:
    """The lowest and the highest of each stretch: spikes stay."""
    if len(points) <= POINTS:
        return points
    width = -(-2 * len(points) // POINTS)
    stretches = [points[start : start + width] for start in range(0, len(points), width)]
    loss = itemgetter(1)
    return [point for some in stretches for point in sorted({min(some, key=loss), max(some, key=loss)})]


def _is_wide(points: list[Point]) -> bool:
    """Whether a linear axis would hide most of the curve."""
    losses = [loss for _, loss in points]
    return bool(losses) and min(losses) > 0 and max(losses) / min(losses) > 50
