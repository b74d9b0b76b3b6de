"""A script in this process: what is told of the modules it imports, and how what it raised is shown."""

import importlib.util
import io
import sys
from importlib import import_module

import pytest

from torchhook.training.launch.script import Script, UnrunnableError, _Arrival, leave, say, show


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module that can be imported, and its name."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    (tmp_path / "late_guest.py").write_text(
        "import os\nif 'LATE' in os.environ: raise ValueError('not yet')\nhere = 1\n"
    )
    yield "late_guest"
    sys.modules.pop("late_guest", None)


@pytest.fixture
def own_process(monkeypatch, tmp_path):
    """What a script changes of the interpreter is changed back."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [*sys.argv])
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    return tmp_path


def test_it_is_told_when_a_module_is_whole(module):
    seen = []
    _Arrival(module, lambda: seen.append(sys.modules[module].here))
    guest = import_module(module)
    assert seen == [1]
    assert "exec_module" not in vars(guest.__spec__.loader)


def test_who_only_asks_for_a_module_does_not_import_it(module):
    seen = []
    _Arrival(module, lambda: seen.append(module))
    assert importlib.util.find_spec(module) and importlib.util.find_spec(module)
    assert seen == []
    import_module(module)
    importlib.reload(sys.modules[module])
    assert seen == [module]


def test_a_module_that_is_here_has_arrived(module):
    import_module(module)
    finders = [*sys.meta_path]
    seen = []
    _Arrival(module, lambda: seen.append(module))
    assert seen == [module] and sys.meta_path == finders


def test_an_import_that_fails_may_be_tried_again(module, monkeypatch):
    seen = []
    finders = [*sys.meta_path]
    _Arrival(module, lambda: seen.append(module))
    monkeypatch.setenv("LATE", "1")
    with pytest.raises(ValueError, match="not yet"):
        import_module(module)
    assert seen == []
    monkeypatch.delenv("LATE")
    import_module(module)
    assert seen == [module] and sys.meta_path == finders


def test_a_finder_may_give_the_same_loader_again(module):
    class Remembering:
        spec = importlib.util.find_spec(module)

        def find_spec(self, name, path=None, target=None):
            return self.spec if name == module else None

    seen = []
    sys.meta_path.insert(0, Remembering())
    _Arrival(module, lambda: seen.append(module))
    assert importlib.util.find_spec(module)
    assert import_module(module).here and seen == [module]


@pytest.mark.parametrize("place", [0, 1])
def test_others_who_listen_are_told_too(module, place):
    """As wrapt does it: find with everybody's help, and wrap the loader."""
    seen = []

    class Loader:
        def __init__(self, loader):
            self.loader = loader

        def create_module(self, spec):
            return self.loader.create_module(spec)

        def exec_module(self, module):
            self.loader.exec_module(module)
            seen.append("theirs")

    class Finder:
        busy = False

        def find_spec(self, name, path=None, target=None):
            if name != module or self.busy:
                return None
            self.busy = True
            try:
                spec = importlib.util.find_spec(name)
                spec.loader = Loader(spec.loader)
                return spec
            finally:
                self.busy = False

    _Arrival(module, lambda: seen.append("ours"))
    sys.meta_path.insert(place, Finder())
    import_module(module)
    assert sorted(seen) == ["ours", "theirs"]


def test_what_ended_it_has_its_own_frames_alone(own_process):
    (own_process / "fails.py").write_text("def f():\n    return 1 / 0\nf()\n")
    error = Script("fails.py").run(on_torch=lambda: None)
    frames = []
    traceback = error.__traceback__
    while traceback:
        frames.append((traceback.tb_frame.f_code.co_name, traceback.tb_lineno))
        traceback = traceback.tb_next
    assert frames == [("<module>", 3), ("f", 2)]


def test_nobody_listens_when_the_script_is_over(own_process, monkeypatch):
    monkeypatch.delitem(sys.modules, "torch")
    finders = [*sys.meta_path]
    (own_process / "empty.py").write_text("import sys; listening = len(sys.meta_path)\n")
    assert Script("empty.py").run(on_torch=lambda: None) is None
    assert sys.modules["__main__"].listening == len(finders) + 1
    assert sys.meta_path == finders


@pytest.mark.parametrize(
    "script, why",
    [
        (Script("nowhere.py"), "cannot open 'nowhere.py': No such file or directory"),
        (Script("nowhere", is_module=True), "No module named nowhere"),
        (Script("json.nowhere", is_module=True), "No module named json.nowhere"),
        (Script("email", is_module=True), "'email' is a package and cannot be directly executed"),
        (Script("late.py", is_module=True), "Try using 'late' instead of 'late.py' as the module name."),
        (Script("folder"), "can't find '__main__' module in"),
    ],
)
def test_what_cannot_be_run(own_process, script, why):
    (own_process / "folder").mkdir()
    (own_process / "late.py").write_text("")
    with pytest.raises(UnrunnableError) as refused:
        script.run(on_torch=lambda: None)
    assert why in str(refused.value)


@pytest.mark.parametrize("error, code", [(None, 0), (SystemExit(), None), (SystemExit(4), 4), (SystemExit("no"), 1)])
def test_it_leaves_as_the_script_would(error, code):
    with pytest.raises(SystemExit) as left:
        leave(error)
    assert left.value.code == code


def test_an_interrupt_goes_on_to_python_which_says_nothing_twice(own_process, capsys):
    with pytest.raises(KeyboardInterrupt):
        leave(KeyboardInterrupt())
    sys.excepthook(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert capsys.readouterr().err == ""


def test_what_was_shown_can_be_looked_at_afterwards(monkeypatch, capsys):
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        monkeypatch.setattr(sys, name, None, raising=False)
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)  # Ray, in this process, has put its own there
    error = ValueError("x")
    show(error)
    assert sys.last_value is error and sys.last_type is ValueError
    assert capsys.readouterr().err == "ValueError: x\n"


def test_what_we_say_is_not_for_what_the_script_has_made_of_standard_error(monkeypatch, capfd):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    say("ours ü \udc80\n")
    show(SystemExit("its own"))
    assert (capfd.readouterr().err, sys.stderr.getvalue()) == ("ours ü \\udc80\n", "its own\n")


def test_standard_error_may_be_gone(monkeypatch, capfd):
    for name in ("stderr", "__stderr__"):
        monkeypatch.setattr(sys, name, None)
    say("x")
    show(SystemExit("x"))
    assert capfd.readouterr() == ("", "")
    closed = io.StringIO()
    closed.close()
    for name in ("stderr", "__stderr__"):
        monkeypatch.setattr(sys, name, closed)
    say("x")
    show(SystemExit("x"))
