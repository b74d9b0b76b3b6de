"""How right the rules are: precision and recall over the zoo of healthy trainings and planted faults.

    PYTHONPATH=tests/site python benchmarks/rules.py --seeds 100-104

A fault counts as found if the first finding of the report has one of its codes, at one of its places. On a healthy
training every finding of a warning or above counts as false. Thresholds were set on seeds 0 to 9; the numbers to
believe are those of other seeds.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))


def report_on(name: str, seed: int):
    """The report on one specimen of the zoo."""
    import torch

    from zoo import FAULTS, HEALTHY
    from zoo.inspecting import inspected

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    specimen = next(specimen for specimen in (*HEALTHY, *FAULTS) if specimen.name == name)
    begun = time.perf_counter()
    report = inspected(specimen, seed)
    return report, specimen.sites_for(seed), time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", default="0-2", help="one seed, or a range of them")
    parser.add_argument("--only", default="", help="specimens whose name has this in it")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    first, _, last = options.seeds.partition("-")
    seeds = range(int(first), int(last or first) + 1)

    from zoo import FAULTS, HEALTHY
    from zoo.inspecting import is_at

    specimens = [specimen for specimen in (*HEALTHY, *FAULTS) if options.only in specimen.name]
    true, false, planted, seconds = Counter(), Counter(), Counter(), 0.0
    misses = []
    with ProcessPoolExecutor(options.jobs) as pool:
        jobs = {
            (specimen, seed): pool.submit(report_on, specimen.name, seed) for specimen in specimens for seed in seeds
        }
        for (specimen, seed), job in jobs.items():
            try:
                report, sites, spent = job.result()
            except Exception as error:
                misses.append(f"{specimen.name} {seed}: raised {type(error).__name__}: {error}")
                planted[specimen.codes[:1] or ("none",)] += 1
                continue
            seconds += spent
            worth = [finding for finding in report.findings if finding.severity >= "warning"]
            if not specimen.codes:
                false.update(finding.code for finding in worth)
                misses += [f"{specimen.name} {seed}: healthy, but {finding}" for finding in worth]
                continue
            planted[specimen.codes[0]] += 1
            if worth and worth[0].code in specimen.codes and is_at(worth[0].site, sites):
                true[specimen.codes[0]] += 1
            else:
                if worth:
                    false[worth[0].code] += 1
                shown = [str(finding) for finding in worth[:3]]
                misses.append(
                    f"{specimen.name} {seed}: wanted {specimen.codes} at {sites[:4]}, got {shown or 'nothing'}"
                )
    print("\n".join(misses))
    print(f"\n{'rule':<8}{'planted':>8}{'found':>8}{'recall':>8}{'false':>8}")
    for code in sorted({*planted, *false}, key=str):
        share = f"{true[code] / planted[code]:.2f}" if planted[code] else ""
        print(f"{code!s:<8}{planted[code]:>8}{true[code]:>8}{share:>8}{false[code]:>8}")
    found, wrong, all_planted = sum(true.values()), sum(false.values()), sum(planted.values())
    healthy = sum(not specimen.codes for specimen in specimens) * len(seeds)
    print(
        f"\nseeds {options.seeds}: {healthy} healthy trainings, {all_planted} faults, {seconds / max(len(jobs), 1):.1f} s each"
    )
    print(f"recall {found / max(all_planted, 1):.3f}, precision {found / max(found + wrong, 1):.3f}")


if __name__ == "__main__":
    main()
