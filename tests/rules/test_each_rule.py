"""Each rule finds its fault at the right place and is silent without it, in cases far from any threshold."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatch
from functools import partial
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from specimens import Returning
from torchhook import Profile, check, diagnose, measure
from torchhook.rules import RULES, History
from torchhook.rules.loop import Feeding, Loop
from torchhook.rules.loss_graph import loss_terms
from torchhook.rules.ranks import LOST, Member, RankStep, Split
from torchhook.rules.rest import at_rest as state_of
from torchhook.rules.watch import Watch

pytestmark = pytest.mark.usefixtures("one_thread")


class Example(NamedTuple):
    """A function that makes a report by one rule, and the sites at one of which it must find something, if any."""

    code: str
    name: str
    make: Callable
    sites: tuple[str, ...]
    step: int | None


EXAMPLES: list[Example] = []


def example(code, *sites, step=None):
    """Register an example for a rule; without sites, the rule must find nothing."""

    def add(make):
        EXAMPLES.append(Example(code, make.__name__, partial(make, code), sites, step))
        return make

    return add


def mlp(*between, width=32):
    """A layer, what comes between, and another layer."""
    return nn.Sequential(nn.Linear(8, width), *between, nn.Linear(width, 4))


def batches(count=8, size=64, scale=1.0, classes=4):
    return [(scale * torch.randn(size, 8), torch.randint(classes, (size,))) for _ in range(count)]


def square(output, target):
    return output.square().mean()


def flowed(code, model, x=None):
    """The report of one rule on one forward and backward, with only the statistics that it needs."""
    with Watch(model, [RULES[code]], history=History()) as watch:
        watch.be_thorough(True)
        model(torch.randn(512, 8) if x is None else x).float().sum().backward()
        watch.step()
    return check(watch.history, [code])


def at_rest(code, model, optimizer=None):
    return diagnose(model, [], optimizer=optimizer, parts=("rest",), rules=[code])


def looked(code, model, data=None, loss=F.cross_entropy, **options):
    parts = ("rest", "pass")
    return diagnose(model, data or batches(), loss, parts=parts, rules=[code], **options)


def trained(code, model, optimizer, data=None, loss=square, steps=25):
    return diagnose(model, data or batches(), loss, optimizer, steps, rules=[code], try_repairs=False)


def told(code, losses):
    """The report of one rule on some losses."""
    return check(History(losses=dict(enumerate(losses))), [code])


def looped(code, **seen):
    """The report of one rule on what was seen of a loop."""
    return check(History(loop=Loop(**seen)), [code])


# --- TH1: not finite


@example("TH101", "1", step=0)
def a_log_of_negative_values(code):
    return flowed(code, mlp(Returning(torch.log)))


@example("TH101", "1", step=0)
def plus_infinity(code):
    return flowed(code, mlp(Returning(lambda x: x + math.inf)))


@example("TH101")
def a_log_of_positive_values(code):
    return flowed(code, mlp(Returning(lambda x: x.abs().add(1).log())))


@example("TH101")
def a_mask_of_minus_infinity(code):
    return flowed(code, nn.Sequential(nn.Linear(8, 8), Returning(lambda x: x.masked_fill(x < 0, -math.inf))))


@example("TH102", "0.weight")
def one_nan_in_a_weight(code):
    model = mlp()
    model[0].weight.data[3, 4] = math.nan
    return at_rest(code, model)


@example("TH102", "1.running_var")
def an_infinite_running_variance(code):
    model = mlp(nn.BatchNorm1d(32))
    model[1].running_var[7] = math.inf
    return at_rest(code, model)


@example("TH102")
def finite_state_and_a_mask(code):
    model = mlp(nn.BatchNorm1d(32))
    model.register_buffer("mask", torch.full((4, 4), -math.inf).triu(1))
    return at_rest(code, model)


@example("TH102", "0.weight", step=1)
def an_update_that_divides_zero_by_zero(code):
    model = mlp().half()
    optimizer = torch.optim.Adam(model.parameters(), eps=1e-8)  # which is zero in half precision
    return trained(code, model, optimizer, [(1e-3 * torch.randn(64, 8).half(), torch.zeros(64).half())])


@example("TH102")
def updates_of_half_precision(code):
    model = mlp().half()
    optimizer = torch.optim.Adam(model.parameters(), eps=1e-4)
    return trained(code, model, optimizer, [(1e-3 * torch.randn(64, 8).half(), torch.zeros(64).half())])


@example("TH103", "1", step=0)
def a_root_at_zero(code):
    return flowed(code, mlp(nn.Identity(), Returning(lambda x: (0 * x).sqrt())))


@example("TH103")
def a_root_beside_zero(code):
    return flowed(code, mlp(nn.Identity(), Returning(lambda x: (0 * x + 1).sqrt())))


@example("TH104", "", step=0)
def a_loss_of_nan(code):
    return looked(code, mlp(), loss=lambda output, target: output.mean() * math.nan)


@example("TH104", "", step=2)
def an_infinite_loss_later_on(code):
    return told(code, [1.0, 0.5, math.inf, 0.5])


@example("TH104")
def finite_losses(code):
    return looked(code, mlp())


@example("TH105", "1")
def float16_near_its_end(code):
    near = Returning(lambda x: x.clamp(-1, 1).half() * 65_000)
    return flowed(code, nn.Sequential(nn.Linear(8, 8), near))


@example("TH105")
def float16_far_from_its_end_and_bfloat16_beyond(code):
    far, beyond = Returning(lambda x: x.clamp(-1, 1).half() * 100), Returning(lambda x: x.bfloat16() * 65_000)
    return flowed(code, nn.Sequential(nn.Linear(8, 8), far, beyond))


# --- TH2: units


@example("TH201", "3")
def outputs_that_stay_at_zero(code):
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU())
    model[2].bias.data[:3] = -50
    data = [(x, F.one_hot(y, 8).float()) for x, y in batches(classes=8)]
    report = trained(code, model, torch.optim.SGD(model.parameters(), 0.1), data, F.mse_loss)
    assert report.findings[0].severity == "warning"
    return report


@example("TH201")
def outputs_that_stay_at_zero_as_their_targets_do(code):
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU())
    model[2].bias.data[:3] = -50
    data = [(x, torch.cat([torch.zeros(64, 3), x[:, :5].abs()], 1)) for x, _ in batches()]
    report = trained(code, model, torch.optim.Adam(model.parameters(), 0.03), data, F.mse_loss, steps=100)
    return replace(report, findings=tuple(finding for finding in report.findings if finding.severity > "info"))


@example("TH201", "0", "1", step=0)
def a_dead_rectifier(code):
    model = mlp(nn.ReLU())
    nn.init.constant_(model[0].bias, -100)
    return flowed(code, model)


class Rectified(nn.Module):
    """A ReLU that is not a module."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(8, 32), nn.Linear(32, 4)

    def forward(self, x):
        return self.head(F.relu(self.first(x)))


@example("TH201", "first", step=0)
def a_dead_rectifier_that_is_a_function(code):
    model = Rectified()
    nn.init.constant_(model.first.bias, -100)
    return flowed(code, model)


@example("TH201")
def half_of_all_values_zero(code):
    return flowed(code, mlp(nn.ReLU()))


@example("TH201")
def half_of_all_values_zero_by_a_function(code):
    return flowed(code, Rectified())


@example("TH201")
def a_few_dead_units(code):
    model = mlp(nn.ReLU())
    nn.init.constant_(model[0].bias[:2], -100)
    return flowed(code, model)


@example("TH201")
def too_few_samples_to_say(code):
    model = mlp(nn.ReLU())
    nn.init.constant_(model[0].bias, -100)
    return flowed(code, model, torch.randn(8, 8))


@example("TH201")
def units_that_are_always_on_or_always_off(code):
    model = mlp(nn.ReLU())
    nn.init.constant_(model[0].bias[:24], -10)
    nn.init.constant_(model[0].bias[24:], 10)
    return flowed(code, model)


@example("TH202", "0", "1")
def a_mostly_dormant_gelu(code):
    model = mlp(nn.GELU())
    nn.init.constant_(model[0].bias[:28], -100)
    return flowed(code, model)


@example("TH202")
def an_active_gelu(code):
    return flowed(code, mlp(nn.GELU()))


@example("TH203", "1")
def a_saturated_tanh(code):
    model = mlp(nn.Tanh())
    nn.init.constant_(model[0].bias, 100)
    return flowed(code, model)


@example("TH203", "1")
def a_saturated_sigmoid(code):
    model = mlp(nn.Sigmoid())
    nn.init.constant_(model[0].bias, -100)
    return flowed(code, model)


@example("TH203", "1")
def initial_weights_that_saturate_a_tanh(code):
    model = mlp(nn.Tanh())
    nn.init.normal_(model[0].weight, std=100.0)
    report = flowed(code, model)
    assert report.findings[0].evidence["cause"] == "init"
    return report


@example("TH203")
def a_tanh_in_its_middle(code):
    return flowed(code, mlp(nn.Tanh()))


@example("TH203")
def a_sure_last_tanh(code):
    model = nn.Sequential(nn.Linear(8, 4), nn.Tanh())
    nn.init.constant_(model[0].bias, 100)
    return flowed(code, model)


@example("TH204", "0")
def a_layer_that_says_the_same_to_everything(code):
    model = mlp(nn.ReLU())
    nn.init.zeros_(model[0].weight)
    nn.init.ones_(model[0].bias)
    return looked(code, model)


@example("TH204")
def a_layer_that_listens(code):
    return looked(code, mlp(nn.ReLU()))


class Asking(nn.Module):
    """A learned query, the same for every sample, is compared with the inputs."""

    def __init__(self):
        super().__init__()
        self.asked = nn.Parameter(torch.randn(8))
        self.query, self.head = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.head(x * self.query(self.asked.expand_as(x)))


@example("TH204")
def a_learned_query(code):
    return looked(code, Asking())


@example("TH204", "0")
def a_data_set_that_always_gives_its_first_sample(code):
    report = looked(code, mlp(nn.ReLU()), [(torch.ones(64, 8), y) for _, y in batches()])
    assert report.findings[0].evidence["cause"] == "other" and report.findings[0].severity == "error"
    return report


@example("TH204")
def one_answer_to_one_input(code):
    report = looked(code, mlp(nn.ReLU()), [(torch.ones(64, 8), torch.zeros_like(y)) for _, y in batches()])
    return replace(report, findings=tuple(finding for finding in report.findings if finding.severity > "info"))


# --- TH3: beginnings


def deep(**scales):
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    with torch.no_grad():
        for number, scale in scales.items():
            model[int(number[1:])].weight *= scale
    return model


@example("TH301", "2")
def a_layer_that_blows_signals_up(code):
    return flowed(code, deep(_2=1e8), torch.randn(256, 16))


@example("TH301", "1")
def a_layer_that_lets_signals_die(code):
    return flowed(code, deep(_1=1e-8), torch.randn(256, 16))


@example("TH301")
def layers_that_keep_the_scale(code):
    return flowed(code, deep(), torch.randn(256, 16))


@example("TH301")
def a_tiny_side_branch(code):
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.gate, self.last = (nn.Linear(16, 16) for _ in range(3))
            self.gate.weight.data *= 1e-6

        def forward(self, x):
            x = self.first(x)
            return self.last(x * self.gate(x).sigmoid())

    return flowed(code, Gated(), torch.randn(256, 16))


@example("TH302", "0")
def weights_that_are_all_alike(code):
    model = mlp()
    nn.init.constant_(model[0].weight, 0.1)
    return at_rest(code, model)


@example("TH302", "1")
def zeros_that_training_leaves_so(code):
    class Never(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(4, 4))

        def forward(self, x):
            return x + 0 * (x @ self.weight).detach()

    model = nn.Sequential(nn.Linear(8, 4), Never())
    return trained(code, model, torch.optim.SGD(model.parameters(), 0.01), steps=3)


@example("TH302")
def random_weights_and_a_frozen_filter(code):
    model = mlp()
    model.filter = nn.Parameter(torch.ones(3, 3), requires_grad=False)
    return at_rest(code, model)


@example("TH302")
def a_state_space_whose_rows_are_equal(code):
    model = mlp()
    model.A_log = nn.Parameter(torch.arange(1.0, 9).log().expand(4, 8).clone())
    return at_rest(code, model)


@example("TH302")
def zeros_that_are_trained(code):
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 4))
    nn.init.zeros_(model[1].weight)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    return trained(code, model, optimizer, loss=F.cross_entropy, steps=3)


class Blocks(nn.Module):
    """Three residual blocks with norms."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"norm": nn.LayerNorm(8), "up": nn.Linear(8, 16), "down": nn.Linear(16, 8)}) for _ in range(3)
        )
        self.last = nn.LayerNorm(8)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        for block in self.blocks:
            x = x + block["down"](block["up"](block["norm"](x)).relu())
        return self.head(self.last(x))


@example("TH302", "blocks.1.down")
def a_layer_of_zeros_unlike_that_of_other_blocks(code):
    model = Blocks()
    nn.init.zeros_(model.blocks[1]["down"].weight)
    return at_rest(code, model)


@example("TH302", "blocks.0.up")
def layers_of_zeros_in_a_model_that_was_trained(code):
    model = Blocks()
    for norm in (*(block["norm"] for block in model.blocks), model.last):
        nn.init.normal_(norm.weight, 1, 0.1)
    for block in model.blocks:
        nn.init.zeros_(block["up"].weight)
    return at_rest(code, model)


@example("TH302", "last")
def a_gain_of_zero_that_nothing_passes(code):
    model = Blocks()
    nn.init.zeros_(model.last.weight)
    return looked(code, model)


@example("TH302")
def branches_that_begin_at_zero(code):
    model = Blocks()
    for block in model.blocks:
        nn.init.zeros_(block["down"].weight)
    return looked(code, model)


@example("TH302")
def adapters_that_begin_at_zero_in_a_frozen_model(code):
    model = Blocks()
    for norm in (*(block["norm"] for block in model.blocks), model.last):
        nn.init.normal_(norm.weight, 1, 0.1)
    model.requires_grad_(False)
    model.adapter = nn.Linear(8, 2)
    nn.init.zeros_(model.adapter.weight)
    return at_rest(code, model)


@example("TH303", "0", step=0)
def pictures_of_bytes(code):
    return flowed(code, mlp(), torch.randint(256, (512, 8)).float())


@example("TH303")
def normal_inputs(code):
    return flowed(code, mlp())


@example("TH303")
def pictures_of_bytes_that_are_normed_at_once(code):
    return looked(code, nn.Sequential(nn.BatchNorm1d(8), *mlp()), [(255 * x.abs(), y) for x, y in batches()])


@example("TH303", "0", step=0)
def pictures_that_were_divided_twice(code):
    model, data = mlp(nn.ReLU()), batches(scale=1e-3)
    report = trained(code, model, torch.optim.SGD(model.parameters(), 0.01), data, F.cross_entropy)
    assert report.findings[0].severity == "warning"
    return report


@example("TH303")
def small_values_that_are_learnt_from(code):
    model, data = mlp(nn.ReLU()), [(1e-3 * x, (x[:, 0] > 0).long()) for x, _ in batches()]
    report = trained(code, model, torch.optim.Adam(model.parameters(), 0.1), data, F.cross_entropy)
    return replace(report, findings=tuple(finding for finding in report.findings if finding.severity > "info"))


@example("TH303")
def large_values_inside(code):
    return flowed(code, mlp(Returning(lambda x: x * 1e4)))


# --- TH4: gradients


@example("TH401", "0")
def a_gradient_that_is_almost_stopped(code):
    return flowed(code, mlp(Returning(lambda x: x * 1e-9)))


@example("TH401", "0")
def a_stack_of_sigmoids(code):
    layers = [layer for _ in range(20) for layer in (nn.Linear(8, 8), nn.Sigmoid())]
    return flowed(code, nn.Sequential(*layers, nn.Linear(8, 1)))


@example("TH401")
def a_gradient_that_arrives(code):
    return flowed(code, mlp(nn.ReLU()))


class Branch(nn.Module):
    """Adds a little of what a layer makes of its input, as branches do that begin near zero."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return x + 1e-6 * self.layer(x)


@example("TH401")
def a_branch_that_counts_little(code):
    return flowed(code, nn.Sequential(nn.Linear(8, 8), Branch(), nn.ReLU(), nn.Linear(8, 3)))


@example("TH401")
def a_mean_over_very_many_positions(code):
    pooled = [nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return flowed(code, nn.Sequential(*pooled, nn.Linear(8, 4)), torch.randn(2, 3, 512, 512))


@example("TH401")
def a_plain_net_of_two_convolutions_that_ends_in_a_mean(code):
    model, x = nn.Sequential(*convolutions(), nn.Linear(8, 4)), torch.randn(2, 3, 224, 224)
    with measure(model, grads=True) as stats:  # without the gradients of the weights, which would show it
        F.cross_entropy(model(x), torch.tensor([0, 1])).backward()
    return check(stats, [code])


def convolutions():
    torch.manual_seed(0)
    return [
        *(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten()),
    ]


@example("TH402", "2")
def gradients_that_are_large_everywhere(code):
    return scaled(code, 1e6)


@example("TH402")
def gradients_that_are_larger_than_usual(code):
    return scaled(code, 500)


@example("TH402")
def a_sum_over_very_many_positions(code):
    """Small gradients of outputs add up to large ones of the weights."""
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3))
    with measure(model, grads=True, param_grads=True) as stats:
        model(1 + torch.rand(8, 1, 128, 128)).square().sum().backward()
    assert stats["2.weight", "param_grad"].l2 > 1e4
    return check(stats, [code])


@example("TH402")
def a_loss_that_a_gradscaler_has_multiplied(code):
    return scaled(code, 2**16, torch.float16)


def scaled(code, factor, dtype=None):
    """A backward of a cross entropy times a factor, in eight samples, as `measure` sees it."""
    model = mlp(nn.ReLU())
    with measure(model, grads=True, param_grads=True) as stats:
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            output = model(torch.randn(8, 8))
        (F.cross_entropy(output.float(), torch.arange(8) % 4) * factor).backward()
    return check(stats, [code])


@example("TH402", "0")
def a_gradient_that_grows_on_its_way(code):
    return flowed(code, mlp(Returning(lambda x: x * 1e9)))


@example("TH402")
def a_gradient_that_keeps_its_size(code):
    return flowed(code, mlp(nn.ReLU()))


class Marked(nn.Module):
    """A token that starts near zero is added to the inputs, before a norm."""

    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(1e-6 * torch.randn(1, 8))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.norm(torch.stack([x, self.token.expand_as(x)], 1))).mean(1)


@example("TH402")
def a_token_that_starts_near_zero(code):
    return looked(code, Marked())


@example("TH402")
def a_loss_that_sums_over_many_terms(code):
    return looked(code, mlp(), loss=lambda output, target: 1e5 * output.square().sum())


def still(model):
    """An optimizer that hardly moves."""
    return torch.optim.SGD(model.parameters(), 1e-12)


@example("TH403", "", step=30)
def one_batch_that_is_huge(code):
    model, data = mlp(), batches(40)
    data[30] = 1e3 * data[30][0], data[30][1]
    return trained(code, model, still(model), data, steps=40)


@example("TH403")
def batches_of_one_size(code):
    model = mlp()
    return trained(code, model, still(model), batches(40), steps=40)


class Ends(nn.Module):
    """Two layers; gradients reach the second, or both."""

    def __init__(self, stopped):
        super().__init__()
        self.first, self.head, self.stopped = nn.Linear(8, 8), nn.Linear(8, 4), stopped

    def forward(self, x):
        x = self.first(x)
        return self.head(x.detach() if self.stopped else x)


@example("TH404", "2")
def a_loss_that_was_made_again_of_a_number(code):
    model = mlp(nn.ReLU())
    report = trained(
        code,
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        loss=lambda output, target: torch.tensor(F.cross_entropy(output, target).item(), requires_grad=True),
    )
    assert report.findings[0].severity == "error"
    return report


@example("TH404", "first")
def a_detached_layer(code):
    return looked(code, Ends(stopped=True))


@example("TH404", "spare")
def a_layer_that_is_never_called(code):
    model = Ends(stopped=False)
    model.spare = nn.Linear(8, 8)
    return looked(code, model)


class Choosing(nn.Module):
    """One of its experts gets all that comes."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 4) for _ in range(3))

    def forward(self, x):
        return self.experts[1](x)


@example("TH404")
def experts_that_get_nothing(code):
    return looked(code, Choosing())


class Reading(nn.Module):
    """A model of an installed package, which has a pooler that is not used here."""

    def __init__(self, stopped):
        super().__init__()
        from transformers import BertConfig, BertModel

        config = BertConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=2)
        self.bert, self.head, self.stopped = BertModel(config), nn.Linear(8, 4), stopped

    def forward(self, x):
        x = self.bert(x).last_hidden_state.mean(1)
        return self.head(x.detach() if self.stopped else x)


@example("TH404", "bert.encoder.layer.0.output.LayerNorm")
def a_detached_model_of_a_package(code):
    return looked(code, Reading(stopped=True), words())


@example("TH404")
def a_pooler_of_a_package_that_is_not_used(code):
    return looked(code, Reading(stopped=False), words())


def words():
    return [(torch.randint(8, (16, 6)), torch.randint(4, (16,))) for _ in range(8)]


@example("TH404", "2", step=0)
def a_softmax_over_one_unit(code):
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 1), nn.Softmax(1))
    batches = [(torch.randn(64, 8), torch.rand(64, 1)) for _ in range(8)]
    return looked(code, model, batches, F.mse_loss)


@example("TH404")
def gradients_everywhere_and_a_frozen_layer(code):
    model = Ends(stopped=False)
    model.spare = nn.Linear(8, 8).requires_grad_(False)
    return looked(code, model)


@example("TH405", "1", step=0)
def a_loss_that_is_too_small_for_half_precision(code):
    return halved(code, 1e-7)


@example("TH405")
def a_loss_for_half_precision(code):
    return halved(code, 1.0)


@example("TH405")
def a_small_loss_in_single_precision(code):
    return halved(code, 1e-7, torch.float32)


def halved(code, scale, dtype=torch.float16):
    """The report of one rule on a training with a loss that is scaled."""
    model = mlp().to(dtype)
    data = [(x.to(dtype), y.to(dtype)) for x, y in batches()]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return trained(code, model, optimizer, data, lambda output, target: scale * square(output, target).float())


# --- TH5: updates


@example("TH501", "")
def a_rate_that_is_far_too_high(code):
    model = mlp(nn.ReLU())
    return trained(code, model, torch.optim.Adam(model.parameters(), 10.0), loss=F.cross_entropy, steps=5)


@example("TH501")
def an_optimizer_that_searches_for_its_steps(code):
    model = mlp(nn.ReLU())
    return trained(code, model, torch.optim.LBFGS(model.parameters()), loss=F.cross_entropy, steps=5)


@example("TH502", "")
def a_rate_that_is_far_too_low(code):
    model = mlp(nn.ReLU())
    return trained(code, model, torch.optim.Adam(model.parameters(), 1e-7), loss=F.cross_entropy)


@example("TH502", "")
def a_rate_so_low_that_its_steps_are_lost_in_rounding(code):
    model = mlp(nn.ReLU())
    return trained(code, model, torch.optim.Adam(model.parameters(), 1e-12), loss=F.cross_entropy)


@example("TH502", "0.weight")
def a_group_whose_rate_is_far_too_low(code):
    model = mlp(nn.ReLU())
    groups = [{"params": model[0].parameters(), "lr": 1e-7}, {"params": model[2].parameters(), "lr": 1e-3}]
    return trained(code, model, torch.optim.Adam(groups), loss=F.cross_entropy)


@example("TH502", "second.weight")
def a_layer_whose_gradient_is_next_to_nothing(code):
    class Faint(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(8, 4), nn.Linear(8, 4)

        def forward(self, x):
            return self.first(x) + 1e-9 * self.second(x)

    model = Faint()
    report = trained(code, model, torch.optim.SGD(model.parameters(), 0.1))
    assert report.findings[0].evidence["cause"] == "no-gradient"
    return report


@example("TH501")
@example("TH502")
def a_usual_rate(code):
    model = mlp(nn.ReLU())
    return trained(code, model, torch.optim.Adam(model.parameters(), 1e-3), loss=F.cross_entropy)


@example("TH503", "1")
def a_layer_that_the_optimizer_has_not(code):
    model = mlp()
    return at_rest(code, model, torch.optim.SGD(model[0].parameters(), 0.1))


def blocks(*frozen):
    """Three blocks of three layers each, of which those that match a pattern are frozen, and an optimizer of all."""
    layers = {name: nn.Linear(8, 8) for name in ("query", "key", "out")}
    model = nn.Sequential(*(copy.deepcopy(nn.ModuleDict(layers)) for _ in range(3)))
    for path, parameter in model.named_parameters():
        parameter.requires_grad = not any(fnmatch(path, pattern) for pattern in frozen)
    return model, torch.optim.SGD(model.parameters(), 0.1)


@example("TH503", "0.query")
def queries_that_are_frozen_alone(code):
    return at_rest(code, *blocks("*.query.*"))


@example("TH503")
def a_frozen_block(code):
    return at_rest(code, *blocks("0.*"))


@example("TH503")
def blocks_of_which_little_is_trained(code):
    return at_rest(code, *blocks("*.query.*", "*.key.*"))


@example("TH503")
def an_optimizer_that_has_all_but_a_frozen_layer(code):
    model = mlp()
    model[0].requires_grad_(False)
    return at_rest(code, model, torch.optim.SGD(model[1].parameters(), 0.1))


@example("TH503", "1")
def an_optimizer_of_nothing_but_a_frozen_layer(code):
    model = mlp()
    model[1].requires_grad_(False)
    return at_rest(code, model, torch.optim.SGD(model[1].parameters(), 0.1))


@example("TH503", "")
def an_optimizer_whose_parameters_never_get_a_gradient(code):
    model = mlp()
    rest = state_of(model, torch.optim.SGD(model.parameters(), 0.1))
    return check(History(rest=rest, own_optimizer=True, loop=Loop(looked=20, idle=20)), [code])


@example("TH503")
def a_layer_of_another_optimizer(code):
    model = mlp()
    rest = state_of(model, torch.optim.SGD(model[0].parameters(), 0.1))
    loop = Loop(looked=20, elsewhere=frozenset({"1.weight", "1.bias"}))
    return check(History(rest=rest, own_optimizer=True, loop=loop), [code])


class Listing(nn.Module):
    """Has its hidden layer in a list, of which the model does not know."""

    def __init__(self, kind):
        super().__init__()
        self.hidden, self.out = kind([nn.Linear(8, 8)]), nn.Linear(8, 4)

    def forward(self, x):
        return self.out(self.hidden[0](x).relu())


@example("TH503", "")
def layers_in_a_plain_list(code):
    model = Listing(list)
    report = trained(code, model, torch.optim.SGD(model.parameters(), 0.1))
    assert report.findings[0].evidence["count"] == 2
    return report


@example("TH503")
def layers_in_a_module_list(code):
    model = Listing(nn.ModuleList)
    return trained(code, model, torch.optim.SGD(model.parameters(), 0.1))


@example("TH503")
def a_plain_list_of_layers_that_the_optimizer_has(code):
    model = Listing(list)
    return trained(code, model, torch.optim.SGD([*model.parameters(), *model.hidden[0].parameters()], 0.1))


@example("TH504", "0")
def a_group_whose_rate_is_zero(code):
    model = mlp()
    groups = [{"params": model[0].parameters(), "lr": 0.0}, {"params": model[1].parameters(), "lr": 0.1}]
    return at_rest(code, model, torch.optim.SGD(groups))


@example("TH503", "", "0", "1")
def an_optimizer_of_another_model(code):
    return at_rest(code, mlp(), torch.optim.SGD(mlp().parameters(), 0.1))


@example("TH504")
def an_optimizer_of_the_model(code):
    model = mlp()
    return at_rest(code, model, torch.optim.SGD(model.parameters(), 0.1))


@example("TH505", "0.weight")
def an_eps_that_is_zero_in_half_precision(code):
    model = mlp().half()
    return at_rest(code, model, torch.optim.Adam(model.parameters()))


@example("TH505", "0.weight")
def an_eps_of_zero(code):
    model = mlp()
    return at_rest(code, model, torch.optim.RMSprop(model.parameters(), eps=0))


@example("TH505")
def an_eps_for_half_precision(code):
    model = mlp().half()
    return at_rest(code, model, torch.optim.Adam(model.parameters(), eps=1e-4))


@example("TH505")
def an_eps_for_single_precision(code):
    model = mlp()
    return at_rest(code, model, torch.optim.Adam(model.parameters()))


@example("TH505")
def an_optimizer_that_does_not_divide(code):
    model = mlp().half()
    return at_rest(code, model, torch.optim.SGD(model.parameters(), 0.1))


@example("TH506", "1")
def gains_that_weight_decay_takes_away(code):
    model = mlp(nn.LayerNorm(32))
    return trained(code, model, torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=30.0), steps=60)


@example("TH506", "0")
def weights_that_weight_decay_takes_away(code):
    model = mlp(nn.ReLU())
    return trained(code, model, torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=10.0))


@example("TH506")
def gains_without_decay(code):
    model = mlp(nn.LayerNorm(32))
    groups = [{"params": [*model[0].parameters(), *model[2].parameters()]}, {"params": model[1].parameters()}]
    groups[1]["weight_decay"] = 0.0
    return trained(code, model, torch.optim.AdamW(groups, 1e-3, weight_decay=30.0), steps=60)


@example("TH506")
def gains_with_the_usual_decay(code):
    model = mlp(nn.LayerNorm(32))
    return trained(code, model, torch.optim.AdamW(model.parameters(), 1e-3), steps=60)


# --- TH51: the loop


@example("TH511", "")
def gradients_are_never_set_to_zero(code):
    return looped(code, looked=20, unzeroed=19)


@example("TH511")
def gradients_are_set_to_zero(code):
    return looped(code, looked=20, unzeroed=1)


@example("TH512", "")
def four_losses_that_nobody_divides(code):
    rest = state_of(model := mlp(), torch.optim.SGD(model.parameters(), 0.1))
    loop = Loop(looked=20, backwards={4: 20}, forwards={4: 20}, fed={4: 20}, undivided=80, total=80)
    return check(History(rest=rest, loop=loop), [code])


@example("TH512")
def four_losses_that_are_divided(code):
    return looped(code, looked=20, backwards={4: 20}, forwards={4: 20}, fed={4: 20}, undivided=0, total=80)


@example("TH512")
def the_real_and_the_fake_batch(code):
    return looped(code, looked=20, backwards={2: 20}, forwards={2: 20}, fed={1: 20}, undivided=40, total=40)


@example("TH513", "")
def a_schedule_that_is_never_stepped(code):
    return looped(code, schedules=("StepLR",), steps=500, has_ended=True)


@example("TH513", "", step=0)
def a_schedule_that_is_stepped_too_early(code):
    return looped(code, schedules=("StepLR",), scheduled=True, hasty=True, steps=500, has_ended=True)


@example("TH513")
def a_schedule_of_epochs_in_a_single_one(code):
    return looped(code, schedules=("StepLR",), steps=500, has_ended=True, feedings=(Feeding(500, 1, 500),))


@example("TH513")
def a_schedule_that_is_stepped(code):
    return looped(code, schedules=("StepLR",), scheduled=True, steps=500, has_ended=True)


@example("TH514", "")
def a_gradient_of_which_nothing_is_left(code):
    return clipped(code, torch.optim.SGD, 1e-4)


@example("TH514")
def a_gradient_whose_outliers_are_clipped(code):
    return clipped(code, torch.optim.SGD, 0.5)


@example("TH514")
def a_gradient_that_is_divided(code):
    return clipped(code, torch.optim.SGD, None)


def clipped(code, optimizer, limit):
    """The report of one rule on steps of clipped gradients; without a limit, they are divided by a thousand."""
    model = mlp()
    stepped = optimizer(model.parameters(), 0.1)
    with Watch(model, [RULES[code]], stepped) as watch:
        for x, _ in batches(8):
            stepped.zero_grad()
            model(x).square().mean().backward()
            if limit is None:
                for parameter in model.parameters():
                    parameter.grad /= 1000
            else:
                nn.utils.clip_grad_norm_(model.parameters(), limit)
            stepped.step()
            watch.step()
    return check(watch.history, [code])


@example("TH515", "")
def the_first_batch_of_every_iterator(code):
    return looped(code, feedings=(Feeding(batches=10, iterators=50, taken=50, firsts=50),))


@example("TH515", "")
def a_batch_from_every_worker(code):
    return looped(code, feedings=(Feeding(iterators=1, taken=64, workers=2, repeated=32, groups=32),))


@example("TH515")
def a_single_batch_is_all_there_is(code):
    return looped(code, feedings=(Feeding(batches=1, iterators=50, taken=50, firsts=50),))


@example("TH516", "")
def an_iterator_that_is_used_up(code):
    return looped(code, feedings=(Feeding(batches=10, iterators=1, taken=10, used_up=4),))


@example("TH516")
def an_iterator_for_every_epoch(code):
    return looped(code, feedings=(Feeding(batches=10, iterators=5, taken=50),))


# --- TR1: several ranks


def seen_by_ranks(code, steps):
    """The report of one rule on what two ranks saw in some steps, each of which changes what is usual."""
    history = History()
    for number, changes in enumerate(steps):
        members = {rank: Member(f"host{rank}", 0, rank, number) for rank in (0, 1)}
        facts = {rank: {"loss": 1.0, "grad_norm": 1.0, "inputs": [10 * number + rank]} for rank in (0, 1)}
        table = torch.tensor([[0.0, 1.0, -3.0, 3.0, 0.0, 0.0]])
        usual = RankStep(number, 2, members, facts, [("1", "output")], {0: table, 1: table.clone()}, averages=True)
        history.ranks.append(replace(usual, **changes))
    return check(history, [code])


def split(port, *values):
    return Split("1.weight", port, "", tuple((value, rank, 1) for rank, value in enumerate(values)))


@example("TR101", "1", step=2)
def a_copy_that_has_other_bits(code):
    alike = {"checked": frozenset({"param"})}
    return seen_by_ranks(code, [alike, alike, alike | {"splits": (split("param", 3, 4),)}])


@example("TR101", "1", step=2)
def a_copy_that_has_parted_since_the_last_checksum(code):
    alike = {"checked": frozenset({"param"})}
    report = seen_by_ranks(code, [alike, {}, alike | {"splits": (split("param", 3, 4),)}])
    expected = "replicas differ: weight is not the same on rank 1 (host1), since a step from 1 to 2"
    assert report.findings[0].message == expected
    return report


@example("TR101")
def zeros_that_the_script_has_split(code):
    """They are alike at first, but get gradients of their own on ranks that have the same samples."""
    alike = {"checked": frozenset({"param"}), "split": True, "averages": False}
    alike["members"] = {rank: Member("a", 0, 0, 3) for rank in (0, 1)}
    grads = {"splits": (split("param_grad_norm", 0.1, 0.2), split("step_grad_norm", 0.1, 0.2))}
    before = alike | {"facts": {0: {}, 1: {}}}
    return seen_by_ranks(code, [before, alike | grads, *[alike | {"splits": (split("param", 3, 4),)}] * 3])


@example("TR101", "1", step=2)
def a_copy_beside_those_that_the_script_has_split(code):
    alike = {"checked": frozenset({"param"}), "split": True, "averages": False, "parameters": 2}
    alike["members"] = {rank: Member("a", 0, 0, 3) for rank in (0, 1)}
    return seen_by_ranks(code, [alike, alike, alike | {"splits": (split("param", 3, 4),)}])


@example("TR101", "1", step=1)
def a_table_that_only_one_rank_has(code):
    apart = {"checked": frozenset({"buffer"}), "splits": (split("buffer", 3, 4),)}
    return seen_by_ranks(code, [apart, apart])


@example("TR101")
def batch_norms_of_their_own(code):
    steps = [{"checked": frozenset({"buffer"}), "splits": (split("buffer", 3 + n, 40 + n),)} for n in range(4)]
    return seen_by_ranks(code, steps)


@example("TR101")
def ranks_that_were_never_the_same(code):
    apart = {"checked": frozenset({"param"}), "splits": (split("param", 3, 4),), "averages": False}
    return seen_by_ranks(code, [apart] * 4)


@example("TR102", "1", step=0)
def gradients_that_are_not_averaged(code):
    return seen_by_ranks(
        code, [{"splits": (split("step_grad_norm", 1.0, 1.5), split("param_grad_norm", 1.0, 1.5))}] * 3
    )


@example("TR102", "1", step=0)
def gradients_that_are_nearly_averaged(code):
    report = seen_by_ranks(code, [{"splits": (split("step_grad_norm", 0.39978, 0.39991),)}] * 3)
    assert "its norm is 0.3998 on rank 0, 0.3999 on rank 1" in report.findings[0].message
    return report


@example("TR102", "1", step=0)
def gradients_that_differ_though_the_samples_are_the_same(code):
    members = {rank: Member("a", 0, 0, 3) for rank in (0, 1)}
    splits = tuple(split(port, 1.0, 1.5) for port in ("step_grad_norm", "param_grad_norm"))
    report = seen_by_ranks(code, [{"members": members, "splits": splits}] * 3)
    assert "differs between ranks (of the same samples): its norm is 1 on rank 0" in report.findings[0].message
    return report


@example("TR102")
def gradients_that_are_rounded_apart(code):
    return seen_by_ranks(code, [{"splits": (split("step_grad_norm", 1.0, 1.0000001),)}] * 3)


@example("TR104", "1", step=2)
def activations_of_one_rank_that_are_far_larger(code):
    small, large = torch.tensor([[0.0, 1.0, -3, 3, 0, 0]]), torch.tensor([[0.0, 50.0, -150, 150, 0, 0]])
    return seen_by_ranks(code, [{}, {}, {"tables": {0: small, 1: large}}, {"tables": {0: small, 1: large}}])


@example("TR104", "", step=1)
def a_loss_of_one_rank_that_is_far_larger(code):
    return seen_by_ranks(code, [{}, *[{"facts": {0: {"loss": 1.0}, 1: {"loss": 30.0}}}] * 3])


@example("TR104")
def losses_that_vary(code):
    return seen_by_ranks(code, [{"facts": {0: {"loss": 1.0 + n % 3}, 1: {"loss": 4.0 - n % 3}}} for n in range(8)])


@example("TR105", "")
def a_rank_that_was_lost(code):
    return seen_by_ranks(
        code, [{}, {"members": {0: Member("a", 0, 0, 8, 9, "ended"), 1: Member("b", 0, 1, 3, None, LOST)}}]
    )


@example("TR105", "")
def a_rank_that_raises_before_the_others(code):
    first = Member("b", 0, 1, 19, 20, "failed", 100.0, "RuntimeError: bad sample")
    other = Member("a", 0, 0, 19, 20, "failed", 100.1, "RuntimeError: Connection closed by peer")
    report = seen_by_ranks(code, [{}, {"members": {0: other, 1: first}}])
    assert report.findings[0].message == "rank 1 (b) was the first to end, after 20 steps: RuntimeError: bad sample"
    return report


@example("TR105", "")
def a_rank_that_leaves_before_the_others_fail(code):
    first = Member("b", 0, 1, 19, 20, "ended", 100.0)
    other = Member("a", 0, 0, 19, 20, "failed", 100.1, "RuntimeError: Connection closed by peer")
    report = seen_by_ranks(code, [{}, {"members": {0: other, 1: first}}])
    assert "rank 1 (b) was the first to end, after 20 steps: it left the training" in report.findings[0].message
    return report


@example("TR105")
def an_error_that_all_ranks_raise(code):
    members = {rank: Member("a", 0, rank, 19, 20, "failed", 100.0 + rank, "KeyError: 'x'") for rank in (0, 1)}
    return seen_by_ranks(code, [{}, {"members": members}])


@example("TR105")
def a_rank_with_one_step_less(code):
    return seen_by_ranks(
        code, [{"members": {0: Member("a", 0, 0, 99, 100, "ended"), 1: Member("b", 0, 1, 98, 99, "ended")}}]
    )


@example("TR106", "", step=0)
def the_same_batch_on_both_ranks(code):
    return seen_by_ranks(code, [{"facts": {rank: {"inputs": [n]} for rank in (0, 1)}} for n in range(3)])


@example("TR106")
def the_same_batch_within_a_team(code):
    members = {rank: Member("a", 0, 0, 3) for rank in (0, 1)}
    return seen_by_ranks(code, [{"members": members, "facts": {r: {"inputs": [n]} for r in (0, 1)}} for n in range(3)])


@example("TR107", "1", step=0)
def a_parameter_that_one_rank_does_not_train(code):
    return seen_by_ranks(code, [{"splits": (split("update_norm", 0.1, 0.0),)}] * 2)


@example("TR107")
def updates_that_differ(code):
    return seen_by_ranks(code, [{"splits": (split("update_norm", 0.1, 0.2),)}] * 2)


@example("TR108", "1", step=1)
def a_nan_on_one_rank(code):
    broken = {"nonfinite": ["1", "output"]}
    return seen_by_ranks(code, [{}, {"facts": {0: {}, 1: broken}}, {"facts": {0: broken, 1: broken}}])


@example("TR108", "", step=1)
def a_loss_that_is_nan_on_one_rank(code):
    report = seen_by_ranks(code, [{}, {"facts": {0: {"loss": 1.0}, 1: {"loss": 1.0, "nonfinite_loss": 1}}}])
    assert report.findings[0].message.startswith("the loss is not finite first on rank 1 (host1);")
    return report


@example("TR108")
def a_nan_on_all_ranks_at_once(code):
    return seen_by_ranks(code, [{}, {"facts": {rank: {"nonfinite": ["1", "output"]} for rank in (0, 1)}}])


@example("TR109", "")
def a_slow_rank(code):
    return seen_by_ranks(code, [{"facts": {0: {"seconds": 0.01}, 1: {"seconds": 0.03}}}] * 12)


@example("TR109")
def ranks_that_take_turns_at_being_slow(code):
    return seen_by_ranks(
        code, [{"facts": {0: {"seconds": 0.01 + 0.03 * (n % 2)}, 1: {"seconds": 0.025}}} for n in range(12)]
    )


# --- TH6: losses


def noise(count):
    return (0.001 * torch.randn(count)).tolist()


@example("TH601", "")
def a_loss_that_stays(code):
    return told(code, [2.0 + each for each in noise(80)])


@example("TH601", "")
def a_loss_that_rises(code):
    return told(code, [2.0 + 0.1 * step for step in range(80)])


@example("TH601")
def a_loss_that_falls(code):
    return told(code, [2.0 * 0.95**step + each for step, each in enumerate(noise(80))])


@example("TH601")
def a_loss_of_too_few_steps(code):
    return told(code, [2.0] * 10)


@example("TH602", "", step=40)
def a_loss_that_jumps(code):
    return told(code, [100.0 if step == 40 else 1.0 + each for step, each in enumerate(noise(60))])


@example("TH602")
def a_loss_that_does_not_jump(code):
    return told(code, [1.0 + each for each in noise(60)])


@example("TH606", "", step=0)
def a_loss_that_grows_tenfold_every_few_steps(code):
    return told(code, [1.3**step for step in range(40)])


@example("TH606", "", step=2)
def a_loss_that_grows_until_it_is_infinite(code):
    return told(code, [2.0, 1.9, 1.8, 20.0, 4e3, 7e6, float("inf")])


@example("TH606")
def a_loss_that_jumps_and_comes_back(code):
    return told(code, [2.0, 1.9, 1.8, 90.0, 30.0, 2.5, 2.0, 1.9, 1.8, 1.7])


@example("TH606")
def a_loss_that_wavers_near_zero(code):
    return told(code, [1e-6 if step % 2 else 1e-4 for step in range(40)])


@example("TH606", "", step=0)
def a_loss_without_a_lower_end(code):
    return told(code, [1.5 - 1.3**step for step in range(40)])


@example("TH606")
def a_likelihood_that_falls_below_zero(code):
    return told(code, [1.5 - 0.1 * step for step in range(40)])


@example("TH603", "1", step=0)
def logits_that_are_far_too_large(code):
    model = mlp()
    model[1].weight.data *= 1e3
    return looked(code, model)


@example("TH603")
def logits_that_guess(code):
    return looked(code, mlp())


@example("TH604", "2")
def a_softmax_before_the_cross_entropy(code):
    return looked(code, nn.Sequential(*mlp(), nn.Softmax(1)))


@example("TH604")
def logits_for_the_cross_entropy(code):
    return looked(code, mlp())


@example("TH604")
def a_softmax_before_the_likelihood(code):
    def likelihood(output, target):
        return F.nll_loss(output.log(), target)

    return looked(code, nn.Sequential(*mlp(), nn.Softmax(1)), loss=likelihood)


def regression(*shape):
    return [(torch.randn(64, 8), torch.randn(64, *shape)) for _ in range(8)]


@example("TH605", "")
def a_column_against_a_row(code):
    return looked(code, nn.Linear(8, 1), regression(), lambda output, target: (output - target).square().mean())


@example("TH605", "")
def a_row_against_a_column_that_only_the_graph_shows(code):
    with pytest.warns(UserWarning, match="target size"):
        terms = loss_terms(F.mse_loss(nn.Linear(8, 1)(torch.randn(6, 8)), torch.randn(6)))
    report = check(History(losses={0: 1.0}, terms={0: terms}), [code])
    assert report.findings[0].message.endswith("6×1 against 6")
    return report


@example("TH605")
def a_column_against_a_column_in_the_graph(code):
    terms = loss_terms(F.mse_loss(nn.Linear(8, 1)(torch.randn(6, 8)), torch.randn(6, 1)))
    return check(History(losses={0: 1.0}, terms={0: terms}), [code])


@example("TH605")
def a_column_against_a_column(code):
    return looked(code, nn.Linear(8, 1), regression(1), F.mse_loss)


def bounded(last, low=-1.0, high=1.0):
    """A net that ends in `last`, and targets between `low` and `high`."""
    data = [(torch.randn(64, 8), low + (high - low) * torch.rand(64, 1)) for _ in range(8)]
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1), last), data


@example("TH604", "2")
def a_sigmoid_before_the_cross_entropy(code):
    return looked(code, nn.Sequential(*mlp(), nn.Sigmoid()))


@example("TH604", "1")
def a_relu_on_the_logits_that_is_a_function(code):
    class Rectified(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp()

        def forward(self, x):
            return self.net(x).relu()

    report = looked(code, Rectified())
    assert report.findings[0].evidence["line"].endswith("return self.net(x).relu()")
    return replace(report, findings=tuple(replace(f, site=f.site.removeprefix("net.")) for f in report.findings))


@example("TH604", "2")
def a_tanh_on_the_logits(code):
    return looked(code, nn.Sequential(*mlp(), nn.Tanh()))


@example("TH604", "1")
def a_softmax_over_the_batch(code):
    return looked(code, nn.Sequential(*mlp(), nn.LogSoftmax(0)), loss=F.nll_loss)


@example("TH604")
def a_softmax_over_the_classes(code):
    return looked(code, nn.Sequential(*mlp(), nn.LogSoftmax(-1)), loss=F.nll_loss)


def tagged(code, loss):
    """The report on a net that has an output for each of three positions."""
    data = [(torch.randn(16, 3, 8), torch.randint(4, (16, 3))) for _ in range(8)]
    return looked(code, mlp(nn.ReLU()), data, loss)


@example("TH604", "2")
def a_reshape_instead_of_a_transpose(code):
    return tagged(code, lambda output, target: F.cross_entropy(output.reshape(16, 4, 3), target))


@example("TH604")
def a_transpose(code):
    return tagged(code, lambda output, target: F.cross_entropy(output.transpose(1, 2), target))


@example("TH604")
def a_reshape_to_one_position_per_row(code):
    return tagged(code, lambda output, target: F.cross_entropy(output.reshape(-1, 4), target.flatten()))


@example("TH604", "1")
def raw_outputs_for_the_likelihood(code):
    return looked(code, mlp(), loss=F.nll_loss)


@example("TH604")
def a_sigmoid_for_probabilities(code):
    return looked(code, *bounded(nn.Sigmoid(), 0.0), F.binary_cross_entropy)


@example("TH607", "3")
def a_relu_for_negative_targets(code):
    return looked(code, *bounded(nn.ReLU()), F.mse_loss)


@example("TH607", "3")
def a_sigmoid_for_targets_up_to_ten(code):
    return looked(code, *bounded(nn.Sigmoid(), 0.0, 10.0), F.l1_loss)


@example("TH607", "3")
def a_softmax_over_one_of_one(code):
    return looked(code, *bounded(nn.Softmax(1), 0.0), F.binary_cross_entropy)


@example("TH607")
def a_tanh_for_targets_within_its_reach(code):
    return looked(code, *bounded(nn.Tanh()), F.mse_loss)


@example("TH607")
def a_relu_for_positive_targets(code):
    return looked(code, *bounded(nn.ReLU(), 0.0, 10.0), F.mse_loss)


@example("TH608", "")
def labels_of_one_class(code):
    return looked(code, mlp(), [(x, torch.zeros_like(y)) for x, y in batches()])


@example("TH608", "")
def binary_labels_of_minus_one_and_one(code):
    model, data = bounded(nn.Identity())
    return looked(code, model, [(x, y.sign()) for x, y in data], F.binary_cross_entropy_with_logits)


@example("TH608", "")
def many_labels_of_one_of_two_classes(code):
    report = looked(code, nn.Sequential(*mlp(), nn.Linear(4, 2)), [(x, torch.zeros_like(y)) for x, y in batches()])
    assert report.findings[0].severity == "error"
    return report


@example("TH608")
def labels_of_all_classes(code):
    return looked(code, mlp())


@example("TH609", "", step=0)
def targets_of_a_hundred_million(code):
    return looked(code, *bounded(nn.Identity(), 0.0, 1e8), F.mse_loss)


@example("TH609")
def targets_of_one(code):
    return looked(code, *bounded(nn.Identity()), F.mse_loss)


def likelihood_by_hand(output, target):
    return -(F.one_hot(target, 4) * output.log()).sum(1).mean()


@example("TH610", "1")
def the_log_of_raw_outputs(code):
    return looked(code, mlp(), loss=likelihood_by_hand)


@example("TH610")
def a_log_softmax(code):
    return looked(code, nn.Sequential(*mlp(), nn.LogSoftmax(1)), loss=F.nll_loss)


@example("TH611", "", step=0)
def a_loss_with_the_wrong_sign(code):
    return looked(code, mlp(), loss=lambda output, target: -F.cross_entropy(output, target))


@example("TH611")
def a_loss_above_zero(code):
    return looked(code, mlp())


@example("TH612", "1")
def two_layers_with_nothing_between(code):
    return looked(code, mlp())


@example("TH612")
def two_layers_with_a_relu_between(code):
    return looked(code, mlp(nn.ReLU()))


@example("TH613", "", step=0)
def a_label_out_of_range(code):
    return looked(code, mlp(), [(x, y + 1) for x, y in batches()])


@example("TH613", "", step=2)
def a_batch_that_does_not_fit(code):
    return looked(code, mlp(), [*batches(2), (torch.randn(64, 7), torch.zeros(64, dtype=torch.long))])


@example("TH613")
def batches_that_fit(code):
    return looked(code, mlp())


# --- TH7: batch norms and modes


def with_norm(seen=0, train=True, **options):
    model = nn.Sequential(nn.BatchNorm1d(8, **options), nn.Linear(8, 4))
    for _ in range(seen):
        model(torch.randn(256, 8))
    return model.train(train)


@example("TH701", "0")
def running_statistics_of_other_data(code):
    model = with_norm(seen=60)
    model[0].running_mean += 50
    return looked(code, model)


@example("TH701")
def running_statistics_of_these_data(code):
    return looked(code, with_norm(seen=60), batches(size=256))


@example("TH702", "0")
def a_norm_in_eval_mode_that_has_seen_nothing(code):
    return at_rest(code, with_norm(train=False))


@example("TH702")
def a_norm_in_eval_mode_that_has_seen_something(code):
    return at_rest(code, with_norm(seen=3, train=False))


@example("TH702")
def a_norm_in_train_mode_that_has_seen_nothing(code):
    return at_rest(code, with_norm())


@example("TH703", "0")
def a_running_variance_of_zero(code):
    model = with_norm(seen=3)
    model[0].running_var[5] = 0
    return at_rest(code, model)


@example("TH703")
def a_usual_running_variance(code):
    return at_rest(code, with_norm(seen=3))


@example("TH704", "1")
def a_dropout_of_nearly_everything(code):
    return looked(code, mlp(nn.Dropout(0.99)), loss=lambda output, target: 1 + 0 * output.mean())


@example("TH704", "")
def a_loss_that_differs_by_mode(code):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 4)

        def forward(self, x):
            return self.layer(x) * (1 if self.training else 100)

    return looked(code, Net(), loss=square)


def functional(**options):
    """A network whose dropout is a function."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = mlp()

        def forward(self, x):
            told = {name: getattr(self, name) for name in options}
            return F.dropout(self.layers(x), 0.1, **told)

    return Net()


@example("TH704", "")
def a_dropout_that_does_not_know_the_mode(code):
    return looked(code, functional())


@example("TH704")
def a_dropout_that_is_told_the_mode(code):
    return looked(code, functional(training=True))


@example("TH704")
def dropouts_one_after_another(code):
    layers = [layer for _ in range(6) for layer in (nn.Linear(8, 8), nn.Dropout(0.5))]
    return looked(code, nn.Sequential(*layers, nn.Linear(8, 4)))


@example("TH704")
def a_light_dropout(code):
    return looked(code, mlp(nn.Dropout(0.05)))


@example("TH705", "")
def trained_in_eval_mode(code):
    return looped(code, switches=("1",), trained=50, trained_in_eval=50, evaluated_in_eval=50)


@example("TH705", "")
def evaluated_in_train_mode(code):
    return looped(code, switches=("1",), trained=50, evaluated_in_train=10)


@example("TH705")
def trained_and_evaluated_as_it_should_be(code):
    return looped(code, switches=("1",), trained=50, evaluated_in_eval=10)


@example("TH705")
def a_model_without_modes(code):
    return looped(code, trained=50, trained_in_eval=50, evaluated_in_train=10)


# --- TH8: representations


def ranked(rank):
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4))
    if rank:
        model[0].weight.data = torch.randn(16, rank) @ torch.randn(rank, 16)
    return model


@example("TH801", "0")
def a_weight_of_rank_one(code):
    return flowed(code, ranked(1), torch.randn(512, 16))


@example("TH801")
def a_weight_of_full_rank(code):
    return flowed(code, ranked(None), torch.randn(512, 16))


class Attends(nn.Module):
    """Attention whose queries and keys are larger by a factor."""

    def __init__(self, scale=1.0):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.attention.in_proj_weight.data[:16] *= scale
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.attention(x, x, x)[0].mean(1))


def sequences():
    return [(torch.randn(16, 12, 8), torch.randint(4, (16,))) for _ in range(8)]


@example("TH802", "attention")
@example("TH803", "attention")
def attention_to_one_key_alone(code):
    return looked(code, Attends(100), sequences())


@example("TH802")
@example("TH803")
def attention_to_many_keys(code):
    return looked(code, Attends(), sequences())


class Windows(nn.Module):
    """Attention by hand, in which a mask adds -100 to most keys."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value, self.head = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        q, k, v = (layer(x).unflatten(2, (2, 4)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        mask = torch.full((12, 12), -100.0).triu(1) + torch.full((12, 12), -100.0).tril(-1)
        weights = (q @ k.mT / 2 + mask).softmax(-1)
        return self.head((weights @ v).transpose(1, 2).flatten(2)).mean(1)[:, :4]


@example("TH802")
@example("TH803")
def a_mask_that_adds_a_large_number(code):
    return looked(code, Windows(), sequences())


# --- TH9: drift


def profiled(code, scale):
    model = mlp(nn.ReLU()).eval()
    profile = Profile.of(model, [torch.randn(256, 8) for _ in range(8)])
    return profile.check(model, scale * torch.randn(256, 8), [code])


@example("TH901", "0")
def inputs_that_are_far_larger(code):
    return profiled(code, 100)


@example("TH901")
def inputs_as_ever(code):
    return profiled(code, 1)


# --- the tests


def named(each):
    return f"{each.code}-{each.name}"


@pytest.mark.parametrize("each", [each for each in EXAMPLES if each.sites], ids=named)
def test_it_is_found_at_its_place(each):
    report = each.make()
    assert report.findings, report.skipped
    first = report.findings[0]
    assert first.code == each.code and first.site in each.sites, first
    assert each.step is None or first.step == each.step
    assert first.severity >= "warning"
    assert first.hint and "nan" not in first.hint and str(first) in str(report)


@pytest.mark.parametrize("each", [each for each in EXAMPLES if not each.sites], ids=named)
def test_it_is_not_found_where_it_is_not(each):
    report = each.make()
    assert report.checked == (each.code,), report.skipped  # the rule was applied
    assert not [finding for finding in report.findings if finding.severity >= "warning"]


@pytest.mark.parametrize("code", RULES)
def test_every_rule_has_an_example_of_both(code):
    assert {bool(each.sites) for each in EXAMPLES if each.code == code} == {True, False}
