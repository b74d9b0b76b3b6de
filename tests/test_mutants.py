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
ROOMS = {folder.name for folder in PACKAGE.iterdir() if folder.is_dir() and folder.name != "__pycache__"}
PYTEST = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=short"]
PYTEST += ["-p", "no:randomly", "-p", "no:cacheprovider", "-p", "no:xdist"]
PASSED, FAILED = 0, 1  # exit codes of pytest; others say that no test ran


def place_of(mutant):
    """The file of a mutant, its lines, and the number of the line that changes."""
    file = PACKAGE / mutant.file
    lines = file.read_text().splitlines(keepends=True)
    numbers = [number for number, line in enumerate(lines) if line.strip() == mutant.line]
    assert len(numbers) == 1, (
        f"{len(numbers)} lines of {mutant.file} are {mutant.line!r}; it must be one: edit mutants.py"
    )
    return file, lines, numbers[0]


def outcome(source, tests, limit):
    paths = os.pathsep.join(filter(None, [str(source), os.environ.get("PYTHONPATH")]))
    command = [*PYTEST, *(f"tests/{test}" for test in tests)]
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limit)


def test_every_room_has_mutants_of_lines_that_are_there():
    assert len(MUTANTS) >= 60 and len(set(MUTANTS)) == len(MUTANTS)
    assert {mutant.file.split("/")[0] for mutant in MUTANTS} == ROOMS
    for mutant in MUTANTS:
        place_of(mutant)
        assert mutant.becomes != mutant.line


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.long_list(sample=0)  # the other tests of a run say the same
def test_the_tests_that_kill_mutants_pass_without_them():
    done = outcome(PACKAGE.parent, sorted({mutant.test for mutant in MUTANTS}), limit=880)
    assert done.returncode == PASSED, done.stdout


@pytest.mark.slow
@pytest.mark.long_list(sample=5)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.file}-{mutant.becomes}")
def test_a_mutant_is_killed(mutant, tmp_path):
    file, lines, number = place_of(mutant)
    lines[number] = lines[number].replace(mutant.line, mutant.becomes)
    shutil.copytree(PACKAGE, tmp_path / "torchhook")  # with the compiled files, so that only one is compiled again
    (tmp_path / "torchhook" / file.relative_to(PACKAGE)).write_text("".join(lines))
    done = outcome(tmp_path, [mutant.test], limit=120)
    assert done.returncode != PASSED, f"survived: {mutant.file}:{number + 1} as {mutant.becomes!r}; see {mutant.test}"
    assert done.returncode == FAILED, done.stdout + done.stderr
