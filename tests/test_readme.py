"""The README is accurate and the Chinese one matches it: numbers, pictures, links, code, and output of `make demo`."""

import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from PIL import Image
from rich.console import Console

import torchhook as th

ROOT = Path(__file__).parents[1]
ENGLISH, CHINESE = "README.md", "README.zh-CN.md"
BOTH = pytest.mark.parametrize("name", [ENGLISH, CHINESE])

FENCE = re.compile(r"^```.*?^```$", re.M | re.S)
PICTURE = re.compile(r'(?:srcset|alt="[^"]+" src)="([^"]+)"')
LINK = re.compile(r"(?<!!)\[[^\]]+\]\(([^)]+)\)")
NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)*")

# Numbers quoted below the comparison table, and the row of docs/benchmarks.md that each comes from.
QUOTED = {
    "1.063": "torchhook, outputs + param_grads",
    "1.162": "torchhook, + histogram",
    "3.086": "torchhook, no compiler",
    "3.291": "W&B 0.31.0",
    "1.018": "GPT-2 124M, bf16, batch 16 × 1024; H200",
    "8.1": "grad_cam",
    "8.2": "grad_cam",
    "33.4": "grad_cam",
    "0.98": "pytorch-cka 1.1.3",
    "0.06": "pytorch-cka 1.1.3",
    "0.01": "torchhook",
}


def text(name):
    return (ROOT / name).read_text(encoding="utf-8")


BENCHMARKS = text("docs/benchmarks.md")


def prose(name):
    return FENCE.sub("", text(name))


def sections(name):
    """The text under each heading."""
    return re.split(r"^#+ .*$", prose(name), flags=re.M)


def rows(page):
    """The cells of every row of its tables."""
    return [
        [cell.strip(" *") for cell in line.strip("|").split("|")] for line in page.splitlines() if line.startswith("|")
    ]


def test_both_have_the_same_headings():
    levels = [re.findall(r"^(#+) ", prose(name), re.M) for name in (ENGLISH, CHINESE)]
    assert levels[0] == levels[1] and len(levels[0]) > 5


def test_both_have_the_same_code():
    english, chinese = FENCE.findall(text(ENGLISH)), FENCE.findall(text(CHINESE))
    assert english == chinese and len(english) == 7


def test_both_have_the_same_pictures_links_and_numbers_under_each_heading():
    for english, chinese in zip(sections(ENGLISH), sections(CHINESE), strict=True):
        assert PICTURE.findall(english) == PICTURE.findall(chinese)
        if "README" not in english:  # there, each links to the other
            assert LINK.findall(english) == LINK.findall(chinese)
        assert Counter(NUMBER.findall(english)) == Counter(NUMBER.findall(chinese))
        assert english.count("\n- ") == chinese.count("\n- ")


def test_both_have_the_same_marks_and_numbers_in_each_row_of_a_table():
    english, chinese = ([" ".join(row) for row in rows(text(name))] for name in (ENGLISH, CHINESE))
    assert len(english) > 15
    for row, other in zip(english, chinese, strict=True):
        assert re.findall("[✓–·]", row) == re.findall("[✓–·]", other)
        assert sorted(NUMBER.findall(row)) == sorted(NUMBER.findall(other))


@BOTH
def test_links_lead_somewhere(name):
    links = LINK.findall(prose(name))
    assert len(links) > 4
    assert [link for link in links if not (ROOT / link).is_file()] == []


@BOTH
def test_pictures_exist_and_are_small(name):
    pictures = PICTURE.findall(text(name))
    assert len(pictures) == 4  # two, for light and for dark pages
    for picture in pictures:
        file = ROOT / picture
        assert file.stat().st_size <= 200_000
        with Image.open(file) as image:
            assert image.format == "PNG" and image.width >= 1000


def test_costs_in_the_comparison_are_those_of_the_benchmark():
    costs = {row[0]: row[3].split()[-1] for row in rows(BENCHMARKS) if len(row) == 5 and "µs" in row[3]}
    prices = {row[0].removeprefix("a "): row[4] for row in rows(sections(ENGLISH)[4]) if row[4].endswith("×")}
    assert len(prices) == 7
    for peer, price in prices.items():
        assert [cost for way, cost in costs.items() if way.startswith(peer)] == [price]


def test_other_numbers_are_those_of_the_benchmarks():
    quoted = NUMBER.findall(sections(ENGLISH)[4])
    assert set(quoted) <= set(NUMBER.findall(BENCHMARKS))
    for number, name in QUOTED.items():
        assert number in quoted
        assert any(number in NUMBER.findall(" ".join(row[1:])) for row in rows(BENCHMARKS) if row[0] == name), number


def test_the_accuracy_of_the_rules_is_that_of_the_benchmarks():
    measured = re.findall(r"(\d+) with a fault[.,]\s+[Rr]ecall ([\d.]+), precision ([\d.]+)[.;]", BENCHMARKS)
    (quoted,) = [line for line in " ".join(sections(ENGLISH)[4].split()).split("- ") if "planted faults" in line]
    assert len(measured) == 2
    for faults, recall, precision in measured:
        assert re.search(rf"{recall} of {faults}\b.*?\((precision )?{precision}\)", quoted)


@BOTH
def test_versions_are_those_installed_for_the_tests(name):
    pinned = dict(line.split("==") for line in text("constraints.txt").splitlines() if "==" in line)
    table = sections(name)[5]
    named = re.findall(r"([a-z]+) (\d[\d.]+)[,|\s]", table)
    assert len(named) == 10
    for library, version in named:
        assert pinned[library] == version
    for file in ("cpu", "h200"):
        environment = re.search(r'"environment": "torch ([\d.]+), (.*)"', text(f"docs/matrix/{file}.json"))
        assert all(part in table for part in environment.groups())


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """A folder in which the demo ran, and its output."""
    folder = tmp_path_factory.mktemp("demo")
    command = [sys.executable, str(ROOT / "examples" / "demo.py")]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


@pytest.mark.slow
def test_the_demo_finds_a_fault_only_in_the_faulty_training(demo):
    folder, output = demo
    healthy, slipped = output.split("─ healthy ─")[1].split("─ slipped ─")
    assert "Net: nothing found" in healthy
    assert "after the learning rate" in " ".join(slipped.replace("│", " ").split())
    for name in ("healthy", "slipped"):
        assert (folder / "demo-output" / f"{name}.html").stat().st_size > 10_000
        (samples,) = (folder / "demo-output" / "runs").glob(f"{name}-*/samples")
        assert list(samples.glob("*.png"))


@pytest.mark.slow
def test_the_report_shown_in_the_readme_is_the_real_one(demo):
    folder, _ = demo
    (path,) = (folder / "demo-output" / "runs").glob("slipped-*")
    page = Console(file=StringIO(), width=80)
    with th.Run(path) as run:
        th.render.terminal(replace(run.report, about={}), page)  # where and when it ran is left out
    (shown,) = re.findall(r"```text\n(.*?)```", text(ENGLISH), re.S)
    words = [re.sub(r"[\d.]+", "#", text).split() for text in (shown, page.file.getvalue())]
    assert words[0] == words[1][: len(words[0])]


@pytest.mark.slow
def test_the_demo_writes_every_file_it_names(demo):
    folder, output = demo
    files = re.findall(r"demo-output/\w+\.\w+", output.partition("\nOpen\n")[2])
    assert len(files) == 5
    for file in files:
        if file.endswith(".png"):
            with Image.open(folder / file) as image:
                assert len(image.convert("RGB").getcolors(1 << 24)) > 20  # it is not blank
        else:
            assert (folder / file).stat().st_size > 10_000


@pytest.mark.slow
def test_the_demo_ends_with_next_steps(demo):
    steps = demo[1].partition("\nOpen\n")[2]
    assert "torchhook dashboard demo-output/runs --open" in steps
    assert "torchhook run train.py" in steps.partition("of your own")[2]
    assert max(map(len, steps.splitlines())) <= 80
    assert steps.count(".venv/bin/torchhook ") == steps.count("torchhook ")
