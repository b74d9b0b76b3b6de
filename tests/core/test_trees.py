from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from torchhook.core.trees import Arguments, leaves, mapped, nbytes

Point = namedtuple("Point", "x y")


@dataclass(frozen=True)
class Frozen:
    value: object
    rest: object = None


LEAVES = st.one_of(st.integers(0, 9).map(lambda n: torch.tensor(n)), st.none(), st.text(max_size=2), st.integers())
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
        st.dictionaries(st.text(max_size=2), inner, max_size=3).map(OrderedDict),
        st.tuples(inner, inner).map(lambda pair: Point(*pair)),
        st.tuples(inner, inner).map(lambda pair: Frozen(*pair)),
    ),
    max_leaves=8,
)


def reached(value, address):
    for key in address:
        value = getattr(value, key) if isinstance(value, Frozen) else value[key]
    return value


@given(VALUES)
def test_addresses_lead_to_the_leaves(value):
    for address, leaf in leaves(value):
        assert reached(value, address) is leaf


@given(VALUES)
def test_mapping_changes_tensors_and_nothing_else(value):
    changed = mapped(lambda tensor: tensor + 1, value)
    assert type(changed) is type(value)
    assert [address for address, _ in leaves(changed)] == [address for address, _ in leaves(value)]
    assert [int(leaf) - 1 for _, leaf in leaves(changed)] == [int(leaf) for _, leaf in leaves(value)]
    assert repr(mapped(lambda tensor: tensor, value)) == repr(value)


def test_model_outputs_stay_what_they_are():
    from transformers.modeling_outputs import BaseModelOutputWithPast

    output = BaseModelOutputWithPast(last_hidden_state=torch.ones(2), hidden_states=(torch.ones(1), torch.ones(1)))
    doubled = mapped(lambda tensor: tensor * 2, output)
    assert type(doubled) is BaseModelOutputWithPast
    assert doubled.last_hidden_state.tolist() == doubled["last_hidden_state"].tolist() == [2, 2]
    assert doubled.hidden_states[1].item() == 2 and doubled.past_key_values is None
    assert output.last_hidden_state.tolist() == [1, 1]


def test_packed_sequences_and_structseqs():
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    assert type(mapped(torch.neg, packed)) is PackedSequence
    best = torch.max(torch.ones(2, 2), dim=0)
    assert type(mapped(lambda tensor: tensor, best)) is type(best)


@pytest.mark.parametrize("value", [torch.Size([2]), {1, 2}, object, Frozen, "text"])
def test_what_is_no_container_of_tensors_comes_back_equal(value):
    assert mapped(lambda tensor: tensor + 1, value) == value and not list(leaves(value))


def test_arguments_unwrap():
    x, y = torch.ones(1), torch.ones(2)
    assert Arguments((x,), {"mask": y}).unwrapped() is x
    assert Arguments((x, y), {}).unwrapped() == (x, y)
    assert Arguments((), {"x": x}).unwrapped() == {"x": x}
    assert nbytes(Arguments((x,), {"mask": y})) == 12
