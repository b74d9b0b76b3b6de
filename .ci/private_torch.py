"""Only core/torch_internals.py may name private attributes of torch: list every other place that does, and fail.

Private are names with one leading underscore. All of these count: attributes of torch and its modules, however they
were imported or renamed; imports from torch; strings (``getattr(x, "_version")``, ``vars(module)["_modules"]``,
``attrgetter("weight._base")``); patterns; and attributes of tensors, modules, optimizers and the like, whatever the
variable is called: an attribute that the package does not define itself must belong to a library named below.
"""

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

PACKAGE = Path(__file__).parents[1] / "src" / "torchhook"
DOOR = PACKAGE / "core" / "torch_internals.py"
OF_COMPILERS = {"_orig_mod", "_torchdynamo_orig_callable", "_torchdynamo_orig_backend", "_dynamo_marked_constant"}
OF_PARALLELISM = {"_is_replica", "_fsdp_param_group", "_fsdp_param_groups", "_unsharded_param", "_get_fsdp_state"}
OF_PARALLELISM |= {"_st_info", "_join_config"}
OF_OTHERS = {"_asdict", "_fields", "_replace", "_name", "_batches_that_stepped"}  # named tuples, ctypes, Lightning
OF_OTHERS |= {"_can_compile_fullgraph", "_is_stateful", "_tied_weights_keys"}  # what models of transformers claim
BY_NAME = {"getattr", "hasattr", "setattr", "delattr", "__getattribute__", "attrgetter", "methodcaller"}
BY_NAME |= {"import_module", "find_spec", "patch"}


def known_names() -> set[str]:
    """The private attributes of the objects that torch hands out."""
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.Adam([weight])
    objects = [
        weight,
        weight.untyped_storage(),
        (weight * 2).grad_fn,
        nn.Linear(1, 1),
        nn.LSTM(1, 1),
        nn.MultiheadAttention(1, 1),
        optimizer,
        StepLR(optimizer, 1),
        DataLoader([0]),
        torch.amp.GradScaler("cpu"),
        torch.Generator(),
        torch.ops.aten.add.Tensor,
        FSDPModule,
    ]
    names = {name for thing in objects for name in dir(thing) if _is_private(name)}
    return names | OF_COMPILERS | OF_PARALLELISM


def own_names(trees: Iterable[ast.Module]) -> set[str]:
    """The private names that the package defines itself."""
    return {name for tree in trees for node in ast.walk(tree) for name in _defined(node) if _is_private(name)}


def offences(file: Path, known: set[str], own: set[str]) -> Iterator[str]:
    """The lines of a file that name something private of torch."""
    text = file.read_text()
    search = _Search(ast.parse(text), known, own)
    for number in sorted(search.lines()):
        yield f"{file.relative_to(PACKAGE.parents[1])}:{number}: {text.splitlines()[number - 1].strip()}"


class _Search:
    """Looks through one file."""

    def __init__(self, tree: ast.Module, known: set[str], own: set[str]) -> None:
        self.tree = tree
        self.known = known
        self.own = own - known
        self.here = own_names([tree])  # for ``self._name``: a class may use a word of torch's for its own attribute
        self.of_torch, self.of_others = _modules(tree)

    def lines(self) -> set[int]:
        slots = {id(part) for node in ast.walk(self.tree) if _is_slots(node) for part in ast.walk(node)}
        by_name = {id(part) for node in ast.walk(self.tree) if _is_by_name(node) for part in ast.walk(node)}
        return {
            node.lineno
            for node in ast.walk(self.tree)
            if id(node) not in slots and self._offends(node, id(node) in by_name)
        }

    def _offends(self, node: ast.AST, by_name: bool) -> bool:
        if isinstance(node, ast.Attribute):
            return self._is_of_torch(node)
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            return any(_is_torch(path) and any(map(_is_private, path.split("."))) for path in _imported(node).values())
        if isinstance(node, ast.MatchClass):
            return any(_is_private(name) and name not in self.own for name in node.kwd_attrs)
        text = _text(node)
        return text is not None and self._is_name(text, by_name)

    def _is_of_torch(self, node: ast.Attribute) -> bool:
        root = _root_of(node.value)
        if not _is_private(node.attr) or node.attr in OF_OTHERS or root in self.of_others:
            return False
        if root in ("self", "cls") and isinstance(node.value, ast.Name):
            return node.attr not in (self.here if node.attr in self.known else self.own)
        return root in self.of_torch or node.attr not in self.own

    def _is_name(self, text: str, by_name: bool) -> bool:
        if not re.fullmatch(r"[\w.]+", text):
            return False
        parts = text.split(".")
        if by_name and any(_is_private(part) and part not in self.own | OF_OTHERS for part in parts):
            return True
        return any(part in self.known or part.startswith("_saved_") for part in parts) or (
            _is_torch(text) and any(map(_is_private, parts))
        )


def _modules(tree: ast.Module) -> tuple[set[str], set[str]]:
    """The names that a file gives to torch and what it takes from it, and to the modules of other libraries."""
    paths = {
        name: path
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name, path in _imported(node).items()
    }
    of_torch = {name for name, path in paths.items() if _is_torch(path)} | {"torch", "nn"}
    others = {alias for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in _imported(node)} - of_torch
    for _ in range(3):  # renamed, and renamed again
        for name, root in _renamed(tree):
            for known in (of_torch, others):
                known |= {name} if root in known else set()
    return of_torch, others


def _renamed(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """The variables that are set to another one or to an attribute of it, with the name of that."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from ((target.id, _root_of(node.value)) for target in targets if isinstance(target, ast.Name))


def _imported(node: ast.Import | ast.ImportFrom) -> dict[str, str]:
    """The names that an import binds, with the full path of each."""
    source = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
    return {alias.asname or alias.name.split(".")[0]: f"{source}{alias.name}" for alias in node.names}


def _is_torch(path: str) -> bool:
    return path == "torch" or path.startswith("torch.")


def _defined(node: ast.AST) -> Iterator[str]:
    """The names that a node defines: functions, classes, variables, slots, and attributes of ``self``."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield node.name
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _root_of(node) in ("self", "cls"):
        yield node.attr
    elif _is_slots(node):
        yield from (part.value for part in ast.walk(node) if isinstance(part, ast.Constant))


def _text(node: ast.AST) -> str | None:
    """The string that an expression is, as far as it can be read: its first piece if it is formatted."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return _text(node.values[0]) if node.values else None
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        parts = [_text(node.left), _text(node.right)]
        return None if None in parts else "".join(part for part in parts if part)
    return None


def _is_by_name(node: ast.AST) -> bool:
    """Whether a node looks an attribute up by its name."""
    if isinstance(node, ast.Call):
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        return called in BY_NAME
    if isinstance(node, ast.Subscript):
        return (isinstance(node.value, ast.Attribute) and node.value.attr == "__dict__") or (
            isinstance(node.value, ast.Call) and getattr(node.value.func, "id", "") == "vars"
        )
    return False


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def _is_slots(node: ast.AST) -> bool:
    return isinstance(node, ast.Assign) and any(getattr(target, "id", "") == "__slots__" for target in node.targets)


def _root_of(node: ast.expr) -> str:
    while isinstance(node, (ast.Attribute, ast.NamedExpr)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


if __name__ == "__main__":
    files = sorted(file for file in PACKAGE.rglob("*.py") if file != DOOR)
    names = known_names(), own_names(ast.parse(file.read_text()) for file in files)
    found = [line for file in files for line in offences(file, *names)]
    print("\n".join(found) or "private torch: named in core/torch_internals.py only")
    sys.exit(bool(found))
