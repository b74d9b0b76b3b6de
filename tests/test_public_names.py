"""The public surface, name by name, and what importing it costs: a new name is a decision, and so is one less."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import torchhook

NAMES = """
Activations BudgetError Calls Capture Channels Covariance Difference Edit Entry Event FeatureExtractor FileError
Finding HarvestError Histogram HookInfo HookManager Log ModelDiagnostics Moments Monitor Need NonfiniteError
NotRecordedError OverwrittenError Profile Quantiles Reading Record Recording Reduce Report Ring Rule Run RunError
SelectionError Selector Session SessionError Severity SilentError Sink Site Snapshot Stat Stats StopTraining Store
Sweep Tap TapError TopK TorchhookError Trial Why arm capture catch_nonfinite check clip_gradients count_parameters
detach diagnose diff edit every first format_parameter_count get_layerwise_parameter_count glob harvest hooks mark
marked measure model_summary of_type overhead record regex sample select skip sweep trace verify
"""

PACKAGES = {
    "compare": "Leakage Likeness Shift Shifts Spreads cka datasets inputs leakage models shift",
    "contracts": (
        "Agreement Breach Case Contract Note Skip Variant accumulation cached causal deterministic equivariant "
        "independent modes padding shapes used"
    ),
    "dashboard": "show",
    "distributed": "merge",
    "edits": "Edit ablate add apply clamp noise patch replace scale zero",
    "explain": (
        "Attended AttentionCall AttentionChange Example Examples Faithfulness Heat Level Pyramid Sanity ablation_cam "
        "attention eigen_cam faithfulness grad_cam grad_cam_pp hires_cam layer_cam pyramid sanity score_cam "
        "top_examples x_grad_cam"
    ),
    "origins": "Catch Origin Range origin_of replay",
    "plot": "attention cam distributions feature_maps gradient_flow layer_heatmap similarity sweep",
    "prune": "Importance Plan Pruned apply importance plan sensitivity",
    "render": "Saved html json junit load markdown save terminal",
    "rules": "History Need RULES Rule chosen register",
    "stats": (
        "Attention Bins Channels Covariance Focus Headroom Histogram Largest Moments Quantiles Saturation Spread "
        "Stat TopK Units named"
    ),
}

INTEGRATIONS = {
    "accelerate": "monitored",
    "huggingface": "TorchhookCallback",
    "lightning": "TorchhookCallback",
    "mcp": "server",
    "mlflow": "MLflow",
    "tensorboard": "TensorBoard",
    "wandb": "WandB",
}
"""What one imports by hand, each from the file of its tool."""

COMMANDS = "dashboard diagnose diff doctor explain harvest mcp record replay rules run runs verify why"


def test_the_names_at_the_top():
    assert torchhook.__all__ == sorted(NAMES.split())
    assert all(hasattr(torchhook, name) for name in torchhook.__all__)
    public = {name for name, thing in vars(torchhook).items() if not name.startswith("_") and not _is_module(thing)}
    public -= {"Any", "TYPE_CHECKING", "import_module"}
    assert public == set(torchhook.__all__)


def test_the_packages_at_the_top():
    assert sorted(set(dir(torchhook)) - set(torchhook.__all__)) == sorted(set(PACKAGES) - {"stats"})


@pytest.mark.parametrize("package", PACKAGES)
def test_the_names_of_a_package(package):
    module = importlib.import_module(f"torchhook.{package}")
    assert sorted(module.__all__) == sorted(PACKAGES[package].split())
    assert all(hasattr(module, name) for name in module.__all__)


def test_the_names_of_integrations():
    files = Path(torchhook.__file__).with_name("integrations").glob("*.py")
    found = {file.stem: " ".join(_defined(file)) for file in files}
    others = "__init__", "agents", "answers", "common", "pytest_plugin"
    assert {name: found[name] for name in found if name not in others} == INTEGRATIONS


def test_the_commands():
    from torchhook.cli.app import command

    assert sorted(command.commands) == COMMANDS.split()
    assert sorted(command.commands["runs"].commands) == ["export", "list", "prune", "show"]


def test_every_public_name_says_what_it_is():
    for name in torchhook.__all__:
        assert getattr(torchhook, name).__doc__, name
    for package, names in PACKAGES.items():
        module = importlib.import_module(f"torchhook.{package}")
        assert module.__doc__ and all(getattr(module, name).__doc__ for name in names.split()), package


def test_importing_needs_torch_alone():
    script = (
        "import sys, torch; before = set(sys.modules);"
        "import torchhook; print(*{name.split('.')[0] for name in set(sys.modules) - before} - sys.stdlib_module_names)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["torchhook"]


def test_capturing_does_not_import_the_compiler():
    script = "import sys, torch; from torchhook import capture, measure; print('torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]


def _defined(file):
    """The functions and classes of a file that are for others, read without what it imports."""
    kinds = ast.ClassDef, ast.FunctionDef
    return [node.name for node in ast.parse(file.read_text()).body if isinstance(node, kinds) and node.name[0] != "_"]


def _is_module(thing):
    return isinstance(thing, type(sys))
