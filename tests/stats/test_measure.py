"""measure(): the statistics of what really flowed, in real models and loops, and nothing of it changes anything."""

import copy
import gc
import importlib.util
import io
import math
import pickle
import sys
import threading
import time
from collections import Counter
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch
from contents import check_moments
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from specimens import Containers, InPlace, Returning, Shared, hooks_of, resnet18
from torchhook import (
    Channels,
    NotRecordedError,
    SelectionError,
    SessionError,
    SilentError,
    TopK,
    capture,
    measure,
)
from torchhook.core.scope import sessions_here

pytestmark = pytest.mark.usefixtures("one_thread")

SIX = ("moments", "histogram", "quantiles", "channels", "covariance", "topk")


def net():
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))


def constant(value, rows=2):
    return torch.full((rows, 4), float(value))


class Probe(nn.Module):
    """Gives what it is given, so that a measurement tells which passes it was made in."""

    def __init__(self):
        super().__init__()
        self.same = nn.Identity()
        self.linear = nn.Linear(4, 1)

    def forward(self, x):
        return self.linear(self.same(x))


def measured_probe(model, *more, **options):
    return measure(model, "same", *more, stats=("moments", TopK(500)), **options)


def values_of(stats):
    """Which numbers a probe saw: `topk` has all of them."""
    return sorted({entry.value for entry in stats["same"]["topk"]})


# --- real models


def test_a_resnet_with_relus_in_place():
    model = resnet18(num_classes=7)
    options = {"inputs": True, "grads": True}
    with measure(model, **options) as stats, capture(model, keep=None, **options) as acts:
        for _ in range(2):
            model(torch.randn(2, 3, 32, 32)).square().sum().backward()
    assert sum(isinstance(module, nn.ReLU) and module.inplace for module in model.modules()) == 9
    paths = {path for path, _ in stats}
    leaves = {path for path, module in model.named_modules() if not module._modules}
    assert paths == set(acts) == leaves
    for path in acts:
        check_moments(stats[path], *acts[path].outputs)
        check_moments(stats[path, "input"], *acts[path].inputs)
        check_moments(stats[path, "grad_output"], *acts[path].grads)
    assert stats["layer1.0.relu"].count == 4 * acts["layer1.0.relu"].output.numel()
    assert stats["layer1.0.relu"].zero_fraction > 0.2 > stats["layer1.0.bn1"].zero_fraction


def test_a_language_model():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=50, n_positions=32)
    model = GPT2LMHeadModel(config)
    paths = ["transformer.wte", "transformer.h.0", "transformer.h.1.attn", "transformer.h.1.mlp", "lm_head", ""]
    with measure(model, *paths, grads=True, stats=SIX) as stats, capture(model, *paths, grads=True, keep=None) as acts:
        for _ in range(2):
            ids = torch.randint(50, (3, 12))
            model(input_ids=ids, labels=ids).loss.backward()

    def first(value):
        return value if isinstance(value, torch.Tensor) else value[0]

    for path in paths[:-1]:
        check_moments(stats[path], *map(first, acts[path].outputs))
        check_moments(stats[path, "grad_output"], *map(first, acts[path].grads))
    check_moments(stats["", "output['loss']"], *[output.loss for output in acts[""].outputs])
    check_moments(stats["", "output['logits']"], *[output.logits for output in acts[""].outputs])
    assert len(stats["transformer.h.0"]["channels"].mean) == 16
    assert stats["lm_head"]["covariance"].covariance.shape == (50, 50)
    assert stats["lm_head"]["topk"][0].value == stats["lm_head"].max


def test_every_tensor_of_a_tuple_has_statistics_of_its_own():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(4, 5, num_layers=2)

        def forward(self, x):
            return self.lstm(x)[0]

    model = Model()
    with measure(model, "lstm", grads=True) as stats, capture(model, "lstm", keep=None) as acts:
        for _ in range(3):
            model(torch.randn(6, 2, 4)).sum().backward()
    out = [output for output, _ in acts["lstm"].outputs]
    hidden = [states[0] for _, states in acts["lstm"].outputs]
    check_moments(stats["lstm"], *out)
    check_moments(stats["lstm", "output"], *out)
    check_moments(stats["lstm", "output[0]"], *out)
    check_moments(stats["lstm", "output[1][0]"], *hidden)
    assert (
        stats["lstm"].port == "output[0]" and stats["lstm", "output[1][1]"].count == stats["lstm", "output[1][0]"].count
    )
    check_moments(stats["lstm", "grad_output[0]"], torch.ones(3, 6, 2, 5))
    assert ("lstm", "grad_output[1][0]") not in stats  # nobody used it


def test_containers_of_every_kind():
    model = Containers()
    with measure(model, "pair", "mapping", "data") as stats, capture(model, "pair", "mapping", "data") as acts:
        model(torch.randn(2, 4))
    check_moments(stats["pair", "output[1][0]"], acts["pair"].output[1][0])
    check_moments(stats["mapping", "output['b']['c']"], acts["mapping"].output["b"]["c"])
    check_moments(stats["data"], acts["data"].output.hidden)
    check_moments(stats["data", "output['extra']['h']"], acts["data"].output.extra["h"])


def test_a_shared_module_adds_up_all_its_calls_under_all_its_names():
    model = Shared()
    with measure(model, inputs=True, grads=True) as stats, capture(model, inputs=True, grads=True) as acts:
        model(torch.randn(5, 4)).square().sum().backward()
    assert stats["first"].count == 60
    check_moments(stats["first"], *acts["first"].outputs)
    check_moments(stats["second"], *acts["first"].outputs)
    check_moments(stats["second", "input"], *acts["first"].inputs)
    check_moments(stats["first", "grad_output"], *acts["first"].grads)
    assert [place for place in stats if place[1] == "output"] == [("first", "output"), ("relu", "output")]


def test_keyword_arguments_are_inputs_by_their_names():
    class Scaled(nn.Module):
        def forward(self, x, *, by=None):
            return x if by is None else x * by

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.two, self.one, self.named = Scaled(), Scaled(), Scaled()

        def forward(self, x):
            return self.two(x, by=x + 1) + self.one(x) + self.named(x=x * 3)

    x = torch.randn(2, 4)
    with measure(Model(), "two", "one", "named", inputs=True, outputs=False) as stats:
        stats._session.model(x)
    check_moments(stats["two", "input"], x)
    check_moments(stats["two", "input[0]"], x)
    check_moments(stats["two", "input['by']"], x + 1)
    check_moments(stats["one", "input"], x)
    check_moments(stats["named", "input"], x * 3)
    assert ("two", "output") not in stats


def test_gradients_are_those_of_autograd_and_frozen_parameters_have_none():
    model = net()
    model[0].requires_grad_(False)
    x = torch.randn(5, 4, requires_grad=True)
    with measure(model, grads=True, params=True, param_grads=True) as stats:
        model(x).square().sum().backward()
    y = [x]
    for layer in model:
        y.append(layer(y[-1]))
        y[-1].retain_grad()
    y[-1].square().sum().backward()
    for number, path in enumerate(["0", "1", "2"]):
        check_moments(stats[path, "grad_output"], y[number + 1].grad)
    for name, parameter in model.named_parameters():
        check_moments(stats[name, "param"], parameter)
        if parameter.requires_grad:
            check_moments(stats[name, "param_grad"], parameter.grad / 2)  # which has both backwards in it now
    assert ("0.weight", "param_grad") not in stats


def test_parameters_without_an_optimizer_are_measured_in_every_pass_and_gradients_as_they_accumulate():
    model = Shared()
    first = torch.randn(3, 4), torch.randn(3, 4)
    weights, grads = [], []
    with measure(model, "first", outputs=False, params=True, param_grads=True) as stats:
        for x in first:  # the layer is called three times a pass
            weights.append(model.first.weight.detach().clone())
            model(x).sum().backward()
            grads.append(model.first.weight.grad.clone())
            with torch.no_grad():
                model.first.weight += 1
    check_moments(stats["first.weight", "param"], *weights)
    check_moments(stats["first.weight", "param_grad"], *grads)


@pytest.mark.parametrize("queries", [("", "0", "0.0"), ("**",), ("0", nn.Linear)])
def test_parameters_that_several_queries_select_count_once(queries):
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 3)))
    with measure(model, *queries, params=True, param_grads=True) as stats:
        model(torch.randn(2, 4)).square().sum().backward()
    weight = model[0][0].weight
    check_moments(stats["0.0.weight", "param"], weight)
    check_moments(stats["0.0.weight", "param_grad"], weight.grad)


@pytest.mark.matrix("checkpointing", "`measure` counts every call once, reentrant or not")
@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_checkpoint_computes_again_is_not_counted_again(reentrant):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=reentrant)

    model, x = Model(), torch.randn(3, 4, requires_grad=True)
    with measure(model, "inner", grads=True) as stats:
        model(x).sum().backward()
    check_moments(stats["inner"], model.inner(x))
    check_moments(stats["inner", "grad_output"], torch.ones(3, 4))


UNUSUAL = {  # what a layer gives, and the same as a plain tensor
    "int": lambda: (torch.arange(6), torch.arange(6)),
    "bool": lambda: (torch.tensor([True, False]), torch.tensor([1, 0])),
    "scalar": lambda: (torch.tensor(3.0), torch.tensor([3.0])),
    "half": lambda: (torch.tensor([0.5, 1.5]).half(), torch.tensor([0.5, 1.5])),
    "complex": lambda: (torch.tensor([1 + 3j, 2 + 5j]), torch.tensor([1, 3, 2, 5])),
    "conjugated": lambda: (torch.tensor([1 + 3j, 2 + 5j]).conj(), torch.tensor([1, -3, 2, -5])),
    "negated": lambda: (torch.tensor([1 + 3j]).conj().imag, torch.tensor([-3])),
    "sparse": lambda: (torch.tensor([[0.0, 2], [3, 0]]).to_sparse(), torch.tensor([0, 2, 3, 0])),
    "sparse csr": lambda: (torch.tensor([[0.0, 2], [3, 0]]).to_sparse_csr(), torch.tensor([0, 2, 3, 0])),
    "quantized": lambda: (
        torch.quantize_per_tensor(torch.tensor([0.5, -1.0, 2.0]), 0.25, 10, torch.quint8),
        torch.tensor([0.5, -1.0, 2.0]),
    ),
    "nested": lambda: (
        torch.nested.nested_tensor([torch.ones(2, 3), torch.zeros(1, 3)]),
        torch.tensor([1.0] * 6 + [0.0] * 3),
    ),
    "jagged": lambda: (
        torch.nested.nested_tensor([torch.ones(2, 3), torch.zeros(1, 3)], layout=torch.jagged),
        torch.tensor([1.0] * 6 + [0.0] * 3),
    ),
    "subclass": lambda: (nn.Parameter(torch.tensor([1.0, 2.0])), torch.tensor([1.0, 2.0])),
}


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype", "ignore:.*quantized tensor creation")
@pytest.mark.parametrize("made", UNUSUAL.values(), ids=UNUSUAL.keys())
def test_values_of_unusual_kinds(made):
    given, expected = made()
    model = nn.Sequential(Returning(lambda x: given))
    with measure(model, "0", stats=("moments", "histogram", "topk")) as stats:
        model(torch.ones(1))
    check_moments(stats["0"], expected)
    assert stats["0"].histogram().counts.sum() == expected.numel()
    assert stats["0"]["topk"][0].value == expected.double().max()


def test_a_tensor_without_values():
    model = nn.Sequential(nn.Linear(3, 2))
    with measure(model, stats=SIX) as stats:
        model(torch.empty(0, 3))
    reading = stats["0"]
    assert reading.count == 0 and math.isnan(reading.mean) and math.isnan(reading.quantile(0.5))
    assert reading["topk"] == [] and len(reading.histogram().counts) == 0 and reading["covariance"].count == 0
    assert reading["channels"].mean.isnan().tolist() == [True, True]


def test_sparse_gradients_of_an_embedding():
    model = nn.Sequential(nn.Embedding(7, 3, sparse=True))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = model[0].weight.detach().clone()
    with measure(model, param_grads=True, updates=True, optimizer=optimizer) as stats:
        model(torch.tensor([1, 1, 4])).sum().backward()
        grad = model[0].weight.grad.to_dense()
        optimizer.step()
    check_moments(stats["0.weight", "param_grad"], grad)
    check_moments(stats["0.weight", "step_grad"], grad)
    check_moments(stats["0.weight", "update"], model[0].weight - before)


# --- which steps


def test_every_counts_passes_with_gradients():
    model = Probe()
    with measured_probe(model, every=3, grads=True) as stats:
        for number in range(8):
            assert stats.step == max(number - 1, 0)
            x = constant(number).requires_grad_()
            model(x).sum().backward()
    assert values_of(stats) == [0, 3, 6] and stats["same"].count == 24
    assert stats["same", "grad_output"].count == 24 and stats.step == 7


def test_passes_without_gradients_belong_to_the_step_under_way():
    model = Probe()
    with measured_probe(model, every=2) as stats:
        for number in range(5):
            model(constant(number))
            with torch.no_grad():
                model(constant(10 + number))
                model(constant(20 + number))
    assert stats.step == 4 and values_of(stats) == [0, 2, 4, 10, 12, 14, 20, 22, 24]


def test_a_check_before_the_training_does_not_shift_the_steps():
    model = Probe()
    with measured_probe(model, every=2) as stats:
        with torch.no_grad():
            for number in range(3):
                model(constant(10 + number))
        stats.reset()
        for number in range(5):
            model(constant(number))
            with torch.no_grad():
                model(constant(20 + number))
    assert values_of(stats) == [0, 2, 4, 20, 22, 24]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_every_pass_counts_where_none_has_gradients(mode):
    model = Probe()
    with measured_probe(model, every=2) as stats, mode():
        for number in range(5):
            model(constant(number))
    assert values_of(stats) == [0, 2, 4] and stats.step == 4


@pytest.mark.parametrize("updates", [False, True])
def test_all_micro_batches_of_a_chosen_step_count(updates):
    model = Probe()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with measured_probe(model, "linear", every=2, optimizer=optimizer, updates=updates, inputs=True) as stats:
        for step in range(5):
            assert stats.step == step
            for micro in range(3):
                model(constant(10 * step + micro)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():  # after the step, so with the next one
                model(constant(10 * (step + 1) + 5))
    assert values_of(stats) == [0, 1, 2, 20, 21, 22, 25, 40, 41, 42, 45]
    assert stats["same"].count == stats["same", "input"].count == 8 * 11
    assert not updates or stats["linear.weight", "update"].count == 3 * 4


def test_submodules_called_alone_begin_no_step():
    model = Probe()
    with measured_probe(model, every=2) as stats:
        for number in range(4):
            model(constant(number))
            model.same(constant(10 + number))
    assert values_of(stats) == [0, 2, 10, 12]


def test_windows():
    model, windows = Probe(), []
    with measured_probe(model) as stats:
        for number in range(6):
            model(constant(number))
            if number % 3 == 2:
                windows.append(stats.snapshot())
                stats.reset()
                assert len(stats) == 0 and list(stats) == []
        model(constant(9))
        last = stats.snapshot()
        assert [values_of(window) for window in windows] == [[0, 1, 2], [3, 4, 5]]
        model(constant(10))
    assert [values_of(window) for window in windows] == [[0, 1, 2], [3, 4, 5]]
    assert values_of(last) == [9] and values_of(stats) == [9, 10]
    assert [window["same"].count for window in windows] == [24, 24]
    model(constant(11))
    assert values_of(stats) == [9, 10]
    assert stats.snapshot() is stats.snapshot()  # final


def test_windows_begin_anew_in_every_statistic_and_place():
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    options = {"inputs": True, "grads": True, "params": True, "param_grads": True, "updates": True, "stats": SIX}
    windows = []
    with measure(model, optimizer=optimizer, **options) as stats:
        for _ in range(3):
            torch.manual_seed(0)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(0.5)
            optimizer.state.clear()
            optimizer.zero_grad()
            model(torch.randn(5, 4)).square().sum().backward()
            optimizer.step()
            windows.append(stats.snapshot())
            stats.reset()
    first, *others = windows
    assert len(first) == 6 + 3 + 4 * 9
    for window in others:
        assert list(window) == list(first)
        for place in first:
            states, again = first[place].states(), window[place].states()
            assert all(torch.equal(states[key], again[key]) for key in states)


def test_a_window_stays_with_its_numbers_when_it_is_sent_away():
    model = net()
    with measure(model, stats=SIX) as stats:
        model(torch.randn(5, 4))
        window = stats.snapshot()
    for twin in (copy.deepcopy(window), pickle.loads(pickle.dumps(window))):
        assert list(twin) == list(window) and twin["1"].mean == window["1"].mean
        assert torch.equal(twin["1"]["covariance"].covariance, window["1"]["covariance"].covariance)


# --- reading


def test_what_was_not_collected_says_what_to_add():
    model = net()
    with measure(model) as stats:
        model(torch.ones(2, 4))
    with pytest.raises(NotRecordedError, match=r"'histogram' was not .*'0'.*stats=\('moments', 'histogram'\)"):
        stats["0"].quantile(0.5)
    with pytest.raises(NotRecordedError, match=r"stats=\('moments', 'topk'\)"):
        stats["0"]["topk"]
    with measure(model, stats="quantiles") as stats:
        model(torch.ones(2, 4))
    with pytest.raises(NotRecordedError, match=r"stats=\('quantiles', 'moments'\)"):
        stats["0"].mean  # noqa: B018
    assert stats["0"].quantile(0.5) == pytest.approx(stats["0"]["quantiles"][0.5])


def test_places_that_were_not_measured_say_what_there_is():
    model = net()
    with measure(model, inputs=True) as stats:
        model(torch.ones(2, 4))
    with pytest.raises(NotRecordedError, match="grad_output of '0'; pass grads=True to measure"):
        stats["0", "grad_output"]
    with pytest.raises(KeyError, match="of '3'.*'0'"):
        stats["3"]
    with measure(resnet18(num_classes=2), "layer4.*") as stats:
        stats._session.model.eval()(torch.ones(1, 3, 32, 32))
    with pytest.raises(NotRecordedError, match="layer4.1"):
        stats["layer4.2"]
    assert "layer4.1" in stats and "layer4.2" not in stats and stats.get("layer4.2") is None


def test_reading_before_the_beginning_is_refused():
    stats = measure(net())
    assert "not open yet" in repr(stats) and "not open yet" in stats._repr_html_() and not stats
    for read in (stats.snapshot, lambda: stats["0"], stats.table):
        with pytest.raises(SessionError, match="with block"):
            read()
    with stats:
        assert len(stats) == 0 and "nothing was measured yet" in repr(stats)
        stats._session.model(torch.ones(1, 4))
    with pytest.raises(SessionError, match="already closed"):
        stats.open()


def test_without_a_with_block():
    model = net()
    before = hooks_of(model)
    stats = measure(model).open()
    y = model(torch.randn(3, 4))
    stats.close()
    stats.close()
    model(torch.randn(3, 4))
    check_moments(stats["2"], y)
    assert hooks_of(model) == before


def test_a_table_has_a_row_for_each_place_in_execution_order():
    class Backwards(nn.Module):
        def __init__(self):
            super().__init__()
            self.last, self.first = nn.Linear(4, 2), nn.Linear(4, 4)

        def forward(self, x):
            return self.last(self.first(x))

    model = Backwards()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with measure(model, inputs=True, grads=True, updates=True, optimizer=optimizer, stats=SIX) as stats:
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    lines = stats.table("list")
    sites = [(line["path"], line["port"]) for line in lines]
    assert sites == list(stats) == list(stats.snapshot())
    assert [site for site, port in sites if port == "output"] == ["first", "last"]
    assert [line["module"] for line in lines[:6]] == ["Linear"] * 6 and not any(line["module"] for line in lines[6:])
    assert sites.index(("first", "input")) < sites.index(("first", "output")) < sites.index(("last", "output"))
    assert {site for site, port in sites if port == "update"} == {
        "last.weight",
        "last.bias",
        "first.weight",
        "first.bias",
    }
    line = lines[sites.index(("first", "output"))]
    assert line["mean"] == stats["first"].mean and line["count"] == 8 and "skewness" in line
    assert "first" in repr(stats) and "first" in stats._repr_html_()


@pytest.mark.parametrize("installed", [(), ("pandas",), ("polars",), ("polars", "pandas")])
def test_a_table_is_of_the_kind_that_is_installed(monkeypatch, installed):
    real = importlib.util.find_spec
    for name in ("pandas", "polars"):
        monkeypatch.delitem(sys.modules, name, raising=False)
        if name in installed:
            fake = ModuleType(name)
            fake.__spec__ = ModuleSpec(name, None)
            fake.DataFrame = lambda rows, name=name: (name, rows)
            monkeypatch.setitem(sys.modules, name, fake)

    def find_spec(name, *args):
        return None if name in ("pandas", "polars") and name not in installed else real(name, *args)

    monkeypatch.setattr("torchhook.core.tabular.find_spec", find_spec)
    model = net()
    with measure(model) as stats:
        model(torch.ones(2, 4))
    lines = stats.table("list")
    assert [line["path"] for line in lines] == ["0", "1", "2"]
    if "pandas" not in installed:
        assert stats.table() == lines
    for kind in installed:
        assert stats.table(kind) == (kind, lines)
    if "pandas" in installed:
        assert stats.table()[0] == "pandas"
    with pytest.raises(ValueError, match="kind must be"):
        stats.table("arrow")


@pytest.mark.parametrize("kind", ["pandas", "polars"])
def test_tables_of_others(kind):
    pytest.importorskip(kind)
    model = net()
    with measure(model, stats=SIX) as stats:
        model(torch.ones(2, 4))
    frame = stats.table(kind)
    assert list(frame["path"]) == ["0", "1", "2"] and list(frame["count"]) == [12, 12, 6]


# --- nothing is left behind


def optimizer_hooks(optimizer):
    names = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    return {name: list(getattr(optimizer, name)) for name in names} | {"attributes": sorted(optimizer.__dict__)}


EVERYTHING = {"inputs": True, "grads": True, "params": True, "param_grads": True, "updates": True, "stats": SIX}


def trained(model, optimizer, x):
    optimizer.zero_grad()
    model(x).square().sum().backward()
    optimizer.step()


def test_nothing_is_left_after_the_end():
    model = InPlace()
    optimizer = torch.optim.AdamW(model.parameters())
    trained(model, optimizer, torch.randn(2, 3, 8, 8))
    before = hooks_of(model), optimizer_hooks(optimizer), sessions_here.get()
    with measure(model, optimizer=optimizer, **EVERYTHING):
        trained(model, optimizer, torch.randn(2, 3, 8, 8))
        assert (hooks_of(model), optimizer_hooks(optimizer)) != before[:2]
    assert (hooks_of(model), optimizer_hooks(optimizer), sessions_here.get()) == before


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_nothing_is_left_after_an_error(error):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = hooks_of(model), optimizer_hooks(optimizer), sessions_here.get()
    for place in range(3):
        with pytest.raises(error):
            with measure(model, optimizer=optimizer, **EVERYTHING):
                y = model(torch.ones(2, 4))
                if place == 0:
                    raise error
                y.sum().backward()
                if place == 1:
                    raise error
                optimizer.step()
                raise error
        assert (hooks_of(model), optimizer_hooks(optimizer), sessions_here.get()) == before
        trained(model, optimizer, torch.ones(2, 4))


def test_nothing_is_left_where_the_beginning_fails(monkeypatch):
    model, other = net(), nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    foreign = torch.optim.SGD(other.parameters(), 0.1)
    before = hooks_of(model), optimizer_hooks(optimizer), optimizer_hooks(foreign), sessions_here.get()

    def interrupted(*_):
        raise KeyboardInterrupt

    for error, options in [
        (ValueError, {"optimizer": foreign, "updates": True}),
        (KeyboardInterrupt, {"optimizer": optimizer, "param_grads": True, "updates": True}),
    ]:
        if error is KeyboardInterrupt:
            monkeypatch.setattr(optimizer, "register_step_post_hook", interrupted)
            before = (before[0], optimizer_hooks(optimizer), *before[2:])
        with pytest.raises(error):
            measure(model, **options).open()
        assert (hooks_of(model), optimizer_hooks(optimizer), optimizer_hooks(foreign), sessions_here.get()) == before
    with pytest.raises(SelectionError):
        measure(model, "nowhere").open()
    assert hooks_of(model) == before[0]


def test_what_is_dropped_is_gone_from_the_model_and_the_optimizer():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = hooks_of(model), optimizer_hooks(optimizer)
    stats = measure(model, optimizer=optimizer, **EVERYTHING).open()
    trained(model, optimizer, torch.ones(2, 4))
    del stats
    gc.collect()
    assert hooks_of(model) == before[0]
    assert optimizer_hooks(optimizer) == before[1]


def bytes_held(stats):
    shelves = [*stats._reduce.shelves, stats._steps.drafts.shelf]
    return sum(block.states.nbytes + block.empty.nbytes for shelf in shelves for block in shelf)


def test_memory_does_not_grow_with_the_steps():
    model = nn.Sequential(nn.Linear(4, 3, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
    held = []
    with measure(model, optimizer=optimizer, **EVERYTHING) as stats:
        for step in range(1, 301):
            trained(model, optimizer, torch.randn(5, 4))
            if step in (3, 300):
                gc.collect()
                alive = sum(issubclass(type(known), torch.Tensor) for known in gc.get_objects())
                held.append((bytes_held(stats), alive))
    assert held[0][0] > 0 and held[0][0] == held[1][0] and held[0][1] >= held[1][1]
    assert stats["0"].count == 300 * 15 and stats["0.weight", "update_ratio"].count == 300


# --- nothing waits, nothing changes


class Counting(TorchDispatchMode):
    """Counts what reads a number back from the device, or would have to."""

    READING = ("_local_scalar_dense", "nonzero", "equal", "masked_select", "unique")

    def __init__(self):
        super().__init__()
        self.read, self.ops = Counter(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.ops += 1
        if name.startswith(self.READING) or name == "item":
            self.read[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("stats", [*SIX, SIX], ids=[*SIX, "all"])
@pytest.mark.parametrize("stepping", [False, True], ids=["alone", "optimizer"])
def test_no_number_is_read_back_in_a_step(stats, stepping):
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(48, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    options = {"optimizer": optimizer, "updates": True} if stepping else {}
    given = {"inputs": True, "grads": True, "params": True, "param_grads": True, "every": 2, "stats": stats}
    with measure(model, **given, **options) as measured:
        with Counting() as counting:
            for _ in range(4):
                trained(model, optimizer, torch.randn(4, 2, 6, 6))
            measured.snapshot()
            measured.reset()
            trained(model, optimizer, torch.randn(4, 2, 6, 6))
    assert counting.ops > 100 and not counting.read
    assert "moments" not in stats or measured["4"].count == 8


def test_counting_counts():
    with Counting() as counting:
        float(torch.ones(3).sum())
        torch.ones(3).nonzero()
        if torch.ones(3).sum() > 0:
            torch.equal(torch.ones(3), torch.ones(3))
    assert counting.read == {"_local_scalar_dense": 2, "nonzero": 1, "equal": 1}


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_training_is_the_same_to_the_bit(make):
    def run(measured):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(2, 4, 3),
            nn.BatchNorm2d(4),
            nn.ReLU(inplace=True),
            nn.Dropout(0.3),
            nn.Flatten(),
            nn.Linear(64, 3),
        )
        optimizer = make(model.parameters(), lr=0.01)
        losses = []

        def train():
            for _ in range(5):
                optimizer.zero_grad()
                loss = model(torch.randn(4, 2, 6, 6)).square().mean()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                losses.append(loss.detach())

        if measured:
            with measure(model, optimizer=optimizer, **EVERYTHING) as stats:
                train()
            assert stats["5"].count == 60
        else:
            train()
        return [*losses, *model.parameters(), *model.buffers(), torch.get_rng_state()]

    for plain, observed in zip(run(False), run(True), strict=True):
        assert torch.equal(plain, observed)


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda thing: pickle.loads(pickle.dumps(thing))}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES.keys())
def test_a_copy_of_a_measured_model_is_not_measured(copied):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with measure(model, optimizer=optimizer, **EVERYTHING) as stats:
        trained(model, optimizer, torch.ones(2, 4))
        twin, others = copied((model, optimizer))
        trained(twin, others, torch.ones(7, 4))
        torch.save(twin, io.BytesIO())
        assert stats["0"].count == 12 and stats.step == 1
        trained(model, optimizer, torch.ones(2, 4))
    assert stats["0"].count == 24
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert a is not b


# --- modes


def test_inference_mode_then_training():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with measure(model, optimizer=optimizer, **EVERYTHING) as stats, capture(model, keep=None) as acts:
        with torch.inference_mode():
            model(torch.randn(3, 4))
            inside = stats.snapshot()
        trained(model, optimizer, torch.randn(3, 4))
        with torch.inference_mode():
            model(torch.randn(3, 4))
            stats.snapshot()
        first = stats["1"].count
        with torch.inference_mode():
            stats.reset()
        trained(model, optimizer, torch.randn(3, 4))
    assert inside["1"].count == 18 and first == 54
    check_moments(stats["1"], acts["1"].outputs[-1])
    assert stats["0.weight", "update"].count == 24


def test_inference_mode_only():
    model = net()
    with measure(model, inputs=True, params=True, stats=SIX) as stats, torch.inference_mode():
        y = model(torch.randn(3, 4))
    check_moments(stats["2"], y)
    check_moments(stats["0.weight", "param"], model[0].weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    model = net()
    options = {"grads": True, "inputs": True}
    with measure(model, stats=SIX, params=True, **options) as stats, capture(model, keep=None, **options) as acts:
        for _ in range(3):
            with torch.autocast("cpu", dtype=dtype):
                loss = model(torch.randn(20, 4)).float().square().sum()
            loss.backward()
    assert acts["0"].output.dtype == dtype
    for path in ("0", "1", "2"):
        check_moments(stats[path], *acts[path].outputs)
        check_moments(stats[path, "input"], *acts[path].inputs)
        check_moments(stats[path, "grad_output"], *acts[path].grads)
    outputs = torch.cat(acts["0"].outputs).double()
    torch.testing.assert_close(stats["0"]["covariance"].covariance, torch.cov(outputs.T), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(stats["0"]["channels"].mean, outputs.mean(0), rtol=1e-5, atol=1e-6)


def test_gradients_are_not_asked_for_where_there_are_none():
    model = net()
    with measure(model, grads=True, on_silent="ignore") as stats, torch.no_grad():
        model(torch.ones(2, 4))
    assert stats["0"].count == 12 and ("0", "grad_output") not in stats and "gradient" in stats.silent["0"]


def test_sites_that_saw_nothing_are_told():
    model = net()
    model.add_module("unused", nn.Linear(2, 2))
    model.forward = lambda x: model[2](model[1](model[0](x)))
    with pytest.raises(SilentError, match="unused"):
        with measure(model, "unused"):
            model(torch.ones(2, 4))
    with pytest.warns(UserWarning, match="unused"):
        with measure(model, nn.Linear) as stats:
            model(torch.ones(2, 4))
    assert list(stats.silent) == ["unused"] and "unused" not in stats


@pytest.mark.parametrize("scope", ["thread", "all"])
def test_other_threads(scope):
    model = Probe()
    with measured_probe(model, scope=scope) as stats:
        model(constant(1))
        for number in (2, 3, 4):
            thread = threading.Thread(target=model, args=(constant(number),))
            thread.start()
            thread.join()
    assert values_of(stats) == ([1] if scope == "thread" else [1, 2, 3, 4])


class SlowTopK(TopK):
    """Another thread has all the time to come in between reading a state and writing it."""

    def merge(self, states):
        time.sleep(1e-3)
        return super().merge(states)


class SlowChannels(Channels):
    def update(self, state, x):
        new = state.clone()
        super().update(new, x)
        time.sleep(1e-3)
        state.copy_(new)


@pytest.mark.parametrize("stat", [SlowTopK(), SlowChannels()], ids=["topk", "channels"])
def test_threads_that_run_at_the_same_time_lose_nothing(stat):
    model = Probe()
    with measure(model, "same", stats=stat, scope="all") as stats:

        def run(number):
            for _ in range(20):
                model(constant(number))

        threads = [threading.Thread(target=run, args=(number,)) for number in (1, 2, 3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    state = stats["same"].state(stat.key)
    assert state[0, 0] == (60 if stat.name == "topk" else 60 * 2)  # tensors, or rows


def test_two_measurements_at_once():
    model = Probe()
    with measured_probe(model) as outer:
        model(constant(1))
        with measured_probe(model, every=2) as inner:
            for number in (2, 3, 4):
                model(constant(number))
    assert values_of(outer) == [1, 2, 3, 4] and values_of(inner) == [2, 4]


@pytest.mark.parametrize(
    "error, match, options",
    [
        (ValueError, "nothing to measure", {"outputs": False}),
        (TypeError, "grads must be True or False", {"grads": 1}),
        (ValueError, "by must be 'channel'", {"by": "row"}),
        (ValueError, "every must be at least 1", {"every": 0}),
        (TypeError, "every must be a whole number", {"every": True}),
        (ValueError, "no statistic called 'mean'", {"stats": "mean"}),
        (ValueError, "same name", {"stats": ("topk", TopK(3))}),
        (ValueError, "at least one name or Stat", {"stats": ()}),
        (ValueError, "pass it as optimizer=", {"updates": True}),
        (TypeError, "torch.optim.Optimizer", {"optimizer": 3}),
        (ValueError, "scope must be", {"scope": "here"}),
        (ValueError, "on_silent must be", {"on_silent": "cry"}),
    ],
)
def test_what_makes_no_sense_is_refused(error, match, options):
    model = net()
    before = hooks_of(model)
    with pytest.raises(error, match=match):
        measure(model, **options)
    assert hooks_of(model) == before


def test_what_is_no_model_is_refused():
    with pytest.raises(TypeError, match="model"):
        measure("resnet18")
