"""``benchmarks/rules.py --real``: the diagnosis on the programs of `tests/real`, beside published tools."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import Any

from real.scoring import NAMES, Outcome, cases, outcome, program

HEAD = ["cause first", "precision", "alarm on a twin", "alarm on a healthy one", "right layer", "CPU s: median", "p90"]
PEERS = {"DeepFD": (0.55, 0.37), "NeuraLint": (0.36, 0.37), "UMLAUT": (0.25, 0.26), "DeepDiagnosis": (0.21, 0.30)}
"""Recall and precision that are published."""


def score_programs(seeds: range, modes: tuple[str, ...], only: list[str], jobs: int, file: str) -> None:
    """Look at all programs; print what is wrong, and the tables. `file` is written anew after each."""
    outcomes: list[Outcome] = []
    with ProcessPoolExecutor(jobs) as pool:
        for look in as_completed([pool.submit(outcome, case) for case in cases(only or NAMES, modes, seeds)]):
            outcomes.append(look.result())
            if wrong := outcomes[-1].wrong:
                print(f"{outcomes[-1].case}: {wrong}", flush=True)
            if file:
                Path(file).write_text(json.dumps([_plain(each) for each in outcomes], indent=1), encoding="utf-8")
    print(f"\n| | {' | '.join(HEAD)} |\n| --- |{' --: |' * len(HEAD)}")
    for mode in modes:
        print(_row(mode, [each for each in outcomes if each.case.mode == mode]))
    for name, (recall, precision) in PEERS.items():
        print(f"| {name} | {recall:.2f} | {precision:.2f} | — | — | — | {'278' if name == 'DeepFD' else '—'} | — |")
    print("\nWhat other tools reach is what was published, on other ports of such programs: the comparison is rough.")
    _show_classes(outcomes, modes)


def _plain(seen: Outcome) -> dict[str, Any]:
    return {**asdict(seen), "kind": seen.case.kind, "wrong": seen.wrong}


def _row(mode: str, outcomes: list[Outcome]) -> str:
    """A row of the table."""
    faulty, repaired, healthy = ([o for o in outcomes if o.case.kind == k] for k in ("faulty", "repaired", "healthy"))
    placed = [o for o in faulty if o.has_layer]
    cells = [
        _share(sum(o.found for o in faulty), len(faulty)),
        _share(sum(o.right for o in faulty), sum(len(o.said) for o in faulty)),
        _share(sum(o.alarm for o in repaired), len(repaired)),
        _share(sum(o.alarm for o in healthy), len(healthy)),
        _share(sum(o.at_layer for o in placed), len(placed)),
    ]
    seconds = sorted(o.seconds for o in outcomes if not o.crash) or [0.0]
    cells += [f"{statistics.median(seconds):.1f}", f"{seconds[int(0.9 * (len(seconds) - 1))]:.1f}"]
    return f"| `{mode}` | {' | '.join(cells)} |"


def _share(part: int, whole: int) -> str:
    return f"{part} of {whole} ({part / whole:.2f})" if whole else "—"


def _show_classes(outcomes: list[Outcome], modes: tuple[str, ...]) -> None:
    """How many faults of each class were found; a class is the first cause that a program's file lists."""
    print(f"\n| class | {' | '.join(modes)} | said instead |\n| --- |{' --: |' * len(modes)} --- |")
    faulty = [o for o in outcomes if o.case.kind == "faulty"]
    for name in sorted({program(o.case.name).CAUSES[0] for o in faulty}):
        mine = [o for o in faulty if program(o.case.name).CAUSES[0] == name]
        found = [
            _share(sum(o.found for o in by), len(by)) for by in ([o for o in mine if o.case.mode == m] for m in modes)
        ]
        instead = Counter(o.said[0].cause if o.said else "nothing" for o in mine if not o.found)
        print(f"| {name} | {' | '.join(found)} | {', '.join(f'{cause} {n}' for cause, n in instead.most_common())} |")
