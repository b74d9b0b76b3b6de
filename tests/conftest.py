"""What every test may rely on: torchvision can be imported, nothing is downloaded, hooks are counted."""

import os
import sys
from pathlib import Path

collect_ignore = ["site"]  # no tests: what their child processes import

SITE = str(Path(__file__).parent / "site")
sys.path.insert(0, SITE)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [SITE, os.environ.get("PYTHONPATH")]))
os.environ["HF_HUB_OFFLINE"] = "1"

import torchvision_cpu  # noqa: E402

torchvision_cpu.install()

import pytest  # noqa: E402
import torch  # noqa: E402


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
