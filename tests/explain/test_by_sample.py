"""What of a model's arguments is by sample: also where something else is as long as the batch, by chance."""

import pytest
import torch
from torch import nn

from torchhook.core.trees import Arguments
from torchhook.explain.batched_arguments import BatchedArguments
from torchhook.explain.cams import grad_cam
from torchhook.explain.erasure import faithfulness
from torchhook.explain.mask_cams import ablation_cam, score_cam

pytestmark = pytest.mark.usefixtures("one_thread")
CAMS = pytest.mark.parametrize("method", [grad_cam, score_cam, ablation_cam])


class Matching(nn.Module):
    """How well each image fits each prompt, as CLIP says it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.words = nn.Conv2d(3, 6, 3), nn.Linear(5, 6)

    def forward(self, prompts, images):
        return self.conv(images).relu().mean((2, 3)) @ self.words(prompts).mT


class Scaling(nn.Module):
    """Channels by a scale, samples by a weight."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.fc = nn.Conv2d(3, 6, 3), nn.Linear(6, 4)

    def forward(self, image, scale, weight=None):
        said = self.fc(self.conv(image * scale[:, None, None]).relu().mean((2, 3)))
        return said if weight is None else said * weight[:, None]


def one_by_one(method, model, images, target, **others):
    """The maps of each sample, with all else as it is."""
    alone = [
        method(model, {**others, "image" if "scale" in others else "images": one[None]}, [int(which)], sites="conv")
        for one, which in zip(images, target, strict=True)
    ]
    return torch.cat([heat.maps for heat in alone])


@CAMS
@pytest.mark.parametrize("layer", [None, "conv"])
def test_as_many_prompts_as_images(method, layer):
    model, images, prompts = Matching(), torch.rand(2, 3, 8, 8), torch.randn(2, 5)
    options = {} if method is grad_cam else {"batch": 3}
    for target in ([1, 0], [0, 1], [1, 1]):
        heat = method(model, {"prompts": prompts, "images": images}, target, layer, **options)
        assert heat.layer == "conv" and heat.target == target and heat.size == (8, 8)
        torch.testing.assert_close(heat.maps, one_by_one(method, model, images, target, prompts=prompts))


def test_clip_with_as_many_prompts_as_images():
    from transformers import CLIPConfig, CLIPModel

    torch.manual_seed(0)
    size = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {**size, "vocab_size": 50, "max_position_embeddings": 16, "eos_token_id": 49}
    vision = {**size, "image_size": 32, "patch_size": 8}
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)).eval()
    ids = torch.randint(0, 49, (2, 6))  # from which 2×2 patches could be made, after a class and a distillation token
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": torch.rand(2, 3, 32, 32)}

    def second(out):
        return out.logits_per_image[:, 1]

    assert grad_cam(model, given, second).maps.shape == (2, 4, 4)
    for method in (score_cam, ablation_cam):
        heat = method(model, given, second, batch=3)
        assert heat.layer.startswith("vision_model.") and heat.size == (32, 32)
        for number, image in enumerate(given["pixel_values"]):
            alone = method(model, {**given, "pixel_values": image[None]}, second, heat.layer)
            torch.testing.assert_close(heat.maps[number], alone.maps[0], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("batch", [1, 3, 64])
def test_faithfulness_with_as_many_prompts_as_images(batch):
    model, images, prompts = Matching(), torch.rand(2, 3, 8, 8), 9 * torch.randn(2, 5)
    found = faithfulness(torch.rand(2, 4, 4), model, (prompts, images), [1, 0], steps=2, batch=batch)
    with torch.no_grad():
        plain = model(prompts, images).softmax(1)[[0, 1], [1, 0]]
    torch.testing.assert_close(found.deletion[:, 0], plain)
    torch.testing.assert_close(found.insertion[:, -1], plain)


@CAMS
def test_a_scale_for_each_of_three_channels_and_three_images(method):
    model, images, scale = Scaling(), torch.rand(3, 3, 8, 8), torch.tensor([1.0, 5.0, 0.2])
    heat = method(model, (images, scale), [1, 0, 2])
    torch.testing.assert_close(heat.maps, one_by_one(method, model, images, [1, 0, 2], scale=scale))
    weight = torch.tensor([1.0, 30.0, 3.0])  # one per sample, beside the scale, which is not
    heat = method(model, {"weight": weight, "scale": scale, "image": images}, 1)
    for number in range(3):
        given = {"weight": weight[number : number + 1], "scale": scale, "image": images[number : number + 1]}
        torch.testing.assert_close(heat.maps[number], method(model, given, 1).maps[0])


def test_samples_that_cannot_be_told_apart_are_told():
    class Together(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, image, order):
            return self.conv(image).mean((2, 3)) * torch.arange(1.0, len(image) + 1)[:, None] + order.sum()

    with pytest.raises(ValueError, match="cannot be run in another order or number.* arguments 1 are taken"):
        score_cam(Together(), (torch.rand(2, 3, 8, 8), torch.rand(2)), 0, "conv")


def test_a_trial_with_one_sample_that_fails_is_made_with_all():
    model, images = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Softplus()), torch.rand(2, 3, 8, 8)
    heat = grad_cam(model, images, lambda out: torch.stack([out[0, 1].sum(), out[1, 2].sum()]))
    assert heat.layer == "1" and heat.maps.abs().amax((1, 2)).min() > 0
    with pytest.raises(ValueError, match="returned a tensor 2×4×6×6, which has no classes"):
        grad_cam(model, images)


@CAMS
def test_images_wherever_they_are_in_an_argument(method):
    class Nested(nn.Module):
        def __init__(self, key):
            super().__init__()
            torch.manual_seed(0)
            self.key, self.conv = key, nn.Conv2d(3, 4, 3)

        def forward(self, batch):
            image = batch
            for key in self.key:
                image = image[key]
            return self.conv(image).relu().mean((2, 3))

    images, ids = torch.rand(2, 3, 8, 8), torch.zeros(2, 7, dtype=torch.long)
    expected = method(Nested(()), images, 1)
    for key, batch in (
        (("image",), {"image": images}),
        (("image",), {"ids": ids, "image": images}),
        (("in", 1), {"in": [ids, images]}),
        ((0,), (images, ids)),
    ):
        heat = method(Nested(key), (batch,), 1)
        torch.testing.assert_close(heat.maps, expected.maps)
        assert heat.at_input_size().maps.shape == (2, 8, 8)


def test_what_the_samples_are():
    images, ids = torch.rand(2, 3, 8, 6), torch.zeros(5, 7, dtype=torch.long)

    def layout(x):
        return BatchedArguments.of(Arguments.of(x)).layout()[:2]

    assert layout({"ids": ids, "images": images}) == (2, (8, 6))
    assert layout((torch.zeros(4, 1, 9, 9, dtype=torch.long), images)) == (2, (8, 6))
    assert layout([*images]) == (2, (8, 6))
    assert layout((list(images), ids)) == (2, (8, 6))
    assert layout([torch.rand(3, 8, 6), torch.rand(3, 9, 6)]) == (2, None)
    assert layout(ids) == (5, None)
    assert layout([{"image": torch.rand(3, 8, 6)}]) == (None, None)  # one dict per sample: nothing is known of them
    assert layout({"scale": 2.0}) == (None, None)
