"""From a target to one number per sample, and what cannot be one."""

from collections import namedtuple

import pytest
import torch

from torchhook.explain.targets import Score, first_target, logits_of

LOGITS = torch.tensor([[1.0, 5.0, 2.0], [4.0, 0.0, 3.0]])


@pytest.mark.parametrize(
    ("target", "numbers", "explained"),
    [
        (None, [5, 4], [1, 0]),
        (2, [2, 3], [2, 2]),
        ([0, 2], [1, 3], [0, 2]),
        ((0, 2), [1, 3], [0, 2]),
        (torch.tensor([0, 2]), [1, 3], [0, 2]),
        (torch.tensor(1), [5, 0], [1, 1]),
    ],
)
def test_a_class_is_its_logit(target, numbers, explained):
    score = Score.of(target, LOGITS, 2)
    assert score(LOGITS).tolist() == numbers and score.explained(2) == explained


def test_arrays_of_classes_are_lists():
    numpy = pytest.importorskip("numpy")
    assert Score.of(numpy.array([0, 2]), LOGITS)(LOGITS).tolist() == [1, 3]
    assert Score.of(numpy.int64(1), LOGITS)(LOGITS).tolist() == [5, 0]


def test_the_predicted_class_is_settled_by_the_first_output():
    score = Score.of(None, LOGITS)
    assert score(-LOGITS).tolist() == [-5, -4]  # where others would be predicted now


def test_rows_may_be_of_any_sample():
    many = torch.arange(12.0).view(4, 3)
    assert Score.of(None, LOGITS)(many, torch.tensor([1, 1, 0, 1])).tolist() == [0, 3, 7, 9]
    largest = Score.of(lambda out: out.amax(1), LOGITS, 2)
    assert largest(many, torch.tensor([0, 0, 1, 1])).tolist() == [2, 5, 8, 11]


def test_a_function_of_the_output():
    def spread(out):
        return out.amax(1) - out.amin(1)

    score = Score.of(spread, LOGITS, 2)
    assert score(LOGITS).tolist() == [4, 4] and score.explained(2) == ["spread", "spread"]
    assert Score.of(torch.sum, LOGITS, 2)(LOGITS).item() == 15  # one number for all: a sum has the same gradients
    with pytest.raises(ValueError, match="target sum returned one number for 4 samples; return one for each"):
        Score.of(torch.sum, LOGITS, 2)(LOGITS, torch.tensor([0, 0, 1, 1]))


@pytest.mark.parametrize(
    ("target", "error", "message"),
    [
        (3, ValueError, "target 3 is out of range: the model has 3 classes, 0 to 2"),
        (-1, ValueError, "target -1 is out of range"),
        ([0, 3], ValueError, "target 3 is out of range"),
        ([0], ValueError, "one class per sample: it has 1 for 2 samples"),
        (torch.tensor([0, 1, 2]), ValueError, "it has 3 for 2 samples"),
        ("cat", TypeError, "target must be a class, one class per sample, a function .* not 'cat'"),
        (1.0, TypeError, "not 1.0"),
        (True, TypeError, "not True"),
        (torch.tensor([0.5, 1.0]), TypeError, "target must be a class"),
        (torch.zeros(2, 1, dtype=torch.long), TypeError, "target must be a class"),
    ],
)
def test_what_is_no_class_of_this_model(target, error, message):
    with pytest.raises(error, match=message):
        Score.of(target, LOGITS, 2)


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (lambda out: 3.0, TypeError, "must return a tensor with one number per sample, but it returned a float"),
        (lambda out: out, TypeError, "returned shape 2×3"),
        (lambda out: out.argmax(1), TypeError, "must return a tensor with one number per sample"),
        (lambda out: out[0], ValueError, "returned 3 numbers for 2 samples"),
    ],
)
def test_a_function_that_gives_something_else(function, error, message):
    with pytest.raises(error, match=message):
        Score.of(function, LOGITS, 2)(LOGITS)


Pair = namedtuple("Pair", "logits other")


def test_outputs_with_logits():
    assert logits_of(Pair(LOGITS, None)) is LOGITS
    from transformers.modeling_outputs import ImageClassifierOutput

    output = ImageClassifierOutput(logits=LOGITS)
    assert Score.of(2, output)(output).tolist() == [2, 3]


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (torch.ones(2, 21, 8, 8), "a tensor 2×21×8×8, .* target=lambda out: out[:, 0].mean((1, 2))"),
        (torch.ones(2), "a tensor 2, .* target=lambda out: out"),
        (torch.ones(2, 4, 3), "target=lambda out: out[:, 0].mean(1)"),
        (
            {"out": torch.ones(2, 21, 8, 8), "aux": torch.ones(1)},
            "a dict, {out: 2×21×8×8, aux: 1}, .*out['out'][:, 0].mean",
        ),
        ({"logits": LOGITS}, "a dict, {logits: 2×3}, .* target=lambda out: out['logits'][:, 0]"),
        ((LOGITS, None), "a tuple, (2×3, None), .* target=lambda out: out[0][:, 0]"),
        ([{"boxes": LOGITS}], "a list, .* target=lambda out: torch.stack([one[...].sum() for one in out])"),
        (None, "a NoneType, without a tensor"),
    ],
)
def test_an_output_without_classes_says_what_to_pass(output, message):
    pattern = ".*".join(__import__("re").escape(part) for part in message.split(".*"))
    with pytest.raises(ValueError, match=pattern):
        Score.of(None, output)


def test_the_example_in_the_message_works():
    for output in (torch.ones(2, 21, 8, 8), {"a": torch.ones(2, 5)}, (torch.ones(2, 4, 3),), torch.ones(2)):
        with pytest.raises(ValueError) as caught:
            logits_of(output)
        function = eval(str(caught.value).rpartition("target=")[2])
        assert Score.of(function, output, 2)(output).shape == (2,)


def test_the_target_of_the_first_sample():
    assert first_target([3, 4]) == [3] and first_target((3, 4)) == (3,) and first_target(None) is None
    assert first_target(torch.tensor([3, 4])).tolist() == [3] and first_target(torch.tensor(3)).item() == 3
