"""Moments against float64, for every dtype, content, layout and way to split: counts exactly, the rest as promised."""

import math

import pytest
import torch
from contents import AROUND, DTYPES, KINDS, LAYOUTS, PLACES, SEEDS, SIZES, filled
from hypothesis import given, settings
from hypothesis import strategies as st

from torchhook import Moments
from torchhook.stats.kernels import kernels
from torchhook.stats.kernels.native import Native
from torchhook.stats.kernels.plain import FIELDS, Plain, empty_moments

COMPILED = kernels(torch.device("cpu"))
both = pytest.mark.parametrize("kernel", [COMPILED, Plain()], ids=["compiled", "plain"])


def row_of(kernel, *parts):
    """What a kernel makes of some tensors, one after the other."""
    state = empty_moments(torch.device("cpu"))
    for part in parts:
        kernel.moments(state, part)
    return state


def check(row, x):
    """`row` describes `x`, as exactly as is promised."""
    found = dict(zip(FIELDS, row.tolist(), strict=True))
    x = x.reshape(-1).double()
    known = x[x.isfinite()]
    n = len(known)
    assert found["count"] == len(x)
    assert found["nan"] == x.isnan().sum() and found["zeros"] == (x == 0).sum()
    assert found["posinf"] == (x == math.inf).sum() and found["neginf"] == (x == -math.inf).sum()
    if not n:
        assert (found["min"], found["max"]) == (math.inf, -math.inf)
        assert [found[name] for name in ("mean", "abs_sum", "m2", "m3", "m4")] == [0] * 5
        return
    assert found["min"] == known.min() and found["max"] == known.max()
    mean, size = known.mean(), float(known.abs().mean())
    d = known - mean
    d -= d.mean()
    tiny = 1e-12 * size  # what is left over of a constant
    std = float(d.square().mean().sqrt())
    assert abs(found["mean"] - float(mean)) <= 1e-5 * std + tiny
    assert abs(found["abs_sum"] / n - size) <= 1e-5 * size
    assert abs(math.sqrt(found["m2"] / n) - std) <= 1e-5 * std + tiny
    for power in (3, 4):
        allowed = 1e-4 * float(d.abs().pow(power).sum()) + n * tiny**power
        assert abs(found[f"m{power}"] - float(d.pow(power).sum())) <= allowed, power


def test_the_kernel_of_the_cpu_is_the_compiled_one():
    assert type(COMPILED) is Native
    lacking = [dtype for dtype in DTYPES if COMPILED._function("moments", dtype) is None]
    assert not lacking


@both
@settings(max_examples=250, deadline=None)
@given(KINDS, st.sampled_from(DTYPES), SIZES, PLACES, SEEDS)
def test_of_a_whole_tensor(kernel, kind, dtype, size, layout, seed):
    x = LAYOUTS[layout](filled(kind, dtype, size, seed))
    check(row_of(kernel, x), x)


@both
@pytest.mark.parametrize("size", AROUND)
def test_at_the_sizes_where_loops_end(kernel, size):
    for dtype in DTYPES:
        for kind in ("normal", "broken", "mean 1e6"):
            x = filled(kind, dtype, size, size)
            check(row_of(kernel, x), x)


@both
@pytest.mark.parametrize("mean", [1e5, 1e6, -3e6, 7e6, -1.4e7])
@pytest.mark.parametrize("std", [0.2, 1.0, 30.0])
def test_wherever_the_mean_lies(kernel, mean, std):
    for seed in range(15):
        generator = torch.Generator().manual_seed(seed)
        x = mean * (1 + seed * 1e-3) + std * torch.randn(8_192, generator=generator, dtype=torch.float64)
        check(row_of(kernel, x.float()), x.float())


def grouped(rows, data):
    """The rows merged two or more at a time, in any order and grouping."""
    while len(rows) > 1:
        rows = data.draw(st.permutations(rows)) if len(rows) < 9 else rows
        many = data.draw(st.integers(2, len(rows)))
        rows = [Moments().merge(torch.stack(rows[:many])), *rows[many:]]
    return rows[0]


@both
@settings(max_examples=200, deadline=None)
@given(KINDS, st.sampled_from(DTYPES), SIZES, SEEDS, st.data())
def test_however_it_is_split_and_merged(kernel, kind, dtype, size, seed, data):
    x = filled(kind, dtype, size, seed)
    cuts = sorted(data.draw(st.lists(st.integers(0, size), max_size=12)))
    parts = [x[a:b] for a, b in zip([0, *cuts], [*cuts, size], strict=True)]
    assert sum(map(len, parts)) == size
    rows = [row_of(kernel, part) for part in parts]
    merge = Moments().merge
    check(merge(torch.stack(rows)), x)
    check(grouped(rows, data), x)
    check(row_of(kernel, *parts), x)
    from_left = from_right = empty_moments(x.device)
    for row, last in zip(rows, rows[::-1], strict=True):
        from_left, from_right = merge(torch.stack([from_left, row])), merge(torch.stack([last, from_right]))
    check(from_left, x)
    check(from_right, x)


def test_many_sites_merge_at_once_as_they_do_alone():
    """A block of states is merged in one call, with the sites in the second dimension."""
    parts = [[filled(kind, torch.float32, 500, seed) for kind in ("normal", "broken", "nan")] for seed in range(4)]
    states = torch.stack([torch.stack([row_of(COMPILED, x) for x in sites]) for sites in parts])
    merged = Moments().merge(states)
    for site in range(3):
        assert torch.equal(merged[site], Moments().merge(states[:, site]))
        check(merged[site], torch.cat([sites[site] for sites in parts]))


def with_threads(count, kernel, *parts):
    """The row of some tensors, computed by as many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        return row_of(kernel, *parts)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [2, 3])
def test_several_threads_share_a_large_tensor(count, dtype):
    for kind in ("jumping", "broken", "mean 1e6"):
        x = filled(kind, dtype, 2**17 + 4097 * count + 13, count)
        check(with_threads(count, COMPILED, x), x)
        check(with_threads(count, COMPILED, x[:70_000], x[70_000:]), x)


@both
def test_two_threads_and_any_layout(kernel):
    x = filled("jumping", torch.float32, 240_000, 0).view(2, 40, 30, 100).contiguous(memory_format=torch.channels_last)
    row = with_threads(2, kernel, x, x.transpose(1, 2), x[:, ::2])
    check(row, torch.cat([x.reshape(-1), x.reshape(-1), x[:, ::2].reshape(-1)]))


@settings(max_examples=100, deadline=None)
@given(KINDS, st.sampled_from(DTYPES), SIZES, SEEDS)
def test_what_a_summary_says_is_what_torch_says(kind, dtype, size, seed):
    x = filled(kind, dtype, size, seed)
    summary = Moments().of(x)
    wide = x.double()
    known = wide[wide.isfinite()]
    n = len(known)
    assert summary.count == size and summary.nonfinite == size - n
    assert (summary.nan, summary.posinf, summary.neginf) == (
        int(wide.isnan().sum()),
        int((wide == math.inf).sum()),
        int((wide == -math.inf).sum()),
    )
    assert summary.zero_fraction == float((wide == 0).sum()) / size if size else math.isnan(summary.zero_fraction)
    if n < 2:
        expected = float(known[0]) if n else math.nan
        found = [summary.mean, summary.min, summary.max, summary.abs_mean, summary.l2, summary.std]
        alone = [expected, expected, expected, abs(expected), abs(expected), math.nan]
        assert found == pytest.approx(alone, nan_ok=True, rel=1e-12, abs=0)
        return
    std, size = float(known.std()), float(known.abs().mean())
    assert summary.mean == pytest.approx(float(known.mean()), rel=1e-12, abs=1e-5 * std + 1e-12 * size)
    assert summary.std == pytest.approx(std, rel=1e-5, abs=1e-12 * size)
    assert summary.abs_mean == pytest.approx(size, rel=1e-5, abs=0)
    assert summary.l2 == pytest.approx(float(known.norm()), rel=1e-5, abs=0)
    assert (summary.min, summary.max) == (float(known.min()), float(known.max()))


def test_skewness_and_kurtosis_of_known_distributions():
    x = torch.rand(400_000, dtype=torch.float64).log().neg().float()  # exponential: 2 and 9
    summary = Moments().of(*x.split(12_345))
    assert summary.skewness == pytest.approx(2, abs=0.1) and summary.kurtosis == pytest.approx(9, abs=1)
    summary = Moments().of(torch.tensor([-1.0, 1.0, 1.0, -1.0]) + 1e6)
    assert summary.skewness == pytest.approx(0, abs=1e-6) and summary.kurtosis == pytest.approx(1)
    assert math.isnan(Moments().of(torch.ones(5)).kurtosis)


@pytest.mark.parametrize("scale", [1e-100, 1e60, 1e100, 1e150])
def test_float64_far_beyond_single_precision(scale):
    summary = Moments().of(torch.tensor([-1.0, 1.0, 2.0, 4.0], dtype=torch.float64) * scale)
    assert summary.mean == pytest.approx(1.5 * scale) and summary.max == 4 * scale
    assert summary.std == pytest.approx(scale * torch.tensor([-1.0, 1.0, 2.0, 4.0]).std().item(), rel=1e-6)
    assert summary.abs_mean == pytest.approx(2 * scale) and summary.l2 == pytest.approx(math.sqrt(22) * scale)


def test_values_that_are_negated_in_name_only():
    x = torch.arange(1.0, 100.0)
    assert Moments().of(torch._neg_view(x)).mean == -x.mean()
    z = torch.complex(torch.zeros(1), torch.ones(1)).conj().imag
    assert z.is_neg() and Moments().of(z).mean == -1


def test_the_processor_rounds_as_before():
    """A library that was compiled for speed may turn subnormal numbers into zeros, for everybody."""
    row_of(COMPILED, torch.ones(100))
    assert float(torch.tensor(1e-40) * 1.0) != 0 and float(torch.tensor(1e-310, dtype=torch.float64) * 0.5) != 0


def test_dtypes_that_no_kernel_was_compiled_for():
    x = torch.tensor([0.0, 1.5, -2.0, 448.0])
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        check(row_of(COMPILED, x.to(dtype)), x.to(dtype).float())
    for dtype in (torch.uint16, torch.uint32, torch.uint64):
        check(row_of(COMPILED, torch.tensor([0, 1, 60_000], dtype=dtype)), torch.tensor([0, 1, 60_000]))
