"""What `verify` says, skips and leaves as it was."""

import copy
import dataclasses
import random
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from contract_faults import BERT, Listed, Writer, built, classes, gpt2, ids, labelled, token_loss
from healthy_models import HEALTHY
from torch import nn

from torchhook import contracts, diagnose, hooks, render, verify
from torchhook.rules.contracts.contract import CONTRACTS

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def _nothing_is_compiled(monkeypatch):
    monkeypatch.setitem(CONTRACTS, "modes", contracts.modes(compile=None))


def codes(report, least="info"):
    return [finding.code for finding in report.findings if finding.severity >= least]


def test_contracts_are_chosen_by_name_as_objects_or_as_functions():
    model, x = nn.Linear(4, 2), torch.randn(3, 4)

    def linear(case):
        """Twice the input gives twice the output."""
        yield case.agree(lambda x: 2 * x, lambda y: 2 * y, "twice the input does not give twice the output")

    report = verify(model, x, contracts=["independent", contracts.shapes, linear], progress=False)
    assert report.checked == ("TV102", "TV109", "TV199")
    assert codes(report) == ["TV199"]  # it has a bias
    assert report.findings[0].evidence["contract"] == "linear" and "twice" in report.findings[0].message
    nn.init.zeros_(model.bias)
    assert not codes(verify(model, x, contracts=[linear], progress=False))


@pytest.mark.parametrize(
    ("wrong", "error", "says"),
    [
        ({"contracts": ["casual"]}, ValueError, "did you mean causal"),
        ({"contracts": ["zzz"]}, ValueError, "there are accumulation, "),
        ({"contracts": [3]}, TypeError, "contracts must be"),
        ({"contracts": 3}, TypeError, "contracts must be"),
        ({"loss": lambda output: output.mean()}, TypeError, "too many positional"),
        ({"optimizer": 3}, TypeError, "optimizer must be"),
        ({"batch_dim": -1}, ValueError, "batch_dim must be 0 or more"),
        ({"loss": 3}, TypeError, "loss must be"),
        ({"batch_dim": 7}, ValueError, "batch_dim"),
        ({"fail_on": "fatal"}, ValueError, "fatal"),
    ],
)
def test_wrong_arguments_are_named(wrong, error, says):
    with pytest.raises(error, match=says):
        verify(nn.Linear(4, 2), torch.randn(3, 4), progress=False, **wrong)


def test_an_empty_batch_is_refused():
    with pytest.raises(ValueError, match="it has no samples"):
        verify(nn.Linear(4, 2), torch.randn(0, 4), progress=False)


def test_unknown_options_of_a_contract_are_refused():
    with pytest.raises(TypeError, match=r"contracts\.modes takes compile"):
        contracts.modes(backend="inductor")


def test_a_model_that_cannot_run_the_batch_raises_its_own_error():
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        verify(nn.Linear(4, 2), torch.randn(3, 5), progress=False)


def test_contracts_that_do_not_apply_are_skipped_with_the_reason():
    report = verify(nn.Sequential(nn.Linear(4, 2)), torch.randn(3, 4), progress=False)
    assert report.skipped["TV104"] == "it does not claim to be causal"
    assert "no cache" in report.skipped["TV105"] and "no loss" in report.skipped["TV106"]
    assert not report.findings and report.ok


def test_a_contract_that_is_named_is_checked_without_a_claim():
    class Silent(nn.Module):
        """Looks one position ahead, and does not claim to be causal."""

        def __init__(self):
            super().__init__()
            self.mix = nn.Conv1d(8, 8, 3, padding=1)

        def forward(self, x):
            return self.mix(x.mT).mT

    model, x = Silent(), torch.randn(2, 10, 8)
    assert "TV104" in verify(model, x, progress=False).skipped
    first = verify(model, x, contracts=["causal"], progress=False).findings[0]
    assert (first.code, first.site) == ("TV104", "mix")


def test_everything_is_left_as_it_was():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(), nn.Flatten(), nn.Linear(4 * 36, 2))
    model[2].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    batch = torch.randn(3, 3, 8, 8), torch.randint(2, (3,))
    state, pythons, numpys = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    verify(model, batch, progress=False)
    assert torch.get_rng_state().equal(state)
    assert random.getstate() == pythons and (np.random.get_state()[1] == numpys).all()
    assert [module.training for module in model.modules()] == modes
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())
    assert not hooks(model) and all(parameter.grad is None for parameter in model.parameters())


def test_a_model_whose_copy_shares_its_memory_is_left_as_it_was():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.spare = nn.Parameter(torch.rand(8)), nn.Parameter(torch.rand(8))

        def __deepcopy__(self, memo):
            twin = Shared()
            twin.scale, twin.spare = self.scale, self.spare
            return twin

        def forward(self, x):
            return x * self.scale

    model = nn.Sequential(nn.Linear(8, 8), Shared(), nn.Linear(8, 2))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    report = verify(model, classes(), F.cross_entropy, progress=False)
    assert [(one.code, one.site) for one in report.findings] == [("TV107", "1"), ("TV108", "1")]
    assert "shares memory with the original" in report.findings[0].message
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())


def test_a_mean_over_the_tokens_of_each_micro_batch_is_an_info_with_the_remedy():
    (found,) = verify(gpt2(), labelled(), lambda output, target: token_loss(output, target), ["accumulation"],
                      progress=False).findings  # fmt: skip
    assert (found.code, found.severity) == ("TV106", "info")
    assert "mean over the tokens of each micro-batch" in found.message and "num_items_in_batch" in found.hint


@pytest.mark.parametrize("broken", [False, True])
def test_a_loss_that_is_given_the_total_count_has_to_use_it(broken):
    loss = partial(token_loss, broken=broken)
    report = verify(gpt2(), labelled(), loss, ["accumulation"], progress=False)
    assert codes(report, "warning") == (["TV106"] if broken else [])


def test_models_of_transformers_are_given_the_total_count():
    assert not codes(verify(gpt2(), labelled(), contracts=["accumulation"], progress=False))


def test_a_loss_that_compares_samples_cannot_be_accumulated():
    def contrast(output, target):
        return F.cross_entropy(output @ output.T, torch.arange(len(output)))

    found = verify(nn.Linear(8, 4), classes(), contrast, ["accumulation"], progress=False).findings[0]
    assert found.severity == "info" and "not a mean or sum over its samples" in found.message


def test_a_loss_that_one_sample_makes_nan_cannot_be_accumulated():
    def spread(output, target):
        return output.std(0).sum()

    found = verify(nn.Linear(8, 4), classes(), spread, ["accumulation"], progress=False).findings[0]
    assert found.severity == "info" and "not a mean or sum over its samples" in found.message


def test_an_optimizer_of_other_parameters_is_found():
    model = nn.Linear(8, 2)
    optimizer = torch.optim.SGD(copy.deepcopy(model).parameters(), 0.1)
    found = verify(model, classes(), contracts=["used"], optimizer=optimizer, progress=False).findings[0]
    assert found.severity == "error" and "holds 2 parameters that the model does not have" in found.message
    own = torch.optim.SGD(model.parameters(), 0.1)
    assert not codes(verify(model, classes(), contracts=["used"], optimizer=own, progress=False))


def test_an_optimizer_with_an_old_head_is_found_at_the_new_one():
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model[1] = nn.Linear(4, 2)
    found = verify(model, classes(), contracts=["used"], optimizer=optimizer, progress=False).findings[0]
    assert found.site == "1" and "does not hold 1.weight, 1.bias" in found.message


def test_a_tensor_that_is_not_registered_is_an_info():
    class Fourier(nn.Module):
        def __init__(self):
            super().__init__()
            self.directions, self.spare = torch.randn(4, 8), torch.randn(3)

        def forward(self, x):
            return (x @ self.directions).cos()

    report = verify(nn.Sequential(Fourier(), nn.Linear(8, 2)), torch.randn(3, 4), contracts=["modes"], progress=False)
    (found,) = report.findings
    assert (found.severity, found.site) == ("info", "0") and "depends on directions" in found.message


def test_a_buffer_that_is_not_saved_is_an_info_unless_training_changes_it():
    class Fourier(nn.Module):
        def __init__(self, persistent):
            super().__init__()
            self.register_buffer("directions", torch.randn(4, 8), persistent)
            self.register_buffer("spare", torch.randn(3), persistent=False)

        def forward(self, x):
            return (x @ self.directions).cos()

    def found(persistent):
        model = nn.Sequential(Fourier(persistent), nn.Linear(8, 2))
        return verify(model, torch.randn(3, 4), contracts=["modes"], progress=False).findings

    (one,) = found(persistent=False)
    assert (one.severity, one.site) == ("info", "0") and "depends on directions" in one.message
    assert not found(persistent=True)


@pytest.mark.parametrize("broken", [False, True])
def test_a_model_that_is_given_the_total_count_has_to_use_it(broken):
    class Writing(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(40, 8), nn.Linear(8, 40)

        def forward(self, ids, labels=None, num_items_in_batch=None):
            logits = self.head(self.embed(ids))
            if labels is None:
                return {"logits": logits}
            total = (labels != -100).sum() if broken or num_items_in_batch is None else num_items_in_batch
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=-100) / total
            return {"loss": loss, "logits": logits}

    batch = {"ids": torch.randint(40, (4, 12)), "labels": torch.randint(40, (4, 12))}
    report = verify(Writing(), batch, contracts=["accumulation"], progress=False)
    assert [(one.code, one.severity) for one in report.findings] == ([("TV106", "warning")] if broken else [])


def test_what_eval_leaves_on_is_said_and_stays_as_it_was():
    class Stubborn(nn.Dropout):
        def train(self, mode=True):
            return super().train(True)

    model = nn.Sequential(nn.Linear(4, 4), Stubborn()).eval()
    report = verify(model, torch.randn(3, 4), progress=False)
    assert codes(report) == ["TV101"] and any("eval() leaves 1 in train mode" in note for note in report.notes)
    assert [one.training for one in model.modules()] == [False, False, True]


def test_a_loss_that_nobody_gave_is_not_accumulated():
    report = verify(nn.Linear(8, 2), classes(), contracts=["accumulation"], progress=False)
    assert report.skipped == {"TV106": "no loss was given, and the output has none"}


def test_a_loss_for_which_all_gradients_are_off_has_no_module():
    loss = partial(token_loss, broken=True)
    assert verify(gpt2(), labelled(), loss, ["accumulation"], progress=False).findings[0].site == ""


@pytest.mark.parametrize("classes", [9, 5])  # the tokens are classes of the result, or they are not
def test_a_model_of_tokens_needs_no_loss_for_its_parameters(classes):
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, classes))
    report = verify(model, torch.randint(5, 9, (2, 7)), contracts=["used"], progress=False)
    assert report.checked == ("TV108",) and not report.findings


def test_what_raises_halfway_leaves_the_rest_checked():
    def halfway(case):
        yield case.agree(lambda x: x)
        raise RuntimeError("no more")

    chosen = dataclasses.replace(contracts.independent, check=halfway)
    report = verify(nn.Linear(4, 2), torch.randn(3, 4), contracts=[chosen], progress=False)
    assert report.checked == ("TV102",) and "RuntimeError: no more" in report.notes[0]


def test_what_was_compiled_before_does_not_matter():
    """torch.compile gives up on code that it has compiled eight times, such as a wrapper that all models share."""

    def wrapped(function):
        def wrapper(self, x):
            x = x + 1 if torch.compiler.is_compiling() else x
            return function(self, x * x.sum().item())  # which ends a graph, so that this function has one of its own

        return wrapper

    def net(number):
        forward = eval(f"lambda self, x: x + {number}")  # other code each time, as models have
        return nn.Sequential(type(f"Net{number}", (nn.Module,), {"forward": wrapped(forward)})())

    before = [net(number) for number in range(12)]
    for one in before:
        torch.compile(one, backend="eager")(torch.ones(2))
    report = verify(net(12), torch.randn(3, 4), contracts=[contracts.modes(compile="eager")], progress=False)
    assert "torch.compile" in report.findings[0].message


@pytest.mark.parametrize("wrap", [nn.DataParallel, partial(torch.compile, backend="eager")])
def test_what_is_wrapped_or_compiled_is_checked_inside(wrap):
    class Centred(nn.Module):
        def forward(self, x):
            return x - x.mean(0)

    model = nn.Sequential(nn.Linear(8, 8), Centred())
    report = verify(wrap(model), torch.randn(4, 8), contracts=["independent"], progress=False)
    assert (report.model, report.findings[0].site) == ("Sequential", "1")


def test_diagnose_points_here_where_it_would_help():
    pointer = "torchhook.verify(model, batch) checks them"
    x = torch.randint(6, 20, (4, 6))
    assert any(pointer in note for note in diagnose(Writer(), [x], lambda out, _: out[0].mean(), parts=("rest",)).notes)
    plain = diagnose(nn.Linear(4, 2), [torch.randn(3, 4)], lambda out, _: out.mean(), parts=("rest",))
    assert not any(pointer in note for note in plain.notes)


def test_copies_of_an_embedding_were_tied_once():
    class Tied(nn.Module):
        def __init__(self, broken):
            super().__init__()
            self.embed, self.head = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)
            self.head.weight = nn.Parameter(self.embed.weight.detach().clone()) if broken else self.embed.weight

        def forward(self, ids):
            return self.head(self.embed(ids))

    batch = torch.randint(9, (2, 5))
    assert not codes(verify(Tied(False), batch, contracts=["used"], progress=False))
    assert verify(Tied(True), batch, contracts=["used"], progress=False).findings[0].site == "head"


def test_batch_norms_are_excused_in_train_mode_and_that_is_said():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    report = verify(model, torch.randn(4, 8), contracts=["independent"], progress=False)
    assert not report.findings and any("batch norms mix samples in train mode" in note for note in report.notes)


def test_samples_may_be_in_another_dimension():
    lstm, x = nn.LSTM(8, 8), torch.randn(12, 4, 8)  # positions first, as it says itself
    assert not codes(verify(lstm, x, contracts=["independent", "cached"], progress=False))

    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(8, 8)

        def forward(self, x):
            return self.lstm(x)[0]

    assert codes(verify(Wrapped(), x, contracts=["independent"], progress=False)) == ["TV102"]
    assert not codes(verify(Wrapped(), x, contracts=["independent"], batch_dim=1, progress=False))


def test_one_sample_gets_a_companion():
    class Centred(nn.Module):
        def forward(self, x):
            return x - x.mean(0)

    model = nn.Sequential(nn.Linear(8, 8), Centred())
    assert verify(model, torch.randn(1, 8), contracts=["independent"], progress=False).findings[0].site == "1"


def test_a_random_model_is_told_so_once():
    class Noisy(nn.Module):
        def forward(self, x):
            return F.dropout(x, 0.5)

    report = verify(nn.Sequential(nn.Linear(4, 4), Noisy()), torch.randn(3, 4), progress=False)
    assert codes(report) == ["TV101"] and report.findings[0].site == "1"
    assert "random numbers are drawn in 1" in report.findings[0].message
    assert "random in eval mode" in report.skipped["TV102"]


def test_chance_is_not_taken_for_another_fault():
    """Also if that contract alone is named."""

    class Noisy(nn.Module):
        def forward(self, x):
            return F.dropout(x, 0.5)

    model = nn.Sequential(nn.Linear(4, 4), Noisy())
    report = verify(model, torch.randn(3, 4), contracts=["independent"], progress=False)
    assert codes(report) == ["TV101"] and "random in eval mode" in report.skipped["TV102"]


@pytest.mark.parametrize(
    ("make", "draw"),
    [
        (lambda: torch.Generator().manual_seed(0), lambda own: torch.rand(1, generator=own)),
        (lambda: random.Random(0), lambda own: own.random()),
        (lambda: np.random.default_rng(0), lambda own: float(own.random())),
    ],
)
def test_a_generator_of_its_own_is_found_and_put_back(make, draw):
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.own = make()

        def forward(self, x):
            return x + draw(self.own)

    model = nn.Sequential(nn.Linear(4, 4), Noisy())
    (found,) = verify(model, torch.randn(3, 4), contracts=["deterministic"], progress=False).findings
    assert (found.code, found.site) == ("TV101", "1")
    assert draw(model[1].own) == draw(make())


@pytest.mark.parametrize("name", ["several_graphs_as_matrices", "a_graph_with_an_edge_in_each_row"])
def test_nodes_are_found_in_graphs_of_any_layout(name):
    model, batch = HEALTHY[name]()
    report = verify(model, batch, contracts=["equivariant"], progress=False)
    assert report.checked == ("TV110",) and not report.findings


def test_bfloat16_is_no_reason_to_complain():
    model = Writer().bfloat16()
    assert not codes(verify(model, ids(), progress=False), "warning")


def test_the_report_is_saved_and_rendered(tmp_path):
    report = verify(Listed(True), classes(), contracts=["used"], progress=False)
    report.save(tmp_path / "contracts.th")
    assert render.load(tmp_path / "contracts.th") == report
    text = render.markdown(report)
    assert "TV108" in text and "1 contract checked" in text
    render.save(report, tmp_path / "contracts.html")
    assert "TV108" in (tmp_path / "contracts.html").read_text()


def test_progress_names_each_contract():
    told = []
    verify(nn.Linear(4, 2), torch.randn(3, 4), progress=lambda what, done, total: told.append((what, done, total)))
    names = sorted(CONTRACTS, key=lambda name: CONTRACTS[name].code)
    assert [what for what, *_ in told] == names and told[-1][1:] == (len(names) - 1, len(names))


class Rows(nn.Module):
    """Its rows are changed by a function."""

    def __init__(self, change):
        super().__init__()
        self.change = change

    def forward(self, x):
        return self.change(x)


def second_for_third(x):
    y = x.clone()
    y[2] = x[1]
    return y


def by_first_feature(x):
    return x[x[:, 0].argsort()]


def both_of_the_middle(x):
    y = x.clone()
    y[1:3] = x[1:3].mean(0)
    return y


@pytest.mark.parametrize("change", [second_for_third, by_first_feature, both_of_the_middle])
def test_every_sample_is_compared_and_the_reverse_order(change):
    model, x = nn.Sequential(nn.Linear(4, 4), Rows(change)), by_first_feature(torch.randn(4, 4))
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(4)), model[0].bias.zero_()
    (found,) = verify(model, x, contracts=["independent"], progress=False).findings
    assert (found.code, found.site) == ("TV102", "1")


class Masking(nn.Module):
    """Attention with the mask of each sample, or of the first one for all."""

    def __init__(self, broken):
        super().__init__()
        self.broken = broken
        self.embed, self.mix = nn.Embedding(40, 8), Summing()

    def forward(self, ids, attention_mask=None):
        mask = torch.ones_like(ids) if attention_mask is None else attention_mask
        return self.mix(self.embed(ids), mask[:1].expand_as(mask) if self.broken else mask)


class Summing(nn.Module):
    def forward(self, x, mask):
        return x + (x * mask[..., None]).sum(1, keepdim=True)


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("broken", [False, True])
def test_samples_are_padded_by_different_amounts(broken, full):
    given = {"ids": torch.randint(40, (4, 12))} | ({"attention_mask": torch.ones(4, 12).long()} if full else {})
    report = verify(Masking(broken), given, contracts=["padding"], progress=False)
    assert codes(report) == (["TV103"] if broken else [])


@pytest.mark.parametrize("kind", ["BertModel", "RobertaModel", "ElectraModel", "AlbertModel"])
def test_encoders_are_not_padded_on_the_left(kind):
    options = {name: value for name, value in BERT.items() if name != "num_labels"}
    model = built(kind, **{**options, "max_position_embeddings": 66})
    report = verify(model, {"input_ids": torch.randint(6, 60, (4, 12))}, contracts=["padding"], progress=False)
    assert not report.findings and any("encoder" in note for note in report.notes)


def test_the_cache_of_what_is_read_has_no_window():
    transformers = pytest.importorskip("transformers")
    part = transformers.T5GemmaModuleConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, sliding_window=4, max_position_embeddings=64, pad_token_id=0,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = transformers.T5GemmaForConditionalGeneration(
        transformers.T5GemmaConfig(encoder=part, decoder=part, vocab_size=64)
    )
    batch = {"input_ids": torch.randint(5, 60, (4, 12)), "decoder_input_ids": torch.randint(5, 60, (4, 9))}
    report = verify(model, batch, contracts=["cached"], progress=False)
    assert not report.findings and not report.notes


class Decoder(Writer):
    """Cannot be decoded with its cache."""

    def forward(self, ids, cache=None):
        if cache is not None:
            raise self.error
        return super().forward(ids)


def test_a_cache_that_raises_in_every_step_is_a_finding():
    model = Decoder()
    model.error = RuntimeError("The size of tensor a (5) must match")
    (found,) = verify(model, {"ids": ids()}, contracts=["cached"], progress=False).findings
    assert (found.code, found.severity) == ("TV105", "warning") and "raises with the cache" in found.message


def test_what_a_model_refuses_is_not_checked():
    model = Decoder()
    model.error = NotImplementedError("one position at a time")
    report = verify(model, {"ids": ids()}, contracts=["cached"], progress=False)
    assert not report.findings and not report.checked and "could not be checked" in report.skipped["TV105"]
    assert any(note.startswith("cached: not checked: decoding with a cache") for note in report.notes)


@pytest.mark.parametrize(
    ("change", "batch", "where", "severity"),
    [
        (lambda x: x.view(len(x), -1), torch.randn(4, 3, 8, 8), "in channels_last", "warning"),
        (lambda x: torch.zeros(4, 4).index_add(0, torch.arange(4), x), torch.randn(4, 8), "under autocast", "info"),
    ],
)
def test_a_switch_that_makes_it_raise_is_a_finding(change, batch, where, severity):
    first = nn.Conv2d(3, 4, 1) if batch.dim() == 4 else nn.Linear(8, 4)
    model = nn.Sequential(first, Rows(change))
    (found,) = verify(model, batch, contracts=["modes"], progress=False).findings
    assert (found.severity, found.site) == (severity, "1") and f"it raises {where}" in found.message


def test_nothing_is_checked_by_runs_on_the_meta_device():
    report = verify(nn.Linear(4, 2, device="meta"), torch.randn(3, 4), progress=False)
    assert report.checked == ("TV109",) and not report.findings


def test_results_of_nan_only_are_not_compared():
    report = verify(Rows(lambda x: x * float("nan")), torch.randn(3, 4), contracts=["independent"], progress=False)
    assert not report.checked and any("no finite values" in note for note in report.notes)


def mistaken(case):
    yield case.no_such_method()


def silent(case):
    return None


def speaking(case):
    yield "twice is not twice"


@pytest.mark.parametrize(
    ("own", "error", "says"),
    [
        (mistaken, AttributeError, "no_such_method"),
        (silent, TypeError, "silent must yield what it finds, not return None"),
        (speaking, TypeError, "speaking must yield an Agreement"),
        (lambda case: [case.agree(lambda x: x[:, :3])], RuntimeError, "mat1 and mat2"),
    ],
)
def test_a_mistake_in_a_contract_of_ones_own_raises(own, error, says):
    with pytest.raises(error, match=says):
        verify(nn.Linear(4, 2), torch.randn(3, 4), contracts=own, progress=False)


def test_contracts_of_ones_own_are_told_apart():
    def first(case):
        yield contracts.Skip("no first")

    def second(case):
        yield contracts.Skip("no second")

    def third(case):
        yield contracts.Skip("part of it")
        yield contracts.Breach("it is broken")

    report = verify(nn.Linear(4, 2), torch.randn(3, 4), contracts=[first, second, third], progress=False)
    assert report.checked == ("TV199",) and report.skipped == {"TV199": "first: no first; second: no second"}
    assert report.notes == ("third: part of it",) and codes(report) == ["TV199"]


def test_copies_of_a_frozen_model_are_checked():
    class Forgetful(nn.Linear):
        def _save_to_state_dict(self, destination, prefix, keep_vars):
            super()._save_to_state_dict(destination, prefix, keep_vars)
            del destination[f"{prefix}bias"]

        def _load_from_state_dict(self, state, prefix, metadata, strict, missing, unexpected, errors):
            super()._load_from_state_dict(state, prefix, metadata, strict, [], unexpected, errors)

    model = nn.Sequential(nn.Linear(4, 8), Forgetful(8, 2)).requires_grad_(False)
    (found,) = verify(model, torch.randn(3, 4), contracts=["modes"], progress=False).findings
    assert found.site == "1" and "something is not saved" in found.message


def padded_labels():
    labels = torch.randint(1, 40, (4, 12))
    for number in range(4):
        labels[number, 12 - 3 * number :] = 0
    return torch.randint(40, (4, 12)), labels


@pytest.mark.parametrize("broken", [False, True])
def test_labels_are_left_out_as_the_loss_has_it(broken):
    def loss(output, target, num_items_in_batch=None):
        total = F.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=0, reduction="sum")
        return total / ((target != 0).sum() if broken else num_items_in_batch)

    model = nn.Sequential(
        nn.Embedding(40, 8), nn.GRU(8, 8, batch_first=True), Rows(lambda out: out[0]), nn.Linear(8, 40)
    )
    report = verify(model, padded_labels(), loss, ["accumulation"], progress=False)
    assert codes(report, "warning") == (["TV106"] if broken else [])
    assert any("the loss does not take -100" in note for note in report.notes)


def test_a_full_mask_is_made_ragged_for_accumulation():
    class Averaging(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(40, 8), nn.Linear(8, 40)

        def forward(self, input_ids, attention_mask, labels):
            logits = self.head(self.embed(input_ids))
            return (F.cross_entropy(logits.mT, labels, reduction="none") * attention_mask).sum() / attention_mask.sum()

    batch = {name: torch.randint(40, (4, 12)) for name in ("input_ids", "labels")}
    report = verify(Averaging(), {**batch, "attention_mask": torch.ones(4, 12)}, contracts=["accumulation"],
                    progress=False)  # fmt: skip
    assert [finding.severity for finding in report.findings] == ["info"]


class Scaled(nn.Module):
    def __init__(self, part, scale):
        super().__init__()
        self.part, self.scale = part, nn.Parameter(torch.tensor(scale))

    def forward(self, x):
        return x + self.scale * self.part(x)


@pytest.mark.parametrize("scale", [0.0, 1e-6])
def test_a_branch_that_is_scaled_to_nothing_is_checked(scale):
    model = nn.Sequential(nn.Linear(8, 8), Scaled(Rows(lambda x: x - x.mean(0)), scale))
    before = model[1].scale.clone()
    (found,) = verify(model, torch.randn(4, 8), contracts=["independent"], progress=False).findings
    assert found.site == "1.part" and model[1].scale.equal(before)
    assert not codes(
        verify(nn.Sequential(nn.Linear(8, 8), Scaled(nn.ReLU(), scale)), torch.randn(4, 8), progress=False)
    )


@pytest.mark.parametrize("name", ["attn_mask", "valid_mask", "seq_len", "src_len"])
def test_masks_and_lengths_have_many_names(name):
    form = torch.full((4,), 12) if "len" in name else torch.ones(4, 12, dtype=torch.bool)
    forward = eval(f"lambda self, ids, {name}=None: self.head(self.embed(ids).mean(1))")
    model = type("Mean", (nn.Module,), {"forward": forward})()
    model.embed, model.head = nn.Embedding(40, 8), nn.Linear(8, 2)
    batch = {"ids": torch.randint(40, (4, 12)), name: form}
    assert codes(verify(model, batch, contracts=["padding"], progress=False)) == ["TV103"]


@pytest.mark.parametrize("name", ["past_kv", "kv_caches", "caches", "past_states", "layer_cache"])
def test_caches_have_many_names(name):
    forward = eval(f"lambda self, ids, {name}=None: Writer.forward(self, ids, {name})")
    model = type("Named", (Writer,), {"forward": forward})()
    report = verify(model, {"ids": ids()}, contracts=["cached"], progress=False)
    assert report.checked == ("TV105",) and not report.findings


def test_a_dimension_that_is_squeezed_away_is_blamed_on_the_code_that_does():
    class Squeezing(nn.Module):
        def __init__(self):
            super().__init__()
            self.pool, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(3, 2)

        def forward(self, x):
            return self.head(self.pool(x).squeeze())

    model = nn.Sequential(nn.Conv2d(3, 3, 1), Squeezing())
    assert verify(model, torch.randn(4, 3, 8, 8), contracts=["shapes"], progress=False).findings[0].site == "1"


def test_attributes_that_a_run_leaves_are_removed():
    class Remembering(nn.Module):
        def __init__(self):
            super().__init__()
            self.last = None

        def forward(self, x):
            self.last = x
            return 2 * x

    model = Remembering()
    verify(model, torch.randn(3, 4), progress=False)
    assert model.last is None


@pytest.mark.slow
@pytest.mark.parametrize("broken", [False, True])
def test_another_compiler_is_used_on_request(broken):
    change = Rows(lambda x: x + 0.1 if broken and torch.compiler.is_compiling() else x)
    model = nn.Sequential(nn.Linear(4, 4), change, nn.Linear(4, 2))
    report = verify(model, torch.randn(3, 4), contracts=[contracts.modes(compile="inductor")], progress=False)
    assert codes(report) == (["TV107"] if broken else [])
    assert not broken or "torch.compile (inductor) changes the result" in report.findings[0].message
    assert not [note for note in report.notes if "compile" in note]
