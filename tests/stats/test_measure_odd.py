"""Odd things that models, optimizers and programs do while they are measured."""

import pickle
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

from torchhook import Channels, Covariance, NotRecordedError, Quantiles, Reduce, Session, Stat, Tap, capture, measure
from torchhook.stats.kernels import kernels


def trained(model, optimizer, steps, x=None):
    x = torch.ones(2, 4) if x is None else x
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()


def test_wrapper_subclasses_and_fake_tensors_have_no_memory_to_read():
    model = nn.Linear(4, 3)
    model.weight = nn.Parameter(TwoTensor(torch.ones(3, 4), torch.ones(3, 4)))
    with measure(model, outputs=False, params=True) as stats:
        model(torch.ones(2, 4))
    assert stats["bias", "param"].count == 3
    with FakeTensorMode():
        fake = nn.Sequential(nn.Linear(4, 3))
        with pytest.warns(UserWarning, match="could not collect 'moments' for the output of '0'"):
            with measure(fake):
                fake(torch.ones(5, 4))


def test_meta_tensors_are_left_out_and_spoil_nothing():
    model = nn.ModuleDict({"meta": nn.Linear(2, 2, device="meta"), "real": nn.Linear(2, 2)})
    with measure(model["meta"]) as stats, pytest.warns(UserWarning, match="no values"):
        model["meta"](torch.ones(1, 2, device="meta"))
    with pytest.raises(NotRecordedError, match="raised TapError: a Tensor on the meta device has no values"):
        stats[""].mean  # noqa: B018


def test_another_default_device():
    code = """
        import torch
        from torch import nn
        torch.set_default_device("meta")
        from torchhook import measure
        model = nn.Sequential(nn.Linear(2, 2, device="cpu"))
        with measure(model, stats=("moments", "histogram")) as stats:
            model(torch.ones(1, 2, device="cpu"))
        print(stats["0"].count, stats["0"].histogram().edges.device)
    """
    told = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert told.stdout == "2 cpu\n", told.stderr


def test_a_step_that_calls_its_parents():
    class MyAdam(torch.optim.Adam):
        def step(self, closure=None):
            return super().step(closure)

    torch.optim.Adam([nn.Parameter(torch.ones(1))])  # from then on torch hooks that class's step as well
    model = nn.Linear(4, 3)
    optimizer = MyAdam(model.parameters())
    with measure(model, params=True, param_grads=True, updates=True, optimizer=optimizer) as stats:
        trained(model, optimizer, 4)
    assert stats.step == 4
    for port in ("param", "param_grad", "step_grad", "update"):
        assert stats["weight", port].count == 4 * 12


def test_an_optimizer_that_says_it_is_one_and_wraps_one():
    class Accelerated(torch.optim.Optimizer):  # as Hugging Face Accelerate writes it
        def __init__(self, optimizer):
            self.optimizer = optimizer

        def step(self, closure=None):
            self.optimizer.step(closure)

        def zero_grad(self):
            self.optimizer.zero_grad()

    model = nn.Linear(4, 3)
    outer = Accelerated(torch.optim.SGD(model.parameters(), 0.1))
    with measure(model, updates=True, optimizer=outer) as stats:
        trained(model, outer, 2)
    assert stats["weight", "update_ratio"].count == 2


def test_an_optimizer_that_never_steps_is_told_of():
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.warns(UserWarning, match="made no step"):
        with measure(model, updates=True, optimizer=optimizer):
            model(torch.ones(2, 4))


def test_parameters_that_the_optimizer_gets_later():
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3))
    optimizer = torch.optim.SGD(model[0].parameters(), 0.1)
    with measure(model, updates=True, optimizer=optimizer) as stats:
        trained(model, optimizer, 2)
        optimizer.add_param_group({"params": list(model[1].parameters())})
        trained(model, optimizer, 1)
    assert stats["0.weight", "update_ratio"].count == 3 and stats["1.weight", "update_ratio"].count == 1


def test_two_passes_before_one_backward_with_every():
    model = nn.Linear(4, 3)
    with measure(model, param_grads=True, grads=True, every=2) as stats:
        for _ in range(6):
            (model(torch.ones(2, 4)) + model(torch.ones(2, 4))).sum().backward()
    assert stats["weight", "param_grad"].count == 6 * 12
    assert stats["", "grad_output"].count == 6 * 6  # of the first of both passes


def test_a_transform_cannot_reach_what_flows():
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    x = torch.ones(2, 4)
    expected = model(x)
    with Session(model, [Tap("0", reduce := Reduce("moments"), transform=lambda t: t.mul_(100))]):
        assert torch.equal(model(x), expected)
    assert reduce.snapshot()["0"].max == pytest.approx(100 * model[0](x).max().item())


def test_measuring_leaves_copies_on_write_alone():
    model = nn.Sequential(nn.Linear(64, 64))
    with capture(model) as acts, measure(model, stats=("moments", "histogram")):
        y = model(torch.ones(8, 64))
    assert torch._C._is_cow_tensor(acts["0"].output) and torch._C._is_cow_tensor(y.detach())


def test_complex_values_are_two_numbers_each_and_their_units_stay():
    model = nn.Linear(3, 5, dtype=torch.complex64)
    x = torch.randn(4, 3, dtype=torch.complex64)
    with measure(model, by="channel") as stats:
        y = model(x)
    both = torch.cat([y.real, y.imag])
    assert stats[""].count == 40 and stats[""].max == both.max().item()
    torch.testing.assert_close(stats[""].channels.mean.float(), both.mean(0).detach())


def test_units_of_large_values_and_of_a_convolution_without_a_batch():
    units = Channels(dim=1).of(torch.full((4, 2), 3e38))
    assert units.mean.tolist() == pytest.approx([3e38, 3e38]) and units.std.tolist() == [0, 0]
    spread = Covariance(dim=1).of(torch.tensor([[1e30, 0.0], [3e30, 0.0]]))
    assert spread.covariance[0, 0].item() == pytest.approx(2e60, rel=1e-6)
    convolution = nn.Conv2d(3, 5, 3)
    with measure(convolution, by="channel") as stats:
        convolution(torch.randn(3, 8, 9))
    assert len(stats[""].channels.mean) == 5


def test_quantiles_of_zeros_and_of_a_constant():
    model = nn.Sequential(nn.Identity())
    for constant in (0.0, 1.0):
        with measure(model, stats=("moments", "quantiles")) as stats:
            model(torch.full((100,), constant))
        assert [stats["0"].quantile(q) for q in (0, 0.5, 1)] == [constant] * 3
    with pytest.raises(ValueError, match=r"q must be a number in \[0, 1\], not 50"):
        Quantiles(50)


def test_names_that_clash_or_lack():
    class Mine(Stat):
        name = "histogram"

        def update(self, state, x):
            state += 1

        def compute(self, state):
            return float(state[0])

    class Nameless(Mine):
        name = None

    with pytest.raises(ValueError, match="same name"):
        measure(nn.Linear(2, 2), stats=("quantiles", Mine()))
    with pytest.raises(TypeError, match="Nameless has no name"):
        measure(nn.Linear(2, 2), stats=(Nameless(),))


def test_readings_of_one_moment():
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(20)])
    with measure(model) as stats:
        model(torch.ones(2, 4))
        assert (
            [reading.count for _, reading in stats.items()] == [reading.count for reading in stats.values()] == [8] * 20
        )


def test_lazy_parameters_and_frozen_models_are_refused_by_name():
    model = nn.Sequential(nn.LazyLinear(3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(ValueError, match="'0.weight' has no values yet; run the model once"):
        measure(model, updates=True, optimizer=optimizer).open()
    with pytest.raises(ValueError, match="no parameter of the model requires a gradient"):
        measure(nn.Linear(2, 2).requires_grad_(False), param_grads=True)


def test_without_a_compiler_the_plain_kernels_are_used(tmp_path):
    code = """
        import warnings, torch
        from torch import nn
        from torchhook import measure
        model = nn.Sequential(nn.Linear(2, 2))
        with warnings.catch_warnings(record=True) as told, measure(model, stats=("moments", "histogram")) as stats:
            warnings.simplefilter("always")
            model(torch.ones(1, 2))
        print(stats["0"].count, int(stats["0"].histogram().counts.sum()))
        print([str(w.message)[:60] for w in told if "plain torch" in str(w.message)])
    """
    caches = dict.fromkeys(("PATH", "TORCHINDUCTOR_CACHE_DIR", "XDG_CACHE_HOME"), str(tmp_path))
    environment = {**caches, "CXX": str(tmp_path / "none")}
    told = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, env=environment, check=False
    )
    assert told.stdout.splitlines()[0] == "2 2", told.stderr
    assert "statistics on cpu are computed by plain torch, which is slo" in told.stdout


def test_here_the_compiled_kernels_are_used():
    assert type(kernels(torch.device("cpu"))).__name__ == "Native"


def test_what_was_compiled_once_is_loaded_without_the_toolchain():
    kernels(torch.device("cpu"))  # compiled by now
    code = """
        import sys, torch
        from torchhook.stats.kernels import kernels
        print(type(kernels(torch.device("cpu"))).__name__, "torch._inductor.codecache" in sys.modules)
    """
    told = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["Native", "False"]


@pytest.mark.parametrize("queries", [("",), ("", "0")])
def test_the_whole_model_selected_by_its_name(queries):
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with measure(model, *queries, updates=True, optimizer=optimizer) as stats:
        trained(model, optimizer, 2)
    assert {path for path, port in stats if port == "update"} == {path for path, _ in model.named_parameters()}


def test_what_was_not_seen_yet_is_told_from_what_was_not_asked_for():
    model = nn.Sequential(nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with measure(model, grads=True) as stats:
        with pytest.raises(NotRecordedError, match="nothing was seen there yet, or since the last reset"):
            stats["0"]
        y = model(torch.ones(2, 4))
        with pytest.raises(NotRecordedError, match="nothing of it was seen yet"):
            stats["0", "grad_output"]
        with pytest.raises(NotRecordedError, match="pass params=True to measure"):
            stats["0.weight", "param"]
        with pytest.raises(NotRecordedError, match="no such port; the ports are output, input, grad_output"):
            stats["0", "grad"]
        y.sum().backward()
    with pytest.raises(ValueError, match="nothing that ReLU selects has parameters"):
        measure(nn.Sequential(nn.ReLU(), nn.Linear(2, 2)), nn.ReLU, updates=True, optimizer=optimizer).open()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("verb", [capture, measure])
def test_a_checkpoint_around_the_whole_model_is_not_counted_again(verb, reentrant):
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3))
    x = torch.randn(2, 4, requires_grad=True)
    with verb(model) as seen:
        checkpoint(model, x, use_reentrant=reentrant).sum().backward()
        if verb is capture:
            assert [len(seen[path]) for path in ("0", "1", "2")] == [1, 1, 1]
        else:
            assert [seen[path].count for path in ("0", "1", "2")] == [6, 6, 6]


def test_an_update_that_returns_instead_of_writing_is_told():
    class Returns(Stat):
        name = "returns"

        def update(self, state, x):
            return state + x.sum()

        def compute(self, state):
            return float(state[0])

    model = nn.Sequential(nn.Identity())
    with pytest.warns(UserWarning, match="it has to write into the state instead"), measure(model, stats=Returns()):
        model(torch.ones(2))


def test_long_tables_are_cut_in_print_alone():
    model = nn.Sequential(*[nn.Identity() for _ in range(130)])
    with measure(model) as stats:
        model(torch.ones(2))
    assert "… and 106 more rows: .table() has all" in repr(stats) and "106 more" in stats._repr_html_()
    assert len(stats.table("list")) == 130


def test_readings_can_be_pickled():
    model = nn.Sequential(nn.Identity())
    with measure(model, stats=("moments", "quantiles")) as stats:
        model(torch.ones(2))
    reading = pickle.loads(pickle.dumps(stats["0"]))
    assert reading.mean == 1 and reading.quantile(0.5) == 1


def test_a_step_that_raised_does_not_end_the_counting():
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def closure():
        raise MemoryError

    with measure(model, updates=True, optimizer=optimizer) as stats:
        trained(model, optimizer, 1)
        with pytest.raises(MemoryError):
            optimizer.step(closure)
        trained(model, optimizer, 2)
    assert stats.step == 3 and stats["weight", "update_ratio"].count == 3
