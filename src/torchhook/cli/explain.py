"""``torchhook explain``: where in an image a model looks."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from torchhook.cli.errors import warnings_in_words
from torchhook.cli.loaders import model_of, wrong
from torchhook.cli.options import Model
from torchhook.cli.weights import load_weights
from torchhook.core.optional import require
from torchhook.core.progress import progress_bar

if TYPE_CHECKING:
    from torch import Tensor, nn

_IMAGE = "Image"
_MEAN, _STD = "0.485,0.456,0.406", "0.229,0.224,0.225"  # the usual ones of models trained on ImageNet
_FORMATS = (".jpg", ".jpeg", ".pdf", ".png", ".svg", ".webp")


class Method(str, Enum):
    """The methods for heat maps."""

    grad_cam = "grad_cam"
    grad_cam_pp = "grad_cam_pp"
    hires_cam = "hires_cam"
    layer_cam = "layer_cam"
    x_grad_cam = "x_grad_cam"
    eigen_cam = "eigen_cam"
    score_cam = "score_cam"
    ablation_cam = "ablation_cam"


def explain(
    model: Model,
    image: Annotated[Path, typer.Argument(metavar="IMAGE", help="An image file.")],
    method: Annotated[Method, typer.Option(metavar="NAME", help=", ".join(one.value for one in Method))] = (
        Method.grad_cam
    ),
    target: Annotated[
        int | None, typer.Option(metavar="CLASS", help="Index of the class to explain; by default the predicted class.")
    ] = None,
    weights: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Trained weights: safetensors, or a state dict (also inside a checkpoint). Never runs code from it.",
        ),
    ] = None,
    layer: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="Path of a module; by default the last one before a final pooling."),
    ] = None,
    call: Annotated[
        int | None, typer.Option(metavar="N", help="Which call of the layer, if it is called several times in a pass.")
    ] = None,
    size: Annotated[
        int,
        typer.Option(metavar="PIXELS", min=1, rich_help_panel=_IMAGE, help="Size of the central square."),
    ] = 224,
    mean: Annotated[
        str,
        typer.Option(metavar="R,G,B", rich_help_panel=_IMAGE, help="Subtracted from colours in [0, 1]."),
    ] = _MEAN,
    std: Annotated[str, typer.Option(metavar="R,G,B", rich_help_panel=_IMAGE, help="Divides them.")] = _STD,
    device: Annotated[str | None, typer.Option(metavar="NAME", help="Device for the model: cuda, cpu, ...")] = None,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Image to write: .png, .jpg, .pdf or .svg.")] = (
        Path("cam.png")
    ),
) -> None:
    """Draw a heat map over an image: where the model looks.

    MODEL is package.module:name; modules in the current folder work, too.

    [bold]torchhook explain torchvision.models:resnet18 cat.jpg --weights resnet18.pth
    torchhook explain net:pretrained cat.jpg --method hires_cam --target 282[/]
    """
    _require_drawable(out)
    centre, spread = _colours(mean, "--mean"), _colours(std, "--std")
    if not all(spread):
        raise wrong("--std", "colours are divided by it, so it must not be 0")
    picture = _read(image)
    with warnings_in_words(), progress_bar("loading", True):
        import torch

        from torchhook import explain as methods

        net = model_of(model)
        if weights is not None:
            load_weights(net, weights)
        net = net if device is None else net.to(device)
        shown = _square(picture, size)
        x = (shown - torch.tensor(centre).view(3, 1, 1)) / torch.tensor(spread).view(3, 1, 1)
        like = next((parameter for parameter in net.parameters() if parameter.is_floating_point()), x)
        batch = x[None].to(like.device, like.dtype)
        _require_classes(net, batch, method)
        heat = getattr(methods, method.value)(net, batch, target, layer, call=call)
    if not heat.maps.any():
        raise ValueError("the map is zero everywhere, so no image was written; choose another --layer or --target")
    if not heat.maps.isfinite().all():
        raise ValueError("the map has NaN or Inf, so no image was written; look for them in the weights")
    heat.positive().normalized().overlay(shown).savefig(out, dpi=150)
    typer.echo(heat)
    typer.echo(f"written: {out}")


def _require_drawable(out: Path) -> None:
    """Refuse a file that no image can be written to, before any work is done."""
    if out.suffix.lower() not in _FORMATS:
        raise wrong("--out", f"{out.name!r} must end in {', '.join(_FORMATS)}")
    if not out.parent.is_dir():
        raise wrong("--out", f"there is no folder {str(out.parent)!r}")


def _require_classes(net: nn.Module, batch: Tensor, method: Method) -> None:
    """Refuse a model that does not run on images or whose output has no classes.

    eigen_cam needs no class, so it accepts any output.
    """
    from torchhook.core.model_state import inference
    from torchhook.core.text import shape_of
    from torchhook.explain.targets import logits_of

    with inference(net):
        try:
            output = net(batch)
        except RuntimeError as error:
            why = str(error).partition("\n")[0].rstrip(".")
            raise ValueError(
                f"cannot run the model on an image of {shape_of(batch)}: {why}; set its height and width with --size;"
                " for a model with other inputs, use torchhook.explain from Python"
            ) from error
    if method is Method.eigen_cam:
        return
    try:
        logits_of(output)
    except ValueError as error:
        raise ValueError(
            f"the model returned {shape_of(output)}, not one number per class; to choose what to explain, use"
            f" torchhook.explain.{method.value} from Python with target="
        ) from error


def _colours(text: str, option: str) -> list[float]:
    try:
        red, green, blue = map(float, text.split(","))
    except ValueError:
        raise wrong(option, f"pass three numbers separated by commas, such as {_MEAN}, not {text!r}") from None
    return [red, green, blue]


def _read(file: Path) -> Any:
    """The image in a file, upright and in RGB."""
    image, ops = (require(f"PIL.{name}", "plot", "torchhook explain") for name in ("Image", "ImageOps"))
    try:
        with image.open(file) as opened:
            return ops.exif_transpose(opened).convert("RGB")
    except FileNotFoundError:
        raise wrong("IMAGE", f"there is no file {str(file)!r}") from None
    except (OSError, ValueError) as error:  # an image that PIL does not recognise is an OSError, too
        raise wrong("IMAGE", f"cannot read {str(file)!r} as an image: {error}") from None


def _square(picture: Any, size: int) -> Tensor:
    """The central square of an image, 3 × size × size in [0, 1]."""
    import torch
    from PIL import Image, ImageOps

    fitted = ImageOps.fit(picture, (size, size), Image.Resampling.BICUBIC)
    return torch.frombuffer(bytearray(fitted.tobytes()), dtype=torch.uint8).view(size, size, 3).permute(2, 0, 1) / 255
