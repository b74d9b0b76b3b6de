"""Count the parameters of a model, and print a summary."""

from __future__ import annotations

from torch import nn

from torchhook.core.selection import require_module, walk


def count_parameters(model: nn.Module, trainable_only: bool = False) -> int:
    """The number of parameters of `model`.

    >>> count_parameters(nn.Linear(3, 2))
    8
    """
    require_module(model)
    return sum(p.numel() for p in model.parameters() if p.requires_grad or not trainable_only)


def format_parameter_count(count: float, precision: int = 2) -> str:
    """A count with a fitting unit.

    >>> format_parameter_count(11_689_512)
    '11.69 M'
    """
    units = ["", "K", "M", "G", "T"]
    while count >= 1000 and len(units) > 1:
        count /= 1000
        units.pop(0)
    return f"{count:.{precision}f} {units[0]}"


def get_layerwise_parameter_count(
    model: nn.Module, max_depth: int = -1, trainable_only: bool = False
) -> dict[str, int]:
    """The number of each layer's own parameters, by path; children have depth 0, and -1 means no limit.

    >>> get_layerwise_parameter_count(nn.Sequential(nn.Linear(3, 2), nn.ReLU()))
    {'0': 8, '1': 0}
    """
    require_module(model)
    return {
        path: sum(p.numel() for p in layer.parameters(recurse=False) if p.requires_grad or not trainable_only)
        for path, layer in walk(model)
        if path and (max_depth == -1 or path.count(".") <= max_depth)
    }


def model_summary(model: nn.Module, max_depth: int = -1, show_zero_params: bool = True) -> None:
    """Print the number of parameters of `model`, in total and by layer.

    >>> model_summary(nn.Sequential(nn.Linear(3, 2)))  # doctest: +ELLIPSIS +NORMALIZE_WHITESPACE
    ================================================================================
    Model Summary: Sequential
    --------------------------------------------------------------------------------
    Total Parameters: 8.00
    Trainable Parameters: 8.00
    Non-trainable Parameters: 0.00
    --------------------------------------------------------------------------------
    Layer Name                               Total Params         Trainable Params
    ================================================================================
    0                                        8.00                 8.00
    ================================================================================
    """
    total, trainable = count_parameters(model), count_parameters(model, trainable_only=True)
    of_layer = get_layerwise_parameter_count(model, max_depth)
    trainable_of = get_layerwise_parameter_count(model, max_depth, trainable_only=True)
    double, single = "=" * 80, "-" * 80
    print(double)
    print(f"Model Summary: {type(model).__name__}")
    print(single)
    print(f"Total Parameters: {format_parameter_count(total)}")
    print(f"Trainable Parameters: {format_parameter_count(trainable)}")
    print(f"Non-trainable Parameters: {format_parameter_count(total - trainable)}")
    print(single)
    print(f"{'Layer Name':<40} {'Total Params':<20} {'Trainable Params':<20}")
    print(double)
    for path, count in of_layer.items():
        if count or show_zero_params:
            name = "  " * path.count(".") + path
            print(f"{name:<40} {format_parameter_count(count):<20} {format_parameter_count(trainable_of[path]):<20}")
    print(double)
