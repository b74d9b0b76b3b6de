"""An edit returns the value that the model continues with. The edits themselves are in `torchhook.edits`.

An edit changes one tensor. In a nested value, ``at`` says which one; the containers around it keep their types. The new
tensor must have the shape, dtype and device of the old one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from torchhook.core.errors import TapError
from torchhook.core.shards import tied
from torchhook.core.shown import Shown
from torchhook.core.site import Port, Site
from torchhook.core.torch_internals import marked_constant
from torchhook.core.trees import Address, Arguments, leaves, put, taken

if TYPE_CHECKING:
    from torchhook.core.passes import Pass

Key = int | str
At = Key | tuple[Key, ...] | None
"""Which leaf: a position or a name, or a tuple of them for one deeper down; None if there is only one."""


class Edit(Shown, ABC):
    """Changes a tensor on its way through the model. An edit of your own only needs `change`.

    >>> class Sign(Edit):
    ...     def change(self, x, call):
    ...         return x.sign()
    """

    whole = False  # whether it takes the whole value, with its containers
    resizes = False  # whether it may return other sizes; then it takes the whole value, too
    by_call = False  # whether it does something different at each call of a pass

    def __init__(self, at: At = None) -> None:
        self.at: Address | None = at if at is None or isinstance(at, tuple) else (at,)

    @abstractmethod
    def change(self, x: Any, call: int) -> Any:
        """The value to continue with in place of `x`, at call number `call` of a pass."""

    def moved(self, path: str, module: nn.Module, port: Port, model: nn.Module) -> tuple[str, nn.Module, Port]:
        """Where to act for a selected `module`: at that module, unless the edit knows a better place."""
        return path, module, port

    def bound(self, site: Site, module: nn.Module) -> Edit:
        """This edit for one site, with everything looked up that it needs there."""
        return self


class Editing:
    """The act of one edit at one site."""

    __slots__ = ("edit", "name", "site")

    def __init__(self, edit: Edit, site: str, name: str) -> None:
        self.edit = edit
        self.site = site
        self.name = name

    @staticmethod
    def at(edit: Edit, site: Site, module: nn.Module) -> Editing:
        """The act of `edit` at `site`. Its name is made now, since objects have other names inside a compiler."""
        return Editing(edit.bound(site, module), str(site), f"the edit {edit} at the {site}")

    def __call__(self, pass_: Pass | None, call: int, value: Any, args: tuple[Any, ...]) -> Any:
        """The value to continue with."""
        return self.changed(value, call)

    def changed(self, value: Any, call: int) -> Any:
        """`value` after the edit."""
        if self.edit.resizes:
            return self.edit.change(value, call)
        if self.edit.whole:
            return self._whole(value, call)
        address = self.leaf(value)
        assert address is not None
        leaf = taken(value, address)
        return put(value, address, self.fitting(leaf, self.edit.change(leaf, call)))

    def leaf(self, value: Any) -> Address | None:
        """The address of the leaf of `value` that is edited; None if all are."""
        if self.edit.whole:
            return None
        if isinstance(value, Tensor):
            if self.edit.at:
                raise self._no_leaf(value)
            return ()
        return self._address(value)

    def gradient(self, gradient: Tensor, call: int) -> Tensor:
        """The gradient to continue with."""
        changed: Tensor = self.fitting(gradient, self.edit.change(gradient, call))
        return changed

    def fitting(self, x: Tensor, new: Any) -> Any:
        """`new`, if it can take the place of `x`."""
        if not isinstance(new, Tensor):
            raise refused(
                f"{self.name} returned a {type(new).__name__} for a tensor of"
                f" {_described(x)}; return the tensor to continue with"
            )
        if new.shape != x.shape or new.dtype != x.dtype or new.device != x.device:
            raise refused(
                f"{self.name} returned {_described(new)} for {_described(x)}; return the same shape, dtype and device"
            )
        return tied(x, new)

    def _whole(self, value: Any, call: int) -> Any:
        if not isinstance(value, Arguments):
            return self._alike(value, self.edit.change(value, call))
        seen = value.unwrapped()
        new = self._alike(seen, self.edit.change(seen, call))
        if len(value.args) == 1:
            return Arguments((new,), value.kwargs)
        return Arguments(new, value.kwargs) if value.args else Arguments((), new)

    def _alike(self, old: Any, new: Any) -> Any:
        """`new`, if it has a fitting tensor wherever `old` has one."""
        if isinstance(old, Tensor):
            return self.fitting(old, new)
        olds, news = dict(leaves(old)), dict(leaves(new))
        if type(old) is not type(new) or olds.keys() != news.keys():
            raise TapError(
                f"{self.name} returned a {type(new).__name__} with tensors at {_listed(news)}"
                f" for a {type(old).__name__} with tensors at {_listed(olds)}; return the same container"
            )
        for address, leaf in olds.items():
            new = put(new, address, self.fitting(leaf, news[address]))
        return new

    def _address(self, value: Any) -> Address:
        at = self.edit.at
        found = [address for address, _ in leaves(value)]
        if at is None:
            if len(found) == 1:
                return found[0]
            raise self._no_leaf(value)
        if isinstance(value, Arguments):
            at = in_arguments(at)
        elif at not in found and isinstance(at[0], int) and not isinstance(value, (tuple, list)):
            firsts = list(dict.fromkeys(address[0] for address in found))  # the n-th field that has one
            at = (firsts[at[0]], *at[1:]) if at[0] < len(firsts) else at
        if at not in found:
            raise self._no_leaf(value)
        return at

    def _no_leaf(self, value: Any) -> TapError:
        if isinstance(value, Tensor):
            return TapError(f"the value at the {self.site} is a single tensor; leave out at=")
        at = "no at=" if self.edit.at is None else f"at={self.edit.at[0] if len(self.edit.at) == 1 else self.edit.at!r}"
        return TapError(
            f"{self.name} has {at}, but the value there is {_named(value)} with"
            f" tensors at {_listed(address[isinstance(value, Arguments) :] for address, _ in leaves(value))};"
            " choose one with at="
        )


latest_refusal: list[str] = []
"""Why an edit was refused last: the error that a compiler raises instead does not say."""


@marked_constant
def _remember_refusal(message: str) -> bool:
    """Remember `message`; a compiler that traces this calls it immediately."""
    latest_refusal[:] = [message]
    return True


def refused(message: str) -> TapError:
    """The error to raise, which is remembered in case that a compiler raises another one."""
    _remember_refusal(message)
    return TapError(message)


class GradientEditing:
    """The act of an edit of gradients: called in the forward, it returns a function that edits in the backward."""

    __slots__ = ("editing",)

    def __init__(self, editing: Editing) -> None:
        self.editing = editing

    def __call__(self, pass_: Pass | None, call: int, value: Any, args: tuple[Any, ...]) -> Any:
        """The function that edits the gradients of `value`."""
        meant = self.editing.leaf(value)
        return lambda _, leaf, gradient: (
            self.editing.gradient(gradient, call) if meant is None or leaf == meant else None
        )


def in_arguments(at: Address) -> Address:
    """The address within `Arguments`: a position is a positional argument, a name a keyword."""
    return (0 if isinstance(at[0], int) else 1, *at)


def _named(value: Any) -> str:
    return "the arguments of a call" if isinstance(value, Arguments) else f"a {type(value).__name__}"


def _described(x: Tensor) -> str:
    return f"{tuple(x.shape)} {str(x.dtype).removeprefix('torch.')} on {x.device}"


def _listed(found: Iterable[Address]) -> str:
    names = [repr(address[0]) if len(address) == 1 else repr(address) for address in found]
    return ", ".join(names[:8]) or "nowhere"
