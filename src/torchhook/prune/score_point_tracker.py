"""Which layer's channels a module returns, in any pass after the first: scores are computed there."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import nn

from torchhook.core.selection import Selector
from torchhook.core.tap import Tap
from torchhook.prune.score_points import ModuleCall, ScorePoints, TensorTracker


class ScorePointTracker(TensorTracker):
    """Follows the channels of layers to their score points, pass by pass.

    Call `begin` before a pass, `layer_at` with the output of every call of ``found.paths()``, and `end` after the pass.
    """

    def __init__(self, found: ScorePoints) -> None:
        super().__init__()
        self.found = found
        self.calls: Counter[str] = Counter()
        self.arrived: Counter[str] = Counter()

    def taps(self) -> list[Tap]:
        """The taps on the inputs of the modules behind layers."""
        behind = [path for path in self.found.paths() if path not in self.found.layers]
        return [Tap(Selector.union(behind), self, "input")] if behind else []

    def begin(self) -> None:
        """Forget the previous pass."""
        self.tracked.clear()
        self.inside.clear()
        self.calls.clear()
        self.arrived.clear()

    def see(self, module_call: ModuleCall, port: str, module: nn.Module, value: Any) -> None:
        """A module received a value: note if it is the next in the chain of a layer."""
        origin = self.origin_of(value)
        if origin is not None and self.found.chain(origin.layer)[origin.steps + 1] == module_call.path:
            self.inside[module_call] = origin

    def layer_at(self, module_call: ModuleCall, x: Any) -> str | None:
        """The layer whose score point is the output `x` of a call, or None."""
        if module_call.path in self.found.layers:
            self.calls[module_call.path] += 1
            layer, steps = module_call, 0
        elif module_call in self.inside:
            before = self.inside.pop(module_call)
            layer, steps = before.layer, before.steps + 1
        else:
            return None
        if len(self.found.chain(layer)) == steps + 1:
            self.arrived[layer.path] += 1
            return layer.path
        self.track(x, layer, steps)
        return None

    def end(self) -> None:
        """Raise if the output of a layer took another way than in the first pass."""
        for path, calls in self.calls.items():
            known = self.found.of(path)
            if self.arrived[path] != calls or (len(set(known)) > 1 and calls != len(known)):
                raise ValueError(
                    f"the output of {path!r} goes through other modules in a later batch of loader than in the"
                    " first, so its channels cannot be scored; pass only the other layers with layers="
                )
