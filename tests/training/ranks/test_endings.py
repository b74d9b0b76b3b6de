"""Ranks that die or leave early: the others neither hang nor lose what they have, and the missing are named."""

import os
import random
import subprocess
import sys
import textwrap
import time

import pytest

from torchhook.training.runs import Run

TRAINING = """
    import os, signal, sys, time
    import torch
    from torch import distributed, nn

    fault, step_of_fault = sys.argv[1], int(sys.argv[2])
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    torch.manual_seed(0)
    inside = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    model = inside if fault == "alone" else nn.parallel.DistributedDataParallel(inside)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    torch.manual_seed(rank)
    for step in range(60):
        optimizer.zero_grad()
        if step == step_of_fault:
            if fault.startswith("kill") and rank == int(fault[4:]):
                os.kill(os.getpid(), signal.SIGKILL)
            if fault == "raise" and rank == 1:
                raise ValueError("no more data")
            if fault == "leave" and rank == 1:
                sys.exit()
            if fault == "stuck" and rank == 0:
                print("stuck", flush=True)
            if fault == "stuck":
                torch.ones(1).sum().item() if rank else time.sleep(600)
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        time.sleep(0.02)
    if fault == "destroyed":
        distributed.destroy_process_group()
    elif fault != "alone":
        distributed.barrier()
"""
LAUNCHER = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
WATCHED = ["-m", "torchhook", "run", "--every", "2", "--price", "off", "train.py"]


@pytest.fixture
def train(tmp_path):
    """Run the training on some ranks; returns the run, what was said, and how long it took."""

    def run(fault, ranks=3, step=25):
        (tmp_path / "train.py").write_text(textwrap.dedent(TRAINING))
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, *LAUNCHER, str(ranks), *WATCHED, fault, str(step)]
        begun = time.monotonic()
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200, check=False
        )
        [folder] = [path for path in (tmp_path / "runs").iterdir() if not path.is_symlink()]
        return Run(folder), done, time.monotonic() - begun

    return run


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1, 2])
def test_a_rank_that_is_killed_is_named_and_the_data_of_the_others_are_whole(train, killed):
    run, done, _ = train(f"kill{killed}")
    with run:
        assert run.state in ("failed", "interrupted"), done.stderr[-3000:]
        [lost] = [finding for finding in run.findings if finding.code == "TR105"]
        assert lost.evidence["rank"] == killed and "was lost" in lost.message
        others = {0, 1, 2} - {killed}
        last = run.rank_step(run.rank_steps[-1])
        assert {rank: member.state for rank, member in last.members.items() if rank == killed} == {killed: "lost"}
        assert run.report.about["ranks"] == "3 ranks on 1 host"
        assert len(run.steps) >= 10 and run.steps == list(range(0, run.steps[-1] + 1, 2))
        whole = [set(step.facts) for step in run.ranks() if 0 <= step.step < 20]
        assert all(others <= ranks for ranks in whole), whole
    assert done.stderr.count("→ torchhook dashboard") == 1


@pytest.mark.slow
def test_a_rank_that_raises_is_said(train):
    run, done, _ = train("raise")
    with run:
        states = {rank: member.state for rank, member in run.rank_step(run.rank_steps[-1]).members.items()}
        assert set(states) == {0, 1, 2} and states[1] == "failed"
        assert done.stderr.count("→ torchhook dashboard") == 1
        [found] = [finding for finding in run.findings if finding.code == "TR105"]
        assert found.evidence["rank"] == 1 and "first to end, after 25 steps: ValueError: no more data" in found.message


@pytest.mark.slow
def test_a_rank_that_leaves_while_the_others_wait_for_it_is_named(train):
    run, _, _ = train("leave", ranks=2)
    with run:
        [found] = [finding for finding in run.findings if finding.code == "TR105"]
        assert found.evidence["rank"] == 1 and "first to end, after 25 steps: it left" in found.message


@pytest.mark.slow
def test_scripts_that_destroy_the_process_group_end_with_the_report(train):
    run, done, _ = train("destroyed", ranks=2)
    assert done.returncode == 0 and "nothing found in 60 steps" in done.stderr
    with run:
        assert run.state == "ended" and len(run.steps) == 30


@pytest.mark.slow
def test_kills_at_random_moments_leave_a_run_that_opens(train, tmp_path):
    generator = random.Random(os.getpid())
    killed, step = generator.randrange(4), generator.randrange(20, 60)
    run, done, _ = train(f"kill{killed}", ranks=4, step=step)
    with run:
        assert run.state != "running", (killed, step, done.stderr[-2000:])
        assert not run.steps or run.window(run.steps[-1])
        expected = {0, 1, 2, 3} - {killed}
        early = [set(known.facts) for known in run.ranks() if 0 <= known.step < step - 6]
        assert all(expected <= ranks for ranks in early), (killed, step, early)


@pytest.mark.slow
def test_survivors_that_are_told_to_end_while_they_are_stuck_end_with_the_report(tmp_path):
    """The main thread of rank 1 waits in a collective for rank 0, where no handler of Python's runs."""
    (tmp_path / "train.py").write_text(textwrap.dedent(TRAINING))
    command = [sys.executable, *LAUNCHER, "2", *WATCHED, "stuck", "12"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}, **pipes)
    try:
        assert process.stdout.readline().strip() == "stuck"
        time.sleep(2)
        process.terminate()  # the launcher sends SIGTERM to both ranks
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    [folder] = [path for path in (tmp_path / "runs").iterdir() if not path.is_symlink()]
    with Run(folder) as run:
        assert run.state == "interrupted", err[-3000:]
        assert run.steps == [0, 2, 4, 6, 8, 10]
        assert set(run.rank_step(10).facts) == {0, 1}


OPEN = """
    import time, torch
    from torch import distributed, nn
    from torchhook import Monitor

    distributed.init_process_group("gloo")
    model = nn.Linear(4, 2)
    monitor = Monitor(model, every=1, price=None)
    print(monitor.writes, flush=True)
    while True:
        model(torch.randn(8, 4))
        monitor.step(loss=1.0)
        time.sleep(0.02)
"""


@pytest.mark.slow
def test_a_monitor_that_sigterm_leaves_open_was_interrupted(tmp_path):
    (tmp_path / "train.py").write_text(textwrap.dedent(OPEN))
    command = [sys.executable, *LAUNCHER, "2", "train.py"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}, **pipes)
    try:
        assert {process.stdout.readline().strip() for _ in range(2)} == {"True", "False"}  # one of them writes
        time.sleep(2)
        process.terminate()
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    [folder] = [path for path in (tmp_path / "runs").iterdir() if not path.is_symlink()]
    with Run(folder) as run:
        assert run.state == "interrupted", err[-3000:]
