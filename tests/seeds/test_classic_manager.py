"""C01–C08: the classic `HookManager` and its helpers."""

import gc
import re
import warnings

import pytest
import torch
from torch import nn

import torchhook
from specimens import hooks_of, resnet18
from torchhook import HookManager

QUICK_START_OUTPUT = """\
Conv1 feature shape: torch.Size([1, 64, 112, 112])
Layer 4.1 ReLU feature shape: torch.Size([1, 512, 7, 7])
Model: ResNet | Total Parameters: 11.69 M
Registered Hooks: 3 (max_size=1)
--------------------------------------------------------------------------------
Captured Features Summary:
Layer Key                     Feature Count       Feature Shape
--------------------------------------------------------------------------------
conv1                         1                   (1, 64, 112, 112)
layer4.1.relu                 1                   (1, 512, 7, 7)
fully_connected               1                   (1, 1000)
--------------------------------------------------------------------------------
"""


def quick_start():
    """The documented quick start of the classic library, line by line."""
    import torch
    import torchvision.models as models

    from torchhook import HookManager

    model = models.resnet18()
    model.eval()
    hook_manager = HookManager(model, max_size=1)
    hook_manager.register_forward_hook(layer_name="conv1")
    hook_manager.add(layer_name="layer4.1.relu")
    target_layer = model.fc
    hook_manager.add(layer_name="fully_connected", layer=target_layer)
    dummy_input = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        model(dummy_input)
    features_conv1 = hook_manager.get_features("conv1")
    features_relu = hook_manager.get_features("layer4.1.relu")
    assert hook_manager.get_all().keys() == {"conv1", "layer4.1.relu", "fully_connected"}
    print(f"Conv1 feature shape: {features_conv1[0].shape}")
    print(f"Layer 4.1 ReLU feature shape: {features_relu[0].shape}")
    hook_manager.summary()
    hook_manager.clear_hooks()
    return model


def small():
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU(inplace=True), nn.Linear(3, 2))


def test_c01_manager_keeps_the_newest_values_per_key():
    model = small()
    manager = HookManager(model, max_size=2)
    manager.add("0")
    manager.add("2")
    inputs = [torch.randn(1, 4) for _ in range(3)]
    expected = [model[0](x).detach() for x in inputs]
    manager.clear_features()
    for x in inputs:
        model(x)
    assert len(manager.get("0")) == len(manager.get("2")) == 2
    assert all(torch.equal(a, b) for a, b in zip(manager.get("0"), expected[1:], strict=True))


@pytest.mark.parametrize("size", [-1, 0])
def test_c01_minus_one_is_unlimited(size):
    manager = HookManager(model := small(), max_size=size)
    manager.add("0")
    for _ in range(5):
        model(torch.ones(1, 4))
    assert len(manager.get("0")) == 5


def test_c02_register_by_name_by_layer_with_and_without_key():
    model = small()
    manager = HookManager(model)
    assert manager.register_forward_hook("0") is manager.hooks["0"]
    manager.add(layer=model[1])
    manager.add(layer=model[2], layer_name="head")
    assert manager.get_keys() == ["0", "ReLU_0", "head"]
    manager.remove("ReLU_0")
    manager.add(layer=model[0])
    manager.add(layer=model[2])
    manager.remove("Linear_0")
    manager.add(layer=model[0])  # 0.2.7 counts the keys and collides here
    assert manager.get_keys() == ["0", "head", "Linear_1", "Linear_0"]
    handle = manager.hooks["head"]
    handle.remove()
    handle.remove()
    model(torch.ones(1, 4))
    assert manager.get("head") == []


def test_c03_read_back_one_key_all_and_keys():
    model = small()
    manager = HookManager(model)
    manager.add("0")
    live = manager.get("0")
    assert live == []
    y = model[0](torch.ones(1, 4))
    assert live is manager.get_features("0") is manager.get_all()["0"]
    assert torch.equal(live[0], y)
    assert manager.get_keys() == ["0"]


def test_c04_custom_hook_decides_what_is_stored():
    model = small()
    manager = HookManager(model)
    seen = []

    def custom(module, inputs, output):
        seen.append((module, inputs))
        return output[output > 0].mean().reshape(1) if len(seen) > 1 else None

    manager.add("1", custom_hook=custom)
    x = torch.randn(8, 4)
    model(x)
    assert manager.get("1") == []
    model(x)
    assert seen[0][0] is model[1] and isinstance(seen[0][1], tuple)
    hidden = nn.functional.linear(x, model[0].weight, model[0].bias)
    torch.testing.assert_close(manager.get("1")[0], hidden[hidden > 0].mean().reshape(1))


def test_c04_custom_hook_that_returns_no_tensor_is_told():
    manager = HookManager(model := small())
    manager.add("0", custom_hook=lambda module, inputs, output: "text")
    with pytest.warns(UserWarning, match="custom_hook returned a str"):
        model(torch.ones(1, 4))
    assert manager.get("0") == []


def test_c05_output_transform_before_storing():
    model = small()
    manager = HookManager(model)
    manager.add("2", output_transform=lambda output: torch.softmax(output, dim=-1).detach().cpu())
    y = model(torch.ones(1, 4))
    assert torch.equal(manager.get("2")[0], torch.softmax(y, -1))


def test_c05_a_transform_cannot_change_the_model():
    model = small()
    plain = model(torch.ones(1, 4))
    manager = HookManager(model)
    manager.add("0", output_transform=lambda output: output.detach().zero_())
    assert torch.equal(model(torch.ones(1, 4)), plain)
    assert not manager.get("0")[0].any()


def test_c06_the_quick_start_prints_its_table(capsys):
    model = quick_start()
    printed = re.sub(r" +$", "", capsys.readouterr().out, flags=re.M)
    assert printed == QUICK_START_OUTPUT
    assert hooks_of(model) == hooks_of(resnet18())


def test_c06_summary_before_and_between(capsys):
    model = small()
    manager = HookManager(model)
    manager.summary()
    assert "No hooks have been registered." in capsys.readouterr().out
    manager.add("0")
    manager.add("2")
    assert "2 hooks registered (0, 2), but no features have been captured yet." in str(manager)
    model[0](torch.ones(1, 4))
    assert "Hooks Registered but Not Triggered Yet:\n- 2" in str(manager)


def test_c07_clean_up_one_all_and_features_only():
    model = small()
    before = hooks_of(small())
    manager = HookManager(model)
    manager.add("0")
    manager.add("1")
    model(torch.ones(1, 4))
    manager.clear_features()
    assert manager.get_all() == {"0": [], "1": []}
    manager.remove("0")
    assert not model[0]._forward_hooks and len(model[1]._forward_hooks) == 1
    manager.clear_hooks()
    assert manager.get_keys() == [] and manager.get_all() == {}
    assert not any(module._forward_hooks for module in model.modules())
    del manager
    gc.collect()
    assert hooks_of(model) == before


def test_c07_hooks_go_with_the_manager_while_the_model_lives():
    model = small()
    before = hooks_of(model)
    manager = HookManager(model)
    manager.add("0")
    assert hooks_of(model) != before
    del manager
    assert hooks_of(model) == before


def test_c07_features_survive_in_place_ops():
    model = resnet18().eval()
    manager = HookManager(model, max_size=1)
    manager.add("bn1")
    x = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        model(x)
        assert torch.equal(manager.get("bn1")[0], model.bn1(model.conv1(x)))


def test_c08_helpers(capsys):
    model = resnet18()
    model.fc.requires_grad_(False)
    count = sum(p.numel() for p in model.parameters())
    assert torchhook.count_parameters(model) == count == 11_689_512
    assert torchhook.count_parameters(model, trainable_only=True) == count - 513_000
    assert torchhook.format_parameter_count(count) == "11.69 M"
    assert torchhook.format_parameter_count(999) == "999.00 "
    own = {path: [p for p in layer._parameters.values() if p is not None] for path, layer in model.named_modules()}
    counts = {path: sum(p.numel() for p in some) for path, some in own.items() if path}
    trainable = {path: sum(p.numel() for p in some if p.requires_grad) for path, some in own.items() if path}
    assert torchhook.get_layerwise_parameter_count(model) == counts and counts["conv1"] == 9408
    assert torchhook.get_layerwise_parameter_count(model, trainable_only=True) == trainable != counts
    shallow = {path: number for path, number in counts.items() if path.count(".") < 2}
    assert torchhook.get_layerwise_parameter_count(model, max_depth=1) == shallow
    torchhook.model_summary(model, max_depth=1)
    printed = capsys.readouterr().out.splitlines()
    totals = ["Total Parameters: 11.69 M", "Trainable Parameters: 11.18 M", "Non-trainable Parameters: 513.00 K"]
    assert printed[1] == "Model Summary: ResNet" and printed[3:6] == totals
    rows = {line[:40].strip(): (line[41:61], line[62:]) for line in printed[9:-1]}
    assert list(rows) == list(shallow)
    for path, texts in rows.items():
        assert [in_units(text) for text in texts] == pytest.approx([counts[path], trainable[path]], rel=0.005), path


def in_units(text):
    """A count such as 513.00 K as a number."""
    number, _, unit = text.strip().partition(" ")
    return float(number) * {"": 1, "K": 1e3, "M": 1e6}[unit]


def test_bad_arguments_name_themselves_and_leave_nothing():
    model = small()
    before = hooks_of(model)
    for wrong in (True, 1.5, "2"):
        with pytest.raises(TypeError, match="max_size"):
            HookManager(model, max_size=wrong)
    with pytest.raises(ValueError, match="max_size"):
        HookManager(model, max_size=-2)
    with pytest.raises(TypeError, match="model"):
        HookManager("model")
    manager = HookManager(model)
    with pytest.raises(ValueError, match="'conv9' not found in the model; nearest"):
        manager.add("conv9")
    with pytest.raises(ValueError, match="layer_name or layer"):
        manager.add()
    with pytest.raises(ValueError, match="not part of the model"):
        manager.add(layer=nn.ReLU())
    with pytest.raises(TypeError, match="custom_hook"):
        manager.add("0", custom_hook=3)
    with pytest.raises(TypeError, match="layer_name"):
        manager.add(0)
    with pytest.raises(ValueError, match="no hook registered with key 'x'"):
        manager.get("x")
    with pytest.raises(TypeError, match="key"):
        manager.remove(3)
    manager.add("0")
    with pytest.raises(ValueError, match="'0' already exists"):
        manager.add("0")
    del manager
    assert hooks_of(model) == before


def test_a_layer_under_two_names_and_two_keys_on_a_layer():
    layer = nn.Linear(4, 4)
    model = nn.Sequential(layer, nn.Sequential(layer))
    manager = HookManager(model)
    manager.add("1.0")
    manager.add("again", layer=layer)
    model(torch.ones(1, 4))
    assert len(manager.get("1.0")) == len(manager.get("again")) == 2
    manager.remove("again")
    model(torch.ones(1, 4))
    assert len(manager.get("1.0")) == 4


def test_an_error_in_a_custom_hook_goes_to_the_caller_and_the_hooks_stay():
    model = small()
    manager = HookManager(model)
    manager.add("0")
    manager.add("1", custom_hook=lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(torch.ones(1, 4))
    manager.remove("1")
    model(torch.ones(1, 4))
    assert len(manager.get("0")) == 2


def test_sequences_store_their_first_element_and_others_nothing():
    model = nn.Sequential(nn.LSTM(4, 3))
    manager = HookManager(model)
    manager.add("0")
    with pytest.warns(UserWarning, match="first element"):
        output, _ = model(torch.ones(2, 4))
    assert torch.equal(manager.get("0")[0], output)


def test_attaching_does_not_walk_the_model_for_every_layer(monkeypatch):
    model = nn.Sequential(*[nn.ReLU() for _ in range(200)])
    manager = HookManager(model)
    monkeypatch.setattr(nn.Module, "named_modules", None)
    monkeypatch.setattr("torchhook.core.session.walk", None)
    for number in range(200):
        manager.add(str(number))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.ones(1))
    assert [len(features) for features in manager.get_all().values()] == [1] * 200
