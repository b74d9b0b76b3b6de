"""Under DDP and FSDP2: calls that a rank can run alone are replayed; for others, a note says why not."""

import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import torch
from sick_models import Divide, Sqrt, linear
from torch import nn
from torch.distributed.fsdp import fully_shard
from torchhook.origins import Catch

torch.distributed.init_process_group("gloo", init_method="file://{file}", rank=0, world_size=1)

def told(model, x, backward):
    with Catch(model, None, "record") as catch:
        out = model(x)
        if backward:
            out.sum().backward()
    origin = catch.origin
    print("|".join([origin.path, origin.phase, origin.op, origin.note]))

def sharded(*layers):
    model = nn.Sequential(*layers)
    fully_shard(model)
    return model

ones, zeros = torch.ones(2, 4), torch.zeros(2, 4)
told(nn.parallel.DistributedDataParallel(nn.Sequential(linear(), Divide(), linear())), ones, False)
told(nn.parallel.DistributedDataParallel(nn.Sequential(linear(), Sqrt(), linear())), zeros, True)
told(sharded(linear(), Divide(), linear()), ones, False)
told(sharded(linear(), Sqrt(), linear()), zeros, True)
broken = linear()
broken.weight.data.fill_(3e38)
fully_shard(broken)
told(nn.Sequential(broken), ones, False)
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_one_rank_of_each(tmp_path):
    run = [sys.executable, "-c", CODE.replace("{file}", str(tmp_path / "store"))]
    result = subprocess.run(run, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=200, check=False)
    assert result.returncode == 0, result.stderr
    *lines, last = result.stdout.split("\n")[:5]
    found = ["1|forward|aten.div|", "1|backward|SqrtBackward0 (aten.div)|"]
    assert lines == [*found, *found]
    assert last.startswith("0|forward||not replayed: all ranks compute it together")
