"""Statistics on a GPU: the kernel against the oracle, and nothing that waits for the device."""

import copy
import math
import warnings

import pytest
import torch
from contents import rows_agree
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional as F

from torchhook import Moments, measure
from torchhook.stats.kernels import kernels
from torchhook.stats.kernels.plain import BINS, Plain

pytestmark = pytest.mark.gpu

ALL = ("moments", "histogram", "channels", "covariance", "topk")


def contents(name, n):
    x = torch.randn(n, device="cuda")
    if name == "relu":
        return x.relu()
    if name == "some not finite":
        x[:: max(1, n // 7)] = math.nan
        x[1 :: max(2, n // 5)] = -math.inf
        return x
    if name == "jumps":  # whatever a block saw first says nothing about the rest
        return torch.cat([x[: n // 2], x[n // 2 :] * 1e-3 + 1e3])
    scales = {"normal": 1.0, "tiny": 1e-12, "large": 1e4, "zeros": 0.0, "not a number": math.nan}
    return x + 1e6 if name == "far" else x * scales[name]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(
    "name", ["normal", "relu", "some not finite", "jumps", "tiny", "large", "zeros", "not a number", "far"]
)
@pytest.mark.parametrize("n", [0, 1, 7, 4099, 3_000_017])
def test_the_kernel_agrees_with_the_oracle(dtype, name, n):
    x = contents(name, n).to(dtype)
    fast, stat = kernels(x.device), Moments()
    state = stat.empty(x)
    for _ in range(2):  # the second time it knows where to look from
        fast.moments(state, x)
        fast.moments(state, x[1:])  # not aligned
    rows_agree(state, torch.cat([x, x[1:], x, x[1:]]))
    bins, truth = torch.zeros(BINS, device="cuda").double(), torch.zeros(BINS, device="cuda").double()
    fast.histogram(bins, x)
    Plain().histogram(truth, x)
    assert torch.equal(bins, truth)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "name", ["normal", "relu", "some not finite", "jumps", "tiny", "large", "zeros", "not a number", "far"]
)
@pytest.mark.parametrize("n", [0, 1, 7, 4099, 3_000_017])
def test_both_in_one_read_agree_with_the_oracle(dtype, name, n):
    x = contents(name, n).to(dtype)
    state, bins = Moments().empty(x), torch.zeros(BINS, device="cuda").double()
    truth = bins.clone()
    for part in (x, x[1:], x, x[1:]):
        assert kernels(x.device).moments_and_histogram(state, bins, part)
        Plain().histogram(truth, part)
    rows_agree(state, torch.cat([x, x[1:], x, x[1:]]))
    assert torch.equal(bins, truth)


@pytest.mark.parametrize("dtype, kernel", [(torch.bfloat16, "moments_and_histogram<BFLOAT16>"), (torch.float64, None)])
def test_a_measurement_reads_the_values_once(monkeypatch, dtype, kernel):
    compiled, launched = kernels(torch.device("cuda", 0)), []
    real = compiled._launch

    def launch(name, *args, **settings):
        launched.append(name)
        real(name, *args, **settings)

    monkeypatch.setattr(compiled, "_launch", launch)
    model, x = nn.Sequential(nn.Identity()), torch.randn(64, 5, device="cuda", dtype=dtype)
    with measure(model, stats=("moments", "histogram", "quantiles")) as stats:
        model(x)
        model(x)
        assert launched == ([kernel, kernel] if kernel else [])
    assert stats["0"].count == int(stats["0"].histogram().counts.sum()) == 640


def test_what_a_block_saw_before_may_be_far_off():
    state, x = None, torch.randn(1_000_003, device="cuda")
    seen = [x, x + 1e6, x * 1e-9, x * 1e9, torch.zeros_like(x), x]
    for part in seen:
        state = Moments().empty(x) if state is None else state
        kernels(x.device).moments(state, part)
    rows_agree(state, torch.cat(seen))


@pytest.mark.parametrize("layout", ["transposed", "strided", "expanded", "channels last"])
def test_any_layout(layout):
    x = torch.randn(8, 16, 12, 10, device="cuda")
    views = {
        "transposed": x.transpose(1, 3),
        "strided": x[:, ::2, 1:],
        "expanded": x[:1].expand(5, -1, -1, -1),
        "channels last": x.to(memory_format=torch.channels_last),
    }
    state = Moments().empty(x)
    Moments().update(state, views[layout])
    rows_agree(state, views[layout].reshape(-1))


LAYOUTS = {  # of some values, and where the units are
    "features": ((300, 77), 1),
    "tokens": ((5, 400, 768), -1),
    "images": ((9, 24, 33, 31), 1),
    "small images": ((9, 24, 3, 3), 1),
    "one unit": ((1000, 1), 1),
    "units first": ((64, 129), 0),
    "nothing": ((0, 8), 1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", ["normal", "relu", "some not finite", "jumps", "tiny", "zeros", "not a number", "far"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("last", [False, True])
def test_units_agree_with_the_oracle(dtype, name, layout, last):
    shape, dim = LAYOUTS[layout]
    x = contents(name, math.prod(shape)).to(dtype).view(shape)
    if last and x.dim() == 4:
        x = x.to(memory_format=torch.channels_last)
    fast = torch.zeros(5, shape[dim], device="cuda", dtype=torch.float64)
    plain = fast.clone()
    for part in (x, x[: len(x) // 2], -x) if dim else (x, x, -x):
        kernels(x.device).channels(fast, part, dim)
        Plain().channels(plain, part.double(), dim)
    n, mean, m2, size, _ = plain
    deviation = (m2 / n.clamp(min=1)).sqrt()
    assert torch.equal(fast[[0, 4]], plain[[0, 4]])
    assert ((fast[1] - mean).abs() <= 1e-9 * deviation + 1e-12 * mean.abs()).all()
    torch.testing.assert_close(fast[2], m2, rtol=1e-7, atol=1e-14 * float((n * mean.square()).max()))
    torch.testing.assert_close(fast[3], size, rtol=1e-9, atol=0)


def test_states_are_settled_as_by_plain_torch():
    x = torch.randn(50_000, device="cuda") * 3 + 100
    states = torch.stack([Moments().empty(x) for _ in range(3)])
    for number, part in enumerate((x, x[:10])):
        Moments().update(states[number], part)
    torch.testing.assert_close(Moments().settle(states), Plain().settled(states), rtol=1e-9, atol=1e-9)


def training(model, optimizer, steps, scaler=None):
    x, y = torch.randn(32, 3, 16, 16, device="cuda"), torch.randint(10, (32,), device="cuda")

    def step():
        with torch.autocast("cuda", torch.float16 if scaler else torch.bfloat16):
            loss = F.cross_entropy(model(x).float(), y)
        if scaler is None:
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()

    return [step() for _ in range(steps)]


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Flatten(), nn.LazyLinear(10)
    ).cuda()


def everything(model, optimizer, **options):
    wanted = dict.fromkeys(("inputs", "outputs", "grads", "params", "param_grads", "updates"), True)
    return measure(model, **wanted, optimizer=optimizer, stats=ALL, **options)


def ready():
    model = network()
    model(torch.randn(2, 3, 16, 16, device="cuda"))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


@pytest.mark.filterwarnings("default")
def test_nothing_waits_for_the_device():
    model, optimizer = ready()
    with everything(model, optimizer) as stats:
        training(model, optimizer, 2)  # compiles the kernels
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        warnings.simplefilter("error")  # a statistic that raises would be given up
        try:
            training(model, optimizer, 3)
            window = stats.snapshot()
            stats.reset()
            training(model, optimizer, 1)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert window["0"].count == 5 * 32 * 8 * 14 * 14
        assert stats["0"].count == 32 * 8 * 14 * 14


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float64])
def test_what_the_kernel_does_not_know_is_not_waited_for_either(dtype):
    model = nn.Sequential(nn.Identity())
    x = torch.arange(6, device="cuda").to(dtype)
    with measure(model, inputs=True, stats=ALL) as stats, warnings.catch_warnings():
        model(x)
        warnings.simplefilter("error")
        torch.cuda.set_sync_debug_mode("error")
        try:
            model(x)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert stats["0", "input"].count == 12 and stats["0"].histogram().counts.sum() == 12


def test_another_default_device():
    torch.set_default_device("cuda")
    try:
        model = nn.Sequential(nn.Linear(4, 4))
        with measure(model, stats=ALL) as stats:
            model(torch.ones(2, 4))
    finally:
        torch.set_default_device(None)
    assert stats["0"].count == 8 and stats["0"].histogram().edges.device.type == "cpu"


def test_observers_change_nothing_and_memory_is_constant():
    plain, optimizer = ready()
    watched, other = copy.deepcopy(plain), None
    other = torch.optim.AdamW(watched.parameters(), lr=1e-3)
    torch.manual_seed(1)
    training(plain, optimizer, 5)
    torch.manual_seed(1)
    with everything(watched, other):
        training(watched, other, 5)
    for a, b in zip(plain.parameters(), watched.parameters(), strict=True):
        assert torch.equal(a, b)
    with everything(watched, other):
        training(watched, other, 3)
        before = torch.cuda.memory_allocated()
        training(watched, other, 30)
        assert torch.cuda.memory_allocated() <= before


def test_a_scaled_loss():
    model, optimizer = ready()
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    with everything(model, optimizer) as stats:
        training(model, optimizer, 3, scaler)
    before, after = stats["4.weight", "param_grad"], stats["4.weight", "step_grad"]
    assert 0 < after.l2 <= 0.1 * math.sqrt(3) < before.l2 < 100  # neither is a thousand times as large


def test_inside_a_compiled_graph(nothing_compiled):
    model, _ = ready()
    x = torch.randn(32, 3, 16, 16, device="cuda")
    with measure(model, grads=True) as eager:
        model(x).square().mean().backward()
    run = torch.compile(model, fullgraph=True)
    with measure(run, grads=True) as stats:
        for _ in range(3):
            run(x).square().mean().backward()
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    for place in eager:
        assert stats[place].count == 3 * eager[place].count
        assert stats[place].std == pytest.approx(eager[place].std, rel=1e-2)
        assert stats[place].mean == pytest.approx(eager[place].mean, abs=1e-2 * eager[place].std)


@pytest.mark.parametrize("name", ["_launch", "_kernel", "_run_over_all", "_run_channels"])
@pytest.mark.parametrize("good", [0, 1, 5, 12])
def test_a_kernel_that_fails_costs_no_statistic(monkeypatch, name, good):
    kernels.cache_clear()
    compiled = kernels(torch.device("cuda", 0))
    calls, real = [], getattr(compiled, name)

    def fails_later(*args, **settings):
        calls.append(args)
        if len(calls) > good:
            raise RuntimeError("the kernel is broken")
        return real(*args, **settings)

    monkeypatch.setattr(compiled, name, fails_later)
    model, x = nn.Sequential(nn.Identity()), torch.randn(64, 5, device="cuda")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with measure(model, stats=("moments", "histogram", "channels")) as stats:
            for part in x.split(8):
                model(part)
        reading = stats["0"]
        assert list(reading) == ["moments", "histogram", "channels"] and reading.count == 320
    kernels.cache_clear()
    assert (reading.min, reading.max) == (float(x.min()), float(x.max()))
    assert reading.std == pytest.approx(float(x.double().std()), rel=1e-5)
    assert int(reading.histogram().counts.sum()) == 320
    torch.testing.assert_close(reading.channels.mean, x.double().mean(0).cpu(), rtol=1e-5, atol=1e-6)
    assert len(caught) == (len(calls) > good), [str(warning.message) for warning in caught]
