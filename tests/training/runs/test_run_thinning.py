"""A run stays below its size, however long the training, and keeps what matters."""

import sqlite3
import warnings
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from run_samples import entry_of, snapshot_at, states_of

from torchhook import Finding, Report
from torchhook.stats.downsample import measured_at, spread, thinned
from torchhook.stats.reading import Snapshot
from torchhook.training.logs import Entry
from torchhook.training.runs import Run, RunLog
from torchhook.training.runs.schema import FILE
from torchhook.training.runs.writer import _MOST_SAMPLES

MANY = [f"layer{number}" for number in range(60)]
steps_lists = st.sets(st.integers(0, 10**7), min_size=1, max_size=300).map(sorted)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "run"


@pytest.fixture(scope="module")
def snapshots():
    return [snapshot_at(number, sites=MANY) for number in range(8)]


def size_of(folder):
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def test_it_stays_below_its_size_and_keeps_the_first_the_newest_and_the_named(folder, snapshots):
    log = RunLog(folder, max_bytes=2**20)
    log.begin({"model": "Net"})
    largest, counts = 0, []
    for step in range(0, 6000, 5):
        log.write(entry_of(step, snapshots[step % 8]))
        if step == 500:
            for named in (52, 100, 3000):
                log.found(Finding("TH201", "error", "x", site=str(named), step=named))
        largest = max(largest, size_of(folder))
        if step % 500 == 0:
            with Run(folder) as run:
                counts.append(len(run.steps))
    log.end(Report(), "ended")
    assert 0.4 * 2**20 < size_of(folder) <= largest <= 2**20
    assert counts[-1] < 1200 / 2 and max(counts) < 3 * counts[-1]  # it was thinned, and again
    with Run(folder) as run:
        steps = run.steps
        assert steps[0] == 0 and {55, 100, 3000} <= set(steps)
        quarter = steps[-(len(steps) // 4) :]
        assert quarter == list(range(quarter[0], 6000, 5))  # all of them
        tenths = Counter(step // 600 for step in steps)
        assert len(tenths) == 10 and min(tenths.values()) > 1  # the beginning is not forgotten
        for step in (steps[0], steps[len(steps) // 2], steps[-1]):
            assert states_of(run.window(step)) == states_of(snapshots[step % 8])
        assert len(run.losses) == 1200
        assert run.series("mean").steps == steps and not run.series("mean").values.isnan().any()


def test_even_steps_that_findings_name_go_before_the_size_does(folder, snapshots):
    log = RunLog(folder, max_bytes=2**20)
    log.begin({})
    for step in range(400):
        log.write(entry_of(step, snapshots[step % 8]))
        log.found(Finding("TH201", "error", "x", site=str(step), step=step))
        assert size_of(folder) <= 2**20
    with Run(folder) as run:
        assert 20 < len(run.steps) < 350 and run.steps[0] == 0 and run.steps[-1] == 399


def test_what_blobs_are_of_is_forgotten_with_them(folder, snapshots):
    log = RunLog(folder, max_bytes=2**20)
    log.begin({})
    for step in range(700):  # other places in every step, as of experts that are chosen
        rows = list(snapshots[step % 8].rows.items())[step % 61 :]
        log.write(entry_of(step, Snapshot(dict(rows[: 40 + step % 7]))))
    with Run(folder) as run:
        assert len(run.steps) < 700
        for step in run.steps[::20]:
            was = snapshots[step % 8]
            places = list(was)[step % 61 :][: 40 + step % 7]
            assert states_of(run.window(step)) == {place: states_of(was)[place] for place in places}
    db = sqlite3.connect(folder / FILE)
    (layouts,), (used,) = db.execute("SELECT count(*) FROM layouts UNION ALL SELECT count(DISTINCT layout) FROM states")
    db.close()
    assert layouts == used


def test_losses_are_thinned_too(folder):
    log = RunLog(folder, max_bytes=2**20)
    log.begin({})
    for step in range(0, 20_000, 100):
        log.write(Entry(step + 99, 0.0, Snapshot({}), losses={step + one: 0.5 for one in range(100)}))
    with Run(folder) as run:
        losses = list(run.losses)
        assert 1000 < len(losses) <= 2**20 * 6 // 8 // 256 + 100
        assert losses[0] == 0 and losses[-500:] == list(range(19_500, 20_000))


def test_samples_are_few_and_files_go_with_them(folder):
    log = RunLog(folder)
    log.begin({})
    for step in range(120):
        maps = {"conv": torch.rand(2, 4, 4), "<b>": torch.full((1, 3, 3), torch.nan), "vector": torch.rand(3)}
        log.write(Entry(step, 0.0, Snapshot({}), maps=maps))
    with Run(folder) as run:
        samples = run.samples
        assert 60 < len(samples) <= _MOST_SAMPLES
        assert {sample.file for sample in samples} == set((folder / "samples").iterdir())
        assert (samples[0].step, samples[-1].step) == (0, 119) and {sample.path for sample in samples} == {
            "conv",
            "<b>",
        }
        assert all(0 <= sample.low < sample.high <= 1 for sample in samples if sample.path == "conv")
        assert run.size >= size_of(folder / "samples")


def test_samples_have_their_share_of_the_size(folder):
    log = RunLog(folder, max_bytes=2**20)
    log.begin({})
    for step in range(30):
        log.write(Entry(step, 0.0, Snapshot({}), maps={"conv": torch.rand(4, 64, 64)}))
        assert size_of(folder / "samples") <= 2**20 // 8
    with Run(folder) as run:
        assert run.samples[0].step == 0 and run.samples[-1].step == 29
        assert all(sample.file.exists() for sample in run.samples)


def test_a_sample_named_by_a_stranger_leads_nowhere(folder):
    log = RunLog(folder)
    log.begin({})
    log.write(Entry(0, 0.0, Snapshot({}), maps={"conv": torch.rand(2, 4, 4)}))
    db = sqlite3.connect(folder / FILE)
    db.execute("UPDATE samples SET file = '../../../etc/passwd'")
    db.commit()
    db.close()
    with Run(folder) as run:
        assert run.samples[0].file == folder / "samples" / "passwd"


def test_what_is_too_large_for_a_window_is_left_out_with_a_warning(folder):
    log = RunLog(folder, max_bytes=2**20)
    log.begin({})
    large = snapshot_at(0, stats=("moments", "channels"), size=5000)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        log.write(Entry(0, 0.0, large))
        log.write(Entry(1, 0.0, large))
    (warning,) = caught
    assert "'channels' of 3 places takes" in str(warning.message) and "raise max_bytes" in str(warning.message)
    with Run(folder) as run:
        assert list(run.window(1)["head"]) == ["moments"]


def test_freed_pages_are_used_again(folder, snapshots):
    log = RunLog(folder, max_bytes=2**20)
    log.begin({})
    sizes = []
    for step in range(900):
        log.write(entry_of(step, snapshots[step % 8]))
        sizes.append((folder / FILE).stat().st_size)
    assert sizes[-1] == sizes[len(sizes) // 2]


@given(steps_lists, st.integers(1, 100))
def test_a_spread_is_small_has_the_first_and_lies_evenly(steps, most):
    chosen = spread(steps, most)
    assert chosen[0] == steps[0] and len(chosen) <= most and chosen == sorted(set(chosen)) and set(chosen) <= set(steps)
    assert chosen == steps or len(steps) > most


@given(st.integers(2, 500), st.integers(1, 40), st.integers(2, 100))
def test_a_spread_of_regular_steps_takes_at_least_a_quarter_of_what_it_may(number, every, most):
    steps = range(0, number * every, every)
    assert len(spread(steps, most)) >= min(number, most) / 4


@given(steps_lists, st.sets(st.integers(0, 10**7), max_size=5))
def test_thinning_keeps_what_it_must(steps, named):
    kept = measured_at(steps, named)
    gone = thinned(steps, kept)
    left = [step for step in steps if step not in set(gone)]
    assert left[0] == steps[0] and kept <= set(left) and set(gone) <= set(steps)
    assert left[-(len(steps) // 4 + 1) :][-(len(steps) // 4) :] == steps[-(len(steps) // 4) :] or len(steps) < 4
    if len(steps) > 3 and not kept:
        assert gone


def test_the_beginning_of_a_long_training_is_not_forgotten():
    steps = []
    for step in range(100_000):
        steps.append(step)
        if len(steps) > 1000:
            gone = set(thinned(steps))
            steps = [one for one in steps if one not in gone]
    tenths = Counter(step // 10_000 for step in steps)
    assert len(tenths) == 10 and min(tenths.values()) > 15
