"""C09–C14, C24, C26, C30–C32, C44–C46 and B01: one test per capability."""

import collections
import gc
import re
import threading
import time
import weakref

import pytest
import torch
from torch import nn

from specimens import hooks_of, resnet18
from torchhook import (
    FeatureExtractor,
    HookManager,
    ModelDiagnostics,
    Record,
    Ring,
    SelectionError,
    Session,
    Tap,
    TapError,
    capture,
    clip_gradients,
    detach,
    glob,
    hooks,
    mark,
    marked,
    of_type,
    overhead,
    regex,
    select,
    trace,
)


class TestForHook(nn.Module):
    """The net of seed 001: its forward returns what a hook should have seen."""

    __test__ = False

    def __init__(self):
        super().__init__()
        self.linear_1 = nn.Linear(2, 2)
        self.linear_2 = nn.Linear(2, 1)
        self.relu = nn.ReLU()
        self.relu6 = nn.ReLU6()
        for parameter in self.parameters():
            nn.init.ones_(parameter)

    def forward(self, x):
        linear_1 = self.linear_1(x)
        linear_2 = self.linear_2(linear_1)
        relu = self.relu(linear_2)
        return self.relu6(relu), (x, linear_1, linear_2), (linear_1, linear_2, relu)


def test_c09_inputs_and_outputs_of_children_in_execution_order_with_their_class():
    net = TestForHook()
    x = torch.full((2, 2), 0.1)
    with capture(net, ~of_type(nn.ReLU6), inputs=True) as acts:
        _, inputs, outputs = net(x)
    assert list(acts) == ["linear_1", "linear_2", "relu"]
    assert [acts[path].module_class for path in acts] == [nn.Linear, nn.Linear, nn.ReLU]
    for path, seen_in, seen_out in zip(acts, inputs, outputs, strict=True):
        assert torch.equal(acts[path].input, seen_in)
        assert torch.equal(acts[path].output, seen_out)
    assert acts["linear_1"].output.tolist() == [[pytest.approx(1.2)] * 2] * 2


def test_c10_gradients_of_intermediate_values_without_retain_grad():
    net = TestForHook()
    x = torch.rand(3, 2)
    with capture(net, grads=True) as acts:
        out, _, seen = net(x)
        for value in seen:
            value.retain_grad()
        out.sum().backward()
    for path, value in zip(["linear_1", "linear_2", "relu"], seen, strict=True):
        assert torch.equal(acts[path].grad, value.grad)


def test_c11_one_layer_of_a_large_net_by_its_name():
    from torchvision.models import vgg16

    net = vgg16().eval()
    x = torch.randn(1, 3, 32, 32)
    with torch.no_grad(), capture(net, "features.0", stop=True) as acts:
        assert net(x) is None
        expected = net.features[0](x)
    assert acts["features.0"].outputs[0].shape == (1, 64, 32, 32)
    assert torch.equal(acts["features.0"].outputs[0], expected)


def test_c12_a_hook_object_over_a_whole_loader_with_unwrapped_inputs():
    net = nn.Sequential(nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(inplace=True)), nn.Flatten(), nn.Linear(72, 2))
    loader = torch.utils.data.DataLoader(torch.randn(10, 1, 8, 8), batch_size=4)

    class Hook:
        def __init__(self):
            self.classes, self.inputs, self.outputs = [], [], []

        def __call__(self, event):
            self.classes.append(type(event.module))
            (self.inputs if event.port == "input" else self.outputs).append(event.value)

    hook = Hook()
    with (
        Session(net, [Tap("0", hook, port="input"), Tap("0", hook)]),
        capture(net, "0", inputs=True, keep=None) as acts,
    ):
        batches = list(loader)
        for images in batches:
            net(images)
    assert set(hook.classes) == {nn.Sequential}
    assert [tuple(value.shape) for value in hook.outputs] == [(4, 2, 6, 6), (4, 2, 6, 6), (2, 2, 6, 6)]
    for one, other, third in zip(hook.inputs, acts["0"].inputs, batches, strict=True):
        assert torch.equal(one, other) and torch.equal(one, third)
    for one, other in zip(hook.outputs, acts["0"].outputs, strict=True):
        assert torch.equal(one, other)


class Kept:
    """A hook object as one writes it for torch: keeps what it is called with."""

    def __init__(self):
        self.calls = []

    def __call__(self, module, *values):
        self.calls.append((module, *values))


class Forward(Kept):
    def __call__(self, module, inputs, output):
        super().__call__(module, inputs, output)


class Before(Kept):
    def __call__(self, module, inputs):
        super().__call__(module, inputs)


class BeforeWithKeywords(Kept):
    def __call__(self, module, args, kwargs):
        super().__call__(module, args, kwargs)


def test_c12_hooks_of_ones_own_are_called_as_torch_calls_them():
    net = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    registrations = {
        "output": (Forward, nn.Module.register_forward_hook),
        "input": (Before, nn.Module.register_forward_pre_hook),
        "grad_output": (Before, nn.Module.register_full_backward_pre_hook),
        "grad_input": (Forward, nn.Module.register_full_backward_hook),
    }
    ours, torchs, taps = {}, {}, []
    for path in ("0", "1", "2"):
        for port, (kind, register) in registrations.items():
            ours[path, port], torchs[path, port] = kind(), kind()
            taps.append(Tap(path, ours[path, port], port=port))
            register(net.get_submodule(path), torchs[path, port])
    with_keywords = BeforeWithKeywords()
    with Session(net, [*taps, Tap("", with_keywords, port="input")]):
        for _ in range(2):
            net(input=torch.randn(5, 4)).square().sum().backward()
    for place, hook in ours.items():
        assert len(hook.calls) == len(torchs[place].calls) == 2, place
        for mine, expected in zip(hook.calls, torchs[place].calls, strict=True):
            torch.testing.assert_close(mine[1:], expected[1:], rtol=0, atol=0)
            assert mine[0] is expected[0]
            assert [type(value) for value in mine] == [type(value) for value in expected]
    assert [(args, list(kwargs)) for _, args, kwargs in with_keywords.calls] == [((), ["input"])] * 2


def test_c12_what_such_a_hook_keeps_is_what_flowed():
    net, hook = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)), Forward()
    x = torch.randn(8, 4)
    with Session(net, [Tap("0", hook)]):
        net(x)
    assert torch.equal(hook.calls[0][2], nn.functional.linear(x, net[0].weight, net[0].bias))


def test_c12_a_hook_that_returns_something_or_needs_something_else_is_told():
    net = nn.Sequential(nn.ReLU())
    with Session(net, [Tap("0", lambda module, inputs, output: output * 2)]), pytest.raises(TapError, match="an Edit"):
        net(torch.ones(2))
    with pytest.raises(TypeError, match=r"needs 2 .* hook\(module, inputs, output\); or pass port='input' or"):
        Tap("0", lambda module, inputs: None)
    with pytest.raises(TypeError, match=r"needs 4 arguments, .* hook\(event\)"):
        Tap("0", lambda a, b, c, d: None, port="param_grad")


def test_c12_every_gradient_of_several_tensors_comes_once():
    rnn, hook = nn.LSTM(3, 2), Before()
    with Session(rnn, [Tap("", hook, port="grad_output")]):
        output, (hidden, _) = rnn(torch.randn(4, 1, 3))
        (output.sum() + 3 * hidden.sum()).backward()
    assert sorted(tuple(g is not None for g in grads) for _, grads in hook.calls) == [
        (False, True, False),
        (True, False, False),
    ]
    by_place = {place: g for _, grads in hook.calls for place, g in enumerate(grads) if g is not None}
    assert torch.equal(by_place[1], torch.full((1, 1, 2), 3.0))


def test_c13_every_kind_of_torch_hook_through_one_interface():
    class Net(nn.Sequential):
        def forward(self, x):
            return mark(super().forward(x), "end")

    net = Net(nn.Linear(4, 3), nn.Linear(3, 2))
    ring = Ring(max_passes=1)
    ports = ("input", "output", "grad_input", "grad_output", "param", "param_grad")
    taps = [Tap("1", Record(ring), port=port) for port in ports]
    taps += [Tap(marked("end"), Record(ring)), Tap(marked("end"), Record(ring), port="grad_output")]
    seen = {}

    def backward(module, grad_input, grad_output):
        seen["grad_input"], seen["grad_output"] = grad_input[0], grad_output[0]

    net[1].register_forward_hook(lambda module, args, out: seen.update(input=args[0].detach(), output=out.detach()))
    net[1].register_full_backward_hook(backward)
    with Session(net, taps):
        (net(torch.randn(5, 4)) ** 2).sum().backward()
    for port in ("input", "output", "grad_input", "grad_output"):
        assert torch.equal(ring["1", port][0], seen[port]), port
    assert torch.equal(ring["1.weight", "param"][0], net[1].weight)
    assert torch.equal(ring["1.bias", "param_grad"][0], net[1].bias.grad)
    assert torch.equal(ring[":end"][0], seen["output"])
    assert torch.equal(ring[":end", "grad_output"][0], seen["grad_output"])


def test_c14_registration_in_bulk_by_type_glob_regex_and_predicate():
    net = resnet18()
    convolutions = {path for path, module in net.named_modules() if isinstance(module, nn.Conv2d)}
    assert select(net, nn.Conv2d).keys() == convolutions
    assert list(select(net, "layer1.*")) == ["layer1.0", "layer1.1"]
    assert list(select(net, "layer[12].0.conv?")) == [f"layer{i}.0.conv{j}" for i in (1, 2) for j in (1, 2)]
    assert select(net, "**.conv1").keys() == {path for path in convolutions if path.endswith("conv1")}
    assert list(select(net, re.compile(r"^layer4\.1\.bn\d$"))) == ["layer4.1.bn1", "layer4.1.bn2"]
    assert list(select(net, lambda path, module: getattr(module, "stride", 0) == (2, 2) and "down" in path)) == [
        f"layer{i}.0.downsample.0" for i in (2, 3, 4)
    ]
    assert list(select(net, of_type(nn.Conv2d) & glob("layer1.**") & ~regex("conv2$"))) == [
        "layer1.0.conv1",
        "layer1.1.conv1",
    ]


def test_c24_handles_are_managed_by_the_context():
    net = resnet18()
    before = hooks_of(net)
    with capture(net, nn.Conv2d):
        assert sum(len(module._forward_hooks) for module in net.modules()) == 20
        net(torch.ones(2, 3, 32, 32))
    assert hooks_of(net) == before
    acts = capture(net, nn.Conv2d, on_silent="ignore").open()
    acts.close()
    acts.close()
    assert hooks_of(net) == before


def test_c26_four_threads_on_one_model_see_their_own_passes():
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4))
    wrong = []

    def work(number):
        torch.set_grad_enabled(False)
        x = torch.full((1, 4), float(number))
        with capture(net) as acts:
            expected = {"0": net[0](x), "1": net[0](x).relu_(), "2": net(x)}
            for _ in range(1000):
                net(x)
                for path, value in expected.items():
                    outputs = acts[path].outputs
                    if len(outputs) != 1 or not torch.equal(outputs[0], value):
                        wrong.append((number, path, len(outputs)))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_c26_and_b08_a_manager_sees_every_thread_and_tells_of_hooks_that_never_fired():
    class Branch(nn.Sequential):
        def forward(self, x):
            return self[0](x)

    net = Branch(nn.Linear(4, 3), nn.Linear(4, 3))
    manager, x = HookManager(net), torch.randn(2, 4)
    manager.add("0")
    manager.add("1")
    assert manager.get("1") == []  # nothing ran yet, so nothing was missed
    thread = threading.Thread(target=lambda: net(x))
    thread.start()
    thread.join()
    assert torch.equal(manager.get("0")[0], net[0](x))
    for read in (lambda: manager.get("1"), manager.get_all, manager.summary):
        with pytest.warns(UserWarning, match="nothing was seen at the output of '1': it is in a branch"):
            read()


def test_c30_order_is_that_of_execution_and_the_same_every_time():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.late, self.early = nn.Linear(4, 4), nn.Linear(4, 4)
            self.relu = nn.ReLU()

        def forward(self, x):
            return self.relu(self.late(self.relu(self.early(x))))

    net = Net()
    expected = [("early", 0), ("relu", 0), ("late", 0), ("relu", 1)]
    for _ in range(3):
        with capture(net) as acts:
            net(torch.ones(1, 4))
        assert acts.order == expected
        assert list(acts) == ["early", "relu", "late"]


def test_c31_nothing_leaks():
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with capture(net, grads=True) as acts:
        net(torch.ones(1, 4)).sum().backward()
    value = weakref.ref(acts["0"].output)
    del acts
    gc.collect()
    assert value() is None
    assert hooks_of(net) == hooks_of(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))


class Sleeps(nn.Module):
    """A forward that takes 20 milliseconds: a sleep is never shorter than asked for."""

    def forward(self, x):
        time.sleep(0.02)
        return x


def test_c32_what_hooks_cost_on_this_model():
    def slowly(value):
        time.sleep(0.03)
        return value

    net = nn.Sequential(Sleeps(), nn.Linear(4, 4))
    cost = overhead(net, torch.ones(2, 4), "1", runs=5, transform=slowly)
    assert 20 <= cost.plain < 45, "milliseconds: the forward sleeps for 20"
    assert 50 <= cost.hooked < 95, "and the hook for another 30"
    assert cost.ratio == cost.hooked / cost.plain and cost.runs == 5
    assert repr(cost) == f"plain {cost.plain:.3f} ms, hooked {cost.hooked:.3f} ms: {cost.ratio:.2f}× (median of 5)"
    cheap = overhead(net, torch.ones(2, 4), "1", runs=5)
    assert 20 <= cheap.plain < 45 and 20 <= cheap.hooked < 45, "a capture alone takes far less than a millisecond"
    assert hooks_of(net) == hooks_of(nn.Sequential(Sleeps(), nn.Linear(4, 4)))


def test_c44_groups_are_listed_and_removed_by_name():
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def foreign(module, args, output):
        return None

    net[0].register_forward_hook(foreign)
    diagnostic = capture(net, "0", group="diagnostic").open()
    monitoring = capture(net, nn.ReLU, grads=True, group="monitoring").open()
    listed = hooks(net)
    assert [(info.path, info.port, info.group) for info in listed] == [
        ("0", "output", None),
        ("0", "output", "diagnostic"),
        ("1", "output", "monitoring"),
        ("1", "grad_output", "monitoring"),
    ]
    assert listed[0].owner.endswith("foreign") and listed[1].owner == "torchhook.Record"
    with pytest.raises(SelectionError, match="group 'monitor'; the groups there are: 'diagnostic', 'monitoring'"):
        detach(net, group="monitor")
    assert detach(net, group="monitoring") == 2
    net(torch.ones(1, 4))
    assert len(diagnostic) == 1 and len(monitoring) == 0
    assert detach(net) == 1
    assert [info.owner for info in hooks(net)] == [listed[0].owner]


def test_c44_groups_of_managers_diagnostics_and_clipping():
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    manager = HookManager(net, group="analysis")
    manager.add("0")
    manager.add("1", group="monitoring")
    diagnostics = ModelDiagnostics(net, group="diagnostic")
    clip = clip_gradients(net, "2", norm=1e-3, group="training")
    assert collections.Counter(info.group for info in hooks(net)) == {
        "analysis": 1,
        "monitoring": 1,
        "diagnostic": 6,  # outputs and gradients of three layers
        "training": 2,  # the weight and the bias
    }
    clipping = [info for info in hooks(net) if info.group == "training"]
    assert [(info.path, info.port, info.owner) for info in clipping] == [
        ("2.weight", "param_grad", "torchhook.Clip"),
        ("2.bias", "param_grad", "torchhook.Clip"),
    ]
    for group in ("analysis", "diagnostic", "training"):
        count = sum(info.group == group for info in hooks(net))
        assert detach(net, group=group) == count
        with pytest.raises(SelectionError, match=f"{group!r}; the groups there are: .*'monitoring'"):
            detach(net, group=group)
    net(torch.ones(1, 4)).sum().backward()
    assert net[2].weight.grad.norm() > 1e-3 and clip.clipped == 0
    assert len(manager.get("1")) == 1 and not manager.features["0"]
    assert not diagnostics.features
    assert detach(net) == 1 and hooks(net) == []
    with pytest.raises(SelectionError, match="the groups there are: none"):
        detach(net, group="monitoring")


def test_c45_verbose_execution_a_line_a_layer(capsys):
    net = resnet18()
    with trace(net, lambda path, module: "." not in path) as calls:
        net(torch.ones(2, 3, 64, 64))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == [name for name, _ in net.named_children()]
    assert re.fullmatch(r"conv1: Conv2d +2×3×64×64 → 2×64×32×32  float32  [\d.]+ ms", lines[0])
    assert [call.output for call in calls.calls][-2:] == ["2×512×1×1", "2×1000"]
    assert all(call.milliseconds > 0 for call in calls.calls)
    assert "milliseconds" in repr(calls).splitlines()[0]
    slow = nn.Sequential(Slow())
    with trace(slow) as calls:
        began = time.perf_counter()
        slow(torch.ones(1))
        most = (time.perf_counter() - began) * 1e3
    assert 50 <= calls.calls[0].milliseconds <= most


class Slow(nn.Module):
    def forward(self, x):
        time.sleep(0.05)
        return x


def test_c46_feature_extractor_returns_a_dict():
    net, x = resnet18().eval(), torch.randn(2, 3, 64, 64)
    extractor = FeatureExtractor(net, ["layer4", "avgpool"])
    features = extractor(x)
    layer4 = nn.Sequential(*list(net.children())[:-2])(x)  # the parts of a ResNet, one after the other
    assert list(features) == ["layer4", "avgpool"] and features["layer4"].shape == (2, 512, 2, 2)
    torch.testing.assert_close(features["layer4"], layer4)
    torch.testing.assert_close(features["avgpool"], layer4.mean((2, 3), keepdim=True))
    features["layer4"].sum().backward()
    assert net.conv1.weight.grad is not None and net.fc.weight.grad is None
    assert len(extractor.state_dict()) == len(net.state_dict())


def test_b01_correct_under_in_place_ops_at_the_price_of_a_reference():
    net = resnet18().eval()
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad(), capture(net) as acts:
        net(x)
        conv1 = net.conv1(x)
        bn1 = net.bn1(conv1)
    for path, value in (("conv1", conv1), ("bn1", bn1), ("relu", bn1.relu())):
        assert torch.equal(acts[path].output, value), path
    # the cost of a reference: a value that is not overwritten shares its memory with the original
    big = nn.Sequential(nn.Identity(), nn.Identity())
    x = torch.randn(1000, 1000)
    with capture(big, "0") as acts:
        big(x)
    assert torch._C._is_cow_tensor(acts["0"].output) and torch._C._is_cow_tensor(x)
