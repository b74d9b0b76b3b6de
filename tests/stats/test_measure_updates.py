"""Parameters, the gradients that an optimizer is given and the updates that it makes, against each step by hand."""

import gc
import math
import weakref

import pytest
import torch
from contents import check_moments
from torch import nn

from torchhook import NotRecordedError, measure

PORTS = ("param", "param_grad", "step_grad", "update", "update_ratio")
NORMS = ("param_norm", "param_grad_norm", "step_grad_norm", "update_norm")
ALL = {"params": True, "param_grads": True, "updates": True}


def net():
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))


class ByHand:
    """What should be measured of each parameter, written down around the steps of a loop."""

    def __init__(self, model):
        self.parameters = dict(model.named_parameters())
        self.seen = {(path, port): [] for path in self.parameters for port in PORTS}

    def before(self, port, scale=1.0):
        for path, parameter in self.parameters.items():
            value = parameter if port == "param" else parameter.grad
            if value is not None:
                self.seen[path, port].append(value.detach().clone() / scale)

    def after(self):
        for path, parameter in self.parameters.items():
            was = self.seen[path, "param"][-1]
            update = parameter.detach() - was
            self.seen[path, "update"].append(update)
            self.seen[path, "update_ratio"].append(update.double().norm() / was.double().norm())

    def check(self, stats, ports=PORTS):
        for (path, port), values in self.seen.items():
            if port in ports:
                assert values, (path, port)
                check_moments(stats[path, port], *values)
                if f"{port}_norm" in NORMS and (path, f"{port}_norm") in stats:
                    norms = torch.stack([value.double().norm() for value in values])
                    said = stats[path, f"{port}_norm"]
                    got, true = (said.count, said.mean, said.min, said.max), (norms.mean(), norms.min(), norms.max())
                    assert got == pytest.approx((len(values), *map(float, true)), rel=1e-6)


OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, 0.05),
    "momentum": lambda parameters: torch.optim.SGD(parameters, 0.05, momentum=0.9, weight_decay=0.1),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, 0.01),
    "AdamW, fused": lambda parameters: torch.optim.AdamW(parameters, 0.01, fused=True),
    "AdamW, one by one": lambda parameters: torch.optim.AdamW(parameters, 0.01, foreach=False),
}


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("batches", [1, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_step_by_hand(name, batches, every):
    model = net()
    optimizer, by_hand = OPTIMIZERS[name](model.parameters()), ByHand(model)
    with measure(model, outputs=False, optimizer=optimizer, every=every, **ALL) as stats:
        for step in range(5):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            for _ in range(batches):
                model(torch.randn(8, 4)).square().mean().backward()
            active = step % every == 0
            for port in ("param", "param_grad", "step_grad") if active else ():
                by_hand.before(port)
            optimizer.step()
            if active:
                by_hand.after()
    by_hand.check(stats)
    steps = len(range(0, 5, every))
    assert stats.step == 5 and {port for _, port in stats} == {*PORTS, *NORMS}
    assert stats["0.weight", "param_grad"].count == stats["0.weight", "step_grad"].count == 24 * steps
    assert stats["0.weight", "update_ratio"].count == steps


@pytest.mark.parametrize("clip", [nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_])
@pytest.mark.parametrize("batches", [1, 2])
def test_gradients_before_and_after_clipping(clip, batches):
    model = net()
    optimizer, by_hand = torch.optim.SGD(model.parameters(), 0.1), ByHand(model)
    with measure(model, optimizer=optimizer, **ALL) as stats:
        for _ in range(4):
            optimizer.zero_grad()
            for _ in range(batches):
                model(10 * torch.randn(8, 4)).square().sum().backward()
            by_hand.before("param_grad")
            clip(model.parameters(), 0.01)
            by_hand.before("step_grad")
            by_hand.before("param")
            optimizer.step()
            by_hand.after()
    by_hand.check(stats)
    for path in by_hand.parameters:
        assert stats[path, "param_grad"].l2 > 50 * stats[path, "step_grad"].l2 > 0
        update = stats[path, "update"]
        assert update.l2 == pytest.approx(0.1 * stats[path, "step_grad"].l2, rel=1e-3)


def test_windows_and_states_of_other_statistics():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    stats_wanted = ("moments", "histogram", "channels", "covariance", "topk")
    grads = []
    with measure(model, optimizer=optimizer, stats=stats_wanted, **ALL) as stats:
        for step in range(6):
            optimizer.zero_grad()
            for _ in range(2):
                model(torch.randn(8, 4)).square().mean().backward()
            if step == 2:  # a window that begins between the backward and the step
                stats.reset()
            if step >= 2:
                grads.append(model[0].weight.grad.clone())
            optimizer.step()
    reading = stats["0.weight", "param_grad"]
    check_moments(reading, *grads)
    assert reading.histogram().counts.sum() == 24 * 4
    together = torch.cat(grads, 1).double()
    torch.testing.assert_close(reading["channels"].mean, together.mean(1), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(reading["covariance"].covariance, torch.cov(together), rtol=1e-4, atol=1e-6)
    for entry in reading["topk"]:
        assert float(grads[entry.tensor][entry.index]) == entry.value
    assert reading["topk"][0].value == reading.max
    assert list(stats["0.weight", "update_ratio"]) == ["moments"] and stats["0.weight", "update_ratio"].count == 4


# --- scaled losses


def scaled_step(model, optimizer, scaler, by_hand=None, unscale=False, clip=None, batches=1, broken=False):
    optimizer.zero_grad()
    for _ in range(batches):
        loss = model(torch.randn(8, 4)).square().mean()
        scaler.scale(loss * (math.inf if broken else 1.0)).backward()
    if by_hand is not None:
        by_hand.before("param_grad", scale=scaler.get_scale())
        by_hand.before("param")
    if unscale:
        scaler.unscale_(optimizer)
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
    if by_hand is not None:
        by_hand.before("step_grad", scale=1.0 if unscale else scaler.get_scale())
    scaler.step(optimizer)
    scaler.update()
    if by_hand is not None:
        by_hand.after()


@pytest.mark.parametrize("name", ["SGD", "AdamW", "AdamW, fused"])
@pytest.mark.parametrize("batches", [1, 2])
@pytest.mark.parametrize("unscale, clip", [(False, None), (True, None), (True, 0.01)])
def test_the_scale_of_the_loss_is_taken_off(name, batches, unscale, clip):
    model = net()
    optimizer, by_hand = OPTIMIZERS[name](model.parameters()), ByHand(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    with measure(model, optimizer=optimizer, **ALL) as stats:
        scaled_step(model, optimizer, scaler, None, unscale, clip, batches)
        stats.reset()  # the first step shows that there is a scale
        for _ in range(5):
            scaled_step(model, optimizer, scaler, by_hand, unscale, clip, batches)
    assert scaler.get_scale() == 8 * 1024
    by_hand.check(stats)
    for path in by_hand.parameters:
        before, after = stats[path, "param_grad"].l2, stats[path, "step_grad"].l2
        assert after < 0.5 * before if clip else after == pytest.approx(before, rel=1e-6)


@pytest.mark.parametrize("every", [1, 2])
def test_the_first_step_with_a_scale_counts_too(every):
    model = net()
    optimizer, by_hand = OPTIMIZERS["SGD"](model.parameters()), ByHand(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with measure(model, optimizer=optimizer, every=every, **ALL) as stats:
        for step in range(4):
            scaled_step(model, optimizer, scaler, by_hand if step % every == 0 else None)
    by_hand.check(stats)


@pytest.mark.parametrize("unscale", [False, True])
def test_a_step_that_the_scaler_skips_is_none(unscale):
    model = net()
    optimizer, by_hand = OPTIMIZERS["AdamW"](model.parameters()), ByHand(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with measure(model, optimizer=optimizer, **ALL) as stats:
        scaled_step(model, optimizer, scaler, None, unscale)
        stats.reset()
        for number in range(6):
            if number in (1, 2, 5):
                scaled_step(model, optimizer, scaler, None, unscale, broken=True)
            else:
                scaled_step(model, optimizer, scaler, by_hand, unscale)
    assert scaler.get_scale() == 1024 / 8 and stats.step == 4
    by_hand.check(stats)
    assert stats["0.weight", "param_grad"].count == 24 * 3
    assert sum(stats[place].nonfinite for place in stats if place[1] in PORTS) == 0


def test_a_step_that_a_fused_optimizer_skips_changes_nothing():
    model = net()
    optimizer = OPTIMIZERS["AdamW, fused"](model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with measure(model, optimizer=optimizer, **ALL) as stats:
        scaled_step(model, optimizer, scaler)
        stats.reset()
        scaled_step(model, optimizer, scaler, broken=True)
    update = stats["0.weight", "update"]  # it was called, for it decides itself
    assert update.count == 24 and update.max == update.min == stats["0.weight", "update_ratio"].max == 0


def test_a_scaler_that_is_off():
    model = net()
    optimizer, by_hand = OPTIMIZERS["SGD"](model.parameters()), ByHand(model)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    with measure(model, optimizer=optimizer, **ALL) as stats:
        for _ in range(3):
            scaled_step(model, optimizer, scaler, by_hand)
    by_hand.check(stats)


def test_half_precision_with_autocast_and_a_scale():
    model = net()
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**15)
    with measure(model, optimizer=optimizer, **ALL) as stats:
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = model(torch.randn(8, 4)).float().square().mean()
            scaler.scale(loss).backward()
            grad = model[0].weight.grad / scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            last = stats.snapshot()
            stats.reset()
    check_moments(last["0.weight", "param_grad"], grad)
    check_moments(last["0.weight", "step_grad"], grad)


@pytest.mark.parametrize("odd", [torch.nan, torch.inf])
def test_the_norm_of_a_gradient_that_is_not_finite_is_not_that_of_its_finite_part(odd):
    model = net()
    optimizer = OPTIMIZERS["SGD"](model.parameters())
    with measure(model, optimizer=optimizer, **ALL) as stats:
        (model(torch.randn(8, 4)).sum() * odd).backward()
        optimizer.step()
    for port in ("param_grad_norm", "step_grad_norm"):
        summary = stats["0.weight", port]
        assert (summary.count, summary.nonfinite) == (1, 1)


# --- which parameters


def test_an_optimizer_that_has_only_some_of_the_parameters():
    model = net()
    optimizer = torch.optim.SGD(model[2].parameters(), 0.1)
    with measure(model, optimizer=optimizer, **ALL) as stats:
        for _ in range(2):
            optimizer.zero_grad()
            model.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
    places = set(stats)
    for path in ("0.weight", "0.bias"):
        assert {port for known, port in places if known == path} == {"param", "param_grad", "param_grad_norm"}
    for path in ("2.weight", "2.bias"):
        assert {port for known, port in places if known == path} == {*PORTS, *NORMS}
    with pytest.raises(NotRecordedError, match="update of '0.weight'"):
        stats["0.weight", "update"]


def test_only_what_queries_select():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with measure(model, "2", optimizer=optimizer, **ALL) as stats:
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
    assert {path for path, _ in stats} == {"2", "2.weight", "2.bias"}


def test_frozen_parameters_and_those_that_nobody_used():
    model = net()
    model.add_module("unused", nn.Linear(2, 2))
    model.forward = lambda x: model[2](model[1](model[0](x)))
    model[0].weight.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with measure(model, "0", "2", "unused", outputs=False, optimizer=optimizer, on_silent="ignore", **ALL) as stats:
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
    for path in ("0.weight", "unused.weight"):
        assert {port for known, port in stats if known == path} == {"param", "update", *NORMS[::3], "update_ratio"}
        assert stats[path, "update"].max == stats[path, "update"].min == stats[path, "update_ratio"].max == 0
    assert stats["0.bias", "update"].l2 > 0


def test_two_groups_of_parameters():
    model = net()
    groups = [{"params": model[0].parameters(), "lr": 0.0}, {"params": model[2].parameters(), "lr": 0.1}]
    optimizer, by_hand = torch.optim.SGD(groups), ByHand(model)
    with measure(model, optimizer=optimizer, **ALL) as stats:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            for port in ("param", "param_grad", "step_grad"):
                by_hand.before(port)
            optimizer.step()
            by_hand.after()
    by_hand.check(stats)
    assert stats["0.weight", "update_ratio"].max == 0 < stats["2.weight", "update_ratio"].min


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(9, 4)
        self.head = nn.Linear(4, 9, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        return self.head(self.embedding(ids))


@pytest.mark.parametrize("with_optimizer", [False, True])
def test_tied_weights_are_one_parameter_with_two_names(with_optimizer):
    model = Tied()
    optimizer, by_hand = torch.optim.AdamW(model.parameters(), 0.1), ByHand(model)
    options = {"optimizer": optimizer, "updates": True} if with_optimizer else {}
    with measure(model, params=True, param_grads=True, **options) as stats:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randint(9, (4, 5))).square().mean().backward()
            for port in ("param", "param_grad", "step_grad"):
                by_hand.before(port)
            optimizer.step()
            by_hand.after()
    ports = (*PORTS, *NORMS) if with_optimizer else ("param", "param_grad")
    assert {place for place in stats if place[0].endswith("weight")} == {("embedding.weight", port) for port in ports}
    by_hand.check(stats, ports)
    for port in ports:
        assert stats["head.weight", port].mean == stats["embedding.weight", port].mean


def test_a_parameter_of_zeros_has_no_ratio():
    model = nn.Sequential(nn.Linear(4, 3))
    nn.init.zeros_(model[0].bias)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with measure(model, optimizer=optimizer, updates=True) as stats:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
    ratio = stats["0.bias", "update_ratio"]
    assert ratio.count == 3 and ratio.nonfinite == 1 and ratio["moments"].posinf == 1 and ratio.mean > 0
    assert stats["0.weight", "update_ratio"].nonfinite == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_parameters_of_other_dtypes(dtype):
    model = net().to(dtype)
    optimizer, by_hand = torch.optim.SGD(model.parameters(), 0.125), ByHand(model)
    with measure(model, optimizer=optimizer, **ALL) as stats:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(8, 4, dtype=dtype)).square().mean().backward()
            for port in ("param", "param_grad", "step_grad"):
                by_hand.before(port)
            optimizer.step()
            by_hand.after()
    by_hand.check(stats)


def test_notes_say_which_gradient_it_is():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with measure(model, optimizer=optimizer, **ALL) as stats:
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
    notes = {port: stats["0.weight", port].note for port in PORTS}
    assert len(set(notes.values())) == 5 and all(notes.values())
    assert "before clipping" in notes["param_grad"] and "after clipping" in notes["step_grad"]
    assert "before the step" in notes["param"] and "norm" in notes["update_ratio"] and "change" in notes["update"]
    assert "returned" in stats["0"].note
    with measure(model, param_grads=True) as stats:
        model(torch.randn(8, 4)).square().mean().backward()
    assert "before clipping" not in stats["0.weight", "param_grad"].note


# --- loops of other kinds


def test_a_step_with_a_closure():
    """As Lightning steps: forward and backward happen inside of the step."""
    model = net()
    optimizer, by_hand = torch.optim.SGD(model.parameters(), 0.1), ByHand(model)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.randn(8, 4)).square().mean()
        loss.backward()
        by_hand.before("param_grad")
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        by_hand.before("step_grad")
        return loss

    with measure(model, optimizer=optimizer, **ALL) as stats:
        for _ in range(4):
            by_hand.before("param")
            optimizer.step(closure)
            by_hand.after()
    by_hand.check(stats)


def test_every_second_step_with_a_closure():
    model = net()
    optimizer, by_hand = torch.optim.SGD(model.parameters(), 0.1), ByHand(model)

    def closure(step):
        optimizer.zero_grad()
        loss = model((step + 1) * torch.randn(8, 4)).square().mean()
        loss.backward()
        if step % 2 == 0:
            by_hand.before("step_grad")
        return loss

    with measure(model, param_grads=True, optimizer=optimizer, every=2) as stats:
        for step in range(5):
            optimizer.step(lambda step=step: closure(step))
    assert stats["0"].count == 48 * 3
    by_hand.check(stats, ("step_grad",))


def test_gradients_that_were_thrown_away_are_not_counted():
    """Of a backward that no step followed, nothing is left in the next one."""
    model = nn.ModuleDict({"a": nn.Linear(4, 1), "b": nn.Linear(4, 1)})
    model.forward = lambda x, which: model[which](x)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with measure(model, outputs=False, param_grads=True, optimizer=optimizer) as stats:
        model(torch.ones(2, 4), "a").sum().backward()
        optimizer.zero_grad()
        model(torch.ones(2, 4), "b").sum().backward()
        optimizer.step()
    assert stats["b.weight", "param_grad"].count == stats["b.weight", "step_grad"].count == 4
    assert ("a.weight", "step_grad") not in stats
    assert ("a.weight", "param_grad") not in stats


def test_a_step_keeps_nothing_of_its_callers_alive():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with measure(model, optimizer=optimizer, **ALL):
        for _ in range(2):
            y = model(torch.randn(8, 4))
            y.sum().backward()
            optimizer.step()
            gone = weakref.ref(y)
            del y
            gc.collect()
            assert gone() is None


def test_a_wrapped_optimizer():
    class Wrapper:
        def __init__(self, optimizer):
            self.optimizer = optimizer

        def step(self):
            self.optimizer.step()

    model = net()
    inner = torch.optim.SGD(model.parameters(), 0.1)
    by_hand, outer = ByHand(model), Wrapper(Wrapper(inner))
    with measure(model, optimizer=outer, **ALL) as stats:
        model(torch.randn(8, 4)).square().mean().backward()
        for port in ("param", "param_grad", "step_grad"):
            by_hand.before(port)
        outer.step()
        by_hand.after()
    by_hand.check(stats)
    assert not inner._optimizer_step_pre_hooks and not inner._optimizer_step_post_hooks


def test_a_scheduler_and_a_loaded_state_change_nothing():
    model = net()
    optimizer, by_hand = torch.optim.AdamW(model.parameters(), 0.1), ByHand(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    with measure(model, optimizer=optimizer, **ALL) as stats:
        for step in range(3):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            for port in ("param", "param_grad", "step_grad"):
                by_hand.before(port)
            optimizer.step()
            by_hand.after()
            scheduler.step()
            if step == 1:
                optimizer.load_state_dict(optimizer.state_dict())
    by_hand.check(stats)


# --- what is refused


@pytest.mark.parametrize("options", [{"updates": True}, {"params": True}, {"param_grads": True}])
def test_an_optimizer_of_another_model_is_refused(options):
    model, other = net(), net()
    foreign = torch.optim.SGD(other.parameters(), 0.1)
    with pytest.raises(ValueError, match="holds none of the parameters"):
        measure(model, optimizer=foreign, **options).open()
    assert not foreign._optimizer_step_pre_hooks


def test_what_is_no_optimizer_is_refused():
    model = net()
    for thing in (3, "adam", torch.optim.SGD, model, list(model.parameters())):
        with pytest.raises(TypeError, match="must be a torch.optim.Optimizer"):
            measure(model, updates=True, optimizer=thing)
    with pytest.raises(ValueError, match="pass it as optimizer="):
        measure(model, updates=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(ValueError, match="nothing that '1' selects has parameters"):
        measure(model, "1", updates=True, optimizer=optimizer).open()
    with pytest.raises(ValueError, match="holds none"):
        measure(net(), updates=True, optimizer=optimizer).open()
