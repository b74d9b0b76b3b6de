"""The log into TensorBoard, read back by TensorBoard."""

import io
import math
import os
import sys
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from log_samples import BROKEN, LESSER, NAMES, REPORT, SCRIPT, entry, many, silence
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugin_util import markdown_to_safe_html
from tensorboard.plugins.custom_scalar import layout_pb2
from torch import nn
from torch.utils.tensorboard import SummaryWriter

import torchhook
from torchhook.integrations.common import MOST, Layers, files
from torchhook.integrations.tensorboard import TensorBoard
from torchhook.training.logs import Entry


def read(folder):
    events = EventAccumulator(str(folder), size_guidance={"tensors": 0, "scalars": 0, "histograms": 0, "images": 0})
    return events.Reload()


def written(folder, *entries, findings=(), report=REPORT, **options):
    log = TensorBoard(folder, **options)
    log.begin({})
    for one in entries:
        log.write(one)
    for finding in findings:
        log.found(finding)
    log.end(report, "ended")
    return read(folder)


def texts(events, tag):
    return [event.tensor_proto.string_val[0].decode() for event in events.Tensors(f"{tag}/text_summary")]


def test_curves_have_the_numbers_steps_and_times(tmp_path):
    values = torch.tensor([1.0, 2.0, 6.0])
    events = written(tmp_path, *(entry(step, {"fc": values * step}, rate=0.1) for step in (3, 5)))
    curve = events.Scalars("torchhook/mean/fc")
    assert [(point.step, point.value, point.wall_time) for point in curve] == [
        (3, 9.0, 1.7e9 + 3),
        (5, 15.0, 1.7e9 + 5),
    ]
    assert [point.value for point in events.Scalars("torchhook/learning_rate")] == pytest.approx([0.1, 0.1])


def test_the_loss_has_every_step(tmp_path):
    events = written(tmp_path, entry(2, {}, losses={0: 3.0, 1: 2.0, 2: math.nan}))
    points = [(point.step, point.value) for point in events.Scalars("torchhook/loss")]
    assert points[:2] == [(0, 3.0), (1, 2.0)] and points[2][0] == 2 and math.isnan(points[2][1])


@pytest.mark.parametrize(
    "values",
    [
        torch.randn(10_000),
        torch.cat([torch.zeros(50), torch.randn(50).abs()]),  # a gap of a hundred octaves
        torch.full((7,), 1.1),
        torch.tensor([-1e30, 0.0, 1e-30, 3.0]),
        torch.tensor([1.0, math.nan, math.inf, 2.0]),
    ],
    ids=["normal", "rectified", "constant", "wide", "partly nan"],
)
def test_histograms_are_right_and_short(tmp_path, values):
    events = written(tmp_path, entry(4, {"fc": values}))
    (event,) = events.Histograms("torchhook/output/fc")
    said, finite = event.histogram_value, values[values.isfinite()].double()
    assert event.step == 4
    assert (said.min, said.max, said.num) == (finite.min(), finite.max(), len(finite))
    assert (said.sum, said.sum_squares) == pytest.approx((float(finite.sum()), float((finite**2).sum())), rel=1e-3)
    lows = [-math.inf, *said.bucket_limit[:-1]]
    counts = [int(((finite >= low) & (finite < high)).sum()) for low, high in zip(lows, said.bucket_limit, strict=True)]
    assert counts == list(said.bucket)
    assert all(a or b for a, b in pairwise(counts)), "two empty bins in a row"
    edges = [edge for edge, *full in zip(pairwise(said.bucket_limit), counts[1:], strict=True) if any(full)]
    assert all(high - low <= max(-low, high) / 4 + 1e-38 for low, high in edges), "a bin reaches over a gap"


def test_values_that_are_all_nan_are_no_histogram_and_no_error(tmp_path):
    events = written(tmp_path, entry(0, {"fc": torch.full((5,), math.nan), "none": torch.empty(0)}))
    assert events.Tags()["histograms"] == []
    assert math.isnan(events.Scalars("torchhook/mean/fc")[0].value)


def test_places_without_moments_have_histograms_too(tmp_path):
    reduce = torchhook.Reduce("histogram")
    reduce.cell(torchhook.Site("fc"), None).update(torch.tensor([1.0, 1.1, 3.1]))
    events = written(tmp_path, Entry(0, 0.0, reduce.snapshot()))
    said = events.Histograms("torchhook/output/fc")[0].histogram_value
    assert (said.num, said.min, said.max) == (3, 1.0, 3.5)
    assert said.sum == pytest.approx(5.2, rel=0.1)


def test_maps_are_one_picture(tmp_path):
    maps = torch.stack([torch.tensor([[-2.0, 0.0, value]] * 4) for value in (0.0, -2.0, math.nan, math.inf)])
    events = written(tmp_path, entry(1, {}, maps={"conv": maps}))
    (image,) = events.Images("torchhook/maps/conv")
    picture = Image.open(io.BytesIO(image.encoded_image_string)).convert("L")
    assert picture.size == (2 * 4 - 1, 2 * 5 - 1)
    assert [picture.getpixel(place) for place in [(0, 0), (2, 1), (6, 1), (2, 6), (6, 6)]] == [0, 255, 0, 0, 0]


def test_maps_without_a_training_go_to_a_folder_or_a_writer(tmp_path):
    maps = {"conv": torch.rand(2, 4, 6, 5), "слой": torch.rand(3, 4, 4).numpy(), "fc": torch.rand(2, 10)}
    log = TensorBoard(tmp_path / "folder")
    log.feature_maps(maps, step=1)
    log.feature_maps(maps, step=2)
    with SummaryWriter(str(tmp_path / "writer")) as writer:
        TensorBoard(writer).feature_maps(maps, step=1)
        writer.add_scalar("mine", 1.0, 0)
    wanted = {f"torchhook/{what}/{name}" for what in ("maps", "mean_map") for name in ("conv", "слой")}
    for folder, steps in (("folder", [1, 2]), ("writer", [1])):
        assert len(list((tmp_path / folder).iterdir())) == 1
        events = read(tmp_path / folder)
        assert set(events.Tags()["images"]) == wanted
        assert [image.step for image in events.Images("torchhook/maps/conv")] == steps
    with pytest.raises(ValueError, match=r"acts has no feature maps \[N, C, H, W\]: it holds 'fc' \[2, 10\]"):
        log.feature_maps({"fc": torch.rand(2, 10)})
    with pytest.raises(TypeError, match="acts must be a tensor, .* a capture or one layer of it, not 'conv'"):
        log.feature_maps("conv")


def test_a_log_serves_one_training_after_another(tmp_path):
    log = TensorBoard(tmp_path)
    for step in (1, 2):
        log.begin({})
        log.write(entry(step, {"fc": torch.ones(2)}))
        log.end(REPORT, "ended")
    points = read(tmp_path).Scalars(
        "torchhook/mean/fc"
    )  # of two files, which TensorBoard reads in the order of their names
    assert sorted(point.step for point in points) == [1, 2]


def test_a_writer_of_the_users_is_not_closed_and_keeps_its_layout(tmp_path):
    with SummaryWriter(str(tmp_path)) as writer:
        writer.add_custom_scalars({"mine": {"chart": ["Multiline", ["a"]]}})
        events = written_with(writer, tmp_path)
        assert len(list(tmp_path.iterdir())) == 1
        writer.add_scalar("mine", 1.0, 0)
    assert len(list(tmp_path.iterdir())) == 1, "the writer was closed and opened again"
    assert texts(events, "torchhook/report"), "what was written is not on disk in the end"
    assert [category.title for category in layout(read(tmp_path))] == ["mine"]


def written_with(writer, folder):
    log = TensorBoard(writer)
    log.begin({})
    log.write(entry(0, {"fc": torch.ones(3)}))
    log.end(REPORT, "ended")
    return read(folder)


def layout(events):
    (event,) = events.Tensors("custom_scalars__config__")
    return layout_pb2.Layout.FromString(event.tensor_proto.string_val[0]).category


def test_a_folder_has_the_gradient_flow_as_a_chart_and_is_closed(tmp_path):
    log = TensorBoard(tmp_path / "new")
    log.begin({})
    log.write(entry(0, {("fc.weight", "param_grad_norm"): torch.tensor([2.0])}))
    writer = log._writer
    log.end(REPORT, "ended")
    assert writer.file_writer is None
    events = read(tmp_path / "new")
    charts = {chart.title: list(chart.multiline.tag) for chart in layout(events)[0].chart}
    assert charts["gradient flow"] == ["torchhook/grad_norm/.*"]
    assert events.Scalars("torchhook/grad_norm/fc.weight")[0].value == 2.0


def test_findings_and_the_report_are_text_without_markup_of_their_own(tmp_path):
    events = written(tmp_path, entry(12, {}), findings=[BROKEN, LESSER])
    (found,) = texts(events, "torchhook/findings/TH101")
    (report,) = texts(events, "torchhook/report")
    assert events.Tensors("torchhook/findings/TH101/text_summary")[0].step == 7
    assert "<" not in found
    for text in (found, report):
        page = markdown_to_safe_html(text)
        assert "<script" not in page and "<b>" not in page and "312 values are NaN" in page
        assert "tried: learning rate a tenth → loss 0.31 instead of 2.28 after 100 steps" in page
        assert "blocks[0].&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert len(texts(events, "torchhook/findings/TH403")) == 1
    assert "<table>" in markdown_to_safe_html(report) and "Training ended." in report


def test_no_fold_is_shown_as_it_is_written(tmp_path):
    root = torchhook.Finding("TH101", "error", "NaN", "fc", affected=(LESSER,))
    (report,) = texts(written(tmp_path, report=torchhook.Report((root,))), "torchhook/report")
    assert "explains 1 more" in report and "<details>" not in report and "<summary>" not in report


def test_hostile_names_stay_apart(tmp_path):
    events = written(tmp_path, entry(0, {name: torch.full((2,), float(i)) for i, name in enumerate(NAMES)}))
    tags = [tag for tag in events.Tags()["scalars"] if tag.startswith("torchhook/mean/")]
    assert sorted(events.Scalars(tag)[0].value for tag in tags) == list(range(len(NAMES)))
    assert all(len(tag) < 250 and "<" not in tag and "/" not in tag.removeprefix("torchhook/mean/") for tag in tags)
    assert {"torchhook/mean/fc", "torchhook/mean/слой.重み"} <= set(tags)


@pytest.mark.parametrize(
    ("layers", "logged"),
    [
        ("*", {"", "a", "a.b.weight", "c.weight"}),
        ("*.weight", {"a.b.weight", "c.weight"}),
        (["a", "c*"], {"a", "c.weight"}),
        ((), set()),
    ],
)
def test_layers_are_globs_and_the_whole_model_is_always_there(tmp_path, layers, logged):
    places = dict.fromkeys(["", "a", "a.b.weight", "c.weight"], torch.ones(2))
    one = entry(0, places, rate=0.5, maps={"a": torch.ones(1, 2, 2)})
    events = written(tmp_path, one, layers=layers)
    means = {tag.removeprefix("torchhook/mean/") for tag in events.Tags()["scalars"] if "/mean/" in tag}
    assert {"" if mean.startswith("root") else mean for mean in means} == logged
    assert len(events.Tags()["histograms"]) == len(logged)
    assert len(events.Tags()["images"]) == ("a" in logged)
    assert events.Scalars("torchhook/learning_rate")[0].value == 0.5


def test_a_thousand_layers_are_thinned_out_evenly_and_for_good():
    layers = Layers("*")
    with pytest.warns(UserWarning, match="logging only one in 8 of .* with layers=") as told:
        first = layers.scalars(many(0, 1000))
        second = layers.scalars(many(1, 1000))
    assert len(told) == 1
    sites = sorted({name.split(".")[-1] for name in first})
    assert sites == [f"{number:04d}" for number in range(0, 1000, 8)] and len(sites) <= MOST
    assert list(first) == list(second)
    later = layers.scalars(entry(2, {"layers.0009": torch.ones(1), "layers.0008": torch.ones(1)}))
    assert {name.split(".")[-1] for name in later} == {"0008"}


def test_two_hundred_places_are_all_there():
    with silence():
        assert len({name.split("/")[-1] for name in Layers("*").scalars(many(0, MOST))}) == MOST


def test_globs_that_match_nothing_are_told_of():
    with pytest.warns(
        UserWarning, match=r"no site matches layers=\('layr.\*',\); there is, for example, 'layers.0000'"
    ):
        assert Layers("layr.*").scalars(many(0, 2)) == {}


def test_a_real_training(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    log = TensorBoard(tmp_path)
    log.begin({})
    wanted = {"grads": True, "params": True, "param_grads": True, "updates": True}
    with torchhook.measure(model, optimizer=optimizer, stats=("moments", "histogram"), **wanted) as stats:
        for step in range(3):
            optimizer.zero_grad()
            loss = model(torch.randn(16, 4)).square().mean()
            loss.backward()
            optimizer.step()
            log.write(Entry(step, 0.0, stats.snapshot(), {step: loss.item()}, 0.1))
            stats.reset()
    log.end(REPORT, "ended")
    tags = read(tmp_path).Tags()
    assert {"torchhook/loss", "torchhook/grad_norm", "torchhook/grad_norm/0.weight"} <= set(tags["scalars"])
    assert {"torchhook/update_ratio/2.bias", "torchhook/zero_fraction/1"} <= set(tags["scalars"])
    assert {"torchhook/param/0.weight", "torchhook/grad_output/2"} <= set(tags["histograms"])


def test_what_is_neither_folder_nor_writer():
    with pytest.raises(TypeError, match="target must be a folder or a SummaryWriter, not 3"):
        TensorBoard(3)
    with pytest.raises(TypeError, match="layers must be globs of paths"):
        TensorBoard("runs", layers=[nn.Linear])


@pytest.mark.parametrize(
    ("module", "extra", "name"),
    [
        ("torch.utils.tensorboard", "tensorboard", "TensorBoard"),
        ("mlflow", "mlflow", "MLflow"),
        ("wandb", "wandb", "WandB"),
    ],
)
def test_without_its_library_a_log_names_the_extra(monkeypatch, module, extra, name):
    log = getattr(__import__(f"torchhook.integrations.{extra}", fromlist=[name]), name)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf'pip install "torchhook\[{extra}\]"'):
        log(os.devnull)


def test_without_plotly_there_is_no_page_but_the_rest(monkeypatch):
    plotted = replace(REPORT, losses={0: 1.0, 1: 0.5})
    assert list(files(plotted)) == ["report.json", "report.md", "report.html"]
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    assert list(files(plotted)) == ["report.json", "report.md"]
    assert SCRIPT in files(plotted)["report.json"] and "<script>" not in files(plotted)["report.md"]
