"""Architectures of timm, small: a function for each returns a fresh model and batches of pictures to classify.

The names are those of timm 1.0. Of each family it is a small member; where the constructor lets them, vision
transformers are made narrower and shallower still.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BATCHES, SAMPLES, CLASSES = 10, 16, 10
LOSS = F.cross_entropy

RATES: dict[str, float] = {}
"""Learning rates other than 1e-3, for those that hardly move in thirty steps of it."""

Made = tuple[nn.Module, list[tuple[Tensor, Tensor]]]
MODELS: dict[str, Callable[[], Made]] = {}


def pictures(draw: torch.Generator, side: int) -> tuple[Tensor, Tensor]:
    """A coarse pattern for each class, with noise."""
    patterns = torch.randn(CLASSES, 3, 4, 4, generator=torch.Generator().manual_seed(7))
    label = torch.randint(CLASSES, (SAMPLES,), generator=draw)
    clean = F.interpolate(patterns[label], size=(side, side), mode="bilinear")
    return clean + 0.5 * torch.randn(clean.shape, generator=draw), label


def _made(name: str, side: int, options: dict) -> Made:
    import timm

    draw = torch.Generator().manual_seed(1)
    model = timm.create_model(name, pretrained=False, num_classes=CLASSES, **options)
    return model, [pictures(draw, side) for _ in range(BATCHES)]


def add(*names: str, side: int = 64, **options) -> None:
    """List these models with the same options, for pictures of this side."""
    for name in names:
        MODELS[name] = partial(_made, name, side, options)


# Convolutions: any side will do.
add("resnet10t", "resnetv2_18", "resnext26ts", "seresnext26t_32x4d", "skresnet18", "ecaresnet26t", "res2net50_14w_8s",
    "regnetx_002", "regnety_002", "regnetz_005", "densenet121", "dla46_c", "dpn48b", "hrnet_w18_small",
    "cspresnet50", "darknet17", "repvgg_a0", "mobileone_s0", "gernet_s", "ese_vovnet19b_slim_dw",
    "hgnetv2_b0", "nf_resnet26", "eca_nfnet_l0")  # fmt: skip
add("efficientnet_b0", "mobilenetv2_035", "mobilenetv3_small_050", "mobilenetv4_conv_small_035", "mnasnet_small",
    "lcnet_035", "tinynet_e", "ghostnet_050", "hardcorenas_a", "mixnet_s", "repghostnet_050", "rexnet_100",
    "starnet_s1", "fasternet_t0")  # fmt: skip
add("convnext_atto", "convnextv2_atto", "inception_next_atto", "edgenext_xx_small",
    "mambaout_femto", "poolformer_s12", "caformer_s18")  # fmt: skip
add("inception_v3", side=96)

# Attention and convolutions.
add("mobilevit_xxs", "mobilevitv2_050", "fastvit_t8", "repvit_m0_9", "efficientvit_b0", "swiftformer_xs",
    "lambda_resnet26t", "pvt_v2_b0", "tiny_vit_5m_224", side=64)  # fmt: skip
add("coat_lite_tiny", "levit_128s", "efficientvit_m0", "efficientformerv2_s0", "botnet26t_256", "visformer_tiny",
    side=64, img_size=64)  # fmt: skip
add("maxvit_rmlp_pico_rw_256", "coatnet_pico_rw_224", "gcvit_xxtiny", "mvitv2_tiny", side=64,
    img_size=64)  # fmt: skip

# Attention and perceptrons on patches.
TINY = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 4}
STAGES = {"img_size": 64, "embed_dim": 24, "depths": (2, 2), "num_heads": (2, 4), "window_size": 4}
add("vit_tiny_patch16_224", "deit_tiny_distilled_patch16_224", "deit3_small_patch16_224", "flexivit_small",
    "beit_base_patch16_224", "eva02_tiny_patch14_224", "cait_xxs24_224", "xcit_nano_12_p16_224",
    "convit_tiny", side=32, **TINY)  # fmt: skip
add("mixer_s32_224", "resmlp_12_224", "gmlp_ti16_224", side=64, img_size=64)
add("swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256", "swinv2_cr_tiny_ns_224", side=64, **STAGES)
add("hiera_tiny_224", "twins_svt_small", "nest_tiny", "pit_ti_224", "volo_d1_224",
    "tnt_s_patch16_224", side=64, img_size=64)  # fmt: skip
