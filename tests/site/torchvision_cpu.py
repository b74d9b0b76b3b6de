"""Let torchvision from the registry be imported beside a CPU build of torch.

Its compiled ops belong to a CUDA build and do not load there, and its import then misses two of
them. They are defined in plain torch just before torchvision is first imported: in this process
by `install`, in child processes by the sitecustomize.py beside this file.
"""

import importlib.abc
import importlib.metadata
import sys


class _BeforeTorchvision(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            _define_missing_ops()


def install() -> None:
    """Define the ops when torchvision is first imported. Imports nothing itself; a second call changes nothing."""
    waiting = any(isinstance(finder, _BeforeTorchvision) for finder in sys.meta_path)
    if "torchvision" not in sys.modules and not waiting:
        sys.meta_path.insert(0, _BeforeTorchvision())


def _define_missing_ops() -> None:
    import torch

    version = importlib.metadata.version("torchvision")
    if torch.version.cuda is not None or version.endswith("+cpu"):
        return
    _define_missing_ops.library = library = torch.library.Library("torchvision", "DEF")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.impl("nms", _nms, "CPU")


def _nms(boxes, scores, iou_threshold):
    import torch

    area = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    order = scores.argsort(descending=True)
    kept = []
    while len(order):
        best, order = order[0], order[1:]
        kept.append(best)
        low = torch.maximum(boxes[best, :2], boxes[order, :2])
        high = torch.minimum(boxes[best, 2:], boxes[order, 2:])
        overlap = (high - low).clamp(min=0).prod(dim=1)
        order = order[overlap <= iou_threshold * (area[best] + area[order] - overlap)]
    return torch.stack(kept) if kept else boxes.new_empty(0, dtype=torch.long)
