"""TR1: several ranks that train together: copies that part, gradients that are not averaged, and the odd one out."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from statistics import median
from typing import Any

from torchhook.core.findings import Finding, Severity
from torchhook.rules.history import History, owner, plain
from torchhook.rules.ranks import LOST, TABLE, RankStep, Split
from torchhook.rules.registry import register
from torchhook.rules.rule import Phase, Rule

_IN_A_ROW = 2  # measured steps in which a rank has to be odd


class RankRule(Rule):
    """A rule about several ranks; it is skipped where one process trains alone."""

    facts = ("ranks",)
    cause = "rank-difference"
    severity = Severity.ERROR


@register
class ReplicasDiffer(RankRule):
    """Parameters, buffers or optimizer states that all ranks should have alike are not, by checksums of their bits.

    They should be alike if gradients are averaged (DistributedDataParallel, fully_shard with copies), if the ranks work
    on the same samples (tensor parallel), or if they were after a step of the training. Where the script splits
    parameters itself, those are not judged that differ before training, or whose gradients do. Of buffers, only those
    that do not change are judged: batch norms have their own ones on every rank.
    """

    code, name = "TR101", "replicas-differ"
    phase = Phase.UPDATE
    explains = ("TH6", "TH7", "TR102", "TR104")
    hint = (
        "Let all ranks compute the same update: call the wrapper rather than the module inside, clip by the norm of the"
        " whole model, change parameters on all ranks alike, and give all of them the same seed."
    )
    wrong = "Ranks that train on their own and average their weights now and then; ensembles."

    def find(self, history: History) -> Iterator[Finding]:
        found: set[tuple[str, str]] = set()
        parts = _parts(history)
        before: RankStep | None = None
        earlier: list[set[tuple[str, str]]] = []  # what differed in steps in which copies should have been alike
        for known in history.ranks:
            if not known.checked or len(known.facts) < 2:
                continue
            for split in known.splits:
                place = split.path, split.port
                is_due = _should_agree(known, split) and known.step >= history.first_step
                whole = (split.path, "param")  # parts have states of their own
                is_due |= any(not {place, whole} & apart for apart in earlier)
                is_due &= split.path not in parts
                if split.port == "buffer":
                    is_due = before is not None and split in before.splits  # the same as before, and so constant
                if split.port in known.checked and is_due and place not in found:
                    found.add(place)
                    yield self._finding(known, split, before)
            if known.step >= history.first_step or known.is_by_hand:
                earlier.append({(split.path, split.port) for split in known.splits})
            before = known

    def _finding(self, known: RankStep, split: Split, before: RankStep | None) -> Finding:
        what = {"param": "", "buffer": "the buffer ", "state": "the optimizer's state of "}[split.port]
        rank = _odd_one(split)
        message = f"replicas differ: {what}{split.path.rpartition('.')[2]} is not the same on {_where(known, [rank])}"
        if before is not None and before.step + 1 < known.step:
            message += f", since a step from {before.step + 1} to {known.step}"
        evidence: dict[str, Any] = {
            "rank": rank,
            "host": _host(known, rank),
            "parameter": split.path,
            "what": split.port,
        }
        return self.finding(message, owner(split.path), known.step, **evidence)


@register
class GradientsDiffer(RankRule):
    """The gradient of a parameter that all ranks have is not the same on them when the optimizer steps.

    Judged where gradients are averaged, where the ranks work on the same samples, or where they were alike in a step
    before; by more than a hundred-thousandth of the norm. If they were alike before clipping, the ranks clip by
    different norms.
    """

    code, name = "TR102", "gradients-differ"
    phase = Phase.BACKWARD
    explains = ("TR101", "TR104", "TH6", "TH7")
    hint = (
        "Call the wrapper (DistributedDataParallel) and not the module inside, leave no_sync() for the last"
        " micro-batch, and clip by the norm over all ranks: torch.nn.utils.clip_grad_norm_ on DTensors does."
    )
    wrong = "Optimizers that average the gradients, or the weights, themselves."
    least = 1e-5

    def find(self, history: History) -> Iterator[Finding]:
        first = _first_check(history)
        by_hand = set() if first is None or not first.is_by_hand else {split.path for split in first.splits}
        alike: set[str] = set()
        parts = _parts(history)
        found: set[str] = set()
        for known in history.ranks:
            if known.step < history.first_step or len(known.facts) < 2:
                continue
            apart = {s.path: s for s in known.splits if s.port == "step_grad_norm" and self._is_apart(s)}
            before = {s.path for s in known.splits if s.port == "param_grad_norm" and self._is_apart(s)}
            for path, split in apart.items():
                is_copy = _should_agree(known, split) or path in alike or (by_hand and path not in by_hand)
                if path not in found | parts and is_copy:
                    found.add(path)
                    yield self._finding(known, split, is_clipped=path not in before)
            alike |= {path for path, _ in history.summaries("step_grad_norm")} - apart.keys()

    def _is_apart(self, split: Split) -> bool:
        values = [value for value, *_ in split.values]
        return max(values) - min(values) > self.least * max(map(abs, values))

    def _finding(self, known: RankStep, split: Split, is_clipped: bool) -> Finding:
        is_same = len(_leads(known, split)) == 1
        why = "clipped by different norms" if is_clipped else "of the same samples" if is_same else "not averaged"
        ranks = [rank for _, rank, _ in split.values]
        norms = ", ".join(f"{norm} on rank {rank}" for norm, rank in zip(_told(split), ranks, strict=True))
        message = f"the gradient of {split.path.rpartition('.')[2]} differs between ranks ({why}): its norm is {norms}"
        rank = _odd_one(split)
        evidence: dict[str, Any] = {
            "rank": rank,
            "host": _host(known, rank),
            "parameter": split.path,
            "clipped": is_clipped,
        }
        return self.finding(message, owner(split.path), known.step, **evidence)


@register
class OddRank(RankRule):
    """The loss, the gradients or the activations of one rank are far from those of all others, in two measured steps.

    Far is 10 times for a loss, 30 for the norm of its own gradients and 8 for the root mean square of an output, and
    four times as far as the others are from one another. Of two ranks, the one that has changed is odd.
    """

    code, name = "TR104", "odd-rank"
    severity = Severity.WARNING
    explains = ("TH3", "TH4", "TH6")
    hint = (
        "Look at the data and the device of this rank: what it is fed, how that is scaled, and what its hardware"
        " computes."
    )
    wrong = "Ranks that train on different kinds of data on purpose."
    factors = {"loss": 10.0, "grad_norm": 30.0, "output": 8.0}  # noqa: RUF012 (never written to)
    spread = 4.0
    settled = 0.02  # of the first loss: below it, ratios mean nothing

    def find(self, history: History) -> Iterator[Finding]:
        steps = [known for known in history.ranks if known.tables]
        first_loss = _middle(steps[0].facts, "loss") if steps else math.nan
        streak: dict[tuple[str, str, int], list[RankStep]] = {}
        past: list[dict[tuple[str, str], dict[int, float]]] = []
        found: set[int] = set()
        for known in steps:
            values = dict(self._values(known, first_loss))
            now = {
                (what, site, rank): odd
                for (what, site), by_rank in values.items()
                for rank, odd in self._odd(known, what, site, by_rank, past)
            }
            streak = {key: [*streak.get(key, ()), known] for key in now}
            for what, site, rank in sorted(streak, key=lambda key: ("output", "grad_norm", "loss").index(key[0])):
                if len(streak[what, site, rank]) >= _IN_A_ROW and rank not in found:
                    found.add(rank)
                    yield self._finding(streak[what, site, rank][0], what, site, rank, values[what, site])
            past.append(values)

    def _values(self, known: RankStep, first_loss: float) -> Iterator[tuple[tuple[str, str], dict[int, float]]]:
        losses = _by_rank(known, "loss")
        if max(map(abs, losses.values()), default=0) > self.settled * abs(first_loss):
            yield ("loss", ""), losses
        yield ("grad_norm", ""), _by_rank(known, "grad_norm")
        mean, std = TABLE.index("mean"), TABLE.index("std")
        sizes = {
            rank: (table[:, mean].square() + table[:, std].square()).sqrt().tolist()
            for rank, table in known.tables.items()
        }
        for number, (path, port) in enumerate(known.places):
            if port.partition("[")[0] == "output":
                yield (
                    ("output", path),
                    {rank: size[number] for rank, size in sizes.items() if not math.isnan(size[number])},
                )

    def _odd(
        self, known: RankStep, what: str, site: str, by_rank: Mapping[int, float], past: list[Any]
    ) -> Iterator[tuple[int, float]]:
        """The ranks that are odd, with the logarithm of how far they are."""
        logs = {rank: math.log(abs(value)) for rank, value in by_rank.items() if value and math.isfinite(value)}
        if len(logs) < 2 or len(logs) < len(by_rank):
            return
        for rank, size in logs.items():
            others = [other for number, other in logs.items() if number != rank]
            middle = median(others)
            far, near = abs(size - middle), max(abs(other - middle) for other in others)
            if (
                far > math.log(self.factors[what])
                and far > self.spread * near
                and self._has_changed(what, site, rank, logs, past)
            ):
                yield rank, far

    def _has_changed(self, what: str, site: str, rank: int, logs: Mapping[int, float], past: list[Any]) -> bool:
        """Of two ranks, whether it is this one that has left what both had before; the larger, if that is unknown."""
        if len(logs) > 2:
            return True
        (other,) = [number for number in logs if number != rank]
        before = [values[what, site] for values in past[:-1] if what != "" and len(values.get((what, site), ())) == 2]
        known = [
            math.log(abs(value)) for values in before for value in values.values() if value and math.isfinite(value)
        ]
        if not known:
            return logs[rank] > logs[other]
        return abs(logs[rank] - median(known)) > abs(logs[other] - median(known))

    def _finding(self, known: RankStep, what: str, site: str, rank: int, by_rank: Mapping[int, float]) -> Finding:
        named = {"loss": "the loss", "grad_norm": "the norm of its own gradients", "output": "the size of the output"}[
            what
        ]
        others = median(value for number, value in by_rank.items() if number != rank)
        message = f"{_where(known, [rank])} is odd: {named} is {by_rank[rank]:.3g} there, {others:.3g} on the others"
        evidence: dict[str, Any] = {
            "rank": rank,
            "host": _host(known, rank),
            "value": plain(by_rank[rank]),
            "others": plain(others),
        }
        return self.finding(message, site, known.step, **evidence)


@register
class RankLeft(RankRule):
    """A rank was lost, or was the first to end in a training that failed, or took far fewer steps than the others.

    Far fewer is less than nine tenths, unless they do so on purpose, inside DistributedDataParallel's ``join()``.
    """

    code, name = "TR105", "rank-left"
    explains = ()
    hint = "Look at the log of this rank and of its host; the kernel's tells of a lack of memory."
    wrong = "Ranks that are replaced by an elastic launcher."
    least = 0.9

    def find(self, history: History) -> Iterator[Finding]:
        last = history.ranks[-1]
        states = [member.state for member in last.members.values()]
        if LOST in states:
            yield from self._lost(last, history.first_step)
        elif "failed" in states:
            yield from self._first(last)
        else:
            yield from self._short(last)

    def _lost(self, last: RankStep, first_step: int) -> Iterator[Finding]:
        for rank, member in last.members.items():
            if member.state == LOST:
                is_known = member.seen >= first_step
                after = f"after step {member.seen}" if is_known else "before its first measured step"
                yield self.finding(f"{_where(last, [rank])} was lost {after}", "", rank=rank, host=member.host)

    def _first(self, last: RankStep) -> Iterator[Finding]:
        """The rank that ended first: the others fail because they wait for it. What all raise alike began on none."""
        ended = {rank: member for rank, member in last.members.items() if member.steps is not None}
        if len({(member.state, member.error) for member in ended.values()}) < 2:
            return
        rank, member = min(ended.items(), key=lambda item: item[1].ended)
        why = member.error or {"ended": "it left the training, and others failed"}.get(member.state, member.state)
        message = f"{_where(last, [rank])} was the first to end, after {member.steps:,} steps: {why}"
        hint = "Look at what this rank did last; what the others raise then follows from it."
        found = self.finding(message, "", rank=rank, host=member.host, steps=member.steps, error=member.error)
        yield replace(found, hint=hint)

    def _short(self, last: RankStep) -> Iterator[Finding]:
        if any(member.apart for member in last.members.values()):
            return
        steps = {rank: member.steps for rank, member in last.members.items() if member.steps is not None}
        most = max(steps.values(), default=0)
        for rank, taken in steps.items():
            if taken < self.least * most:
                message = f"{_where(last, [rank])} took {taken:,} steps, and others {most:,}"
                found = self.finding(message, "", rank=rank, host=_host(last, rank), steps=taken, most=most)
                yield replace(found, hint="Give all ranks as many batches, or train inside join().")


@register
class SharedBatch(RankRule):
    """Ranks that should see different samples are given the same inputs, bit for bit, in two measured steps or more."""

    code, name = "TR106", "shared-batch"
    severity = Severity.WARNING
    phase = Phase.FORWARD
    explains = ()
    hint = "Give each rank its own samples: DistributedSampler (with set_epoch), or a seed that depends on the rank."
    wrong = "Ranks that split the model and not the data, where Monitor was not told so: pass mesh=."

    def find(self, history: History) -> Iterator[Finding]:
        first = _first_check(history)
        if first is not None and first.is_by_hand and not first.split:  # then the samples may be the same on purpose
            return
        seen: dict[tuple[int, ...], list[tuple[RankStep, tuple[Any, ...]]]] = {}
        for known in history.ranks:
            by_inputs: dict[tuple[Any, ...], list[int]] = {}
            for rank, facts in known.facts.items():
                if facts.get("inputs") and rank in known.members and known.members[rank].lead == rank:
                    by_inputs.setdefault((known.members[rank].stage, *facts["inputs"]), []).append(rank)
            for inputs, ranks in by_inputs.items():
                if len(ranks) > 1:
                    seen.setdefault(tuple(ranks), []).append((known, inputs))
        for group, times in seen.items():
            if len({inputs for _, inputs in times}) >= _IN_A_ROW:
                known, alike = times[0][0], list(group)
                message = f"{_where(known, alike)} are given the same batch"
                yield self.finding(message, "", known.step, ranks=alike, times=len(times))
                return


@register
class TrainedElsewhere(RankRule):
    """A parameter that all ranks have is changed by the optimizers of some of them only."""

    code, name = "TR107", "trained-on-some-ranks"
    phase = Phase.UPDATE
    explains = ("TR101",)
    hint = "Give the optimizer of every rank the same parameters, and freeze the same ones on all ranks."
    wrong = "Optimizers that share the work by rank (ZeRO), and have not sent the parameters yet."

    def find(self, history: History) -> Iterator[Finding]:
        seen: dict[str, list[tuple[RankStep, int]]] = {}
        for known in history.ranks:
            for split in known.splits:
                if split.port == "update_norm" and len({value == 0 for value, *_ in split.values}) == 2:
                    still = next(rank for value, rank, _ in split.values if value == 0)
                    seen.setdefault(split.path, []).append((known, still))
        for path, times in seen.items():
            if len(times) >= _IN_A_ROW:
                known, rank = times[0]
                message = f"{path.rpartition('.')[2]} is not trained on {_where(known, [rank])}, but on others"
                yield self.finding(message, owner(path), known.step, rank=rank, parameter=path)


@register
class NonfiniteOnOneRank(RankRule):
    """A value is NaN or Inf on some ranks first, and on the others later or never."""

    code, name = "TR108", "nonfinite-on-a-rank"
    cause = "nonfinite"
    explains = ("TH1", "TH6", "TH3", "TH4", "TH5", "TR101", "TR102", "TR104")
    hint = "Look at the samples that this rank had at this step, and at its hardware if they are as all others."
    wrong = "Masks of NaN that only some samples have."

    def find(self, history: History) -> Iterator[Finding]:
        by_loss: dict[int, int] = {}
        for known in history.ranks:
            for rank, facts in known.facts.items():
                if "nonfinite_loss" in facts:
                    by_loss.setdefault(rank, int(facts["nonfinite_loss"]))
        for known in history.ranks:
            here = {rank: facts["nonfinite"] for rank, facts in known.facts.items() if facts.get("nonfinite")}
            first_loss = min(by_loss.values(), default=math.inf)
            if here and known.step <= first_loss:
                if len(here) < len(known.facts):
                    rank = min(here)
                    what = "a value that is not finite began"
                    yield self._finding(known, rank, str(here[rank][0]), known.step, len(here), what)
                return
        if by_loss and history.ranks:
            step = min(by_loss.values())
            first = [rank for rank, at in by_loss.items() if at == step]
            with_loss = {rank for known in history.ranks for rank, facts in known.facts.items() if "loss" in facts}
            if len(first) < len(with_loss):
                what = "the loss is not finite first"
                yield self._finding(history.ranks[-1], first[0], "", step, len(first), what)

    def _finding(self, known: RankStep, rank: int, site: str, step: int, count: int, what: str) -> Finding:
        more = f" and {count - 1} more" if count > 1 else ""
        message = f"{what} on {_where(known, [rank])}{more}; the others get it from there"
        return self.finding(message, site, step, rank=rank, host=_host(known, rank))


@register
class SlowRank(RankRule):
    """From the beginning of a step to the end of its forward, one rank takes half as long again as any other.

    That part of a step is its own: in the backward, all ranks wait for the slowest. The difference has to be 5 ms or
    more in four of five measured steps, of at least eight, so that a busy machine is not taken for a slow one.
    """

    code, name = "TR109", "slow-rank"
    severity = Severity.WARNING
    explains = ()
    hint = (
        "Look at the clock and the temperature of its device, and at what else runs on its host; its loader may be"
        " slow."
    )
    wrong = "Ranks with longer samples."
    share, least, windows, often = 1.5, 0.005, 8, 0.8

    def find(self, history: History) -> Iterator[Finding]:
        last = history.ranks[-1]
        steps = [_by_rank(known, "seconds") for known in history.ranks[2:]]  # the first ones are slow anyway
        for rank, member in last.members.items():
            beside = {other for other, known in last.members.items() if known.stage == member.stage and other != rank}
            pairs = [
                (seconds[rank], max(seconds[other] for other in beside & seconds.keys()))
                for seconds in steps
                if rank in seconds and beside & seconds.keys()
            ]
            slow = [own > self.share * others and own - others > self.least for own, others in pairs]
            if len(slow) >= self.windows and sum(slow) >= self.often * len(slow):
                own, others = (median(values) for values in zip(*pairs, strict=True))
                message = f"{_where(last, [rank])} is slow: {1e3 * own:.3g} ms to the end of a forward"
                message += f", {1e3 * others:.3g} on the slowest of the others"
                yield self.finding(message, "", rank=rank, host=member.host, seconds=plain(own))


def _told(split: Split) -> list[str]:
    """Its values with as many digits as it takes to tell them apart."""
    for digits in range(3, 17):
        said = [f"{value:.{digits}g}" for value, *_ in split.values]
        if len(set(said)) == len(said):
            break
    return said


def _odd_one(split: Split) -> int:
    """The rank that differs from most; of two, the later one."""
    return min(split.values, key=lambda value: (value[2], -value[1]))[1]


def _should_agree(known: RankStep, split: Split) -> bool:
    """Whether the ranks should have the same value: gradients are averaged, or they work on the same samples."""
    return known.averages or len(_leads(known, split)) == 1


def _leads(known: RankStep, split: Split) -> set[int]:
    """Of the ranks that have the values, the first with the same samples."""
    return {known.members[rank].lead for _, rank, _ in split.values if rank in known.members}


def _parts(history: History) -> set[str]:
    """The parameters that the script has split itself.

    They differ before training. Those that begin alike, as zeros do, have gradients that differ between ranks with the
    same samples.
    """
    first = _first_check(history)
    if first is None or not (first.is_by_hand or first.split):
        return set()
    trained = next((known for known in history.ranks if len(_by_rank(known, "grad_norm")) > 1), first)
    apart = [(first, split) for split in first.splits if split.port == "param"]
    grads = [split for split in trained.splits if split.port == "param_grad_norm"]
    apart += [(trained, split) for split in grads if not _is_alike_in_teams(trained, split)]
    return {split.path for known, split in apart if known.split or not _should_agree(known, split)}


def _is_alike_in_teams(known: RankStep, split: Split) -> bool:
    """Whether ranks that work on the same samples have the same value; without any such ranks, whether all have it."""
    sizes = Counter(member.lead for member in known.members.values())
    return known.split and all(sizes[rank] and not total % sizes[rank] for _, rank, total in split.values)


def _first_check(history: History) -> RankStep | None:
    """The first time that the parameters of several ranks were compared."""
    return next((known for known in history.ranks if known.checked and len(known.facts) > 1), None)


def _host(known: RankStep, rank: int) -> str:
    return known.members[rank].host if rank in known.members else ""


def _where(known: RankStep, ranks: list[int]) -> str:
    """Ranks with their hosts, for people."""
    if len(ranks) > 1:
        return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
    host = _host(known, ranks[0])
    return f"rank {ranks[0]}{f' ({host})' if host else ''}"


def _by_rank(known: RankStep, fact: str) -> dict[int, float]:
    return {rank: float(facts[fact]) for rank, facts in known.facts.items() if fact in facts}


def _middle(facts: Mapping[int, Mapping[str, Any]], fact: str) -> float:
    values = [float(known[fact]) for known in facts.values() if fact in known]
    return median(values) if values else math.nan
