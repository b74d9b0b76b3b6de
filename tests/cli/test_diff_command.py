"""``torchhook diff``: exit codes, what is printed, what is refused."""

import textwrap

import pytest

NETS = """
    import torch
    from torch import nn

    class Net(nn.Sequential):
        def __init__(self, eps=1e-5):
            super().__init__(nn.Linear(8, 16), nn.LayerNorm(16, eps=eps), nn.Dropout(0.5), nn.Linear(16, 2))

    def narrow():
        return Net().bfloat16()

    def other():
        return Net(1e-3)

    def inside():
        model = nn.ModuleDict({"body[red]": Net()})
        model.forward = lambda x: model["body[red]"](x)
        return model

    def embedding():
        return nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 2))

    def loss(output):
        return output.square().sum()
    """


@pytest.fixture
def compared(command, project):
    (project / "nets_to_compare.py").write_text(textwrap.dedent(NETS))

    def run(a, b, *arguments, shape="4,8"):
        names = [f"nets_to_compare:{name}" for name in (a, b)]
        return command("diff", *names, "--input", shape, *arguments)

    return run


def test_ends_with_0_if_they_are_the_same(compared):
    done = compared("Net", "narrow", "--eval", "--loss", "nets_to_compare:loss")
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines()[0].startswith("site ")
    assert "3.weight, param_grad" in done.out
    assert done.out.splitlines()[-1].startswith("a and b agree: rounding (float32/bfloat16) explains all")
    assert compared("Net", "Net").out.endswith("a and b agree: all values are equal\n")  # dropout and all
    assert compared("embedding", "embedding", shape="4,3:int").code == 0


def test_ends_with_1_if_they_diverge(compared):
    done = compared("Net", "other", "--eval")
    assert (done.code, done.err) == (1, "")
    assert done.out.splitlines()[-1].startswith("a and b diverge at 1 (LayerNorm): its output is off by 0.00")
    assert "\x1b" not in done.out
    assert compared("Net", "other", "--eval", "--tolerance", "0.1").code == 0
    assert compared("Net", "other", "--eval", "--tolerance", "1e-5").code == 1
    assert compared("Net", "Net", "--eval", "--seed", "3").code == 0


def test_names_that_differ(compared):
    done = compared("inside", "inside", "--match", "body[red]=body[red]", "--eval")
    assert done.code == 0 and "body[red].1 " in done.out


def test_a_table_in_a_terminal(compared, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "160")
    done = compared("inside", "inside", "--eval")
    assert "body[red].1" in done.out and "\x1b[1m" in done.out


def test_what_is_wrong_is_said(compared, command):
    for arguments, said in (
        (["--loss", "mse_loss"], "mse_loss needs targets, but random inputs have none"),
        (["--match", "old"], "must be path-in-A=path-in-B, not 'old'"),
        (["--match", "old=new"], "match: a has no module 'old'"),
        (["--tolerance", "-1"], "tolerance"),
    ):
        done = compared("Net", "Net", *arguments)
        assert done.code == 2 and said in done.said
    assert compared("Net", "nothing").code == 2
    assert command("diff", "nets_to_compare:Net", "nets_to_compare:Net").code == 2  # no --input
    assert "mat1 and mat2" in compared("Net", "Net", shape="4,7").err
