"""``torchhook verify``: exit codes, what is printed, what is refused."""

import json
import textwrap

import pytest

NETS = """
    import torch
    from torch import nn

    class Centred(nn.Module):
        def forward(self, x):
            return x - x.mean(0)

    def healthy():
        return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))

    def talking():
        return nn.Sequential(nn.Linear(8, 8), Centred(), nn.Linear(8, 2))

    def batches():
        return [(torch.randn(4, 8), torch.randint(2, (4,)))]
    """


@pytest.fixture
def verified(command, project):
    (project / "nets_to_verify.py").write_text(textwrap.dedent(NETS))

    def run(name, *arguments, given=("--input", "4,8"), contracts="independent,shapes,used"):
        chosen = ("--contracts", contracts) if contracts else ()
        return command("verify", f"nets_to_verify:{name}", *given, *chosen, *arguments)

    return run


def test_a_healthy_model_passes(verified):
    result = verified("healthy")
    assert result.code == 0 and "passed  Sequential: nothing found" in result.out
    assert "3 contracts checked" in result.out


def test_a_broken_contract_fails_and_names_its_module(verified, project):
    result = verified("talking", "--report", "contracts.html")
    assert result.code == 1 and "TV102  1 (Centred)" in result.out
    assert "TV102" in (project / "contracts.html").read_text()


def test_json_for_programs(verified):
    report = json.loads(verified("talking", "--format", "json").out)
    assert report["findings"][0]["code"] == "TV102" and report["findings"][0]["site"] == "1"
    assert report["about"]["device"] == "cpu"


def test_a_loader_and_its_loss(verified):
    given = ("--loader", "nets_to_verify:batches", "--loss", "cross_entropy")
    assert verified("healthy", given=given, contracts="accumulation").code == 0


def test_all_contracts_by_default_with_what_was_skipped(verified):
    result = verified("healthy", "--verbose", contracts="")
    assert result.code == 0 and "TV104: it does not claim to be causal" in result.out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"contracts": "casual"}, "did you mean causal"),
        ({"given": ()}, "pass exactly one of the two"),
        ({"given": ("--input", "4,8", "--loss", "cross_entropy")}, "random inputs have none"),
    ],
)
def test_wrong_usage_is_refused(verified, arguments, says):
    result = verified("healthy", **arguments)
    assert result.code == 2 and says in " ".join(result.err.split()).replace("│ ", "")


def test_an_unknown_severity_is_refused_with_those_that_there_are(verified):
    result = verified("healthy", "--fail-on", "fatal")
    assert result.code == 2 and "'--fail-on': 'fatal' is not one of info, warning, error" in result.err
