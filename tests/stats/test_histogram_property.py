"""Bins are exact, their edges bracket what is in them and are everybody's; quantiles are off by a bin at most."""

import math
from itertools import pairwise

import pytest
import torch
from contents import AROUND, DTYPES, FLOATS, KINDS, LAYOUTS, PLACES, SEEDS, SIZES, filled, same_bins
from hypothesis import example, given, settings
from hypothesis import strategies as st

from torchhook import Histogram, Quantiles
from torchhook.stats.kernels import kernels
from torchhook.stats.kernels.plain import BINS, Plain, bins_of

COMPILED = kernels(torch.device("cpu"))
both = pytest.mark.parametrize("kernel", [COMPILED, Plain()], ids=["compiled", "plain"])

# Four steps an octave for each normal number in single precision, and below those steps of an equal width.
GRID = [k * 2.0**-128 for k in range(4)] + [2.0**e * (1 + k / 4) for e in range(-126, 128) for k in range(4)]
GRID += [2.0**128]


def counted(kernel, *parts):
    state = torch.zeros(BINS, dtype=torch.float64)
    for part in parts:
        kernel.histogram(state, part)
    return state


def oracle(x):
    return torch.bincount(bins_of(x.reshape(-1)), minlength=BINS).double()


def bracket(value):
    """The edges between which a value lies, by magnitude, told without any bits."""
    size = abs(float(value))
    fraction, exponent = math.frexp(size)  # in [0.5, 1)
    if size < 2.0**-126:
        low = math.floor(size / 2.0**-128) * 2.0**-128
        return low, low + 2.0**-128
    quarter = math.floor((2 * fraction - 1) * 4)
    unit = 2.0 ** (exponent - 1)
    return unit * (1 + quarter / 4), unit * (1 + (quarter + 1) / 4)


def edges_of(x):
    """Those of the only bin that the values in `x` lie in."""
    bins = Histogram().of(x)
    assert bins.counts.tolist() == [x.numel()]
    low, high = bins.edges.tolist()
    return low, high


@both
@settings(max_examples=250, deadline=None)
@given(KINDS, st.sampled_from(DTYPES), SIZES, PLACES, SEEDS)
def test_bins_are_those_of_the_oracle(kernel, kind, dtype, size, layout, seed):
    x = LAYOUTS[layout](filled(kind, dtype, size, seed))
    state = counted(kernel, x)
    assert same_bins(state, oracle(x)) and state.sum() == x.numel()


@both
@pytest.mark.parametrize("dtype", DTYPES)
def test_bins_of_every_kind_of_content(kernel, dtype):
    for size in AROUND:
        for kind in ("normal", "broken", "jumping", "subnormal", "1e38"):
            x = filled(kind, dtype, size, size)
            assert same_bins(counted(kernel, x), oracle(x)), (kind, size)


@both
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_whole_numbers_just_below_an_edge_stay_below(kernel, dtype):
    """They have more digits than single precision, and must not be rounded into the next bin."""
    for power in range(2, torch.iinfo(dtype).bits - 2):
        for edge in (2**power, 2**power * 5 // 4, 2**power * 3 // 2, 2**power * 7 // 4):
            if edge > 2**52 or edge * 4 % 2**power:
                continue  # double precision itself rounds beyond
            for value in (edge - 1, edge, edge + 1, -edge + 1, -edge, -edge - 1):
                [number] = counted(kernel, torch.tensor([value], dtype=dtype)).nonzero().flatten().tolist()
                low, high = GRID[number % (BINS // 2) : number % (BINS // 2) + 2]
                assert low <= abs(value) < high and (number >= BINS // 2) == (value < 0), value


@both
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_number_of_half_precision(kernel, dtype):
    x = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(dtype)
    assert same_bins(counted(kernel, x), oracle(x))
    finite = x[x.isfinite()]
    sizes, numbers = finite.double().abs(), bins_of(finite)
    assert torch.equal(counted(kernel, finite).nonzero().flatten(), numbers.unique())
    edges = torch.tensor(GRID, dtype=torch.float64)
    below = numbers % (BINS // 2)
    assert bool((edges[below] <= sizes).all()) and bool((sizes < edges[below + 1]).all())
    assert torch.equal(numbers >= BINS // 2, finite.signbit())


SINGLE = st.floats(width=32, allow_nan=False, allow_infinity=False)
DOUBLE = st.floats(min_value=-(2.0**128), max_value=2.0**128, exclude_min=True, exclude_max=True)


@settings(max_examples=300, deadline=None)
@given(SINGLE)
@example(0.0)
@example(-0.0)
@example(2.0**-149)
@example(-(2.0**-126))
@example(3.4028234663852886e38)
def test_edges_bracket_a_single_value(value):
    low, high = edges_of(torch.tensor([value]))
    assert bracket(value) == ((low, high) if math.copysign(1, value) > 0 else (-high, -low))
    assert min(abs(low), abs(high)) <= abs(value) < max(abs(low), abs(high))


@settings(max_examples=300, deadline=None)
@given(DOUBLE)
@example(math.nextafter(2.0**128, 0))
@example(5e-324)
@example(-5e-324)
def test_edges_bracket_a_double(value):
    low, high = edges_of(torch.tensor([value], dtype=torch.float64))
    assert bracket(value) == ((low, high) if math.copysign(1, value) > 0 else (-high, -low))


@pytest.mark.parametrize("value", [2.0**128, 1e39, -1e40, 1e300, -1.7e308])
def test_what_single_precision_cannot_hold_is_in_the_outermost_bins(value):
    low, high = edges_of(torch.tensor([value], dtype=torch.float64))
    outermost = 1.75 * 2.0**127, 2.0**128
    assert (low, high) == (outermost if value > 0 else (-outermost[1], -outermost[0]))


@both
def test_doubles_next_to_an_edge(kernel):
    for number, edge in enumerate(GRID[1:-1], start=1):
        for value, expected in [
            (math.nextafter(edge, 0), number - 1),
            (edge, number),
            (math.nextafter(edge, math.inf), number),
        ]:
            for sign in (1, -1):
                x = torch.tensor([sign * value], dtype=torch.float64)
                [found] = counted(kernel, x).nonzero().flatten().tolist()
                assert found == expected + (BINS // 2 if sign < 0 else 0), (value, sign)


@settings(max_examples=150, deadline=None)
@given(KINDS, st.sampled_from(DTYPES), SIZES, SEEDS)
def test_values_lie_between_the_edges_that_count_them(kind, dtype, size, seed):
    x = filled(kind, dtype, size, seed)
    bins = Histogram().of(x)
    wide = x.double()
    known = wide[wide.isfinite() & (wide.abs() < 2.0**52)]
    if dtype.is_floating_point:
        known = wide[wide.isfinite()]
    elif len(known) < len(wide):
        return  # whole numbers that double precision rounds
    assert len(bins.edges) == len(bins.counts) + 1 and bins.counts.sum() == len(known)
    assert bins.counts.dtype == torch.int64 and set(bins.edges.abs().tolist()) <= set(GRID)
    if len(known):
        assert bins.counts[0] > 0 and bins.counts[-1] > 0  # no more of the range than is needed
        assert bins.edges[0] <= known.min() and known.max() <= bins.edges[-1]
    below = bins.counts.cumsum(0).tolist()
    for edge, under in zip(bins.edges[1:].tolist(), below, strict=True):
        # A bin of negative values has its upper edge in itself, and -0.0 is not below 0.0.
        inside = known < edge if edge > 0 else known <= edge if edge < 0 else known.signbit()
        assert int(inside.sum()) == under


@settings(max_examples=100, deadline=None)
@given(KINDS, KINDS, st.sampled_from(DTYPES), SIZES, SIZES, SEEDS)
def test_merging_is_adding_and_edges_are_everybodys(kind, other, dtype, size, more, seed):
    a, b = filled(kind, dtype, size, seed), filled(other, dtype, more, seed + 1)
    states = torch.stack([counted(COMPILED, a), counted(COMPILED, b)])
    assert Histogram().additive
    assert torch.equal(Histogram().merge(states), counted(COMPILED, torch.cat([a, b])))
    assert torch.equal(states.sum(0), counted(COMPILED, b, a))
    left, right, merged = Histogram().of(a), Histogram().of(b), Histogram().of(a, b)
    by_edge = {}
    for bins in (left, right):
        for (low, high), count in zip(pairwise(bins.edges.tolist()), bins.counts.tolist(), strict=True):
            by_edge[low, high] = by_edge.get((low, high), 0) + count
    told = dict(zip(pairwise(merged.edges.tolist()), merged.counts.tolist(), strict=True))
    assert {edges: count for edges, count in told.items() if count} == {k: v for k, v in by_edge.items() if v}


@pytest.mark.parametrize("count", [2, 3])
def test_several_threads_count_a_large_tensor(count):
    before = torch.get_num_threads()
    for dtype in DTYPES:
        x = filled("jumping", dtype, 2**17 + 70_001, count)
        expected = oracle(x)
        try:
            torch.set_num_threads(count)
            state = counted(COMPILED, x)
        finally:
            torch.set_num_threads(before)
        assert same_bins(state, expected), dtype


def test_nan_and_infinities_are_left_out():
    bins = Histogram().of(torch.tensor([math.nan, math.inf, -math.inf, -math.nan, 1.0]))
    assert bins.edges.tolist() == [1.0, 1.25] and bins.counts.tolist() == [1]
    for nothing in (torch.full((3,), math.nan), torch.empty(0)):
        bins = Histogram().of(nothing)
        assert len(bins.counts) == 0 and len(bins.edges) == 1 and math.isnan(bins.quantile(0.5))


# --- quantiles

QS = (0.0, 0.01, 0.05, 0.1, 0.25, 1 / 3, 0.5, 0.75, 0.9, 0.99, 1.0)


def signed_bracket(value):
    low, high = bracket(value)
    return (-high, -low) if math.copysign(1, value) < 0 else (low, high)


def check_quantiles(x, read):
    wide = x.double()
    known = wide[wide.isfinite()]
    for q in QS:
        found = read(q)
        if not len(known):
            assert math.isnan(found)
            continue
        true = [float(torch.quantile(known, q, interpolation=side)) for side in ("lower", "higher")]
        within = [low <= found <= high for low, high in map(signed_bracket, true)]
        zero = [low <= found <= high for low, high in map(signed_bracket, (-t for t in true if t == 0))]
        assert any(within) or any(zero), (q, found, true)
        assert any(abs(found - t) <= abs(t) / 4 + 2.0**-128 for t in true), (q, found, true)


@settings(max_examples=150, deadline=None)
@given(KINDS, st.sampled_from(FLOATS), SIZES | st.integers(0, 12), SEEDS)
def test_a_quantile_lies_in_the_bin_of_the_true_one(kind, dtype, size, seed):
    x = filled(kind, dtype, size, seed)
    bins, quantiles = Histogram().of(x), Quantiles(*QS).of(x)
    check_quantiles(x, bins.quantile)
    assert list(quantiles) == list(QS)
    check_quantiles(x, quantiles.get)


@settings(max_examples=100, deadline=None)
@given(st.lists(SINGLE, min_size=1, max_size=12))
def test_quantiles_of_a_few_arbitrary_values(values):
    x = torch.tensor(values)
    check_quantiles(x, Histogram().of(x).quantile)


def typical_errors(x):
    """The median and the mean, over all percentiles, of how far off one is, as a fraction of itself."""
    qs = [number / 100 for number in range(1, 100)]
    found, true = Quantiles(*qs).of(x.float()), torch.quantile(x, torch.tensor(qs, dtype=x.dtype))
    errors = (torch.tensor(list(found.values()), dtype=x.dtype) - true).abs() / true.abs()
    return float(errors.median()), float(errors.mean())


@pytest.mark.parametrize("std", [1.0, 3.3, 1e-12, 1e20])
def test_the_typical_error_of_a_normal_sample(std):
    assert max(typical_errors(std * torch.randn(500_000, dtype=torch.float64))) < 0.02
    assert list(Quantiles().of(torch.ones(1))) == [0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99]


def test_quantiles_grow_with_q():
    x = filled("jumping", torch.float32, 5_000, 3)
    bins = Histogram().of(x)
    values = [bins.quantile(number / 500) for number in range(501)]
    assert values == sorted(values)
    for q in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match="q must be a number"):
            bins.quantile(q)
