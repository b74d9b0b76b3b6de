"""Which parts of two tensors are compared, told by their sizes."""

import pytest
import torch
from contract_faults import gpt2, words

from torchhook.core.batch import Batch
from torchhook.rules.contracts.caching import _chunk
from torchhook.rules.contracts.case import Case
from torchhook.rules.contracts.pairings import by_sample, chunk, same, shortened, until
from torchhook.rules.contracts.positions import writing

SAMPLES, LENGTH, WIDTH = 3, 5, 2


def values(samples=SAMPLES, length=LENGTH):
    """A value for each sample, position and feature, by which they can be told."""
    places = torch.arange(samples)[:, None, None] * 100 + torch.arange(length)[:, None] * 10 + torch.arange(WIDTH)
    return places.float()


def flat(x):
    return x.flatten(0, 1)


def swapped(x):
    return x.transpose(0, 1)


@pytest.mark.parametrize("layout", [lambda x: x, swapped, flat, lambda x: flat(swapped(x))])
def test_samples_are_found_in_every_layout(layout):
    pair = by_sample(SAMPLES, SAMPLES + 1, 2, 0)
    x = values()
    views = pair(layout(x), layout(x), layout(values(SAMPLES + 1)))
    assert any(mine.flatten().tolist() == x[2].flatten().tolist() for mine, _ in views)
    assert any(other.flatten().tolist() == x[0].flatten().tolist() for _, other in views)
    assert not pair(layout(x), layout(x), None) and not pair(torch.ones(4), torch.ones(4), torch.ones(4))


@pytest.mark.parametrize("at_end", [False, True])
@pytest.mark.parametrize("layout", [lambda x: x, swapped, flat])
def test_padding_is_cut_off(layout, at_end):
    x, longer = values(), values(length=LENGTH + 2)
    kept = longer[:, -LENGTH:] if at_end else longer[:, :LENGTH]
    views = shortened(SAMPLES, at_end)(layout(x), layout(longer), None)
    assert any(other.flatten().tolist() == layout(kept).flatten().tolist() for _, other in views)
    assert not shortened(SAMPLES)(layout(longer), layout(x), None)


@pytest.mark.parametrize("layout", [lambda x: x, swapped, flat, lambda x: flat(swapped(x))])
def test_positions_that_are_flattened_are_taken_apart(layout):
    x, shorter = values(), values(length=LENGTH - 1)
    views = until(2, SAMPLES, LENGTH)(layout(x), layout(x), layout(shorter))
    wanted = sorted(x[:, :2].flatten().tolist())
    assert any(sorted(mine.flatten().tolist()) == wanted for mine, _ in views)


def test_both_dimensions_of_attention_are_cut():
    x, shorter = torch.rand(2, LENGTH, LENGTH), torch.rand(2, LENGTH - 1, LENGTH - 1)
    ((mine, _),) = until(2, 2, LENGTH)(x, x, shorter)
    assert mine.equal(x[:, :2, :2])


def test_a_chunk_is_found_among_all_positions():
    x = values()
    ((mine, _),) = chunk(2, 4, SAMPLES, LENGTH)(x, x[:, 2:4], None)
    assert mine.equal(x[:, 2:4])
    scores = torch.rand(SAMPLES, LENGTH, LENGTH)
    ((mine, _),) = chunk(2, 4, SAMPLES, LENGTH)(scores, scores[:, 2:4, :4], None)
    assert mine.equal(scores[:, 2:4, :4])
    assert not chunk(2, 4, SAMPLES, LENGTH)(x, x[:, :1], None)


def test_values_of_one_shape_are_compared_as_a_whole():
    x = values()
    assert same(x, x, None) == [(x, x)] and same(x, x[1:], None) == []


def test_a_mask_covers_the_cache():
    case = Case(gpt2(), Batch.of(words(attention_mask=torch.ones(4, 12, dtype=torch.long))))
    given = _chunk(case, writing(case), 4, 6, cache=object())
    assert given["input_ids"].shape == (4, 2) and given["attention_mask"].shape == (4, 6)
    assert given["use_cache"] is True and "past_key_values" in given
