"""Programs of two processes: started once, as `python program.py`, they start themselves twice by torch's launcher.

Under ``python -m torch.distributed.run --standalone --nproc_per_node 2 program.py`` they are what they are.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import torch
from torch import distributed

from real.program import script


def two(train: Callable[[bool, int], float]) -> None:
    """Run ``train(repaired, seed)`` in two processes that gloo connects; each prints the metric that it returns."""
    if "RANK" not in os.environ:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
        raise SystemExit(subprocess.run([sys.executable, *launcher, *sys.argv], check=False).returncode)
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    script(train)
    distributed.barrier()
    distributed.destroy_process_group()


def apart(tensors: list[torch.Tensor]) -> float:
    """The largest difference between what the two ranks have."""
    mine = torch.cat([tensor.detach().flatten().float() for tensor in tensors])
    found = [torch.empty_like(mine) for _ in range(2)]
    distributed.all_gather(found, mine)
    return (found[0] - found[1]).abs().max().item()
