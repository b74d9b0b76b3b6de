import numpy as np
import pytest
import torch

from torchhook.core.errors import OverwrittenError
from torchhook.core.snapshot import Alias, frozen, snapshot

TENSORS = {
    "dense": lambda: torch.arange(6.0).reshape(2, 3),
    "view": lambda: torch.arange(12.0).reshape(3, 4)[1:, ::2],
    "expanded": lambda: torch.ones(3, 1).expand(3, 4).contiguous(),
    "empty": lambda: torch.empty(0, 3),
    "scalar": lambda: torch.tensor(3.0),
    "half": lambda: torch.ones(3, dtype=torch.float16),
    "bool": lambda: torch.tensor([True, False]),
    "complex conjugate": lambda: torch.tensor([1 + 2j, 3 - 1j]).conj(),
    "numpy memory": lambda: torch.from_numpy(np.arange(4.0)),
    "shared memory": lambda: torch.ones(3).share_memory_(),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "channels last": lambda: torch.ones(1, 2, 3, 3).to(memory_format=torch.channels_last),
    "requires grad": lambda: torch.ones(3, requires_grad=True) * 2,
}


@pytest.mark.parametrize("make", TENSORS.values(), ids=TENSORS.keys())
def test_a_snapshot_keeps_its_value_when_the_original_is_overwritten(make):
    original = make()
    before = original.detach().clone()
    kept = frozen(original)
    with torch.no_grad():
        original.mul_(0) if original.dtype != torch.bool else original.fill_(False)
    assert not kept.requires_grad
    assert torch.equal(kept.to_dense() if kept.is_sparse else kept, before.to_dense() if before.is_sparse else before)


@pytest.mark.parametrize("make", TENSORS.values(), ids=TENSORS.keys())
def test_a_snapshot_can_be_overwritten_without_touching_the_original(make):
    original = make()
    before = original.detach().clone()
    kept = frozen(original)
    kept.mul_(0) if kept.dtype != torch.bool else kept.fill_(False)
    original = original.detach()
    assert torch.equal(*(t.to_dense() if t.is_sparse else t for t in (original, before)))


def test_writes_through_numpy_and_views_are_survived():
    original = torch.zeros(4)
    kept = frozen(original)
    original[1:3] += 1
    original.numpy()[0] = 9
    assert kept.tolist() == [0, 0, 0, 0] and original.tolist() == [9, 1, 1, 0]


def test_inference_mode():
    with torch.inference_mode():
        original = torch.ones(3)
        kept = snapshot({"x": original})
        original.zero_()
        assert kept["x"].tolist() == [1, 1, 1]
        with pytest.raises(OverwrittenError, match="inference_mode"):
            Alias(original, "output of 'fc'")


def test_an_alias_tells_when_it_was_overwritten():
    original = torch.ones(3)
    alias = Alias((original, None), "output of 'fc'")
    assert alias.read()[0].data_ptr() == original.data_ptr()
    original += 1
    with pytest.raises(OverwrittenError, match="output of 'fc' was overwritten in place.*copy='lazy'"):
        alias.read()
