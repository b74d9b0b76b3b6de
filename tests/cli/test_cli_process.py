"""The command as a process: what it imports, what is missing, and what a terminal sees."""

import os
import pty
import re
import subprocess
import sys
import threading

import pytest

import torchhook

RUN = "import sys; from torchhook.cli import main; sys.argv = ['torchhook', *{arguments!r}]\n"
SEEN = "try: main()\nexcept SystemExit as ended: print(ended.code, 'torch' in sys.modules)"
MODULES = """
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] == {missing!r}:
            raise ModuleNotFoundError(f'No module named {{name!r}}', name={missing!r})
import sys; sys.meta_path.insert(0, Missing())
"""
COLOUR = re.compile(r"\x1b\[[\d;]*3\d[\d;]*m")


@pytest.mark.parametrize(
    "arguments", [["--version"], ["--help"], ["diagnose", "--help"], ["rules", "--help"], ["replay", "--help"]]
)
def test_help_does_not_import_torch(in_python, arguments):
    done = in_python(RUN.format(arguments=arguments) + SEEN)
    assert done.err == ""
    assert done.out.splitlines()[-1] == "0 False"


def test_usage_is_checked_before_torch_is_imported(in_python):
    done = in_python(RUN.format(arguments=["diagnose", "small.net:Net", "--input", "x"]) + SEEN)
    assert done.out == "2 False\n"


@pytest.mark.parametrize("missing", ["rich", "typer"])
def test_says_what_to_install(in_python, missing):
    done = in_python(MODULES.format(missing=missing) + RUN.format(arguments=["rules"]) + "main()")
    assert done.code == 2
    assert done.err == f'torchhook: the command line needs {missing}: pip install "torchhook[cli]"\n'


def test_version(command):
    assert command("--version") == (0, f"torchhook {torchhook.__version__}\n", "")


@pytest.mark.parametrize("name", ["", "diagnose", "rules", "replay"])
def test_help_fits_in_80_columns(command, name):
    done = command(*filter(None, [name]), "--help")
    assert (done.code, done.err) == (0, "")
    assert f"Usage: torchhook {name}".strip() in done.out
    assert "\x1b" not in done.out and "\\" not in done.out and "[/" not in done.out
    assert all(len(line) <= 80 for line in done.out.splitlines())
    prose = re.findall(r"^ \S.*$", done.out, re.MULTILINE)
    assert all(len(line.split()) > 1 for line in prose), "a word is alone on its line"


def test_no_arguments_show_the_help(command):
    done = command()
    assert done.code == 2 and "diagnose" in done.out + done.err


def test_on_a_terminal_a_bar_is_drawn_and_standard_output_stays_clean(project):
    arguments = ["diagnose", "small.net:Net", "--loader", "small.data:batches", "--steps", "12", "--format", "json"]
    out, err = in_terminal(arguments, out=False)
    assert "loading" in err and "training a copy" in err and "12/12" in err
    assert out.startswith("{") and out.endswith("}\n")
    assert err.endswith("\x1b[2K")  # nothing of it stays


def test_colours_are_for_terminals_that_want_them(project):
    assert COLOUR.search(in_terminal(["rules", "--help"])[0])
    assert not COLOUR.search(in_terminal(["rules", "--help"], NO_COLOR="1")[0])
    assert "\x1b" not in in_terminal(["rules", "--help"], out=False)[0]


def in_terminal(arguments, out=True, **environment):
    """What the command writes to standard output (a terminal, or not) and standard error (a terminal)."""
    ends = [pty.openpty(), pty.openpty() if out else os.pipe()]
    (err_read, err_write), (out_read, out_write) = ends
    process = subprocess.Popen(
        [sys.executable, "-c", RUN.format(arguments=arguments) + "main()"],
        stdin=subprocess.DEVNULL,
        stdout=out_write,
        stderr=err_write,
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", "OMP_NUM_THREADS": "1", **environment},
    )
    for end in (out_write, err_write):
        os.close(end)
    said = {}
    readers = [
        threading.Thread(target=lambda end=end: said.update({end: drained(end)})) for end in (out_read, err_read)
    ]
    for reader in readers:
        reader.start()
    process.wait(120)
    for reader in readers:
        reader.join()
    return said[out_read].replace("\r\n", "\n"), said[err_read]


def drained(end):
    parts = []
    while True:
        try:
            part = os.read(end, 4096)
        except OSError:  # a terminal whose other end is closed
            part = b""
        if not part:
            os.close(end)
            return b"".join(parts).decode()
        parts.append(part)
