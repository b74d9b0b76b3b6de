"""A `Case` is a model and a batch to check contracts on; an `Agreement` is two runs of it that should agree."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from inspect import Parameter
from typing import Any

import torch
from torch import Tensor, nn

from torchhook.captures.agreement.free_runs import Disagreement, FreeRuns, Pairing
from torchhook.captures.agreement.noise import NoisyOutputs
from torchhook.captures.agreement.recorded_run import RecordedRun, everywhere, record
from torchhook.core.batch import Batch, Guess, Loss, call, fitted, loss_of, on_device, samples_of
from torchhook.core.event import Event
from torchhook.core.model_state import attributes_kept, evaluating, state_kept
from torchhook.core.selection import Selector, unwrapped, walk
from torchhook.core.session import Session
from torchhook.core.tap import Tap
from torchhook.core.trees import Arguments, leaves, mapped
from torchhook.rules.contracts.claims import CACHES, STATES, Claims, forward_parameters
from torchhook.rules.contracts.pairings import same
from torchhook.rules.model_copy import copies_of
from torchhook.rules.rest import is_installed

_SAMPLES = 4  # more only take time
_DORMANT = 1e-3  # weights below that hide what they are multiplied by
Given = dict[str, Any]
"""The arguments of a model by name; positional ones that have none are called ``"*0"``, ``"*1"`` …"""


@dataclass(frozen=True, eq=False)
class Variant:
    """One way to run the model: on which batch, within which context, and which copy of the model, if not itself.

    The batch is made for each run, inside the context and before anything is tapped.
    """

    make: Callable[[], Batch]
    within: Callable[[], AbstractContextManager[Any]] = nullcontext
    model: nn.Module | None = None


@dataclass(frozen=True, eq=False)
class Agreement:
    """Two runs of a model that should agree, and what to say if they do not.

    Args:
        said: What is wrong then, such as "padding changes the result".
        names: What the two runs are called, such as "without padding" and "with padding".
        pairing: Which parts of their values should be equal.
        reference: A run with other sizes, for the pairing.
        what: What was not checked if it cannot be; by default the name of the second run.
        raising: The severity of a finding if the second run alone raises; without one that is a note.
        loss: Whether to compare gradients, too.
        epsilon: The machine epsilon of what the second run computes with, if it is coarser than its dtypes.
        evidence: Numbers to go with a finding.
    """

    expected: Variant
    actual: Variant
    said: str
    names: tuple[str, str]
    pairing: Pairing = same
    reference: Variant | None = None
    what: str = ""
    raising: str | None = None
    loss: Loss | None = None
    epsilon: float = 0.0
    evidence: Mapping[str, Any] | None = None


class UnsuitedError(ValueError):
    """This variant cannot be made of the model, through no fault of the model."""


class SecondRunError(RuntimeError):
    """The second run of an agreement raised, and the first one did not."""


class Case:
    """A model and a batch, with what contracts need to make variants of them.

    Args:
        batch_dim: The dimension of the samples; by default what the model says, or the first one.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Batch,
        loss: Loss | None = None,
        optimizer: Any = None,
        batch_dim: int | None = None,
    ) -> None:
        self.model = model
        self.loss = loss
        self.optimizer = optimizer
        self.given = _named(model, batch.arguments)
        self.target = batch.target
        self.claims = Claims(model, self.given)
        self.sample_dim = batch_dim if batch_dim is not None else 0 if self.claims.batch_first else 1
        self.has_rows = not self.claims.without_rows  # of which some can be chosen
        self.count = samples_of(batch).length if not self.sample_dim else _size(batch, self.sample_dim)
        self.left_on = _left_on(model)
        self.is_random = False  # whether its results were found to be
        self.asked = False  # whether the contract that is checked now was asked for by name
        if self.count > _SAMPLES and self.has_rows:
            first = range(_SAMPLES)
            self.given, self.target = self.taken(self.given, first), self.taken(self.target, first)
            self.count = _SAMPLES
        self.plain = self.variant()

    def variant(self, given: Given | None = None, target: Any = None, **options: Any) -> Variant:
        """A variant with other arguments, in another context, or of another copy of the model."""
        given = self.given if given is None else given
        target = self.target if target is None else target
        return Variant(lambda: Batch(arguments_of(given), target), **options)

    def agree(
        self, change: Callable[[Tensor], Tensor], then: Callable[[Tensor], Tensor] | None = None, said: str = ""
    ) -> Agreement:
        """The claim that changing the inputs changes the outputs by `then`, or not at all.

        `change` is applied to every floating-point argument, `then` to every value that it fits.
        """
        given = mapped(lambda x: change(x) if x.is_floating_point() else x, self.given)
        said = said or "the outputs do not follow the change of the inputs"
        pairing = same if then is None else partial(_transformed, then)
        return Agreement(self.plain, self.variant(given), said, ("before the change", "after it"), pairing)

    def taken(self, value: Any, numbers: Sequence[int], count: int | None = None) -> Any:
        """Arguments, or the target, with these samples, of `count` if not of as many as the case has."""
        if isinstance(value, dict):
            return {name: self._taken(str(name), item, numbers, count or self.count) for name, item in value.items()}
        return self._taken("", value, numbers, count or self.count)

    def _taken(self, name: str, value: Any, numbers: Sequence[int], count: int) -> Any:
        index = torch.tensor(list(numbers))

        def chosen(x: Tensor) -> Tensor:
            dim = self.dim_of(name, x, count)
            return x if dim is None else x.index_select(dim, index.to(x.device))

        return mapped(chosen, value)

    def dim_of(self, name: str, x: Tensor, count: int) -> int | None:
        """The dimension of a tensor that has one entry per sample; None if it has none."""
        is_side = name in (*self.claims.masks, self.claims.lengths)  # samples come first in these, also in torch
        dim = 1 if name in STATES and x.dim() == 3 and x.shape[1] == count else 0 if is_side else self.sample_dim
        return dim if self.has_rows and x.dim() > dim and x.shape[dim] == count else None

    def begin(self) -> None:
        """Run the model once: it may set up what it keeps, such as tables or hooks, and what it returns is a claim."""
        with state_kept(self.model), self._evaluating(self.model), torch.no_grad():
            batch = self.plain.make()
            self.claims.returned = call(self.model, Batch(fitted(batch.arguments, self.model), batch.target))

    @contextmanager
    def running(self, variant: Variant) -> Iterator[nn.Module]:
        """The model of a variant, in eval mode and within its context; everything is as before afterwards."""
        model = self.model if variant.model is None else variant.model  # a compiled list of modules may be empty
        with state_kept(model), attributes_kept(model), self._evaluating(model), variant.within():
            yield model

    @contextmanager
    def _evaluating(self, model: nn.Module) -> Iterator[None]:
        """Eval mode as the model's own `eval` would have it, without calling that: it may do more."""
        with evaluating(model):
            on = [module for path, module in walk(unwrapped(model)) if path in self.left_on]
            for module in on:
                module.training = True
            try:
                yield
            finally:
                for module in on:
                    module.training = False

    def output(self, variant: Variant, taps: Sequence[Tap] = ()) -> Any:
        """What the model returns, in a run with `taps`."""
        with self.running(variant) as model, torch.no_grad():
            batch = variant.make()
            with Session(model, taps, on_silent="ignore"):
                return call(model, Batch(fitted(batch.arguments, model), batch.target))

    def gradients(self, variant: Variant, loss: Loss | None = None) -> tuple[Guess, dict[str, Tensor | None]]:
        """The loss, and its gradient for each parameter that is trained; None where the loss does not depend on it."""
        with self.running(variant) as model, torch.enable_grad():
            batch = variant.make()
            output = call(model, Batch(fitted(batch.arguments, model), batch.target))
            guess = loss_of(output, on_device(batch.target, model), loss or self.loss)
            trained = {path: one for path, one in model.named_parameters() if one.requires_grad}
            if not trained or not guess.loss.requires_grad:
                return guess, dict.fromkeys(trained)
            found = torch.autograd.grad(guess.loss, list(trained.values()), allow_unused=True)
            return guess, dict(zip(trained, found, strict=True))

    def breach(self, agreement: Agreement) -> Disagreement | None:
        """Where the runs first disagree, if their results do: only then are they compared inside."""
        runs = self._runs(agreement, _outside(self.model))
        result = runs.first()
        if not runs.judged:
            raise UnsuitedError("the results have no finite values that belong together")
        return None if result is None else self._runs(agreement, None).first() or result

    def raiser(self, variant: Variant) -> str:
        """The path of the module whose own code raises in a run."""
        running = [""]
        where = everywhere(self.model if variant.model is None else variant.model)

        def leave(_: Event) -> None:
            running.pop()

        with suppress(Exception):
            self.output(variant, [Tap(where, lambda event: running.append(event.path), "input"), Tap(where, leave)])
        return running[-1]

    @cached_property
    def _awake(self) -> nn.Module | None:
        """A copy with other weights where they are about zero, such as a layer scale; None if there are none."""
        dormant = [path for path, one in self.model.named_parameters() if _is_dormant(path, one)]
        try:
            twin = copies_of(self.model, None)[0] if dormant else None
        except ValueError:  # it cannot be copied
            return None
        if twin is not None:
            move([one for path, one in twin.named_parameters() if path in dormant], 0)
        return twin

    @contextmanager
    def awake(self) -> Iterator[bool]:
        """With weights inside the block that hide no branch; False if the model has none that do."""
        model = self.model
        self.model = self._awake or model
        try:
            yield self.model is not model
        finally:
            self.model = model

    def _runs(self, agreement: Agreement, where: Selector | None) -> FreeRuns:
        def observed(variant: Variant, change: NoisyOutputs | None = None) -> RecordedRun:
            with self.running(variant) as model:
                return record(model, variant.make(), agreement.loss, where, change)

        expected = observed(agreement.expected)
        try:
            actual = observed(agreement.actual)
        except UnsuitedError:
            raise
        except Exception as error:
            raise SecondRunError(f"{type(error).__name__}: {error}") from error
        return FreeRuns(
            expected,
            actual,
            agreement.pairing,
            lambda seed: observed(agreement.expected, NoisyOutputs(seed, agreement.epsilon)),
            None if agreement.reference is None else observed(agreement.reference),
            agreement.epsilon,
            frozenset(CACHES),
        )


@torch.no_grad()
def move(parameters: Iterable[Tensor], seed: int) -> None:
    """Give parameters other values of about the same size."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        noise = torch.randn(parameter.shape, generator=generator).to(parameter)
        parameter.add_(noise * (0.1 + parameter.abs().mean()))


def _is_dormant(path: str, parameter: Tensor) -> bool:
    """Whether a parameter may hide what it is multiplied by."""
    if "bias" in path.rpartition(".")[2] or not (parameter.is_floating_point() and parameter.numel()):
        return False
    return bool(parameter.detach().abs().max() < _DORMANT)


def _outside(model: nn.Module) -> Selector:
    """The model alone, and attentions of torch: with these it takes no fast path, which noise would make it leave."""
    return Selector.union(["", *(path for path, module in walk(model) if isinstance(module, nn.MultiheadAttention))])


def _left_on(model: nn.Module) -> list[str]:
    """The modules that the model's own `eval` leaves in train mode; that of installed libraries is trusted."""
    classes = {base for module in model.modules() for base in type(module).__mro__} - {nn.Module}
    if not any({"train", "eval"} & vars(one).keys() and not is_installed(one) for one in classes):
        return []
    try:
        twin, _ = copies_of(model, None)
    except ValueError:  # it cannot be copied
        return []
    twin.train()
    twin.eval()
    return [path for path, module in walk(twin) if module.training]


def arguments_of(given: Given) -> Arguments:
    """The arguments for a call."""
    args = [value for name, value in given.items() if name.startswith("*")]
    return Arguments(tuple(args), {name: value for name, value in given.items() if not name.startswith("*")})


def _named(model: nn.Module, arguments: Arguments) -> Given:
    """The arguments of a call by name, where positional ones have a name that they can be passed by."""
    parameters = list(forward_parameters(model).values())
    names = [one.name for one in parameters if one.kind is Parameter.POSITIONAL_OR_KEYWORD]
    if len(names) < len(arguments.args) or any(one.kind is Parameter.VAR_POSITIONAL for one in parameters):
        names = [f"*{number}" for number in range(len(arguments.args))]
    return {**dict(zip(names, arguments.args, strict=False)), **arguments.kwargs}


def _size(batch: Batch, dim: int) -> int:
    sizes: list[int] = [leaf.shape[dim] for _, leaf in leaves(batch.arguments) if leaf.dim() > dim]
    if not sizes:
        raise ValueError(f"batch_dim: no argument has a dimension {dim}")
    return max(sizes, key=sizes.count)


def _transformed(then: Callable[[Tensor], Tensor], a: Tensor, b: Tensor, _: Tensor | None) -> Any:
    try:
        expected = then(a)
    except (IndexError, RuntimeError):  # it does not fit values of this kind
        return []
    return [(expected, b)] if expected.shape == b.shape else []
