"""What holds for the tests and for the examples in docstrings alike."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _seeded():
    """Weights and data are drawn alike in every run; only the order of the tests is random."""
    torch.manual_seed(0)
