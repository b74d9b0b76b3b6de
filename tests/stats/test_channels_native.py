"""Statistics of units against float64, for every shape, dtype, content, layout and way to split: compiled and plain."""

import math

import pytest
import torch
from contents import DTYPES, FLOATS, INTS, KINDS, SEEDS, filled
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from torchhook import Channels, capture, measure
from torchhook.stats.kernels import kernels
from torchhook.stats.kernels.native import Native
from torchhook.stats.kernels.plain import Plain

pytestmark = pytest.mark.usefixtures("one_thread")

COMPILED = kernels(torch.device("cpu"))
both = pytest.mark.parametrize("kernel", [COMPILED, Plain()], ids=["compiled", "plain"])

ROWS = [0, 1, 2, 3, 8, 21, 31, 127, 128, 129, 260]
UNITS = [1, 2, 3, 7, 10, 21, 31, 63, 64, 65, 129, 255, 257, 300, 515]
INNERS = [1, 2, 3, 4, 9, 15, 16, 17, 31, 32, 49, 63, 64, 65, 79, 100, 196, 1000, 4097, 8192, 8200, 17_000]
MOST = 20_000


@st.composite
def sizes(draw):
    """Rows, units, and how many values a unit has in each row."""
    units = draw(st.sampled_from(UNITS) | st.integers(1, 600))
    inner = draw(st.sampled_from([size for size in INNERS if size * units <= MOST]) | st.integers(1, MOST // units))
    most = MOST // (units * inner)
    return min(most, draw(st.sampled_from(ROWS) | st.integers(0, 600))), units, inner


def square(x):
    """The last dimension as two."""
    side = next(side for side in (4, 7, 3, 2, 1) if x.shape[-1] % side == 0)
    return x.unflatten(-1, (x.shape[-1] // side, side))


# What may be done to values of shape (rows, units, inner), and the dimension in which the units are then.
LAYOUTS = {
    "second": (lambda x: x, 1),
    "second of four": (square, 1),
    "last": (lambda x: x.movedim(1, 2).contiguous(), -1),
    "first": (lambda x: x.movedim(1, 0).contiguous(), 0),
    "channels last": (lambda x: square(x).contiguous(memory_format=torch.channels_last), 1),
    "moved": (lambda x: x.movedim(1, 2), 2),
    "turned around": (lambda x: square(x).permute(3, 2, 1, 0), 2),
    "every second": (lambda x: x.repeat_interleave(2, 2)[..., ::2], 1),
    "columns": (lambda x: torch.cat([x, torch.ones_like(x)], 1)[:, : x.shape[1]], 1),
    "within others": (lambda x: torch.cat([x, x[:1], x], 0)[x[:1].shape[0] :][: x.shape[0]], 1),
    "expanded": (lambda x: x[:1].expand_as(x), -2),
    "one value": (lambda x: x[:1, :1, :1].expand_as(x), 1),
    "backwards": (lambda x: x.flip(2).transpose(0, 2), 1),
}
PLACES = st.sampled_from(list(LAYOUTS))


def made(kind, dtype, size, layout, seed):
    """Values, and where their units are."""
    lay, dim = LAYOUTS[layout]
    return lay(filled(kind, dtype, math.prod(size), seed).view(size)), dim


def state_of(kernel, units, dim, *parts):
    state = torch.zeros(5, units, dtype=torch.float64)
    for part in parts:
        kernel.channels(state, part, dim)
    return state


def check(state, x, dim, single=False):
    """`state` describes `x`; if it is the work of `single` precision, whole numbers are rounded."""
    n, mean, m2, size, active = state
    x = x.movedim(dim, 0).flatten(1)
    rounded = 1e-7 if single and x.dtype in INTS else 0.0
    x = x.double()
    finite = x.isfinite()
    assert torch.equal(n, finite.sum(1).double()) and torch.equal(active, (finite & (x > 0)).sum(1).double())
    known, some = x.where(finite, 0.0), n.clamp(min=1)
    middle = known.sum(1) / some
    left = (known - middle[:, None]).where(finite, 0.0).sum(1) / some
    middle += left
    std = ((known - middle[:, None]).where(finite, 0.0).square().sum(1) / some).sqrt()
    sizes = known.abs().sum(1) / some
    tiny = (1e-12 + rounded) * sizes  # what is left over of a constant
    assert bool(((mean - middle).abs() <= 1e-5 * std + tiny).all())
    assert bool((((m2 / some).sqrt() - std).abs() <= 1e-5 * std + tiny).all())
    assert bool(((size / some - sizes).abs() <= 1e-5 * sizes).all())


def test_the_kernel_of_the_cpu_is_the_compiled_one():
    assert type(COMPILED) is Native
    assert not [dtype for dtype in DTYPES if COMPILED._function("channels", dtype) is None]


@both
@settings(max_examples=400, deadline=None)
@given(KINDS.filter(lambda kind: kind != "1e38"), st.sampled_from(DTYPES), sizes(), PLACES, SEEDS)
def test_of_a_whole_tensor(kernel, kind, dtype, size, layout, seed):
    x, dim = made(kind, dtype, size, layout, seed)
    check(state_of(kernel, size[1], dim, x), x, dim, single=type(kernel) is Plain)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(["1e38", "1e30", "1e-20", "1e-30", "subnormal", "broken"]), sizes(), PLACES, SEEDS)
def test_what_is_too_large_or_too_small_for_single_precision(kind, size, layout, seed):
    for dtype in (torch.float32, torch.bfloat16):
        x, dim = made(kind, dtype, size, layout, seed)
        check(state_of(COMPILED, size[1], dim, x), x, dim)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("units", UNITS)
def test_at_the_sizes_where_loops_end(units, dtype):
    for inner in INNERS:
        for rows in ROWS:
            if rows * units * inner > 20_000:
                break
            x, dim = made("broken" if rows % 2 else "normal", dtype, (rows, units, inner), "second", units)
            check(state_of(COMPILED, units, dim, x), x, dim)


@settings(max_examples=250, deadline=None)
@given(KINDS, st.sampled_from(DTYPES), sizes(), PLACES, SEEDS, st.data())
def test_however_it_is_split_and_merged(kind, dtype, size, layout, seed, data):
    rows, units, _ = size
    x, dim = made(kind, dtype, size, layout, seed)
    cut = x.dim() - 1 if layout in ("turned around", "backwards") else 1 if layout == "first" else 0
    cuts = sorted(data.draw(st.lists(st.integers(0, rows), max_size=6)))
    parts = [x.narrow(cut, a, b - a) for a, b in zip([0, *cuts], [*cuts, rows], strict=True)]
    check(state_of(COMPILED, units, dim, *parts), x, dim)
    states = torch.stack([state_of(COMPILED, units, dim, part) for part in parts])
    check(Channels().merge(states), x, dim)


@pytest.mark.parametrize("mean", [1e5, 1e6, -3e6, 7e6, -1.4e7])
@pytest.mark.parametrize("std", [0.2, 1.0, 30.0])
@pytest.mark.parametrize("shape", [(4_000, 5), (300, 70), (50, 3, 8, 8), (3, 2, 60, 60)])
def test_wherever_the_mean_lies(shape, std, mean):
    x = (mean * torch.rand(shape[1], dtype=torch.float64).view(-1, *[1] * (len(shape) - 2))).float()
    x = (x + std * torch.randn(shape, dtype=torch.float64)).float()
    check(state_of(COMPILED, shape[1], 1, x), x, 1)
    check(state_of(COMPILED, shape[1], 1, *x.split(7)), x, 1)


def test_units_of_all_kinds_side_by_side():
    """What one of them needs must not be done to the others, and none may be counted twice."""
    kinds = ["normal", "1e-30", "1e38", "mean 1e7", "broken", "nan", "zeros", "inf", "subnormal", "constant"]
    for rows, inner in ((500, 1), (100, 9), (4, 300)):
        units = [filled(kind, torch.float32, rows * inner, number) for number, kind in enumerate(kinds)]
        x = torch.stack([unit.view(rows, inner) for unit in units], 1)
        check(state_of(COMPILED, len(kinds), 1, x, x), torch.cat([x, x]), 1)


@pytest.mark.parametrize("scale", [1e-100, 1e60, 1e150, 1e200])
@pytest.mark.parametrize("inner", [1, 100])
def test_float64_far_beyond_single_precision(inner, scale):
    x = torch.tensor([[-1.0, 4.0], [1.0, 4.0], [2.0, 4.0], [4.0, 4.0]], dtype=torch.float64)
    x = x[..., None].expand(4, 2, inner).contiguous() * scale
    n, mean, m2, size, active = state_of(COMPILED, 2, 1, x, x)
    assert n.tolist() == [8 * inner] * 2 and active.tolist() == [6 * inner, 8 * inner]
    assert (mean / scale).tolist() == pytest.approx([1.5, 4]) and (size / n / scale).tolist() == pytest.approx([2, 4])
    if scale < 1e160:  # there are squares of it
        assert (m2 / n / scale / scale).tolist() == pytest.approx([3.25, 0])
    assert m2[1] == 0


def with_threads(count, units, dim, *parts):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        return state_of(COMPILED, units, dim, *parts)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize(
    "shape, dim",
    [
        ((30_011, 9), 1),
        ((500, 601), 1),
        ((601, 500), 0),
        ((7, 130, 17, 17), 1),
        ((2, 3, 200, 201), 1),
        ((70_000, 2), 0),
    ],
)
def test_several_threads_share_a_large_tensor(shape, dim, count):
    for dtype, kind in ((torch.float32, "jumping"), (torch.bfloat16, "broken"), (torch.float64, "mean 1e6")):
        x = filled(kind, dtype, math.prod(shape), count).view(shape)
        check(with_threads(count, shape[dim], dim, x), x, dim)
        check(with_threads(count, shape[dim], dim, x, x), torch.cat([x, x], 1 - dim), dim)


@pytest.mark.parametrize("shape", [(0, 4), (0, 4, 5, 5), (3, 4, 0), (3, 0), (0,), (0, 0)])
def test_nothing_changes_nothing(shape):
    stat, x = Channels(dim=1), torch.empty(shape)
    state = stat.empty(x)
    stat.update(state, x)
    assert state.shape == (5, shape[1] if len(shape) > 1 else 0) and not state.any()


def test_every_value_of_what_has_one_dimension_or_none_is_a_unit():
    x = torch.randn(1000)
    units = Channels(dim=1).of(x, x[::2].repeat_interleave(2), x)
    torch.testing.assert_close(units.mean, (2 * x + x[::2].repeat_interleave(2)).double() / 3)
    assert Channels(dim=1).of(torch.tensor(3.0), torch.tensor(-1.0)).active_fraction.tolist() == [0.5]
    assert Channels().of(torch.tensor(3.0)).mean.tolist() == [3.0]


@pytest.mark.parametrize("stride", [0, 1, 1000])
def test_one_unit_says_nothing_by_its_stride(stride):
    x = torch.as_strided(torch.randn(90), (90, 1), (1, stride))
    check(state_of(COMPILED, 1, 1, x), x, 1)


def test_another_number_of_units_is_refused():
    stat = Channels(dim=1)
    state = stat.empty(torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"there were 3 units, and now there are 4; .* pass Channels\(dim=\.\.\.\)"):
        stat.update(state, torch.ones(2, 4))
    with pytest.raises(IndexError, match="Dimension out of range"):
        Channels(dim=4).of(torch.ones(2, 4))
    assert not state.any()


def test_dtypes_that_no_kernel_was_compiled_for():
    x = torch.tensor([[0.0, 1.5], [-2.0, 448.0]])
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        check(state_of(COMPILED, 2, 1, x.to(dtype)), x.to(dtype).float(), 1)
    for dtype in (torch.uint16, torch.uint32, torch.uint64):
        whole = torch.tensor([[0, 1], [7, 60_000]])
        check(state_of(COMPILED, 2, 0, whole.to(dtype)), whole, 0)
    check(state_of(COMPILED, 2, 1, torch._neg_view(x)), -x, 1)


def test_tensors_of_other_classes_are_left_to_torch(monkeypatch):
    """What they hold may be elsewhere."""
    calls = []
    monkeypatch.setattr(Plain, "channels", lambda *given: calls.append(given))
    state_of(COMPILED, 2, 1, nn.Parameter(torch.ones(3, 2), requires_grad=False))
    assert len(calls) == 1
    state_of(COMPILED, 2, 1, torch.ones(3, 2))
    assert len(calls) == 1


def test_measuring_units_leaves_copies_on_write_alone():
    model = nn.Sequential(nn.Linear(64, 64))
    with capture(model) as acts, measure(model, by="channel") as stats:
        y = model(torch.ones(8, 64))
    assert torch._C._is_cow_tensor(acts["0"].output) and torch._C._is_cow_tensor(y.detach())
    torch.testing.assert_close(stats["0"].channels.mean.float(), y.mean(0).detach())


@pytest.mark.parametrize("dtype", FLOATS)
def test_what_is_not_finite_in_one_unit_leaves_the_others(dtype):
    for shape in ((300, 70), (40, 70, 4), (3, 7, 400)):
        x = torch.randn(shape).to(dtype)
        others = state_of(COMPILED, shape[1], 1, x)
        x[:, 3] = math.nan
        x[0, 5].fill_(-math.inf)
        state = state_of(COMPILED, shape[1], 1, x)
        assert state[:, 3].tolist() == [0] * 5
        assert state[0, 5] == others[0, 5] - (x[0, 5].numel())
        check(state, x, 1)
