"""Several ranks, in real processes, write one run, which says what one process with all the data would have said."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from torchhook.stats.kernels.plain import FIELDS
from torchhook.training.runs import Run

PROGRAM = Path(__file__).with_name("program.py")
LAUNCHER = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
EXACT = ("count", "nan", "posinf", "neginf", "zeros", "min", "max")
KINDS = {2: ["ddp", "fsdp", "tp", "pp"], 4: ["ddp_tp", "ddp", "tp"]}
NORMED = ["fsdp_tp_normed", "ddp_tp_normed"]
HEALTHY = ["with_dropout", "with_uneven_batches", "with_frozen_parts", "with_batch_norm", "with_accumulation"]
HEALTHY += ["split_by_hand", "with_join"]
OTHERS = ["with_zeros_split", "stale_optimizer"]
FAULTS = {  # the code, the rank, the site and the step at which each fault is found
    "bypassed": ("TR102", 1, "0", 0),
    "drifted": ("TR101", 1, "2", 2),
    "drifted_late": ("TR101", 1, "2", 8),
    "copy_of_split_drifted": ("TR101", 1, "norm", 2),
    "state_drifted": ("TR101", 1, "0", 2),
    "buffer_wrong": ("TR101", 1, "1", 2),
    "unaveraged": ("TR102", 1, "0", 0),
    "clipped_apart": ("TR102", 1, "2", 0),
    "scaled": ("TR104", 1, "0", 4),
    "same_batch": ("TR106", None, "", 0),
    "trained_on_one": ("TR107", 1, "2", 0),
    "nan": ("TR108", 1, "0", 3),
    "left_early": ("TR105", 1, "", None),
    "slow": ("TR109", 1, "", None),
}


def launched(folder, ranks, *cases):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *LAUNCHER, str(ranks), str(PROGRAM), str(folder), *cases]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stderr


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """The same training in one process, with all the data."""
    folder = tmp_path_factory.mktemp("one")
    code = "import sys; sys.path.insert(0, sys.argv[1]); import program, pathlib; folder = pathlib.Path(sys.argv[2]);"
    code += "program.one(folder / 'net'); program.one_normed(folder / 'normed')"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [sys.executable, "-c", code, str(PROGRAM.parent), str(folder)],
        env=environment,
        check=True,
        capture_output=True,
        timeout=200,
    )
    return folder


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    return folder, launched(folder, 2, *KINDS[2], *HEALTHY, *FAULTS, *OTHERS)


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    folder = tmp_path_factory.mktemp("four")
    return folder, launched(folder, 4, *KINDS[4], *NORMED, "norm_drifted", "with_dropout", "drifted", "scaled", "slow")


def only_run(folder):
    [run] = [path for path in folder.iterdir() if not path.is_symlink()]
    assert not [path for path in run.iterdir() if path.is_dir()]  # no folder a rank
    return Run(run)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "kind"), [(ranks, kind) for ranks, kinds in KINDS.items() for kind in kinds])
def test_merged_equals_one_process(request, one, ranks, kind):
    folder, _ = request.getfixturevalue({2: "two", 4: "four"}[ranks])
    with only_run(folder / kind) as merged, only_run(one / "net") as alone:
        assert merged.state == "ended" and merged.findings == []
        steps = merged.steps
        assert steps == ([1, 2] if kind == "pp" else [0, 1, 2])  # torch runs a pipeline on made-up values first
        assert merged.losses == pytest.approx({step: alone.losses[step] for step in merged.losses})
        for step in steps[-2:-1] if kind == "pp" else steps[:2]:  # later ones are rounded
            expected, found = alone.window(step), merged.window(step)
            assert set(found) == set(expected)
            for place in expected:
                if is_comparable(kind, place):
                    same(place, expected[place], found[place], kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", NORMED)
def test_parameters_outside_the_plan_of_tensor_parallelism_count_once(four, one, kind):
    with only_run(four[0] / kind) as merged, only_run(one / "normed") as alone:
        assert merged.state == "ended" and merged.findings == []
        for place, expected in alone.window(0).items():
            if is_comparable("ddp" if kind.startswith("ddp") else kind, place):
                same(place, expected, merged.window(0)[place], kind)


@pytest.mark.slow
def test_an_optimizer_from_before_fully_shard_is_said(two):
    with only_run(two[0] / "stale_optimizer") as run:
        [found] = run.report.findings
        assert (found.code, found.site) == ("TH503", "0") and "4 parameters that are not in the model" in found.message


@pytest.mark.slow
def test_zeros_on_all_ranks_are_parts_all_the_same(two):
    with only_run(two[0] / "with_zeros_split") as run:
        assert not [finding for finding in run.findings if finding.code.startswith("TR")]
        assert [run.window(step)["up"].count for step in run.steps] == [16 * 16] * 12


@pytest.mark.slow
def test_a_copy_outside_the_plan_that_drifts_is_named(four):
    with only_run(four[0] / "norm_drifted") as run:
        found = [finding for finding in run.findings if finding.code == "TR101"]
        assert [(f.evidence["rank"], f.site, f.step) for f in found] == [(3, "3", 2)]
        assert found == [finding for finding in run.findings if finding.code.startswith("TR")]
        assert not [f for f in run.findings if f.code == "TH000"]


def is_comparable(kind, place):
    """Gradients of parameters are measured before ranks average theirs; a pipeline divides them by its parts later."""
    port = place[1].partition("[")[0]
    return not (port.startswith("param_grad") and kind in ("ddp", "pp")) and not (
        kind == "pp" and port == "grad_output"
    )


def same(place, expected, found, kind):
    a, b = expected.state("moments"), found.state("moments")
    for name, x, y in zip(FIELDS, a.tolist(), b.tolist(), strict=True):
        if place[1] in ("output", "input", "grad_output") and name in EXACT:
            assert x == y, (kind, place, name)
        else:  # norms of parameters are computed in float32
            tight = 1e-11 if place[1] in ("output", "input", "grad_output", "param_grad") else 1e-7
            assert math.isclose(x, y, rel_tol=tight, abs_tol=1e-12 if tight < 1e-10 else 1e-9), (kind, place, name)
    if "channels" in expected:
        torch.testing.assert_close(found.state("channels"), expected.state("channels"), rtol=1e-11, atol=1e-11)


@pytest.mark.slow
@pytest.mark.parametrize("case", HEALTHY)
def test_nothing_is_said_of_healthy_ranks(two, case):
    with only_run(two[0] / case) as run:
        assert [f for f in run.findings if f.code.startswith("TR") or f.severity > "info"] == []
        assert set(run.ranks()[-1].members) == {0, 1} and run.report.ok


@pytest.mark.slow
@pytest.mark.parametrize("case", FAULTS)
def test_the_odd_rank_is_named(two, case):
    code, rank, site, step = FAULTS[case]
    with only_run(two[0] / case) as run:
        found = [finding for finding in run.findings if finding.code == code]
        assert [(f.evidence.get("rank"), f.site, f.step) for f in found] == [(rank, site, step)]
        others = {f.code for f in run.findings if f.code.startswith("TR")} - {code}
        assert not others, "one root cause over all ranks"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "code"), [("with_dropout", None), ("drifted", "TR101"), ("scaled", "TR104"), ("slow", "TR109")]
)
def test_one_of_four(four, case, code):
    with only_run(four[0] / case) as run:
        assert [(f.code, f.evidence.get("rank")) for f in run.findings if f.code.startswith("TR")] == (
            [(code, 1)] if code else []
        )
        assert set(run.ranks()[-1].members) == {0, 1, 2, 3}


@pytest.mark.slow
def test_every_rank_is_in_the_run_and_one_line_is_said(two):
    folder, said = two
    with only_run(folder / "ddp") as run:
        last = run.ranks()[-1]
        assert {rank: (known.steps, known.state) for rank, known in last.members.items()} == dict.fromkeys(
            (0, 1), (3, "ended")
        )
        assert len(last.tables) == 2 and ("0", "output") in last.places
        mean = run.window(2)["0"].mean
        tables = torch.stack([table[last.places.index(("0", "output"))] for table in last.tables.values()])
        assert float(tables[:, 0].mean()) == pytest.approx(mean, rel=1e-5)  # of equal parts
        path = str(run.folder.absolute())
    assert said.count("→ torchhook dashboard") == len(KINDS[2]) + len(HEALTHY) + len(FAULTS) + len(OTHERS)
    assert json.loads((folder / "ddp-1.json").read_text()) == [path, 0]  # the other rank knows where it is
