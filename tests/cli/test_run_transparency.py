"""``torchhook run SCRIPT`` beside ``python SCRIPT``, in real processes: a script sees, does and leaves the same."""

import os
import re
import signal
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest

import torchhook

TOLD = re.compile(
    rb"torchhook: (nothing was trained here: the script did not import torch\. .*"
    rb"|the script (failed .*|was interrupted) before it imported torch, so nothing was trained\.)\n$"
)
OURS = [sys.executable, "-m", "torchhook", "run"]
PLAIN = [sys.executable]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background of a shell it is ignored
    yield tmp_path
    signal.signal(signal.SIGINT, before)


def write(files):
    for name, text in files.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(textwrap.dedent(text).lstrip("\n"))


def both(*args, options=(), stdin=b"", python=()):
    """How Python, and how we run it."""
    return [
        subprocess.run([*begin[:1], *python, *begin[1:], *more, *args], input=stdin, capture_output=True, timeout=120)
        for begin, more in ((PLAIN, ()), (OURS, options))
    ]


def require_same(*args, **more):
    """What was written to standard output and standard error, if both do the same; we add a line to the latter."""
    plain, ours = both(*args, **more)
    assert ours.stdout == plain.stdout
    assert ours.returncode == plain.returncode
    assert TOLD.search(ours.stderr), ours.stderr
    assert TOLD.sub(b"", ours.stderr) == plain.stderr
    return ours.stdout.decode(), plain.stderr.decode()


WORLD = """
    '''What it says of itself.'''
    import os, re, signal, sys, threading, warnings

    def shown(value):
        return re.sub(" at 0x[0-9a-f]+", "", repr(value))

    class Plain:
        number: int = 3

    for name, value in [*globals().items()]:
        print(name, shown(value))
    print(sys.modules["__main__"].__dict__ is globals(), Plain.__module__, Plain.__annotations__)
    print(sys.argv, sys.path, sys.flags, sys.excepthook, sys.getrecursionlimit(), sys.gettrace(), sys.getprofile())
    print([handler for name in signal.Signals if (handler := signal.getsignal(name))], threading.enumerate()[1:])
    print(os.getcwd(), sorted(os.environ.items()), warnings.filters, sys.displayhook, shown(sys.path_hooks))
    print([(file.encoding, file.errors, file.isatty()) for file in (sys.stdin, sys.stdout, sys.stderr)])
    print([name for name in sys.modules if name.split(".")[0] in ("torch", "numpy")])
"""


@pytest.mark.parametrize(
    "args",
    [
        ["world.py"],
        ["./there/../there/world.py", "--every", "3", "--help", "-m", "--", "x y", ""],
        ["link.py", "-"],
        ["there/package", "--select", "TH1"],
        ["packed.zip", "run"],
        ["-m", "there.world", "--report", "x.html", "-m"],
        ["-m", "there.package"],
        ["--", "world.py"],
    ],
    ids=str,
)
def test_the_world_it_sees(folder, args):
    write(
        {
            "world.py": WORLD,
            "there/world.py": WORLD,
            "there/package/__main__.py": WORLD,
            "there/package/__init__.py": "",
        }
    )
    (folder / "link.py").symlink_to("there/world.py")
    with zipfile.ZipFile("packed.zip", "w") as packed:
        packed.write("world.py", "__main__.py")
    plain, ours = (done.stdout for done in both(*args))
    assert ours == plain
    assert len(plain.splitlines()) > 10


@pytest.mark.skipif(sys.version_info < (3, 11), reason="-P is of Python 3.11")
@pytest.mark.parametrize("args", [["there/world.py"], ["there"]], ids=str)
def test_a_safe_path_stays_safe(folder, args):
    write({"there/world.py": WORLD, "there/__main__.py": WORLD})
    require_same(*args, python=["-P"])


ENDS = {
    "nothing": "print('done')",
    "None": "import sys; sys.exit()",
    "0": "import sys; sys.exit(0)",
    "3": "import sys; sys.exit(3)",
    "259": "import sys; sys.exit(259)",
    "-1": "import sys; sys.exit(-1)",
    "True": "import sys; sys.exit(True)",
    "text": "import sys; print('out'); sys.exit('it is over')",
    "tuple": "import sys; sys.exit((1, 'x'))",
    "raised in a function": "def f():\n    def g():\n        raise SystemExit(5)\n    g()\nf()",
    "in a handler": "import sys\ntry:\n    1 / 0\nexcept ZeroDivisionError:\n    sys.exit(6)",
    "at once": "import os; print('x', flush=True); os._exit(7)",
    "in an atexit handler": "import atexit, sys; atexit.register(lambda: print('bye', __name__)); sys.exit(8)",
}


@pytest.mark.parametrize("text", ENDS.values(), ids=ENDS)
def test_its_exit_code(folder, text):
    write({"end.py": text})
    if "_exit" in text:
        plain, ours = both("end.py")
        assert (ours.returncode, ours.stdout, ours.stderr) == (7, plain.stdout, b"")
    else:
        require_same("end.py", "x")


FAILURES = {
    "an error": "def f(n):\n    return 1 / n\n\nprint('before')\nf(0)",
    "two errors": "try:\n    1 / 0\nexcept Exception as error:\n    raise KeyError('x') from error",
    "one during another": "try:\n    1 / 0\nexcept Exception:\n    {}['x']",
    "syntax": "print('never')\nx = = 3\n",
    "syntax of a module": "import broken",
    "a module": "import failing",
    "an interrupt": "raise KeyboardInterrupt",
    "an interrupt of its own": "class Stop(KeyboardInterrupt):\n    pass\nraise Stop(3)",
    "no exception": "import asyncio\nraise asyncio.CancelledError",
    "no source": "exec(compile('1 / 0', 'nowhere.py', 'exec'))",
    "a name": "__name__ = None\n1 / 0",
    "a warning": "import warnings\nwarnings.warn('careful')",
    "a hook": "import sys\nsys.excepthook = lambda kind, error, _: print('hooked', kind, sys.last_value)\n1 / 0",
    "a hook that exits": "import sys\nsys.excepthook = lambda *_: sys.exit(9)\n1 / 0",
    "a hook that fails": "import sys\nsys.excepthook = lambda *_: {}['y']\n1 / 0",
    "at exit": "import atexit, sys\natexit.register(lambda: print(sys.last_value))\n1 / 0",
    "torch": "import failing_torch",
    "torch by itself": "import sys\nsys.path.insert(0, 'other')\nimport torch",
}


@pytest.mark.parametrize("name", FAILURES)
@pytest.mark.parametrize("how", [["fails.py"], ["-m", "fails"]], ids=["file", "module"])
def test_its_tracebacks(folder, name, how):
    write(
        {
            "fails.py": FAILURES[name],
            "broken.py": "def (:",
            "failing.py": "\nimport json\njson.loads('{')\n",
            "failing_torch.py": "import sys\nsys.path.insert(0, 'other')\nimport torch\n",
            "other/torch/__init__.py": "from . import part\n",
            "other/torch/part.py": "raise KeyboardInterrupt\n",
        }
    )
    _, err = require_same(*how)
    assert err or name == "a hook that exits" or name == "a hook"


def test_an_import_of_torch_that_fails_is_shown_as_python_shows_it(folder):
    write({"train.py": "import torch", "torch.py": "from json import nothing"})
    assert "ImportError" in require_same("train.py")[1]


TALKING = """
    import atexit, os, signal, sys, time
    atexit.register(lambda: print("at exit"))
    if "own" in sys.argv:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, lambda number, frame: (print("got", number), sys.exit(11)))
    os.write(1, b"ready\\n"); time.sleep(60)
"""


@pytest.mark.parametrize("args", [["talking.py"], ["talking.py", "own"], ["-m", "talking"]], ids=str)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_its_signals(folder, number, args):
    write({"talking.py": TALKING})
    ends = []
    for begin in (PLAIN, OURS):
        process = subprocess.Popen([*begin, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
        ends.append((process.returncode, out, re.sub(rb"\n *\^+(?=\n)", b"", TOLD.sub(b"", err))))
    assert ends[0] == ends[1]
    assert ends[0][0] == (11 if "own" in args else -number)


def test_the_shell_sees_an_interrupt(folder):
    write({"talking.py": "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nimport time; time.sleep(60)"})
    line = f"{' '.join(OURS)} talking.py; echo $?"
    done = subprocess.run(["bash", "-c", line], capture_output=True, timeout=60)
    assert done.stdout == b"130\n"


def test_standard_input_is_its_own(folder):
    write({"read.py": "import sys\nprint(input(), sys.stdin.read().upper())"})
    assert require_same("read.py", stdin=b"first\nsecond\n")[0] == "first SECOND\n\n"


@pytest.fixture
def unread():
    """The end of a pipe whose other end is closed."""
    reading, writing = os.pipe()
    os.close(reading)
    yield writing
    os.close(writing)


@pytest.mark.parametrize("lines", [1, 100_000])
def test_a_reader_may_go(folder, unread, lines):
    write({"long.py": f"for number in range({lines}):\n    print(number)"})
    plain, ours = (
        subprocess.run([*begin, "long.py"], stdout=unread, stderr=subprocess.PIPE, timeout=60)
        for begin in (PLAIN, OURS)
    )
    assert ours.returncode == plain.returncode != 0
    assert b"BrokenPipeError" in plain.stderr
    assert [*filter(None, re.split(rb"torchhook: .*nothing was trained.*\n", ours.stderr))] == [plain.stderr]


def test_nobody_has_to_read_what_we_say(folder, unread):
    write({"train.py": "import sys\nprint(1)\nsys.exit(3)", "closed.py": "import sys\nsys.stderr.close()\nprint(1)"})
    for script, error, code in (("train.py", unread, 3), ("closed.py", None, 0)):
        done = subprocess.run([*OURS, script], stdout=subprocess.PIPE, stderr=error, timeout=60)
        assert (done.returncode, done.stdout) == (code, b"1\n")
    line = f"{' '.join(OURS)} train.py 2>&-"
    done = subprocess.run(["bash", "-c", line], stdout=subprocess.PIPE, timeout=60)
    assert (done.returncode, done.stdout) == (3, b"1\n")


def test_what_it_says_comes_before_what_we_say(folder):
    write({"train.py": "import sys\nprint('out')\nsys.exit('over')"})
    with Path("log").open("wb") as log:
        subprocess.run([*OURS, "train.py"], stdout=log, stderr=log, timeout=60)
    said = (folder / "log").read_text().splitlines()
    assert sorted(said[:2]) == ["out", "over"] and said[2].startswith("torchhook:")


def test_threads_are_waited_for(folder):
    write(
        {
            "threads.py": """
                import threading, time

                def work():
                    time.sleep(0.5)
                    print("worked", threading.main_thread() is threads[0])

                threads = [threading.current_thread()]
                threading.Thread(target=work).start()
                threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
                print("over")
                """
        }
    )
    assert require_same("threads.py")[0] == "over\nworked True\n"


@pytest.mark.parametrize("end", ["sys.exit(3)", "1 / 0", "raise KeyboardInterrupt"])
def test_what_it_made_goes_when_it_would(folder, end):
    write(
        {
            "made.py": f"""
                import atexit, sys

                class Thing:
                    def __init__(self, name):
                        self.name = name

                    def __del__(self):
                        print("gone:", self.name)

                def f():
                    local = Thing("local")
                    {end}

                atexit.register(print, "at exit")
                kept = Thing("kept")
                f()
                """
        }
    )
    assert require_same("made.py")[0].endswith("gone: kept\n")


def test_a_fork_of_it_ends_as_a_fork(folder):
    write(
        {
            "forks.py": """
                import os, sys
                if os.fork() == 0:
                    sys.exit(5)
                print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
                if os.fork() == 0:
                    1 / 0
                print(os.waitstatus_to_exitcode(os.wait()[1]))
                """
        }
    )
    assert require_same("forks.py")[0] == "5\n1\n"  # we say our line once


PROCESSES = """
    import multiprocessing, pickle, sys
    from concurrent.futures import ProcessPoolExecutor

    class Point:
        def __init__(self, x):
            self.x = x

    def double(point):
        return Point(2 * point.x)

    if __name__ == "__main__":
        print(pickle.loads(pickle.dumps(Point(3))).x, Point.__module__)
        for method in ("fork", "spawn", "forkserver"):
            context = multiprocessing.get_context(method)
            with ProcessPoolExecutor(2, mp_context=context) as pool:
                print(method, [point.x for point in pool.map(double, map(Point, range(3)))])
            child = context.Process(target=sys.exit, args=(4,))
            child.start()
            child.join()
            print(child.exitcode)
    else:
        assert __name__ == "__mp_main__" and sys.argv[1:] == ["a", "b"]
"""


@pytest.mark.parametrize("args", [["there/processes.py"], ["-m", "there.processes"], ["folder"]], ids=str)
def test_its_child_processes(folder, args):
    # There is no __main__ guard for a folder: multiprocessing does not import one again.
    write({"there/processes.py": PROCESSES, "folder/__main__.py": "import there_too\nthere_too.main()"})
    write({"folder/there_too.py": PROCESSES.replace('if __name__ == "__main__"', "def main()").split("    else:")[0]})
    assert "forkserver [0, 2, 4]" in require_same(*args, "a", "b")[0]


def test_a_module_of_a_package(folder):
    write(
        {
            "package/__init__.py": "import sys; print(__name__, sys.argv)",
            "package/helper.py": "value = 3",
            "package/train.py": "from .helper import value\nprint(value, __package__, __spec__.name)",
            "package/again.py": "print(__name__)",
            "package/inner/__init__.py": "import package.again; import package.inner.train",
            "package/inner/train.py": "from ..helper import value\nprint(value, __name__)",
        }
    )
    assert "['-m', 'x']" in require_same("-m", "package.train", "x")[0]
    assert "RuntimeWarning" in require_same("-m", "package.inner.train")[1]


def test_its_lines_can_be_read(folder):
    text = "import inspect\n\ndef f():\n    return 'source'\n\nprint(inspect.getsource(f), inspect.getsourcefile(f))"
    write({"there/lines.py": text, "lines/__main__.py": text + "\n1 / 0"})
    with zipfile.ZipFile("lines.zip", "w") as packed:
        packed.write("lines/__main__.py", "__main__.py")
    require_same("there/lines.py")
    require_same("-m", "there.lines")
    assert "1 / 0" in require_same("lines")[1]
    require_same("lines.zip")


TRAINING = """
    import os
    os.environ["OMP_NUM_THREADS"] = "1"  # it counts for what is imported from here on
    import sys
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, Dataset

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def forward(self, x):
            return self.layer(x).squeeze(1)

    class Numbers(Dataset):
        def __len__(self):
            return 64

        def __getitem__(self, number):
            return torch.full((4,), number / 64), float(number % 2)

    def train():
        torch.manual_seed(0)
        net = Net()
        optimizer = torch.optim.Adam(net.parameters())
        for x, y in DataLoader(Numbers(), 8, shuffle=True, num_workers=2):
            loss = (net(x) - y).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return net, loss.item()

    if __name__ == "__main__":
        print(torch.get_num_threads(), sys.argv[1:])
        net, loss = train()
        print(loss)
        torch.save(net, "net.pt")
        print(torch.load("net.pt", weights_only=False), Net.__module__)
        print(torch.randn(3), sys.excepthook)
        net(torch.randn(2, 3))
"""


def test_a_training(folder, monkeypatch):
    write({"train.py": TRAINING})
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    plain, ours = both("train.py", "--epochs", "3", options=["--every", "1", "--name", "mine", "--report", "it.json"])
    assert plain.stdout.startswith(b"1 ['--epochs', '3']\n")
    assert (ours.stdout, ours.returncode) == (plain.stdout, plain.returncode) and plain.returncode == 1
    shown, _, told = ours.stderr.decode().partition("4x1)\n")
    assert shown.startswith("Traceback") and str(Path(torchhook.__file__).parent) not in shown
    assert own_lines(shown) == own_lines(plain.stderr.decode())
    assert told.startswith(("\nFAILED  Net: ", "\nunfinished  Net: ")) and "passed" not in told
    assert f"torchhook {torchhook.__version__}, torch " in told
    typed = "$ torchhook run --every 1 --name mine --report it.json train.py --epochs 3"
    assert typed in " ".join(told.split())
    run = re.search(r"\ntorchhook: .* before it failed → torchhook dashboard (runs/mine\S*)\n", told)[1]
    assert (folder / run).is_dir()
    assert "\nwritten: it.json\n" in told and (folder / "it.json").is_file()


def own_lines(traceback):
    """Where in the script it went wrong."""
    return re.findall(r'File ".*train.py", (line \d+, in .*)', traceback)


def test_help_fits_in_80_columns(command):
    done = command("run", "--help")
    assert (done.code, done.err) == (0, "")
    assert "Usage: torchhook run [OPTIONS] {SCRIPT} [ARGS]..." in done.out
    assert "\\" not in done.out and "[/" not in done.out
    assert all(len(line) <= 80 for line in done.out.splitlines())
