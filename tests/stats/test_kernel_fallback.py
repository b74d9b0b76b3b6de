"""A compiled kernel that cannot be used costs speed and never a statistic: at import, at build, and at any update."""

import os
import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn

from torchhook import measure
from torchhook.stats import Channels, Histogram, Moments
from torchhook.stats.kernels import compiled, kernels, library, native
from torchhook.stats.kernels.compiled import Compiled
from torchhook.stats.kernels.plain import Plain, empty_moments

CPU = torch.device("cpu")
STATS = ("moments", "histogram", "channels")


@pytest.fixture(autouse=True)
def fresh():
    """Kernels are found again in each test, and whole again after it."""
    kernels.cache_clear()
    yield
    kernels.cache_clear()


def broken(*args, **kwargs):
    raise RuntimeError("the kernel is broken\nand this is the rest of a long message")


def measured(x):
    model = nn.Sequential(nn.Identity())
    with warnings.catch_warnings(record=True) as caught, measure(model, stats=STATS) as stats:
        warnings.simplefilter("always")
        for part in x.split(8):
            model(part)
    return stats, [str(warning.message) for warning in caught]


def assert_right(stats, x):
    reading = stats["0"]
    assert list(reading) == list(STATS) and not reading._row.failed
    assert (reading.count, reading.min, reading.max) == (x.numel(), float(x.min()), float(x.max()))
    assert reading.mean == pytest.approx(float(x.double().mean()), rel=1e-5)
    assert reading.std == pytest.approx(float(x.double().std()), rel=1e-5)
    assert torch.equal(reading.histogram().counts, Histogram().of(x).counts)
    torch.testing.assert_close(reading.channels.mean, x.double().mean(0), rtol=1e-5, atol=1e-6)


def assert_one_warning(messages, reason):
    assert [reason in message for message in messages] == [True], messages
    assert "statistics on cpu are computed by plain torch, which is slower" in messages[0]


def test_a_kernel_that_cannot_be_imported(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchhook.stats.kernels.native", None)
    stats, messages = measured(x := torch.randn(64, 5))
    assert_right(stats, x)
    assert_one_warning(messages, "torchhook.stats.kernels.native")
    assert type(kernels(CPU)) is Plain


@pytest.mark.parametrize("where, name", [(native, "library"), (native, "source"), (library, "_key")])
def test_a_kernel_that_cannot_be_built(monkeypatch, where, name):
    monkeypatch.setattr(where, name, broken)
    stats, messages = measured(x := torch.randn(64, 5))
    assert_right(stats, x)
    assert_one_warning(messages, "the kernel is broken")
    assert type(kernels(CPU)) is Plain


def test_a_library_without_kernels(monkeypatch):
    monkeypatch.setattr(native, "library", lambda source: object())
    stats, messages = measured(x := torch.randn(64, 5))
    assert_right(stats, x)
    assert_one_warning(messages, "the compiled library has no kernels")


@pytest.mark.parametrize("name", ["address", "dense", "laid_out"])
def test_a_kernel_that_fails_in_the_first_update(monkeypatch, name):
    monkeypatch.setattr(native, name, broken)
    stats, messages = measured(x := torch.randn(64, 5))
    assert_right(stats, x)
    assert_one_warning(messages, "the kernel is broken")


@pytest.mark.parametrize("good", range(1, 12))
def test_a_kernel_that_fails_in_a_later_update(monkeypatch, good):
    calls, address = [], native.address

    def fails_later(x):
        calls.append(x)
        return address(x) if len(calls) <= good else broken()

    monkeypatch.setattr(native, "address", fails_later)
    stats, messages = measured(x := torch.randn(64, 5))
    assert_right(stats, x)
    assert_one_warning(messages, "the kernel is broken")
    assert len(calls) == good + 1  # it was not tried again


def test_a_private_name_of_torch_that_is_gone(monkeypatch):
    monkeypatch.setattr(native, "storage_address", lambda x: torch._C._no_longer_there(x))
    stats, messages = measured(x := torch.randn(64, 5))
    assert_right(stats, x)
    assert_one_warning(messages, "_no_longer_there")


def test_where_warnings_are_errors_the_statistic_is_kept(monkeypatch):
    monkeypatch.setattr(native, "address", broken)
    model, x = nn.Sequential(nn.Identity()), torch.randn(64, 5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with measure(model, stats=STATS) as stats:
            model(x)
    assert_right(stats, x)


def test_values_that_plain_torch_cannot_take_do_not_end_the_kernel():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state = empty_moments(CPU)
        with pytest.raises(AttributeError):
            kernels(CPU).moments(state, None)
        kernels(CPU).moments(state, torch.ones(3))
    assert float(state[0]) == 3 and not kernels(CPU).failed


class SeveralRows(Compiled):
    """Kernels like those of a GPU, with several rows of moments per state; they fail after some calls."""

    rows = 3

    def __init__(self, good):
        super().__init__(CPU)
        self.good = good

    def has_run(self, kernel, state, x, dim=None):
        if self.failed:
            return False
        self.good -= 1
        if self.good < 0:
            return self.give_up(RuntimeError("broken"))
        if kernel == "moments":
            Plain().moments(state[self.good % self.rows], x)
        else:
            getattr(Plain(), kernel)(state, x, *() if dim is None else (dim,))
        return True


@pytest.mark.parametrize("good", range(10))
def test_states_of_several_rows_stay_right(monkeypatch, good):
    several = SeveralRows(good)
    for module in ("moments", "histogram", "channels"):
        monkeypatch.setattr(f"torchhook.stats.{module}.kernels", lambda device: several)
    told = []
    monkeypatch.setattr(compiled, "warn", told.append)
    x = torch.randn(40, 5)
    stats = [Moments(), Histogram(), Channels(dim=1)]
    states = [stat.empty(x) for stat in stats]
    for part in x.split(10):
        for stat, state in zip(stats, states, strict=True):
            stat.update(state, part)
    moments, bins, units = (
        stat.compute(stat.settle(state[None])[0]) for stat, state in zip(stats, states, strict=True)
    )
    assert len(told) == 1 and moments.count == 200 and moments.max == float(x.max())
    assert moments.std == pytest.approx(float(x.double().std()), rel=1e-5) and int(bins.counts.sum()) == 200
    torch.testing.assert_close(units.mean, x.double().mean(0), rtol=1e-5, atol=1e-6)


MEASURING = "import torch, torchhook; torchhook.Moments().of(torch.ones(9))"


def test_the_first_build_is_announced_in_one_line_and_only_then(tmp_path):
    def run(**more):
        done = subprocess.run(
            [sys.executable, "-c", MEASURING],
            env={**os.environ, "XDG_CACHE_HOME": str(tmp_path), **more},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout == "" and len(list(tmp_path.glob("torchhook/*.so"))) == 1
        return done.stderr

    assert run() == (
        "torchhook: building the C++ kernels for statistics, once for this machine and torch; kept in"
        f" {tmp_path / 'torchhook'}\n"
    )
    assert run() == ""
    next(tmp_path.glob("torchhook/*.so")).unlink()
    assert run(TORCHHOOK_PROGRESS="0") == ""


def test_a_build_without_a_place_to_say_so(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "stderr", None)
    stats, messages = measured(x := torch.randn(64, 5))
    assert_right(stats, x)
    assert not messages and len(list(tmp_path.glob("torchhook/*.so"))) == 1
