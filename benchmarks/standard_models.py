"""``benchmarks/rules.py --architectures``: what is said of standard architectures in ten steps of a sane recipe."""

from __future__ import annotations

import os
import time
import warnings
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any

import torch

import torchhook
from architectures import timm_models, transformers_models
from real.scoring import Said, warnings_of

STEPS = 10
MODELS: dict[str, tuple[Any, Callable[[], Any]]] = {
    f"{family.__name__.removeprefix('architectures.').removesuffix('_models')}/{name}": (family, make)
    for family in (transformers_models, timm_models)
    for name, make in family.MODELS.items()
}


def score_architectures(only: list[str], jobs: int) -> None:
    """Diagnose all of them; print the alarms, and how many architectures each rule alarms on."""
    names = [name for name in MODELS if not only or any(part in name for part in only)]
    false: dict[str, list[str]] = {}
    alarmed, seconds = 0, []
    with ProcessPoolExecutor(jobs) as pool:
        looks = {pool.submit(alarms, name): name for name in names}
        for look in as_completed(looks):
            said, took = look.result()
            alarmed += bool(said)
            seconds.append(took)
            for finding in said:
                print(f"{looks[look]}: {finding}", flush=True)
                false.setdefault(finding.code, []).append(looks[look])
    print("\n| rule | architectures | which |\n| --- | --: | --- |")
    for code, which in sorted(false.items()):
        print(f"| {code} | {len(set(which))} | {', '.join(_counted(which))} |")
    print(f"\nAn alarm on {alarmed} of {len(names)}; median of {sorted(seconds)[len(seconds) // 2]:.1f} s of CPU time.")


def alarms(name: str) -> tuple[list[Said], float]:
    """The findings of warning or above on a fresh model, and the seconds of CPU time; a crash is an alarm."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.set_num_threads(1)
    family, make = MODELS[name]
    began = time.process_time()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            model, batches = make()
            optimizer = torch.optim.AdamW(model.parameters(), family.RATES.get(name.partition("/")[2], 1e-3))
            report = torchhook.diagnose(model, batches, getattr(family, "LOSS", None), optimizer, steps=STEPS)
    except Exception as error:
        return [Said("error", "crash", "", "", f"{type(error).__name__}: {error}")], time.process_time() - began
    return warnings_of(report.findings), time.process_time() - began


def _counted(names: list[str]) -> list[str]:
    return [f"{name} ({n} times)" if n > 1 else name for name, n in Counter(names).items()]
