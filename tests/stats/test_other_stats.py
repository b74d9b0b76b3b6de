"""Statistics of units, of how those vary together, the largest values, and statistics of one's own."""

import math

import pytest
import torch
from torch import nn

from specimens import Returning
from torchhook import (
    BudgetError,
    Channels,
    Covariance,
    Moments,
    NotRecordedError,
    Reduce,
    Site,
    Stat,
    TopK,
    capture,
    measure,
)


def by_unit(values, dim):
    """What `Channels` should say, in double precision."""
    rows = values.detach().double().movedim(dim, 0).flatten(1)
    return rows.mean(1), rows.std(1), rows.abs().mean(1), (rows > 0).double().mean(1)


def check_units(units, values, dim):
    for found, expected in zip(units, by_unit(values, dim), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def both_of(model, *inputs, **options):
    """What is measured of the layer "0" while its outputs are captured."""
    with capture(model, "0", keep=None) as acts, measure(model, "0", by="channel", **options) as stats:
        for x in inputs:
            model(x)
    return stats["0"], acts["0"].outputs


# --- units: which dimension they are in


@pytest.mark.parametrize(
    "make, shape, dim",
    [
        (lambda: nn.Conv2d(3, 5, 3), (4, 3, 6, 7), 1),
        (lambda: nn.Conv1d(3, 5, 3), (4, 3, 6), 1),
        (lambda: nn.Conv3d(3, 5, 1), (2, 3, 4, 3, 2), 1),
        (lambda: nn.ConvTranspose2d(3, 5, 3), (4, 3, 6, 7), 1),
        (lambda: nn.BatchNorm1d(3), (4, 3, 6), 1),
        (lambda: nn.BatchNorm1d(3), (4, 3), 1),
        (lambda: nn.BatchNorm2d(3), (4, 3, 2, 2), 1),
        (lambda: nn.GroupNorm(1, 3), (4, 3, 6), 1),
        (lambda: nn.MaxPool1d(2), (4, 3, 6), 1),
        (lambda: nn.AvgPool2d(2), (4, 3, 6, 6), 1),
        (lambda: nn.AdaptiveAvgPool1d(2), (4, 3, 6), 1),
        (lambda: nn.Linear(3, 5), (6, 3), -1),
        (lambda: nn.Linear(3, 5), (4, 6, 3), -1),
        (lambda: nn.Linear(3, 5), (2, 4, 6, 3), -1),
        (lambda: nn.LayerNorm(3), (4, 6, 3), -1),
        (lambda: nn.LayerNorm(3), (2, 4, 6, 3), -1),
        (lambda: nn.ReLU(), (4, 3, 5, 5), 1),
        (lambda: nn.ReLU(), (4, 3), 1),
        (lambda: nn.ReLU(), (4, 6, 3), -1),
        (lambda: nn.GELU(), (4, 6, 3), -1),
    ],
)
def test_units_are_where_the_module_has_them(make, shape, dim):
    reading, outputs = both_of(nn.Sequential(make()), torch.randn(shape), torch.randn(shape) + 1)
    values = torch.cat(outputs)
    units = reading["channels"]
    assert len(units.mean) == values.shape[dim]
    check_units(units, values, dim)


def test_units_of_embeddings_attention_and_recurrent_layers():
    embedding = nn.Sequential(nn.Embedding(9, 5))
    reading, outputs = both_of(embedding, torch.randint(9, (4, 7)))
    check_units(reading["channels"], outputs[0], -1)

    class Attends(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
            self.lstm = nn.LSTM(6, 4, batch_first=True)

        def forward(self, x):
            return self.lstm(self.attention(x, x, x)[0])

    model = Attends()
    with measure(model, "attention", "lstm", by="channel") as stats, capture(model, "attention", "lstm") as acts:
        model(torch.randn(3, 7, 6))
    check_units(stats["attention"]["channels"], acts["attention"].output[0], -1)
    check_units(stats["lstm"]["channels"], acts["lstm"].output[0], -1)
    check_units(stats["lstm", "output[1][1]"]["channels"], acts["lstm"].output[1][1], -1)


@pytest.mark.parametrize("optimizer", [False, True])
def test_the_units_of_parameters_are_in_the_first_dimension(optimizer):
    model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Flatten(), nn.Linear(5, 4))
    given = torch.optim.SGD(model.parameters(), 0.1) if optimizer else None
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with measure(model, params=True, param_grads=True, by="channel", optimizer=given) as stats:
        model(torch.randn(2, 3, 3, 3)).square().sum().backward()
        grads = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        if optimizer:
            given.step()
    for name, weight in weights.items():
        for port, values in (("param", weight), ("param_grad", grads[name])):
            units = stats[name, port]["channels"]
            assert len(units.mean) == len(weight)
            rows = values.double().reshape(len(weight), -1)
            torch.testing.assert_close(units.mean, rows.mean(1), rtol=1e-5, atol=1e-6)
            assert bool(units.std.isnan().all()) == (weight.dim() == 1)  # a value each


def test_the_units_of_inputs_and_gradients():
    model = nn.Sequential(nn.Conv1d(3, 5, 1), nn.Flatten(), nn.Linear(20, 2))
    x = torch.randn(6, 3, 4)
    with measure(model, inputs=True, grads=True, by="channel") as stats, capture(model, grads=True) as acts:
        model(x).square().sum().backward()
    check_units(stats["0", "input"]["channels"], x, 1)
    check_units(stats["0", "grad_output"]["channels"], acts["0"].grad, 1)
    check_units(stats["2", "grad_output"]["channels"], acts["2"].grad, -1)


def test_a_dimension_that_was_given():
    x = torch.randn(4, 3, 5, 6)
    check_units(Channels(dim=2).of(x), x, 2)
    check_units(Channels(dim=-1).of(x), x, -1)
    model = nn.Sequential(nn.Linear(6, 6))
    with measure(model, stats=[Channels(dim=0)]) as stats:
        y = model(x[:, 0])
    check_units(stats["0"]["channels"], y, 0)


def test_values_that_are_not_finite_are_left_out_of_each_unit():
    x = torch.randn(100, 4)
    x[::3, 1], x[5, 2], x[:, 3] = math.nan, -math.inf, math.inf
    units = Channels(dim=1).of(x[:30], x[30:])
    for unit in range(3):
        known = x[:, unit][x[:, unit].isfinite()].double()
        found = [number[unit] for number in units]
        expected = [known.mean(), known.std(), known.abs().mean(), (known > 0).double().mean()]
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
    assert all(number[3].isnan() for number in units)


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.bool]
)
def test_units_of_any_dtype_split_in_any_way(dtype):
    x = (torch.randn(500, 6, dtype=torch.float64) * 5).to(dtype)
    for parts in (x.split(500), x.split(7), x.split(1)):
        check_units(Channels(dim=1).of(*parts), x, 1)


def test_units_with_a_large_mean_keep_their_deviation():
    x = torch.randn(20_000, 3) + torch.tensor([0.0, 1e4, -1e6])
    units = Channels(dim=1).of(*x.split(999))
    torch.testing.assert_close(units.std, x.double().std(0), rtol=1e-5, atol=0)
    torch.testing.assert_close(units.mean, x.double().mean(0), rtol=0, atol=1e-5)


def test_states_of_units_merge_in_any_grouping():
    stat, x = Channels(dim=1), torch.randn(300, 5) * torch.arange(5) + 100 * torch.arange(5)
    states = []
    for part in x.split([0, 100, 1, 150, 49]):
        states.append(stat.empty(part))
        stat.update(states[-1], part)
    whole = stat.merge(torch.stack(states))
    pairs = stat.merge(torch.stack([stat.merge(torch.stack(states[:2])), stat.merge(torch.stack(states[2:]))]))
    check_units(stat.compute(whole), x, 1)
    torch.testing.assert_close(pairs, whole, rtol=1e-12, atol=1e-12)
    side_by_side = torch.stack([torch.stack(states), torch.stack(states[::-1])], 1)
    torch.testing.assert_close(stat.merge(side_by_side), torch.stack([whole, whole]), rtol=1e-12, atol=1e-12)


def test_units_under_autocast_are_as_precise():
    x = torch.randn(4_000, 3) + 50
    with torch.autocast("cpu", dtype=torch.bfloat16):
        units = Channels(dim=1).of(*x.split(1_000))
    check_units(units, x, 1)


@pytest.mark.parametrize("stat", ["channels", "covariance"])
@pytest.mark.filterwarnings("error")
def test_a_layer_that_is_given_other_widths_has_no_units(stat):
    """As the ReLU of a bottleneck of ResNet-50: it is given up there, and whoever reads it is told."""
    act = nn.ReLU()
    model = nn.Sequential(nn.Linear(4, 6), act, nn.Linear(6, 8), act)
    with measure(model, stats=("moments", stat, "topk")) as stats, capture(model, keep=None) as acts:
        for _ in range(2):
            model(torch.randn(3, 4))
    assert torch.equal(model(torch.ones(3, 4)), act(model[2](act(model[0](torch.ones(3, 4))))))
    assert stats["1"].count == 2 * 3 * (6 + 8) and stats["1"]["topk"][0].value == stats["1"].max
    with pytest.raises(NotRecordedError, match=f"'{stat}' of the output of '1': there were 6 units, and now .* 8;"):
        stats["1"][stat]
    assert list(stats["1"]) == ["moments", "topk"] and list(stats["0"]) == ["moments", stat, "topk"]
    outputs = torch.cat(acts["0"].outputs)
    found = stats["0"][stat]
    torch.testing.assert_close(found.mean, outputs.double().mean(0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("stat", ["channels", "covariance"])
@pytest.mark.filterwarnings("error")
def test_batches_and_sequences_of_other_lengths_stop_nothing(stat):
    """The last batch is smaller, sequences are of any length: token ids and scores a sample have those as units."""
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 1), Returning(lambda x: x.mean((1, 2))))
    with measure(model, inputs=True, stats=("moments", stat)) as stats:
        for shape in ((8, 5), (3, 5), (8, 7)):
            model(torch.randint(9, shape))
    assert stats["2"].count == 19 and stats["0", "input"].count == 111
    assert stats["0"][stat].mean.shape == (4,) and stats["1"][stat].mean.shape == (1,)


# --- covariance


def correlated(samples, units, offset=0.0, dtype=torch.float32):
    x = torch.randn(samples, units, dtype=torch.float64)
    mixing = torch.randn(units, units, dtype=torch.float64)
    return (x @ mixing + offset).to(dtype)


def check_spread(spread, x, rtol=1e-5):
    """`x` has a sample in each row."""
    x = x.double()
    expected = torch.cov(x.T)
    assert spread.count == len(x)
    scale = expected.diagonal().sqrt()
    error = (spread.covariance - expected).abs() / torch.outer(scale, scale)
    assert error.max() < rtol
    assert ((spread.mean - x.mean(0)).abs() / scale).max() < rtol


@pytest.mark.parametrize("offset", [0.0, 10.0, 1e3, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_covariance_is_that_of_torch(offset, dtype):
    x = correlated(2_000, 6, offset, dtype)
    for parts in (x.split(2_000), x.split(300), x.split(1)):
        check_spread(Covariance(dim=1).of(*parts), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_covariance_far_from_zero_is_as_exact_as_is_said(dtype):
    """(mean / deviation)² of the precision of float64, which is 1e-16."""
    x = correlated(2_000, 6, 1e6, dtype)
    ratio = 1e6 / float(x.double().std(0).min())
    check_spread(Covariance(dim=1).of(*x.split(300)), x, rtol=20 * ratio**2 * 1e-16)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64])
def test_covariance_of_other_dtypes(dtype):
    x = correlated(500, 4, 20.0).to(dtype)
    check_spread(Covariance(dim=1).of(*x.split(99)), x)


def test_samples_are_all_dimensions_but_that_of_the_units():
    x = torch.randn(3, 4, 5, 6)
    check_spread(Covariance(dim=1).of(x), x.movedim(1, -1).reshape(-1, 4))
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))
    with measure(model, stats="covariance") as stats, capture(model, keep=None) as acts:
        for _ in range(3):
            model(torch.randn(8, 2, 4, 4))
    for path in ("0", "1"):
        check_spread(stats[path]["covariance"], torch.cat(acts[path].outputs).movedim(1, -1).reshape(-1, 4))
    check_spread(stats["3"]["covariance"], torch.cat(acts["3"].outputs))


def test_samples_with_a_value_that_is_not_finite_are_left_out():
    x = correlated(400, 5)
    x[3, 0], x[70, 4], x[71, 2], x[72] = math.nan, math.inf, -math.inf, math.nan
    check_spread(Covariance(dim=1).of(*x.split(100)), x[x.isfinite().all(1)])
    assert Covariance(dim=1).of(torch.full((3, 2), math.nan)).count == 0


@pytest.mark.parametrize("enabled", [False, True])
def test_covariance_under_autocast_is_as_precise(enabled):
    x = correlated(3_000, 8, 5.0)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
        assert (x.T @ x).dtype == (torch.bfloat16 if enabled else torch.float32)
        check_spread(Covariance(dim=1).of(*x.split(700)), x)


def test_covariances_merge_by_adding():
    x = correlated(200, 3, 100.0)
    stat, states = Covariance(dim=1), []
    for part in x.split([0, 60, 1, 139]):
        states.append(stat.empty(part))
        stat.update(states[-1], part)
    assert stat.additive
    check_spread(stat.compute(stat.merge(torch.stack(states))), x)


@pytest.mark.parametrize(
    "spectrum, rank", [([1.0, 1, 1, 1], 4), ([5.0, 0, 0, 0], 1), ([2.0, 2, 0, 0], 2), ([0.5, 0.25, 0.25, 0], 2**1.5)]
)
def test_effective_rank_of_a_known_spectrum(spectrum, rank):
    """Samples that are whitened exactly, then given the spectrum and turned."""
    x = torch.randn(500, 4, dtype=torch.float64)
    x -= x.mean(0)
    white = torch.linalg.qr(x).Q * math.sqrt(499)
    turn = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64)).Q
    spread = Covariance(dim=1).of(white * torch.tensor(spectrum, dtype=torch.float64).sqrt() @ turn)
    eigenvalues = torch.linalg.eigvalsh(spread.covariance).clamp(min=0).sort(descending=True).values
    torch.testing.assert_close(eigenvalues, torch.tensor(spectrum, dtype=torch.float64), rtol=1e-9, atol=1e-9)
    assert spread.effective_rank == pytest.approx(rank, rel=1e-6)


def test_layers_that_are_too_wide_for_a_covariance_are_refused():
    assert Covariance(max_units=64).of(torch.randn(10, 64)).covariance.shape == (64, 64)
    with pytest.raises(BudgetError, match=r"65 units .*max_units=65"):
        Covariance(max_units=64).of(torch.randn(10, 65))
    with pytest.raises(BudgetError, match="4097 units"):
        Covariance().of(torch.randn(2, 4097))
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 4))
    with pytest.warns(UserWarning, match="could not collect 'covariance' for the output of '0'.*max_units=5"):
        with measure(model, stats=["moments", Covariance(max_units=4)]) as stats:
            model(torch.ones(2, 3))
    assert stats["0"].count == 10 and stats["1"]["covariance"].covariance.shape == (4, 4)
    with pytest.raises(NotRecordedError, match="BudgetError"):
        stats["0"]["covariance"]


# --- the largest values


def largest(tensors, k):
    """All values with their addresses, largest first; of equal ones, any order."""
    found = []
    for number, x in enumerate(tensors):
        for place, value in enumerate(x.reshape(-1).double().tolist()):
            index = tuple(int(i) for i in torch.unravel_index(torch.tensor(place), x.shape))
            found.append((value, number, index))
    return sorted((entry for entry in found if not math.isnan(entry[0])), key=lambda entry: -entry[0])[:k]


def check_largest(found, tensors, k):
    expected = largest(tensors, k)
    assert [entry.value for entry in found] == [value for value, *_ in expected]
    for entry in found:
        assert float(tensors[entry.tensor][entry.index]) == entry.value
    assert len({(entry.tensor, entry.index) for entry in found}) == len(found)


@pytest.mark.parametrize("k", [1, 3, 10, 100])
@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 4), (2, 3, 4, 5), (1,) * 8, (2, 1, 2, 1, 2, 1, 2, 2)])
def test_the_largest_values_and_where_they_were(k, shape):
    tensors = [torch.randn(shape) for _ in range(5)]
    check_largest(TopK(k).of(*tensors), tensors, k)


def test_tensors_of_different_shapes_and_layouts():
    tensors = [torch.randn(3, 4).T, torch.randn(5, 5, 5)[::2, 1:, ::3], torch.randn(6)[:, None].expand(6, 2)]
    check_largest(TopK(8).of(*tensors), tensors, 8)
    tensors.append(torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last))
    check_largest(TopK(30).of(*tensors), tensors, 30)


def test_nan_is_left_out_of_the_largest_and_infinity_is_not():
    x = torch.tensor([math.nan, 1.0, math.inf, math.nan, -3.0])
    found = TopK(10).of(x, torch.full((4,), math.nan))
    assert [(entry.value, entry.index) for entry in found] == [(math.inf, (2,)), (1.0, (1,)), (-3.0, (4,))]
    assert TopK(2).of(torch.full((3,), math.nan)) == []
    assert TopK(2).of(torch.empty(0, 4), torch.ones(1))[0].tensor == 1


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int64, torch.bool, torch.float16, torch.bfloat16])
def test_the_largest_of_other_dtypes(dtype):
    tensors = [(torch.randn(4, 5) * 10).to(dtype) for _ in range(3)]
    check_largest(TopK(7).of(*tensors), tensors, 7)


def test_whole_numbers_beyond_single_precision_keep_their_order():
    x = torch.tensor([2**40, 2**40 + 1, 2**40 - 1, -5])
    assert [entry.index for entry in TopK(3).of(x)] == [(1,), (0,), (2,)]


def test_the_largest_merge_in_the_order_of_their_tensors():
    tensors = [torch.randn(4) for _ in range(9)]
    stat, states = TopK(5), []
    for part in (tensors[:2], tensors[2:3], [], tensors[3:]):
        states.append(stat.empty(tensors[0]))
        for x in part:
            stat.update(states[-1], x)
    whole = stat.merge(torch.stack(states))
    check_largest(stat.compute(whole), tensors, 5)
    in_pairs = stat.merge(torch.stack([stat.merge(torch.stack(states[:2])), stat.merge(torch.stack(states[2:]))]))
    assert stat.compute(in_pairs) == stat.compute(whole)
    others = stat.merge(torch.stack(states[::-1]))
    check_largest(stat.compute(others), tensors[3:] + tensors[2:3] + tensors[:2], 5)


def test_more_dimensions_than_an_address_has():
    x = torch.randn((2,) * 10)
    [found] = TopK(1).of(x)
    assert found.value == float(x.max()) and len(found.index) == 8
    assert float(x.flatten(7)[found.index]) == found.value


@pytest.mark.parametrize("k", [0, -1, 2.0, True, "3"])
def test_a_number_of_values_that_makes_no_sense(k):
    with pytest.raises(ValueError, match="k must be a whole number"):
        TopK(k)


def test_the_largest_of_a_model_say_in_which_batch_they_were():
    model = nn.Sequential(nn.Linear(3, 4))
    with measure(model, stats=[TopK(3), "moments"]) as stats, capture(model, keep=None) as acts:
        for _ in range(6):
            model(torch.randn(5, 3))
    check_largest(stats["0"]["topk"], acts["0"].outputs, 3)


# --- one's own


class NearZero(Stat):
    name, width = "near_zero", 2

    def update(self, state, x):
        near = (x.abs() < 0.1).sum()
        state += torch.stack([near, near.new_tensor(x.numel())])

    def compute(self, state):
        return float(state[0] / state[1])


class Range(Stat):
    """Its states are not added."""

    name, additive = "range", False

    def empty(self, x):
        return torch.tensor([math.inf, -math.inf], dtype=torch.float64)

    def update(self, state, x):
        state.copy_(self.merge(torch.stack([state, torch.stack([x.min(), x.max()]).double()])))

    def merge(self, states):
        return torch.stack([states[..., 0].amin(0), states[..., 1].amax(0)], -1)

    def compute(self, state):
        return (state[1] - state[0]).item()


def test_a_statistic_of_ones_own():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    options = {"param_grads": True, "optimizer": optimizer, "stats": (NearZero(), Range(), "moments")}
    with measure(model, **options) as stats, capture(model, keep=None) as acts:
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(6, 3)).sum().backward()
            optimizer.step()
        window = stats.snapshot()
        stats.reset()
        model(torch.randn(6, 3))
    outputs = torch.cat(acts["1"].outputs[:5])
    assert window["1"]["near_zero"] == pytest.approx(float((outputs.abs() < 0.1).double().mean()))
    assert window["1"]["range"] == pytest.approx(float(outputs.max() - outputs.min()))
    assert stats["1"]["range"] == pytest.approx(float(acts["1"].outputs[5].max() - acts["1"].outputs[5].min()))
    for name in ("0.weight", "0.bias"):
        reading = window[name, "param_grad"]
        assert reading["range"] == pytest.approx(reading.max - reading.min)
    lines = [line for line in window.table("list") if line["path"] == "1"]
    assert lines[0]["range"] == window["1"]["range"] and lines[0]["mean"] == window["1"].mean


def test_statistics_are_asked_for_by_name_or_as_objects():
    reduce = Reduce("moments", TopK(2))
    reduce.cell(Site("x"), None).update(torch.tensor([1.0, 4.0]))
    reading = reduce.snapshot()["x"]
    assert list(reading) == ["moments", "topk"] and len(reading) == 2 and reading["topk"][0].value == 4.0
    with pytest.raises(ValueError, match="no statistic called 'momentum'.*moments, histogram"):
        Reduce("momentum")
    with pytest.raises(TypeError, match="Stat objects such as"):
        Reduce(Moments)
    with pytest.raises(ValueError, match="same name"):
        Reduce("topk", TopK(3))


class Breaks(NearZero):
    """Raises at its third tensor."""

    name, seen = "breaks", 0

    def update(self, state, x):
        self.seen += 1
        if self.seen > 2:
            raise ZeroDivisionError("no more")
        super().update(state, x)


def test_a_statistic_that_raises_is_given_up_and_stops_no_training():
    model = nn.Sequential(nn.Linear(3, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.warns(UserWarning, match="could not collect 'breaks' for .*: ZeroDivisionError: no more"):
        with measure(model, optimizer=optimizer, param_grads=True, stats=("moments", Breaks())) as stats:
            for _ in range(5):
                model(torch.randn(6, 3)).sum().backward()
                optimizer.step()
    assert stats["0"].count == 120 and stats["0.weight", "param_grad"].count == 60
    for place in (("0", "output"), ("0.weight", "param_grad"), ("0.bias", "step_grad")):
        with pytest.raises(NotRecordedError, match="'breaks' of .* raised ZeroDivisionError"):
            stats[place]["breaks"]
    assert all("breaks" not in line for line in stats.table("list"))
