"""The precision and recall of the rules, over the zoo of healthy trainings and planted faults.

    PYTHONPATH=tests/site python benchmarks/rules.py --seeds 5000-5004
    PYTHONPATH=tests/site python benchmarks/rules.py --real --seeds 0-4      # the programs of tests/real
    PYTHONPATH=tests/site python benchmarks/rules.py --architectures       # those of tests/architectures

A fault counts as found if the first finding of the report has one of its codes, at one of its sites. On a healthy
training, every finding with severity warning or above counts as false. docs/benchmarks.md lists the seeds that were
used to set thresholds; only the numbers of other seeds are meaningful.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections import Counter
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from zoo import FAULTS, HEALTHY, Specimen
from zoo.inspecting import inspected, is_at


@dataclass
class Score:
    """Counts of planted faults and findings, by code of the rule."""

    planted: Counter[str] = field(default_factory=Counter)
    found: Counter[str] = field(default_factory=Counter)
    false: Counter[str] = field(default_factory=Counter)
    healthy: int = 0

    def add(self, specimen: Specimen, seed: int, job: Future[list[tuple[str, str, str]]]) -> None:
        """Count one training, and print it if the report is wrong."""
        try:
            worth = job.result()
        except Exception as error:
            worth = [("crash", "", f"{type(error).__name__}: {error}")]
        sites = specimen.sites_for(seed)
        if not specimen.codes:
            self.healthy += 1
            self.false.update(code for code, _, _ in worth)
            for _, _, said in worth:
                print(f"{specimen.name}, seed {seed}, is healthy, but got: {said}")
            return
        self.planted[specimen.codes[0]] += 1
        if worth and worth[0][0] in specimen.codes and is_at(worth[0][1], sites):
            self.found[specimen.codes[0]] += 1
            return
        self.false.update(code for code, _, _ in worth[:1])
        print(
            f"{specimen.name}, seed {seed}: wanted {', '.join(specimen.codes)} at {', '.join(sites[:3])}; got", end=" "
        )
        print(worth[0][2] if worth else "nothing")

    def show(self, seeds: str) -> None:
        """Print the table."""
        print(f"\n| rule | planted | found | recall | false |\n| --- |{' --: |' * 4}")
        for code in sorted({*self.planted, *self.false}):
            planted, found = self.planted[code], self.found[code]
            share = f"{found / planted:.2f}" if planted else "—"
            print(f"| {code} | {planted} | {found} | {share} | {self.false[code]} |")
        found, planted, false = (sum(counter.values()) for counter in (self.found, self.planted, self.false))
        print(f"\nSeeds {seeds}: {self.healthy} healthy trainings, {planted} with a fault.")
        print(f"Recall {found / max(planted, 1):.3f}, precision {found / max(found + false, 1):.3f}.")


def worth_a_look(name: str, seed: int) -> list[tuple[str, str, str]]:
    """Code, site and text of the findings in a specimen, warnings and above."""
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    specimen = next(specimen for specimen in (*HEALTHY, *FAULTS) if specimen.name == name)
    findings = inspected(specimen, seed).findings
    return [(finding.code, finding.site, str(finding)) for finding in findings if finding.severity >= "warning"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--real", action="store_true", help="score the programs of tests/real instead of the zoo")
    parser.add_argument(
        "--architectures", action="store_true", help="look at the models of tests/architectures instead"
    )
    parser.add_argument("--seeds", help="a seed, or a range such as 1000-1004; default: 1000, with --real 0-4")
    parser.add_argument("--only", default="", help="those whose name contains this; with --real: NAME,NAME,…")
    parser.add_argument("--modes", default="diagnose,run", help="with --real: diagnose, run, or both")
    parser.add_argument("--json", default="", metavar="FILE", help="with --real: write what was said")
    parser.add_argument("--jobs", type=int, default=2, help="number of processes")
    options = parser.parse_args()
    first, _, last = (options.seeds or ("0-4" if options.real else "1000")).partition("-")
    seeds = range(int(first), int(last or first) + 1)
    names = options.only.split(",") if options.only else []
    if options.architectures:
        from standard_models import score_architectures  # imports transformers and timm

        score_architectures(names, options.jobs)
    elif options.real:
        from real_programs import score_programs

        score_programs(seeds, tuple(options.modes.split(",")), names, options.jobs, options.json)
    else:
        score_zoo(seeds, options.only, options.jobs)


def score_zoo(seeds: range, only: str, jobs: int) -> None:
    """Look at all specimens; print what is wrong, and the table."""
    specimens = [specimen for specimen in (*HEALTHY, *FAULTS) if only in specimen.name]
    pairs = [(specimen, seed) for specimen in specimens for seed in seeds]
    score = Score()
    with ProcessPoolExecutor(jobs) as pool:
        looks = [pool.submit(worth_a_look, specimen.name, seed) for specimen, seed in pairs]
        for (specimen, seed), look in zip(pairs, looks, strict=True):
            score.add(specimen, seed, look)
    score.show(f"{seeds[0]}-{seeds[-1]}")


if __name__ == "__main__":
    main()
