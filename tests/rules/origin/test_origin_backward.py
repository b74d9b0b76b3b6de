"""The origin of NaN and Inf in a backward: the call whose backward produced it, and the line of its forward."""

import pytest
import torch
import torch.nn.functional as F
from sick_models import Calls, Divide, Sqrt, line_of, linear
from torch import nn
from torch.utils.checkpoint import checkpoint

from torchhook.core.errors import NonfiniteError
from torchhook.origins import Catch, replay
from torchhook.rules.origin.catch import catch_nonfinite


def caught(model, run):
    with Catch(model, None, "record") as catch:
        run()
    return catch


def test_the_square_root_of_zero():
    model = nn.Sequential(linear(), Sqrt(), linear())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(NonfiniteError, match="SqrtBackward0"):
        with catch_nonfinite(model) as catch:
            loss = model(torch.zeros(2, 4)).sum()
            assert loss.isfinite()
            loss.backward()
            optimizer.step()
    origin = catch.origin
    assert (origin.path, origin.kind, origin.phase) == ("1", "Sqrt", "backward")
    assert (origin.op, origin.what) == ("SqrtBackward0 (aten.div)", "Inf") and origin.line == line_of(Sqrt, "sqrt")
    assert origin.operands[1][2:] == (0.0, 0.0)
    assert (catch.finding.code, catch.finding.site) == ("TH103", "1") and "eps inside" in catch.finding.hint
    assert [other.site for other in catch.finding.affected] == ["0"]
    assert all(map(torch.equal, model.parameters(), before))  # it came before the step


def test_the_side_that_where_does_not_take():
    def forward(self, x):
        h = self.first(x)
        return self.last(torch.where(h > 0, h.sqrt(), 0.0))  # where

    model = Calls(forward, first=linear(), last=linear())
    catch = caught(model, lambda: model(torch.zeros(2, 4)).sum().backward())
    assert (catch.origin.path, catch.origin.after, catch.origin.what) == ("", "first", "NaN")
    assert catch.origin.line == line_of(forward, "where") and "torch.where" in catch.finding.hint


@pytest.mark.parametrize(
    "sick, node",
    [
        (lambda x: x.norm(dim=1), "LinalgVectorNormBackward0"),
        (lambda x: x.pow(0.5), "PowBackward0"),
        (lambda x: (x.square().sum(1)).sqrt(), "SqrtBackward0"),
        (lambda x: torch.acos(1 - x), "AcosBackward0"),
    ],
)
def test_other_functions_that_are_finite_at_zero_and_their_slope_is_not(sick, node):
    model = nn.Sequential(linear(), Calls(lambda self, x: sick(x)))
    origin = caught(model, lambda: model(torch.zeros(2, 4)).sum().backward()).origin
    if node == "LinalgVectorNormBackward0":  # torch defines the slope of a norm at 0 to be 0
        assert origin is None
    else:
        assert origin.path == "1" and origin.op.startswith(node)


def test_a_parameter_of_the_call_itself():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.zeros(4))

        def forward(self, x):
            return x + self.scale.sqrt()  # of a parameter

    model = nn.Sequential(linear(), Scaled(), linear())
    origin = caught(model, lambda: model(torch.ones(2, 4)).sum().backward()).origin
    assert (origin.path, origin.op) == ("1", "SqrtBackward0 (aten.div)")
    assert origin.line == line_of(Scaled, "of a parameter")


def test_a_gradient_of_the_input_counts_too():
    model = Sqrt()
    x = torch.zeros(3, requires_grad=True)
    assert caught(model, lambda: torch.autograd.grad(model(x).sum(), x)).origin.op == "SqrtBackward0 (aten.div)"


def test_an_infinite_gradient_that_is_masked_on_its_way_out_is_legal():
    model = nn.Sequential(linear(), nn.ReLU(), Sqrt())  # the slope of ReLU at 0 is 0
    catch = caught(model, lambda: model(torch.zeros(2, 4)).sum().backward())
    assert catch.finding is None and all(p.grad.isfinite().all() for p in model.parameters())


def test_which_call_of_a_shared_module():
    def forward(self, x):
        return self.root(self.first(x)) + self.root(self.first(x) + 1)

    model = Calls(forward, first=linear(), root=Sqrt())
    origin = caught(model, lambda: model(torch.zeros(2, 4)).sum().backward()).origin
    assert (origin.path, origin.call) == ("root", 0)


def test_a_function_of_one_s_own():
    class Sick(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient / 0

    model = nn.Sequential(linear(), Calls(lambda self, x: Sick.apply(x)), linear())
    origin = caught(model, lambda: model(torch.ones(2, 4)).sum().backward()).origin
    assert origin.path == "1" and origin.op == "SickBackward (aten.div)"


def test_a_loss_that_is_to_blame_itself():
    model = nn.Sequential(linear(), linear())
    catch = caught(model, lambda: (model(torch.zeros(2, 4)).log() * 0).sum().backward())
    assert catch.finding.code == "TH103" and catch.origin.path == "" and "the loss passed" in catch.origin.message()


def test_an_op_of_the_parent_between_two_calls_of_which_the_second_is_fine():
    def forward(self, x):
        h = self.first(x)
        return self.second(h) + self.third(h.sqrt())  # root

    model = Calls(forward, first=linear(), second=linear(), third=linear())
    origin = caught(model, lambda: model(torch.zeros(2, 4)).sum().backward()).origin
    assert (origin.path, origin.after, origin.line) == ("", "second", line_of(forward, "root"))


def test_deep_inside_blocks_and_in_one_of_many_calls():
    class Block(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.fc, self.act = linear(width), Calls(lambda self, x: torch.sqrt(x - 1))

        def forward(self, x):
            return x + self.act(self.fc(x)) + 1

    block = Block(4)
    model = nn.Sequential(block, nn.Sequential(block, block), linear())
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0]])  # only in the first of three calls does the root see 0
    origin = caught(model, lambda: model(x).sum().backward()).origin
    assert (origin.path, origin.call, origin.op) == ("0.act", 0, "SqrtBackward0 (aten.div)")
    model[0], model[1][0] = Block(4), Block(4)
    x = torch.tensor([[1.5, 2.0, 3.0, 4.0]])
    with torch.no_grad():
        model[1][1].fc.bias[0] = 1 - model[1][0](model[0](x))[0, 0]
    origin = caught(model, lambda: model(x).sum().backward()).origin
    assert origin.path == "1.1.act"


def test_in_place_and_views_do_not_disturb():
    def forward(self, x):
        h = self.first(x)
        h += 1
        h.mul_(0)
        return self.root(h[:, :2].flatten())

    model = Calls(forward, first=linear(), root=Sqrt())
    origin = caught(model, lambda: model(torch.ones(2, 4)).sum().backward()).origin
    assert (origin.path, origin.op) == ("root", "SqrtBackward0 (aten.div)")


def test_a_call_that_overwrites_what_it_is_given():
    model, x = Calls(lambda self, x: x.add_(1).sqrt()), torch.ones(2, 4, requires_grad=True)
    origin = caught(model, lambda: model(x - 2).sum().backward()).origin
    assert origin.op == "SqrtBackward0 (aten.div)"


def test_dropout_is_the_same_again():
    class Sick(nn.Module):
        def forward(self, x):
            return F.dropout(x, 0.5).sqrt()

    model = nn.Sequential(linear(64), Sick())
    with Catch(model, None, "record") as catch:
        out = model(torch.rand(8, 64) + 0.5)
        out.sum().backward()
    assert catch.origin.op.startswith("SqrtBackward0")
    assert torch.tensor(catch.origin.operands[1].high).isclose(2 * out.max())


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_models(reentrant, tmp_path):
    class Checkpointed(nn.Module):
        def __init__(self, *layers):
            super().__init__()
            self.layers = nn.Sequential(*layers)

        def forward(self, x):
            return checkpoint(self.layers, x, use_reentrant=reentrant)

    def run(model):
        return lambda: model(torch.zeros(2, 4, requires_grad=True)).sum().backward()

    healthy = nn.Sequential(linear(), Checkpointed(linear(), nn.Dropout(0.5), nn.ReLU()), linear())
    assert caught(healthy, run(healthy)).finding is None
    model = nn.Sequential(linear(), Checkpointed(linear(), Divide()), linear())
    origin = caught(model, run(model)).origin
    assert (origin.path, origin.phase, origin.call) == ("1.layers.1", "forward", 0)
    model = nn.Sequential(linear(), Checkpointed(linear(), Sqrt()), linear())
    with Catch(model, tmp_path, "record") as catch:
        run(model)()
    origin = catch.origin
    assert (origin.path, origin.phase) == ("1.layers.1", "backward") and origin.line == line_of(Sqrt, "sqrt")
    assert replay(catch.file, model) == origin


class Scaled(nn.Module):
    """Half precision whose gradients overflow at a scale of 2¹⁶."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return (self.fc(x).half() * 8).float()


def train(model, scaler, steps):
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(2, 4)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()


def test_overflow_while_a_scaler_searches_is_normal():
    model, scaler = Scaled(), torch.amp.GradScaler("cpu", init_scale=2.0**16)
    with catch_nonfinite(model) as catch:
        train(model, scaler, 6)
    assert scaler.get_scale() < 2**14 and catch.finding is None


def test_a_scale_that_has_collapsed_is_not():
    model, scaler = nn.Sequential(linear(), Sqrt()), torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with Catch(model, None, "record") as catch:
        for step in range(6):
            scaler.scale(model(torch.zeros(2, 4)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            assert (catch.finding is not None) == (step > 2)
    assert catch.origin.op.startswith("SqrtBackward0")


def test_another_pass_before_the_backward():
    model = nn.Sequential(linear(), Sqrt(), linear())
    with Catch(model, None, "record") as catch:
        first = model(torch.zeros(2, 4))
        model(torch.ones(2, 4))
        first.sum().backward()
    assert (catch.origin.path, catch.origin.after, catch.origin.pass_number, catch.origin.op) == ("", "0", 0, "")
    assert "another forward" in catch.finding.message and "after '0'" in catch.finding.message


def test_several_backwards_of_one_forward():
    model = nn.Sequential(linear(), Sqrt())
    with Catch(model, None, "record") as catch:
        x = torch.tensor([[0.0, 1.0, 1.0, 1.0]])
        out = model(x)
        out[0, 1:].sum().backward(retain_graph=True)
        assert catch.finding is not None  # 0 · Inf
    model.zero_grad()
    with Catch(model, None, "record") as catch:
        out = model(x + 1)
        out.sum().backward(retain_graph=True)
        out.sum().backward()
    assert catch.finding is None


def test_a_backward_that_raises_itself_is_left_alone():
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise KeyError("mine")

    model = nn.Sequential(linear(), Calls(lambda self, x: Fails.apply(x)), Sqrt())
    with Catch(model, None, "record") as catch:
        with pytest.raises(KeyError, match="mine"):
            model(torch.ones(2, 4)).sum().backward()
        model[1] = nn.Identity()
        model(torch.ones(2, 4)).sum().backward()
    assert catch.finding is None


def test_a_tensor_given_three_times_stays_one():
    class Attends(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(64, 4, batch_first=True)

        def forward(self, x):
            return self.attention(x, x, x, need_weights=False)[0]

    model = nn.Sequential(nn.Linear(64, 64), Attends())
    x = torch.randn(4, 32, 64)

    def gradients():
        model.zero_grad()
        model(x).square().sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    plain = gradients()
    with catch_nonfinite(model):
        assert all(map(torch.equal, plain, gradients()))


def test_gradients_are_bit_equal_to_those_without():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Linear(8, 2))
    x = torch.randn(16, 4)

    def gradients():
        torch.manual_seed(2)
        model.zero_grad()
        model(x).square().sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    plain = gradients()
    with catch_nonfinite(model):
        watched = gradients()
    assert all(map(torch.equal, plain, watched))
