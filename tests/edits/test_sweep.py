"""Sweeps: each site edited in turn, together in one batch where that is the same."""

import io
from contextlib import redirect_stderr

import pytest
import torch
from torch import nn

import torchhook
from specimens import hooks_of, resnet18
from torchhook import SelectionError, capture, edit, edits, plot, sweep
from torchhook.edits.wrapped import PositionEdit, Wrapped


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


# --- each position alone


class Mixing(nn.Module):
    """Layers that mix positions, so that the effects of single ones do not add up."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(3))
        self.head = nn.Linear(8, 2)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x[:, -1])


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=3, n_head=2, vocab_size=20, n_positions=16)).eval()


def last_logit(out):
    return (out.logits[:, -1, 3] - out.logits[:, -1, 5]).mean()


POSITIONS = {
    "gpt2": (gpt2, "transformer.h.*", last_logit),
    "gpt2 mlp": (gpt2, "transformer.h.*.mlp", last_logit),
    "by hand": (lambda: Mixing().eval(), "layers.*", logit),
}


def first_tensor(value):
    return value if isinstance(value, torch.Tensor) else value[0]


def patched_by_hand(model, path, position, clean, corrupt, metric):
    """Raw hooks: the clean value of one position goes into the run on the other input."""
    kept, module = [], model.get_submodule(path)

    def put(_, __, output):
        new = first_tensor(output).clone()
        new[:, position] = kept[0][:, position]
        return new if isinstance(output, torch.Tensor) else (new, *output[1:])

    handle = module.register_forward_hook(lambda _, __, output: kept.append(first_tensor(output).clone()))
    model(clean)
    handle.remove()
    handle = module.register_forward_hook(put)
    value = metric(model(corrupt)).item()
    handle.remove()
    return value


@pytest.mark.parametrize("batch", [None, 1])
@pytest.mark.parametrize("kind", POSITIONS)
def test_each_position_alone_is_what_raw_hooks_patch(kind, batch):
    make, sites, metric = POSITIONS[kind]
    model, clean, corrupt = make(), torch.randint(20, (2, 5)), torch.randint(20, (2, 5))
    found = sweep(model, corrupt, sites, None, metric, source=clean, positions=True, batch=batch, progress=False)
    assert [(row.site.path, row.position) for row in found] == [
        (path, position) for path in torchhook.select(model, sites) for position in range(5)
    ]
    with torch.no_grad():
        for row in found:
            by_hand = patched_by_hand(model, row.site.path, row.position, clean, corrupt, metric)
            assert row.value == pytest.approx(by_hand, abs=1e-5)
            assert row.change == pytest.approx(by_hand - found.baseline, abs=1e-5)
    assert len({round(row.value, 6) for row in found}) > 5


@pytest.mark.parametrize("kind", POSITIONS)
def test_all_positions_at_once_are_the_whole_site(kind):
    make, sites, metric = POSITIONS[kind]
    model, clean, corrupt = make(), torch.randint(20, (2, 5)), torch.randint(20, (2, 5))
    whole = sweep(model, corrupt, sites, None, metric, source=clean, progress=False)
    each = sweep(
        model,
        corrupt,
        sites,
        lambda values: EveryPosition(edits.patch(values), 5),
        metric,
        source=clean,
        progress=False,
    )
    assert [row.value for row in each] == pytest.approx([row.value for row in whole], abs=1e-5)
    one = sweep(model, corrupt[:, :1], sites, None, metric, source=clean[:, :1], positions=True, progress=False)
    alike = sweep(model, corrupt[:, :1], sites, None, metric, source=clean[:, :1], progress=False)
    assert [row.value for row in one] == pytest.approx([row.value for row in alike], abs=1e-6)


class EveryPosition(Wrapped):
    """The edits of single positions one after the other."""

    def __init__(self, edit, count):
        super().__init__(edit)
        self.count = count

    def change(self, x, call):
        for position in range(self.count):
            x = PositionEdit(self.edit, position).change(x, call)
        return x


def test_other_edits_act_on_single_positions_too():
    model, ids = Mixing().eval(), torch.randint(20, (2, 4))
    found = sweep(model, ids, ["embed", "layers.0"], edits.zero, logit, positions=True, progress=False)
    with edit(model, {"embed": edits.replace(0.0, where=(slice(None), 2))}), torch.no_grad():
        assert found[2].value == pytest.approx(logit(model(ids)).item(), abs=1e-5)
    assert found[2].site.path == "embed" and found[2].position == 2 and found[2].recovered is None
    assert str(found).startswith("Sweep over 2 sites × 4 positions: without an edit")
    assert found.table("list")[2]["position"] == 2 and "<th>position" in found._repr_html_()
    assert "position" not in sweep(model, ids, "embed", edits.zero, logit, progress=False).table("list")[0]


def test_the_class_is_beside_the_path():
    model = nn.Sequential(nn.Identity(), nn.ReLU()).eval()
    found = sweep(model, torch.ones(1, 3, 2), ["0", "1"], edits.zero, torch.sum, positions=True, progress=False)
    assert [row["module"] for row in found.table("list")] == ["Identity"] * 3 + ["ReLU"] * 3
    assert str(found).splitlines()[1].split()[:2] == ["site", "module"] and "<th>module" in found._repr_html_()
    labels = plot.sweep(found).axes[0].get_yticklabels()
    assert [label.get_text() for label in labels] == ["0 (Identity)", "1 (ReLU)"]
    assert found._figures()[0].rows == ["0 (Identity), output", "1 (ReLU), output"]


def test_a_value_without_positions_is_refused_by_name():
    model, ids = Mixing().eval(), torch.randint(20, (2, 4))
    with pytest.raises(ValueError, match="samples × positions × features, but the output of 'head' is 2×2; leave"):
        sweep(model, ids, "head", edits.zero, logit, positions=True, progress=False)
    with pytest.raises(TypeError, match=r"positions must be True or False, not \[2, 3\]"):
        sweep(model, ids, "embed", edits.zero, logit, positions=[2, 3], progress=False)
