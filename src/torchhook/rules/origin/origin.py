"""Where the first NaN or Inf came from: as plain data, in words, and with a hint what to do."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from torchhook.core.findings import Finding, Severity
from torchhook.rules.origin.calls import in_words
from torchhook.rules.origin.replay import Shown

Stage = Literal["forward", "backward", "state"]

CODES: dict[Stage, str] = {"forward": "TH101", "state": "TH102", "backward": "TH103"}

_HINTS = (
    (("softmax", "attention"), "The softmax of a fully masked row is NaN: let every query attend to at least one key."),
    (("log",), "The argument reached 0 or less: clamp it, add an eps, or use log1p or log_softmax."),
    (("sqrt", "norm", "pow", "std", "var"), "The argument reached 0 or less: add an eps inside, as in sqrt(x + eps)."),
    (("div", "reciprocal"), "The denominator reached 0: add an eps to it, or clamp it."),
    (("exp", "sinh", "cosh"), "The argument is too large: subtract the maximum first (logsumexp does), or clamp it."),
    (
        ("acos", "asin", "atanh", "acosh"),
        "The argument left the domain, perhaps only by rounding: clamp it.",
    ),
)

_OTHERWISE = "Look at the ranges of its operands: the values before it have grown too large, or cancel out."


class Range(NamedTuple):
    """An operand of an op: the shape, dtype and range of one tensor.

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
        """Plain values; NaN and Inf, which JSON does not have, as strings."""
        low, high = (value if math.isfinite(value) else str(value) for value in (self.low, self.high))
        return {"shape": list(self.shape), "dtype": self.dtype, "min": low, "max": high}


@dataclass(frozen=True)
class Origin:
    """Where the first NaN or Inf came from.

    `path` is the module (or parameter) and `kind` its class; `call` and `pass_number` say when. `op` is the operation,
    `line` and `file` its place in the source, `after` the child module that ran before it, and `operands` what the
    operation was given. If the value was not produced there but came in with something, `came_with` says with what.
    Fields that could not be determined are empty, and `note` says why.

    >>> origin = Origin("head.act", "LogAct", "forward", 0, 3, "-Inf", op="aten.log", line="net.py:7: return x.log()")
    >>> print(origin.message())
    -Inf in the forward of pass 3: produced by aten.log in 'head.act' (LogAct)
      net.py:7: return x.log()
    >>> origin.hint
    'The argument reached 0 or less: clamp it, add an eps, or use log1p or log_softmax.'
    """

    path: str
    kind: str
    phase: Stage
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
        """What happened, in a few lines."""
        lines = [self._summary()]
        lines += [f"  {self.line}"] if self.line else []
        lines += [f"  on {', '.join(map(str, self.operands))}"] if self.operands else []
        lines += [f"  ({self.note})"] if self.note else []
        return "\n".join(lines)

    @property
    def hint(self) -> str:
        """What to do about it."""
        if self.phase == "state":
            return "Load a checkpoint from before it broke, and resume training inside torchhook.catch_nonfinite."
        if self.came_with:
            made = "loss for logarithms, divisions and square roots" if self.phase == "backward" else "data"
            return f"The model is not the cause. Check the {made}."
        if "Inf" in self.what and (
            self.op.endswith("_to_copy") or "float16" in {known.dtype for known in self.operands}
        ):
            return "The largest float16 is 65,504: use bfloat16, scale the values down, or compute this in float32."
        name = self.op.lower()
        said = next((said for words, said in _HINTS if any(word in name for word in words)), _OTHERWISE if name else "")
        where = " If torch.where masks the result, mask the argument: the branch not taken is differentiated, too."
        return said + where if said and self.phase == "backward" else said

    def finding(self, affected: Iterable[tuple[str, int]] = ()) -> Finding:
        """This origin as a finding; `affected` are the calls that only passed the value on."""
        own = {
            name: getattr(self, name) for name in ("what", "op", "line", "file", "after", "call", "came_with", "note")
        }
        evidence = {**own, "ranges": [known.to_dict() for known in self.operands], "cause": "nonfinite"}
        evidence = {name: known for name, known in evidence.items() if known not in ("", [])}
        code, step = CODES[self.phase], self.pass_number
        later = [Finding(code, Severity.ERROR, f"call {call} passed it on", path, step) for path, call in affected]
        said = self._summary() + (f", at {self.line}" if self.line else "") + (f" ({self.note})" if self.note else "")
        return Finding(code, Severity.ERROR, said, self.path, step, evidence, self.hint, tuple(later))

    def shown(self, shown: Shown, paths: Mapping[int, str]) -> Origin:
        """This origin completed by a replay; `paths` are the modules' paths, by the id of the module."""
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
            return f"{self.path!r} (of a {self.kind}) has held {self.what} since before pass {self.pass_number}"
        begun = f"{self.what} in the {self.phase} of pass {self.pass_number}"
        place = f"{self.path!r}" if self.path else "the model"
        where = f"{place} ({self.kind}{f', call {self.call}' if self.call else ''})" if self.kind else place
        if self.came_with:
            return f"{begun}: it came in with {self.came_with} of {where}"
        made = f"produced by {self.op}" if self.op else "it began"
        return f"{begun}: {made} in {where}" + (f", after {self.after!r}" if self.after else "")
