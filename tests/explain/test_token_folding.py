"""Tokens back to maps: every patch where it was in the image, whichever library the model is of."""

import pytest
import torch
from torch import nn

from torchhook.core.model_state import inference
from torchhook.core.trees import Arguments
from torchhook.explain.cams import grad_cam, hires_cam
from torchhook.explain.layer_choice import choose_layer
from torchhook.explain.layer_values import reach_layer
from torchhook.explain.token_grid import ImageLayout, checked_fold, fold_for

pytestmark = pytest.mark.usefixtures("one_thread")


def shape_folded(shape, size=(64, 64), module=None, samples=2, grids=()):
    value = torch.zeros(shape)
    fold = fold_for(value, module or nn.Identity(), ImageLayout(samples, size, grids))
    return None if fold is None else tuple(fold(value).shape)


@pytest.mark.parametrize(
    ("shape", "options", "folded"),
    [
        ((2, 5, 8, 8), {}, (2, 5, 8, 8)),
        ((2, 8, 8, 5), {}, (2, 5, 8, 8)),  # Swin has its channels last
        ((2, 8, 8, 8), {}, (2, 8, 8, 8)),
        ((2, 8, 8, 8), {"module": nn.LayerNorm(8)}, (2, 8, 8, 8)),
        ((2, 6, 6, 9), {"module": nn.LayerNorm(9), "size": None}, (2, 9, 6, 6)),
        ((2, 5, 9, 6), {"size": None}, (2, 5, 9, 6)),
        ((2, 5, 4, 6), {"size": (64, 96)}, (2, 5, 4, 6)),
        ((2, 4, 6, 5), {"size": (64, 96)}, (2, 5, 4, 6)),
        ((2, 5, 1, 1), {}, None),
        ((2, 64, 7), {}, (2, 7, 8, 8)),
        ((2, 65, 7), {}, (2, 7, 8, 8)),
        ((2, 66, 7), {}, (2, 7, 8, 8)),
        ((2, 69, 7), {}, (2, 7, 8, 8)),  # a class token and four registers
        *(((2, 64 + more, 7), {}, (2, 7, 8, 8)) for more in (3, 4, 8, 9, 16)),  # registers
        *(((2, 64 + more, 7), {"grids": ((8, 8),)}, (2, 7, 8, 8)) for more in (0, 1, 2, 3, 4, 5, 8, 9, 16, 17)),
        ((2, 70, 7), {}, None),
        ((2, 20, 7), {}, None),  # 16 patches and 4 registers, or 4 and 16
        *(((2, 64 + more, 7), {"grids": ((8, 8),)}, None) for more in (6, 7, 11, 101)),  # of which some may come last
        ((2, 101, 7), {"grids": ((8, 8),)}, None),  # a class token and 36 more after the patches, not 10×10
        ((2, 16, 7), {"grids": ((2, 2),)}, (2, 7, 4, 4)),  # to which SegFormer reduces its keys
        ((2, 4, 7), {"grids": ((1, 1),)}, (2, 7, 2, 2)),
        ((2, 16, 7), {"grids": ((4, 4), (2, 2))}, (2, 7, 4, 4)),
        ((2, 25, 7), {"grids": ((4, 4),)}, (2, 7, 4, 4)),  # a class token and eight registers, not 5×5
        ((2, 17, 7), {"grids": ((8, 8),)}, (2, 7, 4, 4)),  # merged since, with a class token
        ((2, 16, 7), {"grids": ((8, 8),)}, (2, 7, 4, 4)),  # merged since
        ((2, 97, 7), {"size": (64, 96)}, (2, 7, 8, 12)),
        ((2, 96, 7), {"size": (96, 64)}, (2, 7, 12, 8)),
        ((2, 64, 7), {"size": None}, None),
        ((2, 64, 1), {}, None),  # averaged over the tokens
        ((2, 1, 7), {}, None),
        ((2, 7), {}, None),
        ((8, 16, 7), {}, None),  # windows, not samples
    ],
)
def test_shapes(shape, options, folded):
    assert shape_folded(shape, **options) == folded


def test_integers_are_no_maps():
    assert fold_for(torch.zeros(2, 3, 8, 8, dtype=torch.long), nn.Identity(), ImageLayout(2, (8, 8))) is None


def test_a_fold_of_ones_own_must_give_maps():
    fold = checked_fold(lambda value: value.view(2, 3, 2, 2), 2)
    assert fold(torch.zeros(2, 12)).shape == (2, 3, 2, 2)
    with pytest.raises(
        ValueError, match="must return 2 samples × channels × height × width, but turned 2×12 into 2×12"
    ):
        checked_fold(lambda value: value, 2)(torch.zeros(2, 12))
    with pytest.raises(ValueError, match="into None"):
        checked_fold(lambda value: None, None)(torch.zeros(2, 12))


def torchvision_vit():
    from torchvision.models import VisionTransformer

    model = VisionTransformer(64, 8, 2, 3, 48, 64, num_classes=5)
    nn.init.normal_(model.heads.head.weight)  # zeros by default
    return model, (64, 64)


def torchvision_swin():
    from torchvision.models.swin_transformer import SwinTransformer

    return SwinTransformer([4, 4], 24, [2, 2], [2, 4], [4, 4], num_classes=5), (64, 96)


def timm_vit(**options):
    from timm.models import VisionTransformer

    options = {"img_size": (64, 96), "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3, **options}
    return VisionTransformer(num_classes=5, **options), options["img_size"]


def timm_deit():
    from timm.models.deit import VisionTransformerDistilled

    return VisionTransformerDistilled(img_size=64, patch_size=8, embed_dim=48, depth=2, num_heads=3, num_classes=5), (
        64,
        64,
    )


def timm_swin():
    from timm.models import SwinTransformer

    return SwinTransformer(img_size=64, window_size=4, embed_dim=24, depths=(2, 2), num_heads=(2, 4), num_classes=5), (
        64,
        64,
    )


def hugging_face(kind, **options):
    import transformers

    config = getattr(transformers, f"{kind}Config")(num_labels=5, image_size=64, **options)
    return getattr(transformers, f"{kind}ForImageClassification")(config), (64, 64)


SMALL = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 64,
    "patch_size": 8,
}
SWIN = {"embed_dim": 24, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}

MODELS = {
    "torchvision ViT": (torchvision_vit, "encoder.layers.encoder_layer_1.ln_1", (8, 8)),
    "torchvision Swin": (torchvision_swin, "permute", (8, 12)),
    "timm ViT": (timm_vit, "blocks.1.norm1", (8, 12)),
    "timm ViT with registers": (lambda: timm_vit(reg_tokens=4), "blocks.1.norm1", (8, 12)),
    "timm ViT without a class token": (lambda: timm_vit(class_token=False, global_pool="avg"), "norm", (8, 12)),
    "timm distilled DeiT": (timm_deit, "blocks.1.norm1", (8, 8)),
    "timm Swin": (timm_swin, "norm", (8, 8)),
    "Hugging Face ViT": (lambda: hugging_face("ViT", **SMALL), "vit.layers.1.layernorm_before", (8, 8)),
    "Hugging Face DeiT": (lambda: hugging_face("DeiT", **SMALL), "deit.layers.1.layernorm_before", (8, 8)),
    "Hugging Face Swin": (lambda: hugging_face("Swin", **SWIN), "swin.layernorm", (8, 8)),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_layer_is_found_and_folded_by_itself(name):
    make, layer, grid = MODELS[name]
    model, size = make()
    heat = grad_cam(model.eval(), torch.randn(2, 3, *size))
    assert heat.layer.split(".")[-1] == layer.split(".")[-1] and heat.maps.shape[1:] == grid and heat.size == size
    assert heat.maps.abs().amax((1, 2)).min() > 0


def test_keys_that_are_reduced_are_no_grid_of_the_image():
    sizes = {"hidden_sizes": [8, 8, 8, 8], "num_attention_heads": [1, 1, 2, 2], "depths": [1, 1, 1, 1]}
    model, size = hugging_face("Segformer", decoder_hidden_size=8, **sizes)
    for stage, side in enumerate((16, 8, 4, 2)):
        layer = f"segformer.stages.{stage}.layer_norm"
        assert grad_cam(model.eval(), torch.randn(2, 3, *size), 0, layer).maps.shape == (2, side, side)


def test_tokens_after_the_patches_take_a_fold():
    from transformers import YolosConfig, YolosForObjectDetection

    config = YolosConfig(image_size=[64, 64], num_detection_tokens=10, **SMALL)
    model, x = YolosForObjectDetection(config).eval(), torch.randn(2, 3, 64, 64)
    (layer,) = (path for path, _ in model.named_modules() if path.endswith("1.layernorm_before"))

    def first(out):
        return out.logits[:, 0, 0]

    with pytest.raises(
        ValueError, match="no spatial extent: its output is 2×75×48 for 2 samples.* pass a function fold="
    ):
        grad_cam(model, x, first, layer)
    fold = lambda value: value[:, 1:65].mT.unflatten(2, (8, 8))  # noqa: E731
    assert grad_cam(model, x, first, layer, fold=fold).maps.shape == (2, 8, 8)


@pytest.mark.parametrize("name", ["torchvision ViT", "torchvision Swin", "timm ViT", "timm Swin", "Hugging Face Swin"])
def test_patches_lie_where_they_are_in_the_image(name):
    """What changes in an early layer when one part of the image changes is that part of the maps."""
    make, _, _ = MODELS[name]
    model, size = make()
    early = {
        "torchvision ViT": "encoder.dropout",
        "torchvision Swin": "features.0",
        "timm ViT": "norm_pre",
        "timm Swin": "patch_embed",
        "Hugging Face Swin": "swin.embeddings",
    }[name]
    x = torch.randn(1, 3, *size)
    changed = x.clone()
    changed[..., 40:48, 16:24] += 1.0
    with inference(model):
        layer = choose_layer(model, Arguments.of(x), None, early)
        before, after = (reach_layer(model, Arguments.of(image), layer, graph=False).maps for image in (x, changed))
    touched = (before - after).abs().sum(1)[0] > 1e-6
    patch = size[0] // touched.shape[0]
    expected = torch.zeros(size, dtype=torch.bool)
    expected[40:48, 16:24] = True
    assert torch.equal(touched, expected[::patch, ::patch])


def test_fold_says_it_for_other_layouts():
    class Sequence(nn.Module):
        """Tokens along the first dimension, as in DETR."""

        def __init__(self):
            super().__init__()
            self.cut = nn.Conv2d(3, 6, 4, 4)
            self.tokens = nn.Identity()
            self.head = nn.Linear(6, 5)

        def forward(self, x):
            return self.head(self.tokens(self.cut(x).flatten(2).permute(2, 0, 1)).mean(0))

    model, x = Sequence(), torch.randn(2, 3, 16, 24)
    with pytest.raises(ValueError, match="layer 'tokens' has no spatial extent: its output is 24×2×6 for 2 samples"):
        grad_cam(model, x, sites="tokens")
    heat = hires_cam(model, x, sites="tokens", fold=lambda value: value.permute(1, 2, 0).unflatten(2, (4, 6)))
    assert torch.allclose(heat.maps, hires_cam(model, x, sites="cut").maps, atol=1e-6)
    with pytest.raises(ValueError, match="fold= applies to one layer"):
        grad_cam(model, x, fold=lambda value: value)
