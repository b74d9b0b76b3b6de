"""Wrong code is noticed: each mutant in `mutants.py` makes the test that is named beside it fail.

`make mutants` runs all of them. A mutant is applied to a copy of the source; the working tree is never written to.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mutants import MUTANTS

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "torchhook"
ROOMS = {folder.name for folder in PACKAGE.iterdir() if (folder / "__init__.py").is_file()}
PYTEST = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=short"]
PYTEST += ["-p", "no:randomly", "-p", "no:cacheprovider", "-p", "no:xdist"]
PASSED, FAILED = 0, 1  # exit codes of pytest; others say that no test ran


def places(mutant):
    """The numbers of the lines of its file that a mutant changes."""
    file = PACKAGE / mutant.file
    lines = file.read_text().splitlines() if file.is_file() else []
    return [number for number, line in enumerate(lines) if line.partition("  # ")[0].strip() == mutant.line]


def mutated(mutant, folder):
    """A copy of the package with one line changed."""
    (number,) = places(mutant)
    shutil.copytree(PACKAGE, folder / PACKAGE.name)  # with the compiled files, so that only one is compiled again
    file = folder / PACKAGE.name / mutant.file
    lines = file.read_text().splitlines(keepends=True)
    lines[number] = lines[number].replace(mutant.line, mutant.becomes)
    file.write_text("".join(lines))
    return folder


def outcome(source, tests, limit):
    """What pytest says of some tests, with the package in the folder `source`."""
    paths = os.pathsep.join(filter(None, [str(source), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [*PYTEST, *(f"tests/{test}" for test in tests)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limit)


def test_every_room_has_mutants_of_lines_that_are_there_once():
    lost = [f"{mutant.file}: {mutant.line}" for mutant in MUTANTS if len(places(mutant)) != 1]
    assert not lost, "these lines have changed; change them in tests/mutants.py, too"
    assert {mutant.file.split("/")[0] for mutant in MUTANTS} == ROOMS
    assert len(MUTANTS) >= 60 and all(mutant.becomes != mutant.line for mutant in MUTANTS)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.long_list(sample=0)  # the other tests of a run say the same
def test_the_tests_that_kill_mutants_pass_without_them():
    done = outcome(PACKAGE.parent, sorted({mutant.test for mutant in MUTANTS}), limit=1180)
    assert done.returncode == PASSED, done.stdout


@pytest.mark.slow
@pytest.mark.long_list(sample=5)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.file}-{mutant.becomes}")
def test_a_mutant_is_killed(mutant, tmp_path):
    done = outcome(mutated(mutant, tmp_path), [mutant.test], limit=240)
    assert done.returncode != PASSED, f"survived: {mutant.becomes} in {mutant.file}; make {mutant.test} stronger"
    assert done.returncode == FAILED, done.stdout + done.stderr
