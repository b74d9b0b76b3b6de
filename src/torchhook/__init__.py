"""See, record, change and diagnose what happens inside a PyTorch model.

with torchhook.capture(model, "layer4.*", nn.ReLU, grads=True) as acts:
    model(x).sum().backward()
acts["layer4.1"].output, acts["layer4.1"].grad
"""

from torchhook import edits as edits
from torchhook.api import capture, overhead, trace
from torchhook.captured import Calls, Capture
from torchhook.core.edit import Edit
from torchhook.core.event import Event
from torchhook.core.marks import mark
from torchhook.core.selection import Selector, glob, marked, of_type, regex, select
from torchhook.core.session import Session
from torchhook.core.site import Site
from torchhook.core.tap import Sink, Tap, every, first, sample
from torchhook.editing import arm, clip_gradients, edit, skip
from torchhook.errors import (
    BudgetError,
    NotRecordedError,
    OverwrittenError,
    SelectionError,
    SessionError,
    SilentError,
    TapError,
    TorchhookError,
)
from torchhook.extractor import FeatureExtractor
from torchhook.inventory import HookInfo, detach, hooks
from torchhook.manager import HookManager
from torchhook.sinks.memory import Record, Ring
from torchhook.sinks.store import Store
from torchhook.summary import (
    count_parameters,
    format_parameter_count,
    get_layerwise_parameter_count,
    model_summary,
)
from torchhook.sweeping import Sweep, sweep

__version__ = "1.0.0.dev0"

__all__ = [
    "BudgetError",
    "Calls",
    "Capture",
    "Edit",
    "Event",
    "FeatureExtractor",
    "HookInfo",
    "HookManager",
    "NotRecordedError",
    "OverwrittenError",
    "Record",
    "Ring",
    "SelectionError",
    "Selector",
    "Session",
    "SessionError",
    "SilentError",
    "Sink",
    "Site",
    "Store",
    "Sweep",
    "Tap",
    "TapError",
    "TorchhookError",
    "arm",
    "capture",
    "clip_gradients",
    "count_parameters",
    "detach",
    "edit",
    "every",
    "first",
    "format_parameter_count",
    "get_layerwise_parameter_count",
    "glob",
    "hooks",
    "mark",
    "marked",
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
