"""What the tests of stills draw: measured models, and readings of what is drawn."""

import io

import torch
from torch import nn

import torchhook
from specimens import resnet18

HOSTILE = [r"$\frac{", "$x^2$", "_private", "a\\$b", "<b>&amp;", "fc\x1b[31m\n", "\u202egnp", "\ud800", "%d{}", ""]


def measured(model, x, **settings):
    with torchhook.measure(model, on_silent="ignore", **settings) as stats:
        model(x).sum().backward()
    return stats


def resnet():
    return measured(
        resnet18(num_classes=5), torch.randn(2, 3, 32, 32), grads=True, params=True, stats=("moments", "histogram")
    )


def chain(count, **settings):
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(count)])
    return measured(model, torch.randn(16, 4), stats=("moments", "histogram"), **settings)


def reading_of(*values, stats=("moments", "histogram")):
    """A snapshot with a place for each of some tensors, by name."""
    reduce = torchhook.Reduce(*stats)
    for name, value in values:
        reduce.cell(torchhook.Site(name), nn.Identity()).update(torch.as_tensor(value, dtype=torch.float32))
    return reduce.snapshot()


def png(figure):
    """The figure as pixels in a file."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=50)
    return file.getvalue()


def rows(figure):
    return [tick.get_text() for tick in figure.axes[0].get_yticklabels()]


def legend(figure):
    return [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
