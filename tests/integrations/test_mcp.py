"""``torchhook mcp``: what agents are told about runs, asked with the SDK's own client over stdio."""

import asyncio
import json
import os
import sys
import time
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from mcp import Client, StdioServerParameters, stdio_client
from torch import nn

from torchhook import Finding, Monitor, Report
from torchhook.core.site import Site
from torchhook.rules import RULES
from torchhook.stats.reduce import Reduce
from torchhook.training.logs import Entry
from torchhook.training.runs import Run, RunLog
from torchhook.training.runs.schema import FILE

pytestmark = pytest.mark.usefixtures("one_thread")

TOOLS = ["compare_runs", "layers", "list_runs", "rules", "series", "why"]
SECRET = "SecretNet"


@asynccontextmanager
async def served(folder, *options, cwd=None):
    """A function that calls a tool of a server in a process of its own: the answer, or the text of an error."""
    words = ["-m", "torchhook", "mcp", str(folder), *options]
    process = StdioServerParameters(command=sys.executable, args=words, env=dict(os.environ), cwd=cwd)
    async with Client(stdio_client(process)) as client:

        async def call(tool, **arguments):
            result = await client.call_tool(tool, arguments)
            text = result.content[0].text
            if result.is_error:
                return text
            assert json.loads(text, parse_constant=pytest.fail) == result.structured_content, "text for the model"
            return result.structured_content

        call.client = client
        yield call


def asked(folder, *questions, options=(), cwd=None):
    """The answers to some questions, each a tool and its arguments, from one server."""

    async def ask():
        async with served(folder, *options, cwd=cwd) as call:
            return [await call(tool, **arguments) for tool, arguments in questions]

    return asyncio.run(ask())


def trained(root, name, bias, steps=30, rate=0.1):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
    nn.init.constant_(model[0].bias, bias)
    optimizer = torch.optim.SGD(model.parameters(), rate)
    with Monitor(model, optimizer, every=1, price=None, to=RunLog(root / name)) as monitor:
        for _ in range(steps):
            x = torch.randn(64, 8)
            loss = F.cross_entropy(model(x), (x[:, 0] > 0).long())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            monitor.step(loss)


def written(folder, steps, paths=("fc",), findings=(), model="Net", ends=True, loss=lambda step: 1 / (step + 1)):
    """A run with known numbers: at step n, all values at each path are n."""
    log = RunLog(folder)
    log.begin({"model": model})
    for step in steps:
        write(log, step, paths, loss)
    for finding in findings:
        log.found(finding)
    if ends:
        log.end(Report(tuple(findings), model), "ended")
    return log


def write(log, step, paths=("fc",), loss=lambda step: 1 / (step + 1)):
    reduce = Reduce("moments")
    for path in paths:
        reduce.cell(Site(path), nn.Linear(1, 1)).update(torch.full((4,), float(step)))
    log.write(Entry(step, time.time(), reduce.snapshot(), losses={step: loss(step)}))


def contents(folder):
    return {
        (str(path.relative_to(folder)), path.lstat().st_mtime_ns): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A healthy run, and a newer one with dead units."""
    root = tmp_path_factory.mktemp("trained") / "runs"
    trained(root, "healthy", 0.0)
    trained(root, "dead", -100.0)
    return root


def test_every_tool_says_what_the_run_says_and_changes_nothing(runs):
    before = contents(runs)
    listed, why, loss, std, layers, compared, rules, rule = asked(
        runs,
        ("list_runs", {}),
        ("why", {}),
        ("series", {"run": "healthy"}),
        ("series", {"run": "healthy", "what": "std", "layers": "[01]", "port": "grad_output"}),
        ("layers", {"run": "dead"}),
        ("compare_runs", {"runs": ["healthy", "dead"]}),
        ("rules", {}),
        ("rules", {"rule": "dead-units"}),
    )
    assert contents(runs) == before
    assert [row["run"] for row in listed["runs"]] == ["dead", "healthy"] and listed["left_out"] == {}
    dead, healthy = listed["runs"]
    assert dead["errors"] > 0 == healthy["errors"] and {dead["state"], healthy["state"]} == {"ended"}
    with Run(runs / "dead") as run:
        said = run.why().to_dict()
        assert json.loads(json.dumps(said["findings"])) == why["findings"] and why["findings"][0]["code"] == "TH201"
        assert (why["schema"], why["run"], why["left_out"]) == (1, "dead", {})
        window = run.window(29)
    with Run(runs / "healthy") as run:
        assert dict(zip(loss["steps"], loss["lines"][0]["values"], strict=True)) == pytest.approx(run.losses, rel=1e-5)
        series = run.series("std", "grad_output")
    assert [line["path"] for line in std["lines"]] == ["0", "1"] and std["steps"] == series.steps
    assert std["lines"][1]["values"] == pytest.approx(series.values[1].tolist(), rel=1e-5)
    row = layers["layers"][1]
    assert (row["path"], row["module"], row["findings"]) == ("1", "ReLU", ["TH201"]) and __file__ in row["line"]
    assert (layers["step"], row["zero_fraction"]) == (29, 1) == (29, window["1"].zero_fraction)
    assert row["grad_norm"] == pytest.approx(window["1", "grad_output"].l2, rel=1e-5)
    assert "grad_output" in layers["ports"]
    assert [one["run"] for one in compared["runs"]] == ["healthy", "dead"]
    assert compared["runs"][1]["findings"][0].startswith("TH201 at 1") and not compared["runs"][0]["findings"]
    assert compared["runs"][0]["lowest_loss"] == pytest.approx(min(loss["lines"][0]["values"]))
    assert compared["std"][0]["name"] == "1" and compared["std"][0]["values"][1] == 0, "a zero differs most"
    assert (
        {row["code"] for row in rules["rules"]} == set(RULES)
        and rule["rules"][0]["code"] == "TH201"
        and rule["rules"][0]["what_to_do"]
    )


def test_the_tools_are_typed_and_without_allow_code_none_runs_code(runs):
    async def tools(*options):
        async with served(runs, *options) as call:
            return {tool.name: tool for tool in (await call.client.list_tools()).tools}, await call(
                "diagnose", model="a:b"
            )

    plain, refused = asyncio.run(tools())
    assert sorted(plain) == TOOLS and refused == "Unknown tool: diagnose"
    assert all(tool.annotations.read_only_hint and tool.description for tool in plain.values())
    assert plain["series"].output_schema["properties"]["steps"] == {
        "items": {"type": "integer"},
        "title": "Steps",
        "type": "array",
    }
    finding = plain["why"].output_schema["$defs"]["finding"]["properties"]
    assert finding["tried"]["anyOf"][0] == {"$ref": "#/$defs/trial"} and finding["next"]["type"] == "string"
    assert all(tool.output_schema.get("additionalProperties") is not True for tool in plain.values())
    with_code, _ = asyncio.run(tools("--allow-code"))
    assert with_code["diagnose"].output_schema == plain["why"].output_schema
    assert sorted(with_code) == sorted([*TOOLS, "diagnose"]) and not with_code["diagnose"].annotations.read_only_hint


HOSTILE = [
    ("why", {"run": "../outside"}, "there is no run '../outside'"),
    ("why", {"run": "runs/../../outside"}, "there is no run"),
    ("why", {"run": "/etc"}, "there is no run '/etc'"),
    ("why", {"run": "{outside}"}, "there is no run"),
    ("why", {"run": "net/run.sqlite"}, "there is no run"),
    ("why", {"run": "net\0"}, "there is no run"),
    ("why", {"run": ""}, "there is no run ''"),
    ("why", {"run": "."}, "there is no run '.'"),
    ("why", {"run": "n" * 1_000_000}, "run must have at most 300 characters, not 1,000,000"),
    ("why", {"run": 7}, "run\n  Input should be a valid string"),
    ("why", {"run": ["net"]}, "run\n  Input should be a valid string"),
    ("why", {"run": None}, "run\n  Input should be a valid string"),
    ("why", {"name": "net"}, "name\n  Extra inputs are not permitted"),
    ("why", {"run": "linked"}, "there is no run 'linked'"),
    ("why", {"run": "outside"}, "there is no run 'outside'"),
    ("why", {"run": "hollow"}, "hollow/run.sqlite' is refused: 'run.sqlite' is a link"),
    ("layers", {"run": "hollow"}, "is a link"),
    ("series", {"run": "hollow"}, "is a link"),
    ("compare_runs", {"runs": ["net", "hollow"]}, "is a link"),
    ("compare_runs", {"runs": ["net"]}, "runs must have 2 to 6 names, not 1"),
    ("compare_runs", {"runs": ["net"] * 1000}, "not 1000"),
    ("compare_runs", {"runs": "net"}, "Input should be a valid list"),
    ("series", {"what": "__class__"}, "what must be one of loss, rate, count, mean"),
    ("series", {"what": "mean", "port": "output'; DROP TABLE losses"}, "nothing was measured at the port"),
    ("series", {"what": "mean", "layers": "no.such"}, "no layer matches 'no.such'; there are 'fc'"),
    ("series", {"what": "mean", "layers": "*a" * 5000}, "layers must have at most 300 characters"),
    ("series", {"after": "x"}, "Input should be a valid integer"),
    ("rules", {"rule": "TH999"}, "there is no rule 'TH999'"),
    ("list_runs", {"name": "[" * 400}, "name must have at most 300 characters"),
    ("no_such_tool", {}, "Unknown tool"),
]


def test_hostile_arguments_are_refused_in_words_and_nothing_outside_is_seen(tmp_path):
    outside, root = tmp_path / "outside", tmp_path / "runs"
    written(outside, range(3), model=SECRET)
    written(root / "net", range(3))
    (root / "linked").symlink_to(outside)
    (root / "hollow").mkdir()
    (root / "hollow" / FILE).symlink_to(outside / FILE)
    before = contents(tmp_path)
    questions = [
        (tool, {key: value.format(outside=outside) if value == "{outside}" else value for key, value in given.items()})
        for tool, given, _ in HOSTILE
    ]
    *answers, listed, healthy = asked(root, *questions, ("list_runs", {}), ("why", {"run": "net"}))
    for (tool, given, words), answer in zip(HOSTILE, answers, strict=True):
        assert isinstance(answer, str) and words in answer, (tool, given, answer)
        assert len(answer) < 1500 and "Traceback" not in answer and SECRET not in answer
        assert str(tmp_path) not in answer.replace(repr(str(outside)), ""), answer
    rows = {row["run"]: row for row in listed["runs"]}
    assert set(rows) == {"net", "hollow"} and "is a link" in rows["hollow"]["unreadable"]
    assert SECRET not in str(listed) and healthy["model"] == "Net", "it still answers"
    assert contents(tmp_path) == before


def test_a_link_to_the_latest_run_cannot_lead_outside(tmp_path):
    written(tmp_path / "outside", range(3), model=SECRET)
    written(tmp_path / "runs" / "net", range(3))
    (tmp_path / "runs" / "latest").symlink_to(tmp_path / "outside")
    (why,) = asked(tmp_path / "runs", ("why", {}))
    assert why["model"] == "Net"


def test_no_run_hides_another_by_a_name_that_looks_the_same(tmp_path):
    for name in ("net", "net\x07", "net\u202e", "net\\u0007"):
        written(tmp_path / name, range(3), model=SECRET if name != "net" else "Net")
    listed, plain, bell, again = asked(
        tmp_path,
        ("list_runs", {}),
        ("why", {"run": "net"}),
        ("why", {"run": "net\x07"}),
        ("why", {"run": "net\\u202e"}),
    )
    assert {row["run"] for row in listed["runs"]} == {"net", "net\\u0007", "net\\u202e"} and len(listed["runs"]) == 4
    assert (plain["run"], plain["model"]) == ("net", "Net")
    assert bell["model"] == again["model"] == SECRET and again["run"] == "net\\u202e"


def test_answers_are_small_and_say_what_they_left_out(tmp_path):
    paths = [f"blocks.{number}" for number in range(120)]
    consequences = tuple(Finding("TH202", "info", "x", path) for path in paths[:30])
    found = [
        Finding("TH201", "error", "m" * 100_000, path, 1, {"a": list(range(5000))}, affected=consequences)
        for path in paths[:40]
    ]
    written(tmp_path / "large", range(260), paths, found)
    why, loss, std, later, layers, one, compared = asked(
        tmp_path,
        ("why", {}),
        ("series", {}),
        ("series", {"what": "mean"}),
        ("series", {"after": 240}),
        ("layers", {}),
        ("layers", {"layers": "blocks.119"}),
        ("compare_runs", {"runs": ["large", "large"]}),
    )
    assert len(compared["runs"][0]["findings"]) == 10 and compared["left_out"] == {"findings": 60}
    assert len(why["findings"]) == 20 and len(why["findings"][0]["explains"]) == 5
    assert why["left_out"] == {"findings": 20, "explains": 20 * 25, "a": 20 * 4940}
    assert len(json.dumps(why)) < 40_000
    for curves in loss, std:
        assert 100 < len(curves["steps"]) <= 200 and [curves["steps"][0], curves["steps"][-1]] == [0, 259]
        assert curves["left_out"]["steps"] == 260 - len(curves["steps"])
        assert all(len(line["values"]) == len(curves["steps"]) for line in curves["lines"])
    assert len(std["lines"]) == 10 and std["left_out"]["lines"] == 110
    assert std["lines"][3]["values"] == std["steps"], "the mean at step n is n"
    assert (later["steps"], later["left_out"]) == (list(range(241, 260)), {})
    assert len(layers["layers"]) == 100 and layers["left_out"] == {"layers": 20}
    assert [row["path"] for row in one["layers"]] == ["blocks.119"] and one["left_out"] == {}


def test_what_is_not_finite_is_a_word_and_what_was_not_measured_is_null(tmp_path):
    log = written(tmp_path / "net", range(2), ends=False, loss=lambda step: (float("nan"), float("inf"))[step])
    write(log, 2, ["late"])
    log.end(Report(), "ended")
    loss, mean, compared = asked(
        tmp_path,
        ("series", {}),
        ("series", {"what": "mean"}),
        ("compare_runs", {"runs": ["net", "net"]}),
    )
    assert loss["lines"][0]["values"] == ["NaN", "Infinity", pytest.approx(1 / 3, rel=1e-5)]
    assert [line["values"] for line in mean["lines"]] == [[0, 1, None], [None, None, 2]]
    assert compared["runs"][0]["first_loss"] == "NaN" and compared["runs"][0]["lowest_at"] == 2


def test_a_run_is_read_while_it_is_written(tmp_path):
    async def follow():
        log = written(tmp_path / "net", range(3), ends=False)
        async with served(tmp_path) as call:
            states, steps = [], []
            for step in (3, 4, 5):
                write(log, step)
                states.append((await call("list_runs"))["runs"][0]["state"])
                steps.append((await call("series", after=step - 2))["steps"])
            log.end(Report(), "ended")
            return states, steps, (await call("why"))["state"], await call("series")

    states, steps, state, loss = asyncio.run(follow())
    assert states == ["running"] * 3 and steps == [[2, 3], [3, 4], [4, 5]]
    assert state == "ended" and loss["steps"] == list(range(6))


def test_broken_runs_are_a_row_that_says_why_beside_healthy_ones(tmp_path):
    root = tmp_path / "runs"
    for name, data in {"garbage": b"\0" * 5000, "empty": b"", "line\nbreak": b"SQLite format 3\0"}.items():
        (root / name).mkdir(parents=True)
        (root / name / FILE).write_bytes(data)
    (root / os.fsdecode(b"odd\xff")).mkdir()
    (root / os.fsdecode(b"odd\xff") / FILE).write_bytes(b"x")
    written(root / "net", range(3))
    listed, healthy, broken, empty = asked(
        root, ("list_runs", {}), ("why", {"run": "net"}), ("why", {"run": "garbage"}), ("list_runs", {"name": "x*"})
    )
    rows = {row["run"]: row for row in listed["runs"]}
    assert set(rows) == {"garbage", "empty", "line\nbreak", "odd\\udcff", "net"} and rows["net"]["unreadable"] is None
    for name in set(rows) - {"net"}:
        assert rows[name]["state"] == "unreadable" and rows[name]["unreadable"]
        assert str(tmp_path) not in rows[name]["unreadable"], "names of files are relative to the folder"
    assert healthy["model"] == "Net" and "garbage" in broken and str(tmp_path) not in broken
    assert empty == {"runs": [], "left_out": {}}


def test_a_folder_that_is_not_there_yet_is_an_answer(tmp_path):
    async def wait():
        async with served(tmp_path / "runs") as call:
            before = await call("why")
            written(tmp_path / "runs" / "net", range(3))
            return before, await call("why")

    before, after = asyncio.run(wait())
    assert "there is no folder 'runs'" in before and str(tmp_path) not in before
    assert after["model"] == "Net"


def test_a_single_run_is_served_as_the_only_one(tmp_path):
    written(tmp_path / "net", range(3))
    written(tmp_path / "other", range(3), model=SECRET)
    listed, why, refused = asked(tmp_path / "net", ("list_runs", {}), ("why", {}), ("why", {"run": "other"}))
    assert [row["run"] for row in listed["runs"]] == ["net"] and why["model"] == "Net"
    assert "there is no run 'other'" in refused


PROJECT = """
import os, subprocess, sys, time
from pathlib import Path
import torch
from torch import nn

print("a line that is not JSON")

def dead():
    os.system("echo another line")
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    nn.init.constant_(net[0].bias, -100)
    return net

def batches():
    return [(torch.randn(64, 8), torch.randint(2, (64,))) for _ in range(4)]

def slow():
    Path("started").touch()
    time.sleep(300)

def crashing():
    return 1 / 0

def leaving():
    os._exit(7)

def spawning():
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    return dead()
"""

HOSTILE_CODE = [
    ({"model": "--help"}, "model must look like package.module:name, not '--help'"),
    ({"model": "net:dead --report=x.html"}, "model must look like"),
    ({"model": "net.py"}, "model must look like"),
    ({"model": "../net:dead"}, "model must look like"),
    ({"model": "net:dead\0"}, "model must look like"),
    ({"model": "net:dead", "inputs": ["--report=x.html"]}, "inputs must look like 2,3,224,224 or 2,64:int"),
    ({"model": "net:dead", "inputs": ["9" * 400]}, "inputs must look like"),
    ({"model": "net:dead", "loader": "--device=x"}, "loader must look like"),
    ({"model": "net:dead", "inputs": ["2,8"], "steps": -1}, "steps must be 0 to 10,000, not -1"),
    ({"model": "net:dead"}, "pass either inputs or loader"),
    ({"model": "net:nothing", "inputs": ["2,8"]}, "net has no 'nothing'"),
    ({"model": "net:crashing", "inputs": ["2,8"]}, "ZeroDivisionError: division by zero (net.py:"),
    ({"model": "net:leaving", "inputs": ["2,8"]}, "the diagnosis ended with exit code 7: a line"),
]


@pytest.fixture
def project(tmp_path):
    (tmp_path / "net.py").write_text(PROJECT)
    return tmp_path


@pytest.mark.slow
def test_with_allow_code_a_model_is_diagnosed_in_a_process_of_its_own(project):
    good = {"model": "net:dead", "loader": "net:batches", "loss": "cross_entropy", "steps": 20}
    questions = [("diagnose", given) for given in (good, *(given for given, _ in HOSTILE_CODE))]
    found, *refused = asked("runs", *questions, options=["--allow-code"], cwd=project)
    dead = found["findings"][0]
    assert (dead["code"], dead["site"], dead["module"]) == ("TH201", "1", "ReLU") and found["schema"] == 1
    assert (found["run"], found["state"], found["ok"]) == ("net:dead", "diagnosed", False)
    for (given, words), answer in zip(HOSTILE_CODE, refused, strict=True):
        assert isinstance(answer, str) and words in answer and "Traceback" not in answer, (given, answer)
    assert sorted(path.name for path in project.iterdir() if path.name != "__pycache__") == ["net.py"]


def processes_in(folder, expected):
    """How many processes run in a folder, if need be some seconds after the others should have ended."""
    for _ in range(100):
        found = [link for link in Path("/proc").glob("[0-9]*/cwd") if _target(link) == str(folder.resolve())]
        if len(found) == expected:
            break
        time.sleep(0.1)
    return len(found)


def _target(link):
    try:
        return str(link.readlink())
    except OSError:  # it has ended
        return None


@pytest.mark.slow
def test_a_diagnosis_ends_after_its_time(project):
    async def wait():
        async with served("runs", "--allow-code", "--seconds", "2", cwd=project) as call:
            said = await call("diagnose", model="net:slow", inputs=["2,8"])
            return said, await call("rules", rule="TH201"), processes_in(project, 1)

    said, rules, alive = asyncio.run(wait())
    assert "took longer than 2 seconds and was ended" in said and rules["rules"]
    assert alive == 1, "the server alone"


@pytest.mark.slow
def test_what_a_diagnosis_started_ends_with_it(project):
    async def wait():
        async with served("runs", "--allow-code", cwd=project) as call:
            await call("diagnose", model="net:spawning", inputs=["2,8"])
            return processes_in(project, 1)

    assert asyncio.run(wait()) == 1, "the server alone"


@pytest.mark.slow
def test_a_diagnosis_ends_when_it_is_no_longer_asked_for(project):
    async def leave():
        async with served("runs", "--allow-code", cwd=project) as call:
            asking = asyncio.ensure_future(call("diagnose", model="net:slow", inputs=["2,8"]))
            while not (project / "started").exists():
                await asyncio.sleep(0.1)
            asking.cancel()
            await asyncio.wait([asking])
            await call("rules", rule="TH201")
            return processes_in(project, 1)

    assert asyncio.run(leave()) == 1, "the server alone"
    assert processes_in(project, 0) == 0


def test_without_the_sdk_it_says_what_to_install(command, monkeypatch):
    monkeypatch.setitem(sys.modules, "mcp.server.mcpserver", None)
    done = command("mcp")
    assert done.code == 2 and 'torchhook mcp needs mcp: pip install "torchhook[mcp]"' in done.err
