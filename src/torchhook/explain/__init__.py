"""Explain a model's output: heat maps and tests of them, attention, feature pyramids, inputs that excite a unit.

heat = torchhook.explain.grad_cam(model, images, target=282)
heat.positive().normalized().overlay(images)
"""

from torchhook.explain.attention_capture import attention
from torchhook.explain.attention_maps import Attended, AttentionCall, AttentionChange
from torchhook.explain.cams import eigen_cam, grad_cam, grad_cam_pp, hires_cam, layer_cam, x_grad_cam
from torchhook.explain.erasure import Faithfulness, faithfulness
from torchhook.explain.examples import Example, Examples, top_examples
from torchhook.explain.heat import Heat
from torchhook.explain.mask_cams import ablation_cam, score_cam
from torchhook.explain.pyramids import Level, Pyramid, pyramid
from torchhook.explain.randomisation import Sanity, sanity

__all__ = [
    "Attended",
    "AttentionCall",
    "AttentionChange",
    "Example",
    "Examples",
    "Faithfulness",
    "Heat",
    "Level",
    "Pyramid",
    "Sanity",
    "ablation_cam",
    "attention",
    "eigen_cam",
    "faithfulness",
    "grad_cam",
    "grad_cam_pp",
    "hires_cam",
    "layer_cam",
    "pyramid",
    "sanity",
    "score_cam",
    "top_examples",
    "x_grad_cam",
]
