"""`diff`: planted differences are found at their module, and rounding is not taken for one."""

import copy

import pytest
import torch
from torch import nn

from torchhook.compare.diff.verb import diff
from torchhook.core.site import Site

pytestmark = pytest.mark.usefixtures("one_thread")
WIDE, HEADS = 32, 4


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDE, 3 * WIDE)
        self.proj = nn.Linear(WIDE, WIDE)
        self.scale = (WIDE // HEADS) ** -0.5
        self.causal = True

    def forward(self, x, mask=None):
        size = x.shape[1]
        q, k, v = (part.unflatten(2, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, 2))
        scores = q @ k.transpose(2, 3) * self.scale
        if self.causal:
            scores = scores.masked_fill(torch.ones(size, size, dtype=torch.bool).triu(1), -torch.inf)
        if mask is not None:
            scores = scores + mask
        return self.proj((scores.softmax(3) @ v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDE)
        self.attention = Attention()
        self.norm2 = nn.LayerNorm(WIDE)
        self.mlp = nn.Sequential(nn.Linear(WIDE, 2 * WIDE), nn.GELU(), nn.Linear(2 * WIDE, WIDE), nn.Dropout(0.1))
        self.after = False
        self.adds = True

    def forward(self, x, mask=None):
        x = self.norm1(x + self.attention(x, mask)) if self.after else x + self.attention(self.norm1(x), mask)
        y = self.mlp(self.norm2(x))
        return x + y if self.adds else y


class Former(nn.Module):
    def __init__(self, depth=4):
        super().__init__()
        self.token = nn.Embedding(50, WIDE)
        self.position = nn.Embedding(20, WIDE)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.norm = nn.LayerNorm(WIDE)
        self.head = nn.Linear(WIDE, 50)
        self.offset = 0
        self.biased = True

    def forward(self, tokens):
        size = tokens.shape[1]
        x = self.token(tokens) + self.position(torch.arange(size) + self.offset)
        bias = torch.linspace(0, 1, size).to(x.dtype) if self.biased else None
        for number, block in enumerate(self.blocks):
            x = block(x, bias if number == 2 else None)
        return self.head(self.norm(x))


def former(seed=0):
    torch.manual_seed(seed)
    model = Former().eval()
    for parameter in model.parameters():  # biases and norms that are not what they begin as
        parameter.data += 0.05 * torch.randn_like(parameter)
    return model


def picture(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 5),
    )
    for _ in range(5):
        model(torch.randn(16, 3, 8, 8))
    return model.eval()


TOKENS = torch.arange(32).reshape(2, 16)
IMAGES = torch.linspace(-2, 2, 4 * 3 * 64).reshape(4, 3, 8, 8).sin()


def set_(path, **values):
    def plant(model):
        for name, value in values.items():
            setattr(model.get_submodule(path), name, value)

    return plant


def replace(path, new):
    def plant(model):
        owner, _, name = path.rpartition(".")
        setattr(model.get_submodule(owner), name, new)

    return plant


def transpose(model):
    weight = model.get_submodule("blocks.1.attention.proj").weight
    weight.data = weight.data.t().contiguous()


def one_number(model):
    model.get_submodule("blocks.3.mlp.2").weight.data[3, 5] += 0.01


PLANTED = {
    "epsilon of a norm": (set_("blocks.3.norm2", eps=1e-6), "blocks.3.norm2", "output", "blocks.3.norm2"),
    "transposed weight": (transpose, "blocks.1.attention.proj", "output", "blocks.1.attention.proj"),
    "no causal mask": (
        set_("blocks.2.attention", causal=False),
        "blocks.2.attention.proj",
        "input",
        "blocks.2.attention",
    ),
    "mask not handed on": (set_("", biased=False), "blocks.2", "input", ""),
    "another GELU": (replace("blocks.0.mlp.1", nn.GELU("tanh")), "blocks.0.mlp.1", "output", "blocks.0.mlp.1"),
    "dropout left on": (lambda m: m.blocks[1].mlp[3].train(), "blocks.1.mlp.3", "output", "blocks.1.mlp.3"),
    "no bias": (replace("blocks.2.mlp.0.bias", None), "blocks.2.mlp.0", "output", "blocks.2.mlp.0"),
    "norm after": (set_("blocks.1", after=True), "blocks.1.attention", "input", "blocks.1"),
    "scale": (set_("blocks.3.attention", scale=WIDE**-0.5), "blocks.3.attention.proj", "input", "blocks.3.attention"),
    "position off by one": (set_("", offset=1), "position", "input", ""),
    "no residual": (set_("blocks.2", adds=False), "blocks.2", "output", "blocks.2"),
    "one weight": (one_number, "blocks.3.mlp.2", "output", "blocks.3.mlp.2"),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_finds_what_is_planted_at_its_module(planted):
    plant, path, port, module = PLANTED[planted]
    a, b = former(), former()
    plant(b)
    found = diff(a, b, TOKENS)
    assert (found.first, found.module) == (Site(path, port), module), found.verdict
    assert not found.same and path in found.verdict
    assert diff(b, a, TOKENS).module == module


PICTURED = {
    "padding": (lambda m: m[3].__setitem__(0, _padded(m[3][0])), "3.0"),
    "epsilon of a batch norm": (set_("3.1", eps=1e-6), "3.1"),
    "batch norm in train mode": (lambda m: m[1].train(), "1"),
    "leaky": (replace("3.2", nn.LeakyReLU(1e-4)), "3.2"),
}


def _padded(convolution):
    twin = nn.Conv2d(8, 8, 3, padding=1, padding_mode="circular")
    twin.load_state_dict(convolution.state_dict())
    return twin


@pytest.mark.parametrize("planted", PICTURED)
def test_finds_what_is_planted_in_a_convolutional_model(planted):
    plant, path = PICTURED[planted]
    a, b = picture(), picture()
    plant(b)
    assert diff(a, b, IMAGES).first == Site(path)


@pytest.mark.parametrize("planted", ["transposed weight", "no causal mask", "dropout left on", "norm after", "scale"])
def test_finds_what_is_planted_in_bfloat16_too(planted):
    plant, path, port, _ = PLANTED[planted]
    a, b = former(), former()
    plant(b)
    assert diff(a, b.bfloat16(), TOKENS).first == Site(path, port)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("loss", [None, lambda output: output.float().square().mean()])
def test_a_dtype_is_no_difference(dtype, loss):
    for model, x in ((former(), TOKENS), (picture(), IMAGES)):
        found = diff(model, copy.deepcopy(model).to(dtype), x, loss)
        assert found.first is None and "rounding" in found.verdict, found.verdict
        assert max(row.error for row in found.rows) > 1e-8


def test_rounding_that_grows_with_depth_is_no_difference():
    torch.manual_seed(0)
    layers = [layer for _ in range(40) for layer in (nn.Linear(32, 32, bias=False), nn.Tanh())]
    for layer in layers[::2]:
        nn.init.normal_(layer.weight, std=3 / 32**0.5)
    a = nn.Sequential(*layers)
    b = copy.deepcopy(a)
    x = torch.randn(8, 32)
    found = diff(a, copy.deepcopy(a).bfloat16(), x)
    assert found.same and found.rows[-1].error > 0.5
    b[78].weight.data *= 1 + 1e-5
    found = diff(a, b.double(), x)
    assert found.first == Site("78")


@pytest.mark.parametrize("seed", range(8))
def test_equal_models_do_not_part(seed):
    a = former(seed)
    assert diff(a, former(seed), TOKENS).same
    flat = picture(seed)
    last = copy.deepcopy(flat).to(memory_format=torch.channels_last)
    assert diff(flat, last, torch.randn(3, 3, 9, 9), lambda output: output.square().sum()).same


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 50, "bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(**sizes)), torch.randint(0, 50, (2, 7))


def bert():
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    return BertModel(BertConfig(vocab_size=50, **sizes)), torch.randint(0, 50, (2, 7))


def images(model):
    return model, torch.randn(2, 3, 32, 32)


def of_torchvision(name):
    import torchvision

    return images(getattr(torchvision.models, name)(num_classes=5))


def mixer():
    from timm.models.mlp_mixer import MlpMixer

    return images(MlpMixer(img_size=32, patch_size=8, embed_dim=32, num_blocks=2, num_classes=5))


def vit():
    from timm.models.vision_transformer import VisionTransformer

    return images(VisionTransformer(img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=3, num_classes=5))


DAMAGED = {
    "transformer.h.1.mlp.c_fc": gpt2,
    "encoder.layer.1.attention.self.query": bert,
    "layer3.0.conv1": lambda: of_torchvision("resnet18"),
    "features.7.block.1.0": lambda: of_torchvision("mobilenet_v3_small"),
    "features.6.expand3x3": lambda: of_torchvision("squeezenet1_1"),
    "features.denseblock2.denselayer4.conv2": lambda: of_torchvision("densenet121"),
    "stage3.1.branch2.5": lambda: of_torchvision("shufflenet_v2_x0_5"),
    "blocks.1.mlp_tokens.fc2": mixer,
    "blocks.1.attn.qkv": vit,
    "blocks.2.mlp.0": lambda: (Former(), torch.randint(0, 50, (2, 9))),
}


@pytest.mark.parametrize("path", DAMAGED)
def test_a_damaged_copy_is_found_in_few_forwards(path):
    torch.manual_seed(0)
    a, x = DAMAGED[path]()
    b, forwards = copy.deepcopy(a.eval()), []
    with torch.no_grad():
        b.get_submodule(path).weight.mul_(1.01)
    for model in (a, b):
        model.register_forward_pre_hook(lambda *_: forwards.append(1))
    found = diff(a, b, x)
    assert found.first == Site(path) and found.module == path
    assert [row.site.path for row in found.rows if row.parts] == [path]
    assert len(forwards) == 5, "one of each, one on the values of a, and two with noise"
