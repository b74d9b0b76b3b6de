"""The cause of each fault is named first, and nothing is said of repaired and healthy programs.

`diagnose` looks at them, or ``torchhook run`` where the fault is in the loop or there is no module.
``benchmarks/rules.py --real`` has more seeds, and both ways for each program.
"""

import pytest

from real.scoring import MODES, NAMES, cases, outcome

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

KNOWN_MISSES = {
    "bert_no_residual": "nothing shows that a path is missing but a loss that does not fall",
    "gpt2_no_mask": "only what the model must obey shows it: later tokens change earlier outputs",
    "sigmoid_autoencoder": "whether ReLU helps shows only after more steps than a slow machine has time for",
}
"""Programs whose fault is not named first, and why."""

KNOWN_ALARMS = {
    "frozen_head": "TH601: a tenfold rate does clearly better in the few steps that there is time for",
    "healthy_siamese": "TH302 is true: at the start its features are the same for all pictures, since gains are zero",
    "labels_divided": "TH403: the gradient of one batch is six times as large as usual, once",
    "letters_unscaled": "its loss does not fall in 550 steps, which is where a slow machine stops looking",
    "log_softmax_sum": "TH603 is true: its first loss is 2600, and other weights of the last layer lower it",
    "relu_logits": "TH201 is true: 84% of the units of its second convolution are dead",
}
"""Programs of which something is said although they are repaired or healthy, and why."""


def each(names, known):
    marks = {name: [pytest.mark.xfail(reason=known[name])] if name in known else [] for name in names}
    return pytest.mark.parametrize("name", [pytest.param(name, marks=marks[name]) for name in names])


def look(name, faulty):
    case = next(case for case in cases([name], MODES, range(1)) if (case.kind == "faulty") == faulty)
    return outcome(case)


@pytest.mark.long_list(sample=2)
@each([name for name in NAMES if not name.startswith("healthy")], KNOWN_MISSES)
def test_the_cause_is_named_first(name):
    seen = look(name, faulty=True)
    assert seen.found, seen.wrong


@pytest.mark.long_list(sample=2)
@each(NAMES, KNOWN_ALARMS)
def test_nothing_is_said_of_a_program_without_a_fault(name):
    seen = look(name, faulty=False)
    assert not seen.alarm, seen.wrong
