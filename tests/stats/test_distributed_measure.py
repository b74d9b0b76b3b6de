"""Two real ranks that measure: together they say what one process would that saw the data of both."""

import math
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from captures.test_distributed import Ranks, batch, loss, net
from torchhook import NotRecordedError, SessionError, Stat, TopK, distributed, measure

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="needs torch.distributed with gloo"
)

SIX = ("moments", "histogram", "quantiles", "channels", "covariance", "topk")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    ranks = Ranks(tmp_path_factory.mktemp("measuring_ranks"))
    yield ranks
    ranks.stop()


class Range(Stat):
    """One of one's own, whose states are not added."""

    name, additive = "range", False

    def empty(self, x):
        return torch.tensor([math.inf, -math.inf], dtype=torch.float64)

    def update(self, state, x):
        state.copy_(self.merge(torch.stack([state, torch.stack([x.min(), x.max()]).double()])))

    def merge(self, states):
        return torch.stack([states[..., 0].amin(0), states[..., 1].amax(0)], -1)

    def compute(self, state):
        return (state[1] - state[0]).item()


class Counting:
    """Counts the collectives of a block."""

    NAMES = ("all_reduce", "all_gather", "all_gather_object", "broadcast", "broadcast_object_list", "barrier", "gather")

    def __enter__(self):
        self.calls, self.real = [], {name: getattr(dist, name) for name in self.NAMES}
        for name, real in self.real.items():
            setattr(dist, name, self._counted(name, real))
        return self

    def _counted(self, name, real):
        def call(*args, **kwargs):
            self.calls.append(name)
            return real(*args, **kwargs)

        return call

    def __exit__(self, *_):
        for name, real in self.real.items():
            setattr(dist, name, real)


def run(numbers, **options):
    """What is measured of some batches."""
    model = net()
    options = {"inputs": True, "grads": True, "params": True, "param_grads": True, "stats": SIX, **options}
    with measure(model, on_silent="ignore", **options) as stats:
        for number in numbers:
            model.zero_grad()
            loss(model(batch(number))).backward()
    return stats


def equal(merged, expected, places=None):
    """The same numbers, exactly where they are counts."""
    places = list(expected) if places is None else places
    assert list(merged) == places and places
    for place in places:
        one, other = merged[place], expected[place]
        assert list(one) == list(other) and one.module_class == other.module_class
        for name in ("count", "nonfinite", "min", "max", "zero_fraction"):
            if "moments" in one:
                assert getattr(one, name) == getattr(other, name), (place, name)
        states, others = one.states(), other.states()
        assert list(states) == list(others)
        if "topk" in states:
            largest, others_largest = one["topk"], other["topk"]
            assert [entry.value for entry in largest] == [entry.value for entry in others_largest], place
            assert states["topk"][0, 0] == others["topk"][0, 0]  # how many tensors there were
            if place[1] != "param":  # which is the same in each, and any of equal ones may be told
                assert largest == others_largest, place
        for key, state in states.items():
            if key == "topk":
                continue
            # Units are summed in single precision, batch by batch: other batches are rounded otherwise.
            close = 0 if key in ("bins", "range") else 1e-6 if key == "channels" else 1e-9
            tolerance = {"rtol": close, "atol": close}
            torch.testing.assert_close(state, others[key], **tolerance, msg=lambda m, at=(place, key): f"{at}: {m}")


@pytest.mark.matrix("several ranks", "`distributed.merge`: the same result as one process with all the data")
def test_together_they_say_what_one_process_would(ranks):
    ranks(check_together)


def check_together(rank):
    mine, both = run(range(3 * rank, 3 * rank + 3)), run(range(6))
    merged = distributed.merge(mine)
    equal(merged, both)
    assert len(merged) == 3 * 3 + 4 * 2
    for place in merged:
        assert merged[place].count == 2 * mine[place].count
        assert merged[place]["quantiles"] == both[place]["quantiles"]
        torch.testing.assert_close(merged[place]["covariance"].covariance, both[place]["covariance"].covariance)
        torch.testing.assert_close(tuple(merged[place]["channels"]), tuple(both[place]["channels"]), equal_nan=True)
    assert merged["fc1"].note == f"{mine['fc1'].note}; of all 2 ranks"
    assert {entry.tensor // 3 for entry in merged["fc2"]["topk"]} <= {0, 1}
    assert [line["path"] for line in merged.table("list")][:1] == ["fc1"] and "fc1" in repr(merged)


@pytest.mark.parametrize("stat", [*SIX, Range()], ids=[*SIX, "range"])
def test_each_statistic_alone(ranks, stat):
    ranks(check_alone, stat)


def check_alone(rank, stat):
    options = {"stats": stat, "params": False, "param_grads": False}
    mine, both = run(range(4)[2 * rank : 2 * rank + 2], **options), run(range(4), **options)
    equal(distributed.merge(mine), both)


@pytest.mark.parametrize("silent", [0, 1])
def test_a_rank_that_saw_nothing(ranks, silent):
    ranks(check_a_rank_that_saw_nothing, silent)


def check_a_rank_that_saw_nothing(rank, silent):
    mine, one = run(() if rank == silent else (7, 8)), run((7, 8))
    assert len(mine) == (0 if rank == silent else len(one))
    with Counting() as counting:
        merged = distributed.merge(mine)
    equal(merged, one)
    assert 0 < len(counting.calls) <= 3 and set(counting.calls) == {"all_reduce"}


def test_no_rank_saw_anything(ranks):
    ranks(check_that_nobody_saw_anything)


def check_that_nobody_saw_anything(rank):
    merged = distributed.merge(run(()))
    assert len(merged) == 0 and merged.table("list") == []


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(8, 3), nn.Linear(8, 5), nn.Linear(8, 2)

    def forward(self, x, names):
        return [getattr(self, name)(x) for name in names]


def branches(calls, **options):
    model = Branches()
    with measure(model, on_silent="ignore", **options) as stats:
        for number, names in calls:
            model(batch(number), names)
    return stats


def test_ranks_with_other_sites(ranks):
    ranks(check_other_sites)


def check_other_sites(rank):
    calls = [[(0, "c"), (1, "ac")], [(2, "bc"), (3, "b")]]
    both = branches(calls[0] + calls[1], stats=SIX)
    with Counting() as counting:
        merged = distributed.merge(branches(calls[rank], stats=SIX))
    equal(merged, both, [("c", "output"), ("a", "output"), ("b", "output")])
    assert 2 <= len(counting.calls) <= 3 and set(counting.calls) == {"all_reduce"}
    assert merged["a"].count == 18 and merged["b"].count == 60 and merged["c"].count == 36


def test_how_much_they_talk(ranks):
    ranks(check_talk)


def check_talk(rank):
    mine = run(range(3 * rank, 3 * rank + 3))
    with Counting() as counting:
        distributed.merge(mine)
    assert counting.calls == ["all_reduce", "all_reduce"]


def test_windows_are_merged_one_by_one(ranks):
    ranks(check_windows)


def check_windows(rank):
    model, windows = net(), []
    with measure(model, "fc2") as stats:
        for window in range(3):
            model(batch(2 * window + rank))
            windows.append(stats.snapshot())
            stats.reset()
        live = distributed.merge(stats)
    expected = [run((2 * window, 2 * window + 1), stats="moments")["fc2"] for window in range(3)]
    assert len(live) == 0
    for mine, one in zip(windows, expected, strict=True):
        before = mine["fc2"].count
        merged = distributed.merge(mine)
        assert merged["fc2"].count == one.count == 2 * before == 2 * mine["fc2"].count
        assert merged["fc2"].mean == pytest.approx(one.mean, rel=1e-9)
        assert merged["fc2"].std == pytest.approx(one.std, rel=1e-9)


def test_training_together(ranks):
    ranks(check_training)


def check_training(rank):
    model = DistributedDataParallel(net())
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    with measure(model, optimizer=optimizer, params=True, param_grads=True, updates=True) as stats:
        for step in range(4):
            optimizer.zero_grad()
            with model.no_sync():
                loss(model(batch(4 * step + rank))).backward()
            loss(model(batch(4 * step + 2 + rank))).backward()
            optimizer.step()
    mine, merged = stats.snapshot(), distributed.merge(stats)
    assert list(merged) == list(mine)
    for path in ("fc1.weight", "fc2.bias"):
        for port in ("param", "step_grad", "update", "update_ratio"):  # the same on both ranks
            one, both = mine[path, port], merged[path, port]
            assert both.count == 2 * one.count and both.mean == pytest.approx(one.mean, rel=1e-6, abs=1e-9)
            assert both.note == f"{one.note}; of all 2 ranks"
    assert merged["fc1.weight", "update_ratio"].count == 8 and merged["fc1"].count == 2 * mine["fc1"].count


def test_other_names_are_kept(ranks):
    ranks(check_names)


def check_names(rank):
    model = nn.Sequential(nn.Linear(8, 8))
    model.add_module("1", model[0])
    with measure(model) as stats:
        model(batch(rank))
    assert distributed.merge(stats)["1"].count == 2 * stats["1"].count == 192


def test_a_group_of_its_own(ranks):
    ranks(check_group)


def check_group(rank):
    groups = [dist.new_group([0]), dist.new_group([1])]
    mine = run((rank,), stats="moments")
    merged = distributed.merge(mine, groups[rank])
    equal(merged, mine)
    assert merged["fc1"].note.endswith("; of all 1 ranks")


DIFFERENT = {
    "more": (("moments",), ("moments", "histogram")),
    "others": (("moments",), ("histogram",)),
    "of one state": (("histogram",), ("quantiles",)),
    "sizes": ((TopK(3),), (TopK(5),)),
    "one's own": (("moments",), ("moments", Range())),
}


@pytest.mark.parametrize("different", DIFFERENT.values(), ids=DIFFERENT.keys())
def test_different_statistics_raise_on_both_ranks(ranks, different):
    ranks(check_different, different, timeout=30)


def check_different(rank, different):
    stats = branches([(rank, "ab")], stats=different[rank])
    with pytest.raises(SessionError, match="same|different"):
        distributed.merge(stats)


@pytest.mark.parametrize("different", DIFFERENT.values(), ids=DIFFERENT.keys())
def test_different_statistics_of_different_sites_raise_on_both_ranks(ranks, different):
    ranks(check_different_sites, different, timeout=30)


def check_different_sites(rank, different):
    stats = branches([(rank, "ab"[rank])], stats=different[rank])
    with pytest.raises(SessionError, match="same|different"):
        distributed.merge(stats)


def test_a_statistic_that_one_rank_gave_up_spoils_no_other(ranks):
    """A layer that had more units on one of them, say."""
    ranks(check_given_up, timeout=30)


def check_given_up(rank):
    model = nn.Sequential(nn.Identity())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with measure(model, stats=("moments", "channels")) as stats:
            model(torch.ones(2, 4))
            model(torch.ones(2, 5 if rank else 4))
    assert ("channels" in stats["0"]) == (rank == 0)
    merged = distributed.merge(stats)
    assert merged["0"].count == 8 + 8 + 8 + 10
    with pytest.raises(NotRecordedError, match="channels"):
        merged["0"]["channels"]


# --- which needs no second process


def test_outside_of_a_process_group_it_is_a_plain_snapshot():
    stats = run((1,), stats="moments")
    merged = distributed.merge(stats)
    assert list(merged) == list(stats) and merged["fc1"].count == stats["fc1"].count
    assert distributed.merge(merged) is merged


def test_only_what_was_measured_can_be_merged():
    for thing in (None, {"fc1": 3}, net()):
        with pytest.raises(TypeError, match="what measure.. returned"):
            distributed.merge(thing)
    with pytest.raises(SessionError, match="with block"):
        distributed.merge(measure(net()))
