"""Files that are cut, changed or made by others give our error or a result, and nothing in them is a program."""

import json
import shutil

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from typer.testing import CliRunner

from torchhook import FileError, Recording, diff, record
from torchhook.cli.app import app
from torchhook.compare.recordings.files import LINES, TensorFile, write_tensors
from torchhook.core.errors import TorchhookError


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recorded")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2))
    record(model, torch.randn(3, 6), to=folder / "a.th")
    return folder / "a.th"


@pytest.fixture
def twin(recorded, tmp_path):
    shutil.copytree(recorded, tmp_path / "b.th")
    return tmp_path / "b.th"


def read_all(path):
    recording = Recording(path)
    recording.inputs()
    dict(recording.parameters())
    for rank in recording.ranks:
        for turn in rank.turns:
            for observed in rank.run(turn).observations.values():
                list(observed.tensors)
    return repr(recording)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("recording.json", b""),
        ("recording.json", b"[" * 100_000),
        ("recording.json", b'{"version": 99}'),
        ("recording.json", b'{"version": 1, "version": 1}'),
        ("recording.json", b"\xff\xfe"),
        ("values.jsonl", b'{"step": -1, "turn": 0, "port": "output", "path": ""}\n'),
        ("values.jsonl", b'{"step": 0, "turn": 0, "port": "__class__", "path": ""}\n'),
        ("values.jsonl", b'{"step": 0, "turn": 0, "port": "output", "path": 3}\n'),
        ("values.jsonl", b"[1, 2]\n"),
        ("values.jsonl", b"{" * 50_000 + b"\n"),
        ("noise.json", b'[{"port": "output"}]'),
        ("values-00000.safetensors", b""),
        ("values-00000.safetensors", (2**60).to_bytes(8, "little") + b"{}"),
        ("values-00000.safetensors", (20).to_bytes(8, "little") + b'{"0":{"dtype":"F32"'),
    ],
)
def test_a_file_that_is_none_is_said_by_its_name(twin, file, content):
    (twin / file).write_bytes(content)
    with pytest.raises(FileError, match=r"b\.th' is not a recording, or is damaged: "):
        read_all(twin)


@pytest.mark.parametrize(
    "change",
    [
        lambda stored: {**stored, "file": 7},
        lambda stored: {**stored, "key": "../../etc/passwd"},
        lambda stored: {**stored, "shape": [-1]},
        lambda stored: {**stored, "shape": [2**62, 2**62]},
        lambda stored: {**stored, "dtype": 3},
        lambda stored: {**stored, "dtype": "pickle"},
        lambda stored: {**stored, "sketch": 0},
        lambda stored: {**stored, "sketch": 99},
        lambda stored: {**stored, "shards": [[0, 0]]},
    ],
)
def test_lines_that_lie_are_refused(recorded, twin, change):
    lines = [json.loads(line) for line in (twin / LINES).read_text().splitlines()]
    lines[-1]["tensors"] = [change(stored) for stored in lines[-1]["tensors"]]
    (twin / LINES).write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(TorchhookError):
        read_all(twin)
        diff(recorded, twin)


def test_a_recording_that_was_cut_has_what_came_before(recorded, twin):
    text = (twin / LINES).read_bytes()
    (twin / LINES).write_bytes(text[:-10])
    assert len(Recording(twin).ranks[0].lines) == len(Recording(recorded).ranks[0].lines) - 1
    assert diff(recorded, twin).same


def test_a_cut_recording_does_not_pass_as_agreement(recorded, twin):
    lines = (twin / LINES).read_bytes().splitlines(keepends=True)
    (twin / LINES).write_bytes(b"".join(lines[:-3]))
    for a, b, name in ((recorded, twin, "b"), (twin, recorded, "a")):
        found = diff(a, b)
        assert not found.complete and found.verdict.endswith(f"; but {name} ends before the model returned")
        assert f"{name} ends before the model returned" in found.notes and found.to_dict()["complete"] is False
        missing = {one.reason for one in found.unmatched if one.model != name}
        assert missing == {f"{name} did not record it"}
    done = CliRunner().invoke(app, ["diff", str(recorded), str(twin)])
    assert done.exit_code == 2 and "but b ends before the model returned" in done.stdout
    assert diff(recorded, recorded).complete


def test_a_line_that_is_not_json_is_said(twin):
    with (twin / LINES).open("ab") as file:
        file.write(b"\xff\xfe\n")
    with pytest.raises(FileError, match="it has a line that is not JSON"):
        read_all(twin)


def test_an_empty_recording_is_named(recorded, tmp_path):
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2))
    with record(model, to=tmp_path / "empty.th"):
        pass
    empty = tmp_path / "empty.th"
    assert "0 steps" in repr(Recording(empty))
    for look in (
        lambda: diff(recorded, empty),
        lambda: diff(empty, recorded),
        lambda: diff(model, empty),
        lambda: Recording(empty)[""],
        lambda: Recording(empty).inputs(),
    ):
        with pytest.raises(FileError, match=r"empty\.th' is empty: the model was not called while it was recorded"):
            look()


def test_tensors_that_do_not_fit_their_file(tmp_path):
    file = tmp_path / "x.safetensors"
    write_tensors(file, {"a": torch.arange(4.0), "b": torch.empty(0, 3)})
    assert TensorFile(file)["a"].equal(torch.arange(4.0)) and TensorFile(file)["b"].shape == (0, 3)
    data = file.read_bytes()
    file.write_bytes(data[:-4])
    with pytest.raises(FileError, match="not in the file"):
        TensorFile(file)["a"]
    for wrong in (b'"shape":[9]', b'"shape":[]'):
        file.write_bytes(data.replace(b'"shape":[4]', wrong.ljust(11)))
        with pytest.raises(FileError, match="size of its shape"):
            TensorFile(file)["a"]
    file.write_bytes(data.replace(b'"F32"', b'"Q99"', 1))
    with pytest.raises(FileError, match="unknown dtype"):
        TensorFile(file)["a"]
    with pytest.raises(FileError, match="no tensor 'c'"):
        TensorFile(tmp_path / "x.safetensors")["c"]


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_flipped_bits_and_cut_files(recorded, tmp_path, data):
    path = tmp_path / "c.th"
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(recorded, path)
    file = path / data.draw(st.sampled_from(sorted(one.name for one in path.iterdir())))
    content = bytearray(file.read_bytes())
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content))) :]
    for _ in range(data.draw(st.integers(0, 4)) if content else 0):
        content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    file.write_bytes(content)
    try:
        read_all(path)
        diff(recorded, path)
    except (TorchhookError, ValueError):  # of which a ValueError is about what can be compared
        pass


def test_a_link_in_place_of_a_file_is_read_as_what_it_is(twin, tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text("nothing to see")
    file = twin / "values-00000.safetensors"
    file.unlink()
    file.symlink_to(secret)
    with pytest.raises(FileError) as raised:
        read_all(twin)
    assert "nothing to see" not in str(raised.value)
