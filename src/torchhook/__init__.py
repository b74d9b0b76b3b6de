"""See, record, change and diagnose what happens inside a PyTorch model.

with torchhook.capture(model, "layer4.*", nn.ReLU, grads=True) as acts:
    model(x).sum().backward()
acts["layer4.1"].output, acts["layer4.1"].grad
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchhook import compare as compare
    from torchhook import contracts as contracts
    from torchhook import dashboard as dashboard
    from torchhook import distributed as distributed
    from torchhook import edits as edits
    from torchhook import explain as explain
    from torchhook import plot as plot
    from torchhook import prune as prune
    from torchhook import render as render
    from torchhook import rules as rules
    from torchhook.activations.harvest import harvest
    from torchhook.activations.store import Activations
    from torchhook.captures.capture import capture
    from torchhook.captures.feature_extractor import FeatureExtractor
    from torchhook.captures.hook_list import HookInfo, detach, hooks
    from torchhook.captures.hook_manager import HookManager
    from torchhook.captures.overhead import overhead
    from torchhook.captures.record import Record, Ring
    from torchhook.captures.result import Calls, Capture
    from torchhook.captures.store import Store
    from torchhook.captures.summary import (
        count_parameters,
        format_parameter_count,
        get_layerwise_parameter_count,
        model_summary,
    )
    from torchhook.captures.trace import trace
    from torchhook.compare.diff.result import Difference
    from torchhook.compare.diff.verb import diff
    from torchhook.compare.recordings.recorder import record
    from torchhook.compare.recordings.recording import Recording
    from torchhook.core.edit import Edit
    from torchhook.core.errors import (
        BudgetError,
        FileError,
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
    from torchhook.core.event import Event
    from torchhook.core.findings import Finding, Report, Severity, Trial
    from torchhook.core.marks import mark
    from torchhook.core.selection import Selector, glob, marked, of_type, regex, select
    from torchhook.core.session import Session
    from torchhook.core.sink import Sink
    from torchhook.core.site import Site
    from torchhook.core.tap import Tap, every, first, sample
    from torchhook.edits.edit_model import arm, clip_gradients, edit, skip
    from torchhook.edits.sweep import Sweep, sweep
    from torchhook.rules.check import check
    from torchhook.rules.diagnose import diagnose
    from torchhook.rules.model_diagnostics import ModelDiagnostics
    from torchhook.rules.origin.catch import catch_nonfinite
    from torchhook.rules.profile import Profile
    from torchhook.rules.rule import Need, Rule
    from torchhook.rules.verify import verify
    from torchhook.stats import Channels, Covariance, Histogram, Moments, Quantiles, Stat, TopK
    from torchhook.stats.measure import measure
    from torchhook.stats.reading import Reading, Snapshot
    from torchhook.stats.reduce import Reduce
    from torchhook.stats.result import Stats
    from torchhook.training.logs import Entry, Log
    from torchhook.training.monitor import Monitor
    from torchhook.training.runs import Run
    from torchhook.training.runs.why import Why

__version__ = "1.0.0.dev0"

# Where the names are. Each is imported when it is first used: importing the package needs nothing, not even torch.
_NAMES = {
    "Activations": "activations.store",
    "BudgetError": "core.errors",
    "Calls": "captures.result",
    "Capture": "captures.result",
    "Channels": "stats",
    "Covariance": "stats",
    "Difference": "compare.diff.result",
    "Edit": "core.edit",
    "Entry": "training.logs",
    "Event": "core.event",
    "FeatureExtractor": "captures.feature_extractor",
    "FileError": "core.errors",
    "Finding": "core.findings",
    "HarvestError": "core.errors",
    "Histogram": "stats",
    "HookInfo": "captures.hook_list",
    "HookManager": "captures.hook_manager",
    "Log": "training.logs",
    "ModelDiagnostics": "rules.model_diagnostics",
    "Moments": "stats",
    "Monitor": "training.monitor",
    "Need": "rules.rule",
    "NonfiniteError": "core.errors",
    "NotRecordedError": "core.errors",
    "OverwrittenError": "core.errors",
    "Profile": "rules.profile",
    "Quantiles": "stats",
    "Reading": "stats.reading",
    "Record": "captures.record",
    "Recording": "compare.recordings.recording",
    "Reduce": "stats.reduce",
    "Report": "core.findings",
    "Ring": "captures.record",
    "Rule": "rules.rule",
    "Run": "training.runs",
    "RunError": "core.errors",
    "SelectionError": "core.errors",
    "Selector": "core.selection",
    "Session": "core.session",
    "SessionError": "core.errors",
    "Severity": "core.findings",
    "SilentError": "core.errors",
    "Sink": "core.sink",
    "Site": "core.site",
    "Snapshot": "stats.reading",
    "Stat": "stats",
    "Stats": "stats.result",
    "StopTraining": "core.errors",
    "Store": "captures.store",
    "Sweep": "edits.sweep",
    "Tap": "core.tap",
    "TapError": "core.errors",
    "TopK": "stats",
    "TorchhookError": "core.errors",
    "Trial": "core.findings",
    "Why": "training.runs.why",
    "arm": "edits.edit_model",
    "capture": "captures.capture",
    "catch_nonfinite": "rules.origin.catch",
    "check": "rules.check",
    "clip_gradients": "edits.edit_model",
    "count_parameters": "captures.summary",
    "detach": "captures.hook_list",
    "diagnose": "rules.diagnose",
    "diff": "compare.diff.verb",
    "edit": "edits.edit_model",
    "every": "core.tap",
    "first": "core.tap",
    "format_parameter_count": "captures.summary",
    "get_layerwise_parameter_count": "captures.summary",
    "glob": "core.selection",
    "harvest": "activations.harvest",
    "hooks": "captures.hook_list",
    "mark": "core.marks",
    "marked": "core.selection",
    "measure": "stats.measure",
    "model_summary": "captures.summary",
    "of_type": "core.selection",
    "overhead": "captures.overhead",
    "record": "compare.recordings.recorder",
    "regex": "core.selection",
    "sample": "core.tap",
    "select": "core.selection",
    "skip": "edits.edit_model",
    "sweep": "edits.sweep",
    "trace": "captures.trace",
    "verify": "rules.verify",
}

_PACKAGES = (
    "compare",
    "contracts",
    "dashboard",
    "distributed",
    "edits",
    "explain",
    "origins",
    "plot",
    "prune",
    "render",
    "rules",
)

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
    "FileError",
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
    "Recording",
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
    "Trial",
    "Why",
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
    "record",
    "regex",
    "sample",
    "select",
    "skip",
    "sweep",
    "trace",
    "verify",
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
