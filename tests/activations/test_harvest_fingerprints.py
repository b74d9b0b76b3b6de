"""A fingerprint changes with whatever matters, and with nothing else."""

import copy
import dataclasses
from collections import OrderedDict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader

import torchhook as th
from torchhook.activations.fingerprints import batch_fingerprint, data_fingerprint, model_fingerprint
from torchhook.activations.sources import source_of

pytestmark = pytest.mark.usefixtures("one_thread")


def small():
    torch.manual_seed(0)
    return nn.Sequential(OrderedDict(a=nn.Linear(8, 8), n=nn.BatchNorm1d(8), b=nn.Linear(8, 3)))


class Holder(nn.Module):
    """A model with one buffer."""

    def __init__(self, tensor):
        super().__init__()
        self.register_buffer("x", tensor)


def of(tensor):
    return model_fingerprint(Holder(tensor))


def test_the_same_model_has_the_same_fingerprint():
    model = small()
    before = model_fingerprint(model)
    assert model_fingerprint(small()) == model_fingerprint(copy.deepcopy(model)) == before
    assert model_fingerprint(model.eval()) == before
    assert model_fingerprint(model.requires_grad_(False)) == before
    assert model_fingerprint(torch.compile(model)) == before
    assert model_fingerprint(nn.DataParallel(model)) == before
    inner = small()
    inner.a = torch.compile(inner.a)
    assert model_fingerprint(inner) == before
    with th.capture(model, "a"):
        assert model_fingerprint(model) == before
        model(torch.ones(2, 8))
        assert model_fingerprint(model) == before
    assert len(before) == 32 and int(before, 16)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.a.weight.data[3, 4].mul_(1 + 1e-6),
        lambda m: m.b.bias.data[2].neg_(),
        lambda m: m.a.weight.data.neg_(),
        lambda m: m.a.weight.data.copy_(m.a.weight.data[[1, 0, 2, 3, 4, 5, 6, 7]]),
        lambda m: m.a.weight.data.copy_(m.a.weight.data.T.clone()),
        lambda m: m.n.running_mean.add_(1),
        lambda m: m.n.num_batches_tracked.add_(1),
        lambda m: m.double(),
        lambda m: setattr(m, "b", m.b.half()),
        lambda m: setattr(m, "n", nn.Identity()),
        lambda m: setattr(m.a, "bias", None),
        lambda m: setattr(m.a, "bias", m.n.bias),
        lambda m: m.add_module("c", nn.ReLU()),
        lambda m: setattr(m, "a", nn.Sequential(m.a)),
    ],
)
def test_any_change_of_a_model_changes_it(change):
    model = small()
    before = model_fingerprint(model)
    change(model)
    assert model_fingerprint(model) != before


@settings(deadline=None, max_examples=80)
@given(st.data(), st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.int8, torch.bool]))
def test_every_value_and_its_place_count(data, dtype):
    size = data.draw(st.integers(1, 90_000))
    values = torch.randint(0, 2, (size,)).to(dtype)
    before = of(values.clone())
    places = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=4, unique=True))
    changed = values.clone()
    changed[places] = (values[places] == 0).to(dtype)
    assert of(changed) != before
    assert of(values.clone()) == before
    if dtype.is_floating_point:
        values += 1
        flipped = values.clone()
        flipped[places] *= -1  # of an even number, the highest bits of a plain sum stay
        assert of(flipped) != of(values)


@settings(deadline=None, max_examples=30)
@given(st.integers(2, 70_000), st.data())
def test_values_that_change_places_are_seen(size, data):
    values = torch.arange(size)
    one, other = data.draw(st.lists(st.integers(0, size - 1), min_size=2, max_size=2, unique=True))
    swapped = values.clone()
    swapped[[one, other]] = values[[other, one]]
    assert of(swapped) != of(values)


def test_how_values_lie_in_memory_does_not_matter():
    values = torch.randn(6, 10)
    before = of(values)
    assert of(values.T.contiguous().T) == before
    assert of(torch.randn(200).as_strided((6, 10), (10, 1), 3).copy_(values)) == before, (
        "eight bytes do not begin there"
    )
    conjugate = torch.randn(3, dtype=torch.complex64)
    assert of(conjugate.conj()) == of(conjugate.conj().resolve_conj()) != of(conjugate)
    assert of(torch.zeros(2, 3)) != of(torch.zeros(3, 2))


def test_weights_are_counted_once_where_modules_share_them():
    class Tied(nn.Module):
        def __init__(self, tied):
            super().__init__()
            self.a = nn.Linear(4, 4)
            self.b = self.a if tied else copy.deepcopy(self.a)

    torch.manual_seed(0)
    one = Tied(True)
    torch.manual_seed(0)
    other = Tied(False)
    assert model_fingerprint(one) != model_fingerprint(other)
    first, second = copy.deepcopy(other), copy.deepcopy(other)
    first.c, second.c = first.a, second.b  # whose values are equal
    assert model_fingerprint(first) != model_fingerprint(second)


def pieces(**how):
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], **how)


ODD = {
    "meta": lambda: torch.empty(3, device="meta"),
    "empty": lambda: torch.empty(0, 3),
    "scalar": lambda: torch.tensor(1.5),
    "bool": lambda: torch.tensor([True, False, True]),
    "complex": lambda: torch.randn(3, dtype=torch.complex128),
    "float8": lambda: torch.randn(5).to(torch.float8_e4m3fn),
    "uint16": lambda: torch.arange(5).to(torch.uint16),
    "quantized": lambda: torch.quantize_per_tensor(torch.randn(4, 4), 0.1, 0, torch.qint8),
    "by channel": lambda: torch.quantize_per_channel(torch.randn(2, 2), torch.ones(2), torch.zeros(2), 0, torch.qint8),
    "coo": lambda: torch.eye(4).to_sparse(),
    "csr": lambda: torch.eye(4).to_sparse_csr(),
    "csc": lambda: torch.eye(4).to_sparse_csc(),
    "bsr": lambda: torch.eye(4).to_sparse_bsr((2, 2)),
    "nested": lambda: pieces(),
    "jagged": lambda: pieces(layout=torch.jagged),
    "mkldnn": lambda: torch.eye(4).to_mkldnn(),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ODD)
def test_tensors_of_every_kind_have_one(name):
    tensor = ODD[name]()
    assert of(tensor) == of(tensor) != of(torch.ones(7))
    assert batch_fingerprint(tensor) == batch_fingerprint(tensor) != batch_fingerprint(torch.ones(7))


@pytest.mark.filterwarnings("ignore")
def test_values_of_odd_tensors_count():
    assert of(torch.eye(4).to_sparse()) != of((torch.eye(4) * 2).to_sparse())
    assert of(torch.eye(4).to_sparse_csr()) != of((torch.eye(4) * 2).to_sparse_csr())
    scales = [torch.quantize_per_tensor(torch.ones(4), scale, 0, torch.qint8) for scale in (0.1, 0.2)]
    assert torch.equal(*[(scale.int_repr() * 0) for scale in scales]) and of(scales[0]) != of(scales[1])
    nested = [torch.nested.nested_tensor([torch.ones(2), torch.full((3,), x)]) for x in (0.0, 1.0)]
    assert of(nested[0]) != of(nested[1])


def test_models_that_have_no_weights_yet():
    lazy = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d())
    before = model_fingerprint(lazy)
    lazy(torch.ones(2, 3))
    assert model_fingerprint(lazy) != before
    assert model_fingerprint(nn.ReLU()) != model_fingerprint(nn.GELU())
    with torch.device("meta"):
        assert model_fingerprint(nn.Linear(2, 2)) != model_fingerprint(nn.Linear(2, 3))


@pytest.mark.filterwarnings("ignore")
def test_scripted_models_have_one():
    script = torch.jit.script(small())
    assert model_fingerprint(script) == model_fingerprint(script) != model_fingerprint(small())
    with torch.no_grad():
        script.a.weight[0, 0] += 1
    assert model_fingerprint(script) != model_fingerprint(torch.jit.script(small()))


def test_a_sharded_model_is_known_by_what_is_here(tmp_path):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meet'}", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        model = nn.Linear(4, 4)
        whole = model_fingerprint(model)
        model.weight = nn.Parameter(distribute_tensor(model.weight.data, mesh, [Shard(0)]))
        assert model_fingerprint(model) == whole
    finally:
        dist.destroy_process_group()


@pytest.mark.gpu
def test_a_model_is_the_same_on_a_gpu():
    model = nn.Sequential(nn.Linear(700, 900), nn.Conv2d(3, 5, 3), nn.BatchNorm1d(3), nn.Linear(33, 3).bfloat16())
    before = model_fingerprint(model)
    assert model_fingerprint(copy.deepcopy(model).cuda()) == before
    model[0].cuda()
    assert model_fingerprint(model) == before, "half here, half there"
    assert batch_fingerprint(torch.ones(3).cuda()) == batch_fingerprint(torch.ones(3))


@dataclasses.dataclass
class Graph:
    nodes: torch.Tensor


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.zeros(2), torch.zeros(3)),
        (torch.zeros(2), torch.zeros(2).double()),
        (torch.zeros(2), -torch.zeros(2)),
        (torch.zeros(2, 3), torch.zeros(3, 2)),
        ({"a": torch.ones(1)}, {"b": torch.ones(1)}),
        ([torch.ones(1)], torch.ones(1)),
        ([torch.ones(1), [torch.ones(1)]], [[torch.ones(1), torch.ones(1)]]),
        ([1, 2], [12]),
        (["ab", "c"], ["a", "bc"]),
        ([1], [1.0]),
        (None, []),
        (Graph(torch.ones(2)), Graph(torch.zeros(2))),
    ],
)
def test_batches_that_differ(one, other):
    assert batch_fingerprint(one) != batch_fingerprint(other)
    assert batch_fingerprint(one) == batch_fingerprint(copy.deepcopy(one))


def test_a_tuple_and_a_list_are_the_same_batch():
    """Workers and pinning make lists of tuples."""
    x = torch.ones(3, 2)
    assert batch_fingerprint((x, 1)) == batch_fingerprint([x, 1])
    assert batch_fingerprint(x.T.contiguous().T) == batch_fingerprint(x)
    assert batch_fingerprint([object()]) == batch_fingerprint([object()])


MODEL = nn.Linear(2, 1)


def named(data, size=None):
    return data_fingerprint(source_of(data, size, MODEL))


def test_data_are_known_by_their_ends():
    rows = torch.randn(100, 2)
    before = named(rows, 8)
    assert named(rows.clone(), 8) == before
    assert named(rows[:-1], 8) != before
    assert named(rows, 9) != before
    for place in (0, -1):
        changed = rows.clone()
        changed[place] += 1
        assert named(changed, 8) != before
    assert named(DataLoader(rows, 8)) == named(DataLoader(rows, 8, num_workers=1)) != before


def test_of_data_that_can_be_read_once_nothing_is_read():
    data = iter([torch.ones(2, 2)] * 3)
    source = source_of(data, None, MODEL)
    assert data_fingerprint(source) == named(iter([]))
    assert len(list(source.read())) == 3


def test_empty_data_have_a_fingerprint():
    assert named(torch.ones(0, 2)) == named(torch.ones(0, 2)) != named([])
