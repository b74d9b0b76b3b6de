"""The only file that uses private names of torch: each of them is looked up here, and nowhere else.

Each name has a fallback made of public torch, or a refusal that says what is missing. `FALLBACKS` lists the names that
this torch lacks, with what happens instead; `torchhook doctor` prints it. To find out whether a private name causes a
fault, hide it: ``TORCHHOOK_HIDE="torch._lazy_clone tensor._base" python script.py`` (or ``TORCHHOOK_HIDE=all``).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from importlib import import_module
from operator import attrgetter, methodcaller
from types import CodeType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

import torch
from torch import Tensor, nn

TESTED = "2.11 and 2.13"
"""The versions of torch that the private names were tested with."""

NAMES: list[str] = []
"""All private names that are looked up."""

FALLBACKS: dict[str, str] = {}
"""The private names that this torch lacks, and what torchhook does without them."""

_HIDDEN = os.environ.get("TORCHHOOK_HIDE", "").split()
_MISSING: Any = object()


class MissingError(RuntimeError):
    """Something needs a private name that this torch lacks, and public torch cannot replace it."""

    def __init__(self, name: str, purpose: str) -> None:
        super().__init__(
            f"{purpose} needs {name}, which torch {torch.__version__} lacks; torchhook was tested with torch {TESTED}"
        )


def _is_hidden(name: str) -> bool:
    return name in _HIDDEN or "all" in _HIDDEN


def _found(name: str, look_up: Callable[[], Any], instead: str) -> Any:
    """What `look_up` returns, or `_MISSING`; then what happens `instead` is noted in `FALLBACKS`."""
    NAMES.append(name)
    if not _is_hidden(name):
        with suppress(AttributeError, ImportError, KeyError):
            return look_up()
    FALLBACKS[name] = instead
    return _MISSING


def _of_torch(path: str, fallback: Any, instead: str) -> Any:
    """The object at ``module.name``, or `fallback`; the module is imported only if torch has not done so yet."""

    def look_up() -> Any:
        module, _, name = path.rpartition(".")
        owner = sys.modules.get(module)
        if owner is None and module.startswith("torch._C."):
            owner = attrgetter(module.removeprefix("torch."))(torch)
        return getattr(owner if owner is not None else import_module(module), name)

    found = _found(path, look_up, instead)
    return fallback if found is _MISSING else found


def _attribute(owner: str, name: str, probe: Any, fallback: Callable[[Any], Any], instead: str) -> Callable[[Any], Any]:
    """A getter of the private attribute `name` of objects like `probe`, or `fallback`."""
    found = _found(f"{owner}.{name}", lambda: getattr(probe, name), instead)
    return fallback if found is _MISSING else attrgetter(name)


def _late(name: str, instead: str) -> bool:
    """Whether to look for an attribute that only some objects have, such as compiled modules."""
    NAMES.append(name)
    if _is_hidden(name):
        FALLBACKS[name] = instead
    return not _is_hidden(name)


def _refusal(name: str, purpose: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise MissingError(name, purpose)

    return refuse


# --- tensors


def _detached(x: Any) -> Tensor:
    if not isinstance(x, Tensor):
        raise TypeError(f"expected a tensor, not a {type(x).__name__}")
    return x.detach()


_tensor = torch.empty(0)

lazy_clone: Callable[[Tensor], Tensor] = _of_torch("torch._lazy_clone", Tensor.clone, "values are copied immediately")

tensor_data: Callable[[Any], Tensor] = _found(
    "torch._C.TensorBase.data", lambda: vars(torch._C.TensorBase)["data"].__get__, "values are detached instead"
)
if tensor_data is _MISSING:
    tensor_data = _detached

version_of: Callable[[Tensor], int] = _attribute(
    "tensor", "_version", _tensor, lambda _: 0, "in-place writes are not detected, and copy='reference' is refused"
)
counts_versions = "tensor._version" not in FALLBACKS

base_of: Callable[[Tensor], Tensor | None] = _attribute(
    "tensor", "_base", _tensor, lambda _: None, "gradients of views that are overwritten in place are missed"
)

sparse_values: Callable[[Tensor], Tensor] = (
    methodcaller("_values")
    if _found("tensor._values", lambda: _tensor._values, "sparse tensors are coalesced first") is not _MISSING
    else lambda x: x.coalesce().values()
)
sparse_indices: Callable[[Tensor], Tensor] = (
    methodcaller("_indices")
    if _found("tensor._indices", lambda: _tensor._indices, "sparse tensors are coalesced first") is not _MISSING
    else lambda x: x.coalesce().indices()
)

parameter_hooks: Callable[[Tensor], Any] = _attribute(
    "tensor", "_backward_hooks", _tensor, lambda _: None, "hooks on parameters are not listed"
)
accumulate_hooks: Callable[[Tensor], Any] = _attribute(
    "tensor", "_post_accumulate_grad_hooks", _tensor, lambda _: None, "hooks on parameter gradients are not listed"
)


def _slow_norms(tensors: list[Tensor], order: float, dtype: torch.dtype | None = None) -> list[Tensor]:
    return [torch.linalg.vector_norm(x, order, dtype=dtype) for x in tensors]


def _slow_add(tensors: list[Tensor], others: list[Tensor]) -> None:
    for x, other in zip(tensors, others, strict=True):
        x.add_(other)


def _slow_subtract(tensors: list[Tensor], others: list[Tensor]) -> None:
    for x, other in zip(tensors, others, strict=True):
        x.sub_(other)


def _slow_negate(tensors: list[Tensor]) -> None:
    for x in tensors:
        x.neg_()


_ONE_BY_ONE = "parameters are measured one by one, which is slower"
norms_of_each = _of_torch("torch._foreach_norm", _slow_norms, _ONE_BY_ONE)
add_to_each = _of_torch("torch._foreach_add_", _slow_add, _ONE_BY_ONE)
subtract_from_each = _of_torch("torch._foreach_sub_", _slow_subtract, _ONE_BY_ONE)
negate_each = _of_torch("torch._foreach_neg_", _slow_negate, _ONE_BY_ONE)

# data_ptr would make a real copy of a copy on write, since its caller might write to that address.
storage_address: Callable[[Tensor], int] = _of_torch(
    "torch._C._data_address", lambda x: x.untyped_storage().data_ptr(), "measured values are copied first"
)
storage_identity: Callable[[Any], int] = _attribute(
    "storage",
    "_cdata",
    _tensor.untyped_storage(),
    lambda storage: storage.data_ptr(),
    "storages are identified by their address",
)

# --- modules

_module = nn.Module()

submodules: Callable[[nn.Module], dict[str, nn.Module | None]] = _attribute(
    "module", "_modules", _module, lambda module: dict(module.named_children()), "modules are walked more slowly"
)
own_parameters: Callable[[nn.Module], dict[str, nn.Parameter | None]] = _attribute(
    "module",
    "_parameters",
    _module,
    lambda module: dict(module.named_parameters(recurse=False, remove_duplicate=False)),
    "parameters are found more slowly",
)
own_buffers: Callable[[nn.Module], dict[str, Tensor | None]] = _attribute(
    "module",
    "_buffers",
    _module,
    lambda module: dict(module.named_buffers(recurse=False, remove_duplicate=False)),
    "buffers are restored by value only",
)


def _hooks(name: str) -> Callable[[nn.Module], dict[int, Any]]:
    return _attribute("module", name, _module, lambda _: {}, "hooks of other libraries are not listed")


forward_hooks = _hooks("_forward_hooks")
forward_pre_hooks = _hooks("_forward_pre_hooks")
backward_hooks = _hooks("_backward_hooks")
backward_pre_hooks = _hooks("_backward_pre_hooks")

can_place_hooks = "module._forward_hooks" not in FALLBACKS

_BY_HOOKS = "passes are followed with hooks, and stop=True is refused"
call_impl: Callable[[nn.Module], Callable[..., Any]] = _attribute(
    "module", "_call_impl", _module, _refusal("module._call_impl", "wrapping a model's call"), _BY_HOOKS
)


def traced_call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call `module` without going through the slot, in a way that a compiler can trace."""
    return module._call_impl(*args, **kwargs)


CALL_SLOT = "_compiled_call_impl"
"""Where ``Module.compile`` puts the compiled call, which torch runs in place of the module's own."""
_slot = _found("module._compiled_call_impl", lambda: getattr(nn.Module, CALL_SLOT), _BY_HOOKS)
can_wrap_calls = _slot is not _MISSING and "module._call_impl" not in FALLBACKS


def _code_of(name: str) -> CodeType | None:
    found = _found(
        f"module.{name}.__code__",
        lambda: getattr(nn.Module, name).__code__,
        "calls of copies are not distinguished from calls of the model",
    )
    return None if found is _MISSING else found


WRAPPED_CALL_CODE = _code_of("_wrapped_call_impl")

_OWN_HOOKS = ("_forward_pre_hooks", "_backward_pre_hooks", "_backward_hooks")
_HOOKS_ON_ALL = tuple(f"_global{name}" for name in ("_forward_hooks", *_OWN_HOOKS))


def _where_hooks_on_all_are() -> Any:
    """The module of torch that has the hooks on all modules; AttributeError if a call has other kinds than we know."""
    kinds = {name for name in nn.Module._call_impl.__code__.co_names if name.endswith("_hooks")}
    if kinds != {"_forward_hooks", *_OWN_HOOKS, *_HOOKS_ON_ALL}:
        raise AttributeError("_call_impl")
    return nn.modules.module


_every: Any = _found("module._call_impl.__code__", _where_hooks_on_all_are, "calls take a longer way to our hooks")
_knows_calls = _every is not _MISSING and can_wrap_calls and can_place_hooks and WRAPPED_CALL_CODE is not None
_impl = getattr(nn.Module, "_call_impl", None)


def is_called_by_torch(module: nn.Module) -> bool:
    """Whether torch itself calls the forward and the hooks of `module`, in the way that we know."""
    kind: Any = type(module)
    return _knows_calls and kind._call_impl is _impl and "_call_impl" not in module.__dict__


def calls_only(module: nn.Module, number: int) -> bool:
    """Whether a call of `module` consists of its forward and the forward hook with this number."""
    own = module.__dict__
    try:
        hooks = own["_forward_hooks"]
        if own["_forward_pre_hooks"] or own["_backward_pre_hooks"] or own["_backward_hooks"]:
            return False
    except KeyError:  # its class keeps them in a place of its own
        return False
    if len(hooks) != 1 or number not in hooks or is_jit_tracing() or not is_called_by_torch(module):
        return False
    return not (
        _every._global_forward_hooks
        or _every._global_forward_pre_hooks
        or _every._global_backward_pre_hooks
        or _every._global_backward_hooks
    )


_marks_replicas = _late("module._is_replica", "replicas of DataParallel are taken for copies of the model")


def is_replica(module: nn.Module) -> bool:
    """Whether `module` is a replica that DataParallel made for one forward on one device."""
    return _marks_replicas and bool(module.__dict__.get("_is_replica", False))


def _classes(path: str, *public: str) -> Any:
    """A private base class of layers, or the public classes derived from it."""
    fallback = tuple(getattr(nn, name) for name in public)
    return _of_torch(path, fallback, "layers are recognised by their public classes")


_1D_TO_3D = ("1d", "2d", "3d")
CONVOLUTIONS = _classes(
    "torch.nn.modules.conv._ConvNd", *(f"Conv{n}" for n in _1D_TO_3D), *(f"ConvTranspose{n}" for n in _1D_TO_3D)
)
TRANSPOSED_CONVOLUTIONS = _classes("torch.nn.modules.conv._ConvTransposeNd", *(f"ConvTranspose{n}" for n in _1D_TO_3D))
BATCH_NORMS = _classes("torch.nn.modules.batchnorm._BatchNorm", *(f"BatchNorm{n}" for n in _1D_TO_3D), "SyncBatchNorm")
BATCH_AND_INSTANCE_NORMS = _classes(
    "torch.nn.modules.batchnorm._NormBase",
    *(f"BatchNorm{n}" for n in _1D_TO_3D),
    "SyncBatchNorm",
    *(f"InstanceNorm{n}" for n in _1D_TO_3D),
)
DROPOUTS = _classes(
    "torch.nn.modules.dropout._DropoutNd",
    "Dropout",
    *(f"Dropout{n}" for n in _1D_TO_3D),
    "AlphaDropout",
    "FeatureAlphaDropout",
)
_POOLING = "torch.nn.modules.pooling"
POOLINGS: tuple[Any, ...] = (
    _classes(f"{_POOLING}._MaxPoolNd", *(f"MaxPool{n}" for n in _1D_TO_3D)),
    _classes(f"{_POOLING}._AvgPoolNd", *(f"AvgPool{n}" for n in _1D_TO_3D)),
    _classes(f"{_POOLING}._AdaptiveMaxPoolNd", *(f"AdaptiveMaxPool{n}" for n in _1D_TO_3D)),
    _classes(f"{_POOLING}._AdaptiveAvgPoolNd", *(f"AdaptiveAvgPool{n}" for n in _1D_TO_3D)),
)

# --- autograd

graph_task_id: Callable[[], int] = _of_torch(
    "torch._C._current_graph_task_id", lambda: -1, "calls that a checkpoint repeats count as calls of the forward"
)
current_node: Callable[[], Any] = _of_torch(
    "torch._C._current_autograd_node", lambda: None, "the origin of a NaN in the backward is reported without its line"
)
sequence_number: Callable[[], int] = _of_torch(
    "torch._C._autograd._get_sequence_nr",
    lambda: 0,
    "the origin of a NaN in the backward is reported without its module",
)


with torch.inference_mode(False), torch.enable_grad():
    _node: Any = torch.ones(1, requires_grad=True).exp().grad_fn
_numbers_nodes = _found(
    "node._sequence_nr",
    lambda: _node._sequence_nr,
    "the origin of a NaN in the backward is reported without its module",
)
_shows_saved = _found("node._saved_result", lambda: _node._saved_result, "the terms of a loss are not recognised")


def sequence_number_of(node: Any) -> int | None:
    """The number that autograd gave to a node of its graph."""
    number = None if _numbers_nodes is _MISSING else getattr(node, "_sequence_nr", None)
    return None if number is None else int(number())


def saved_by(node: Any, name: str) -> Any:
    """What a node of autograd's graph has kept for the backward under `name`; None if it keeps nothing there."""
    if _shows_saved is _MISSING:
        return None
    try:
        return getattr(node, f"_saved_{name}", None)
    except RuntimeError:  # freed by a backward, or changed in place since
        return None


_queue = _found(
    "torch.autograd.Variable._execution_engine",
    lambda: torch.autograd.Variable._execution_engine.queue_callback,
    "each gradient is checked for NaN as it arrives, which waits for the device",
)
after_backward: Callable[[Callable[[], None]], None] = (lambda act: act()) if _queue is _MISSING else _queue
"""Calls a function at the end of the backward that is running; if torch cannot do that, immediately."""


_in_tls = _of_torch("torch._C._is_key_in_tls", None, "backwards of other threads are also seen")
_from_tls = _of_torch("torch._C._get_obj_in_tls", None, "backwards of other threads are also seen")


def context_of_backward() -> Any | None:
    """The contextvars of the thread that called backward, if autograd's own threads know them (torch 2.13)."""
    if _in_tls is None or _from_tls is None or not _in_tls("context"):
        return None
    return _from_tls("context")


# --- transforms, tracing and compiling

transform_level: Callable[[], int | None] = _of_torch(
    "torch._C._functorch.maybe_current_level", lambda: None, "taps inside torch.func are not refused in advance"
)
is_transformed_tensor: Callable[[Tensor], bool] = _of_torch(
    "torch._C._functorch.is_functorch_wrapped_tensor", lambda _: False, "tensors inside torch.func are not refused"
)
is_jit_tracing: Callable[[], bool] = _of_torch(
    "torch._C._is_tracing", getattr(torch.jit, "is_tracing", bool), "torch.jit.is_tracing is called instead"
)


def is_transformed() -> bool:
    """Whether this runs inside torch.func, torch.export or torch.jit.trace, whose tensors are meaningless outside."""
    return transform_level() is not None or torch.compiler.is_exporting() or is_jit_tracing()


if TYPE_CHECKING:
    from torch.utils._python_dispatch import TorchDispatchMode

    DispatchMode = TorchDispatchMode
else:
    DispatchMode = _of_torch("torch.utils._python_dispatch.TorchDispatchMode", object, "operations cannot be followed")
modes_disabled: Callable[[], AbstractContextManager[Any]] = _of_torch(
    "torch.utils._python_dispatch._disable_current_modes", nullcontext, "kernels are loaded under the modes in force"
)


COMPILER_LOG = "torch._dynamo"
"""The name of the log in which torch's compiler makes remarks."""


def is_dynamo_loaded() -> bool:
    """Whether anything can have been compiled. This must not import the compiler."""
    return "torch._dynamo" in sys.modules


_COUNTERS = "torch._dynamo.utils.counters"
_WITHOUT_COUNTERS = "as soon as the compiler is loaded, any module may count as compiled"
_counts_graphs = _late(_COUNTERS, _WITHOUT_COUNTERS)


def graph_count() -> int:
    """How many graphs were compiled in this process; 1 if that is unknown."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is None:
        return 0
    with suppress(AttributeError):
        if _counts_graphs:
            return int(dynamo.utils.counters["stats"]["unique_graphs"])
    FALLBACKS[_COUNTERS] = _WITHOUT_COUNTERS
    return 1


_marks_constants = _late("function._dynamo_marked_constant", "importing torchhook also imports torch's compiler")


def marked_constant(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a compiler call `function` while it traces, as ``torch.compiler.assume_constant_result`` does."""
    if not _marks_constants:
        return cast("Callable[..., Any]", torch.compiler.assume_constant_result(function))
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]  # functions take attributes
    return function


_EVAL_FRAME = "torch._C._dynamo.eval_frame"
_ALONE = "where a compiler gives up a frame around modules, it compiles their hooks alone, which then miss values"
_set_strategy: Any = _of_torch(f"{_EVAL_FRAME}.set_code_exec_strategy", None, _ALONE)
_Strategy: Any = _of_torch(f"{_EVAL_FRAME}._FrameExecStrategy", None, _ALONE)
_Action: Any = _of_torch(f"{_EVAL_FRAME}._FrameAction", None, _ALONE)
_Function = TypeVar("_Function", bound=Callable[..., Any])


def not_alone(function: _Function, but_inside: bool = False) -> _Function:
    """Let a compiler trace `function` only as a part of a larger graph; what it calls, too, unless `but_inside`."""
    if None not in (_set_strategy, _Strategy, _Action):
        code = cast("Any", function).__code__
        _set_strategy(code, _Strategy(_Action.SKIP, _Action.DEFAULT if but_inside else _Action.SKIP))
    return function


_TRANSLATOR = "torch._dynamo.symbolic_convert.InstructionTranslator.current_tx"
_WITHOUT_TRACES = "compiled graphs keep each value by an op, not as a further result"
_knows_traces = _late(_TRANSLATOR, _WITHOUT_TRACES)


def graph_under_trace() -> Any:
    """What the compiler makes a graph in; None if that is unknown, or cannot have further results, as for export."""
    if not _knows_traces:
        return None
    try:
        output = sys.modules["torch._dynamo.symbolic_convert"].InstructionTranslator.current_tx().output
        return None if output.export or not output.is_root_tracer else output
    except (AttributeError, KeyError):
        FALLBACKS[_TRANSLATOR] = _WITHOUT_TRACES
        return None


def in_body_under_trace() -> bool:
    """Whether the compiler is inside the body of an op, such as that of a checkpoint."""
    return not graph_under_trace().is_root_tracer()


_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
WRAPPER_NAMES = frozenset(
    name for name in _WRAPPERS if _late(f"module.{name}", "paths inside such a wrapper contain its private name")
)
"""The attributes in which torch's wrappers hold the module that they wrap."""


def compiled_inside(module: nn.Module) -> nn.Module | None:
    """The module that ``torch.compile(module)`` wraps, or None if `module` is not such a wrapper."""
    if type(module).__name__ != "OptimizedModule" or "_orig_mod" not in WRAPPER_NAMES:
        return None
    return submodules(module).get("_orig_mod")


_names_compiled = _late("function._torchdynamo_orig_callable", "compiled calls are treated like plain ones")
_names_backends = _late("function._torchdynamo_orig_backend", "wrapped backends of torch.compile are not recognised")


def is_compiled_call(call: Any) -> bool:
    """Whether `call` was made by torch.compile."""
    return _names_compiled and hasattr(call, "_torchdynamo_orig_callable")


def backend_of(context: Any) -> Any:
    """The backend that a context of torch.compile calls, without the wrappers around it."""
    backend = context.callback
    while _names_backends and hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
    return backend


_effects = _of_torch("torch._library.effects.EffectType", None, "taps inside compiled graphs are refused")
_registry = _of_torch("torch._library.simple_registry.singleton", None, "taps inside compiled graphs are refused")
can_order_ops = _effects is not None and _registry is not None


def keep_in_order(op: str) -> None:
    """Make compilers run `op` in order and never leave it out. (The public function would import the compiler.)"""
    if can_order_ops:
        _registry.find(op).effect.register(_effects.ORDERED)


_knows_schemas = _found(
    "op._schema", lambda: torch.ops.aten.add.Tensor._schema.is_mutable, "operations in place are recognised by name"
)


def is_in_place(op: Any) -> bool:
    """Whether an operation, as a dispatch mode receives it, writes to its arguments.

    >>> is_in_place(torch.ops.aten.add_.Tensor), is_in_place(torch.ops.aten.add.Tensor)
    (True, False)
    """
    if _knows_schemas is _MISSING:
        _, name, overload, *_ = (*str(op).split("."), "")
        return name.endswith("_") or overload.endswith("out")
    return bool(op._schema.is_mutable)


# --- optimizers and scalers

_SCALER = torch.amp.GradScaler
_reads_scale = _found("scaler._scale", lambda: _SCALER("cpu")._scale, "reading the loss scale waits for the device")
_maybe_step = _found(
    "scaler._maybe_opt_step", lambda: _SCALER._maybe_opt_step.__code__, "scaled steps are recognised by GradScaler.step"
)
SCALER_STEPS: tuple[CodeType, ...] = tuple(
    code for code in (_SCALER.step.__code__, _maybe_step) if code is not _MISSING
)
"""The code objects of a GradScaler that call an optimizer."""


def scale_of(scaler: Any) -> Tensor | None:
    """The loss scale of a GradScaler, on its device; None before its first use."""
    if _reads_scale is _MISSING:
        return torch.tensor(float(scaler.get_scale()))
    scale: Tensor | None = scaler._scale
    return scale


# --- data

LOADER_ITERATOR: Any = _of_torch(
    "torch.utils.data.dataloader._BaseDataLoaderIter", None, "run does not see which batches a script takes"
)
"""The class of a DataLoader's iterators."""

# --- distributed


_STORE = "torch.distributed.distributed_c10d._get_default_store"
_WITHOUT_STORE = "full=True is refused where several ranks run, and each rank names its own run"
NAMES.append(_STORE)
if _is_hidden(_STORE):
    FALLBACKS[_STORE] = _WITHOUT_STORE


def default_store() -> Any:
    """The key-value store of the default process group; looked up late, since its module takes long to import."""
    from torch.distributed import distributed_c10d

    found = None if _is_hidden(_STORE) else getattr(distributed_c10d, "_get_default_store", None)
    if found is None:
        FALLBACKS[_STORE] = _WITHOUT_STORE
        raise MissingError(_STORE, "agreeing with other ranks")
    return found()


_knows_fsdp = _late("module._get_fsdp_state", "parameters that fully_shard has gathered are not recognised")


def is_fsdp_module(module: nn.Module) -> bool:
    """Whether fully_shard manages `module`."""
    return _knows_fsdp and hasattr(module, "_get_fsdp_state")


def fsdp_parameters(module: nn.Module) -> list[tuple[Any, nn.Parameter]]:
    """The gathered and the sharded form of every parameter that fully_shard manages for `module`."""
    state = cast("Any", module)._get_fsdp_state() if is_fsdp_module(module) else None
    groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    managed = [known for group in groups if group is not None for known in group.fsdp_params]
    return [(getattr(known, "_unsharded_param", None), known.sharded_param) for known in managed]


_knows_plain_shards = _late("tensor._st_info", "shards that were made plain for DistributedDataParallel look whole")


def layout_before_ddp(parameter: Any) -> Any:
    """The mesh and placements of a shard that torch has made a plain tensor for DistributedDataParallel, or None."""
    return getattr(parameter, "_st_info", None) if _knows_plain_shards else None


_knows_join = _late("module._join_config", "trainings inside join() look as if ranks ended too early")


def trains_in_join(wrapper: Any) -> bool:
    """Whether a DistributedDataParallel is, or was, inside its ``join()``, where ranks may have unequal batches."""
    return _knows_join and bool(getattr(getattr(wrapper, "_join_config", None), "enable", False))


# --- kernels: if any of this is missing, statistics are computed by plain torch

_KERNELS = (
    "torch._inductor.codecache.CppCodeCache",
    "torch.cuda._compile_kernel",
    "torch.cuda._utils._get_gpu_runtime_library",
)
_BY_PLAIN_TORCH = "statistics are computed by plain torch, which is slower"
NAMES.extend(_KERNELS)
FALLBACKS.update({name: _BY_PLAIN_TORCH for name in _KERNELS if _is_hidden(name)})


def _needed(name: str) -> Any:
    """The object called `name`, which takes long to import, so that it is looked up only when a kernel is built."""
    module, _, attribute = name.rpartition(".")
    try:
        if not _is_hidden(name):
            return getattr(import_module(module), attribute)
    except (AttributeError, ImportError):
        FALLBACKS[name] = _BY_PLAIN_TORCH
    raise MissingError(name, "a compiled kernel")


def compile_cpp(source: str, flags: tuple[str, ...]) -> Any:
    """The shared library that torch.compile's toolchain builds from `source`."""
    return _needed(_KERNELS[0]).load(source, extra_flags=flags)


def compile_cuda(source: str, name: str) -> Any:
    """The kernel called `name` in `source`, which is CUDA C++."""
    return _needed(_KERNELS[1])(source, name)


def cuda_driver() -> Any:
    """The driver that launches kernels."""
    return _needed(_KERNELS[2])()


def _slow_stream(index: int) -> int:
    return int(torch.cuda.current_stream(index).cuda_stream)


raw_stream: Callable[[int], int] = _slow_stream
if torch.version.cuda:
    raw_stream = _of_torch("torch._C._cuda_getCurrentRawStream", _slow_stream, "streams are looked up more slowly")
