"""A call run once more, op by op: which op first made of finite operands what is not finite, and on which line.

It runs on a twin of the module that shares only the memory of the parameters: no gradient, no running statistic and no
hook of ours is touched. A `Tracer` looks at what every op reads and writes. Where NaN or Inf began is settled as they
arise, by following the memory that they lie in, so that what a model hides again is blamed for nothing.
"""

from __future__ import annotations

import copy
import linecache
import math
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise, takewhile
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C._autograd import _get_sequence_nr
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from torchhook.core.shards import is_sharded
from torchhook.core.trees import Address, Arguments, leaves, mapped
from torchhook.origins.calls import BAD, Call, Setting, bits_in, bits_of, buffers_before, marks, merged, used_buffers

_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
_OURS = f"{Path(__file__).parents[1]}{os.sep}"
_CALL = nn.Module._call_impl.__code__
_FSDP = "_get_fsdp_state"  # what modules have that fully_shard made its own
_PLACE = re.compile(r'File "(.+?)", line (\d+)')
_EMPTY = ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided")


class Place(NamedTuple):
    """A line of source."""

    file: str
    number: int

    def __str__(self) -> str:
        code = linecache.getline(self.file, self.number).strip()
        return f"{Path(self.file).name}:{self.number}" + (f": {code}" if code else "")


class Operand(NamedTuple):
    """A tensor that an op was given; `role` and `name` are of one that was there before the call."""

    shape: tuple[int, ...]
    dtype: str
    low: float
    high: float
    bits: int
    source: Step | None  # the op that made it so
    role: str
    name: str


class Where(NamedTuple):
    """In the forward of which module an op is: in which call of it, and after which of its children."""

    module: nn.Module
    number: int
    after: nn.Module | None


@dataclass(eq=False)
class Step:
    """An op that wrote something that is not finite."""

    number: int
    op: str
    operands: list[Operand]
    bits: int  # what it wrote
    fills: bool  # whether it was told to write -Inf, as one masks
    place: Place | None
    where: Where | None
    node: str = ""  # of a backward

    def __post_init__(self) -> None:
        """Settle where it began: what is known of the operands says it."""
        bad = [known for known in self.operands if known.bits & BAD or (known.source and known.source.node)]
        began = [known.source.cause for known in bad if known.source]
        self.culprit = bad[0] if bad and not began else None
        # The op that computed the -Inf, None if (some of) it is a mask.
        self.computed = _first(began) if bad else self._computed()
        self.cause: Step = self.computed or self

    def _computed(self) -> Step | None:
        below = [known.source.computed if known.source else None for known in self.operands if known.bits]
        if self.fills or None in below:
            return None
        return _first(below) or self


class Tracer(TorchDispatchMode):
    """Looks at every op; `known` are the roles and names of the tensors that come from outside, by their memory."""

    def __init__(self, originals: Mapping[int, nn.Module], known: Mapping[int, tuple[str, str]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.originals = originals  # the modules, by the ids of their twins
        self.known = known
        self.writers: dict[int, Step] = {}  # who wrote what is not finite, by memory
        self.blank: set[int] = set()  # memory to which nothing was written
        self.backward = False  # a forward may run inside of some other backward
        self.number = 0
        self.stack: list[tuple[FrameType, nn.Module, int]] = []  # the calls under way
        self.begun: Counter[nn.Module] = Counter()  # how many of each module there were
        self.latest: dict[nn.Module, nn.Module] = {}  # which child ran last
        self.where: dict[int, Where] = {}  # by the number of the node of the graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = leaves((args, kwargs))
        operands = [seen for _, tensor in given if (seen := self.seen(tensor))]  # before it may write to them
        result = func(*args, **kwargs)
        name = ".".join(str(func).split(".")[:2])  # without the overload
        written = [tensor for _, tensor in leaves(result)]
        if name.rpartition(".")[2] in _EMPTY:  # what lies in memory by chance is nobody's fault
            self.blank.update(_memory(tensor.zero_()) for tensor in written)
        elif func._schema.is_mutable:
            self.blank -= {*map(_memory, written)}
        self.number += 1
        self._follow_modules()
        broken = {_memory(tensor): bits for tensor in written if (bits := bits_in(tensor))}
        if broken:
            step = self._step(name, operands, merged(broken.values()), (*args, *kwargs.values()))
            self.writers.update(dict.fromkeys(broken, step))
        return result

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self.stack.clear()  # frames hold all that was computed in them

    def seen(self, tensor: Tensor) -> Operand | None:
        """`tensor` as it is now, None if nothing in it could be NaN or Inf."""
        extremes = [mark.item() for mark in marks(tensor)]
        if not extremes:
            return None
        low, high = (math.nan if value != value else value for value in extremes)  # one NaN, which equals itself
        memory, bits, dtype = _memory(tensor), bits_of(low, high), str(tensor.dtype).removeprefix("torch.")
        source = self.writers.get(memory) if bits else None
        return Operand(tuple(tensor.shape), dtype, low, high, bits, source, *self.known.get(memory, ("", "")))

    def _step(self, name: str, operands: list[Operand], bits: int, arguments: tuple[Any, ...]) -> Step:
        fills = any(isinstance(value, float) and value == -torch.inf for value in arguments)
        node: Any = torch._C._current_autograd_node() if self.backward else None
        step = self.number, name, operands, bits, fills
        if node is None:
            return Step(*step, _chosen(_frames()), self._here())
        text = "".join(node.metadata.get("traceback_", ()))
        places = [Place(file, int(number)) for file, number in _PLACE.findall(text)]
        return Step(*step, _chosen(places[::-1]), self.where.get(node._sequence_nr()), node.name())

    def _here(self) -> Where | None:
        if not self.stack:
            return None
        _, module, number = self.stack[-1]
        return Where(module, number, self.latest.get(module))

    def _follow_modules(self) -> None:
        """Note whose forward is running, and which of its children ran before."""
        frames: list[FrameType] = []
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            if frame.f_code is _CALL and id(frame.f_locals["self"]) in self.originals:
                frames.insert(0, frame)
            frame = frame.f_back
        known = {id(frame): (module, number) for frame, module, number in self.stack}
        self.stack = [(frame, *(known.get(id(frame)) or self._begun(frame))) for frame in frames]
        for (_, outer, _), (_, inner, _) in pairwise(self.stack):
            self.latest[outer] = inner
        if (here := self._here()) is not None:  # the op that comes after its node was made is its op
            self.where.setdefault(_get_sequence_nr() - 1, here)

    def _begun(self, frame: FrameType) -> tuple[nn.Module, int]:
        module = self.originals[id(frame.f_locals["self"])]
        self.begun[module] += 1
        self.latest.pop(module, None)
        return module, self.begun[module] - 1


class Detached(TorchFunctionMode):
    """Lets any tensor be copied, also one that is part of a graph."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__:
            tensor, memo = args
            return memo.setdefault(id(tensor), tensor.detach().clone())
        return func(*args, **(kwargs or {}))


class Shown(NamedTuple):
    """What a replay showed: the op at fault, or what came in with it already; otherwise why it did not."""

    step: Step | None = None
    culprit: Operand | None = None
    masked: bool = False  # nobody is, there are but masks
    blank: bool = False  # it did not, but there is memory to which nothing was written
    note: str = ""

    @property
    def told(self) -> bool:
        """Whether it did."""
        return self.step is not None or self.culprit is not None or self.masked


def replay_call(call: Call, calls: list[Call], backward: bool = False) -> Shown:
    """Run `call` once more, on a twin of its module; `calls` are all of its pass."""
    try:
        if reason := _refusal(call.module):
            return Shown(note=f"not replayed: {reason}")
        twin = twin_of(call.module)
        fill(twin, buffers_before(call, calls))
        pairs = zip(twin.modules(), call.module.modules(), strict=True)
        originals = {id(module): original for module, original in pairs}
        return show(twin, originals, call.arguments, call.wanted, call.setting, call.grads if backward else None)
    except Exception as error:
        return Shown(note=f"its replay raised {type(error).__name__}: {error}")


def twin_of(module: nn.Module) -> nn.Module:
    """A copy of `module`, its parameters in the same memory."""
    with torch.inference_mode(False), Detached():
        shared: dict[int, Any] = {}
        for parameter in module.parameters():
            shared[id(parameter)] = same = nn.Parameter(parameter.detach(), parameter.requires_grad)
            vars(same).update(vars(parameter))  # what people write on them
        return copy.deepcopy(module, shared)


def state_of(module: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of `module`, by their names."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def fill(twin: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Give `twin` these values of parameters and buffers."""
    own = state_of(twin)
    for name, tensor in state.items():
        own[name].data = tensor.clone()


def show(
    twin: nn.Module,
    originals: Mapping[int, nn.Module],
    arguments: Arguments,
    wanted: list[bool],
    setting: Setting,
    grads: Mapping[Address, Tensor] | None,
) -> Shown:
    """Run `twin` under a tracer, and if there are `grads` its backward, too; see where NaN and Inf began."""
    backward = grads is not None
    with torch.inference_mode(setting.inference), Detached():
        given = copy.deepcopy(arguments)
    inputs: list[Tensor] = []
    if backward:
        with torch.enable_grad():  # a call without it is the first run of a reentrant checkpoint
            given = mapped(_requiring(inputs, wanted if setting.grad else [True] * len(wanted)), given, faithful=True)
    known = {_memory(tensor): ("argument", _spelt(address)) for address, tensor in leaves(given)}
    known |= {_memory(tensor): ("parameter", name) for name, tensor in twin.named_parameters()}
    for path, part in twin.named_modules():
        for name, tensor in used_buffers(part).items():
            known[_memory(tensor)] = "buffer", f"{path}.{name}".strip(".")
    tracer = Tracer(originals, known)
    with tracer, _eager(), torch.autograd.set_detect_anomaly(backward, check_nan=False):
        with setting._replace(grad=setting.grad or backward).restored():
            result = twin(*given.args, **given.kwargs)
        if grads is not None:
            tracer.backward = True
            result = _differentiated(result, grads, [*inputs, *twin.parameters()])
    found = [seen for _, tensor in leaves(result) if (seen := tracer.seen(tensor)) and seen.bits]
    if not found and any(_memory(tensor) in tracer.blank for _, tensor in leaves(result)):
        return Shown(blank=True)
    return _judged(found, backward)


def _judged(found: list[Operand], backward: bool) -> Shown:
    """Where that began which is not finite in the end."""
    bad = [seen for seen in found if backward or seen.bits & BAD]
    if not found:
        return Shown(note="its replay did not show it again")
    if not bad:
        computed = [seen.source.computed if seen.source else None for seen in found]
        return Shown(masked=True) if None in computed else Shown(_first(computed))
    step = _first([seen.source.cause for seen in bad if seen.source])
    return Shown(step, bad[0] if step is None else step.culprit)


def _differentiated(result: Any, grads: Mapping[Address, Tensor], wrt: list[Tensor]) -> list[Tensor | None]:
    reached = [(tensor, grads[at]) for at, tensor in leaves(result) if at in grads and tensor.requires_grad]
    outputs, gradients = zip(*reached, strict=True)
    wrt = [tensor for tensor in wrt if tensor.requires_grad]
    return list(torch.autograd.grad(outputs, wrt, gradients, allow_unused=True))


def _requiring(inputs: list[Tensor], wanted: list[bool]) -> Callable[[Tensor], Tensor]:
    """Makes arguments require gradients as they did; what the module is given are no leaves, it may overwrite them."""
    flags = iter(wanted)

    def require(tensor: Tensor) -> Tensor:
        if not next(flags, False) or not tensor.is_floating_point():
            return tensor
        inputs.append(tensor.requires_grad_())
        return tensor.clone()

    return require


def _refusal(module: nn.Module) -> str:
    """Why `module` must not be run by this rank alone."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    together = any(isinstance(part, nn.SyncBatchNorm) or hasattr(part, _FSDP) for part in module.modules())
    if (distributed and together) or any(map(is_sharded, module.parameters())):
        return "all ranks compute it together, and a rank that does so alone would wait for ever"
    return ""


def _eager() -> AbstractContextManager[Any]:
    """Nothing is compiled, or runs as it was compiled: there the ops have no lines."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def _first(steps: list[Step | None] | list[Step]) -> Step | None:
    return min(filter(None, steps), key=lambda step: step.number, default=None)


def _memory(tensor: Tensor) -> int:
    """What tells whether two tensors share memory."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except RuntimeError:  # sparse and the like have none
        return id(tensor)


def _spelt(address: Address) -> str:
    """The name of an argument: its place among the positional ones, or its keyword, and what leads on."""
    (_, name), rest = address[:2], address[2:]
    return str(name) + "".join(f"[{key!r}]" for key in rest)


def _frames() -> list[Place]:
    """The lines that led here from the twin's call, the innermost first."""
    places: list[Place] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    while frame is not None:
        if frame.f_code.co_name != "__torch_function__":  # a mode that looks on is no part of the way
            places.append(Place(frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return places


def _chosen(places: list[Place]) -> Place | None:
    """The innermost line of a user's, or that of torch's module if there is none."""
    places = list(takewhile(lambda place: not place.file.startswith(_OURS), places))
    users = [place for place in places if not place.file.startswith(_TORCH)]
    modules = [place for place in places if "modules" in place.file and not place.file.endswith("module.py")]
    return next(iter(users or modules or places), None)
