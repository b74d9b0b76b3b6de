"""ModelDiagnostics: features and gradients in one object, as seed 003 asks for, on the common engine."""

from __future__ import annotations

import gc
import inspect
import math

import pytest
import torch
from torch import nn

from specimens import InPlace, OutOfPlace, hooks_of, resnet18
from torchhook import ModelDiagnostics, SelectionError


class Writer:
    """Keeps what is written, with the signature of TensorBoard's `add_histogram` and nothing else."""

    def __init__(self):
        self.written = {}

    def add_histogram(self, tag, values, global_step=None, bins="tensorflow", walltime=None, max_bins=None):
        assert values.numel() and bool(values.isfinite().all()), "TensorBoard raises on these"
        self.written[tag, global_step] = values.detach().clone()


def conv_net():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3), nn.Flatten(), nn.Linear(32, 3))


def pictures():
    return torch.randn(5, 1, 8, 8)


def seen(model, x):
    """The outputs of layers and their gradients, with torch alone."""
    outputs, handles = {}, []

    def keep(path):
        def hook(module, args, output):
            output.retain_grad()
            outputs[path] = output

        return hook

    for path, module in model.named_modules():
        if isinstance(module, nn.Conv2d):
            handles.append(module.register_forward_hook(keep(path)))
    model(x).square().sum().backward()
    for handle in handles:
        handle.remove()
    return {path: output.detach() for path, output in outputs.items()}, {p: o.grad for p, o in outputs.items()}


def test_features_and_gradients_are_those_of_the_convolutions():
    model, x = conv_net(), pictures()
    with ModelDiagnostics(model) as diagnostics:
        model(x).square().sum().backward()
    features, gradients = seen(model, x)
    assert list(diagnostics.features) == list(diagnostics.gradients) == ["0", "2"]
    for path in features:
        assert torch.equal(diagnostics.features[path], features[path])
        assert torch.equal(diagnostics.gradients[path], gradients[path])


def test_features_are_what_flowed_also_where_a_layer_overwrites_it():
    model, x = InPlace(), torch.randn(2, 3, 8, 8)
    twin = OutOfPlace()
    twin.load_state_dict(model.state_dict())
    with ModelDiagnostics(model) as diagnostics:
        model(x)
    expected, _ = seen(twin, x)
    for path, feature in diagnostics.features.items():
        torch.testing.assert_close(feature, expected[path])


def test_without_convolutions_every_leaf_counts_and_queries_choose():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.LSTM(4, 3))
    with ModelDiagnostics(model) as diagnostics, ModelDiagnostics(model, nn.ReLU) as of_relus:
        output, _ = model(torch.randn(2, 5, 4))
        output.sum().backward()
    assert list(diagnostics.features) == ["0", "1", "2"]
    assert diagnostics.features["2"].shape == (2, 5, 3)  # the first of several tensors
    assert list(of_relus.features) == list(of_relus.gradients) == ["1"]
    with pytest.raises(SelectionError, match="conv"):
        ModelDiagnostics(model, "conv")


def test_the_newest_counts():
    model = conv_net()
    with ModelDiagnostics(model) as diagnostics:
        with pytest.warns(UserWarning, match="the model did not run"):
            assert diagnostics.features == {}
        for scale in (1, 2, 3):
            x = scale * pictures()
            model(x)
            assert torch.equal(diagnostics.features["0"], model[0](x))
            assert diagnostics.gradients == {}


def test_statistics_of_activations_are_those_of_torch():
    model, x = conv_net(), pictures()
    with ModelDiagnostics(model) as diagnostics:
        model(x)
    stats = diagnostics.compute_activation_stats()
    assert list(stats) == ["0", "2"]
    for path, said in stats.items():
        feature = diagnostics.features[path]
        assert list(said) == ["mean", "std", "max", "min"]
        expected = {name: float(getattr(feature, name)()) for name in said}
        assert said == pytest.approx(expected, rel=1e-4, abs=1e-6)
        assert all(type(value) is float for value in said.values())


def test_values_that_are_not_finite_are_left_out_of_statistics():
    model = nn.Sequential(nn.Conv2d(1, 1, 1))
    x = torch.tensor([1.0, 2.0, math.nan, math.inf]).view(1, 1, 2, 2)
    nn.init.ones_(model[0].weight)
    nn.init.zeros_(model[0].bias)
    with ModelDiagnostics(model) as diagnostics:
        model(x)
    said = diagnostics.compute_activation_stats()["0"]
    assert (said["mean"], said["max"], said["min"]) == (1.5, 2.0, 1.0)


# --- to a writer


def test_features_and_gradients_are_written_as_histograms():
    model, writer = conv_net(), Writer()
    with ModelDiagnostics(model) as diagnostics:
        model(pictures()).square().sum().backward()
        diagnostics.visualize(writer, step=7)
        diagnostics.visualize(writer)
    tags = [f"{folder}/{path}" for folder in ("features", "gradients") for path in ("0", "2")]
    assert set(writer.written) == {(tag, step) for tag in tags for step in (7, None)}
    assert torch.equal(writer.written["features/0", 7].flatten(), diagnostics.features["0"].flatten())
    assert torch.equal(writer.written["gradients/2", 7].flatten(), diagnostics.gradients["2"].flatten())


def test_the_writer_of_the_tests_is_called_as_tensorboards():
    tensorboard = pytest.importorskip("torch.utils.tensorboard", reason="tensorboard is not installed")
    theirs = inspect.signature(tensorboard.SummaryWriter.add_histogram)
    assert list(theirs.parameters) == list(inspect.signature(Writer.add_histogram).parameters)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_tensorboard_reads_what_was_written(tmp_path, dtype):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    model = conv_net().to(dtype)
    with ModelDiagnostics(model) as diagnostics, SummaryWriter(str(tmp_path)) as writer:
        model(pictures().to(dtype)).square().sum().backward()
        diagnostics.visualize(writer, step=3)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert set(events.Tags()["histograms"]) == {"features/0", "features/2", "gradients/0", "gradients/2"}
    assert set(events.Tags()["images"]) == {"maps/0", "maps/2", "mean_map/0", "mean_map/2"}
    (event,) = events.Histograms("features/0")
    assert event.step == 3 and event.histogram_value.num == diagnostics.features["0"].numel()


def test_gradients_of_nan_are_no_reason_to_fail():
    model, writer = conv_net(), Writer()
    with ModelDiagnostics(model) as diagnostics:
        (model(pictures()).sum() * math.nan).backward()
        diagnostics.visualize(writer)
        report = diagnostics.check()
    assert bool(diagnostics.gradients["2"].isnan().all()) and bool(diagnostics.gradients["0"].isnan().any())
    assert {tag for tag, _ in writer.written} == {"features/0", "features/2", "gradients/0"}  # only of finite values
    assert [finding.code for finding in report.findings] == ["TH103"]
    assert report.findings[0].site == "4"  # the head, where they begin, is looked at, too


def test_nothing_seen_writes_nothing_and_finds_nothing():
    writer = Writer()
    with ModelDiagnostics(conv_net()) as diagnostics:
        for read in (lambda: diagnostics.visualize(writer), diagnostics.compute_activation_stats, diagnostics.check):
            with pytest.warns(UserWarning, match=r"nothing was seen at the output of '0'.* the model did not run"):
                read()
        assert not writer.written


# --- what is wrong


def test_what_is_wrong_is_found_by_the_rules():
    model = conv_net()
    with torch.no_grad():
        model[2].weight[0, 0, 0, 0] = math.nan
    with ModelDiagnostics(model) as diagnostics:
        model(pictures())
        report = diagnostics.check()
    assert report.model == "Sequential" and not report.ok
    assert (report.findings[0].code, report.findings[0].site) == ("TH101", "2")
    assert "TH601" in report.skipped


def test_a_healthy_network_has_no_findings():
    model = resnet18(num_classes=3)
    with ModelDiagnostics(model) as diagnostics:
        model(torch.randn(4, 3, 32, 32)).square().mean().backward()
        report = diagnostics.check()
    assert not [finding for finding in report.findings if finding.severity >= "warning"], report
    assert len(diagnostics.features) == len(diagnostics.gradients) == 20


@pytest.mark.parametrize("side", [8, 112])
def test_gradients_that_are_too_large_are_found_also_before_a_pooling(side):
    pooled = [nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    model, x, y = nn.Sequential(*pooled, nn.Linear(8, 3)), torch.randn(16, 1, side, side), torch.arange(16) % 3
    for scale, codes in ((1, []), (2, []), (1e6, ["TH402"])):
        model.zero_grad()
        with ModelDiagnostics(model) as diagnostics:
            (scale * nn.functional.cross_entropy(model(x), y)).backward()
        report = diagnostics.check()
        assert [finding.code for finding in report.findings] == codes, report
        assert list(diagnostics.features) == list(diagnostics.gradients) == ["0", "2"]
    (finding,) = report.findings
    gradient = (model(x).detach().softmax(1) - nn.functional.one_hot(y)) * 1e6 / 16
    size = float(gradient.square().mean().sqrt())
    assert finding.site == "6" and finding.evidence["size"] == pytest.approx(size, rel=1e-3)


# --- nothing left behind


def test_hooks_are_gone_after_close_and_what_was_seen_stays():
    model = conv_net()
    before = hooks_of(model)
    diagnostics = ModelDiagnostics(model)
    assert hooks_of(model) != before
    model(pictures()).sum().backward()
    feature = diagnostics.features["0"]
    diagnostics.close()
    assert hooks_of(model) == before
    model(pictures())
    assert torch.equal(diagnostics.features["0"], feature)
    diagnostics.close()  # closing twice is fine


def test_hooks_are_gone_after_an_error():
    model = conv_net()
    before = hooks_of(model)
    with pytest.raises(ZeroDivisionError), ModelDiagnostics(model):
        model(pictures())
        raise ZeroDivisionError
    assert hooks_of(model) == before


def test_hooks_are_gone_with_the_object():
    model = conv_net()
    before = hooks_of(model)
    diagnostics = ModelDiagnostics(model)
    model(pictures()).sum().backward()
    del diagnostics
    gc.collect()
    assert hooks_of(model) == before
    model(pictures())
