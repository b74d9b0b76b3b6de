"""measure() inside the graphs of torch.compile: one full graph, eager's numbers, the same steps, no recompiles."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from specimens import Blocks
from torchhook import TopK, arm, measure

pytestmark = pytest.mark.usefixtures("nothing_compiled", "one_thread")

SIX = ("moments", "histogram", "quantiles", "channels", "covariance", "topk")
BACKENDS = ["aot_eager", "inductor"]
HOW = ["torch.compile", "of the original", "module.compile", "armed function"]


def compiled_by(how, model, backend):
    """What to call, and what to measure."""
    if how == "torch.compile":
        run = torch.compile(model, fullgraph=True, backend=backend)
        return run, run
    if how == "of the original":
        return torch.compile(model, fullgraph=True, backend=backend), model
    if how == "module.compile":
        model.compile(fullgraph=True, backend=backend)
        return model, model
    if how == "armed function":
        arm(model).open()
    return torch.compile(lambda x: model(x), fullgraph=True, backend=backend), model


QUERIES = ("**.up", "**.act", "**.down", "head")


def alike(stats, expected):
    """The same numbers, but for the order in which they were added up."""
    assert set(stats) == set(expected) and len(expected) > 0
    for place in expected:
        one, other = stats[place], expected[place]
        assert one.count == other.count and one.note == other.note, place
        allowed = 1e-5 * other.abs_mean
        for name in ("mean", "std", "abs_mean", "min", "max", "l2"):
            found, wanted = getattr(one, name), getattr(other, name)
            assert found == pytest.approx(wanted, rel=1e-4, abs=allowed, nan_ok=True), (place, name)
        assert one.zero_fraction == pytest.approx(other.zero_fraction, abs=0.01), place


def trained(call, measured, model, **options):
    """What is measured in six passes with gradients."""
    generator = torch.Generator().manual_seed(1)
    with measure(measured, *QUERIES, **options) as stats:
        for _ in range(6):
            model.zero_grad()
            call(torch.randn(3, 8, generator=generator)).square().sum().backward()
    return stats


@pytest.mark.parametrize(
    "how, backend, every",
    [
        *[(how, "aot_eager", 2) for how in HOW],
        ("torch.compile", "aot_eager", 1),
        ("torch.compile", "inductor", 2),
        ("of the original", "inductor", 1),
        ("module.compile", "inductor", 2),
    ],
)
@pytest.mark.matrix(
    "torch.compile", "`measure` in one full graph: the statistics of eager mode, no recompilation, also with `every=`"
)
def test_one_full_graph_with_the_numbers_of_eager(how, backend, every):
    options = {"inputs": True, "grads": True, "params": True, "param_grads": True, "every": every}
    model = Blocks()
    eager = trained(model, model, model, **options)
    call, measured = compiled_by(how, model, backend)
    stats = trained(call, measured, model, **options)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    assert eager["head"].count == 12 * 6 // every and eager["head.weight", "param"].count == 32 * 6 // every
    alike(stats, eager)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_function_that_calls_the_model(backend):
    model = Blocks()
    eager = trained(model, model, model, inputs=True, grads=True, param_grads=True)
    call, measured = compiled_by("function", model, backend)
    alike(trained(call, measured, model, inputs=True, grads=True, param_grads=True), eager)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


@pytest.mark.parametrize("backend, every", [("aot_eager", 2), ("inductor", 1)])
def test_a_compiled_model_and_its_optimizer(backend, every):
    def run(compiled):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True), nn.Linear(6, 3))
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        call = torch.compile(model, fullgraph=True, backend=backend) if compiled else model
        options = {"grads": True, "params": True, "param_grads": True, "updates": True, "stats": SIX}
        with measure(call, optimizer=optimizer, every=every, **options) as stats:
            for _ in range(4):
                optimizer.zero_grad()
                for _ in range(2):
                    call(torch.randn(3, 4)).square().mean().backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
        return stats

    eager, stats = run(False), run(True)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    assert eager["2"].count == 9 * 8 // every and eager["2.bias", "update_ratio"].count == 4 // every
    alike(stats, eager)
    for place in eager:
        for key, state in eager[place].states().items():
            if key not in ("bins", "topk"):  # which tell apart what differs in the last digit
                torch.testing.assert_close(stats[place].state(key), state, rtol=1e-3, atol=1e-5)


class Probe(nn.Module):
    """Gives what it is given, so that a measurement tells which passes it was made in."""

    def __init__(self):
        super().__init__()
        self.same = nn.Identity()
        self.linear = nn.Linear(4, 1)

    def forward(self, x):
        return self.linear(self.same(x))


def values_of(stats):
    return sorted({entry.value for entry in stats["same"]["topk"]})


def constant(value):
    return torch.full((2, 4), float(value))


@pytest.mark.parametrize("how", HOW)
def test_evaluations_between_the_steps_are_no_steps(how):
    model = Probe()
    call, measured = compiled_by(how, model, "aot_eager")
    with measure(measured, "same", stats=TopK(200), every=2) as stats:
        for number in range(5):
            call(constant(number)).sum().backward()
            with torch.no_grad():
                call(constant(10 + number))
    assert values_of(stats) == [0, 2, 4, 10, 12, 14] and stats.step == 4


@pytest.mark.parametrize("how", HOW)
def test_every_pass_counts_where_none_has_gradients(how):
    model = Probe()
    call, measured = compiled_by(how, model, "aot_eager")
    with measure(measured, "same", stats=TopK(200), every=2) as stats, torch.no_grad():
        for number in range(5):
            call(constant(number))
    assert values_of(stats) == [0, 2, 4] and stats.step == 4


def test_a_model_that_ran_before_is_measured_again_and_again():
    model, x = Blocks(), torch.randn(3, 8)
    run = torch.compile(model, backend="aot_eager")
    expected = run(x).detach().double()
    for _ in range(2):
        with measure(run, "head") as stats:
            run(x)
        assert stats["head"].count == 12 and stats["head"].mean == pytest.approx(float(expected.mean()), abs=1e-6)
    torch.testing.assert_close(run(x).double(), expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_results_are_those_without(backend):
    x = torch.randn(3, 8)

    def grads(measured):
        torch.manual_seed(2)
        model = Blocks()
        run = torch.compile(model, backend=backend, fullgraph=True)
        if measured:
            with measure(run, *QUERIES, inputs=True, grads=True, params=True):
                loss = run(x).square().sum()
                loss.backward()
        else:
            loss = run(x).square().sum()
            loss.backward()
        return [loss, *[parameter.grad for parameter in model.parameters()]]

    torch.testing.assert_close(grads(True), grads(False))


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(32, 64), nn.Linear(32, 64), nn.Linear(64, 32)
        self.act = nn.SiLU()

    def forward(self, x):
        return self.down(self.act(self.gate(x)) * self.up(x))


def kept_for_the_backward(call):
    """The bytes of all memory that the graph of what `call` returns keeps."""
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        call()
    return sum(kept.values())


def test_what_is_measured_is_not_kept_for_the_backward_in_a_larger_dtype():
    x, bytes_kept = torch.randn(2, 16, 32).bfloat16(), []
    for options in ({}, {"grads": True}):
        torch.compiler.reset()
        model = nn.Sequential(Gated(), Gated(), nn.Linear(32, 512, bias=False)).bfloat16()
        run = torch.compile(model, backend="aot_eager_decomp_partition")

        def loss(run=run):
            return nn.functional.cross_entropy(run(x).float().flatten(0, 1), torch.zeros(32, dtype=torch.long))

        whole = torch.compile(loss, backend="aot_eager_decomp_partition")
        with measure(run, **options) if options else nullcontext():
            bytes_kept.append(kept_for_the_backward(whole))
    assert bytes_kept[1] < 1.02 * bytes_kept[0]
