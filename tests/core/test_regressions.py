"""Places where an earlier version was wrong, each found by trying to break it."""

import asyncio
import contextlib
import copy
import pickle
import threading
from collections import UserDict
from collections.abc import MutableMapping
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

from specimens import Returning, hooks_of
from torchhook import (
    HookManager,
    NotRecordedError,
    Record,
    Ring,
    SelectionError,
    Session,
    SilentError,
    Tap,
    capture,
    detach,
    first,
    hooks,
    mark,
    marked,
    overhead,
    trace,
)
from torchhook.core import marks


def test_two_stores_in_one_session_are_two():
    net = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4))
    for caps in ({"max_passes": 1}, {"max_passes": 2}, {"max_entries": 5}):
        a, b = Ring(**caps), Ring(**caps)
        with Session(net, [Tap("0", Record(a)), Tap("1", Record(b))]):
            for _ in range(2):
                net(torch.ones(1, 2))
        assert a["0"][-1].shape == (1, 3) and b["1"][-1].shape == (1, 4)
        assert len(a) == len(b) == 1


class Wrapped(MutableMapping):
    def __init__(self, data):
        self.data = data

    def __getitem__(self, key):
        return self.data[key]

    def __setitem__(self, key, value):
        self.data[key] = value

    def __delitem__(self, key):
        del self.data[key]

    def __iter__(self):
        return iter(self.data)

    def __len__(self):
        return len(self.data)


class Attributes(dict):
    def __init__(self, **items):
        super().__init__(items)
        self.__dict__ = self


class Two(tuple):
    def __new__(cls, a, b):
        return super().__new__(cls, (a, b))


@dataclass
class Unset:
    value: torch.Tensor
    later: torch.Tensor = field(init=False)


@pytest.mark.parametrize(
    "make",
    [
        lambda x: Wrapped({"a": x}),
        lambda x: UserDict({"a": x}),
        lambda x: Attributes(a=x),
        lambda x: Two(x, x),
        Unset,
    ],
)
def test_containers_of_ones_own_are_never_written_to(make):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Returning(lambda x: make(x * 2))

        def forward(self, x):
            return self.inner(x)

    net = Net()
    x = torch.ones(2, requires_grad=True)
    with capture(net, "inner", "", grads=True) as acts:
        out = net(x)
        live = out["a"] if isinstance(out, (dict, MutableMapping)) else out[0] if isinstance(out, tuple) else out.value
        assert live.requires_grad
        with torch.no_grad():
            live.zero_()
    kept = acts["inner"].output
    if isinstance(out, Attributes):
        assert kept.a.tolist() == [2, 2]
    kept = kept["a"] if isinstance(kept, (dict, MutableMapping)) else kept[0] if isinstance(kept, tuple) else kept.value
    assert kept.tolist() == [2, 2] and not kept.requires_grad


def test_what_flows_on_keeps_its_type():
    """A parameter as output, and inputs whose gradient is tapped, are replaced by views: not so their containers."""
    weight = nn.Parameter(torch.ones(2))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.make = Returning(lambda x: (Wrapped({"a": weight}), Two(weight, x)))
            self.use = Returning(lambda both: (type(both[0]), type(both[1]), both[0]["a"] * both[1][0]))

        def forward(self, x):
            return self.use(self.make(x))

    net, ring = Net(), Ring(max_passes=1)
    taps = [Tap("make", Record(ring), port="grad_output"), Tap("use", Record(ring), port="grad_input")]
    with Session(net, taps):
        one, two, product = net(torch.ones(2, requires_grad=True))
        product.sum().backward()
    assert one is Wrapped and two is Two and weight.grad.tolist() == [2, 2]
    assert ring["make", "grad_output"][0][1][0].tolist() == [1, 1]
    assert not weight._backward_hooks


def test_a_copy_made_by_hand_runs_itself_and_records_nothing():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(1, 1, bias=False)

        def forward(self, x):
            return self.layer(x)

        def __deepcopy__(self, memo):
            twin = self.__class__.__new__(self.__class__)
            twin.__dict__.update(self.__dict__)
            twin._modules = copy.deepcopy(self._modules, memo)
            return twin

    net = Net()
    with capture(net, on_silent="ignore") as acts:
        twin = copy.deepcopy(net)
        nn.init.constant_(twin.layer.weight, 100.0)
        assert twin(torch.ones(1, 1)).item() == 100
        assert len(acts) == 0


def test_graph_modules_and_modules_that_pickle_all_they_have():
    class Careless(nn.Sequential):
        def __getstate__(self):
            return dict(self.__dict__)

    global Careless_
    Careless_ = Careless
    Careless.__qualname__ = "Careless_"
    for net in (torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2))), Careless(nn.Linear(2, 2))):
        x = torch.ones(1, 2)
        with capture(net) as acts:
            expected = net(x)
            twin = copy.deepcopy(net)
            data = pickle.dumps(net)
            assert torch.equal(twin(x), expected) and torch.equal(pickle.loads(data)(x), expected)
            assert b"torchhook" not in data and len(acts["0"].outputs) == 1


def test_threads_that_inherit_the_context_do_not_mix():
    net = nn.Sequential(nn.Identity(), nn.Identity())

    async def main():
        with (
            capture(net, keep=None, on_silent="ignore") as mine,
            capture(net, keep=None, scope="all") as everybodys,
        ):
            await asyncio.gather(*[asyncio.to_thread(net, torch.tensor(number)) for number in range(40)])
        return mine, everybodys

    mine, everybodys = asyncio.run(main())
    assert len(mine) == 0
    by_pass = {}
    for entry in everybodys._store.entries():
        by_pass.setdefault(entry.pass_number, []).append(int(entry.value))
    assert len(by_pass) == 40 and all(len(values) == 2 and len(set(values)) == 1 for values in by_pass.values())


def test_a_budget_weighs_what_a_view_really_holds():
    net = nn.Sequential(Returning(lambda x: (x * 1)[:, :1]))
    with capture(net, keep=None, max_bytes=10_000) as acts:
        for _ in range(10):
            net(torch.ones(100, 100))
    held = sum(output.untyped_storage().nbytes() for output in acts["0"].outputs)
    assert held == acts.nbytes == 4000


def test_grad_input_of_one_tensor_given_three_times():
    class Attend(nn.Module):
        def forward(self, q, k, v):
            return q * 2 + k * 3 + v * 5

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.attend = Attend()

        def forward(self, x):
            return self.attend(x, x, x)

    net, ring = Net(), Ring(max_passes=1)
    with Session(net, [Tap("attend", Record(ring), port="grad_input")]):
        net(torch.ones(1, requires_grad=True)).sum().backward()
    assert [grad.item() for grad in ring["attend", "grad_input"][0]] == [2, 3, 5]


class Marking(nn.Module):
    def forward(self, x):
        return mark(x * 2, "d")


def test_marks_have_inputs_are_listed_and_can_be_detached():
    net = nn.Sequential(Marking())
    with capture(net, marked("d"), inputs=True, outputs=False) as acts:
        net(torch.ones(1))
    assert acts["0:d"].input.item() == 2
    with trace(net, marked("d"), progress=False) as calls:
        net(torch.ones(1))
    assert [call.path for call in calls.calls] == ["0:d"]
    acts = capture(net, marked("d"), group="g").open()
    assert [(info.path, info.group) for info in hooks(net)] == [("marked 'd'", "g")]
    assert detach(net, group="g") == 1 and hooks(net) == [] and marks.listening() == ()
    with pytest.raises(SelectionError, match="a mark is a value"):
        capture(net, marked("d"), params=True).open()


def test_marks_of_many_threads_leave_no_listener():
    net = nn.Sequential(Marking())

    def work():
        for _ in range(200):
            with capture(net, marked("d")):
                net(torch.ones(1))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert marks.listening() == ()


def test_detaching_by_group_keeps_what_was_recorded():
    net = nn.Sequential(nn.Linear(2, 2))
    acts = capture(net, "0", group="g").open()
    net(torch.ones(1, 2))
    detach(net, "g")
    assert acts["0"].output.shape == (1, 2) and acts["0"].module_class is nn.Linear
    manager = HookManager(net)
    manager.add("0")
    detach(net)
    manager.add("again", layer=net[0])
    net(torch.ones(1, 2))
    assert manager.get("0") == [] and len(manager.get("again")) == 1
    manager.clear_hooks()


def test_threads_that_share_a_bounded_store():
    net = nn.Sequential(*[nn.Identity() for _ in range(30)])
    errors = []

    def work():
        try:
            for _ in range(50):
                net(torch.ones(4))
        except Exception as error:
            errors.append(error)

    with capture(net, keep=3, max_bytes=16 * 30 * 12, scope="all") as acts:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            assert acts.nbytes <= 16 * 30 * 12 and repr(acts)
        for thread in threads:
            thread.join()
    assert not errors


def test_passes_with_nothing_on_them_leave_nothing():
    net, ring = nn.Sequential(nn.Identity()), Ring(max_entries=2)
    with Session(net, [Tap("0", Record(ring), when=first(1))]):
        for _ in range(500):
            net(torch.ones(1))
    assert len(ring["0"]) == 1 and len(ring._pages) == 1


def test_failing_calls_outside_of_a_pass_do_not_pile_up(monkeypatch):
    monkeypatch.setattr("torchhook.core.passes._DEEP", 100)
    net = nn.Sequential(nn.Linear(2, 2))
    with capture(net, inputs=True) as acts:
        for _ in range(500):
            with pytest.raises(RuntimeError):
                net[0](torch.ones(1, 3))
        assert len(acts._session.scope.last.stack) <= 101
        net[0](torch.ones(1, 2))
    assert acts["0"].output.shape == (1, 2)


def test_attaching_in_the_middle_of_a_forward():
    class Inner(nn.Module):
        def forward(self, x):
            self.acts = capture(net, "inner", inputs=True).open()
            return x

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Inner()

        def forward(self, x):
            return self.inner(x)

    net = Net()
    with capture(net, "inner") as outer:
        net(torch.ones(1))
    with pytest.raises(SilentError):
        net.inner.acts.close()
    assert len(outer) == 1 and len(net.inner.acts) == 0
    assert hooks_of(net)["inner", "_forward_hooks"] == {}


def test_a_tap_added_in_the_middle_of_a_forward():
    class Adds(nn.Module):
        def forward(self, x):
            if len(session.taps) == 0:
                session.add(Tap("1", Record(ring)))
            return x

    net, ring = nn.Sequential(Adds(), nn.Identity()), Ring(max_passes=1)
    with Session(net, []) as session:
        net(torch.tensor(1))
        assert [int(value) for value in ring["1"]] == [1]
        net(torch.tensor(2))
        assert [int(value) for value in ring["1"]] == [2]


def test_a_recursive_call_that_raised_does_not_take_the_outer_calls_place():
    class Recursive(nn.Module):
        def forward(self, depth):
            if depth == 2:
                raise ValueError
            with contextlib.suppress(ValueError):
                self(depth + 1)
            return torch.tensor(depth)

    net = nn.Sequential(Recursive())
    with capture(net, "0", inputs=True) as acts:
        net(0)
    assert [int(value) for value in acts["0"].outputs] == [1, 0] and acts.order == [("0", 1), ("0", 0)]


def test_sparse_and_nested_outputs():
    net = nn.Sequential(Returning(lambda x: x))
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    for value in (torch.eye(3).to_sparse(), nested, torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged)):
        for options in ({}, {"keep": None, "max_bytes": 10_000}):
            with capture(net, **options) as acts, trace(net, progress=False):
                net(value)
            assert acts.nbytes >= 0 and "Returning" in repr(acts) and acts["0"].output.layout == value.layout


def test_other_names_of_shared_modules_and_tied_parameters():
    net = nn.ModuleDict({"e": nn.Linear(3, 3), "h": nn.Linear(3, 3)})
    net["h"].weight = net["e"].weight
    with capture(net, params=True, grads=True) as acts:
        net["h"](net["e"](torch.ones(1, 3))).sum().backward()
    assert torch.equal(acts["h.weight"].param, acts["e.weight"].param)
    assert torch.equal(acts["h.weight"].grad, net["e"].weight.grad)
    with capture(net, params=True, grads=True) as acts:
        net["e"](torch.ones(1, 3))
    with pytest.raises(NotRecordedError, match="no gradient reached 'h.bias'"):
        _ = acts["h.bias"].grad


def test_a_stopping_session_still_stops_after_a_tap_went():
    net = nn.Sequential(nn.Identity(), nn.Identity(), nn.Identity())
    tap = Tap("1", print)
    with Session(net, [Tap("0", Record()), tap], stop=True) as session:
        session.remove(tap)
        assert net(torch.ones(1)) is None


def test_a_stopping_session_that_is_detached_in_the_middle_of_a_forward():
    net = nn.Sequential(nn.Identity(), Returning(lambda x: (acts.close(), x)[1]), nn.Identity())
    acts = capture(net, "0", "2", stop=True, on_silent="ignore").open()
    assert net(torch.tensor(3)).item() == 3
    assert acts["0"].output.item() == 3 and acts["2"].outputs == []


def test_removing_many_taps_is_linear(monkeypatch):
    net = nn.Sequential(*[nn.Identity() for _ in range(300)])
    manager = HookManager(net)
    for number in range(300):
        manager.add(str(number))
    calls = []
    real = type(manager._session._points[id(net[0])]).unbind
    monkeypatch.setattr(
        "torchhook.core.hooks.point.Point.unbind", lambda point, tap: (calls.append(point), real(point, tap))[1]
    )
    manager.clear_hooks()
    assert len(calls) == 300


@dataclass
class WithData:
    data: torch.Tensor
    mask: torch.Tensor


def test_objects_that_have_data_are_kept_whole():
    net = nn.Sequential(Returning(lambda x: WithData(x * 2, x > 0)))
    for grad in (False, True):
        with torch.set_grad_enabled(grad), capture(net, "0") as acts:
            net(torch.ones(2, requires_grad=True))
        assert type(acts["0"].output) is WithData and acts["0"].output.mask.all()
    lstm = nn.Sequential(nn.LSTM(2, 3), Returning(lambda both: both[0]))
    packed = nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
    with capture(lstm, "1") as acts:
        out = lstm(packed)
    assert type(acts["1"].output) is type(out) and torch.equal(acts["1"].output.batch_sizes, out.batch_sizes)


def test_calls_before_the_first_pass_stay_as_long_as_it():
    net = nn.Sequential(nn.Identity(), nn.Identity())
    with capture(net, keep=3) as acts:
        net[0](torch.tensor(7))
        for number in range(3):
            net(torch.tensor(number))
        assert [int(value) for value in acts["0"].outputs] == [7, 0, 1, 2]
        net(torch.tensor(3))
        assert [int(value) for value in acts["0"].outputs] == [1, 2, 3]


def test_a_transform_gives_gradients_of_the_same_shape_as_outputs():
    net = nn.Sequential(nn.LSTM(4, 3, batch_first=True))
    with capture(net, "0", grads=True, transform=lambda output: output[0]) as acts:
        out, _ = net(torch.randn(2, 5, 4))
        out.sum().backward()
    assert acts["0"].grad.shape == acts["0"].output.shape == (2, 5, 3) and acts["0"].grad.eq(1).all()


def test_a_mark_that_two_queries_match_is_recorded_once():
    net = nn.Sequential(Marking())
    with capture(net, marked("d"), "0:d") as acts:
        net(torch.ones(1))
    assert acts.order == [("0:d", 0)]


def test_what_is_no_tensor_has_no_gradient():
    opaque = object()
    net = nn.Sequential(Returning(lambda x: (x * 2, 7, opaque, [])))
    with capture(net, grads=True) as acts:
        net(torch.ones(1, requires_grad=True))[0].sum().backward()
    assert acts["0"].grad[1:] == (None, None, []) and acts["0"].grad[0].item() == 1
    assert acts["0"].output[1:3] == (7, opaque)


def test_reading_says_what_is_wrong_with_it():
    net = nn.Sequential(nn.Linear(2, 2))
    net.requires_grad_(False)
    with capture(net, params=True, grads=True, inputs=True, transform=lambda value: value * 1) as acts:
        net(torch.ones(1, 2))
    with pytest.raises(NotRecordedError, match="no param_grad was recorded for .*'0.weight'.*set its requires_grad"):
        _ = acts["0.weight"].grad
    with pytest.raises(NotRecordedError, match="the parameter '0.weight'; read its .param"):
        _ = acts["0.weight"].output
    with pytest.raises(NotRecordedError, match="only the result of transform="):
        _ = acts["0"].kwargs
    with pytest.raises(
        SelectionError, match="'0.weight'; it is a parameter: select '0' with params=True in capture or measure"
    ):
        capture(net, "0.weight").open()
    with pytest.raises(SelectionError, match="must take a path and a module"):
        capture(net, lambda path: True)
    with pytest.raises(TypeError, match="name must be a string"), capture(net, marked("x")):
        mark(torch.ones(1), 3)


def test_owners_of_hooks_are_named_truly():
    net = nn.Sequential(nn.ReLU())

    def mine(event):
        return None

    with Session(net, [Tap("0", mine), Tap("0", Record())], on_silent="ignore"):
        owners = [info.owner for info in hooks(net)]
    assert owners[0].endswith("test_owners_of_hooks_are_named_truly.<locals>.mine")
    assert not owners[0].startswith("torchhook.") and owners[1] == "torchhook.Record"


def test_overhead_takes_keywords_and_leaves_buffers_alone():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(2)

        def forward(self, *, x):
            return self.norm(x)

    net = Net()
    state = torch.get_rng_state()
    assert overhead(net, {"x": torch.ones(4, 2)}, runs=2).ratio > 0
    assert net.norm.num_batches_tracked == 0 and torch.equal(torch.get_rng_state(), state)
    with pytest.raises(TypeError, match="model"):
        overhead(3, torch.ones(1))


def test_a_thread_that_calls_while_torch_adds_a_hook_is_let_through():
    """Torch puts the hook on the module first, and says only then that it takes keywords."""
    model, errors = nn.Linear(2, 2), []
    with capture(model, inputs=True, on_silent="ignore"):
        model._forward_pre_hooks_with_kwargs.clear()

        def call():
            try:
                model(torch.ones(1, 2))
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
    assert not errors
