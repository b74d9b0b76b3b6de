"""Finds the call of a pass that produced NaN or Inf: the marks give the suspects, a replay decides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor, nn

from torchhook.core.selection import plain
from torchhook.core.torch_internals import own_parameters
from torchhook.rules.origin.calls import BAD, DOWN, NAN, Call, bits_in, in_words
from torchhook.rules.origin.origin import Origin, Stage
from torchhook.rules.origin.replay import Shown, replay_call


class Hit(NamedTuple):
    """What was found: the origin, its call, and the calls (path and number) that passed the value on."""

    origin: Origin
    call: Call | None
    affected: list[tuple[str, int]]


class Arrival(NamedTuple):
    """A gradient that the backward delivered."""

    port: str
    path: str
    number: int
    pass_number: int
    call: Call | None  # None for a parameter, or for a pass that is no longer kept
    gradient: Tensor

    @property
    def leaves_model(self) -> bool:
        """Whether it is used outside the model: by an optimizer, or by the code that made the inputs."""
        is_outermost = not self.path if self.call is None else self.call.parent is None
        return self.port == "param_grad" or (self.port == "grad_input" and is_outermost)


def in_forward(calls: list[Call], top: Call, masking: set[str]) -> Hit | None:
    """Where NaN or Inf began in a forward whose output, that of `top`, is not finite; None if it is only masks.

    `masking` are the paths of modules that are known to mask with -Inf.
    """
    want = BAD if top.bits & BAD else DOWN
    made = makers(calls, want)
    if want == DOWN and {call.path for call in made} <= masking:
        return None
    first = made[0] if made else top
    later = [call for call in calls if call.begun > first.ended]
    # If a later call produced it again or hid it, or if -Inf came in, only a replay of the whole forward can decide.
    is_sure = not first.input_bits and all(call.input_bits & want for call in later)
    call, shown = _replayed([first, top] if is_sure else [top, first], calls)
    if want == DOWN and shown.step is None:
        masking.update(call.path for call in made)
        return None
    if shown.blank:
        return None
    return _hit(call if shown.is_conclusive else first, shown, calls)


def in_unfinished(calls: list[Call]) -> Hit | None:
    """Where NaN or Inf began in a forward that raised."""
    made = makers(calls, BAD)
    return _hit(made[0], replay_call(made[0], calls), calls) if made else None


def in_backward(broken: list[tuple[Arrival, int]], calls: list[Call], parameters: Mapping[str, nn.Parameter]) -> Hit:
    """Where NaN or Inf began in a backward, given the nonfinite gradients in the order of their arrival."""
    first, bits = broken[0]
    suspects, after = _suspects(broken, calls, parameters)
    call: Call | None = first.call
    if suspects:
        call, shown = _replayed([*suspects, *calls[-1:]], calls, backward=True)
        found = shown.is_conclusive
        call = _inside(call, shown, calls) if found else suspects[-1]
        if first.port == "param_grad" and not found:
            shown = Shown(note=f"{shown.note}; perhaps the .grad of {first.path!r} already held it")
        origin = replace(_origin(call, "backward", bits), after="" if found else after).shown(shown, _paths(calls))
    elif call is not None:
        call = [call, *call.ancestors][-1]
        came_with = "the gradient that the loss passed to the output"
        origin = replace(_origin(call, "backward", bits), came_with=came_with)
    else:
        note = "not replayed: another forward began before this backward"
        origin = Origin("", "", "backward", 0, first.pass_number, in_words(bits), after=first.path, note=note)
    passed = dict.fromkeys((known.path, known.number) for known, _ in broken if known.port == "grad_output")
    return Hit(origin, call, [place for place in passed if place != (origin.path, origin.call)])


def makers(calls: list[Call], want: int) -> list[Call]:
    """The innermost calls that produced the wanted bits from arguments without them, unless an outer call hid them."""
    made = [call for call in calls if call.bits & want and not call.input_bits & want]
    seen = [call for call in made if all(around.bits & want or not around.ended for around in call.ancestors)]
    return [call for call in seen if not any(call in other.ancestors for other in seen)]


def _suspects(
    broken: list[tuple[Arrival, int]], calls: list[Call], parameters: Mapping[str, nn.Parameter]
) -> tuple[list[Call], str]:
    """The calls whose backward may have produced the first of the gradients, and the path of the output it is for."""
    first, _ = broken[0]
    if first.port == "param_grad":
        it = parameters.get(first.path)
        owners = [call for call in calls if any(known is it for known in own_parameters(call.module).values())]
        return owners[::-1] or calls[-1:], ""
    if first.port == "grad_input" or first.call is None:
        return [first.call] if first.call else [], ""
    given = [known.call for known, _ in broken if known.port == "grad_output" and known.call]
    inner, around = first.call, first.call.parent
    while around in given:  # its parent returns the same tensor, and did not produce the gradient either
        inner, around = around, around.parent
    if around is None:
        return [], ""
    later = [call for call in calls if call.parent is around and call.begun > inner.ended]
    return [*sorted(later, key=lambda call: call.begun)[:1], around], inner.path


def _replayed(suspects: list[Call], calls: list[Call], backward: bool = False) -> tuple[Call, Shown]:
    """The first of `suspects` whose replay is conclusive, and what it showed; else a blank one, or the first."""
    inconclusive: list[tuple[Call, Shown]] = []
    for call in dict.fromkeys(suspects):
        shown = replay_call(call, calls, backward)
        if shown.is_conclusive:
            return call, shown
        inconclusive.append((call, shown))
    return next((pair for pair in inconclusive if pair[1].blank), inconclusive[0])


def _hit(call: Call, shown: Shown, calls: list[Call]) -> Hit:
    """The place in the forward of `call` that its replay showed, or else the call itself."""
    culprit = shown.culprit
    role, name, bits = (culprit.role, culprit.name, culprit.bits) if culprit else _broken_state(call, shown)
    if role == "argument":
        origin = replace(_origin(call, "forward", bits), came_with=f"the argument {name}")
    elif role:
        owner = call.module.get_submodule(name.rpartition(".")[0])
        path = plain(f"{call.path}.{name}" if call.path else name)
        origin = replace(_origin(call, "state", bits), path=path, kind=type(owner).__name__).shown(shown, _paths(calls))
    else:
        call = _inside(call, shown, calls)
        origin = _origin(call, "forward", call.bits).shown(shown, _paths(calls))
    passed = [(other.path, other.number) for other in calls if other.ended > call.ended and other.bits & BAD]
    return Hit(origin, call, passed)


def _inside(call: Call, shown: Shown, calls: list[Call]) -> Call:
    """The call, among `call` and those inside it, whose forward ran the op that a replay of `call` showed."""
    where = shown.step.where if shown.step else None
    if where is None:
        return call
    parts = [part for part in calls if part is call or call in part.ancestors]
    same = [part for part in parts if part.module is where.module]
    same.sort(key=lambda part: part.begun)
    return same[where.number] if where.number < len(same) else call


def _broken_state(call: Call, shown: Shown) -> tuple[str, str, int]:
    """A parameter or buffer that was nonfinite before `call`: role, name and bits. A conclusive replay knows better."""
    state: dict[str, Mapping[str, Tensor]] = {"parameter": dict(call.module.named_parameters()), "buffer": call.buffers}
    for role, tensors in state.items() if not shown.is_conclusive else ():
        for name, tensor in tensors.items():
            if (bits := bits_in(tensor)) & (NAN if role == "buffer" else ~0):  # buffers may hold Inf on purpose
                return role, name, bits
    return "", "", 0


def _origin(call: Call, phase: Stage, bits: int) -> Origin:
    kind = type(call.module).__name__
    compiled = "it ran in a compiled graph, which only shows tensors; replayed uncompiled" if call.compiled else ""
    return Origin(call.path, kind, phase, call.number, call.pass_number, in_words(bits), note=compiled)


def _paths(calls: list[Call]) -> dict[int, str]:
    return {id(call.module): call.path for call in calls}
