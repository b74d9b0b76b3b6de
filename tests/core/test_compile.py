"""Taps and edits inside the graphs of torch.compile: one full graph, eager's numbers, no recompiles."""

import threading
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from specimens import Blocks, InPlace, hooks_of
from torchhook import (
    HookManager,
    Record,
    Ring,
    Session,
    SessionError,
    SilentError,
    Tap,
    TapError,
    arm,
    capture,
    edit,
    edits,
    mark,
    marked,
    skip,
)
from torchhook.core.eager import eagerly
from torchhook.core.graph_values import boxes

pytestmark = pytest.mark.usefixtures("nothing_compiled")

BACKENDS = ["aot_eager", "inductor"]


def step(run, x):
    run(x).square().sum().backward()


def compiled_by(how, model, **options):
    """What to call, and what to give to torchhook."""
    if how == "torch.compile":
        run = torch.compile(model, fullgraph=True, **options)
        return run, run
    if how == "of the original":
        return torch.compile(model, fullgraph=True, **options), model
    if how == "module.compile":
        model.compile(fullgraph=True, **options)
        return model, model
    assert how == "function"
    return torch.compile(lambda x: model(x), fullgraph=True, **options), model


HOW = ["torch.compile", "of the original", "module.compile", "function"]


@pytest.mark.matrix(
    "torch.compile",
    "outputs, inputs, parameters and gradients equal those of eager mode, in one full graph, however it was compiled",
)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("backend", BACKENDS)
def test_values_and_gradients_are_eagers_in_one_graph(how, backend):
    net = Blocks()
    with capture(net, "blocks.*", "**.up", inputs=True, grads=True, params=True) as eager:
        step(net, torch.ones(3, 8))
    run, model = compiled_by(how, net, backend=backend)
    net.zero_grad()
    with capture(model, "blocks.*", "**.up", inputs=True, grads=True, params=True) as acts:
        for scale in (5.0, 1.0):
            net.zero_grad()
            step(run, torch.full((3, 8), scale))
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    assert list(acts) == list(eager)
    for path in eager:
        assert len(acts[path]) == len(eager[path]) or how == "function", path
        for name in ("outputs", "inputs", "grads") if "weight" not in path and "bias" not in path else ("params",):
            for got, want in zip(getattr(acts[path], name)[::-1], getattr(eager[path], name)[::-1], strict=False):
                torch.testing.assert_close(got, want, msg=lambda m, at=(path, name): f"{at}: {m}")
    torch.testing.assert_close(acts["blocks.0.up.weight"].grad, eager["blocks.0.up.weight"].grad)
    if how != "function":
        assert acts.order == eager.order


class PassedThrough(nn.Module):
    """Modules that return their very input, which is used before and beside them, too."""

    def __init__(self):
        super().__init__()
        self.base, self.lora, self.first = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.same, self.drop, self.zero = nn.Identity(), nn.Dropout(0.5).eval(), nn.Dropout(0.0)
        self.viewed, self.flat = nn.Identity(), nn.Flatten()

    def forward(self, x):
        entering = self.same(x)
        h = torch.tanh(self.base(entering * x))
        early = self.first(h)
        out = h + self.lora(self.zero(self.drop(h))) + early
        row = out.view(3, 2, 3)
        row = self.viewed(row) * row.sum()
        flat = self.flat(row)
        flat.mul_(2)  # overwrites what was seen
        return flat


@pytest.mark.parametrize("backend", ["eager", *BACKENDS])
@pytest.mark.parametrize("is_leaf", [True, False])
def test_gradients_of_values_that_are_passed_through(backend, is_leaf):
    torch.manual_seed(0)
    net, x = PassedThrough(), torch.randn(3, 6, requires_grad=True)

    def gradients(run):
        through = []
        given = x if is_leaf else x * 1
        with capture(run, grads=True) as acts:
            with Session(run, [Tap("lora", lambda event: through.append(event.value.clone()), "grad_input")]):
                step(run, given)
        assert not x._backward_hooks
        return {**{path: acts[path].grad for path in acts}, "through lora": through[0]}

    eager = gradients(net)
    found = gradients(torch.compile(net, backend=backend, fullgraph=True))
    assert found.keys() == eager.keys() and len(eager) == 9
    assert not torch.allclose(eager["drop"], eager["through lora"]), "the whole, and the part through one module"
    for path, gradient in eager.items():
        torch.testing.assert_close(found[path], gradient, rtol=1e-4, atol=1e-4, msg=lambda m, at=path: f"{at}: {m}")


@pytest.mark.matrix("torch.compile", "no recompilation and no graph breaks when capturing with `keep=None` or editing")
@pytest.mark.parametrize("backend", BACKENDS)
def test_no_recompiles_however_often_it_runs(backend):
    net = Blocks()
    counter = CompileCounter()
    run = torch.compile(net, backend=counter if backend == "aot_eager" else backend, fullgraph=True)
    with capture(run, "blocks.*", grads=True, keep=None) as acts, edit(run, {"head": edits.scale(2.0)}):
        for number in range(12):
            step(run, torch.full((2, 8), float(number)))
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    assert len(acts["blocks.1"].outputs) == 12 and len(acts["blocks.0"].outputs) == 24
    assert len({float(output.sum()) for output in acts["blocks.1"].outputs}) == 12
    assert all(gradient is not None for gradient in acts["blocks.0"].grads)


@pytest.mark.matrix("torch.compile", "values that a later op overwrites in place are correct")
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_was_overwritten_in_place_is_kept_as_it_flowed(backend):
    net = InPlace()
    x = torch.randn(2, 3, 8, 8)
    with capture(net, grads=True) as eager:
        step(net, x)
    net.zero_grad()
    with capture(net, grads=True) as acts:
        step(torch.compile(net, backend=backend, fullgraph=True), x)
    for path in eager:
        torch.testing.assert_close(acts[path].outputs, eager[path].outputs)
        torch.testing.assert_close(acts[path].grads, eager[path].grads, rtol=1e-4, atol=1e-4)


@dataclass
class Result:
    hidden: torch.Tensor
    count: int = 3


class Nested(nn.Module):
    def __init__(self, wrap):
        super().__init__()
        self.wrap = wrap
        self.linear = nn.Linear(4, 4)

    def forward(self, x, *, shift=None):
        x = self.linear(x) if shift is None else self.linear(x) + shift
        return self.wrap(x)


class Outer(nn.Module):
    def __init__(self, wrap, unwrap):
        super().__init__()
        self.inner = Nested(wrap)
        self.unwrap = unwrap

    def forward(self, x):
        return self.unwrap(self.inner(x, shift=x * 2)) * 1.0


@pytest.mark.matrix("torch.compile", "tuples, lists, dicts and dataclasses keep their types when captured and edited")
@pytest.mark.parametrize(
    "wrap, unwrap, at",
    [
        (lambda x: (x, None), lambda out: out[0], 0),
        (lambda x: [x + 1, x], lambda out: out[1], 1),
        (lambda x: {"a": x, "b": 3}, lambda out: out["a"], "a"),
        (lambda x: Result(x), lambda out: out.hidden, "hidden"),
    ],
    ids=["tuple", "list", "dict", "dataclass"],
)
def test_containers(wrap, unwrap, at):
    net, x = Outer(wrap, unwrap), torch.ones(2, 4, requires_grad=True)
    want = net(x)
    run = torch.compile(net, backend="aot_eager", fullgraph=True)
    with capture(run, "inner", inputs=True, grads=True) as acts:
        run(x).sum().backward()
    assert type(acts["inner"].output) is type(wrap(x))
    torch.testing.assert_close(unwrap(acts["inner"].output), want)
    torch.testing.assert_close(unwrap(acts["inner"].grad), torch.ones(2, 4))
    torch.testing.assert_close(acts["inner"].kwargs["shift"], x * 2)
    with edit(run, {"inner": edits.scale(3.0, at=at), ("inner", "input"): edits.zero(at="shift")}):
        torch.testing.assert_close(run(x), 3 * net.inner.linear(x))
    torch.testing.assert_close(run(x), want)


@pytest.mark.matrix("torch.compile", "edits of outputs, inputs and gradients are traced into the graph")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("how", HOW[:3])
def test_edits_are_part_of_the_graph(how, backend):
    changes = {
        "blocks.0": edits.add(torch.linspace(0, 1, 8)),
        "blocks.1.up": edits.ablate(channels=[1, 3], with_="mean"),
        "blocks.1.act": lambda x: x.clamp(max=0.5),
        "blocks.1": edits.noise(0.1, seed=3),
        ("head", "input"): edits.clamp(-1, 1),
        ("blocks.1.down", "grad_output"): edits.scale(0.5),
    }
    net, x = Blocks(), torch.randn(3, 8)
    with edit(net, changes):
        want = net(x)
        want.sum().backward()
    grads = [p.grad.clone() for p in net.parameters()]
    run, model = compiled_by(how, net, backend=backend)
    net.zero_grad()
    with edit(model, changes), capture(model, "head") as acts:
        got = run(x)
        got.sum().backward()
        run(x)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(acts["head"].output, want)
    torch.testing.assert_close([p.grad for p in net.parameters()], grads)
    torch.testing.assert_close(run(x), net._call_impl(x))


def test_an_observer_and_the_order_of_a_list():
    net, seen = Blocks(), []
    run = torch.compile(net, backend="aot_eager", fullgraph=True)
    taps = [
        Tap("head", lambda event: seen.append(("before", event.value.sum().item(), event.call, event.pass_number))),
        Tap("head", edits.zero),
        Tap("head", lambda event: seen.append(("after", event.value.sum().item(), event.call, event.pass_number))),
    ]
    with Session(run, taps):
        first = run(torch.ones(1, 8))
        run(torch.ones(2, 8))
    assert [name for name, *_ in seen] == ["before", "after"] * 2 and first.sum() == 0
    assert seen[0][1] != 0 and seen[1][1] == 0 and [entry[2:] for entry in seen] == [(0, 0), (0, 0), (0, 1), (0, 1)]


@pytest.mark.matrix(
    "torch.compile",
    "attaching to a compiled module that already ran recompiles it; afterwards the first graph is used again",
)
@pytest.mark.parametrize("how", HOW[:3])
def test_attaching_to_what_already_ran_compiled(how):
    net, other, x = Blocks(), Blocks(), torch.randn(2, 8)
    run_other, _ = compiled_by(how, other, backend="aot_eager")
    run_other(x)  # another model of the same class must not hide this one's hooks
    run, model = compiled_by(how, net, backend="aot_eager")
    plain = run(x)
    before = hooks_of(net)
    for _ in range(10):  # more often than torch would recompile one function
        with capture(model, "blocks.*") as acts:
            run(x)
        assert len(acts["blocks.0"].outputs) == 2
    assert hooks_of(net) == before
    graphs = counters["stats"]["unique_graphs"]
    torch.testing.assert_close(run(x), plain)
    assert counters["stats"]["unique_graphs"] == graphs  # the first graph is used again


@pytest.mark.matrix(
    "torch.compile",
    "a compiled function that already ran: works after `arm(model).open()`, otherwise raises with the remedies",
)
def test_a_compiled_function_that_already_ran_misses_loudly_unless_armed():
    net, x = Blocks(), torch.randn(2, 8)
    run = torch.compile(lambda x: net(x), backend="aot_eager", fullgraph=True)
    run(x)
    with pytest.raises(SilentError, match=r"compiled before.*torchhook\.arm.*torch\.compiler\.reset"):
        with capture(net, "head"):
            run(x)
    torch.compiler.reset()
    before = hooks_of(net)
    armed = arm(net).open()
    run = torch.compile(lambda x: net(x), backend="aot_eager", fullgraph=True)
    plain = run(x)
    for _ in range(3):
        with capture(net, "head", "blocks.0", inputs=True, grads=True, keep=2) as acts:
            step(run, x)
            step(run, x)
        torch.testing.assert_close(acts["head"].output, plain)
        assert len(acts["blocks.0"].outputs) == 4 and acts["head"].grad is not None
    with edit(net, {"head": edits.zero}):
        assert run(x).abs().sum() == 0
    graphs = counters["stats"]["unique_graphs"]
    torch.testing.assert_close(run(x), plain)
    assert counters["stats"]["unique_graphs"] == graphs
    armed.close()
    assert hooks_of(net) == before


@pytest.mark.matrix("torch.compile", "models of which only parts are compiled")
def test_parts_that_are_compiled_one_by_one():
    net, x = Blocks(), torch.randn(2, 8)
    with capture(net) as eager:
        net(x)
    for block in net.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    net.head = torch.compile(net.head, backend="aot_eager")
    net(x)
    with capture(net) as acts:
        net(x)
    assert acts.order == eager.order
    for path in eager:
        torch.testing.assert_close(acts[path].outputs, eager[path].outputs)


@pytest.mark.matrix("torch.compile", "graph breaks")
def test_a_graph_break_changes_nothing():
    class Broken(Blocks):
        def forward(self, x):
            x = self.blocks[0](x)
            torch._dynamo.graph_break()
            return self.head(self.blocks[0](x))

    net, x = Broken(), torch.randn(2, 8)
    with capture(net, grads=True, on_silent="ignore") as eager:
        step(net, x)
    run = torch.compile(net, backend="aot_eager")
    net.zero_grad()
    with capture(run, grads=True, on_silent="ignore") as acts:
        step(run, x)
    assert acts.order == eager.order
    for path in eager:
        torch.testing.assert_close(acts[path].outputs, eager[path].outputs)
        torch.testing.assert_close(acts[path].grads, eager[path].grads)


class Loop(nn.Module):
    """A model whose forward the compiler gives up, so that torch itself calls the layers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(12))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            torch._dynamo.graph_break()
        return x


@pytest.mark.parametrize("graphs", [0, 1])  # without graphs, there are shortcuts
@pytest.mark.parametrize("options", [{}, {"grads": True}, {"inputs": True}])
def test_a_graph_break_in_a_loop_changes_nothing(monkeypatch, options, graphs):
    monkeypatch.setattr("torchhook.core.hooks.shortcut.graph_count", lambda: graphs)
    net, x = Loop(), torch.ones(1, 3, requires_grad=True)
    run = torch.compile(net, backend="eager")
    run(x)
    for _ in range(2):
        with capture(net, nn.Linear, **options) as acts:
            out = run(x)
            out.sum().backward()
        assert len(acts) == 12 and acts["layers.11"].output.equal(out)


class Checkpointed(Blocks):
    def forward(self, x):
        x = checkpoint(self.blocks[0], self.head(x).repeat(1, 2), use_reentrant=False)
        return self.head(self.blocks[1](x))


def test_values_inside_a_checkpoint_come_once_and_in_order():
    net, x = Checkpointed(), torch.randn(2, 8)
    with capture(net, grads=True, on_silent="ignore") as eager:
        step(net, x)
    run = torch.compile(net, backend="aot_eager", fullgraph=True)
    with capture(run, grads=True, on_silent="ignore") as acts:
        step(run, x)
    assert acts.order == eager.order and len(eager.order) > 4
    for path in eager:
        torch.testing.assert_close(acts[path].outputs, eager[path].outputs)
        torch.testing.assert_close(acts[path].grads, eager[path].grads)


@pytest.mark.parametrize("keep", [1, 3])
def test_what_is_only_kept_costs_no_op_of_its_own(keep):
    net, x, graphs = Blocks(), torch.randn(2, 8), []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    run = torch.compile(net, backend=backend, fullgraph=True)
    with capture(run, keep=keep) as acts:
        for number in range(4):
            run(x + number)
    with capture(net, keep=keep) as eager:
        for number in range(4):
            net(x + number)
    ops = [str(node.target) for graph in graphs for node in graph.graph.nodes if "torchhook" in str(node.target)]
    assert len(graphs) == 1 and len(ops) <= 2 < len(acts)  # the pass begins and ends
    for path in eager:
        torch.testing.assert_close(acts[path].outputs, eager[path].outputs)
        assert len(acts[path].outputs) >= keep


def test_a_graph_that_raises_hands_out_nothing_and_the_next_run_its_own():
    class Solving(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.head = nn.Identity(), nn.Identity()

        def forward(self, x):
            return self.head(torch.linalg.cholesky(self.scale(x)))

    run = torch.compile(Solving(), backend="aot_eager", fullgraph=True)
    with capture(run, keep=3) as acts:
        run(torch.eye(3))
        with pytest.raises(torch.linalg.LinAlgError):
            run(-torch.eye(3))
        run(4 * torch.eye(3))
    torch.testing.assert_close(acts["scale"].outputs, [torch.eye(3), 4 * torch.eye(3)])
    torch.testing.assert_close(acts["head"].outputs, [torch.eye(3), 2 * torch.eye(3)])


def test_a_graph_of_a_closed_session_keeps_no_value_alive():
    net, x = Blocks(), torch.randn(2, 8)
    run = torch.compile(net, backend="aot_eager", fullgraph=True)
    with capture(run) as acts:
        run(x)
        assert vars(boxes)
    torch.testing.assert_close(acts["head"].output, net(x))
    run(x)
    assert not vars(boxes)


@pytest.mark.matrix("torch.compile", "dynamic shapes")
def test_shapes_that_change():
    net = Blocks()
    run = torch.compile(net, backend="aot_eager", fullgraph=True, dynamic=True)
    with capture(run, "head", "blocks.1", keep=None, grads=True) as acts:
        for rows in (2, 3, 5, 7):
            step(run, torch.ones(rows, 8))
    assert [output.shape[0] for output in acts["head"].outputs] == [2, 3, 5, 7]
    assert [gradient.shape[0] for gradient in acts["blocks.1"].grads] == [2, 3, 5, 7]


def test_the_classic_manager_and_a_transform_and_a_budget():
    net, x = Blocks(), torch.randn(2, 8)
    manager = HookManager(net, max_size=2)
    manager.add("head")
    run = torch.compile(net, backend="aot_eager", fullgraph=True)
    with capture(run, "head", transform=lambda t: t.mean(), dtype=torch.float64, keep=None, max_bytes=10_000) as acts:
        outputs = [run(x + n) for n in range(3)]
    torch.testing.assert_close(manager.get("head"), [output.detach() for output in outputs[1:]])
    torch.testing.assert_close(acts["head"].outputs, [output.detach().mean().double() for output in outputs])
    manager.add("blocks.0", custom_hook=lambda module, args, out: args[0])
    with pytest.raises(TapError, match="custom_hook of 'blocks.0' needs the layer's input"):
        torch.compile(net, backend="aot_eager", fullgraph=True)(x)
    manager.clear_hooks()


def test_a_module_left_out():
    net, x = Blocks(), torch.randn(2, 8)
    run = torch.compile(net, backend="aot_eager", fullgraph=True)
    plain = run(x)
    with skip(net, "blocks.0"):
        torch.testing.assert_close(run(x), net.head(net.blocks[1](x) * 2))
    torch.testing.assert_close(run(x), plain)


@pytest.mark.matrix("torch.compile", "taps see every thread; a second thread's session is refused")
def test_a_second_thread_may_not_open_another():
    net, x, errors = Blocks(), torch.randn(2, 8), []
    run = torch.compile(net, backend="aot_eager", fullgraph=True)

    def other():
        try:
            capture(run, "head").open()
        except SessionError as error:
            errors.append(error)

    with capture(run, "head", keep=None) as acts:
        run(x)
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        thread = threading.Thread(target=run, args=(x,))
        thread.start()
        thread.join()
    assert "another thread" in str(errors[0]) and len(acts["head"].outputs) == 2  # taps there see every thread
    other()
    assert len(errors) == 1


@pytest.mark.matrix("torch.compile", "an edit with a schedule, or one that differs from call to call, is refused")
def test_an_edit_that_a_graph_cannot_follow_is_refused():
    net, x = Blocks(), torch.randn(2, 8)
    with capture(net, "blocks.0") as clean:
        net(x)
    run = torch.compile(net, backend="aot_eager", fullgraph=True)
    with pytest.raises(TapError, match="differs from call to call"):
        with edit(run, {"blocks.0": edits.patch(clean)}):
            run(x)
    with pytest.raises(TapError, match="schedule"):
        with Session(run, [Tap("head", edits.zero, when=lambda number: number == 1)]):
            run(x)
    for fullgraph in (True, False):
        other = torch.compile(Blocks(), backend="aot_eager", fullgraph=fullgraph)
        with pytest.raises(TapError, match=r"output of 'head' returned \(2, 2\) float32.*for \(2, 4\)"):
            with edit(other, {"head": lambda out: out[:, :2]}):
                other(x)
        assert not other._orig_mod.head._forward_hooks


def test_a_tap_that_raises_ends_its_session_and_leaves_nothing():
    net, x = Blocks(), torch.randn(2, 8)
    run = torch.compile(net, backend="aot_eager", fullgraph=True)
    before = hooks_of(net)
    with pytest.raises(ZeroDivisionError):
        with Session(run, [Tap("head", lambda event: 1 / 0)]):
            run(x)
    assert hooks_of(net) == before and run(x).shape == (2, 4)


def test_a_ring_shared_by_eager_and_compiled_calls():
    net, x, ring = Blocks(), torch.randn(2, 8), Ring(max_entries=10)
    run = torch.compile(net, backend="aot_eager", fullgraph=True)
    with Session(net, [Tap("head", Record(ring))]):
        eager, compiled = net(x), run(x)
    torch.testing.assert_close(ring["head"], [eager.detach(), compiled.detach()])


def test_a_mark_in_a_graph_is_refused():
    class Marking(nn.Module):
        def forward(self, x):
            return mark(x * 2, "doubled") + 1

    net, x = nn.Sequential(Marking()), torch.ones(1)
    run = torch.compile(net, backend="aot_eager", fullgraph=True)
    assert run(x).item() == 3  # no session listens
    with pytest.raises(TapError, match="a mark inside a compiled graph"), capture(run, marked("doubled")):
        run(x)


FACTOR = 1.0


def test_an_edit_that_uses_what_changes_is_compiled_anew_when_it_does():
    global FACTOR
    net, x = Blocks(), torch.randn(2, 8)
    run = torch.compile(net, backend="aot_eager", fullgraph=True)
    plain = run(x)
    with edit(run, {"head": lambda out: out * FACTOR}):
        for FACTOR in (1.0, 5.0, 2.0):
            torch.testing.assert_close(run(x), plain * FACTOR)


def test_a_number_that_an_edit_of_many_sites_uses_may_change():
    net, x, scale = Blocks(), torch.randn(2, 8), edits.scale(1.0)
    run, plain, expected = torch.compile(net, backend="aot_eager", fullgraph=True), net(x), {}
    for factor in (1.0, 3.0, 0.5):
        with edit(net, {nn.Linear: edits.scale(factor)}):
            expected[factor] = net(x)
    with edit(run, {nn.Linear: scale}):
        for scale.operand, output in expected.items():
            torch.testing.assert_close(run(x), output)
    torch.testing.assert_close(run(x), plain)


def test_blocks_that_overlap_in_two_threads_leave_the_compiler_on():
    """torch has one stance for all threads: a block that restored what it found would restore the other's."""
    graphs = []

    def backend(graph, example):
        graphs.append(graph)
        return graph.forward

    def doubled(x):
        return 2 * x

    compiled = torch.compile(doubled, backend=backend)
    first, second = eagerly(), eagerly()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert compiled(torch.ones(3)).sum() == 6 and not graphs
    second.__exit__(None, None, None)
    assert compiled(torch.ones(3)).sum() == 6 and len(graphs) == 1
