"""Sweeps: each site edited in turn, together in one batch where that is the same."""

import io
from contextlib import redirect_stderr

import pytest
import torch
from torch import nn

from specimens import hooks_of, resnet18
from torchhook import SelectionError, capture, edit, edits, sweep


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(5)])
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        return self.head(self.blocks(x))


def logit(out):
    return (out[:, 0] - out[:, 1]).mean()


@pytest.mark.parametrize("batch", [None, 1, 2, 100])
def test_it_is_the_loop_that_one_would_write(batch):
    net, x = Net().eval(), torch.randn(3, 6)
    before, sites = hooks_of(net), [f"blocks.{i}" for i in range(5)]
    change = edits.ablate(channels=[0, 1], with_="mean")
    result = sweep(net, x, "blocks.*", change, logit, batch=batch)
    assert [row.site.path for row in result] == sites and hooks_of(net) == before
    with torch.no_grad():
        assert result.baseline == pytest.approx(logit(net(x)).item(), abs=1e-5)
        for row in result:
            with edit(net, {row.site.path: change}):
                value = logit(net(x)).item()
            assert row.value == pytest.approx(value, abs=1e-5) and row.recovered is None
            assert row.change == pytest.approx(value - result.baseline, abs=1e-5)


@pytest.mark.parametrize("batch", [None, 1])
def test_activation_patching(batch):
    net, clean, corrupt = Net().eval(), torch.randn(1, 6), torch.randn(1, 6)
    result = sweep(net, corrupt, ["blocks.*", "**.0"], None, logit, source=clean, batch=batch)
    with torch.no_grad():
        assert result.clean == pytest.approx(logit(net(clean)).item(), abs=1e-5)
        assert result.baseline == pytest.approx(logit(net(corrupt)).item(), abs=1e-5)
    # in a chain, whatever is patched whole brings back all
    assert all(row.recovered == pytest.approx(1.0, abs=1e-3) for row in result)
    some = sweep(net, corrupt, "blocks.*", lambda c: edits.patch(c, where=(slice(None), [0])), logit, source=clean)
    assert all(row.recovered != pytest.approx(1.0, abs=1e-3) for row in some)
    assert some.best(2)[0].change == max((row.change for row in some), key=abs)


class Tied(nn.Module):
    """One module by two names, called twice, with a keyword."""

    def __init__(self):
        super().__init__()
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)
        self.first = self.second = Scaled()

    def forward(self, x):
        x = self.first(x, by=2.0 * x)
        x = self.second(x=x, by=x + 1.0)
        return self.attend(x, x, x, need_weights=False)[0].mean((1, 2))


class Scaled(nn.Module):
    def forward(self, x, by):
        return x * by


@pytest.mark.parametrize(
    ("sites", "made"),
    [
        ("second", None),
        ("second", edits.patch),
        (("first", "input"), lambda clean: edits.patch(clean, at="by")),
        ("attend", lambda clean: edits.ablate(heads=[1], with_=clean)),
        ("second", lambda clean: edits.replace(clean["second"].output)),
        (("second", "input"), lambda clean: edits.patch(clean["second"].input["by"], at="by")),
    ],
)
def test_the_clean_values_are_those_of_a_capture(sites, made):
    net, clean_x, x = Tied().eval(), torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    query, port = sites if isinstance(sites, tuple) else (sites, "output")
    with torch.no_grad(), capture(net, query, "attend.out_proj", inputs=True) as clean:
        net(clean_x)
    result = sweep(net, x, [sites], made, torch.sum, source=clean_x)
    with torch.no_grad(), edit(net, {(query, port): (made or edits.patch)(clean)}):
        assert result[0].value == pytest.approx(net(x).sum().item(), abs=1e-4)


def test_gradients_cannot_be_patched_from_a_run():
    with pytest.raises(ValueError, match="source= patches inputs and outputs, not grad_output"):
        sweep(Net().eval(), torch.randn(1, 6), [("head", "grad_output")], None, logit, source=torch.randn(1, 6))


def test_many_sites_share_a_forward():
    net, x, calls = Net().eval(), torch.randn(2, 6), []
    net.register_forward_pre_hook(lambda module, args: calls.append(len(args[0])))
    sweep(net, x, "blocks.*", edits.zero, logit)
    assert calls == [2, 12]  # the plain run, then five sites and one share that must come out the same
    calls.clear()
    sweep(net.train(), x, "blocks.*", edits.zero, logit)
    assert calls == [2] * 6


def test_a_model_that_mixes_samples_is_run_site_by_site():
    class Mixing(Net):
        def forward(self, x):
            return super().forward(x - x.mean(0)) + x.std()

    net, x = Mixing().eval(), torch.randn(4, 6)
    with pytest.warns(UserWarning, match="each site is run alone"):
        together = sweep(net, x, "blocks.*", edits.zero, logit)
    alone = sweep(net, x, "blocks.*", edits.zero, logit, batch=1)
    assert [row.value for row in together] == [row.value for row in alone]


def test_a_real_model_and_inputs_in_all_forms():
    net, x = resnet18(num_classes=5).eval(), torch.randn(2, 3, 32, 32)
    result = sweep(net, (x,), ["layer?.*", ("layer4.0", "input")], edits.scale(0.0), lambda out: out[:, 1].mean())
    assert len(result) == 9 and result[-1].site.port == "input"
    from transformers import GPT2Config, GPT2LMHeadModel

    net = GPT2LMHeadModel(GPT2Config(n_layer=3, n_head=2, n_embd=16, vocab_size=20)).eval()
    tokens = {"input_ids": torch.arange(1, 7).reshape(1, 6), "use_cache": False}
    result = sweep(net, tokens, "transformer.h.*.mlp", edits.zero, lambda out: out.logits[0, -1, 3])
    alone = sweep(net, tokens, "transformer.h.*.mlp", edits.zero, lambda out: out.logits[0, -1, 3], batch=1)
    assert [row.value for row in result] == pytest.approx([row.value for row in alone], abs=1e-5)


def test_what_a_person_sees():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    net, shown = Net().eval(), Terminal()
    with redirect_stderr(shown):
        result = sweep(net, torch.randn(1, 6), "blocks.*", edits.zero, logit)
    assert "sweep" in shown.getvalue() and "5/5" in shown.getvalue() and "━" in shown.getvalue()
    with redirect_stderr(silent := io.StringIO()):
        sweep(net, torch.randn(1, 6), "blocks.*", edits.zero, logit)
    assert not silent.getvalue()  # not a terminal
    assert "blocks.3" in repr(result) and "Sweep over 5 sites" in repr(result) and "<table" in result._repr_html_()
    assert result.table("list")[0]["path"] == "blocks.0" and set(result.table("list")[0]) >= {"port", "value", "change"}
    with pytest.raises(ValueError, match="source"):
        sweep(net, torch.randn(1, 6), "blocks.*", None, logit)
    with pytest.raises(SelectionError):
        sweep(net, torch.randn(1, 6), "nope", edits.zero, logit)
