"""`diff` around its verdict: what is matched, what is restored, gradients, compilers, odd values."""

import copy
import random
from collections import OrderedDict

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torchhook.compare.diff.verb import diff
from torchhook.core.errors import FileError, SelectionError
from torchhook.core.site import Site

pytestmark = pytest.mark.usefixtures("one_thread")


def small(**kwargs):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Linear(8, 3)
    ).train(kwargs.get("training", False))


X = torch.linspace(-1, 2, 30).reshape(5, 6).cos()


def hooks_of(model):
    return [
        (len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks), sorted(vars(m)))
        for m in model.modules()
    ]


class Drawn(nn.Module):
    def forward(self, x):
        return x * (random.random() + np.random.rand())


@pytest.mark.parametrize("fails", [False, True])
def test_leaves_everything_as_it_was(fails):
    a, b = small(training=True), small(training=True).double()
    for model in (a, b):
        model.append(Drawn())
    if fails:
        b[4] = nn.Linear(7, 3).double()
    for model in (a, b):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
    x = X.clone().requires_grad_()
    before = [copy.deepcopy(model.state_dict()) for model in (a, b)]
    hooks, states = [hooks_of(a), hooks_of(b)], (torch.get_rng_state(), random.getstate(), str(np.random.get_state()))
    if fails:
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            diff(a, b, x, lambda y: y.square().sum())
    else:
        assert diff(a, b, x, lambda y: y.square().sum()).same
    for model, state in zip((a, b), before, strict=True):
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
        assert all((parameter.grad == 1).all() for parameter in model.parameters())
        assert all(module.training for module in model.modules() if module is not b[4] or not fails)
    assert [hooks_of(a), hooks_of(b)] == hooks and x.grad is None
    assert (
        torch.equal(torch.get_rng_state(), states[0]) and (random.getstate(), str(np.random.get_state())) == states[1:]
    )


def test_random_numbers_are_the_same_in_both():
    a = small(training=True)
    found = diff(a, copy.deepcopy(a), X)
    assert found.same and found.verdict == "a and b agree: all values are equal"


def test_dropouts_with_other_numbers_are_not_judged():
    class Drawing(nn.Dropout):
        def forward(self, x):
            torch.rand(3)
            return super().forward(x)

    a, b = small(training=True), small(training=True)
    b[3] = Drawing(0.5)
    found = diff(a, b, X)
    assert found.same and any("'3' was not judged: it drops different elements" in note for note in found.notes)
    b[3] = nn.Dropout(0.4)
    assert diff(a, b, X).first == Site("3")


def test_a_compiler_that_is_wrong_is_found_out():
    def careless(graph, inputs):
        for node in graph.graph.nodes:
            node.target = torch.sin if node.target is torch.tanh else node.target
        graph.recompile()
        return graph

    a = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2))
    assert diff(a, torch.compile(a, backend=careless), X).first == Site("1")


def test_one_model_twice_and_models_that_share_modules():
    a = small()
    assert diff(a, a, X).same
    assert diff(a, nn.Sequential(*list(a)[:-1], copy.deepcopy(a[4])), X).same


def test_a_module_that_is_called_again_is_told_by_its_call():
    class Twice(nn.Module):
        def __init__(self, shift):
            super().__init__()
            self.fc = nn.Linear(6, 6)
            self.shift = shift

        def forward(self, x):
            return self.fc(self.fc(x) + self.shift)

    a, b = Twice(0), Twice(1)
    b.load_state_dict(a.state_dict())
    found = diff(a, b, X)
    assert (found.first, found.module) == (Site("fc", "input"), "")
    assert "before it calls fc, call 1" in found.verdict
    assert [(row.site.path, row.call) for row in found.rows] == [("fc", 0), ("fc", 1), ("", 0)]


def renamed(model):
    return nn.Sequential(OrderedDict(zip("abcde", copy.deepcopy(model), strict=True)))


def test_other_names_are_matched_by_order_and_shape():
    a, b = small(), renamed(small())
    assert {row.site.path: row.partner for row in diff(a, b, X).rows}["4"] == "e"
    b.b.eps = 1e-3
    found = diff(a, b, X)
    assert found.first == Site("1") and not found.unmatched


def test_a_mapping_says_what_belongs_together():
    a = nn.ModuleDict({"old": nn.Sequential(small())})
    a.forward = lambda x: a["old"](x)
    b = nn.ModuleDict({"new": nn.ModuleDict({"net": nn.Sequential(small())})})
    b.forward = lambda x: b["new"]["net"](x)
    found = diff(a, b, X, match={"old": "new.net"})
    assert {row.site.path: row.partner for row in found.rows}["old.0"] == "new.net.0" and not found.unmatched
    with pytest.raises(SelectionError, match=r"match: b has no module 'newt'; nearest: 'new'"):
        diff(a, b, X, match={"old": "newt"})
    with pytest.raises(TypeError, match="match must map paths"):
        diff(a, b, X, match=["old"])


def test_what_has_no_partner_is_listed_with_the_reason():
    a, b = small(), nn.Sequential(*small()[:2], nn.ReLU(), nn.Identity(), small()[4], nn.Sequential(nn.Identity()))
    found = diff(a, b, X)
    assert found.same
    assert [(one.model, one.path) for one in found.unmatched] == [("b", "5.0"), ("b", "5")]
    assert found.unmatched[0].reason == "a has no such module"
    b[4] = nn.Linear(8, 2)
    b = b[:5]
    found = diff(a, b, X)
    assert found.first == Site("4") and "5×3) and (5×2" in found.verdict
    assert found.unmatched[0].reason == "it returns (5×3) in a and (5×2) in b"
    assert "note: '4' of a was not compared" in repr(found)


def test_nothing_in_common_is_refused():
    with pytest.raises(ValueError, match="cannot compare a and b: no module call"):
        diff(nn.Sequential(nn.Linear(6, 2)), nn.Sequential(nn.Linear(6, 3)), X)


class Odd(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.value = value

    def forward(self, x):
        x = x.clone()
        x[1, 2] = self.value
        return x


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_is_equal_in_the_same_place_alone(value):
    a, b = (nn.Sequential(nn.Identity(), Odd(v), nn.Identity()) for v in (value, 0.0))
    assert diff(a, copy.deepcopy(a), X).same
    found = diff(b, a, X)
    assert found.first == Site("1")
    row = next(row for row in found.rows if row.site.path == "1")
    assert row.worst == (1, 2) and row.parts and row.values[0] == 0.0


def test_inputs_may_be_tuples_dicts_and_integers():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(10, 4)
            self.fc = nn.Linear(4, 4)

        def forward(self, tokens, *, scale):
            return {"y": self.fc(self.embed(tokens)) * scale, "n": tokens.sum()}

    a = Two()
    b = copy.deepcopy(a).bfloat16()
    assert diff(a, b, {"tokens": torch.arange(10), "scale": torch.ones(1)}).same
    assert diff(nn.Bilinear(6, 6, 2), nn.Bilinear(6, 6, 2), (X, X)).first == Site("")


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return 1.001 * gradient


class Through(nn.Module):
    def __init__(self, change):
        super().__init__()
        self.change = change

    def forward(self, x):
        return self.change(x)


@pytest.mark.parametrize("change", [Reversed.apply, torch.detach])
def test_gradients_part_though_values_agree(change):
    a = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), Through(torch.clone), nn.Linear(8, 3))
    b = copy.deepcopy(a)
    b[2].change = change
    assert diff(a, b, X).same
    for pair in ((a, b), (b, a)):
        found = diff(*pair, X, lambda y: y.square().sum())
        assert found.first == Site("1", "grad_output"), found.verdict
    ports = [(row.site.path, row.site.port) for row in diff(a, b, X, torch.sum).rows]
    assert (
        ports.index(("3.weight", "param_grad"))
        < ports.index(("1", "grad_output"))
        < ports.index(("0.weight", "param_grad"))
    )


def test_a_tensor_that_a_module_uses_itself_has_the_gradient_of_its_output():
    class Attends(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(6, 6)

        def forward(self, x):
            weights = self.fc(x).softmax(1)
            return weights @ x.t(), weights

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Attends()
            self.same = nn.Identity()

        def forward(self, x):
            y, _ = self.inner(x)
            return self.same(y) + y

    a = Model()
    assert diff(a, copy.deepcopy(a).double(), X, lambda y: y.square().sum()).same


def test_a_loss_may_take_a_target():
    a, b = small(), small()
    target = torch.arange(5) % 3
    for loss in (F.cross_entropy, nn.CrossEntropyLoss()):
        assert diff(a, b, (X, target), loss).same
    b[4].weight.data[0] += 0.1
    assert diff(a, b, (X, target), F.cross_entropy).first == Site("4")
    with pytest.raises(ValueError, match="loss has no gradient"):
        diff(a.requires_grad_(False), b, (X, target), F.cross_entropy)


def test_a_tolerance_is_on_plain_errors():
    a, b = small(), small()
    b[1].eps = 1e-3
    errors = {row.site.path: row.error for row in diff(a, b, X, tolerance=1.0).rows}
    assert diff(a, b, X, tolerance=max(errors.values())).same
    found = diff(a, b, X, tolerance=errors["1"] / 2)
    assert found.first == Site("1") and "above" in found.verdict
    for wrong in ("1", True):
        with pytest.raises(TypeError, match="tolerance must be a number"):
            diff(a, b, X, tolerance=wrong)
    with pytest.raises(ValueError, match="tolerance must not be negative"):
        diff(a, b, X, tolerance=-1.0)
    with pytest.raises(TypeError, match="b must be a model, a recording or its path"):
        diff(a, 3, X)
    with pytest.raises(FileError, match="cannot open the recording 'b': it does not exist"):
        diff(a, "b", X)
    with pytest.raises(TypeError, match="loss must be a function"):
        diff(a, b, X, loss="mse")


@pytest.mark.parametrize("loss", [None, lambda y: y.square().sum()])
def test_compiled_models_are_seen_inside(loss):
    a = small()
    b = torch.compile(copy.deepcopy(a), backend="aot_eager")
    found = diff(a, b, X, loss)
    assert found.same and found.notes[0].startswith("b is compiled: it was recompiled")
    b._orig_mod[1].eps = 1e-3
    for pair in ((a, b), (b, a), (torch.compile(a, backend="eager"), b)):
        torch.compiler.reset()
        assert diff(*pair, X, loss).first == Site("1")
    assert "both are compiled" in str(diff(torch.compile(a, backend="eager"), b, X).notes)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_quantized_models_are_judged_by_what_eight_bits_explain():
    a = small()
    b = torch.ao.quantization.quantize_dynamic(copy.deepcopy(a), {nn.Linear}, dtype=torch.qint8)
    found = diff(a, b, X)
    assert found.same and max(row.error for row in found.rows) > 1e-3
    b[1].weight.data *= 1.01
    assert diff(a, b, X).first == Site("1")


def test_looks():
    a, b = small(), small()
    b[1].eps = 1e-3
    found = diff(a, b, X)
    head, columns, *rows = repr(found).splitlines()
    assert head.startswith(
        "a and b diverge at 1 (BatchNorm1d): its output is off by 0.00049 relative to its size, most at ("
    )
    assert columns.split()[:3] == ["site", "module", "error"]
    assert [row.split()[0] for row in rows] == ["0", "1", "2", "3", "4", "(model)"]
    assert [row.endswith("diverges") for row in rows].index(True) == 1
    assert "<td>diverges</td>" in found._repr_html_()
    named = nn.Sequential(OrderedDict({"<b>": nn.Identity()}))
    assert "<b>" not in diff(named, named, X)._repr_html_()
