"""Numbers by step: the loss with its findings, curves of several runs or parameters, the distribution of values."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any

from torchhook.core.findings import Finding, Report
from torchhook.render.figures.layers import HEALTHY_UPDATES
from torchhook.render.figures.style import LEGEND, is_number, label, new_figure, not_measured, quiet
from torchhook.render.palette import BLUE, GREEN, LINES, SEVERITY, VERMILLION

POINTS = 2000  # more than a screen is wide, few enough to draw at once
MARKED = 12  # steps with a vertical line

Point = tuple[int, float]
Curves = Mapping[str, tuple[Sequence[int], Sequence[float | None]]]
"""Steps and values by the name of the curve."""


def loss_curve(report: Report) -> Any:
    """The loss by step. Findings are diamonds on the curve; crosses above it are losses that are not finite.

    >>> loss_curve(Report(losses={0: 2.3, 1: 1.9})).data[0].y
    (2.3, 1.9)
    """
    points = sorted((step, loss) for step, loss in report.losses.items() if loss is not None)
    if not points:
        return None
    finite = [point for point in points if is_number(point[1])]
    broken = [point for point in points if not is_number(point[1])]
    figure = new_figure()
    _draw_curve(figure, _thinned(finite))
    _draw_crosses(figure, broken[:POINTS], top=max((loss for _, loss in finite), default=1.0))
    _mark_findings(figure, report, finite)
    return _with_axes(figure, "loss", log=_is_wide([loss for _, loss in finite]), height=320)


def loss_curves(by_run: Curves) -> Any:
    """The losses of several runs."""
    known = [value for _, values in by_run.values() for value in values if value is not None]
    return curves(by_run, "loss", log=_is_wide(known))


def update_curves(by_parameter: Curves) -> Any:
    """The size of each update relative to its parameter, by step, over the healthy band."""
    figure = curves(by_parameter, "relative update")
    if by_parameter:
        figure.add_hrect(*HEALTHY_UPDATES, fillcolor=GREEN, opacity=0.1, line_width=0)
    return figure


def curves(by_name: Curves, title: str, log: bool = True) -> Any:
    """One line per name; a log scale leaves out what is not positive.

    >>> curves({"fc.weight": ([0, 10], [0.5, 0.0])}, "gradient norm").data[0].y
    (0.5, None)
    """
    if not any(values for _, values in by_name.values()):
        return not_measured()
    log = log and any(value and value > 0 for _, values in by_name.values() for value in values)
    figure = new_figure()
    for number, (name, (steps, values)) in enumerate(by_name.items()):
        figure.add_scatter(
            x=list(steps),
            y=[value if value is not None and value > 0 else None for value in values] if log else list(values),
            name=label(name),
            mode="lines+markers" if len(steps) < 3 else "lines",
            connectgaps=True,
            line={"color": LINES[number % len(LINES)], "width": 1.5},
            hovertemplate="step %{x}: %{y:.4g}",
        )
    return _with_axes(figure, title, log, height=300).update_layout(showlegend=len(by_name) > 1, legend=LEGEND)


def quantile_bands(steps: Sequence[int], quantiles: Sequence[Sequence[float]]) -> Any:
    """The median by step, inside bands of 50 %, 90 % and 98 % of the values; a step has seven quantiles."""
    if not steps:
        return not_measured()
    figure = new_figure()
    columns = list(zip(*quantiles, strict=True))
    for low, high, name in ((0, 6, "98 %"), (1, 5, "90 %"), (2, 4, "50 %")):
        shared = {"x": list(steps), "mode": "lines", "line": {"width": 0}, "hoverinfo": "skip"}
        figure.add_scatter(y=list(columns[low]), showlegend=False, **shared)
        figure.add_scatter(y=list(columns[high]), name=name, fill="tonexty", fillcolor="rgba(0,114,178,.22)", **shared)
    figure.add_scatter(
        x=list(steps),
        y=list(columns[3]),
        name="median",
        mode="lines+markers",
        line={"color": BLUE, "width": 1.5},
        hovertemplate="step %{x}: median %{y:.4g}<extra></extra>",
    )
    return _with_axes(figure, "value", log=False, height=300).update_layout(showlegend=True, legend=LEGEND)


def _with_axes(figure: Any, title: str, log: bool, height: int) -> Any:
    figure.update_xaxes(title_text="step")
    figure.update_yaxes(title_text=title, type="log" if log else "linear")
    return quiet(figure, height)


def _draw_curve(figure: Any, points: list[Point]) -> None:
    figure.add_scatter(
        x=[step for step, _ in points],
        y=[loss for _, loss in points],
        mode="lines" if len(points) > 1 else "lines+markers",
        connectgaps=True,
        line={"color": BLUE, "width": 1.5},
        hovertemplate="step %{x}: %{y:.4g}<extra></extra>",
    )


def _draw_crosses(figure: Any, points: list[Point], top: float) -> None:
    figure.add_scatter(
        x=[step for step, _ in points],
        y=[top] * len(points),
        mode="markers",
        marker={"color": VERMILLION, "symbol": "x", "size": 7},
        text=[f"step {step}: {loss}" for step, loss in points],
        hovertemplate="%{text}<extra></extra>",
    )


def _mark_findings(figure: Any, report: Report, finite: list[Point]) -> None:
    """A diamond at each step with findings, in the colour of the worst one, and a vertical line."""
    steps = _by_step(report.findings)
    if not steps or not finite:
        return
    colours = [SEVERITY[max(finding.severity for finding in found)] for found in steps.values()]
    for step, colour in list(zip(steps, colours, strict=True))[:MARKED]:
        figure.add_vline(step, line={"color": colour, "width": 1, "dash": "dot"}, opacity=0.6)
    figure.add_scatter(
        x=list(steps),
        y=[finite[min(bisect_left(finite, (step,)), len(finite) - 1)][1] for step in steps],
        mode="markers",
        marker={"color": colours, "symbol": "diamond", "size": 10},
        text=[_hover_text(found) for found in steps.values()],
        hovertemplate="step %{x}<br>%{text}<extra></extra>",
    )


def _by_step(findings: Iterable[Finding]) -> dict[int, list[Finding]]:
    steps: dict[int, list[Finding]] = {}
    for finding in findings:
        if finding.step is not None:
            steps.setdefault(finding.step, []).append(finding)
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
