"""Only core/torch_internals.py may name private attributes of torch: list every other place that does, and fail.

Private are names with one leading underscore: in ``torch.…``, ``nn.…`` and other modules of torch, in imports from
torch, in strings (``getattr(x, "_version")``, ``vars(module)["_modules"]``), and as attributes of tensors, modules,
optimizers, gradient scalers and autograd nodes, whatever the variable is called.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

PACKAGE = Path(__file__).parents[1] / "src" / "torchhook"
DOOR = PACKAGE / "core" / "torch_internals.py"
MODULES = {"torch", "nn", "F", "Tensor", "functional", "optim", "distributed"}
OF_COMPILERS = {"_orig_mod", "_torchdynamo_orig_callable", "_torchdynamo_orig_backend", "_dynamo_marked_constant"}
OF_PARALLELISM = {"_is_replica", "_fsdp_param_group", "_fsdp_param_groups", "_unsharded_param", "_get_fsdp_state"}


def known_names() -> set[str]:
    """The private attributes of the objects that torch hands out."""
    weight = nn.Parameter(torch.ones(1))
    objects = [
        weight,
        weight.untyped_storage(),
        (weight * 2).grad_fn,
        nn.Linear(1, 1),
        torch.optim.Adam([weight]),
        torch.amp.GradScaler("cpu"),
        torch.Generator(),
        FSDPModule,
    ]
    names = {name for thing in objects for name in dir(thing) if _is_private(name)}
    return names | OF_COMPILERS | OF_PARALLELISM


def offences(file: Path, known: set[str]) -> Iterator[str]:
    """The lines of a file that name something private of torch."""
    tree = ast.parse(file.read_text())
    slots = {id(part) for node in ast.walk(tree) if _is_slots(node) for part in ast.walk(node)}
    for node in ast.walk(tree):
        if id(node) not in slots and _offends(node, known):
            line = file.read_text().splitlines()[node.lineno - 1].strip()
            yield f"{file.relative_to(PACKAGE.parents[1])}:{node.lineno}: {line}"


def _offends(node: ast.AST, known: set[str]) -> bool:
    if isinstance(node, ast.Attribute) and _is_private(node.attr):
        is_own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        return _root_of(node.value) in MODULES or (node.attr in known and not is_own)
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        source = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
        paths = [f"{source}{alias.name}".split(".") for alias in node.names]
        return any(path[0] == "torch" and any(map(_is_private, path)) for path in paths)
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value in known or (node.value.startswith("torch.") and "._" in node.value.split(" ")[0])
    return False


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def _is_slots(node: ast.AST) -> bool:
    return isinstance(node, ast.Assign) and any(getattr(target, "id", "") == "__slots__" for target in node.targets)


def _root_of(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


if __name__ == "__main__":
    names = known_names()
    found = [line for file in sorted(PACKAGE.rglob("*.py")) if file != DOOR for line in offences(file, names)]
    print("\n".join(found) or "private torch: named in core/torch_internals.py only")
    sys.exit(bool(found))
