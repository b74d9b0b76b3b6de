"""Where the first NaN or Inf began, as plain data and in words, with what to do about it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from torchhook.core.findings import Finding, Severity
from torchhook.rules.origin.calls import in_words
from torchhook.rules.origin.replay import Shown

Phase = Literal["forward", "backward", "state"]

CODES: dict[Phase, str] = {"forward": "TH101", "state": "TH102", "backward": "TH103"}

_HINTS = (
    (("softmax", "attention"), "A row of which everything is masked has no softmax: let every query see some key."),
    (("log",), "The argument reached 0 or less: clamp it, add an eps, or use log1p or log_softmax."),
    (("sqrt", "norm", "pow", "std", "var"), "The argument reached 0 or less: add an eps inside, as in sqrt(x + eps)."),
    (("div", "reciprocal"), "The denominator reached 0: add an eps to it, or clamp it."),
    (("exp", "sinh", "cosh"), "The argument is too large: subtract the maximum first (logsumexp does), or clamp it."),
    (("acos", "asin", "atanh", "acosh"), "The argument left the domain, if only by rounding: clamp it."),
)

_OTHERWISE = "Look at the ranges of its operands: what comes before has grown too large, or cancels out."


class Range(NamedTuple):
    """What an op was given: one tensor, as far as one has to know it.

    >>> print(Range((2, 3), "float32", 0.0, 1.5))
    float32 2×3 in [0, 1.5]
    """

    shape: tuple[int, ...]
    dtype: str
    low: float
    high: float

    def __str__(self) -> str:
        shape = "×".join(map(str, self.shape)) or "scalar"
        extent = "with NaN" if math.isnan(self.low) else f"in [{self.low:.4g}, {self.high:.4g}]"
        return f"{self.dtype} {shape} {extent}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values; what is no number in JSON is a word."""
        low, high = (value if math.isfinite(value) else str(value) for value in (self.low, self.high))
        return {"shape": list(self.shape), "dtype": self.dtype, "min": low, "max": high}


@dataclass(frozen=True)
class Origin:
    """Where the first NaN or Inf began.

    `path` and `kind` say in which module (or parameter) and of which class, `call` and `pass_number` when, `op` by
    which operation, on which `line` of which `file`, `after` which child of the module; `operands` are what the
    operation was given. If it was not made there but `came_with` something, this says with what. What could not be
    found out is empty, and `note` says why.

    >>> origin = Origin("head.act", "LogAct", "forward", 0, 3, "-Inf", op="aten.log", line="net.py:7: return x.log()")
    >>> print(origin.message())
    -Inf in the forward of pass 3: aten.log made it in 'head.act' (LogAct)
      net.py:7: return x.log()
    >>> origin.hint
    'The argument reached 0 or less: clamp it, add an eps, or use log1p or log_softmax.'
    """

    path: str
    kind: str
    phase: Phase
    call: int
    pass_number: int
    what: str
    op: str = ""
    line: str = ""
    file: str = ""
    after: str = ""
    operands: tuple[Range, ...] = ()
    came_with: str = ""
    note: str = ""

    def message(self) -> str:
        """The story, in a few lines."""
        lines = [self._summary()]
        lines += [f"  {self.line}"] if self.line else []
        lines += [f"  on {', '.join(map(str, self.operands))}"] if self.operands else []
        lines += [f"  ({self.note})"] if self.note else []
        return "\n".join(lines)

    @property
    def hint(self) -> str:
        """What to do about it."""
        if self.phase == "state":
            return "Load a checkpoint from before it broke, and train on inside torchhook.catch_nonfinite."
        if self.came_with:
            made = "loss: look for logarithms, divisions and roots in it" if self.phase == "backward" else "data"
            return f"The model is not at fault. Check the {made}."
        if "Inf" in self.what and (
            self.op.endswith("_to_copy") or "float16" in {known.dtype for known in self.operands}
        ):
            return "float16 ends at 65,504: use bfloat16, scale the values down, or keep this in float32."
        name = self.op.lower()
        said = next((said for words, said in _HINTS if any(word in name for word in words)), _OTHERWISE if name else "")
        where = " If a torch.where masks it, mask the argument instead: the side not taken is differentiated, too."
        return said + where if said and self.phase == "backward" else said

    def finding(self, affected: Iterable[tuple[str, int]] = ()) -> Finding:
        """The same as a finding; `affected` are the calls that merely passed it on."""
        own = {
            name: getattr(self, name) for name in ("what", "op", "line", "file", "after", "call", "came_with", "note")
        }
        evidence = {**own, "ranges": [known.to_dict() for known in self.operands]}
        evidence = {name: known for name, known in evidence.items() if known not in ("", [])}
        code, step = CODES[self.phase], self.pass_number
        later = [Finding(code, Severity.ERROR, f"call {call} passed it on", path, step) for path, call in affected]
        said = self._summary() + (f", at {self.line}" if self.line else "") + (f" ({self.note})" if self.note else "")
        return Finding(code, Severity.ERROR, said, self.path, step, evidence, self.hint, tuple(later))

    def shown(self, shown: Shown, paths: Mapping[int, str]) -> Origin:
        """The same with what a replay showed; `paths` are those of the modules, by their ids."""
        step = shown.step
        if step is None:
            return replace(self, note="; ".join(filter(None, (self.note, shown.note))))
        return replace(
            self,
            what=in_words(step.bits),
            op=f"{step.node} ({step.op})" if step.node else step.op,
            line=str(step.place or ""),
            file=step.place.file if step.place else "",
            after=paths.get(id(step.where.after), "") if step.where else self.after,
            operands=tuple(Range(*known[:4]) for known in step.operands),
        )

    def _summary(self) -> str:
        if self.phase == "state":
            return f"{self.path!r} (of a {self.kind}) holds {self.what} since before pass {self.pass_number}"
        begun = f"{self.what} in the {self.phase} of pass {self.pass_number}"
        place = f"{self.path!r}" if self.path else "the model"
        where = f"{place} ({self.kind}{f', call {self.call}' if self.call else ''})" if self.kind else place
        if self.came_with:
            return f"{begun}: it came in with {self.came_with} of {where}"
        made = f"{self.op} made it" if self.op else "it began"
        return f"{begun}: {made} in {where}" + (f", after {self.after!r}" if self.after else "")
