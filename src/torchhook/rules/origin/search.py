"""Which call of a pass is at fault: the marks tell who may be, and a replay who is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor, nn

from torchhook.core.selection import plain
from torchhook.core.torch_internals import own_parameters
from torchhook.rules.origin.calls import BAD, DOWN, NAN, Call, bits_in, in_words
from torchhook.rules.origin.origin import Origin, Phase
from torchhook.rules.origin.replay import Shown, replay_call


class Hit(NamedTuple):
    """What was found: where it began, in which call, and the calls (path and number) that passed it on."""

    origin: Origin
    call: Call | None
    affected: list[tuple[str, int]]


class Arrival(NamedTuple):
    """A gradient that came."""

    port: str
    path: str
    number: int
    pass_number: int
    call: Call | None  # unless it is a parameter's, or of a pass that is not kept any more
    gradient: Tensor

    @property
    def leaves_model(self) -> bool:
        """Whether somebody outside uses it: an optimizer, or whoever made the inputs."""
        is_outermost = not self.path if self.call is None else self.call.parent is None
        return self.port == "param_grad" or (self.port == "grad_input" and is_outermost)


def in_forward(calls: list[Call], top: Call, masking: set[str]) -> Hit | None:
    """Where it began in a forward whose output, that of `top`, is not finite; None if that is but masks.

    `masking` are the paths of the calls that are known to mask.
    """
    want = BAD if top.bits & BAD else DOWN
    made = makers(calls, want)
    if want == DOWN and {call.path for call in made} <= masking:
        return None
    first = made[0] if made else top
    later = [call for call in calls if call.begun > first.ended]
    # If it was made again later, or is hidden at times, or if -Inf came in, then only the whole forward can tell.
    is_sure = not first.input_bits and all(call.input_bits & want for call in later)
    call, shown = _replayed([first, top] if is_sure else [top, first], calls)
    if want == DOWN and shown.step is None:
        masking.update(call.path for call in made)
        return None
    if shown.blank:
        return None
    return _hit(call if shown.told else first, shown, calls)


def in_unfinished(calls: list[Call]) -> Hit | None:
    """Where it began in a forward that raised."""
    made = makers(calls, BAD)
    return _hit(made[0], replay_call(made[0], calls), calls) if made else None


def in_backward(broken: list[tuple[Arrival, int]], calls: list[Call], parameters: Mapping[str, nn.Parameter]) -> Hit:
    """Where it began in a backward, given the gradients that are not finite, in the order in which they came."""
    first, bits = broken[0]
    suspects, after = _suspects(broken, calls, parameters)
    call: Call | None = first.call
    if suspects:
        call, shown = _replayed([*suspects, *calls[-1:]], calls, backward=True)
        call = _inside(call, shown, calls) if shown.told else suspects[-1]
        if first.port == "param_grad" and not shown.told:
            shown = Shown(note=f"{shown.note}; perhaps the .grad of {first.path!r} held it before")
        origin = replace(_origin(call, "backward", bits), after="" if shown.told else after).shown(shown, _paths(calls))
    elif call is not None:
        call = [call, *call.ancestors][-1]
        came_with = "the gradient of the output, which the loss made,"
        origin = replace(_origin(call, "backward", bits), came_with=came_with)
    else:
        note = "not replayed: another pass began before this backward"
        origin = Origin("", "", "backward", 0, first.pass_number, in_words(bits), after=first.path, note=note)
    passed = dict.fromkeys((known.path, known.number) for known, _ in broken if known.port == "grad_output")
    return Hit(origin, call, [place for place in passed if place != (origin.path, origin.call)])


def makers(calls: list[Call], want: int) -> list[Call]:
    """The calls that made it of what had none, the innermost ones, unless one around them hid it again."""
    made = [call for call in calls if call.bits & want and not call.input_bits & want]
    seen = [call for call in made if all(around.bits & want or not around.ended for around in call.ancestors)]
    return [call for call in seen if not any(call in other.ancestors for other in seen)]


def _suspects(
    broken: list[tuple[Arrival, int]], calls: list[Call], parameters: Mapping[str, nn.Parameter]
) -> tuple[list[Call], str]:
    """The calls whose backward may have made the first of the gradients, and the call whose output that is of."""
    first, _ = broken[0]
    if first.port == "param_grad":
        it = parameters.get(first.path)
        owners = [call for call in calls if any(known is it for known in own_parameters(call.module).values())]
        return owners[::-1] or calls[-1:], ""
    if first.port == "grad_input" or first.call is None:
        return [first.call] if first.call else [], ""
    given = [known.call for known, _ in broken if known.port == "grad_output" and known.call]
    inner, around = first.call, first.call.parent
    while around in given:  # what its parent returns is the same, and was not made by it either
        inner, around = around, around.parent
    if around is None:
        return [], ""
    later = [call for call in calls if call.parent is around and call.begun > inner.ended]
    return [*sorted(later, key=lambda call: call.begun)[:1], around], inner.path


def _replayed(suspects: list[Call], calls: list[Call], backward: bool = False) -> tuple[Call, Shown]:
    """The first of `suspects` whose replay tells something, and what; else what another says, or the first."""
    silent: list[tuple[Call, Shown]] = []
    for call in dict.fromkeys(suspects):
        shown = replay_call(call, calls, backward)
        if shown.told:
            return call, shown
        silent.append((call, shown))
    return next((pair for pair in silent if pair[1].blank), silent[0])


def _hit(call: Call, shown: Shown, calls: list[Call]) -> Hit:
    """The place in the forward of `call` that its replay showed, or, if it did not, the call itself."""
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
    """The call, of `call` and those inside it, in whose forward the op is that a replay of `call` showed."""
    where = shown.step.where if shown.step else None
    if where is None:
        return call
    parts = [part for part in calls if part is call or call in part.ancestors]
    same = [part for part in parts if part.module is where.module]
    same.sort(key=lambda part: part.begun)
    return same[where.number] if where.number < len(same) else call


def _broken_state(call: Call, shown: Shown) -> tuple[str, str, int]:
    """A parameter or buffer of `call` that was broken before it: role, name, what it holds. (A replay knows better.)"""
    state: dict[str, Mapping[str, Tensor]] = {"parameter": dict(call.module.named_parameters()), "buffer": call.buffers}
    for role, tensors in state.items() if not shown.told else ():
        for name, tensor in tensors.items():
            if (bits := bits_in(tensor)) & (NAN if role == "buffer" else ~0):  # there are buffers of infinities
                return role, name, bits
    return "", "", 0


def _origin(call: Call, phase: Phase, bits: int) -> Origin:
    kind = type(call.module).__name__
    compiled = "it ran in a compiled graph, which tells tensors alone; replayed uncompiled" if call.compiled else ""
    return Origin(call.path, kind, phase, call.number, call.pass_number, in_words(bits), note=compiled)


def _paths(calls: list[Call]) -> dict[int, str]:
    return {id(call.module): call.path for call in calls}
