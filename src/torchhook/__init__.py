"""See, record, change and diagnose what happens inside a PyTorch model.

with torchhook.capture(model, "layer4.*", nn.ReLU, grads=True) as acts:
    model(x).sum().backward()
acts["layer4.1"].output, acts["layer4.1"].grad
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchhook import compare as compare
    from torchhook import dashboard as dashboard
    from torchhook import distributed as distributed
    from torchhook import edits as edits
    from torchhook import explain as explain
    from torchhook import plot as plot
    from torchhook import prune as prune
    from torchhook import render as render
    from torchhook import rules as rules
    from torchhook.api import capture, overhead, trace
    from torchhook.captured import Calls, Capture
    from torchhook.catching import catch_nonfinite
    from torchhook.core.edit import Edit
    from torchhook.core.event import Event
    from torchhook.core.marks import mark
    from torchhook.core.selection import Selector, glob, marked, of_type, regex, select
    from torchhook.core.session import Session
    from torchhook.core.site import Site
    from torchhook.core.tap import Sink, Tap, every, first, sample
    from torchhook.diagnosing import diagnose
    from torchhook.diagnostics import ModelDiagnostics
    from torchhook.diffing import diff
    from torchhook.diffs.result import Difference
    from torchhook.editing import arm, clip_gradients, edit, skip
    from torchhook.errors import (
        BudgetError,
        HarvestError,
        NonfiniteError,
        NotRecordedError,
        OverwrittenError,
        RunError,
        SelectionError,
        SessionError,
        SilentError,
        StopTraining,
        TapError,
        TorchhookError,
    )
    from torchhook.extractor import FeatureExtractor
    from torchhook.findings import Finding, Report, Severity
    from torchhook.harvesting.activations import Activations
    from torchhook.harvesting.harvest import harvest
    from torchhook.inventory import HookInfo, detach, hooks
    from torchhook.logs import Entry, Log
    from torchhook.manager import HookManager
    from torchhook.measured import Stats
    from torchhook.measuring import measure
    from torchhook.profiles import Profile
    from torchhook.rules.checking import check
    from torchhook.rules.rule import Need, Rule
    from torchhook.runs import Run
    from torchhook.sinks.memory import Record, Ring
    from torchhook.sinks.reduce import Reduce
    from torchhook.sinks.store import Store
    from torchhook.stats import Channels, Covariance, Histogram, Moments, Quantiles, Stat, TopK
    from torchhook.stats.reading import Reading, Snapshot
    from torchhook.summary import (
        count_parameters,
        format_parameter_count,
        get_layerwise_parameter_count,
        model_summary,
    )
    from torchhook.sweeping import Sweep, sweep
    from torchhook.watching.monitor import Monitor

__version__ = "1.0.0.dev0"

# Where the names are. Each is imported when it is first used: importing the package needs nothing, not even torch.
_NAMES = {
    "Activations": "harvesting.activations",
    "BudgetError": "errors",
    "Calls": "captured",
    "Capture": "captured",
    "Channels": "stats",
    "Covariance": "stats",
    "Difference": "diffs.result",
    "Edit": "core.edit",
    "Entry": "logs",
    "Event": "core.event",
    "FeatureExtractor": "extractor",
    "Finding": "findings",
    "HarvestError": "errors",
    "Histogram": "stats",
    "HookInfo": "inventory",
    "HookManager": "manager",
    "Log": "logs",
    "ModelDiagnostics": "diagnostics",
    "Moments": "stats",
    "Monitor": "watching.monitor",
    "Need": "rules.rule",
    "NonfiniteError": "errors",
    "NotRecordedError": "errors",
    "OverwrittenError": "errors",
    "Profile": "profiles",
    "Quantiles": "stats",
    "Reading": "stats.reading",
    "Record": "sinks.memory",
    "Reduce": "sinks.reduce",
    "Report": "findings",
    "Ring": "sinks.memory",
    "Rule": "rules.rule",
    "Run": "runs",
    "RunError": "errors",
    "SelectionError": "errors",
    "Selector": "core.selection",
    "Session": "core.session",
    "SessionError": "errors",
    "Severity": "findings",
    "SilentError": "errors",
    "Sink": "core.tap",
    "Site": "core.site",
    "Snapshot": "stats.reading",
    "Stat": "stats",
    "Stats": "measured",
    "StopTraining": "errors",
    "Store": "sinks.store",
    "Sweep": "sweeping",
    "Tap": "core.tap",
    "TapError": "errors",
    "TopK": "stats",
    "TorchhookError": "errors",
    "arm": "editing",
    "capture": "api",
    "catch_nonfinite": "catching",
    "check": "rules.checking",
    "clip_gradients": "editing",
    "count_parameters": "summary",
    "detach": "inventory",
    "diagnose": "diagnosing",
    "diff": "diffing",
    "edit": "editing",
    "every": "core.tap",
    "first": "core.tap",
    "format_parameter_count": "summary",
    "get_layerwise_parameter_count": "summary",
    "glob": "core.selection",
    "harvest": "harvesting.harvest",
    "hooks": "inventory",
    "mark": "core.marks",
    "marked": "core.selection",
    "measure": "measuring",
    "model_summary": "summary",
    "of_type": "core.selection",
    "overhead": "api",
    "regex": "core.selection",
    "sample": "core.tap",
    "select": "core.selection",
    "skip": "editing",
    "sweep": "sweeping",
    "trace": "api",
}

_PACKAGES = ("compare", "dashboard", "distributed", "edits", "explain", "origins", "plot", "prune", "render", "rules")

__all__ = [
    "Activations",
    "BudgetError",
    "Calls",
    "Capture",
    "Channels",
    "Covariance",
    "Difference",
    "Edit",
    "Entry",
    "Event",
    "FeatureExtractor",
    "Finding",
    "HarvestError",
    "Histogram",
    "HookInfo",
    "HookManager",
    "Log",
    "ModelDiagnostics",
    "Moments",
    "Monitor",
    "Need",
    "NonfiniteError",
    "NotRecordedError",
    "OverwrittenError",
    "Profile",
    "Quantiles",
    "Reading",
    "Record",
    "Reduce",
    "Report",
    "Ring",
    "Rule",
    "Run",
    "RunError",
    "SelectionError",
    "Selector",
    "Session",
    "SessionError",
    "Severity",
    "SilentError",
    "Sink",
    "Site",
    "Snapshot",
    "Stat",
    "Stats",
    "StopTraining",
    "Store",
    "Sweep",
    "Tap",
    "TapError",
    "TopK",
    "TorchhookError",
    "arm",
    "capture",
    "catch_nonfinite",
    "check",
    "clip_gradients",
    "count_parameters",
    "detach",
    "diagnose",
    "diff",
    "edit",
    "every",
    "first",
    "format_parameter_count",
    "get_layerwise_parameter_count",
    "glob",
    "harvest",
    "hooks",
    "mark",
    "marked",
    "measure",
    "model_summary",
    "of_type",
    "overhead",
    "regex",
    "sample",
    "select",
    "skip",
    "sweep",
    "trace",
]


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return import_module(f"torchhook.{name}")
    if name not in _NAMES:
        raise AttributeError(f"module 'torchhook' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"torchhook.{_NAMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return [*__all__, *_PACKAGES]
