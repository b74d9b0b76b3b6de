"""The pages in docs/ and the README match the code: snippets run, commands parse, tables hold.

- ``python`` fences are run; all fences of a page share one namespace. Set-up code that is not shown is in the page
  itself, in a comment ``<!-- before … -->``, or in `BEFORE`.
- A fence with a title is not run: it shows code of another library, such as ``title="nnsight"``, or a notebook cell.
  Only ``title="torchhook"``, our code next to theirs, is run.
- A fence ``text title="prints"`` is compared with what the snippet before it prints, ignoring digits.
- Functions called ``test_…`` are run as well, with the fixtures that they name.
- In ``sh`` fences, the arguments of ``torchhook`` are parsed by its own parser.
"""

import ast
import contextlib
import html
import importlib
import inspect
import io
import linecache
import re
import shlex
import subprocess
import sys
import textwrap
import types
from pathlib import Path
from typing import NamedTuple

import pytest

TESTS = Path(__file__).parent
ROOT = TESTS.parent
PAGES = [*sorted(ROOT.glob("README*.md")), *sorted((ROOT / "docs").rglob("*.md"))]

_FENCE = re.compile(r"^```(?P<language>\w*) *(?:title=\"(?P<title>[^\"]*)\")?\n(?P<code>.*?)^```$", re.M | re.S)
_NUMBER = re.compile(r"(?<![\w.])[-+]?\d[\d.,]*(e[-+]?\d+)?")  # but not in names such as conv1.weight
_BEFORE = re.compile(r"^<!-- before\n(.*?)^-->$", re.M | re.S)

ALWAYS = """
import torch
import torch.nn.functional as F
from torch import nn
import torchhook as th
"""

# For pages that are read where a comment would be visible.
BEFORE = {
    "README.md": """
    class Block(nn.Module):
        def __init__(self, ins, outs):
            super().__init__()
            self.conv1, self.conv2 = nn.Conv2d(ins, outs, 3, 2, 1), nn.Conv2d(outs, outs, 3, 1, 1)
            self.bn, self.short, self.relu = nn.BatchNorm2d(outs), nn.Conv2d(ins, outs, 1, 2), nn.ReLU(inplace=True)

        def forward(self, x):
            return self.relu(self.bn(self.conv2(self.relu(self.conv1(x)))) + self.short(x))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1, self.relu = nn.Conv2d(3, 8, 3, 1, 1), nn.ReLU(inplace=True)
            for i in range(1, 5):
                setattr(self, f"layer{i}", nn.Sequential(Block(8, 8), nn.Conv2d(8, 8, 3, 1, 1)))
            self.fc = nn.Linear(8, 10)

        def forward(self, x):
            x = self.relu(self.conv1(x))
            for i in range(1, 5):
                x = self.relu(self.get_submodule(f"layer{i}")(x))
            return self.fc(x.mean((2, 3)))

    model, x = Net(), torch.randn(8, 3, 32, 32)
    loader = test_loader = [(torch.randn(8, 3, 32, 32), torch.randint(10, (8,))) for _ in range(4)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    original, ported, model_a, model_b = Net().eval(), Net().eval(), Net(), Net()
    images = x
    """,
}


class Fence(NamedTuple):
    """A block of code in a page, and the line at which it begins."""

    language: str
    title: str
    code: str
    line: int


def fences(page):
    text = page.read_text(encoding="utf-8")
    for found in _FENCE.finditer(text):
        yield Fence(
            found["language"], found["title"] or "", found["code"], text.count("\n", 0, found.start("code")) + 1
        )


def ours(fence):
    return fence.language == "python" and fence.title in ("", "torchhook")


def before(page):
    """The set-up code of a page."""
    shown = page.relative_to(ROOT).as_posix()
    own = _BEFORE.findall(page.read_text(encoding="utf-8"))
    return ALWAYS + textwrap.dedent("".join(own) or BEFORE.get(shown, ""))


def run(page, fixtures):
    """Run the snippets of a page in order; yields each fence of expected output with the real output."""
    module = types.ModuleType(f"page_{page.stem}")
    sys.modules[module.__name__] = module  # torch.compile looks there for what a snippet defines
    namespace = vars(module)
    file = f"{page.stem}.py"  # its line numbers are those of the page, also in messages that quote them
    linecache.cache[file] = (0, None, page.read_text(encoding="utf-8").splitlines(keepends=True), file)
    exec(compile(before(page), f"before {page.name}", "exec"), namespace)
    printed = ""
    for fence in fences(page):
        if ours(fence):
            known = set(namespace)
            with contextlib.redirect_stdout(io.StringIO()) as output:
                exec(compile("\n" * (fence.line - 1) + fence.code, file, "exec"), namespace)
            printed = output.getvalue()
            for name in set(namespace) - known:
                if name.startswith("test_") and callable(namespace[name]):
                    namespace[name](*map(fixtures, inspect.signature(namespace[name]).parameters))
        elif fence.title == "prints":
            yield fence, printed


def without_digits(text):
    """The words of each line: numbers differ between machines, but words, names and the order of lines do not."""
    return [_NUMBER.sub("#", line).split() for line in text.strip().splitlines()]


# The code of a translated README is that of README.md: see test_readme.py.
RUN = [page for page in PAGES if any(map(ours, fences(page))) and not page.name.startswith("README.z")]


@pytest.mark.parametrize("page", RUN, ids=lambda page: page.stem)
def test_the_snippets_of_a_page_run_and_print_what_it_shows(page, request, tmp_path, monkeypatch, one_thread):
    monkeypatch.chdir(tmp_path)
    if "mlflow" in before(page):
        request.getfixturevalue("own_mlflow")
    for fence, printed in run(page, request.getfixturevalue):
        shown, real = without_digits(fence.code), without_digits(printed)
        if ["..."] in shown:  # the page shows only the ends of a table
            gap = shown.index(["..."])
            real[gap : len(real) - (len(shown) - gap - 1)] = [["..."]]
        assert shown == real, f"{page.name}, line {fence.line}, shows something else than what is printed:\n{printed}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_no_code_of_a_page_is_overlooked(page):
    text = page.read_text(encoding="utf-8")
    marks = [line for line in text.splitlines() if line.lstrip().startswith("```")]
    assert len(marks) == 2 * len(list(fences(page))), "every fence must start at the margin and be closed"
    rest = _BEFORE.sub("", _FENCE.sub("", text))
    assert not re.findall(r"^    .*\bth\.\w+\(.*$|^    \$? ?torchhook .*$", rest, re.M), "put this code in a fence"


def commands():
    """The arguments of torchhook in every shell fence that calls it."""
    for page in PAGES:
        for fence in fences(page):
            for line in fence.code.splitlines() if fence.language == "sh" else ():
                words = shlex.split(line.removeprefix("$ "), comments=True)
                if "torchhook" in words:
                    where = f"{page.name}:{fence.line}: {' '.join(words)}"
                    yield pytest.param(words[words.index("torchhook") + 1 :], id=where)


def leaf(words):
    """The command that the words name, and the remaining words."""
    from torchhook.cli.app import command

    while hasattr(command, "commands"):
        assert words and words[0] in command.commands, f"no such command: {words[:1]}"
        command, words = command.commands[words[0]], words[1:]
    return command, words


@pytest.mark.parametrize("words", list(commands()))
def test_shell_lines_are_understood_by_the_command_line(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command, given = leaf(words)
    for word in given:
        if re.fullmatch(r"[\w/]+\.[a-z]+", word):  # the files it names must exist
            file = tmp_path / word
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
    command.make_context(command.name, list(given), obj=[])


def test_an_unknown_option_is_noticed():
    command, given = leaf(["run", "--invented", "3", "train.py"])
    with pytest.raises(Exception, match="invented"):
        command.make_context(command.name, list(given), obj=[])


def test_commands_named_in_sentences_exist():
    from torchhook.cli.app import command

    for page in PAGES:
        for name in re.findall(r"`torchhook ([a-z]+)", page.read_text(encoding="utf-8")):
            assert name in command.commands, f"{page.name}: torchhook {name}"


def test_every_public_name_is_in_the_reference():
    import torchhook

    text = "\n".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    documented = re.findall(r"^::: torchhook\.(.+)$", text, re.M)
    assert len(documented) == len(set(documented))
    packages = "compare dashboard distributed edits explain origins plot prune render rules stats"
    public = {*torchhook.__all__}
    for package in packages.split():
        names = importlib.import_module(f"torchhook.{package}").__all__
        public |= {f"{package}.{name}" for name in names if name not in torchhook.__all__ or name.islower()}
    assert not public - set(documented), "these names are missing from docs/api"


def test_pages_state_the_right_number_of_rules():
    from torchhook.rules import chosen

    stated = {"README.md": "Fifty-nine rules", "README.zh-CN.md": "五十九条规则"}
    stated |= {"docs/learning.md": "Fifty-nine [rules]", "examples/five_minutes.ipynb": "Fifty-nine rules"}
    assert len(chosen()) == 59, f"update the number here and in {', '.join(stated)}"
    for page, words in stated.items():
        assert words in (ROOT / page).read_text(encoding="utf-8"), page


def test_the_page_says_what_is_tried_for_each_rule_that_has_a_repair():
    from torchhook import Finding
    from torchhook.rules import RULES
    from torchhook.rules.repairs import repairs_for

    text = (ROOT / "docs" / "learning.md").read_text().split("## What was tried")[1].split("\n## ")[0]
    table = "".join(line for line in text.splitlines() if line.startswith("|"))
    tried = {code for code in RULES if repairs_for(Finding(code, "error", "", site="0"))}
    assert set(re.findall(r"TH\d\d\d", table)) == tried


def test_every_example_is_listed_with_what_it_needs():
    page, home = ((ROOT / name).read_text() for name in ("examples/README.md", "docs/index.md"))
    examples = [*(ROOT / "examples").glob("*.py"), *(ROOT / "examples").glob("*.ipynb")]
    assert set(re.findall(r"\]\(([^)]+)\)", page)) == {path.name for path in examples}
    rows = {row.split("](")[1].split(")")[0]: row for row in page.splitlines() if row.startswith("| **")}
    assert len(rows) == 10
    for name, row in rows.items():
        assert f"](../examples/{name})" in home
        code = (ROOT / "examples" / name).read_text()
        (needs,) = re.findall(r"Needs (scikit-learn.*) in addition to '.\[all\]'\.", ast.get_docstring(ast.parse(code)))
        for library, module in {"scikit-image": "skimage", "lightning": "lightning", "mlflow": "mlflow"}.items():
            needed = re.search(rf"^(from|import) {module}\b", code, re.M) is not None
            assert (library in row.split("|")[-2]) == (library in needs) == needed, (name, library)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the site, built without warnings."""
    site = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    return site


@pytest.mark.slow
@pytest.mark.parametrize("page", ["index.html", "api/stats.html"])
def test_the_search_works_from_a_folder(site, chrome, page):
    from selenium.webdriver.support.wait import WebDriverWait

    chrome.set_window_size(1280, 900)  # in a narrower window, the field hides behind a button
    chrome.get((site / page).as_uri())
    chrome.find_element("css selector", "input.md-search__input").send_keys("dead neurons")
    found = WebDriverWait(chrome, 20).until(lambda _: chrome.find_elements("css selector", ".md-search-result__link"))
    assert "examples/dead_neurons.html" in found[0].get_attribute("href")


@pytest.mark.slow
def test_the_site_is_complete_and_needs_no_network(site):
    """It has the rules, commands and examples, no set-up code of tests, and loads nothing from elsewhere."""
    from torchhook.cli.app import command
    from torchhook.rules import chosen

    rules, cli = (site / "rules.html").read_text(), (site / "cli.html").read_text()
    assert all(f'id="{rule.code.lower()}"' in rules and rule.hint[:20] in html.unescape(rules) for rule in chosen())
    assert all(f'id="torchhook-{name}' in cli for name in command.commands) and "--stop-on-error" in cli
    assert "<th></th>" not in cli and "<td><code>127.0.0.1</code></td>" in cli
    listed = (site / "examples" / "index.html").read_text()
    for example in (ROOT / "examples").glob("*.[pi]*"):
        assert f'href="{example.stem}.html"' in listed and (site / "examples" / f"{example.stem}.html").is_file()
    for file in site.rglob("*.html"):
        text = file.read_text()
        assert "<!-- before" not in text, file
        outside = re.findall(r"<(?:script|link|img|iframe)\b[^>]*(?:src|href)=\"(?:https?:)?//[^\"]+", text)
        assert not outside, (file, outside)
    examples = (site / "api" / "capture.html").read_text()
    assert "&gt;&gt;&gt;" in examples and "<blockquote>" not in examples


def claims():
    """The claims in the matrix marks of all test files, read without running them."""
    for file in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.matrix":
                yield tuple(ast.literal_eval(argument) for argument in node.args)


def test_the_page_of_hard_places_has_every_claim_and_none_fails():
    page = (TESTS.parent / "docs" / "hard_places.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| ")][1:]
    found = list(claims())
    assert len(found) > 40 and len(rows) == len(set(found)), "run make matrix"
    for place, claim in found:
        (row,) = [row for row in rows if row.startswith(f"| {place} | {claim} |")]
        assert "✓" in row, row
    table, tests = page.split("|---")[1:2] + page.split("## The tests")[1:]
    assert "fails" not in table
    listed = dict(re.findall(r"^(\d+)\. `(tests/[\w/.:]+)`$", tests, re.M))
    assert {row.split("|")[-2].strip() for row in rows} == set(listed)
    for test in listed.values():
        file, name = test.split("::")
        assert f"def {name}(" in (ROOT / file).read_text(), test


def test_every_attack_on_the_page_about_security_has_its_test():
    rows = re.findall(r"^\| (.+?) \| .+? \| `(tests/[\w/]+\.py)::(test_\w+)` \|$", _SECURITY, re.M)
    assert len(rows) >= 25 and len({attack for attack, _, _ in rows}) == len({*rows}) == len(rows)
    assert len(rows) == sum("`tests/" in line for line in _SECURITY.splitlines())  # none escapes the pattern
    missing = [f"{file}::{name}" for _, file, name in rows if not _has_test(ROOT / file, name)]
    assert not missing


def _has_test(file, name):
    return file.is_file() and re.search(rf"^def {name}\(", file.read_text(), re.M) is not None


_SECURITY = (ROOT / "docs/security.md").read_text()
