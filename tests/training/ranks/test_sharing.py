"""Shares of ranks: however they are merged, the result is that of all values at once; bytes come back as they were."""

import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchhook import Reduce, Site
from torchhook.rules.entry import Entry
from torchhook.stats import Channels, Moments
from torchhook.training.ranks.seat import Seat, checksum
from torchhook.training.ranks.share import Share, scaled
from torchhook.training.ranks.tree import above, below, parent_of
from torchhook.training.ranks.wire import Wire


def entry(values, step=3, losses=None, local=None):
    reduce = Reduce("moments", "channels")
    for path, x in values.items():
        reduce.cell(Site(path), torch.nn.Linear(1, 1)).update(x)
    return Entry(step, 0.0, reduce.snapshot(), losses=losses or {step: 1.0}, local=local or {})


def parts(data):
    return [torch.tensor(part, dtype=torch.float64).reshape(-1, 2) for part in data]


NUMBERS = st.lists(st.integers(-8, 8), min_size=2, max_size=12).filter(lambda values: len(values) % 2 == 0)


@settings(max_examples=60, deadline=None)
@given(st.lists(NUMBERS, min_size=2, max_size=6), st.randoms())
def test_any_order_of_merging_gives_what_all_values_give(data, random):
    shares = [Share.of(entry({"fc": x}), Seat(rank, team=(rank,))) for rank, x in enumerate(parts(data))]
    random.shuffle(shares)
    while len(shares) > 1:
        first = shares.pop(0)
        first.merge(shares.pop(random.randrange(len(shares))), {})
        shares.append(first)
    found = shares[0].snapshot(entry({}).snapshot, 1)["fc"]
    whole = torch.cat(parts(data))
    expected = Moments().of(whole)
    assert (found.count, found.min, found.max) == (expected.count, expected.min, expected.max)
    assert math.isclose(found.mean, expected.mean, abs_tol=1e-12) and f"of {len(data)} ranks" in found.note
    torch.testing.assert_close(found["channels"].mean, Channels().of(whole).mean)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.booleans(), min_size=2, max_size=5), st.randoms())
def test_copies_within_a_team_count_once_and_parts_are_joined(is_copied, random):
    """Sites that all ranks of a team have alike, beside sites of which each has other units."""
    team = tuple(range(len(is_copied)))
    whole, mine = torch.arange(8.0).reshape(4, 2), [torch.randn(4, 2) for _ in team]
    shares = [
        Share.of(entry({"norm": whole, "column": x}), Seat(rank, team=team)) for rank, x in zip(team, mine, strict=True)
    ]
    random.shuffle(shares)
    first, *others = shares
    for other in others:
        first.merge(other, {0: len(team)})
    found = first.snapshot(entry({}).snapshot, 1)
    assert found["norm"].count == 8 and found["column"].count == 8 * len(team)
    assert len(found["column"]["channels"].mean) == 2 * len(team) and len(found["norm"]["channels"].mean) == 2


@settings(max_examples=40, deadline=None)
@given(st.dictionaries(st.sampled_from(["a", "b", "c.d", ""]), NUMBERS, max_size=3), st.integers(0, 5), st.booleans())
def test_bytes_come_back_as_they_were(values, rank, is_team):
    seat = Seat(rank, team=(rank, rank + 1) if is_team else (rank,), stage=rank % 2)
    sums = {("param", "w"): -(2**62) + rank}
    share = Share.of(entry({path: parts([x])[0] for path, x in values.items()}, local={"sums": sums}), seat)
    out, back = Wire(), Wire()
    for _ in range(2):  # the second time, the layout is not sent
        data = out.packed(share)
        again = back.unpacked(data)
        assert (again.step, again.facts, again.losses, again.places) == (
            share.step,
            share.facts,
            share.losses,
            share.places,
        )
        assert again.votes == share.votes and again.open.keys() == share.open.keys()
        for key, (cells, states) in share.done.items():
            assert again.done[key][0] == cells and torch.equal(again.done[key][1], states)
    assert len(out.packed(share)) < len(Wire().packed(share))


def test_layouts_that_vary_all_the_time_are_not_all_kept():
    out, back = Wire(), Wire()
    for number in [*range(100), 0, 99, 98, 0]:
        share = Share.of(entry({f"layer{number}": torch.ones(4, 2)}), Seat(0, team=(0,)))
        again = back.unpacked(out.packed(share))
        assert again.places == share.places
        assert again.tables[0][0] == share.tables[0][0] and torch.equal(again.tables[0][1], share.tables[0][1])
    assert out._known.keys() == back._known.keys() and len(out._known) < 50


def test_which_ranks_have_tables_may_vary_under_the_same_layout():
    share = Share.of(entry({"fc": torch.ones(4, 2)}), Seat(0, team=(0,)))
    [table] = share.tables.values()
    out, back, sizes = Wire(), Wire(), []
    for rank in range(3):
        share.tables = {rank: table}
        data = out.packed(share)
        sizes.append(len(data))
        assert list(back.unpacked(data).tables) == [rank]
    assert sizes[1] == sizes[2] < sizes[0]


@pytest.mark.parametrize("norm", [1 / 3, math.nan, math.inf])
def test_the_norm_of_a_parameter_is_written_as_it_was_measured(norm):
    reduce = Reduce("moments")
    reduce.cell(Site("fc.weight", "param_norm"), torch.nn.Linear(1, 1)).update(torch.tensor([norm]).double())
    own = Entry(0, 0.0, reduce.snapshot())
    found = Share.of(own, Seat(0, team=(0,))).snapshot(own.snapshot, 1)["fc.weight", "param_norm"]["moments"]
    expected = own.snapshot["fc.weight", "param_norm"]["moments"]
    assert (found.nan, found.posinf) == (expected.nan, expected.posinf) == (math.isnan(norm), norm == math.inf)
    assert found.mean == expected.mean or (math.isnan(found.mean) and math.isnan(expected.mean))


@pytest.mark.parametrize("data", [b"", b"x" * 30, Wire().packed(Share(1))[:-3] + b"\xff\xff\xff", b"\xff" * 200])
def test_what_is_no_share_is_refused(data):
    with pytest.raises(ValueError):
        Wire().unpacked(data + b"")
    whole = Wire().packed(Share.of(entry({"fc": torch.ones(4, 2)}), Seat(0, team=(0,))))
    with pytest.raises(ValueError):
        Wire().unpacked(whole[: len(whole) // 2])


def test_copies_of_parameters_that_part_are_seen_with_their_ranks():
    shares = []
    for rank in range(4):
        share = Share(0, {rank: {}})
        share._vote([(0, "w", "param"), (0, "b", "param")], [5, 7 if rank == 2 else 6], Seat(rank))
        shares.append(share)
    first, *others = shares
    for other in others:
        first.merge(other, {})
    [(key, values)] = list(first.apart())
    assert key[1:3] == ("b", "param") and values == ((6, 0, 3), (7, 2, 1))


def test_moments_are_scaled_as_values_are():
    x = torch.randn(100, dtype=torch.float64)
    state, other = Moments().empty(x), Moments().empty(x)
    Moments().update(state, x)
    Moments().update(other, x / 4)
    torch.testing.assert_close(scaled(Moments().settle(state[None])[0], 0.25), Moments().settle(other[None])[0])


@given(st.integers(1, 300))
def test_the_tree_reaches_every_rank(world):
    assert sorted(rank for parent in range(world) for rank in below(parent, world)) == list(range(1, world))
    for rank in range(1, world):
        assert rank in below(parent_of(rank), world) and above(rank)[0] == parent_of(rank)
        assert all(other < rank for other in above(rank))


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.bool, torch.complex64]
)
def test_a_checksum_of_any_dtype_sees_one_bit(dtype):
    x = torch.ones(7, dtype=dtype)
    y = x.clone()
    y[3] = 0
    assert checksum(x) == checksum(x.clone()) and checksum(x) != checksum(y)
    assert checksum(torch.tensor([1.0, 2.0]), ordered=True) != checksum(torch.tensor([2.0, 1.0]), ordered=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_the_checksum_of_equal_values_is_the_same_wherever_they_lie_in_memory(dtype):
    """A shard may begin anywhere in its storage, and have a number of values that is odd."""
    x = torch.arange(13).to(dtype)
    for offset in range(9):
        inside = torch.zeros(40, dtype=dtype)[offset : offset + 13].copy_(x)
        assert checksum(inside) == checksum(x) != checksum(x.flip(0) + 1)


NO_COLLECTIVES = """
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchhook.rules.rest import at_rest
from torchhook.training.ranks.probe import checksums
from torchhook.training.ranks.seat import seat_of

distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
with torch.no_grad():
    model = parallelize_module(net, mesh, plan)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
with CommDebugMode() as seen:
    rest, seat, sums = at_rest(model, optimizer), seat_of(model, 1), checksums(model, optimizer)()
print(seen.get_total_counts(), seat.team, seat.lead, sorted(seat.shards.items()))
print(rest.parameters["2.weight"].weights, len(sums))
"""


def test_a_look_at_a_sharded_model_waits_for_no_rank():
    """Not one collective: a rank that is watched alone would hang in it."""
    done = subprocess.run(
        [sys.executable, "-c", NO_COLLECTIVES], capture_output=True, text=True, timeout=200, check=False
    )
    expected = "0 (0, 1) 0 [('0.bias', '0:1'), ('0.weight', '0:1'), ('2.weight', '0:1')]"
    assert done.stdout.split("\n")[:2] == [expected, "6 4"], done.stderr[-2000:]


def test_a_message_about_sharded_parameters_does_not_grow_with_the_ranks():
    """Of parts that only one rank has, the squares of the norms are added up on the way, exactly."""
    norms = [torch.rand(50, dtype=torch.float64) for _ in range(16)]
    shares = []
    for rank, known in enumerate(norms):
        reduce = Reduce("moments")
        for number, norm in enumerate(known):
            reduce.cell(Site(f"fc{number}.weight", "param_norm"), None).update(norm[None])
            reduce.cell(Site(f"fc{number}.weight", "param_grad"), None).update(torch.full((3,), float(rank)))
        paths = [f"fc{number}.weight" for number in range(50)]
        seat = Seat(rank, team=(rank,), shards=dict.fromkeys(paths, f"0:{rank}"), sole=frozenset(paths))
        sums = {("param", path): rank for path in paths}
        shares.append(Share.of(Entry(0, 0.0, reduce.snapshot(), local={"sums": sums}), seat))
    alone = len(Wire().packed(shares[0]))
    first, *others = shares
    for other in others:
        first.merge(Wire().unpacked(Wire().packed(other)), {})
    assert len(Wire().packed(first)) < alone + 3000 and list(first.apart()) == []
    found = first.snapshot(entry({}).snapshot, 1)
    expected = torch.stack(norms).square().sum(0).sqrt()
    assert [found[f"fc{n}.weight", "param_norm"].mean for n in range(50)] == pytest.approx(expected.tolist(), rel=1e-14)
    assert found["fc7.weight", "param_grad"].count == 48 and found["fc7.weight", "param_grad"].max == 15
