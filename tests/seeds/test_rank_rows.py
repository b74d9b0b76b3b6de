"""The row of several ranks that train together: B16. The trainings are those of `tests/training/ranks/program.py`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from torchhook.training.runs import Run

PROGRAM = Path(__file__).parents[1] / "training" / "ranks" / "program.py"
LAUNCHER = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
ALONE = "import pathlib, sys; sys.path.insert(0, sys.argv[1]); import program; program.one(pathlib.Path(sys.argv[2]))"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The run of one process, that of two ranks that share its data, and that of two ranks of which one drifts."""
    folder = tmp_path_factory.mktemp("runs")
    for command in (
        [sys.executable, "-c", ALONE, str(PROGRAM.parent), str(folder / "one")],
        [sys.executable, *LAUNCHER, str(PROGRAM), str(folder), "ddp", "drifted"],
    ):
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, done.stderr
    return folder


def only_run(folder):
    [run] = [path for path in folder.iterdir() if not path.is_symlink()]
    assert not [path for path in run.iterdir() if path.is_dir()]  # nor a folder for each rank
    return Run(run)


@pytest.mark.slow
def test_b16_one_run_for_all_ranks_says_what_one_process_would(runs):
    with only_run(runs / "ddp") as merged, only_run(runs / "one") as alone:
        assert merged.report.ok and not merged.findings
        assert merged.steps == alone.steps == [0, 1, 2] and merged.losses == pytest.approx(alone.losses)
        for path in ("0", "1", "2"):
            for port in ("output", "grad_output"):
                said, expected = merged.window(0)[path, port], alone.window(0)[path, port]
                assert (said.count, said.min, said.max) == (expected.count, expected.min, expected.max)
                assert (said.mean, said.std) == pytest.approx((expected.mean, expected.std), rel=1e-12, abs=1e-15)
        members = merged.rank_step(merged.rank_steps[-1]).members
        assert {rank: member.steps for rank, member in members.items()} == {0: 3, 1: 3}


@pytest.mark.slow
def test_b16_the_odd_rank_is_named_with_its_parameter_and_step(runs):
    with only_run(runs / "drifted") as run:
        [finding] = [found for found in run.findings if found.code.startswith("TR")]
        assert (finding.code, finding.site, finding.step) == ("TR101", "2", 2) and not run.report.ok
        assert (finding.evidence["rank"], finding.evidence["parameter"]) == (1, "2.weight")
        assert "rank 1" in finding.message
