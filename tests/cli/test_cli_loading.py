"""Names and shapes on the command line, and what can go wrong with them."""

import pytest
import torch

from torchhook.cli.loaders import Shape, split


@pytest.mark.parametrize(
    ("model", "why"),
    [
        ("small.net", "MODEL: write package.module:name, not 'small.net'"),
        (":Net", "write package.module:name, not ':Net'"),
        ("small.net:", "write package.module:name"),
        ("small/net.py:Net", "write it as an import, small.net:Net, not as a path, small/net.py:Net"),
        ("./script.py", "script:name, not as a path, ./script.py"),
        ("smal.net:Net", "there is no module 'smal', neither installed nor in"),
        ("small.nets:Net", "there is no module 'small.nets'"),
        ("small.net:Nte", "small.net has no 'Nte'; did you mean Net?"),
        ("small.net:Net.maker", "small.net has no 'Net.maker'"),
        ("small.net:numbers", "small.net:numbers is or returns 3, which is not a torch.nn.Module"),
    ],
)
def test_a_model_that_is_not_there(command, model, why):
    done = command("diagnose", model, "--input", "4,8")
    assert (done.code, done.out) == (2, "")
    assert why in done.said


@pytest.mark.parametrize(
    ("option", "name", "why"),
    [
        ("--loss", "cross_entropyy", "torch.nn.functional has no 'cross_entropyy'; did you mean cross_entropy"),
        ("--loss", "small.training:number", "small.training:number is 3, which is not callable"),
        ("--optimizer", "Adma", "torch.optim has no 'Adma'; did you mean Adam"),
        ("--optimizer", "small.training:none", "--optimizer: small.training has no 'none'"),
        ("--device", "toaster", "toaster"),
    ],
)
def test_a_task_that_is_not_there(diagnosed, option, name, why):
    done = diagnosed("small.net:Net", option, name)
    assert (done.code, done.out) == (2, "")
    assert why in done.said


@pytest.mark.parametrize(
    ("model", "line"),
    [
        ("small.net:crashing", "torchhook: ZeroDivisionError: division by zero (small/net.py:32)"),
        ("small.net:wide", "torchhook: TypeError: wide() missing 1 required positional argument: 'width'"),
        ("small.net:unfit", "torchhook: RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x8 and 7x2)"),
        ("small.net:leaving", "torchhook: small.net:leaving ended with sys.exit(0)"),
        ("script:make", "torchhook: importing script ended with sys.exit(0)"),
        ("careless:make", "ModuleNotFoundError: No module named 'nowhere_to_be_found' (careless.py:1)"),
        ("broken:make", "torchhook: SyntaxError: invalid syntax (broken.py, line 1)"),
    ],
)
def test_what_crashes_ends_with_2_and_a_line(command, model, line):
    done = command("diagnose", model, "--input", "4,8")
    assert (done.code, done.out) == (2, "")
    assert line in done.err
    assert len(done.err.splitlines()) <= 2
    assert "Traceback" not in done.err


def test_data_without_batches(diagnosed):
    done = diagnosed("small.net:Net", loader="small.data:none")
    assert (done.code, done.err) == (2, "torchhook: data has no batches\n")


def test_the_traceback_if_it_is_wanted(command, monkeypatch):
    monkeypatch.setenv("TORCHHOOK_TRACEBACK", "1")
    done = command("diagnose", "small.net:crashing", "--input", "4,8")
    assert done.code == 2
    assert "Traceback" in done.err and "return 1 / 0  # the line" in done.err
    assert done.err.endswith("ZeroDivisionError: division by zero\n")


def test_random_inputs_are_of_their_kinds():
    assert Shape.of("2, 3").random().shape == (2, 3)
    assert Shape.of("5:int").random().dtype == torch.int64
    assert Shape.of("5:bool").random().dtype == torch.bool
    assert Shape.of("5:float").random().dtype == torch.float32
    assert set(Shape.of("1000:int").random().tolist()) == set(range(10))


def test_codes_come_at_once_or_one_by_one():
    assert split(["th101 ,TH2", "dead-units,"]) == ["TH101", "TH2", "dead-units"]
    assert split(None) == []
