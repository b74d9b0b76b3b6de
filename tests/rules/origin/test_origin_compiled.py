"""Compiled models: the call is found from inside the graph; the op and the line by an uncompiled replay."""

import pytest
import torch
from sick_models import Between, Calls, Divide, Sqrt, line_of, linear
from torch import nn

from torchhook.core.errors import NonfiniteError
from torchhook.origins import Catch
from torchhook.rules.origin.catch import catch_nonfinite

pytestmark = pytest.mark.usefixtures("nothing_compiled")


def caught(model, run):
    with Catch(model, None, "record") as catch:
        run()
    return catch


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_forward(backend, in_place):
    model = nn.Sequential(linear(), Between(), linear())
    compiled = model
    if in_place:
        model.compile(backend=backend)
    else:
        compiled = torch.compile(model, backend=backend)
    x = torch.ones(2, 4)
    compiled(x)
    origin = caught(compiled, lambda: compiled(x)).origin
    assert (origin.path, origin.op, origin.line) == ("1", "aten.div", line_of(Between, "between"))
    assert "compiled graph" in origin.note


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_backward(backend):
    model = torch.compile(nn.Sequential(linear(), Sqrt(), linear()), backend=backend)
    origin = caught(model, lambda: model(torch.zeros(2, 4)).sum().backward()).origin
    assert (origin.path, origin.phase) == ("1", "backward") and origin.line == line_of(Sqrt, "sqrt")


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_the_error_comes_out_of_the_graph_as_it_is(backend):
    model = torch.compile(nn.Sequential(linear(), Divide()), backend=backend)
    with pytest.raises(NonfiniteError, match="produced by aten.div in '1'"), catch_nonfinite(model):
        model(torch.ones(2, 4))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_healthy_one(backend):
    model = torch.compile(nn.Sequential(linear(), nn.Dropout(0.5), nn.ReLU()), backend=backend)
    assert caught(model, lambda: model(torch.ones(2, 4)).sum().backward()).finding is None


def test_an_argument_that_is_no_tensor_is_not_known_there_and_that_is_said():
    def sick(self, x, scale):
        return x * scale / 0

    model = nn.Sequential(linear(), Calls(lambda self, x: self.sick(x, scale=3.0), sick=Calls(sick)))
    compiled = torch.compile(model, backend="eager")
    origin = caught(compiled, lambda: compiled(torch.ones(2, 4))).origin
    assert "compiled graph" in origin.note
    assert origin.path == "1.sick"


def test_a_model_that_ran_in_a_graph_compiled_before_is_said_to_be_unwatched():
    model = nn.Sequential(linear(), Divide())

    @torch.compile(backend="eager")
    def step(x):
        return model(x)

    step(torch.ones(2, 4))
    with pytest.warns(UserWarning, match="nothing was watched.*compiled before"):
        with Catch(model, None, "record"):
            step(torch.ones(2, 4))
