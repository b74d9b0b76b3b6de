"""A cell updates moments and bins in one read where a kernel can do that, and loses nothing where it cannot."""

import warnings

import pytest
import torch
from torch import nn

from torchhook import Histogram, Moments, Quantiles, Stat, measure
from torchhook.stats.kernels import compiled
from torchhook.stats.kernels.compiled import Compiled
from torchhook.stats.kernels.plain import Plain

BOTH = ("moments", "histogram", "quantiles")


class OneRead(Compiled):
    """Kernels that can update both, some times."""

    def __init__(self, good=10**9):
        super().__init__(torch.device("cpu"))
        self.good = good
        self.ran = []

    def has_run(self, kernel, state, x, dim=None):
        self.ran.append(kernel)
        return False

    def moments_and_histogram(self, moments, bins, x):
        if self.failed or x.dtype != torch.float32:
            return False
        if len(self.ran) >= self.good:
            return self.give_up(RuntimeError("the kernel is broken"))
        self.ran.append("both")
        Plain().moments(moments, x)
        Plain().histogram(bins, x)
        return True


@pytest.fixture
def use(monkeypatch):
    """Use these kernels."""

    def used(kernels):
        for module in ("moments", "histogram"):
            monkeypatch.setattr(f"torchhook.stats.{module}.kernels", lambda device: kernels)
        return kernels

    return used


def measured(stats, x=None):
    """A reading of eight batches."""
    x = torch.randn(64, 5) if x is None else x
    model = nn.Sequential(nn.Identity())
    with measure(model, stats=stats) as found:
        for part in x.split(8):
            model(part)
    return found["0"], x


def assert_right(reading, x):
    assert (reading.count, reading.min, reading.max) == (x.numel(), float(x.min()), float(x.max()))
    assert reading.std == pytest.approx(float(x.double().std()), rel=1e-9)
    assert torch.equal(reading.histogram().counts, Histogram().of(x).counts)


@pytest.mark.parametrize("stats", [BOTH, BOTH[::-1], (*BOTH, "channels"), ("quantiles", "topk", "moments")])
def test_one_read_in_any_order_and_among_others(use, stats):
    kernels = use(OneRead())
    reading, x = measured(stats)
    assert kernels.ran == ["both"] * 8 and list(reading) == list(stats)
    assert (reading.count, reading.max) == (320, float(x.max()))
    assert int(reading.state("histogram").sum()) == 320


@pytest.mark.parametrize("stats", [("moments",), ("histogram", "quantiles"), ("moments", "channels")])
def test_one_of_them_alone_is_updated_alone(use, stats):
    kernels = use(OneRead())
    measured(stats)
    assert set(kernels.ran) == {"moments" if "moments" in stats else "histogram"}


def test_values_that_the_kernel_does_not_take(use):
    kernels = use(OneRead())
    reading, x = measured(BOTH, torch.randn(64, 5).double())
    assert kernels.ran == ["moments", "histogram"] * 8
    assert_right(reading, x)


@pytest.mark.parametrize("good", range(9))
def test_a_kernel_that_fails_counts_nothing_twice(use, monkeypatch, good):
    told = []
    monkeypatch.setattr(compiled, "warn", told.append)
    use(OneRead(good))
    reading, x = measured(BOTH)
    assert_right(reading, x)
    assert len(told) == (good < 8) and list(reading) == list(BOTH)


class Halved(Moments):
    """Moments of half the values."""

    def update(self, state, x):
        super().update(state, x / 2)


class Doubled(Histogram):
    """Bins of twice the values."""

    def update(self, state, x):
        super().update(state, x * 2)


@pytest.mark.parametrize("stats", [(Halved(), "histogram"), ("moments", Doubled())])
def test_an_update_of_ones_own_is_called(use, stats):
    kernels = use(OneRead())
    reading, x = measured(stats)
    factor = 0.5 if isinstance(stats[0], Halved) else 1
    assert reading.max == pytest.approx(factor * float(x.max())) and "both" not in kernels.ran
    counts = Histogram().of(x if factor == 0.5 else 2 * x).counts
    assert torch.equal(reading.histogram().counts, counts)


class Breaks(Stat):
    """Raises in the third update."""

    name = "breaks"

    def __init__(self):
        self.calls = 0

    def update(self, state, x):
        self.calls += 1
        if self.calls == 3:
            raise ZeroDivisionError

    def compute(self, state):
        return float(state)


def test_a_statistic_that_raises_leaves_the_others_together(use):
    kernels = use(OneRead())
    with pytest.warns(UserWarning, match="could not collect 'breaks'"):
        reading, x = measured((*BOTH, breaks := Breaks()))
    assert kernels.ran == ["both"] * 8 and breaks.calls == 3
    assert_right(reading, x)


class NoBins(Quantiles):
    """Bins that have no state."""

    def empty(self, x):
        raise ZeroDivisionError


def test_moments_go_on_without_bins(use):
    kernels = use(OneRead())
    with pytest.warns(UserWarning, match="could not collect 'quantiles'"):
        reading, x = measured(("moments", NoBins()))
    assert (reading.count, reading.max) == (320, float(x.max())) and kernels.ran == ["moments"] * 8


@pytest.mark.parametrize("compile_it", [False, True])
def test_gradients_and_compiled_graphs_too(use, nothing_compiled, compile_it):
    kernels = use(OneRead())
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if compile_it else model
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with measure(run, grads=True, param_grads=True, stats=BOTH) as stats:
            for _ in range(3):
                run(torch.randn(8, 4)).square().sum().backward()
    assert set(kernels.ran) == {"both"} and len(kernels.ran) == 3 * 6
    assert stats["1"].count == int(stats["1"].histogram().counts.sum()) == 3 * 24
    assert stats["0.weight", "param_grad"].count == 3 * 12
