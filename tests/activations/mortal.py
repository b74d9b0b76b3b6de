"""Harvests that do not live to the end: each is killed, some again while they go on, and the last life ends them.

Run as a script it makes one whole harvest and many killed ones, each in a process of its own, and says how many.
"""

import json
import os
import random
import signal
import sys
import time
import warnings
from pathlib import Path

import torch
from torch import nn

from torchhook import harvest
from torchhook.activations.store import Activations

BATCHES, SIZE, UNLUCKY = 4, 3, 13


class Net(nn.Module):
    """A row a token at one site, a row a sample at the other, and samples that it cannot stand."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.mix, self.head = nn.Embedding(20, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        nn.init.constant_(self.mix.bias[:1].detach(), 1e6)  # too much for half precision

    def forward(self, input_ids, attention_mask):
        if (input_ids == UNLUCKY).any():
            raise RuntimeError("what luck")
        return self.head(self.mix(self.embed(input_ids)).mean(1))


class Texts:
    """Batches of texts of all lengths, as a stream; the first of a shard, and some more samples, bring bad luck."""

    def __init__(self, pause=0.0, batches=BATCHES, unlucky=(6, 7, 8, 10), stops=None, error=KeyboardInterrupt):
        self.pause, self.batches, self.unlucky, self.stops, self.error = pause, batches, unlucky, stops, error

    def __iter__(self):
        random_numbers = torch.Generator().manual_seed(1)
        for number in range(self.batches):
            if number == self.stops:
                raise self.error
            time.sleep(self.pause)
            lengths = torch.randint(1, 6, (SIZE, 1), generator=random_numbers)
            ids = torch.randint(0, UNLUCKY, (SIZE, 5), generator=random_numbers)
            for place in range(SIZE):
                if number * SIZE + place in self.unlucky:
                    ids[place, 0] = UNLUCKY
            yield {"input_ids": ids, "attention_mask": (torch.arange(5) < lengths).long()}


def harvested(out, data, **options) -> Activations:
    """`data`, two batches a shard unless told otherwise, with a commit after each."""
    given = {"shard_bytes": 300, "commit_seconds": 0.0, "on_error": "skip", **options}
    return harvest(Net(), data, ["mix", "head"], out, progress=False, **given)


def files(out: Path) -> dict[str, bytes]:
    """All files of a store."""
    return {str(path.relative_to(out)): path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()}


class Reaper:
    """Kills this process at an operation on the disk, which is left half done where that can be."""

    def __init__(self, at: int | None) -> None:
        self.at, self.seen = at, 0
        for name in ("write", "pwrite", "fsync", "truncate", "replace"):
            setattr(os, name, self.watched(getattr(os, name), name))

    def watched(self, operation, name):
        def run(*args):
            self.seen += 1
            if self.seen == self.at:
                if name == "write":
                    operation(args[0], args[1][: len(args[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return operation(*args)

        return run


def live(out: Path, data: Texts, at: int | None = None, seconds: float | None = None) -> int | None:
    """One life; how many operations it had if it came to its end, and None if it was killed."""
    told, tell = os.pipe()
    child = os.fork()
    if not child:
        code = 1
        try:
            warnings.simplefilter("ignore")
            reaper = Reaper(at)
            harvested(out, data)
            seen = reaper.seen
            Reaper(None)
            with os.fdopen(tell, "w") as file:
                file.write(str(seen))
            code = 0
        finally:
            os._exit(code)
    os.close(tell)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    with os.fdopen(told) as file:
        text = file.read()
    _, status = os.waitpid(child, 0)
    if not os.WIFSIGNALED(status) and os.waitstatus_to_exitcode(status):
        raise SystemExit(f"{out}, killed at {at} or after {seconds} s: a life failed")
    return int(text) if text else None


def at_every_operation(folder: Path) -> dict[str, int]:
    """Killed at each in turn; every fifth again, somewhere else."""
    drawn, killed = random.Random(0), 0
    total = live(folder / "whole", Texts())
    for at in range(1, total + 1):
        lives = [at] if at % 5 else [at, drawn.randrange(1, total)]
        killed += sum(live(folder / str(at), Texts(), at=one) is None for one in lives)
        live(folder / str(at), Texts())
    return {"runs": total, "killed": killed}


def at_any_moment(folder: Path) -> dict[str, int]:
    """Thirty of them, each killed up to three times."""
    drawn, killed, data = random.Random(int(time.time())), 0, Texts(pause=0.002, batches=30)
    start = time.monotonic()
    live(folder / "whole", data)
    whole = time.monotonic() - start
    for number in range(30):
        for again in range(drawn.randint(1, 3)):
            seconds = drawn.uniform(0, 0.6 * whole / (again + 1))
            killed += live(folder / str(number), data, seconds=seconds) is None
        live(folder / str(number), data)
    return {"runs": 30, "killed": killed}


if __name__ == "__main__":
    torch.set_num_threads(1)
    how = {"operations": at_every_operation, "moments": at_any_moment}[sys.argv[1]]
    print(json.dumps(how(Path(sys.argv[2]))))
