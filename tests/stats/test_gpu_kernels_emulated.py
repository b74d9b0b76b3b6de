"""The CUDA kernels on a CPU, where their threads take turns: what they compute, seen without a GPU."""

import ctypes
import json
import math
import re
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from contents import CONTENTS, KINDS, SEEDS, SIZES, filled, rows_agree, same_bins
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from torchhook import measure
from torchhook.core.torch_internals import compile_cpp
from torchhook.stats.kernels.compiled import Compiled
from torchhook.stats.kernels.gpu import _BLOCKS, _KINDS, _PLACES, GPU
from torchhook.stats.kernels.native import source
from torchhook.stats.kernels.plain import BINS, Plain, empty_moments

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="threads take turns by ucontext")

CPU = torch.device("cpu")
ASSEMBLER = re.compile(r'asm\("(\w\S*) .*?" : (.*?)\);')
OPERANDS = re.compile(r'"[=+]?[a-z]"\(([^)]*)\)')
ARGUMENTS = {"moments": 4, "histogram": 3, "moments_and_histogram": 5, "across": 5, "along": 5, "merge_units": 5}


def as_call(statement):
    """A statement in assembler as a call of `ptx`."""
    name, operands = statement.groups()
    return f"ptx({', '.join([json.dumps(name), *OPERANDS.findall(operands)])});"


LAUNCHER = """
    struct Any {
      long long bits;
      operator Index() const { return bits; }
      template <class T> operator T*() const { return reinterpret_cast<T*>(bits); }
    };
    extern "C" void run(const char* what, int wide, int high, int size, const long long* n) {
      std::string name = what;
      %s
      abort();
    }
"""


def launcher():
    """C++ that launches a kernel by its name."""
    kernels = {f"{name}<{kind}>": count for name, count in ARGUMENTS.items() for kind in _KINDS.values()}
    cases = []
    for name, count in {**kernels, "settle": 3}.items():
        arguments = ", ".join(f"Any{{n[{i}]}}" for i in range(count))
        cases.append(f'if (name == "{name}") return launch(wide, high, size, [=] {{ {name}({arguments}); }});')
    return LAUNCHER % "\n".join(cases)


@cache
def built(architecture):
    """The library of all kernels, as for GPUs of an architecture."""
    header = Path(__file__).with_name("cuda_on_cpu.h").read_text()
    code = source("row.h") + ASSEMBLER.sub(as_call, source("gpu.cu"))
    return compile_cpp(f"#define __CUDA_ARCH__ {architecture}\n" + header + code + launcher(), ("-w", "-O1"))


class Emulated(GPU):
    """Launches the kernels on the CPU, as if it were a GPU with one multiprocessor."""

    def __init__(self, architecture):
        Compiled.__init__(self, CPU)
        self.processors, self.rows = 1, _BLOCKS["moments"]
        self.slots, self.places = {}, torch.zeros(_PLACES, self.rows, 2)
        self.library = built(architecture)

    def _launch(self, name, grid, *numbers, threads=256):
        assert grid[0] <= self.rows or not name.startswith("moments"), "each block needs a row"
        self.library.run(name.encode(), *grid, threads, (ctypes.c_int64 * len(numbers))(*numbers))


@pytest.fixture(params=[800, 900], ids=["sm_80", "sm_90"], scope="module")
def gpu(request):
    """The kernels; those for sm_90 take values of half precision in pairs."""
    return Emulated(request.param)


def apart(gpu, moments, bins, x):
    return gpu.has_run("moments", moments, x) and gpu.has_run("histogram", bins, x)


def together(gpu, moments, bins, x):
    return gpu.moments_and_histogram(moments, bins, x)


def check(gpu, parts):
    """Each way, all `parts` give the moments and the bins of plain torch."""
    whole, truth = torch.cat(parts), torch.zeros(BINS).double()
    Plain().histogram(truth, whole)
    for update in (apart, together):
        moments, bins = empty_moments(CPU, gpu.rows), torch.zeros(BINS).double()
        assert all(update(gpu, moments, bins, x) for x in parts)
        assert same_bins(bins, truth), update
        rows_agree(moments, whole)


@settings(max_examples=30, deadline=None)
@example(["subnormal"], torch.bfloat16, 3, 0, 0)  # whose squares are zero in single precision
@given(st.lists(KINDS, min_size=1, max_size=3), st.sampled_from(list(_KINDS)), SIZES, st.integers(0, 9), SEEDS)
def test_moments_and_bins_are_those_of_plain_torch(gpu, kinds, dtype, size, skipped, seed):
    parts = [filled(kind, dtype, size + skipped, seed)[skipped:] for kind in kinds]
    check(gpu, [parts[0], *parts])  # the second time, the blocks know where to look from


@pytest.mark.parametrize("kind", CONTENTS)
def test_blocks_that_read_many_vectors(gpu, kind):
    for dtype in _KINDS:
        check(gpu, [filled(kind, dtype, 70_001, 0), filled(kind, dtype, 9_000, 1)[1:]])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_number_of_half_precision(gpu, dtype):
    x = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(dtype)
    finite = x[x.isfinite()]
    check(gpu, [x])
    check(gpu, [finite, finite[finite.abs() < 1], finite[finite.abs() < 2**-14]])


LAYOUTS = {  # of some values, and where the units are
    "features": ((30, 77), 1),
    "tokens": ((5, 40, 48), -1),
    "images": ((3, 6, 13, 11), 1),
    "small images": ((9, 24, 3, 3), 1),
    "one unit": ((1000, 1), 1),
    "units first": ((5, 129), 0),
    "nothing": ((0, 8), 1),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["half zero", "broken", "nan", "mean 1e6", "jumping"])
def test_units_are_those_of_plain_torch(gpu, layout, kind):
    shape, dim = LAYOUTS[layout]
    for dtype in _KINDS:
        x = filled(kind, dtype, math.prod(shape), 0).view(shape)
        fast = torch.zeros(5, shape[dim], dtype=torch.float64)
        plain = fast.clone()
        for part in (x, x[: len(x) // 2], -x) if dim else (x, -x):
            assert gpu.has_run("channels", fast, part, dim)
            Plain().channels(plain, part.double(), dim)
        n, mean, m2, size, _ = plain
        assert not gpu.failed and torch.equal(fast[[0, 4]], plain[[0, 4]])
        deviation = (m2 / n.clamp(min=1)).sqrt()
        assert ((fast[1] - mean).abs() <= 1e-9 * deviation + 1e-12 * mean.abs()).all()
        torch.testing.assert_close(fast[2], m2, rtol=1e-7, atol=1e-14 * float((n * mean.square()).max()))
        torch.testing.assert_close(fast[3], size, rtol=1e-9, atol=0)


def test_a_measurement_from_the_hooks_to_the_reading(gpu, monkeypatch):
    for module in ("moments", "histogram"):
        monkeypatch.setattr(f"torchhook.stats.{module}.kernels", lambda device: gpu)
    x = torch.randn(64, 300) * 3 + 7
    model = nn.Sequential(nn.Identity(), nn.ReLU())
    with measure(model, stats=("moments", "histogram")) as stats:
        for part in x.split(10):
            model(part)
    assert not gpu.failed
    for place, truth in (("0", x), ("1", x.relu())):
        reading = stats[place]
        assert (reading.count, reading.min, reading.max) == (x.numel(), float(truth.min()), float(truth.max()))
        assert reading.std == pytest.approx(float(truth.double().std()), rel=1e-5)
        assert int(reading.histogram().counts.sum()) == x.numel()
