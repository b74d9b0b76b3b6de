"""`check`: applies the rules to statistics and reports the findings. It uses nothing but its arguments."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from torchhook.core.findings import Finding, Report, Severity
from torchhook.rules.causes import folded
from torchhook.rules.history import History, joined, mean_unit_std, owner
from torchhook.rules.kinds import kind_of
from torchhook.rules.registry import Choice, chosen
from torchhook.rules.repairs import repairs_for
from torchhook.rules.rule import Rule
from torchhook.stats.downsample import spread
from torchhook.stats.moments import Summary
from torchhook.stats.reading import Place, Reading, Snapshot
from torchhook.stats.result import Stats
from torchhook.stats.stat import unlike

_SHORTLY = 10  # steps
_STEPS, _NUMBERS = 40, 4000  # of the gradients in a report: at most so many steps, and so many numbers in all

Found = Mapping[Rule, Sequence[Finding]]
"""The findings of each rule."""

BROKEN = "TH000"
"""The code of findings about failures of torchhook itself."""


def check(
    stats: Stats | Snapshot | History,
    rules: Iterable[Choice] | None = None,
    *,
    ignore: Sequence[Choice] = (),
    per_module: Mapping[str, Sequence[str]] | None = None,
    fail_on: str = "error",
    model: str = "model",
    tried: Callable[[Found], Found] | None = None,
) -> Report:
    """Judge measured statistics by the rules, and report what is wrong.

    Args:
        stats: The result of `measure`, or one of its snapshots. Rules that need more than was measured are skipped, and
            the report says which and why.
        rules: Codes, beginnings of codes (``"TH2"``), names, or `Rule` objects; all rules by default.
        ignore: Rules not to apply.
        per_module: Codes to ignore at the modules that match a glob: ``{"head.*": ["TH201"]}``.
        fail_on: The severity from which the report fails: ``"info"``, ``"warning"`` or ``"error"``.
        model: The name of the model, for the headline.
        tried: Gets the findings by rule, tries their repairs, and returns them with the outcome.

    >>> import torch
    >>> from torch import nn
    >>> from torchhook import check, measure
    >>> net = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 2))
    >>> _ = nn.init.constant_(net[0].bias, -100)
    >>> with measure(net, by="channel") as stats:
    ...     _ = net(torch.randn(1000, 4))
    >>> print(check(stats, ["TH201"]).findings[0])
    TH201 error: 1 (ReLU), step 0: 100% of the units never fire
    """
    history = _history(stats)
    found: dict[Rule, Sequence[Finding]] = {}
    skipped: dict[str, str] = {}
    applied = chosen(rules, ignore)
    exempt = {glob: [rule.code for rule in chosen(codes)] for glob, codes in (per_module or {}).items()}
    broken: list[Finding] = []
    for rule in applied:
        try:
            reason = rule.missing(history)
            if reason:
                skipped[rule.code] = reason
            else:
                spared = rule.forgiving and history.works
                findings = [
                    replace(one, severity=Severity.INFO) if spared and (tried is None or not repairs_for(one)) else one
                    for one in rule.find(history)  # if its repair is tried, that decides
                ]
                found[rule] = [finding for finding in findings if not _is_ignored(finding, exempt)]
        except Exception as error:  # noqa: PERF203 (one rule must not stop the others)
            skipped[rule.code] = f"raised {type(error).__name__}: {error}"
            broken.append(failed(f"rule {rule.code}", f"{type(error).__name__}: {error}"))
    broken += [
        failed(f"{name} of the {port} of {path!r}", reason)
        for (path, port), name, reason in _missing(history)
        if not unlike(reason)
    ][:1]
    roots = folded(found if tried is None else tried(found), history.order)
    step = _shown_step(roots, history)
    layers = layers_of(joined(window.snapshot for window in history.windows if window.step == step))
    return Report(
        findings=(*(_completed(finding, history) for finding in roots), *broken),
        model=model,
        fail_on=Severity(fail_on),
        checked=tuple(rule.code for rule in found),
        skipped=skipped,
        layers=layers,
        losses=dict(history.losses),
        notes=tuple(_unjudged(history)),
        # a single measurement does not know where it began
        span=None if history is not stats or step is None else (step, step),
        gradients=_gradients(history, layers, step),
    )


def failed(what: str, reason: str) -> Finding:
    """A finding that torchhook itself failed at something, which must not stop the training or the report."""
    message = f"{what} raised {reason}"
    hint = "This is a bug in torchhook or in one of your own rules, not a problem of the model."
    return Finding(BROKEN, Severity.INFO, message, hint=hint)


def layers_of(snapshot: Snapshot) -> tuple[dict[str, Any], ...]:
    """The numbers of each layer and parameter, for tables and plots."""
    layers: dict[str, dict[str, Any]] = {}
    labels = _labels(snapshot.rows)
    for path, port in snapshot.rows:
        reading = snapshot[path, port]
        if "moments" in reading and (entry := _ENTRIES.get(port.partition("[")[0])):
            kind = "module" if reading.module_class else "parameter"
            layer = layers.setdefault(path, {"site": path, "kind": kind})
            if path in labels:
                layer["module"] = labels[path]
            for name, value in entry(reading).items():
                layer.setdefault(name, value)
    return tuple(layers.values())


def _history(stats: Stats | Snapshot | History) -> History:
    if isinstance(stats, History):
        return stats
    if isinstance(stats, Stats):
        step, snapshot = stats.step, stats.snapshot()
    elif isinstance(stats, Snapshot):
        step, snapshot = 0, stats
    else:
        raise TypeError(f"stats must be the result of measure(), or a snapshot of it, not {stats!r:.80}")
    history = History()
    history.add(step, joined([snapshot]))
    return history


def _shown_step(roots: Iterable[Finding], history: History) -> int | None:
    """The step whose numbers are shown: a mean over healthy and broken steps would show neither.

    It is the first measured step at or after the worst finding; if no finding has a step, the last one at which as many
    ports were measured as ever.
    """
    every = [one for root in roots for one in (root, *root.affected)]  # a cause may have no step, but its consequences
    found = [(-one.severity.rank, one.step) for one in every if one.step is not None and one.severity > "info"]
    if not history.windows:
        return None
    if not found:
        ports = {window.step: len({port for _, port in window.snapshot.rows}) for window in history.windows}
        return max(ports, key=lambda step: (ports[step], step))
    _, step = min(found)
    return next((window.step for window in history.windows if window.step >= step), history.windows[-1].step)


def _gradients(
    history: History, layers: Sequence[Mapping[str, Any]], shown: int | None
) -> dict[int, tuple[float | None, ...]]:
    """The gradients of the layers at some steps, among them the one that is shown; none if there is only that."""
    sizes: dict[str, dict[int, float]] = {}
    for port, size in _GRADIENTS.items():
        for (path, _), by_step in history.summaries(port).items():
            sizes.setdefault(path, {step: float(f"{size(found):.3g}") for step, found in by_step.items()})
    known = [sizes.get(layer["site"], {}) if "grad_norm" in layer else {} for layer in layers]
    steps = sorted({step for by_step in known for step in by_step})
    if shown is None or len(steps) < 2:
        return {}
    chosen = sorted({shown, *spread(steps, max(1, min(_STEPS, _NUMBERS // len(layers)) - 1))})
    return {step: tuple(by_step.get(step) for by_step in known) for step in chosen}


def _missing(history: History) -> Iterator[tuple[Place, str, str]]:
    """Each statistic that was requested but is missing: its place, its name, and why."""
    for place, row in history.whole().rows.items():
        for name, reason in row.failed.items():
            yield place, name, reason


def _unjudged(history: History) -> Iterator[str]:
    """A note on the places whose number of units changes, so that their units cannot be judged."""
    places = {place: why for place, _, reason in _missing(history) if (why := unlike(reason))}
    if places:
        (path, port), why = next(iter(places.items()))
        more = f" and {len(places) - 1} more" if len(places) > 1 else ""
        yield f"the units of the {port} of {path!r}{more} were not judged: {why}"


def _completed(finding: Finding, history: History) -> Finding:
    """A finding with its context: the class of its module, and a recent rise of the learning rate."""
    labels = _labels_at_rest(history) | _labels(history.whole().rows)
    affected = tuple(_classed(other, labels) for other in finding.affected)
    return _after_rise(replace(_classed(finding, labels), affected=affected), history.rates)


def _classed(finding: Finding, labels: Mapping[str, str]) -> Finding:
    if finding.site not in labels:
        return finding
    return replace(finding, evidence={"module": labels[finding.site], **finding.evidence})


def _labels(rows: Mapping[Place, Any]) -> dict[str, str]:
    """The class of each module, and for each parameter that of the module that has it."""
    modules = {path: row.label for (path, _), row in rows.items() if row.label}
    owners = {path: path.rpartition(".")[0] for path, port in rows if port.startswith("param")}
    return {path: modules[owner] for path, owner in owners.items() if owner in modules} | modules


def _labels_at_rest(history: History) -> dict[str, str]:
    """The same for all parameters of the model, including those of modules that were never called."""
    known = {} if history.rest is None else history.rest.parameters
    return {site: state.module for path, state in known.items() if owner(path) for site in (path, owner(path))}


def _after_rise(finding: Finding, rates: Mapping[int, float]) -> Finding:
    """The finding, and if the learning rate went up shortly before, a remark that says so."""
    if finding.step is None:
        return finding
    for before, step in pairwise(step for step in rates if finding.step - _SHORTLY <= step <= finding.step):
        if rates[step] > 1.5 * rates[before] > 0:
            message = f"{finding.message}, after the learning rate went from {rates[before]:.2g} to {rates[step]:.2g}"
            return replace(finding, message=message, evidence={**finding.evidence, "rate_rose_at": step})
    return finding


def _is_ignored(finding: Finding, per_module: Mapping[str, Sequence[str]]) -> bool:
    return any(
        fnmatch.fnmatchcase(finding.site, pattern) and finding.code in codes for pattern, codes in per_module.items()
    )


def _of_output(reading: Reading) -> dict[str, Any]:
    moments, label = reading["moments"], reading.module_class
    return {
        "module": label,
        "role": kind_of(label),
        "mean": moments.mean,
        "std": _spread(reading),
        "zero_fraction": moments.zero_fraction,
    }


def _spread(reading: Reading) -> float:
    """The standard deviation, averaged over the units if they were measured: otherwise biases hide a dead signal."""
    by_unit = mean_unit_std(reading)
    return float(reading["moments"].std) if by_unit is None else by_unit


def _rms(moments: Summary) -> float:
    return math.nan if moments.nonfinite else float(moments.l2 / max(moments.count, 1) ** 0.5)


def _mean(moments: Summary) -> float:
    return math.nan if moments.nonfinite else float(moments.mean)


_GRADIENTS: dict[str, Callable[[Summary], float]] = {"grad_output": _rms, "param_grad_norm": _mean}
_ENTRIES: dict[str, Callable[[Reading], dict[str, Any]]] = {
    "output": _of_output,
    "grad_output": lambda reading: {"grad_norm": _rms(reading["moments"])},
    "param_grad_norm": lambda reading: {"grad_norm": _mean(reading["moments"])},
    "param_norm": lambda reading: {"norm": _mean(reading["moments"])},
    "update_ratio": lambda reading: {"update_ratio": reading["moments"].mean},
}
