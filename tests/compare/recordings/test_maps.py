"""Maps between the names of two models: what they may say, what is refused, and what they do."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_models import HEADS, WIDTH, Language
from torch import nn

from torchhook import FileError, SelectionError, diff, record
from torchhook.compare.diff.found import fusions, prefix
from torchhook.compare.diff.fused import _places
from torchhook.compare.diff.match import Counterparts, Match, used

IDS = torch.arange(48).view(2, 24)
QKV = tuple(f"blocks.*.attn.w{name}" for name in "qkv")


@pytest.fixture
def models():
    torch.manual_seed(0)
    return Language(llama=True, fused=False).eval(), Language(llama=True, fused=True).eval()


def fused_from(split, layout):
    """The model with fused projections, from one without; `layout` orders the rows of q, k and v."""
    fused = Language(llama=True, fused=True).eval()
    state = {name: value for name, value in split.state_dict().items() if name in fused.state_dict()}
    for number, block in enumerate(split.blocks):
        state[f"blocks.{number}.attn.qkv.weight"] = layout(
            block.attn.wq.weight, block.attn.wk.weight, block.attn.wv.weight
        )
        state[f"blocks.{number}.mlp.gate_up.weight"] = torch.cat([block.mlp.gate.weight, block.mlp.up.weight])
    fused.load_state_dict(state)
    return fused


def test_what_a_map_may_say(tmp_path):
    match = Match.of([{"a": "h.*.attn", "b": ["q.*", "k.*"], "heads": 4}, {"a": 'odd"name\\', "b": "b", "rotary": 8}])
    match.save(tmp_path / "map.toml")
    assert list(Match.of(tmp_path / "map.toml")) == list(match) == list(Match.of(match))
    assert Match.of({("q", "k"): "qk", "a": {"b": "c", "rotary": 2}})[1] == Counterparts(("a",), ("c",), None, 2)
    assert list(Match.of(None)) == [] and repr(Match.of({"a": ("b", "c")})) == "Match({'a': ('b', 'c')})"


@pytest.mark.parametrize(
    ("match", "error", "said"),
    [
        (3, TypeError, "match must map paths"),
        ({"a": 3}, TypeError, "paths of modules"),
        ({("a", "b"): ("c", "d")}, ValueError, "one side must be a single module"),
        ({"a": {"b": "c", "heads": 0}}, ValueError, "heads must be a positive whole number"),
        ({"a": {"b": "c", "head": 2}}, ValueError, "not head"),
        ({"a": {"b": "c", "heads": 2}}, ValueError, "heads goes with several modules on one side"),
        ({"a": {"b": ("c", "d"), "rotary": 2}}, ValueError, "rotary goes with one module on each side"),
        ([{"a": "x"}], TypeError, "does not have a and b"),
        ("missing.toml", FileError, "cannot read 'missing.toml'"),
    ],
)
def test_what_is_no_map_is_refused(match, error, said):
    with pytest.raises(error, match=said):
        Match.of(match)


def test_a_file_that_is_no_map_is_refused(tmp_path):
    for text in ("[[match]]\na = 1\n", "nothing = 1", "[[match", "match = 3"):
        (tmp_path / "map.toml").write_text(text)
        with pytest.raises(FileError, match="cannot read"):
            Match.of(tmp_path / "map.toml")


@pytest.mark.parametrize(
    ("match", "error", "said"),
    [
        ({"blocks.*.attn.wqq": "blocks.*.attn.qkv"}, SelectionError, r"a has no module 'blocks.\*.attn.wqq'; nearest"),
        ({"blocks.0.attn.wq": "blocks.0.attn.qk"}, SelectionError, "b has no module 'blocks.0.attn.qk'"),
        ({"blocks.*.attn.wq": "blocks.0.attn.qkv"}, ValueError, "the same number of stars"),
        (
            {("blocks.*.attn.wq", "blocks.*.attn.wk"): "blocks.*.attn.qkv"},
            ValueError,
            "returns 192 features, and .* return 128",
        ),
        ({"blocks.0.attn": "blocks.0.attn", "tok": {"b": "tok", "rotary": 48}}, ValueError, "not heads of 48"),
        (
            {"blocks.*.attn.out": "blocks.*.mlp.gate_up"},
            ValueError,
            r"returns \(2×24×64\) in a, and .* \(2×24×256\) in b",
        ),
    ],
)
def test_a_map_that_does_not_fit_is_refused(models, match, error, said):
    with pytest.raises(error, match=said):
        diff(*models, IDS, match=match)


def test_counts_that_differ_are_refused():
    torch.manual_seed(0)
    two, three = Language(llama=True, layers=2), Language(llama=True, layers=3)
    with pytest.raises(ValueError, match=r"fits 2 modules of a, and 'blocks.\*' 3 of b .*stands for 2 only in b"):
        diff(two, three, IDS, match={"blocks.*": "blocks.*"})


class Layer(nn.Module):
    """A residual layer whose only part has the given name."""

    def __init__(self, name):
        super().__init__()
        self.name = name
        setattr(self, name, nn.Linear(16, 16))

    def forward(self, x):
        return x + getattr(self, self.name)(x).tanh()


class Activated(nn.Module):
    """Two layers behind each of which is the same activation, or one of its own."""

    def __init__(self, shared):
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.shared = shared
        if shared:
            self.act = nn.ReLU()
        else:
            self.act1, self.act2 = nn.ReLU(), nn.ReLU()

    def forward(self, x):
        acts = (self.act, self.act) if self.shared else (self.act1, self.act2)
        return acts[1](self.second(acts[0](self.first(x))))


class Looked(nn.Module):
    """Two texts that are looked up in one table or in a table each, in one order or the other."""

    def __init__(self, shared):
        super().__init__()
        self.shared, names = shared, ["tok"] if shared else ["left", "right"]
        for name in names:
            setattr(self, name, nn.Embedding(20, 16))

    def forward(self, ids):
        if self.shared:
            right, left = self.tok(ids[:, 8:]), self.tok(ids[:, :8])
        else:
            left, right = self.left(ids[:, :8]), self.right(ids[:, 8:])
        return left.sum(1) + 2 * right.sum(1)


def pair_of_layers():
    """Four layers, the first of which has another name than the others in b."""
    return nn.Sequential(*(Layer("fc") for _ in range(4))), nn.Sequential(*map(Layer, ("dense", *["proj"] * 3)))


def pair_of_resnets():
    timm, torchvision = pytest.importorskip("timm"), pytest.importorskip("torchvision")
    return torchvision.models.resnet18(num_classes=10), timm.create_model("resnet18", num_classes=10)


MAPPED = {
    "layers": (pair_of_layers, torch.randn(4, 16)),
    "activations": (lambda: (Activated(True), Activated(False)), torch.randn(4, 16)),
    "tables": (lambda: (Looked(True), Looked(False)), torch.arange(40).view(2, 20) % 20),
    "resnets": (pair_of_resnets, torch.randn(2, 3, 64, 64)),
}


@pytest.fixture(params=MAPPED)
def mapped(request, tmp_path):
    """Two models with the same weights and other names, recorded."""
    make, x = MAPPED[request.param]
    torch.manual_seed(0)
    models = [model.eval() for model in make()]
    weights = [torch.randn(parameter.shape) * 0.1 for parameter in models[0].parameters()]
    for number, model in enumerate(models):
        with torch.no_grad():
            for place, parameter in enumerate(model.parameters()):
                parameter.copy_(weights[min(place, len(weights) - 1)])
        record(model, x, to=tmp_path / f"{'ab'[number]}.th", noise=False)
    return tmp_path / "a.th", tmp_path / "b.th"


def test_a_map_that_was_found_and_kept_finds_the_same(mapped, tmp_path):
    for a, b in (mapped, mapped[::-1]):
        found = diff(a, b)
        assert found.same, found.verdict
        found.match.save(tmp_path / "map.toml")
        again = diff(a, b, match=tmp_path / "map.toml")
        assert again.same and set(again.match) == set(found.match), again.verdict


def test_a_star_stands_for_what_was_compared_and_for_nothing_else(tmp_path):
    torch.manual_seed(0)
    a, b = pair_of_layers()
    assert repr(diff(a, b, torch.randn(4, 16)).match) == (
        "Match({'0.fc': '0.dense', '1.fc': '1.proj', '2.fc': '2.proj', '3.fc': '3.proj'})"
    )
    nested = [(f"enc.{n}.part.{m}.fc", f"enc{m}.{n}.up") for n in range(3) for m in range(2)]
    assert repr(used([], nested, *zip(*nested, strict=True))) == (
        "Match({'enc.*.part.0.fc': 'enc0.*.up', 'enc.*.part.1.fc': 'enc1.*.up'})"
    )


@pytest.mark.parametrize(
    ("match", "said"),
    [
        ({f"blocks.{n}.norm1": "blocks.0.norm1" for n in (0, 1)}, "'blocks.0.norm1' of b is in two entries"),
        ([{"a": "norm", "b": "norm"}, {"a": "norm", "b": "head"}], "'norm' of a is in two entries"),
        (
            {QKV: "blocks.*.attn.qkv", "blocks.*.attn.wk": "blocks.*.attn.out"},
            "'blocks.0.attn.wk' of a is in two entries",
        ),
        ([{"a": QKV, "b": "blocks.*.attn.qkv"}] * 2, "'blocks.0.attn.wq' of a is in two entries"),
        ({"blocks.*.mlp": "blocks.*.mlp.gate_up"}, r"returns \(2×24×64\) in a, and .* \(2×24×256\) in b"),
        ({"blocks": "blocks.0.attn"}, "blocks and blocks.0.attn: no calls of both"),
        ({"idle": "idle"}, "idle and idle: no calls of both"),
    ],
)
@pytest.mark.parametrize("from_files", [False, True])
def test_a_map_that_would_be_ignored_is_refused(models, tmp_path, match, said, from_files):
    for model in models:
        model.idle = nn.Linear(2, 2)  # which is never called
    given = (*models, IDS)
    if from_files:
        given = [record(model, IDS, to=tmp_path / f"{n}.th", noise=False) for n, model in enumerate(models)]
    with pytest.raises(ValueError, match=said):
        diff(*given, match=match)


def test_a_map_holds_for_passes_that_call_only_some_of_its_modules(tmp_path):
    class Sometimes(nn.Module):
        def __init__(self, name):
            super().__init__()
            self.name, self.head = name, nn.Linear(16, 16)
            setattr(self, name, nn.Linear(16, 16))

        def forward(self, x, both):
            return self.head(getattr(self, self.name)(x) if both else x)

    a, b = Sometimes("fc"), Sometimes("up")
    for one, other in zip(a.parameters(), b.parameters(), strict=True):
        other.data.copy_(one)
    for name, model in (("a", a), ("b", b)):
        with record(model, to=tmp_path / f"{name}.th"):
            model(torch.ones(2, 16), True)
            model(torch.ones(2, 16), False)
    assert diff(tmp_path / "a.th", tmp_path / "b.th", match={"fc": "up"}).same


def test_no_formula_is_tried_on_inputs_of_another_kind(tmp_path):
    """The map pairs a table, which looks up ids, with a norm of what was looked up."""

    class Text(nn.Module):
        def __init__(self, name, layer):
            super().__init__()
            self.tok, self.name = nn.Embedding(50, 16), name
            setattr(self, name, layer)

        def forward(self, ids):
            x = self.tok(ids).tanh()
            return getattr(self, self.name)(torch.zeros_like(ids) if self.name == "kind" else x) + x

    for name, layer in (("kind", nn.Embedding(2, 16)), ("norm", nn.LayerNorm(16))):
        torch.manual_seed(0)
        record(Text(name, layer), IDS, to=tmp_path / f"{name}.th", noise=False)
    files = tmp_path / "kind.th", tmp_path / "norm.th"
    assert not diff(*files, match={"kind": "norm"}).same
    assert not diff(*files[::-1], match={"norm": "kind"}).same


def test_names_with_braces():
    class Named(nn.Module):
        def __init__(self, name):
            super().__init__()
            self.parts, self.name = nn.ModuleDict({name: nn.Linear(4, 4)}), name

        def forward(self, x):
            return self.parts[self.name](x)

    a, b = Named("{x}"), Named("{y}")
    b.parts["{y}"].load_state_dict(a.parts["{x}"].state_dict())
    assert diff(a, b, torch.randn(1, 4), match={"parts.{x}": "parts.{y}"}).same


def by_head(*weights):
    parts = [weight.view(HEADS, -1, WIDTH) for weight in weights]
    return torch.cat(parts, 1).reshape(-1, WIDTH)


@pytest.mark.parametrize("keep", ["all", "sketch"])
def test_projections_that_are_interleaved_by_head(models, tmp_path, keep):
    split, fused = models[0], fused_from(models[0], by_head)
    for block in fused.blocks:
        block.attn.by_head = True
    match = {QKV: {"b": "blocks.*.attn.qkv", "heads": HEADS}}
    record(split, IDS, to=tmp_path / "a.th", keep=keep)
    record(fused, IDS, to=tmp_path / "b.th", keep=keep)
    assert diff(tmp_path / "a.th", tmp_path / "b.th", match=match).same
    assert diff(tmp_path / "a.th", fused, match=match).same and diff(split, tmp_path / "b.th", match=match).same
    wrong = diff(tmp_path / "a.th", tmp_path / "b.th")  # found as plain parts, which is followed
    assert wrong.module == "blocks.0.attn.wq"


def test_halves_that_are_interleaved_for_rotary_positions(tmp_path):
    torch.manual_seed(0)
    size, x = 8, torch.randn(3, 5, 32)
    a = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Tanh())
    b = copy.deepcopy(a)
    order = torch.arange(32).view(-1, 2, size // 2).transpose(1, 2).flatten()  # from halves to interleaved
    with torch.no_grad():
        b[0].weight.copy_(a[0].weight[order])
    for name, model in (("a", a), ("b", b)):
        record(model, x, to=tmp_path / f"{name}.th")
    assert diff(a, b, x).module == "0"
    match = {"0": {"b": "0", "rotary": size}}
    for one, other in ((a, b), (tmp_path / "a.th", b), (a, tmp_path / "b.th"), (tmp_path / "a.th", tmp_path / "b.th")):
        result = diff(one, other, x if one is a and other is b else None, match=match)
        assert result.module != "0", result.verdict  # what follows has another order in b, too
    with torch.no_grad():
        b[0].weight[3] += 1
    assert diff(a, b, x, match=match).module == "0"


def test_a_map_by_hand_is_followed_and_a_better_one_is_a_note(models):
    split = models[0]
    exchanged = {"blocks.1.attn.wq": "blocks.1.attn.wk", "blocks.1.attn.wk": "blocks.1.attn.wq"}
    result = diff(split, copy.deepcopy(split), IDS, match=exchanged)
    assert result.module == "blocks.1.attn.wk"  # which b calls first, under the name of the other
    (note,) = [note for note in result.notes if "fits" in note]
    assert note == "blocks.1.attn.wk in b fits blocks.1.attn.wk better than blocks.1.attn.wq: they may be exchanged"


def test_swapped_projections_are_a_difference_and_not_another_pairing(models):
    split = models[0]
    fused = fused_from(split, lambda q, k, v: torch.cat([k, q, v]))
    result = diff(split, fused, IDS)
    assert result.module == "blocks.0.attn.wq"
    assert {pair.a: pair.b for pair in result.match}[QKV] == ("blocks.*.attn.qkv",)
    same = fused_from(split, lambda q, k, v: torch.cat([q, k, v]))
    assert diff(split, same, IDS).same and diff(same, split, IDS).same


def test_gradients_of_fused_projections_are_compared_with_those_of_their_parts(models, tmp_path):
    split, fused = models[0], fused_from(models[0], lambda q, k, v: torch.cat([q, k, v]))
    for name, model in (("a", split), ("b", fused)):
        record(model, IDS, to=tmp_path / f"{name}.th", loss=lambda output: output.square().mean(), noise=False)
    result = diff(tmp_path / "a.th", tmp_path / "b.th")
    assert result.same
    ports = {row.site.port for row in result.rows if row.partner.startswith("blocks.0.attn.qkv[1]")}
    assert ports == {"output", "grad_output"}


def test_a_wrapper_around_all_names():
    inner = ["", "model", "model.fc", "lm_head"]
    outer = ["", "base", "base.net", *(f"base.net.{name}" for name in inner if name)]
    assert prefix(inner, outer) == {"": "base.net"} and prefix(outer, inner) == {"base.net": ""}
    assert prefix(inner, inner) == prefix(["a"], ["b"]) == {}


def test_no_layers_are_fused_by_chance(models):
    from torchhook.captures.agreement.recorded_run import record as run
    from torchhook.core.batch import Batch

    runs = [run(model, Batch.of(IDS), None) for model in models]
    assert list(fusions(runs[0], runs[0], {})) == []
    assert len(list(fusions(*runs, {}))) == 6


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.integers(1, 4))
def test_parts_cover_the_whole_once(sizes, heads):
    places = _places([size * heads for size in sizes], heads)
    covered = sorted(at for part in places for place in part for at in range(place.start, place.stop))
    assert covered == list(range(heads * sum(sizes)))
    assert [sum(place.stop - place.start for place in part) for part in places] == [size * heads for size in sizes]


def test_small_mistakes_after_large_rounding_errors_show_where_a_formula_fits(tmp_path):
    """In bfloat16 the input of the last layer is off by a hundredth; a mistake of that size there is still found."""

    class Conv1D(nn.Module):
        """A linear layer with its weight the other way around, as in GPT-2, and perhaps a mistake in its code."""

        def __init__(self, factor):
            super().__init__()
            self.weight, self.factor = nn.Parameter(torch.randn(64, 32)), factor

        def forward(self, x):
            return x @ self.weight * self.factor

    def deep(factor):
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)), Conv1D(factor))

    x = torch.randn(16, 64)
    record(deep(1.0), x, to=tmp_path / "a.th", noise=False)
    for factor, module in ((1.0, None), (1.04, "8")):
        record(deep(factor).bfloat16(), x, to=tmp_path / f"{factor}.th", noise=False)
        assert diff(tmp_path / "a.th", tmp_path / f"{factor}.th").module == module


class Attending(nn.Module):
    """A block with the attention in a module of its own, or in its own code, and a mistake in the scale."""

    def __init__(self, scale=1.0, nested=True):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))
        self.out = nn.Sequential(nn.Linear(16, 16)) if nested else nn.Linear(16, 16)
        self.scale = scale

    def forward(self, x):
        return self.out((self.q(x) @ self.k(x).mT * self.scale).softmax(-1) @ self.v(x))


class Outer(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.attention, self.norm = attention, nn.LayerNorm(16)

    def forward(self, x):
        return self.norm(x + self.attention(x))


class Flat(nn.Module):
    """The same without a module around the attention."""

    def __init__(self, attention):
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = attention.q, attention.k, attention.v, attention.out[0]
        self.ln, self.scale = nn.LayerNorm(16), 2.0

    def forward(self, x):
        attended = (self.wq(x) @ self.wk(x).mT * self.scale).softmax(-1) @ self.wv(x)
        return self.ln(x + self.wo(attended))


def test_a_mistake_between_two_calls_is_laid_to_the_innermost_module(tmp_path):
    torch.manual_seed(0)
    a, x = nn.Sequential(*(Outer(Attending()) for _ in range(2))), torch.randn(2, 5, 16)
    b = nn.Sequential(*(Flat(block.attention) for block in a))
    b[0].scale = 1.0
    files = [record(model, x, to=tmp_path / f"{n}.th", noise=False) for n, model in enumerate((a, b))]
    found = diff(*files)
    assert found.module == "1.attention", found.verdict
    (marked,) = [row for row in found.shown if row.parts and row.site == found.first]
    assert (marked.site.port, marked.partner) == ("input", "1.wo")
    assert "diverges" in repr(found)
    (figure,) = found._figures()
    assert list(figure.values) == ["error", "rounding"] and f"{marked.site.path}, input" in figure.layers


def test_a_second_call_has_the_name_of_its_own_partner(tmp_path):
    torch.manual_seed(0)
    a, b, x = Activated(True), Activated(False), torch.randn(4, 16)
    b.load_state_dict(a.state_dict())
    b.act2 = nn.GELU()
    found = diff(a, b, x)
    assert found.module == "act" and "at act (ReLU, act2 in b), call 1" in found.verdict
