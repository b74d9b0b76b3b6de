"""`verify`: checks a model against the contracts that any correct model of its kind obeys."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from torchhook.captures.agreement.free_runs import Disagreement
from torchhook.core.batch import Batch, InputBatches, ToInputs
from torchhook.core.findings import Finding, Report, Severity, json_value
from torchhook.core.model_state import attributes_kept, random_state_kept
from torchhook.core.progress import Progress, progress_bar
from torchhook.core.selection import require_module, unwrapped, walk
from torchhook.rules.contracts import Agreement, Breach, Case, Contract, Note, Skip
from torchhook.rules.contracts.accumulation import COUNTS
from torchhook.rules.contracts.case import SecondRunError, UnsuitedError
from torchhook.rules.contracts.contract import CONTRACTS, OWN, chosen
from torchhook.rules.contracts.positions import settle_mask

_JUDGES_RANDOM = ("deterministic", "used")  # contracts that can be checked on a model whose results are random
_HIDDEN = ("independent", "padding", "causal", "cached")  # contracts that a branch scaled to nothing may hide from
_REFUSALS = (NotImplementedError, ValueError, AssertionError)  # raised on purpose, for what a model does not take
_RANDOM = "its results are random in eval mode (TV101), so that two runs cannot be compared"


def verify(
    model: nn.Module,
    batch: Any,
    loss: Callable[..., Tensor] | None = None,
    contracts: Iterable[str | Contract | Callable[[Case], Any]] | None = None,
    *,
    optimizer: Any = None,
    batch_dim: int | None = None,
    batch_to_inputs: ToInputs | None = None,
    fail_on: str = "error",
    progress: Progress = True,
) -> Report:
    """Check a model, without a reference or labels, against contracts that any correct model of its kind obeys.

    A contract is mostly that two runs of the model agree: with and without padding, token by token and all at once,
    compiled and eager. Where they do not, and rounding is not the reason, the finding names the first module in which
    they part. The model runs in eval mode, without what it is wrapped in, on at most four samples; its buffers, modes
    and hooks and the random numbers are as before afterwards.

    Args:
        batch: A batch, or a loader, of which the first batch is used: a tensor, a tuple that ends with the target, or a
            dict of keyword arguments.
        loss: A function of output and target; by default that of the output, or one that fits the targets.
        contracts: Names, or contracts of `torchhook.contracts`, or functions of your own; all by default. A contract
            that is named is also checked if the model does not claim to obey it.
        optimizer: The optimizer of the model, to check that it holds the model's parameters.
        batch_dim: The dimension of the samples, if it is not the first one.
        batch_to_inputs: Turns a batch into inputs and target.
        fail_on: The severity from which the report fails.
        progress: True for a bar in a terminal, False for none, or a function (what, done, total).

    >>> import torch
    >>> from torchhook import verify
    >>> _ = torch.manual_seed(0)
    >>> class Centred(nn.Module):
    ...     def forward(self, x):
    ...         return x - x.mean(0)
    >>> model = nn.Sequential(nn.Linear(8, 8), Centred(), nn.Linear(8, 2))
    >>> print(verify(model, torch.randn(4, 8), contracts=["independent"]).findings[0].site)
    1
    """
    require_module(model)
    model = unwrapped(model)  # a compiled one would be compiled again for every run
    _require_usable(loss, optimizer, batch_dim)
    selected = chosen(contracts)
    first = next(iter(InputBatches(batch, model, batch_to_inputs, "batch", targets=True)), None)
    if first is None:
        raise ValueError("batch: the loader has no batches")
    case = Case(model, Batch.of(first), loss, optimizer, batch_dim)
    if not case.count:
        raise ValueError("batch: it has no samples")
    with (
        random_state_kept(model),
        attributes_kept(model),
        warnings.catch_warnings(),
        progress_bar("verify", progress) as tell,
    ):
        warnings.filterwarnings("ignore", "a tap is inside")
        case.begin()  # raises here if the model cannot run the batch at all
        settle_mask(case)
        results = [_Result(contract) for contract in selected]
        if all(one.name != "deterministic" for one in selected) and any(
            one.code != OWN and one.name not in _JUDGES_RANDOM for one in selected
        ):
            chance = _Result(CONTRACTS["deterministic"])
            chance.check(case, asked=False)  # what differs by chance breaks no other contract
            results = [chance, *results] if chance.findings else results
        for number, result in enumerate(results):
            if result.findings:
                continue  # it was checked above
            if tell is not None:
                tell(result.contract.name, number, len(results))
            result.check(case, asked=contracts is not None)
    return Report(
        findings=tuple(sorted((one for result in results for one in result.folded()), key=_worst_first)),
        model=type(model).__name__,
        fail_on=Severity(fail_on),
        checked=tuple(dict.fromkeys(result.contract.code for result in results if not result.skipped)),
        skipped=_skipped(results),
        notes=tuple(f"{result.contract.name}: {note}" for result in results for note in dict.fromkeys(result.notes)),
    )


@dataclass
class _Result:
    """What came of one contract."""

    contract: Contract
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    skipped: str = ""  # why it was not checked
    compared: set[str] = field(default_factory=set)  # what was
    raised: dict[str, list[Breach]] = field(default_factory=dict)  # in a second run alone, by what was not checked

    def check(self, case: Case, asked: bool) -> None:
        """Check the contract; what raises is a note, since the rest may still be checked, unless it is the user's."""
        case.asked = asked
        if case.is_random and self.contract.name not in _JUDGES_RANDOM:
            self.skipped = _RANDOM
            return
        tries = False
        try:
            for one in _yielded(self.contract, case):
                tries |= isinstance(one, Agreement)
                self._take(case, one)
        except Exception as error:  # of the model, with inputs of another form
            if self.contract.code == OWN:
                raise
            if self.compared or self.findings:
                self.notes.append(_raised("the rest", error))
            else:
                self.skipped = _raised("it", error)
        for what, breaches in self.raised.items():
            if what in self.compared:
                self.notes += [f"in part: {breach.message}" for breach in breaches]
            else:
                self.findings += [self._finding(case, breach) for breach in breaches]
        if self.compared or self.findings:
            self.notes += [self.skipped] if self.skipped else []
            self.skipped = ""
        elif tries and not self.skipped:
            self.skipped = "it could not be checked: no two runs could be compared"

    def folded(self) -> list[Finding]:
        """The findings; of those that have one cause, the first explains the others, each place once."""
        if not self.contract.folds or not self.findings:
            return self.findings
        first, *others = self.findings
        elsewhere = {other.site: other for other in reversed(others) if other.site and other.site != first.site}
        return [replace(first, affected=tuple(reversed(elsewhere.values())))]

    def _take(self, case: Case, one: Any) -> None:
        if isinstance(one, Skip):
            self.skipped = one.reason
        elif isinstance(one, Note):
            self.notes.append(one.text)
        elif isinstance(one, Breach):
            self.findings.append(self._finding(case, one))
        elif isinstance(one, Agreement):
            self._judge(case, one)
        else:
            kinds = "an Agreement, a Breach, a Skip or a Note"
            raise TypeError(f"contracts: {self.contract.name} must yield {kinds}, not {one!r:.80}")

    def _judge(self, case: Case, agreement: Agreement) -> None:
        what = agreement.what or agreement.names[1]
        try:
            found = case.breach(agreement)
            self.compared.add(what)
            if found is None and self.contract.name in _HIDDEN:
                with case.awake() as is_other:
                    found = case.breach(agreement) if is_other else None
        except Exception as error:
            if self.contract.code == OWN:
                raise
            if isinstance(error, SecondRunError) and agreement.raising and not isinstance(error.__cause__, _REFUSALS):
                first, second = agreement.names
                said = f"it raises {second}, but not {first}: {_first_line(error)}"
                breach = Breach(
                    said, case.raiser(agreement.actual), agreement.raising, evidence=agreement.evidence or {}
                )
                self.raised.setdefault(what, []).append(breach)
            else:
                kind = "" if isinstance(error, (SecondRunError, UnsuitedError)) else f"{type(error).__name__}: "
                self.notes.append(f"not checked: {what} ({kind}{_first_line(error)})")
            return
        if found is not None:
            case.is_random |= self.contract.name == "deterministic"
            self.findings.append(self._finding(case, _breach(agreement, found)))

    def _finding(self, case: Case, breach: Breach) -> Finding:
        classes = {path: type(module).__name__ for path, module in walk(case.model)}
        named = {"module": classes[breach.site]} if breach.site in classes else {}
        evidence = {"contract": self.contract.name, **named, **breach.evidence}
        return Finding(
            self.contract.code,
            Severity(breach.severity or self.contract.severity),
            breach.message,
            breach.site,
            evidence={name: json_value(value) for name, value in evidence.items()},
            hint=self.contract.hint if breach.hint is None else breach.hint,
        )


def _breach(agreement: Agreement, found: Disagreement) -> Breach:
    """What to say about two runs that disagree."""
    gap, site = found.worst.gap, found.location.site
    what = {"input": f"the input of {site.path or 'the model'}", "output": "its output"}.get(site.port, "its gradient")
    index = f" at {gap.worst}" if gap.worst else ""
    first, second = agreement.names
    values = f"{what}{index} is {gap.values[0]:.4g} {first} and {gap.values[1]:.4g} {second}"
    explained = found.worst.explained / gap.scale if gap.scale else 0.0
    evidence: Mapping[str, Any] = {
        **(agreement.evidence or {}),
        "error": gap.error,
        "rounding": explained,
        "expected": gap.values[0],
        "actual": gap.values[1],
    }
    return Breach(f"{agreement.said}; {values}", found.module, evidence=evidence)


def _yielded(contract: Contract, case: Case) -> Iterable[Any]:
    """What the check of a contract yields."""
    found = contract.check(case, **contract.options)
    if not isinstance(found, Iterable):
        raise TypeError(f"contracts: {contract.name} must yield what it finds, not return {found!r:.80}")
    return found


def _skipped(results: list[_Result]) -> dict[str, str]:
    """Why contracts were skipped, by their codes; those of the user's own share one."""
    reasons = {one.contract.code: one.skipped for one in results if one.skipped}
    own = [f"{one.contract.name}: {one.skipped}" for one in results if one.skipped and one.contract.code == OWN]
    return {**reasons, OWN: "; ".join(own)} if own else reasons


def _require_usable(loss: Any, optimizer: Any, batch_dim: Any) -> None:
    if loss is not None and not callable(loss):
        raise TypeError(f"loss must be a function of output and target, not {loss!r:.80}")
    if optimizer is not None and not hasattr(optimizer, "param_groups"):
        raise TypeError(f"optimizer must be one of torch, not {optimizer!r:.80}")
    if batch_dim is not None and not (isinstance(batch_dim, int) and batch_dim >= 0):
        raise ValueError(f"batch_dim must be 0 or more, not {batch_dim!r:.80}")
    try:
        signature = None if loss is None else inspect.signature(getattr(loss, "forward", loss))
    except (TypeError, ValueError):  # it is not written in Python
        return
    if signature is not None:
        try:
            signature.bind(None, None, **{name: None for name in COUNTS if name in signature.parameters})
        except TypeError as error:
            raise TypeError(f"loss must be a function of output and target: {error}") from error


def _raised(what: str, error: Exception) -> str:
    return f"{what} could not be checked: {type(error).__name__}: {_first_line(error)}"


def _first_line(error: Exception) -> str:
    return f"{next(iter(str(error).splitlines()), ''):.200}"


def _worst_first(finding: Finding) -> tuple[int, str]:
    return -finding.severity.rank, finding.code
