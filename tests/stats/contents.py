"""Tensors of every dtype, content and layout for the tests of statistics, and what those should say."""

import math

import pytest
import torch
from hypothesis import strategies as st

from torchhook.stats.kernels.plain import BINS, FIELDS, empty_moments, merged_moments, moments_of

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTS = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64]
DTYPES = [*FLOATS, *INTS, torch.bool]
AROUND = [0, 1, 2, 15, 63, 64, 65, 127, 128, 129, 1000, 4032, 4095, 4096, 4097, 4159, 4160, 8191, 8192, 8193, 12_345]
SIZES = st.sampled_from(AROUND) | st.integers(0, 20_000)
SEEDS = st.integers(0, 2**31)


def jumping(x, generator):
    """Chunks whose means lie far apart."""
    for chunk in x.split(700):
        chunk += 10 ** (9 * torch.rand((), generator=generator, dtype=torch.float64) - 3)
    return x


def broken(x, generator):
    """Some values are NaN, some infinite."""
    chosen = torch.rand(len(x), generator=generator)
    x[chosen < 0.05] = math.nan
    x[(chosen > 0.1) & (chosen < 0.12)] = math.inf
    x[chosen > 0.97] = -math.inf
    return x


def one_infinite(x, generator):
    if len(x):
        x[int(torch.randint(len(x), (), generator=generator))] = math.inf
    return x


def outlier(x, generator):
    if len(x):
        x[int(torch.randint(len(x), (), generator=generator))] = 1e4
    return x


def narrow(x, generator):
    """A mean that is some million deviations away from zero."""
    return 0.3 * x + 10 ** float(4 + 3.2 * torch.rand((), generator=generator, dtype=torch.float64))


def constant(x, generator):
    return torch.full_like(x, float(torch.randn((), generator=generator)) * 1e3)


CONTENTS = {
    "normal": lambda x, generator: x,
    "constant": constant,
    "nan": lambda x, generator: torch.full_like(x, math.nan),
    "inf": lambda x, generator: torch.full_like(x, math.inf),
    "broken": broken,
    "one infinite": one_infinite,
    "zeros": lambda x, generator: torch.zeros_like(x),
    "negative zeros": lambda x, generator: -torch.zeros_like(x),
    "half zero": lambda x, generator: x.relu(),
    "1e-20": lambda x, generator: x * 1e-20,
    "1e-30": lambda x, generator: x * 1e-30,
    "subnormal": lambda x, generator: x * 1e-40,
    "1e30": lambda x, generator: x * 1e30,
    "1e38": lambda x, generator: x.clamp(-3, 3) * 1e38,
    "mean 1e6": lambda x, generator: x + 1e6,
    "mean -1e6": lambda x, generator: x - 1e6,
    "mean 1e7": lambda x, generator: x + 1e7,
    "narrow": narrow,
    "jumping": jumping,
    "outlier": outlier,
}
KINDS = st.sampled_from(list(CONTENTS))


def filled(kind, dtype, size, seed):
    """A flat tensor of `size` values."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.rand(size, generator=generator) < (1.0 if kind == "constant" else 0.0 if kind == "zeros" else 0.3)
    if dtype in FLOATS:
        normal = torch.randn(size, generator=generator, dtype=torch.float64)
        return CONTENTS[kind](normal, generator).to(dtype)
    limits = torch.iinfo(dtype)
    if kind in ("normal", "constant", "zeros", "half zero", "mean 1e6", "mean -1e6", "outlier"):
        normal = CONTENTS[kind](torch.randn(size, generator=generator, dtype=torch.float64) * 20, generator)
        return normal.clamp(limits.min, limits.max).to(dtype)
    low, high = max(limits.min, -(2**62)), min(limits.max, 2**62)
    anywhere = torch.randint(low, high, (size,), generator=generator, dtype=torch.int64)
    if dtype in (torch.int32, torch.int64) and kind in ("jumping", "broken"):  # of any length in bits, near edges
        bits = torch.randint(0, limits.bits - 2, (size,), generator=generator)
        anywhere = (torch.ones_like(bits) << bits) - torch.randint(0, 3, (size,), generator=generator)
    return anywhere.to(dtype)


def sheets(x, width):
    """`x` as a matrix, without what does not fit in."""
    return x[: len(x) // width * width].view(-1, width)


LAYOUTS = {
    "contiguous": lambda x: x,
    "offset": lambda x: x[3:],
    "transposed": lambda x: sheets(x, 7).t(),
    "slice": lambda x: x[1::3],
    "columns": lambda x: sheets(x, 8)[:, 2:7],
    "expanded": lambda x: x[: len(x) // 5, None].expand(-1, 5),
    "one value": lambda x: x[:1].expand(len(x)) if len(x) else x,
    "channels last": lambda x: x[: len(x) // 24 * 24].view(-1, 4, 3, 2).contiguous(memory_format=torch.channels_last),
    "backwards": lambda x: sheets(x, 4).flip(1).permute(1, 0),
}
PLACES = st.sampled_from(list(LAYOUTS))


def check_moments(reading, *tensors):
    """What the moments of a reading should be of all values in `tensors` together."""
    x = torch.cat([tensor.detach().reshape(-1).double() for tensor in tensors])
    known = x[x.isfinite()]
    std = float(known.std()) if len(known) > 1 else math.nan
    tiny = 1e-9 * float(known.abs().max())
    expected = {
        "count": len(x),
        "nonfinite": len(x) - len(known),
        "min": float(known.min()),
        "max": float(known.max()),
        "zero_fraction": float((x == 0).double().mean()),
        "mean": pytest.approx(float(known.mean()), rel=1e-9, abs=0.0 if math.isnan(std) else 1e-5 * std),
        "std": pytest.approx(std, rel=1e-5, abs=tiny, nan_ok=True),
        "abs_mean": pytest.approx(float(known.abs().mean()), rel=1e-5, abs=0),
        "l2": pytest.approx(float(known.norm()), rel=1e-5, abs=0),
    }
    found = {name: getattr(reading, name) for name in expected}
    assert found == expected, f"{reading!r}: {found} is not {expected}"


EXACT = ("count", "nan", "posinf", "neginf", "zeros", "min", "max")


def rows_agree(got, x):
    """Check rows of moments that a GPU kernel has made of the values in `x`."""
    truth = moments_of(x) if x.numel() else empty_moments(x.device)
    truth = dict(zip(FIELDS, truth.tolist(), strict=True))
    got = dict(zip(FIELDS, merged_moments(got).tolist(), strict=True))
    for name in EXACT:
        assert got[name] == truth[name], name
    n = truth["count"] - truth["nan"] - truth["posinf"] - truth["neginf"]
    if not n:
        return
    finite = x.double()[x.isfinite()]
    d = finite - finite.mean()
    std = float(d.square().mean().sqrt())
    assert abs(got["mean"] - truth["mean"]) <= 1e-5 * std + 1e-12 * abs(truth["mean"])
    assert got["m2"] == pytest.approx(truth["m2"], rel=2e-5, abs=1e-12 * float(finite.square().sum()))
    assert got["abs_sum"] == pytest.approx(truth["abs_sum"], rel=1e-5)
    for power, name in ((3, "m3"), (4, "m4")):
        assert abs(got[name] - truth[name]) <= 1e-4 * float((d.abs() ** power).sum()) + 1e-300, name


def same_bins(state, expected):
    """Whether all bins are equal; those of NaN together, for torch makes different ones of one float16."""
    [a, b] = torch.stack([state, expected]).view(2, 2, BINS // 2).split([1021, 3], -1)
    return torch.equal(*a) and bool(b[0].sum() == b[1].sum())
