"""Class activation maps: identities that hold whatever the weights, where they may be asked for, and what is left."""

import copy

import pytest
import torch
from torch import nn

from specimens import hooks_of
from torchhook import SelectionError, SilentError
from torchhook.explain.cams import eigen_cam, grad_cam, grad_cam_pp, hires_cam, layer_cam, x_grad_cam
from torchhook.explain.mask_cams import ablation_cam, score_cam

pytestmark = pytest.mark.usefixtures("one_thread")
BY_GRADIENT = [grad_cam, hires_cam, layer_cam, x_grad_cam, grad_cam_pp]
ALL = [*BY_GRADIENT, eigen_cam]


class Net(nn.Module):
    """A convolutional net, in place or not, that averages its maps or does not."""

    def __init__(self, inplace=True, pooled=True):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(8)
        self.relu1 = nn.ReLU(inplace)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(8)
        self.relu2 = nn.ReLU(inplace)
        self.drop = nn.Dropout(0.5)
        self.pool = nn.AdaptiveAvgPool2d(1) if pooled else nn.Identity()
        self.fc = nn.Linear(8 if pooled else 8 * 6 * 10, 5)
        for norm in (self.norm1, self.norm2):
            nn.init.normal_(norm.running_mean)
            nn.init.normal_(norm.bias)

    def forward(self, x):
        x = self.relu1(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(x))
        if self.relu1.inplace:
            y += x
        else:
            y = y + x
        return self.fc(self.pool(self.drop(self.relu2(y))).flatten(1))


@pytest.fixture
def x():
    return torch.randn(4, 3, 6, 10)


def state_of(model):
    return {
        "hooks": hooks_of(model),
        "modes": [module.training for module in model.modules()],
        "buffers": [buffer.clone() for buffer in model.buffers()],
        "grads": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        "needs": [p.requires_grad for p in model.parameters()],
        "weights": [p.detach().clone() for p in model.parameters()],
    }


def assert_same_state(before, after):
    for name in ("hooks", "modes", "needs"):
        assert before[name] == after[name], name
    for name in ("buffers", "grads", "weights"):
        for a, b in zip(before[name], after[name], strict=True):
            assert (a is None and b is None) or torch.equal(a, b), name


# identities


@pytest.mark.parametrize("pooled", [True, False])
def test_hires_cam_sums_up_to_the_score_where_all_that_follows_is_linear(x, pooled):
    model = Net(pooled=pooled).eval()
    heat = hires_cam(model, x, [0, 1, 2, 3], "drop")
    scores = model(x)[range(4), range(4)] - model.fc.bias[:4]
    assert torch.allclose(heat.maps.sum((1, 2)), scores, atol=1e-5)


def test_where_maps_are_averaged_several_methods_are_one(x):
    """The gradient is the same at every place, and is the weight of the head: the first CAM (Zhou 2016)."""
    model = Net().eval()
    maps = hires_cam(model, x, 3, "relu2").maps
    assert torch.allclose(grad_cam(model, x, 3, "relu2").maps, maps, atol=1e-6)
    assert torch.allclose(x_grad_cam(model, x, 3, "relu2").maps, maps, atol=1e-5)
    known = hidden(model, x)
    by_hand = torch.einsum("c,nchw->nhw", model.fc.weight[3], known) / 60
    assert torch.allclose(maps, by_hand, atol=1e-6)
    positive = torch.einsum("c,nchw->nhw", model.fc.weight[3].relu(), known) / 60
    assert torch.allclose(layer_cam(model, x, 3, "relu2").maps, positive, atol=1e-6)


def hidden(model, x):
    with torch.no_grad():
        y = model.relu1(model.norm1(model.conv1(x)))
        return torch.relu(model.norm2(model.conv2(y)) + y)


@pytest.mark.parametrize("method", ALL)
@pytest.mark.parametrize("layer", ["conv1", "norm1", "relu1", "norm2", "relu2", None])
def test_ops_in_place_change_nothing(method, layer, x):
    plain = Net(inplace=False, pooled=False).eval()
    overwriting = Net(pooled=False).eval()
    overwriting.load_state_dict(plain.state_dict())
    expected, found = method(plain, x, 2, layer), method(overwriting, x, 2, layer)
    assert torch.equal(found.maps, expected.maps) and found.layer == expected.layer


@pytest.mark.parametrize("method", ALL)
def test_a_batch_is_its_samples_one_by_one(method, x):
    model = Net(pooled=False).eval()
    whole = method(model, x, sites="relu1")
    for number, one in enumerate(whole):
        alone = method(model, x[number : number + 1], sites="relu1")
        assert torch.allclose(one.maps, alone.maps, atol=1e-6) and one.target == alone.target


def test_the_gradient_is_that_of_the_whole_graph(x):
    """By hand, with a graph from the input on: for grad_cam, the formula."""
    model = Net(inplace=False, pooled=False).eval()
    kept = []
    handle = model.norm1.register_forward_hook(lambda module, args, output: kept.append(output))
    scores = model(x)
    handle.remove()
    (gradient,) = torch.autograd.grad(scores[:, 2].sum(), kept[0])
    expected = (gradient.mean((2, 3), keepdim=True) * kept[0]).sum(1)
    assert torch.allclose(grad_cam(model, x, 2, "norm1").maps, expected, atol=1e-6)


@pytest.mark.parametrize("size", [(6, 10), (2, 2)])  # more places than channels, and fewer
def test_eigen_cam_is_the_first_principal_component_with_a_sign(x, size):
    model = nn.Sequential(nn.Conv2d(3, 9, 3), nn.AdaptiveAvgPool2d(size), nn.Flatten()).eval()
    maps = eigen_cam(model, x, sites="1").maps
    assert maps.shape[1:] == size
    for found, values in zip(maps.double().flatten(1), model[:2](x).detach().double().flatten(2), strict=True):
        centred = values - values.mean(1, keepdim=True)
        component = torch.linalg.svd(centred).U[:, 0] @ centred
        assert torch.allclose(found.abs(), component.abs(), atol=1e-5)
        assert torch.corrcoef(torch.stack([found, values.abs().mean(0)]))[0, 1] > 0


def test_eigen_cam_tells_components_apart_that_are_nearly_as_strong():
    places = torch.arange(16) * 2 * torch.pi / 16
    values = torch.linalg.qr(torch.randn(9, 2)).Q @ torch.stack([1.0002 * places.sin(), places.cos()])
    model = nn.Sequential(nn.Identity(), nn.Flatten())
    found = eigen_cam(model, values.view(1, 9, 4, 4), sites="0").maps.flatten()
    exact = values.double() - values.double().mean(1, keepdim=True)
    component = torch.linalg.svd(exact).U[:, 0] @ exact
    assert torch.allclose(found.double().abs(), component.abs(), atol=1e-6)


@pytest.mark.parametrize("channels", [9, 40])
def test_a_sample_that_has_no_component_leaves_the_others_alone(channels):
    values = torch.randn(5, channels, 4, 4)
    values[1] = 3.0
    values[2] = torch.nan
    values[3] = torch.eye(16)[:channels].repeat(-(-channels // 16), 1)[:channels].view(channels, 4, 4)  # all as strong
    model = nn.Sequential(nn.Identity(), nn.Flatten())
    maps = eigen_cam(model, values, sites="0").maps
    for sample in (0, 4):
        assert torch.allclose(maps[sample], eigen_cam(model, values[sample : sample + 1], sites="0").maps[0])
    assert not maps[1].any() and maps[2].isnan().all() and maps[3].norm() > 0.9


def test_eigen_cam_scales_with_the_values():
    values = torch.randn(2, 9, 4, 4, dtype=torch.float64)
    model = nn.Sequential(nn.Identity(), nn.Flatten())
    maps = eigen_cam(model, values, sites="0").maps
    for scale in (1e-30, 1e30):
        assert torch.allclose(eigen_cam(model, scale * values, sites="0").maps / scale, maps)


def test_eigen_cam_has_the_same_sign_for_the_same_picture(x):
    model = Net().eval()
    one = eigen_cam(model, x, sites="relu2").maps
    with torch.no_grad():  # its channels in another order are the same component
        order = torch.randperm(8)
        twin = copy.deepcopy(model)
        for name in ("conv1", "norm1", "norm2", "conv2"):
            for parameter in (*getattr(twin, name).parameters(), *getattr(twin, name).buffers()):
                if parameter.dim():
                    parameter.copy_(parameter[order])
        twin.conv2.weight.copy_(twin.conv2.weight[:, order])
    assert torch.allclose(eigen_cam(twin, x, sites="relu2").maps, one, atol=1e-5)


# where it may be asked for


@pytest.mark.parametrize("method", ALL)
def test_everything_is_as_before(method, x):
    model = Net(pooled=False)
    model.norm1.eval()  # its own, in a model in train mode
    model(x).sum().backward()
    model.conv1.weight.requires_grad_(False)
    x.requires_grad_()
    given, generator = x.detach().clone(), torch.get_rng_state()
    before = state_of(model)
    for layer in ("relu1", None):
        heat = method(model, x, sites=layer)
    assert_same_state(before, state_of(model))
    assert x.grad is None and torch.equal(x, given) and torch.equal(torch.get_rng_state(), generator)
    assert not heat.maps.requires_grad and torch.is_grad_enabled()
    model.eval()
    assert torch.equal(method(model, x).maps, heat.maps)  # whatever the mode was


@pytest.mark.parametrize("layer", ["relu1", None])
def test_a_model_that_raises_is_left_as_it_was(layer, x):
    model = Net()
    before = state_of(model)
    model.drop.forward = lambda x: 1 / 0
    with pytest.raises(ZeroDivisionError) as caught:
        grad_cam(model, x, 2, layer)
    del model.drop.forward
    assert_same_state(before, state_of(model))
    assert caught.tb is not None  # which keeps all alive that was under way: nothing was only collected
    with pytest.raises(ValueError, match="out of range"):
        grad_cam(model, x, 99, layer)
    assert_same_state(before, state_of(model))
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


@pytest.mark.parametrize("layer", ["norm1", None])
@pytest.mark.parametrize("method", BY_GRADIENT)
def test_frozen_parameters_and_no_autograd_around(method, layer, x):
    model = Net(pooled=False).eval()
    expected = method(model, x, 2, layer).maps
    with torch.no_grad():
        assert torch.equal(method(model, x, 2, layer).maps, expected)
        assert not torch.is_grad_enabled()
    with torch.inference_mode():
        inference = x.clone()
        assert torch.equal(method(model, inference, 2, layer).maps, expected)
        assert torch.is_inference_mode_enabled()
    assert torch.equal(method(model, inference, 2, layer).maps, expected)
    model.requires_grad_(False)
    assert torch.equal(method(model, x, 2, layer).maps, expected)


def test_a_layer_in_a_part_that_runs_without_autograd(x):
    class Frozen(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = Net(pooled=False)
            self.head = nn.Linear(5, 3)

        def forward(self, x):
            with torch.no_grad():
                features = self.body(x)
            return self.head(features)

    model = Frozen().eval()
    found = grad_cam(model, x, 2, "body.relu1").maps
    model.forward = lambda x: model.head(model.body(x))
    assert torch.equal(found, grad_cam(model, x, 2, "body.relu1").maps) and found.abs().max() > 0


def test_a_checkpoint_computes_again_what_was_seen(x):
    from torch.utils.checkpoint import checkpoint

    class Saving(Net):
        def forward(self, x):
            x = checkpoint(lambda x: self.relu1(self.norm1(self.conv1(x))), x, use_reentrant=False)
            x = checkpoint(lambda x: self.relu2(self.norm2(self.conv2(x)) + x), x, use_reentrant=False)
            return self.fc(x.flatten(1))

    model = Saving(pooled=False).eval()
    for layer in ("norm1", "relu1", "norm2", "relu2", None):
        found = grad_cam(model, x, 2, layer)
        expected = grad_cam(_out_of_place(model), x, 2, found.layer)
        assert torch.allclose(found.maps, expected.maps, atol=1e-6), layer


def _out_of_place(model):
    plain = Net(inplace=False, pooled=False).eval()
    plain.load_state_dict(model.state_dict())
    return plain


def test_a_model_that_overwrites_its_input(x):
    class Careless(Net):
        def forward(self, x):
            x -= 0.5
            return super().forward(x)

    model = Careless().eval()
    given = x.clone()
    grad_cam(model, x)
    assert torch.equal(x, given)
    assert torch.equal(grad_cam(model, x, sites="relu1").maps, grad_cam(_like(model), x - 0.5, sites="relu1").maps)


def _like(model):
    twin = Net().eval()
    twin.load_state_dict(model.state_dict())
    return twin


def test_compiled_models_run_eagerly_for_the_time(x, nothing_compiled):
    model = Net(pooled=False).eval()
    expected = grad_cam(model, x, 2, "relu1").maps
    whole = torch.compile(copy.deepcopy(model), backend="eager", fullgraph=True)
    said = whole(x)
    part = copy.deepcopy(model)
    part.conv2 = torch.compile(part.conv2, backend="eager", fullgraph=True)
    own = copy.deepcopy(model)
    own.compile(backend="eager", fullgraph=True)
    for compiled in (whole, part, own):
        compiled(x)
        assert torch.allclose(grad_cam(compiled, x, 2, "relu1").maps, expected, atol=1e-6)
        assert grad_cam(compiled, x, 2).layer == grad_cam(model, x, 2).layer == "pool"
        assert torch.allclose(compiled(x), said, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_precisions(dtype, x):
    model = Net(pooled=False).eval()
    expected = grad_cam(model, x, 2, "relu1").maps
    found = grad_cam(model.to(dtype), x.to(dtype), 2, "relu1").maps
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.allclose(found.float(), expected, atol=1e-6 if dtype == torch.float64 else 0.02 * expected.abs().max())
    assert eigen_cam(model, x.to(dtype), sites="relu1").maps.dtype == found.dtype


# which layer, which call, which input


def test_the_last_layer_in_order_of_execution():
    class Backwards(nn.Module):
        """Registered in another order than called, with a branch that nobody reads."""

        def __init__(self):
            super().__init__()
            self.head = nn.Linear(4, 3)
            self.late = nn.Conv2d(4, 4, 3)
            self.early = nn.Conv2d(3, 4, 3)
            self.unread = nn.Conv2d(4, 4, 3)

        def forward(self, x):
            x = self.late(self.early(x))
            self.unread(x)
            return self.head(x.mean((2, 3)))

    heat = grad_cam(Backwards(), torch.randn(2, 3, 9, 9))
    assert heat.layer == "late" and heat.maps.shape == (2, 5, 5)
    assert eigen_cam(Backwards(), torch.randn(2, 3, 9, 9)).layer == "late"


@pytest.mark.parametrize("is_pooled", [True, False])
def test_a_convolution_that_never_runs_is_not_the_layer(is_pooled, x):
    class Optional(nn.Module):
        """Has, as SAM, convolutions that cut patches of a mask if one is given."""

        def __init__(self):
            super().__init__()
            self.cut, self.never, self.act = nn.Conv2d(3, 8, 2, 2), nn.Conv2d(8, 8, 2, 2), nn.ReLU()

        def forward(self, image, mask=None):
            maps = self.act(self.cut(image))
            maps = maps if mask is None else maps + self.never(mask)
            return maps.mean((2, 3)) if is_pooled else maps[:, :, 1, 2]

    for method in (*ALL, score_cam, ablation_cam):
        heat = method(Optional(), x, 1)
        assert heat.layer == "act" and heat.maps.shape == (4, 3, 5)


def test_sam_without_a_mask():
    from transformers import SamConfig, SamMaskDecoderConfig, SamModel, SamPromptEncoderConfig, SamVisionConfig

    sizes = {"image_size": 64, "patch_size": 8}
    vision = SamVisionConfig(
        **sizes, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, mlp_dim=64, output_channels=16,
        num_pos_feats=8, window_size=4, global_attn_indexes=[1],
    )  # fmt: skip
    decoder = SamMaskDecoderConfig(
        hidden_size=16, mlp_dim=32, num_attention_heads=2, iou_head_hidden_dim=16, iou_head_depth=2
    )
    prompts = SamPromptEncoderConfig(**sizes, hidden_size=16, mask_input_channels=4)
    model = SamModel(SamConfig(vision_config=vision, prompt_encoder_config=prompts, mask_decoder_config=decoder)).eval()
    given = {"pixel_values": torch.randn(1, 3, 64, 64), "input_points": torch.tensor([[[[20.0, 20.0]]]])}
    heat = grad_cam(model, given, lambda out: out.pred_masks[:, 0, 0].mean((1, 2)))
    assert heat.layer == "mask_decoder.activation" and heat.maps.count_nonzero()
    with pytest.raises(SilentError, match="layer 'prompt_encoder.mask_embed.conv1' has no output to explain"):
        grad_cam(model, given, lambda out: out.pred_masks[:, 0, 0].mean((1, 2)), "prompt_encoder.mask_embed.conv1")


@pytest.mark.parametrize(
    ("name", "size", "layer"),
    [
        ("alexnet", 224, "features.11"),
        ("alexnet", 127, "features.11"),  # the pooling at the end returns maps that are nearly as large: 6×6 of 7×7
        ("alexnet", 111, "features.11"),  # and here as large
        ("vgg11", 64, "features.19"),
        ("vgg11_bn", 64, "features.27"),
        ("squeezenet1_1", 64, "classifier.2"),
        ("resnet18", 64, "layer4"),
        ("mobilenet_v3_small", 64, "features"),  # with poolings beside its path, which scale the channels
        ("swin_t", 64, "permute"),  # poolings without a convolution behind them, in the middle
    ],
)
def test_the_layer_of_a_known_net_is_that_before_its_last_pooling(name, size, layer):
    import torchvision

    torch.manual_seed(0)
    model = getattr(torchvision.models, name)(num_classes=4).eval()
    assert grad_cam(model, torch.randn(1, 3, size, size)).layer == layer


def test_a_pooling_at_the_end_is_left_out_where_there_is_no_score(x):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout()).eval()
    assert eigen_cam(model, x).layer == "2"
    assert eigen_cam(model[3:], x).layer == "4", "without weights, the last one"


def test_a_gradient_of_zero_is_said(x):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.ReLU())
    x[1], x[3] = -x[1].abs(), x[3].abs()
    with torch.no_grad():
        model[0].weight.abs_()
        model[0].bias.zero_()
    for method in BY_GRADIENT:
        said = (
            f"{method.__name__}: the gradient of the target is zero in the whole output of layer '0' for sample 1 of 4"
        )
        with pytest.warns(UserWarning, match=said):
            heat = method(model, x, 1, "0")
        assert not heat.maps[1].count_nonzero() and heat.maps[3].count_nonzero()


def test_a_tensor_that_is_only_passed_through_does_not_count():
    class Passing(nn.Module):
        """Gives its input first, which nobody reads any more."""

        def forward(self, x):
            return x, x.amax((2, 3))

    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.passing, self.fc = nn.Conv2d(3, 4, 3), Passing(), nn.Linear(4, 3)

        def forward(self, x):
            return self.fc(self.passing(self.conv(x))[1])

    assert grad_cam(Around(), torch.randn(2, 3, 9, 9)).layer == "conv"


def test_heads_and_tokens_are_no_maps():
    class Queries(nn.Module):
        def forward(self, tokens):
            return tokens.unflatten(2, (2, 6)).transpose(1, 2)  # samples × heads × tokens × features

    class Mixing(nn.Module):
        """Computes with heads outside of anything that is called an attention."""

        def __init__(self):
            super().__init__()
            self.cut, self.norm = nn.Conv2d(3, 12, 4, 4), nn.LayerNorm(12)
            self.queries, self.fc = Queries(), nn.Linear(12, 3)

        def forward(self, x):
            tokens = self.norm(self.cut(x).flatten(2).mT)
            return self.fc(self.queries(tokens).mean(2).flatten(1))

    heat = grad_cam(Mixing(), torch.randn(2, 3, 16, 24))
    assert heat.layer == "norm" and heat.maps.shape == (2, 4, 6)


class Head(nn.Module):
    """An attention that is not called so, with its weights in the output of a module."""

    def __init__(self):
        super().__init__()
        self.qkv, self.soft = nn.Linear(12, 36), nn.Softmax(-1)

    def forward(self, tokens):
        q, k, v = (part.unflatten(2, (2, 6)).transpose(1, 2) for part in self.qkv(tokens).chunk(3, 2))
        return (self.soft(q @ k.mT) @ v).transpose(1, 2).flatten(2)


class Reading(nn.Module):
    """Reads its class token alone, after one attention."""

    def __init__(self):
        super().__init__()
        self.cut, self.norm, self.head, self.fc = nn.Conv2d(3, 12, 4, 4), nn.LayerNorm(12), Head(), nn.Linear(12, 3)

    def forward(self, x):
        tokens = self.cut(x).flatten(2).mT
        tokens = torch.cat([tokens.mean(1, keepdim=True), tokens], 1)
        return self.fc(self.head(self.norm(tokens))[:, 0])


def test_the_weights_of_an_attention_are_no_maps():
    heat = grad_cam(Reading(), torch.randn(2, 3, 16, 16))
    assert heat.layer == "norm" and heat.maps.shape == (2, 4, 4)
    timm = pytest.importorskip("timm")
    heat = grad_cam(timm.create_model("convit_tiny"), torch.randn(1, 3, 224, 224))
    assert heat.layer == "blocks.11.norm1" and heat.maps.shape == (1, 14, 14)


def test_maps_as_high_and_wide_as_there_are_tokens():
    class Growing(nn.Module):
        def __init__(self):
            super().__init__()
            self.cut, self.norm = nn.Conv2d(3, 12, 4, 4), nn.LayerNorm(12)
            self.grow, self.last = nn.Upsample(scale_factor=4), nn.Conv2d(12, 2, 1)

        def forward(self, x):
            tokens = self.norm(self.cut(x).flatten(2).mT)  # 16 of them
            return self.last(self.grow(tokens.mT.unflatten(2, (4, 4))))

    assert grad_cam(Growing(), torch.randn(2, 3, 16, 16), lambda out: out[:, 0].mean((1, 2))).layer == "last"


def test_weights_that_are_computed_are_no_maps(x):
    class Weighing(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(1, 4, 6, 10))
            nn.utils.parametrize.register_parametrization(self, "weight", nn.Softplus())

        def forward(self, maps):
            return (maps * self.weight).sum((2, 3))

    assert grad_cam(nn.Sequential(nn.Conv2d(3, 4, 1), Weighing()), x).layer == "0"


def test_one_backward_finds_the_layer(x, monkeypatch):
    model, asked, plain = Net(), [], torch.autograd.grad
    nn.init.zeros_(model.fc.weight)
    monkeypatch.setattr(torch.autograd, "grad", lambda *args, **kwargs: asked.append(1) or plain(*args, **kwargs))
    with pytest.warns(UserWarning, match="the gradient of the target is zero"):
        grad_cam(model, x)
    assert len(asked) == 2  # one in the trial, one for the map


def test_a_head_of_zeros_still_has_a_layer(x):
    model = Net()
    nn.init.zeros_(model.fc.weight)
    with pytest.warns(UserWarning, match="in the whole output of layer 'drop' for sample 0, 1, 2, 3 of 4"):
        heat = grad_cam(model, x)
    assert heat.layer == "drop" and heat.maps.count_nonzero() == 0


class Again(nn.Module):
    """One convolution, called three times."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.fc = nn.Linear(3, 4)

    def forward(self, x):
        for _ in range(3):
            x = torch.relu_(self.conv(x))
        return self.fc(x.mean((2, 3)))


def test_there_is_no_graph_before_the_layer():
    model, x, seen = Again(), torch.randn(2, 3, 6, 6), []
    plain = model.conv.forward
    model.conv.forward = lambda x: seen.append((len(x), torch.is_grad_enabled())) or plain(x)
    grad_cam(model, x, 1, "conv", call=0)
    assert seen == [(2, False), (2, True), (2, True)]  # one pass, in which autograd is on after the layer
    seen.clear()
    grad_cam(model, x, 1, "conv", call=-1)
    assert seen == [(1, False)] * 3 + [(2, False)] * 3  # one sample, to count the calls
    seen.clear()
    eigen_cam(model, x, 1, "conv", call=0)
    assert seen == [(2, False)] * 3


def test_every_call_of_a_layer_that_a_checkpoint_computes_again():
    from torch.utils.checkpoint import checkpoint

    class Saving(Again):
        def forward(self, x):
            for _ in range(3):
                x = checkpoint(lambda x: self.conv(x).sigmoid().square(), x, use_reentrant=False)
            return self.fc(x.mean((2, 3)))

    model, x = Saving().eval(), torch.randn(2, 3, 6, 6)
    found = [grad_cam(model, x, 1, "conv", call=call) for call in range(3)]
    assert grad_cam(model, x, 1).call == 2
    plain = nn.Sequential()
    for number in range(3):
        plain.add_module(f"conv{number}", model.conv)
        plain.add_module(f"after{number}", nn.Sequential(nn.Sigmoid(), Square()))
    plain.extend([nn.AdaptiveAvgPool2d(1), nn.Flatten(), model.fc])
    for call in range(3):
        expected = grad_cam(plain, x, 1, "conv0", call=call)
        assert torch.allclose(found[call].maps, expected.maps, atol=1e-7) and found[call].calls == 3


class Square(nn.Module):
    def forward(self, x):
        return x.square()


@pytest.mark.parametrize("method", ALL)
def test_every_call_of_a_layer_can_be_named(method):
    model, x = Again(), torch.randn(2, 3, 6, 6)
    nn.init.constant_(model.conv.bias, 0.3)
    unrolled = nn.Sequential()
    for number in range(3):
        unrolled.add_module(f"conv{number}", copy.deepcopy(model.conv))
        unrolled.add_module(f"relu{number}", nn.ReLU())
    unrolled.extend([nn.AdaptiveAvgPool2d(1), nn.Flatten(), model.fc])
    for call in range(3):
        expected = method(unrolled, x, 1, f"conv{call}").maps
        for name in (call, call - 3):
            heat = method(model, x, 1, "conv", call=name)
            assert torch.allclose(heat.maps, expected, atol=1e-6) and (heat.call, heat.calls) == (call, 3)
    assert (heat.call, method(model, x, 1).call) == (2, 2)
    with pytest.raises(ValueError, match="layer 'conv' is called 3 times in a pass, .* call=0 to call=2"):
        method(model, x, 1, "conv")
    for call in (3, -4):
        with pytest.raises(ValueError, match=f"layer 'conv' has no call {call}: it is called 3 times"):
            method(model, x, 1, "conv", call=call)


def test_a_layer_by_path_by_module_by_class(x):
    model = Net().eval()
    expected = grad_cam(model, x, sites="relu2").maps
    for layer in (model.relu2, "relu2", "rel*2"):
        heat = grad_cam(model, x, sites=layer)
        assert heat.layer == "relu2" and torch.equal(heat.maps, expected)
    with pytest.raises(SelectionError, match="sites must be one module, but .* selects 2: 'conv1', 'conv2'"):
        grad_cam(model, x, sites=nn.Conv2d)
    with pytest.raises(SelectionError, match="no module matches 'relu3'; nearest: 'relu"):
        grad_cam(model, x, sites="relu3")


def test_inputs_of_all_kinds(x):
    class Many(Net):
        def forward(self, image, scale, shift=0.0):
            return super().forward(image * scale[:, None, None, None] + shift)

    model = Many().eval()
    scale = torch.tensor([1.0, 2.0, 3.0, 4.0])
    expected = grad_cam(_like(model), x * scale[:, None, None, None]).maps
    assert torch.allclose(grad_cam(model, (x, scale)).maps, expected, atol=1e-6)
    for named in ({"image": x, "scale": scale, "shift": 0.0}, {"scale": scale, "image": x}):
        heat = grad_cam(model, named)
        assert torch.allclose(heat.maps, expected, atol=1e-6) and heat.size == (6, 10)


def test_segmentation_through_a_function(x):
    class Segmenting(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Conv2d(3, 8, 3, padding=1)
            self.head = nn.Conv2d(8, 4, 1)

        def forward(self, x):
            return {"out": self.head(self.body(x).relu())}

    model = Segmenting().eval()
    for method in BY_GRADIENT:
        with pytest.raises(ValueError, match="the model returned a dict, {out: .*target=lambda out: out\\['out'\\]"):
            method(model, x, 2)

    def area(out):
        return out["out"][:, 2].sum((1, 2))

    heat = hires_cam(model, x, area)
    assert heat.layer == "head" and heat.target == ["area"] * 4
    assert torch.allclose(heat.maps, model(x)["out"][:, 2], atol=1e-5)  # of the head's own output, it is the class
    before = hires_cam(model, x, area, "body").maps
    assert torch.allclose(before, heat.maps - model.head.bias[2], atol=1e-5)
    assert eigen_cam(model, x).layer == "head"  # which needs no target


def test_detection_through_a_function():
    """A list of images of a list of dicts, as torchvision's detectors have it."""

    class Detecting(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Conv2d(3, 8, 3, padding=1)
            self.head = nn.Linear(8, 2)

        def forward(self, images):
            scores = self.head(self.body(torch.stack(images)).relu().mean((2, 3)))
            return [{"scores": one} for one in scores]

    images = [torch.randn(3, 6, 8) for _ in range(3)]
    model = Detecting().eval()
    heat = grad_cam(model, (images,), lambda out: torch.stack([one["scores"][1] for one in out]))
    assert heat.layer == "body" and heat.maps.shape == (3, 6, 8) and heat.size == (6, 8)
    with pytest.raises(ValueError, match="a list, .*torch.stack"):
        grad_cam(model, (images,))


def test_layers_that_give_containers(x):
    class Giving(nn.Module):
        def __init__(self, made):
            super().__init__()
            self.body = nn.Conv2d(3, 8, 3, padding=1)
            self.made = made

        def forward(self, x):
            return self.made(self.body(x))

    class Around(nn.Module):
        def __init__(self, made, read):
            super().__init__()
            self.inner = Giving(made)
            self.fc = nn.Linear(8, 3)
            self.read = read

        def forward(self, x):
            return self.fc(self.read(self.inner(x)).relu().mean((2, 3)))

    for made, read in (
        (lambda y: (y, y.mean()), lambda v: v[0]),
        (lambda y: {"only": y}, lambda v: v["only"]),
        (lambda y: [y], lambda v: v[0]),
    ):
        model = Around(made, read).eval()
        expected = grad_cam(model, x, 1, "inner.body").maps
        assert torch.allclose(grad_cam(model, x, 1, "inner").maps, expected, atol=1e-6)
    several = Around(lambda y: {"a": y, "b": y}, lambda v: v["a"]).eval()
    with pytest.raises(ValueError, match="layer 'inner' returns a dict, {a: .*name a module inside it"):
        grad_cam(several, x, 1, "inner")
    assert grad_cam(several, x, 1).layer == "inner.body"
    nothing = Around(lambda y: [y, None, y], lambda v: v[0])
    with pytest.raises(ValueError, match="layer 'inner' returns a list"):
        grad_cam(nothing, x, 1, "inner")


def test_layers_without_extent_say_which_have_it(x):
    model = Net().eval()
    with pytest.raises(
        ValueError, match="layer 'fc' has no spatial extent: its output is 4×5 for 4 samples; name one that ha"
    ):
        grad_cam(model, x, sites="fc")
    with pytest.raises(
        ValueError, match="'pool' has no spatial extent: its output is 4×8×1×1 .* such as 'drop' or 'relu2'"
    ):
        grad_cam(model, x, sites="pool")
    squeezing = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Upsample(scale_factor=4), nn.Flatten())
    with pytest.raises(
        ValueError, match="layer '1' .*; name one that has, such as '0', or pass"
    ):  # not what comes after
        grad_cam(squeezing, x, 0, "1")
    words = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), nn.Flatten(), nn.Linear(28, 3))
    with pytest.raises(ValueError, match="no layer of the model has a spatial extent"):
        grad_cam(words, torch.zeros(2, 7, dtype=torch.long))
    with pytest.raises(
        ValueError, match="layer '1' has no spatial extent: its output is 2×7×4 for 2 samples; pass a function fold="
    ):
        grad_cam(words, torch.zeros(2, 7, dtype=torch.long), sites="1")
    line = grad_cam(words, torch.zeros(2, 7, dtype=torch.long), 0, "1", fold=lambda v: v.mT[:, :, None])
    assert line.maps.shape == (2, 1, 7) and line.size is None


def test_layers_that_the_target_does_not_depend_on():
    class Ending(nn.Module):
        def __init__(self):
            super().__init__()
            self.read, self.unread, self.never = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3)

        def forward(self, x):
            self.unread(x)
            return self.read(x).mean((2, 3))

    model, x = Ending(), torch.randn(1, 3, 8, 8)
    with pytest.raises(ValueError, match="the target does not depend on the output of layer 'unread'"):
        grad_cam(model, x, 0, "unread")
    for method in (grad_cam, eigen_cam, score_cam):
        for call in (None, 0, -1):
            with pytest.raises(
                SilentError, match="layer 'never' has no output to explain: .* leave sites= out"
            ) as raised:
                method(model, x, 0, "never", call=call)
            assert "on_silent" not in str(raised.value), "an argument that these functions do not have"
    assert hooks_of(model) == hooks_of(copy.deepcopy(model))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"call": 1}, ValueError, "call= applies to one layer: name it with sites="),
        ({"call": True, "sites": "relu1"}, TypeError, "call must be an integer or None, not True"),
        ({"call": 0.0, "sites": "relu1"}, TypeError, "call must be an integer"),
        ({"fold": torch.relu}, ValueError, "fold= applies to one layer: name it with sites="),
        ({"sites": 3}, SelectionError, "query 3 is a int"),
        ({"target": 5}, ValueError, "target 5 is out of range: the model has 5 classes, 0 to 4"),
    ],
)
def test_arguments_that_mean_nothing(options, error, message, x):
    for method in BY_GRADIENT:
        with pytest.raises(error, match=message):
            method(Net(), x, **options)


def test_what_is_no_model():
    with pytest.raises(TypeError, match="model must be a torch.nn.Module"):
        grad_cam(torch.relu, torch.ones(1, 3, 8, 8))
