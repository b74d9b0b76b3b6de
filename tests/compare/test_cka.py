"""`cka` on models: right numbers under right names, on any loader, and nothing left behind."""

import copy
import gc
import html
import io
import re
from contextlib import redirect_stderr

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from torchhook import capture
from torchhook.compare.likeness import Likeness, cka
from torchhook.compare.measures import DEBIASED_CKA, MEASURES, likeness
from torchhook.core.errors import BudgetError, SelectionError, SilentError

pytestmark = pytest.mark.usefixtures("one_thread")


class Swapped(nn.Module):
    """Runs its layers in another order than it lists them, overwrites in place, and uses one twice."""

    def __init__(self):
        super().__init__()
        self.late = nn.Linear(12, 6)
        self.early = nn.Linear(5, 12)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        return self.relu(self.late(self.relu(self.early(x))))


@pytest.fixture
def models():
    return Swapped().double(), nn.Sequential(nn.Linear(5, 9), nn.BatchNorm1d(9), nn.Tanh(), nn.Linear(9, 3)).double()


@pytest.fixture
def x():
    return torch.randn(103, 5).double()


def features(model, x):
    """Every call of every leaf, on all samples at once."""
    model = copy.deepcopy(model).eval()
    with torch.no_grad(), capture(model) as seen:
        model(x)
    return [seen[path].outputs[call].flatten(1) for path, call in seen.order]


def direct(a, b, x, measure=DEBIASED_CKA):
    return torch.tensor([[likeness(i, j, measure) for j in features(b, x)] for i in features(a, x)]).double()


@pytest.mark.parametrize("size", [1, 7, 33, 103])
def test_equals_the_formula_on_all_data_for_any_batches(models, x, size):
    a, b = models
    result = cka(a, b, x.split(size))
    assert result.matrix.dtype == torch.float64
    assert result.exact.all()
    assert result.n == 103
    torch.testing.assert_close(result.matrix, direct(a, b, x), rtol=1e-5, atol=1e-7)


def test_rows_follow_execution_and_carry_their_calls(models, x):
    a, b = models
    result = cka(a, b, [x])
    assert result.rows == ("early", "relu (call 0)", "late", "relu (call 1)")
    assert result.columns == ("0", "1", "2", "3")
    early = cka(a, b, [x], "early", sites_b="0")
    assert float(early.matrix) == pytest.approx(float(result.matrix[0, 0]), rel=1e-9)
    with torch.no_grad():
        expected = likeness(a.early(x), b[0](x), DEBIASED_CKA)  # as it was before the ReLU overwrote it
    assert float(early.matrix) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("by", [*MEASURES])
def test_every_measure_is_that_of_all_data(models, x, by):
    a, b = models
    result = cka(a, b, x.split(20), by=by, debiased=False)
    torch.testing.assert_close(result.matrix, direct(a, b, x, MEASURES[by]), rtol=1e-5, atol=1e-6)
    assert result.by == by


def test_self_similarity_has_ones_in_its_diagonal_and_is_symmetric(models, x):
    a, _ = models
    for again in (None, a):
        result = cka(a, again, x.split(30))
        assert result.columns == result.rows
        torch.testing.assert_close(result.matrix.diagonal(), torch.ones(4).double(), rtol=1e-9, atol=0)
        torch.testing.assert_close(result.matrix, result.matrix.T, rtol=1e-9, atol=0)
    torch.testing.assert_close(result.matrix, direct(a, a, x), rtol=1e-5, atol=1e-7)


def test_wide_layers_are_estimated_and_say_so(models):
    a, b = models
    x = torch.randn(4000, 5).double()
    exact, groups = cka(a, b, x.split(100)), cka(a, b, x.split(100), max_bytes=0)
    assert not groups.exact.any()
    assert "16 of 16 numbers estimated" in repr(groups)
    torch.testing.assert_close(groups.matrix, exact.matrix, rtol=0, atol=0.02)
    own = cka(a, None, x.split(100), max_bytes=0)
    torch.testing.assert_close(own.matrix.diagonal(), torch.ones(4).double())
    some = cka(a, b, x.split(100), max_bytes=8 * (16 * 16 + 2 * 25 + 2 * 121))
    assert some.exact.any()
    assert not some.exact.all()
    torch.testing.assert_close(some.matrix[some.exact], exact.matrix[some.exact], rtol=1e-9, atol=0)
    torch.testing.assert_close(some.matrix[~some.exact], groups.matrix[~some.exact])


@pytest.mark.parametrize("size", [1, 2, 3, 34, 50, 1000])
def test_estimates_of_batches_of_any_size_and_their_remainders_are_numbers(models, size):
    a, b = models
    x = torch.randn(103, 5).double()
    estimated = cka(a, b, x.split(size), max_bytes=0).matrix
    assert estimated.isfinite().all()
    torch.testing.assert_close(estimated, direct(a, b, x), rtol=0, atol=0.12)


def test_single_precision_is_precise_also_far_from_zero():
    a = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 8))
    nn.init.constant_(a[0].bias, 1000.0)
    x = torch.randn(500, 6)
    expected = direct(a, a, x)
    for max_bytes in (2**28, 0):
        found = cka(a, None, x.split(500 if max_bytes else 250), max_bytes=max_bytes).matrix
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 if max_bytes else 0.02)


@pytest.mark.parametrize("by", ["cca", "svcca", "pwcca"])
def test_layers_that_widen_have_no_more_directions_than_they_were_given(by):
    x = torch.randn(500, 6)
    a, b = nn.Linear(6, 24), nn.Sequential(nn.Linear(6, 24), nn.Linear(24, 32))
    for size in (7, 500):
        found = cka(a, b, x.split(size), by=by).matrix
        torch.testing.assert_close(found, torch.ones(1, 2).double(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("scale", [1e2, 1e4, 1e6])
@pytest.mark.parametrize("size", [1, 100])
def test_a_large_sample_that_comes_first_spoils_nothing(scale, size):
    a, b = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 8)), nn.Linear(6, 5)
    x = torch.randn(500, 6)
    x[0] *= scale
    exact, groups = (cka(a, b, x.split(size), max_bytes=most) for most in (2**28, 0))
    assert exact.rows == groups.rows == ("0", "1")
    assert exact.exact.all()
    outputs = [[y.double() for y in features(model, x)] for model in (a, b)]
    expected = torch.tensor([[likeness(i, j, DEBIASED_CKA) for j in outputs[1]] for i in outputs[0]]).double()
    torch.testing.assert_close(exact.matrix, expected, rtol=0, atol=1e-4)
    wide = cka(a.double(), b.double(), x.double().split(size), max_bytes=0).matrix
    torch.testing.assert_close(groups.matrix, wide, rtol=0, atol=5e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, 100])
def test_what_rounding_has_spoiled_is_left_out_and_not_a_number(dtype, size):
    class Rare(nn.Module):
        def forward(self, x):
            return torch.where(x[:, :1] > 1, x * 1e10, x)

    x = torch.randn(500, 6, dtype=dtype).clamp(max=0.9)
    x[0] = torch.rand(6) + 1.5
    result = cka(nn.Sequential(nn.Identity(), Rare()), None, x.split(size))
    assert result.rows == ("0",)
    assert "up to its precision" in result.left_out["1"]


@pytest.mark.parametrize("max_bytes", [2**28, 0])
def test_models_in_other_dtypes_are_given_the_batches_in_theirs(max_bytes):
    a = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 4))
    batches = [{"input": part} for part in torch.randn(200, 5).split(40)]
    for dtype, off in ((torch.float64, 1e-6), (torch.bfloat16, 1e-3)):
        b = copy.deepcopy(a).to(dtype)
        for pair in ((a, b), (b, a)):
            result = cka(*pair, batches, max_bytes=max_bytes)
            torch.testing.assert_close(result.matrix.diagonal(), torch.ones(3).double(), rtol=0, atol=off)
    assert batches[0]["input"].dtype == torch.float32


def test_arguments_that_are_no_samples_may_come_first():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(3, 4)

        def forward(self, scale, x, labels=None, table=None):
            return self.head(x * scale)

    x = torch.randn(60, 3)
    expected = cka(Scaled(), None, [{"x": x, "scale": torch.ones(3)}]).n
    assert expected == 60
    assert cka(Scaled(), None, [{"scale": torch.ones(3), "x": part} for part in x.split(20)]).n == 60
    assert cka(Scaled(), None, [(torch.ones(3), part, torch.zeros(20)) for part in x.split(20)]).n == 60
    rows = [{"table": torch.ones(7, 3), "scale": torch.ones(3), "x": x, "labels": torch.ones(60)}]
    assert cka(Scaled(), None, rows).n == 60
    with pytest.raises(ValueError, match=r"for a batch of 70 \(the length of argument 'table'\)"):
        cka(Scaled(), None, [{"table": torch.ones(70, 3), "scale": torch.ones(3), "x": x}])


def test_images_tokens_and_states():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)
            self.lstm = nn.LSTM(4, 5, batch_first=True)
            self.head = nn.Linear(5, 2)

        def forward(self, pixels, scale=1.0):
            tokens = self.conv(pixels * scale).flatten(2).transpose(1, 2)
            return self.head(self.lstm(tokens)[0][:, -1])

    model, pixels = Mixed(), torch.randn(40, 3, 8, 8)
    whole = cka(model, None, [{"pixels": part, "scale": 2.0} for part in pixels.split(16)])
    assert whole.rows == ("conv", "lstm", "head")
    means = cka(model, None, [{"pixels": pixels, "scale": 2.0}], pool="mean")
    with torch.no_grad():
        conv = model.conv(pixels * 2)
        lstm = model.lstm(conv.flatten(2).transpose(1, 2))[0]
    assert float(whole.matrix[0, 1]) == pytest.approx(
        likeness(conv.flatten(1), lstm.flatten(1), DEBIASED_CKA), abs=1e-5
    )
    expected = likeness(conv.mean((2, 3)), lstm.mean(1), DEBIASED_CKA)
    assert float(means.matrix[0, 1]) == pytest.approx(expected, abs=1e-5)
    last = cka(model, None, [{"pixels": pixels}], "lstm", pool=lambda tokens: tokens[:, -1])
    assert float(last.matrix) == pytest.approx(1)


def test_loaders_with_targets_and_without_a_length(models, x):
    a, b = models
    pairs = DataLoader(TensorDataset(x, torch.zeros(103)), batch_size=25)
    expected = cka(a, b, [x]).matrix
    for loader in (pairs, (part for part in x.split(25)), [[part] for part in x.split(25)]):
        torch.testing.assert_close(cka(a, b, loader).matrix, expected, rtol=1e-9, atol=1e-12)


def test_models_that_share_layers_do_not_hear_each_other(x):
    stem = nn.Linear(5, 7).double()
    a, b = nn.Sequential(stem, nn.Tanh()), nn.Sequential(stem, nn.Linear(7, 2).double(), nn.ReLU())
    result = cka(a, b, x.split(50))
    torch.testing.assert_close(result.matrix, direct(a, b, x), rtol=1e-5, atol=1e-7)


def test_compiled_models(x):
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh()).double()
    expected = cka(model, None, x.split(50)).matrix
    compiled = torch.compile(copy.deepcopy(model), backend="eager")
    torch.testing.assert_close(cka(compiled, None, x.split(50)).matrix, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.gpu
@pytest.mark.parametrize("max_bytes", [2**28, 0])
def test_on_a_gpu_and_across_devices(max_bytes):
    a, b = (nn.Sequential(nn.Linear(32, 64), nn.ReLU(inplace=True), nn.Linear(64, 16)) for _ in range(2))
    x = torch.randn(512, 32)
    expected = cka(a.double(), b.double(), x.double().split(128), max_bytes=max_bytes).matrix
    a, b = a.float(), b.float()
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        found = [
            cka(a.cuda(), b, x.split(128), max_bytes=max_bytes),
            cka(a, b.cuda(), x.split(128), max_bytes=max_bytes),
        ]
        torch.backends.cuda.matmul.fp32_precision = "tf32"  # for the models, not for what is computed of them
        rough = cka(a, b, x.split(128), max_bytes=max_bytes).matrix
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    for result in found:
        torch.testing.assert_close(result.matrix, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(rough, expected, rtol=0, atol=2e-3)


def state(model):
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    values = {name: value.clone() for name, value in model.state_dict().items()}
    return hooks, [module.training for module in model.modules()], values


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_left_behind(models, x, fails):
    a, b = models
    b[1].eval()
    b(x).sum().backward()
    grads = [parameter.grad.clone() for parameter in b.parameters()]
    before, random = [state(model) for model in models], torch.get_rng_state()
    batches = DataLoader(TensorDataset(x), batch_size=25, shuffle=True)
    if fails:
        with pytest.raises(RuntimeError, match="shapes"):
            cka(a, b, [x, x[:, :2]])
    else:
        cka(a, b, batches)
    for model, (hooks, modes, values) in zip(models, before, strict=True):
        now = state(model)
        assert now[:2] == (hooks, modes)
        assert all(torch.equal(now[2][name], value) for name, value in values.items())
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(parameter.grad, grad) for parameter, grad in zip(b.parameters(), grads, strict=True))


def test_layers_that_say_nothing_are_left_out_by_name(x):
    dead = nn.Linear(5, 4).double()
    nn.init.zeros_(dead.weight)
    model = nn.Sequential(nn.Linear(5, 5).double(), nn.Flatten(0), nn.Unflatten(0, (-1, 5)), dead)
    result = cka(model, None, x.split(50))
    assert result.rows == ("0", "2")
    assert "same for every sample" in result.left_out["3"]
    assert "250 for a batch of 50" in result.left_out["1"]
    assert "2 layers left out" in repr(result)
    assert result.matrix.isfinite().all()
    with pytest.warns(UserWarning, match="left out: 3: up to its precision, its output is the same"):
        assert cka(model, None, x.split(50), ["0", "3"]).rows == ("0",)
    with pytest.raises(ValueError, match="no layer of model a can be compared"):
        cka(model, None, x.split(50), "3")


@pytest.mark.parametrize("max_bytes", [2**28, 0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_units_that_answer_to_one_sample_make_no_number_of_rounding(dtype, max_bytes):
    class Rare(nn.Module):
        def forward(self, x):
            return torch.where(x[:, :1] > 100, x.new_tensor([[3.3, 0.7]]), x.new_tensor([[0.1, 0.2]]))

    x = torch.randn(90, 5, dtype=dtype)
    x[17] = 200
    model = nn.Sequential(nn.Identity(), Rare())
    result = cka(model, None, x.split(40), max_bytes=max_bytes)
    assert result.rows == ("0",)
    assert "all but one" in result.left_out["1"]
    x[50] = 300
    assert cka(model, None, x.split(100), max_bytes=max_bytes).rows == ("0", "1")


@pytest.mark.parametrize("options", [{}, {"max_bytes": 0}, {"by": "procrustes"}])
def test_layers_that_differ_by_rounding_alone_say_nothing(options):
    class Rounded(nn.Module):
        def forward(self, x):
            constant = torch.full_like(x, 1000.0)
            return torch.where(x > 0, constant.nextafter(2 * constant), constant)

    result = cka(nn.Sequential(nn.Tanh(), Rounded()), None, torch.randn(90, 5).split(40), **options)
    assert result.rows == ("0",)
    assert list(result.left_out) == ["1"]


def test_a_pool_that_writes_changes_nothing(models, x):
    a, b = models
    expected = cka(a, b, [x], pool=torch.relu).matrix
    torch.testing.assert_close(cka(a, b, [x], pool=torch.relu_).matrix, expected)


def test_layers_that_are_never_called_are_told_of(x):
    class Spare(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.spare, self.spared = (nn.Linear(5, 5).double() for _ in range(3))

        def forward(self, x):
            return self.used(x)

    model = Spare()
    result = cka(model, model, x.split(50))
    assert result.rows == ("used",)
    assert set(result.left_out) == {"spare", "spared"}
    with pytest.raises(SilentError, match="spare"):
        cka(model, None, [x], ["used", "spare"])
    assert "spare of b" in cka(nn.Sequential(nn.ReLU()), model, [x]).left_out


def test_values_that_are_not_finite_name_their_layer(models, x):
    a, b = models
    with torch.no_grad():
        b[3].weight[0, 0] = float("nan")
    for max_bytes in (2**28, 0):
        with pytest.raises(ValueError, match=r"'3' of model b has values that are not finite"):
            cka(a, b, x.split(50), max_bytes=max_bytes)


def test_refusals_say_what_to_do(models, x):
    a, b = models
    with pytest.raises(BudgetError, match=r"svcca needs the moments of .*'early' alone has 12 features.*pool='mean'"):
        cka(a, b, [x], by="svcca", max_bytes=5000)
    with pytest.raises(BudgetError, match=r"debiased=False"):
        cka(a, b, [x], debiased=False, max_bytes=0)
    with pytest.raises(SelectionError, match=r"sites_b: .*early.*pass sites_b="):
        cka(a, b, [x], "early")
    with pytest.raises(ValueError, match=r"sites_b needs a second model"):
        cka(a, None, [x], sites_b="early")
    with pytest.raises(
        TypeError, match="loader must be a tensor, a tuple or dict of them, or an iterable of such batches"
    ):
        cka(a, b, 7)
    with pytest.raises(ValueError, match=r"loader has no samples"):
        cka(a, b, [])
    with pytest.raises(ValueError, match=r"3 samples, but cka needs at least 4"):
        cka(a, b, [x[:3]])
    with pytest.raises(ValueError, match=r"cca is 1 for every layer.*'early' has 12 features for 10"):
        cka(a, b, [x[:10]], by="cca")
    with pytest.raises(ValueError, match=r"by must be one of 'cka'"):
        cka(a, b, [x], by="rsa")
    with pytest.raises(ValueError, match=r"pool must be 'flatten'"):
        cka(a, b, [x], pool="max")
    with pytest.raises(TypeError, match=r"\bb must be"):
        cka(a, "b", [x])


def test_models_that_change_from_batch_to_batch_are_refused():
    class Lengths(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Linear(2, 3)
            self.extra = nn.Linear(3, 3)

        def forward(self, x):
            x = self.embed(x)
            return self.extra(x) if x.shape[1] > 4 else x

    short, long = torch.randn(8, 4, 2), torch.randn(8, 6, 2)
    with pytest.raises(ValueError, match=r"'embed' had 12 features per sample in .* and now has 18; pass pool"):
        cka(Lengths(), None, [short, long], "embed")
    assert cka(Lengths(), None, [short, long], "embed", pool="mean").n == 16
    with pytest.raises(ValueError, match=r"does not call 'extra' in a later batch"):
        cka(Lengths(), None, [long, short], pool="mean")
    with pytest.raises(ValueError, match=r"'extra' of model a is not as in the first batch"):
        cka(Lengths(), None, [short, long], pool="mean")
    with pytest.raises(SilentError):
        cka(Lengths(), None, [short], ["embed", "extra"])


def test_result_reads_and_draws():
    matrix = torch.tensor([[1.0, 0.4, 0.2], [0.4, 1.0, 0.6], [0.2, 0.6, 1.0]]).double()
    names = ("<b>", "fc", "out")
    result = Likeness(matrix, names, names, "cka", 50, torch.ones(3, 3).bool(), itself=True)
    assert repr(result).splitlines()[2].split() == ["<b>", "fc", "0.400"]  # not itself
    assert html.escape("<b>") in result._repr_html_()
    assert "<b>" not in result._repr_html_()
    assert result.table("list")[1] == {"path": "<b>", "paired": "fc", "cka": pytest.approx(0.4), "exact": True}
    assert result.figure().axes[0].texts


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_shows_in_a_terminal(models, x, monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    shown = Terminal()
    with redirect_stderr(shown):
        cka(*models, x.split(30))
    assert re.search(r"cka .*━.*4/4", shown.getvalue())
    assert shown.getvalue().endswith("\x1b[2K")  # and is gone at the end


def test_progress_is_silent_elsewhere(models, x, monkeypatch, capfd):
    monkeypatch.setenv("TERM", "xterm-256color")
    file = io.StringIO()
    with redirect_stderr(file):
        cka(*models, x.split(30))
    cka(*models, x.split(30), progress=False)
    monkeypatch.setenv("TERM", "dumb")
    dumb = Terminal()
    with redirect_stderr(dumb):
        cka(*models, x.split(30))
    assert (file.getvalue(), dumb.getvalue(), *capfd.readouterr()) == ("", "", "", "")


def test_memory_is_flat_in_the_number_of_samples():
    """What is held of the samples is the same after many batches as after a few."""
    held = []

    def loader():
        for number in range(41):
            if number in (8, 40):
                held.append(_bytes())
            yield torch.randn(64, 8)

    for max_bytes in (2**28, 0):
        cka(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), None, loader(), max_bytes=max_bytes)
        early, late = held[-2:]
        assert late <= early


def _bytes():
    """Of all tensors that anybody holds."""
    gc.collect()
    return sum(thing.nbytes for thing in gc.get_objects() if type(thing) is torch.Tensor)
