"""The difference of two tensors, by hand."""

import math

import numpy as np
import pytest
import torch

from torchhook.captures.agreement.rounding import gap


@pytest.mark.parametrize("sign", [1, -1])
def test_a_gap_is_as_wide_upwards_as_downwards(sign):
    a = torch.tensor([[1.0, -2.0, 4.0], [0.0, 3.0, -1.0]])
    b = a.clone()
    b[1, 1] += 0.5 * sign
    b[0, 2] -= 0.25 * sign
    found, scale = gap(a, b), math.sqrt((1 + 4 + 16 + 9 + 1) / 6)
    assert (found.rms, found.scale) == pytest.approx((math.sqrt((0.5**2 + 0.25**2) / 6), scale))
    assert found.peak == pytest.approx(0.5 / (3 + scale)) and found.worst == (1, 1)
    assert found.values == (3.0, 3 + 0.5 * sign)
    x, y = (side.numpy().ravel() for side in (a, b))
    assert found.cosine == pytest.approx(x @ y / np.linalg.norm(x) / np.linalg.norm(y))
