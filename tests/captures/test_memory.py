"""Recording: copies, caps, budgets, transforms, and how what was captured reads."""

import gc
import tracemalloc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from specimens import InPlace, Shared, hooks_of, resnet18
from torchhook import BudgetError, NotRecordedError, OverwrittenError, Record, Ring, Session, Site, Tap, capture


def net():
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 2))


def test_a_cap_in_entries_evicts_the_oldest():
    model, ring = nn.Sequential(nn.Identity(), nn.Identity()), Ring(max_entries=3)
    with Session(model, [Tap("*", Record(ring))]):
        for number in range(4):
            model(torch.tensor(number))
    assert [int(v) for v in ring["0"]] == [3] and [int(v) for v in ring["1"]] == [2, 3]
    assert list(ring) == [Site("1"), Site("0")] and len(ring) == 2
    assert [(entry.pass_number, entry.site.path, entry.call) for entry in ring.entries()] == [
        (2, "1", 0),
        (3, "0", 0),
        (3, "1", 0),
    ]
    ring.clear()
    assert len(ring) == 0 and ring.nbytes == 0
    with pytest.raises(NotRecordedError, match="no output of '0' is kept"):
        ring["0"]


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(0, 4), max_size=8),
    st.one_of(st.none(), st.integers(1, 3)),
    st.one_of(st.none(), st.integers(1, 6)),
    st.sampled_from(["lazy", "clone"]),
)
def test_caps_keep_exactly_the_newest(calls_of_passes, max_passes, max_entries, copy):
    class Repeat(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Identity()

        def forward(self, first, times):
            for number in range(first, first + times):
                self.layer(torch.tensor(number))

    model, ring, flowed = Repeat(), Ring(max_passes=max_passes, max_entries=max_entries), []
    with Session(model, [Tap("layer", Record(ring, copy=copy))], on_silent="ignore"):
        for number, times in enumerate(calls_of_passes):
            model(len(flowed), times)
            flowed += [(number, call, len(flowed) + call) for call in range(times)]
            kept = [entry for entry in flowed if max_passes is None or entry[0] > number - max_passes]
            kept = kept if max_entries is None else kept[-max_entries:]
            assert [(e.pass_number, e.call, int(e.value)) for e in ring.entries()] == kept


def test_a_cap_in_entries_and_passes_with_calls_outside():
    model, ring = nn.Sequential(nn.Identity()), Ring(max_passes=2, max_entries=3)
    with Session(model, [Tap("0", Record(ring))]):
        for number in range(20):
            (model if number % 3 == 0 else model[0])(torch.tensor(number))
            assert 1 <= len(ring["0"]) <= 3 and int(ring["0"][-1]) == number


def test_a_budget_never_evicts_and_raises_before_it_is_exceeded():
    model = nn.Sequential(nn.Linear(4, 100), nn.Linear(100, 10))
    room = 3 * (100 + 10) * 4
    with pytest.raises(BudgetError, match=r"400 B more for the output of '0' would exceed max_bytes=1320") as caught:
        with capture(model, keep=None, max_bytes=room) as acts:
            for _ in range(10):
                model(torch.ones(1, 4))
                assert acts.nbytes <= room
    assert "1.2 KiB by the output of '0'; 120 B by the output of '1'" in str(caught.value)
    assert len(acts["0"].outputs) == 3 and acts.nbytes == room
    assert hooks_of(model) == hooks_of(nn.Sequential(nn.Linear(4, 100), nn.Linear(100, 10)))


def test_a_budget_counts_what_is_kept_and_not_what_was():
    model = nn.Sequential(nn.Linear(4, 100))
    with capture(model, keep=1, max_bytes=400) as acts:
        for _ in range(50):
            model(torch.ones(1, 4))
    assert acts.nbytes == 400
    with pytest.raises(BudgetError), capture(model, keep=1, max_bytes=399):
        model(torch.ones(1, 4))


def test_gradients_count_too():
    model = nn.Sequential(nn.Linear(4, 100))
    with pytest.raises(BudgetError, match="grad_output of '0'"), capture(model, grads=True, max_bytes=500):
        model(torch.ones(1, 4)).sum().backward()
    with capture(model, grads=True, max_bytes=800) as acts:
        out = model(torch.ones(1, 4))
        for _ in range(5):  # each replaces the one before
            out.sum().backward(retain_graph=True)
    assert acts.nbytes == 800


def test_keeping_all_passes_has_a_default_budget():
    ring = capture(net(), keep=None)._store
    assert 2**28 < ring.max_bytes < 2**50
    assert capture(net(), keep=1)._store.max_bytes is None


@pytest.mark.parametrize("copy", ["lazy", "clone"])
def test_copies_keep_what_flowed(copy):
    model = InPlace().eval()
    x = torch.randn(1, 3, 4, 4)
    with capture(model, copy=copy) as acts, torch.no_grad():
        model(x)
    assert torch.equal(acts["conv"].output, model.conv(x))
    assert torch.equal(acts["norm"].output, model.norm(model.conv(x)))


def test_a_graph_inside_of_no_grad_is_not_handed_out():
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x):
            with torch.enable_grad():
                return self.layer(x).detach()

    model = Inner()
    with torch.no_grad(), capture(model) as acts:
        model(torch.ones(1, 2))
    assert not acts["layer"].output.requires_grad
    assert torch.equal(acts["layer"].output, model(torch.ones(1, 2)))


def test_a_reference_raises_if_it_was_overwritten():
    model = InPlace().eval()
    with capture(model, copy="reference") as acts:
        model(torch.randn(1, 3, 4, 4))
    with pytest.raises(OverwrittenError, match="output of 'norm' was overwritten"):
        _ = acts["norm"].output
    assert acts["conv"].output.shape == (1, 3, 4, 4)
    assert "norm" in repr(acts)


def test_transform_dtype_and_what_a_small_slice_keeps_alive():
    model = nn.Sequential(nn.Linear(4, 1000))
    with capture(model, transform=lambda value: value[:, -1], dtype=torch.float16) as acts:
        out = model(torch.ones(3, 4))
    assert acts["0"].output.dtype == torch.float16 and acts["0"].output.shape == (3,)
    assert torch.equal(acts["0"].output, out[:, -1].half())
    with capture(model, transform=lambda value: value[:1, :1]) as acts:
        model(torch.ones(3, 4))
    assert acts["0"].output.untyped_storage().nbytes() == 4
    with capture(model, transform=lambda value: {"mean": value.mean().item()}) as acts:
        model(torch.ones(3, 4))
    assert isinstance(acts["0"].output["mean"], float)


def test_dtype_leaves_whole_numbers_alone():
    model = nn.Sequential(nn.Identity())
    with capture(model, dtype=torch.float16) as acts:
        model({"ids": torch.arange(3), "x": torch.ones(2)})
    assert acts["0"].output["ids"].dtype == torch.int64 and acts["0"].output["x"].dtype == torch.float16


def test_a_transform_cannot_change_the_model():
    model = net()
    plain = model(torch.ones(1, 4))
    with capture(model, transform=lambda value: value.mul_(0)):
        assert torch.equal(model(torch.ones(1, 4)), plain)


def test_inputs_are_what_arrived_with_keywords():
    class Layer(nn.Module):
        def forward(self, x, mask=None, *, scale=1):
            x *= scale
            return x

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two, self.three = Layer(), Layer(), Layer()

        def forward(self, x):
            self.one(x, scale=2)
            self.two(x, None)
            return self.three(x=x)

    with capture(Net(), inputs=True, outputs=False) as acts:
        acts._session.model(torch.ones(1))
    assert acts["one"].input.item() == 1 and acts["one"].kwargs == {"scale": 2}
    first, second = acts["two"].input
    assert first.item() == 2 and second is None and acts["two"].kwargs == {}
    assert acts["three"].input["x"].item() == 2
    assert list(acts) == ["one", "two", "three"]
    with pytest.raises(NotRecordedError, match="pass outputs=True to capture"):
        _ = acts["one"].output


def test_parameters_and_their_gradients_by_their_own_paths():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with capture(model, "0", "2", params=True, grads=True, outputs=False, keep=2) as acts:
        before = []
        for _ in range(2):
            before.append(model[0].weight.detach().clone())
            address = model[0].weight.data_ptr()
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            assert model[0].weight.data_ptr() == address  # a parameter's memory must not move
        grad = model[0].weight.grad
    assert all(torch.equal(a, b) for a, b in zip(acts["0.weight"].params, before, strict=True))
    assert torch.equal(acts["0.weight"].grad, grad) and acts["2.bias"].param.shape == (2,)
    assert acts["0"].grad.shape == (1, 4)


def test_reading_what_is_not_there():
    with capture(net(), "0") as acts:
        acts._session.model(torch.ones(1, 4))
    with pytest.raises(NotRecordedError, match="'1' is not among the captured sites; nearest: '0'"):
        acts["1"]
    assert "1" not in acts and acts.get("1") is None and "0" in acts
    with pytest.raises(NotRecordedError, match="pass grads=True to capture"):
        _ = acts["0"].grad
    with pytest.raises(NotRecordedError, match="pass inputs=True"):
        _ = acts["0"].input


def test_shared_modules_read_under_both_names():
    model = Shared()
    with capture(model, nn.Linear) as acts:
        model(torch.ones(1, 4))
    assert len(acts["second"].outputs) == len(acts["first"].outputs) == 3
    assert acts.order == [("first", 0), ("first", 1), ("first", 2)]
    assert repr(acts["second"]) == "Calls('second', Linear, 3×: output 1×4)"


def test_the_table_is_legible_and_escaped():
    model = nn.ModuleDict({"<script>": nn.Linear(4, 2)})
    with capture(model, inputs=True) as acts:
        assert "no selected site was called yet" in repr(acts)
        model["<script>"](torch.ones(3, 4))
    assert repr(acts) == (
        "Capture of ModuleDict: 1 sites, 72 B, in execution order\n"
        "site      module  calls  shape  dtype    bytes\n"
        "<script>  Linear      1  3×2    float32  24 B"
    )
    assert "<script>" not in acts._repr_html_() and "&lt;script&gt;" in acts._repr_html_()


def traced():
    """Bytes of Python objects that torch and torchhook hold: what others do in threads of this process is not ours."""
    ours = [tracemalloc.Filter(True, f"*/{package}/*") for package in ("torch", "torchhook")]
    return sum(found.size for found in tracemalloc.take_snapshot().filter_traces(ours).statistics("filename"))


@pytest.mark.slow
@pytest.mark.parametrize("everything", [False, True])
def test_ten_thousand_passes_leave_memory_flat(everything):
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
    with capture(model, grads=everything, inputs=everything, keep=1) as acts:

        def passes(count):
            for _ in range(count):
                model(torch.ones(2, 8)).sum().backward()
            gc.collect()

        passes(100)
        tracemalloc.start()
        tensors = sum(type(thing) is torch.Tensor for thing in gc.get_objects())
        grown = []
        for _ in range(2):  # what leaks grows in both, caches in one
            before = traced()
            passes(5_000)
            grown.append(traced() - before)
        tracemalloc.stop()
        assert min(grown) < 10_000, f"{grown} bytes grown"
        assert sum(type(thing) is torch.Tensor for thing in gc.get_objects()) <= tensors + 2
    assert acts.nbytes == 4 * (3 if everything else 1) * 2 * 8 * 4


def test_every_layer_of_a_resnet_in_one_table():
    model = resnet18().eval()
    with torch.no_grad(), capture(model) as acts:
        model(torch.randn(1, 3, 32, 32))
    lines = repr(acts).splitlines()
    assert lines[1].split() == ["site", "module", "calls", "shape", "dtype", "bytes"]
    assert lines[2].split() == ["conv1", "Conv2d", "1", "1×64×16×16", "float32", "64.0", "KiB"]
    assert len(acts.table()) == len(acts) == 52 and lines[-1] == "… and 28 more rows: .table() has all"
