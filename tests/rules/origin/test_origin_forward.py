"""The origin of NaN and Inf in a forward: the call, the op, the line."""

import json
from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from sick_models import Between, Calls, Divide, Log, line_of, linear
from torch import nn

from torchhook.core.errors import NonfiniteError, TorchhookError
from torchhook.core.findings import Finding, Report
from torchhook.origins import Catch, origin_of
from torchhook.rules.origin.catch import catch_nonfinite

INF, NAN = float("inf"), float("nan")


def caught(model, run):
    with Catch(model, None, "record") as catch:
        run()
    return catch


def test_the_op_the_line_and_what_it_was_given():
    model = nn.Sequential(linear(), nn.ReLU(), Log(), linear())
    x = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    with pytest.raises(NonfiniteError) as error:
        with catch_nonfinite(model) as catch:
            model(x)
    origin = catch.origin
    assert (origin.path, origin.kind, origin.phase, origin.call, origin.pass_number) == ("2", "Log", "forward", 0, 0)
    assert (origin.op, origin.what, origin.line) == ("aten.log", "-Inf", line_of(Log, "log"))
    assert [tuple(known) for known in origin.operands] == [((1, 4), "float32", 0.0, 3.0)]
    assert isinstance(error.value, TorchhookError) and isinstance(error.value, FloatingPointError)
    for part in ("aten.log", "'2' (Log)", "x.log()", "in [0, 3]", "clamp"):
        assert part in str(error.value)


def test_the_finding_is_plain_and_folds_what_passed_it_on():
    model = nn.Sequential(linear(), Divide(), nn.ReLU(), linear())
    finding = caught(model, lambda: model(torch.ones(1, 4))).finding
    assert (finding.code, finding.severity, finding.site, finding.step) == ("TH101", "error", "1", 0)
    assert [other.site for other in finding.affected] == ["2", "3", ""]
    assert finding.evidence["ranges"][1] == {"shape": [1, 4], "dtype": "float32", "min": 0.0, "max": 0.0}
    assert "eps" in finding.hint
    told = json.loads(json.dumps(Report((finding,)).to_dict(), allow_nan=False))
    assert Report.from_dict(told).findings[0] == finding


def test_an_op_between_children_is_inside_their_parent_after_one_of_them():
    model = nn.Sequential(linear(), Between())
    origin = caught(model, lambda: model(torch.ones(1, 4))).origin
    assert (origin.path, origin.after, origin.op, origin.line) == (
        "1",
        "1.first",
        "aten.div",
        line_of(Between, "between"),
    )
    assert "after '1.first'" in origin.message()


def test_an_op_before_any_child_comes_after_none():
    model = Calls(lambda self, x: self.child(x / 0), child=linear())
    origin = caught(model, lambda: model(torch.ones(1, 4))).origin
    assert (origin.path, origin.after) == ("", "")


def test_a_module_of_torchs_own_is_told_by_the_line_inside_it():
    model = nn.Sequential(linear(), nn.LogSoftmax(1), nn.Softmax(1))
    with torch.no_grad():
        model[0].weight.fill_(1e38)
    origin = caught(model, lambda: model(torch.full((1, 4), 10.0))).origin
    assert origin.path == "0" and origin.line.startswith("linear.py:") and "F.linear" in origin.line


def test_other_libraries_are_users_also_if_their_names_begin_like_torch():
    from torchvision.models.resnet import BasicBlock

    block = BasicBlock(2, 2).eval()
    with torch.no_grad():
        block.conv1.weight.zero_(), block.bn2.bias.fill_(3e38)
    catch = caught(block, lambda: block(torch.full((1, 2, 4, 4), 3e38)))
    assert catch.origin.line.startswith("resnet.py:") and catch.origin.line.endswith("out += identity")
    assert (catch.origin.op, catch.origin.after) == ("aten.add_", "bn2")


@dataclass
class Data:
    x: torch.Tensor
    note: str = "a note"


Pair = namedtuple("Pair", "x y")


def _model_output(x):
    from transformers.modeling_outputs import BaseModelOutput

    return BaseModelOutput(last_hidden_state=x)


CONTAINERS = {
    "tuple": (lambda x: (x, 1), lambda v: v[0]),
    "list": (lambda x: [x, None], lambda v: v[0]),
    "dict": (lambda x: {"x": x}, lambda v: v["x"]),
    "nested": (lambda x: {"a": [(x,)]}, lambda v: v["a"][0][0]),
    "ordered": (lambda x: OrderedDict(x=x), lambda v: v["x"]),
    "dataclass": (Data, lambda v: v.x),
    "namedtuple": (lambda x: Pair(x, None), lambda v: v.x),
    "ModelOutput": (_model_output, lambda v: v.last_hidden_state),
}


@pytest.mark.parametrize("wrap, unwrap", CONTAINERS.values(), ids=CONTAINERS)
@pytest.mark.parametrize("by_name", [False, True])
def test_every_container_that_goes_in_or_comes_out(wrap, unwrap, by_name):
    def model_forward(self, x):
        value = wrap(self.first(x))
        value = self.sick(value=value) if by_name else self.sick(value)
        return {"out": self.last(unwrap(value))}

    def sick(self, value):
        return wrap(unwrap(value) / 0)  # sick

    model = Calls(model_forward, first=linear(), sick=Calls(sick), last=linear())
    origin = caught(model, lambda: model(torch.ones(1, 4))).origin
    assert (origin.path, origin.op, origin.line) == ("sick", "aten.div", line_of(sick, "sick"))


def test_what_a_call_was_given_is_what_it_was_given_then_whatever_was_overwritten_since():
    def sick(self, x):
        y = (x - 3).reciprocal()
        x.fill_(7)  # its own input
        return y

    model = Calls(sick)
    origin = caught(model, lambda: model(torch.full((1, 4), 3.0))).origin
    assert (origin.op, origin.operands[0].high) == ("aten.reciprocal", 0.0)


def test_ops_in_place_are_found_where_they_write():
    def forward(self, x):
        h = self.first(x)
        h[:, 1] /= 0  # in a part of it
        return self.last(h)

    model = Calls(forward, first=linear(), last=linear())
    origin = caught(model, lambda: model(torch.ones(2, 4))).origin
    assert (origin.path, origin.after) == ("", "first")
    assert origin.op.startswith("aten.div") and origin.line == line_of(forward, "in a part of it")


def test_a_shared_module_is_told_by_the_number_of_the_call():
    def halved(self, x):
        return (x - 1).reciprocal() if x.max() == 1 else x / 2  # at the third call

    def forward(self, x):
        for _ in range(5):
            x = self.sick(x)
        return x

    model = Calls(forward, sick=Calls(halved))
    catch = caught(model, lambda: model(torch.full((1, 4), 4.0)))
    assert (catch.origin.path, catch.origin.call, catch.origin.op) == ("sick", 2, "aten.reciprocal")
    assert [(f.site, f.message) for f in catch.finding.affected][:2] == [
        ("sick", "call 3 passed it on"),
        ("sick", "call 4 passed it on"),
    ]


def test_after_which_child_is_told_of_the_call_itself_not_of_an_earlier_one():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = linear()

        def forward(self, x):
            return self.fc((x - 4).reciprocal())

    model = Calls(lambda self, x: self.twice(self.twice(x)) + self.fine(x), twice=Twice(), fine=linear())
    origin = caught(model, lambda: model(torch.full((1, 4), 4.25))).origin
    assert (origin.path, origin.call, origin.after, origin.op) == ("twice", 1, "", "aten.reciprocal")


def test_complex_numbers():
    halves = nn.Sequential(Calls(lambda self, x: torch.complex(x, x)), Calls(lambda self, x: x / 0))
    assert caught(halves, lambda: halves(torch.ones(2))).origin.path == "1"


def test_of_two_independent_sources_the_first_is_told():
    def forward(self, x):
        return self.left(x) + self.right(x)

    model = Calls(forward, left=nn.Sequential(linear(), Divide()), right=nn.Sequential(linear(), Divide()))
    assert caught(model, lambda: model(torch.ones(1, 4))).origin.path == "left.1"


def test_nan_that_the_model_hides_itself_is_no_origin():
    def hiding(self, x):
        return self.after(torch.nan_to_num(self.hidden(x), nan=1.0, posinf=1.0))

    model = Calls(hiding, hidden=Divide(), after=linear())
    assert caught(model, lambda: model(torch.ones(1, 4))).origin is None

    model = nn.Sequential(Calls(hiding, hidden=Divide(), after=linear()), linear(), Log(), Divide())
    assert caught(model, lambda: model(torch.ones(1, 4))).origin.path == "3"

    def flat(self, x):
        return self.after(torch.nan_to_num(self.hidden(x), nan=1.0, posinf=1.0)) / 0  # real

    model = Calls(flat, hidden=Divide(), after=linear())
    origin = caught(model, lambda: model(torch.ones(1, 4))).origin
    assert (origin.path, origin.line) == ("", line_of(flat, "real"))


def test_integers_and_bools_and_nothing_are_no_trouble():
    model = Calls(lambda self, x: (self.top(x), x > 0, None, 3), top=Calls(lambda self, x: x.argmax(1)))
    assert caught(model, lambda: model(torch.ones(2, 4))).finding is None


@pytest.fixture
def nan_in_fresh_memory():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_memory_that_was_never_written_to_is_nobodys_fault(nan_in_fresh_memory):
    space = Calls(lambda self, x: torch.empty(2, 4))

    def forward(self, x):
        self.space(x)
        return self.last(self.sick(x))

    assert torch.empty(2).isnan().all()
    model = Calls(forward, space=space, sick=Divide(on=False), last=linear())
    assert caught(model, lambda: model(torch.ones(2, 4))).finding is None
    model = Calls(forward, space=space, sick=Divide(), last=linear())
    assert caught(model, lambda: model(torch.ones(2, 4))).origin.path == "sick"

    def with_space(self, x):
        space = self.space(x)
        return self.last(self.sick(x, space)), space.view(4, 2)

    model = Calls(with_space, space=space, sick=Calls(lambda self, x, space: x + 1), last=linear())
    assert caught(model, lambda: model(torch.ones(2, 4))).finding is None
    model = Calls(with_space, space=space, sick=Calls(lambda self, x, space: x / 0), last=linear())
    assert caught(model, lambda: model(torch.ones(2, 4))).origin.path == "sick"
    model = Calls(with_space, space=space, sick=Calls(lambda self, x, space: space.copy_(x / 0)), last=linear())
    assert caught(model, lambda: model(torch.ones(2, 4))).origin.path == "sick"


def test_a_broken_parameter_is_its_own_kind_of_origin():
    model = nn.Sequential(linear(), nn.Sequential(linear(), nn.ReLU()), linear())
    x = torch.ones(1, 4)
    with catch_nonfinite(model) as catch:
        model(x)
        with torch.no_grad():
            model[1][0].weight[0, 0] = NAN
        with pytest.raises(NonfiniteError, match="'1.0.weight' .* has held NaN since before pass 1"):
            model(x)
    assert (catch.finding.code, catch.finding.site, catch.origin.phase) == ("TH102", "1.0.weight", "state")


def test_a_broken_running_variance_counts_only_where_it_is_used():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    model[1].running_var.fill_(NAN)
    assert caught(model, lambda: model(torch.randn(8, 4))).finding is None
    model[1].running_var.fill_(NAN)
    finding = caught(model.eval(), lambda: model(torch.randn(8, 4))).finding
    assert (finding.code, finding.site) == ("TH102", "1.running_var")

    sick = nn.Sequential(Divide(), nn.BatchNorm1d(4), nn.Linear(4, 4))
    sick[1].running_var.fill_(NAN)
    finding = caught(sick, lambda: sick(torch.randn(8, 4))).finding
    assert (finding.code, finding.site) == ("TH101", "0")


def test_a_norm_that_trains_is_at_fault_itself_whatever_it_remembers():
    model = nn.Sequential(linear(), nn.BatchNorm1d(4))
    with torch.no_grad():
        model[1].running_mean.fill_(NAN), model[1].weight.fill_(3e38)
    finding = caught(model, lambda: model(torch.eye(8, 4))).finding
    assert (finding.code, finding.site) == ("TH101", "1")


def test_a_norm_that_became_nan_in_this_very_pass_is_not_blamed():
    model = nn.Sequential(Divide(), nn.BatchNorm1d(4))
    origin = caught(model, lambda: model(torch.randn(8, 4))).origin
    assert (origin.path, origin.phase) == ("0", "forward")


def test_a_buffer_that_a_forward_changes_is_as_it_was_before_it():
    class Shrinking(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("left", torch.tensor(1.0))

        def forward(self, x):
            y = x / self.left  # 1, then 0
            self.left -= 1
            return y

    model = nn.Sequential(Shrinking(), linear())
    with Catch(model, None, "record") as catch:
        model(torch.ones(1, 4))
        assert catch.finding is None
        model(torch.ones(1, 4))
    assert (catch.origin.path, catch.origin.pass_number, catch.origin.op) == ("0", 1, "aten.div")
    assert model[0].left == -1  # the replay has not touched it


def test_where_no_replay_helps_a_broken_parameter_is_found_all_the_same():
    def once(self, x):
        assert self.left, "no more"
        self.left -= 1
        return x * self.gain

    model = nn.Sequential(linear(), Calls(once))
    model[1].left, model[1].gain = 1, nn.Parameter(torch.tensor(NAN))
    finding = caught(model, lambda: model(torch.ones(1, 4))).finding
    assert (finding.code, finding.site) == ("TH102", "1.gain") and "AssertionError: no more" in finding.message


def test_an_infinite_buffer_that_has_nothing_to_do_with_it_is_not_blamed():
    model = Calls(lambda self, x: self.last(x / 0), last=linear())
    model.register_buffer("best_loss", torch.tensor(INF))
    assert caught(model, lambda: model(torch.ones(1, 4))).origin.phase == "forward"


def test_nan_in_the_data_is_said_to_come_from_outside():
    model = nn.Sequential(linear(), nn.ReLU())
    finding = caught(model, lambda: model(torch.tensor([[NAN, 1, 1, 1]]))).finding
    assert finding.evidence["came_with"] == "the argument 0" and finding.site == ""
    named = Calls(lambda self, batch: self.top(batch["x"]), top=linear())
    finding = caught(named, lambda: named(batch={"x": torch.full((1, 4), INF)})).finding
    assert finding.evidence["came_with"] == "the argument batch['x']"


def test_nan_in_the_data_that_the_model_replaces_is_none_of_it():
    def forward(self, x):
        return self.sick(x.nan_to_num(1.0))

    x = torch.tensor([[NAN, 1.0, 1.0, 1.0]])
    model = Calls(forward, sick=nn.Sequential(linear(), Divide()))
    assert caught(model, lambda: model(x)).origin.path == "sick.1"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_overflow_of_half_precision(dtype):
    big = torch.finfo(dtype).max / 2
    model = nn.Sequential(nn.Identity(), Calls(lambda self, x: x * 8), nn.ReLU())
    catch = caught(model, lambda: model(torch.full((2, 2), big, dtype=dtype)))
    assert (catch.origin.path, catch.origin.op, catch.origin.what) == ("1", "aten.mul", "Inf")
    assert ("65,504" in catch.finding.hint) == (dtype == torch.float16)


def test_a_cast_that_overflows():
    model = nn.Sequential(linear(), Calls(lambda self, x: x.half()))
    catch = caught(model, lambda: model(torch.full((1, 4), 1e6)))
    assert (catch.origin.path, catch.origin.op) == ("1", "aten._to_copy") and "65,504" in catch.finding.hint


def test_autocast_and_grad_mode_are_those_of_the_call():
    seen = []

    def look(self, x):
        h = self.inner(x)
        seen.append((h.dtype, torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
        return h / 0

    model = nn.Sequential(linear(), Calls(look, inner=linear()))
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        origin = caught(model, lambda: model(torch.ones(1, 4))).origin
    assert origin.operands[0].dtype == "bfloat16"
    with torch.inference_mode():
        assert caught(model, lambda: model(torch.ones(1, 4))).origin.op == "aten.div"
    assert seen == 2 * [(torch.bfloat16, False, False)] + 2 * [(torch.float32, False, True)]


def test_random_numbers_are_the_same_again():
    seen = []

    def sick(self, x):
        h = F.dropout(x, 0.5) * torch.rand_like(x)
        seen.append(h.clone())
        return h / 0

    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(64, 64), Calls(sick), nn.Dropout(0.5))
    caught(model, lambda: model(torch.randn(8, 64)))
    after = torch.rand(3)
    assert len(seen) == 2 and torch.equal(*seen)
    torch.manual_seed(0)  # as the fixture does; the replay has not moved the generators on
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(64, 64), Calls(sick), nn.Dropout(0.5))
    model(torch.randn(8, 64))
    assert torch.equal(after, torch.rand(3))


def test_modules_that_are_hard_to_copy_are_replayed_all_the_same():
    from torch.nn.utils import parametrizations, weight_norm

    class Keeps(nn.Module):
        def forward(self, x):
            self.last = x * 2  # part of a graph
            return self.last

    for part in (weight_norm(nn.Linear(4, 4)), parametrizations.spectral_norm(nn.Linear(4, 4)), Keeps()):
        model = Calls(lambda self, x: self.part(x) / 0, part=part)
        model(torch.ones(2, 4))
        assert caught(model, lambda model=model: model(torch.ones(2, 4))).origin.op == "aten.div"
    marked = nn.Linear(4, 4)
    marked.weight.is_mine = True  # as Megatron writes on them
    model = Calls(lambda self, x: self.part(x) / (0 if self.part.weight.is_mine else 1), part=marked)
    assert caught(model, lambda: model(torch.ones(2, 4))).origin.op == "aten.div"
    lstm = nn.LSTM(4, 4, batch_first=True)
    model = Calls(lambda self, x: self.lstm(x / 0)[0], lstm=lstm)
    assert caught(model, lambda: model(torch.ones(1, 3, 4))).origin.op == "aten.div"


def test_calls_of_a_part_outside_of_any_forward_are_watched_too():
    model = nn.Sequential(linear(), nn.Sequential(Divide(), linear()))
    origin = caught(model, lambda: model[1](model[0](torch.ones(1, 4)))).origin
    assert (origin.path, origin.op) == ("1.0", "aten.div")


def test_a_single_module_without_parts():
    model = Divide()
    assert caught(model, lambda: model(torch.ones(2))).origin.path == ""


def test_gpt2_of_transformers_with_its_outputs_and_cache():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=3, n_head=2, n_embd=16, vocab_size=32, n_positions=16)
    model = GPT2LMHeadModel(config)
    ids = torch.randint(0, 32, (2, 8))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    for training in (True, False):
        model.train(training)
        assert (
            caught(model, lambda: model(input_ids=ids, attention_mask=mask, labels=ids).loss.backward()).finding is None
        )
    with torch.no_grad():
        assert caught(model, lambda: model.generate(ids, max_new_tokens=3, do_sample=False)).finding is None
    model.transformer.h[1].mlp.act = Log()
    finding = caught(model, lambda: model(input_ids=ids, attention_mask=mask)).finding
    assert (finding.site, finding.evidence["op"]) == ("transformer.h.1.mlp.act", "aten.log")
    assert finding.evidence["line"] == line_of(Log, "log")
    with torch.no_grad():
        finding = caught(model, lambda: model.generate(ids, max_new_tokens=3, do_sample=False)).finding
    assert finding.site == "transformer.h.1.mlp.act"


def test_origin_of_runs_and_tells():
    model = nn.Sequential(linear(), Divide())
    finding = origin_of(model, lambda: model(torch.ones(1, 4)))
    assert isinstance(finding, Finding) and finding.site == "1"
    assert origin_of(model[:1], lambda: model[0](torch.ones(1, 4)).sum().backward()) is None
