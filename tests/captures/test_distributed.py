"""Two real ranks: the names and values of one process, and no rank waits for one that captures alone."""

import faulthandler
import os
import time
import traceback
import warnings
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from specimens import hooks_of
from torchhook import TorchhookError, capture, edit, edits, select
from torchhook.core import shards

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="needs torch.distributed with gloo"
)

TIMEOUT = 100.0


class Ranks:
    """Two processes that run a function of this file together; new ones after a failure."""

    def __init__(self, folder):
        self.folder = folder
        self.started = 0
        self.workers = []

    def __call__(self, function, *args, timeout=TIMEOUT):
        if not self.workers:
            self._start()
        for _, pipe in self.workers:
            pipe.send((function, args, timeout))
        errors, deadline = {}, time.monotonic() + timeout
        waiting = set(range(2))
        while waiting and time.monotonic() < deadline:
            for rank in sorted(waiting):
                process, pipe = self.workers[rank]
                if pipe.poll(0.02):
                    try:
                        error = pipe.recv()
                    except EOFError:
                        process.join(5)
                        error = f"died with exit code {process.exitcode}"
                    waiting.discard(rank)
                    if error is not None:
                        errors[rank] = error
                        deadline = min(deadline, time.monotonic() + 5)  # the other one may wait for it in vain
        if errors or waiting:
            self.stop()
        if errors:
            pytest.fail("\n".join(f"rank {rank}: {error}" for rank, error in sorted(errors.items())), pytrace=False)
        if waiting:
            stacks = "\n".join(f"rank {rank}: {self._log(rank).read_text()}" for rank in sorted(waiting))
            pytest.fail(f"deadlock: no end after {timeout} s\n{stacks}", pytrace=False)

    def _start(self):
        self.started += 1
        spawn = mp.get_context("spawn")
        for rank in range(2):
            here, there = spawn.Pipe()
            store = str(self.folder / f"store{self.started}")
            process = spawn.Process(target=_work, args=(rank, store, str(self._log(rank)), there), daemon=True)
            process.start()
            there.close()  # else its end would not be noticed
            self.workers.append((process, here))
        for _, pipe in self.workers:
            assert pipe.poll(TIMEOUT) and pipe.recv() == "ready"

    def stop(self):
        for process, pipe in self.workers:
            process.kill()
            process.join()
            pipe.close()
        self.workers.clear()

    def _log(self, rank):
        return self.folder / f"stack{self.started}-{rank}"


def _work(rank, store, log, pipe):
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # FSDP takes an accelerator where it sees one
    warnings.filterwarnings("error", category=UserWarning, module="torchhook")
    torch.set_num_threads(1)
    # The default timeout of half an hour: a collective that no other rank joins is a deadlock, not an error.
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    pipe.send("ready")
    with open(log, "w") as stacks:  # noqa: PTH123
        while True:
            function, args, timeout = pipe.recv()
            faulthandler.dump_traceback_later(timeout * 0.95, file=stacks)
            error = None
            try:
                function(rank, *args)
                dist.barrier()  # which only ranks in step get through
            except BaseException:
                error = traceback.format_exc()
            faulthandler.cancel_dump_traceback_later()
            pipe.send(error)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    ranks = Ranks(tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.stop()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(8, 16)
        self.act = nn.ReLU()
        self.fc2 = nn.Linear(16, 4)

    def forward(self, x):
        return self.fc2(self.act(self.fc1(x)))


PATHS = ["fc1", "act", "fc2"]
PARAMETERS = ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]


def net():
    torch.manual_seed(0)
    return Net()


def batch(number):
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(number))


def loss(y):
    return y.square().sum()


class Expected:
    """What one process computes, without torchhook."""

    def __init__(self, x, scale=1.0):
        model = net()
        hidden = model.fc1(x)
        active = model.act(hidden * scale)
        result = model.fc2(active)
        self.outputs = {"fc1": hidden, "act": active, "fc2": result}
        self.inputs = {"fc1": x, "act": hidden, "fc2": active}
        for value in self.outputs.values():
            value.retain_grad()
        loss(result).backward()
        self.grads = {path: value.grad for path, value in self.outputs.items()}
        self.params = dict(model.named_parameters())
        self.param_grads = {path: parameter.grad for path, parameter in self.params.items()}


def same(actual, expected):
    assert type(actual) is torch.Tensor, type(actual)
    assert expected.abs().sum() > 0
    torch.testing.assert_close(actual, expected.detach())


def mesh():
    return dist.init_device_mesh("cpu", (2,))


def ddp():
    return DistributedDataParallel(net())


def fsdp1():
    from torch.distributed.fsdp import FullyShardedDataParallel

    model, cpu = net(), torch.device("cpu")
    model.fc1 = FullyShardedDataParallel(model.fc1, device_id=cpu)
    return FullyShardedDataParallel(model, device_id=cpu)


def fsdp2():
    """A unit of its own for fc1, while fc2 belongs to that of the root."""
    from torch.distributed.fsdp import fully_shard

    model = net()
    fully_shard(model.fc1, mesh=mesh())
    return fully_shard(model, mesh=mesh())


def tensor_parallel(**options):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    return parallelize_module(net(), mesh(), {"fc1": ColwiseParallel(**options), "fc2": RowwiseParallel(**options)})


def tensor_parallel_in_dtensors():
    return tensor_parallel(use_local_output=False)


DATA_PARALLEL = [ddp, fsdp1, fsdp2]
TENSOR_PARALLEL = [tensor_parallel, tensor_parallel_in_dtensors]
ALL = [*DATA_PARALLEL, *TENSOR_PARALLEL]


def trained(make):
    """After a step, for what is done lazily in the first."""
    model = make()
    loss(model(batch(9))).backward()
    model.zero_grad()
    return model


# --- names, which need no second process


@pytest.mark.parametrize("wrap", [torch.compile, nn.DataParallel])
def test_a_wrapped_model_has_the_names_of_the_model(wrap):
    model = net()
    wrapped = wrap(model)
    assert "fc1" not in dict(wrapped.named_modules())
    assert select(wrapped) == {path: model.get_submodule(path) for path in PATHS}
    assert select(wrapped, "fc1") == {"fc1": model.fc1}
    assert select(wrapped, nn.Linear) == select(wrapped, "fc*") == {"fc1": model.fc1, "fc2": model.fc2}


@pytest.mark.parametrize("wrap", [torch.compile, nn.DataParallel, lambda model: nn.DataParallel(torch.compile(model))])
def test_names_that_a_wrapped_model_gives_itself_are_accepted(wrap):
    model = net()
    wrapped = wrap(model)
    names = {name: module for name, module in wrapped.named_modules() if not module._modules}
    assert len(names) == 3
    for name, module in names.items():
        assert list(select(wrapped, name).values()) == [module], name


def test_the_name_of_the_wrapped_model_itself_is_its_root():
    model = net()
    assert select(torch.compile(model), "_orig_mod") == {"": model}
    assert select(nn.DataParallel(model), "module") == {"": model}


def test_checkpoint_wrappers_are_seen_through():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = net()
    inner = model.fc1
    model.fc1 = checkpoint_wrapper(inner)
    assert select(model, "fc1") == select(model, "fc1._checkpoint_wrapped_module") == {"fc1": inner}
    assert list(select(model)) == PATHS


def test_data_parallel_gives_what_the_model_gives():
    x, model = batch(0), nn.DataParallel(net())
    expected = Expected(x)
    with capture(model, "fc1", "module.fc2", grads=True, params=True) as acts:
        loss(model(x)).backward()
    assert list(acts) == ["fc1", "fc2"]
    for path in acts:
        same(acts[path].output, expected.outputs[path])
        same(acts[path].grad, expected.grads[path])
    for path in PARAMETERS:
        same(acts[path].param, expected.params[path])
        same(acts[path].grad, expected.param_grads[path])
    same(acts["module.fc2"].output, expected.outputs["fc2"])


# --- two ranks that do the same


@pytest.mark.matrix(
    "sharded (2 gloo ranks)",
    "DDP, FSDP1, FSDP2 and tensor parallel: the same names as in one process, without those of wrappers",
)
@pytest.mark.parametrize("make", ALL)
def test_sites_have_the_names_of_one_process(ranks, make):
    ranks(check_names, make)


def check_names(rank, make):
    model = make()
    assert list(select(model)) == PATHS
    assert list(select(model, "**")) == PATHS
    assert list(select(model, "fc*")) == list(select(model, nn.Linear)) == ["fc1", "fc2"]
    with capture(model, full=True) as acts:
        model(batch(0))
    assert list(acts) == PATHS
    assert acts.order == [(path, 0) for path in PATHS]


@pytest.mark.parametrize(
    ("make", "written"),
    [
        (ddp, "module.fc1"),
        (fsdp1, "_fsdp_wrapped_module.fc1"),
        (fsdp1, "_fsdp_wrapped_module.fc1._fsdp_wrapped_module"),
    ],
)
def test_names_with_those_of_wrappers_in_them_are_accepted(ranks, make, written):
    ranks(check_written, make, written)


def check_written(rank, make, written):
    x, model = batch(rank), make()
    assert written in dict(model.named_modules())
    with capture(model, written) as acts:
        model(x)
    assert list(acts) == ["fc1"]
    same(acts["fc1"].output, Expected(x).outputs["fc1"])
    same(acts[written].output, Expected(x).outputs["fc1"])


@pytest.mark.matrix(
    "sharded (2 gloo ranks)", "DDP, FSDP1 and FSDP2: each rank sees the values and gradients of its own batch"
)
@pytest.mark.parametrize("make", DATA_PARALLEL)
def test_data_parallel_ranks_see_the_values_and_gradients_of_their_own_batch(ranks, make):
    ranks(check_data_parallel, make)


def check_data_parallel(rank, make):
    x, model = batch(rank), trained(make)
    expected, before = Expected(x), hooks_of(model)
    for full in (False, True):
        with capture(model, *PATHS, inputs=True, grads=True, full=full) as acts:
            loss(model(x)).backward()
        for path in PATHS:
            same(acts[path].input, expected.inputs[path])
            same(acts[path].output, expected.outputs[path])
            same(acts[path].grad, expected.grads[path])
        assert hooks_of(model) == before


def test_ddp_has_whole_parameters_and_the_gradients_of_its_own_batch(ranks):
    ranks(check_ddp_parameters)


def check_ddp_parameters(rank):
    x, model = batch(rank), trained(ddp)
    expected, before = Expected(x), hooks_of(model)
    with capture(model, "fc1", "module.fc2", params=True, grads=True) as acts:
        loss(model(x)).backward()
    for path in PARAMETERS:
        same(acts[path].param, expected.params[path])
        same(acts[path].grad, expected.param_grads[path])
    assert hooks_of(model) == before


@pytest.mark.matrix(
    "sharded (2 gloo ranks)", "FSDP2: a parameter is its local shard, or with `full=True` the whole tensor"
)
@pytest.mark.parametrize("full", [False, True])
def test_fsdp2_parameters_are_the_local_shard_or_in_full(ranks, full):
    ranks(check_fsdp2_parameters, full)


def check_fsdp2_parameters(rank, full):
    x, model = batch(rank), trained(fsdp2)
    expected, before = Expected(x), hooks_of(model)
    with capture(model, "fc1", "fc2", params=True, full=full) as acts:
        loss(model(x)).backward()
    for path in PARAMETERS:
        whole = expected.params[path]
        same(acts[path].param, whole if full else whole.chunk(2)[rank])
    assert hooks_of(model) == before


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("evaluated", [False, True])
def test_fsdp2_gradients_of_parameters_are_the_mean_of_the_ranks(ranks, full, evaluated):
    ranks(check_fsdp2_gradients, full, evaluated)


def check_fsdp2_gradients(rank, full, evaluated):
    model = trained(fsdp2)
    if evaluated:  # which leaves the parameters of the root's unit gathered
        with torch.no_grad():
            model(batch(5))
    per_rank = [Expected(batch(0)).param_grads, Expected(batch(1)).param_grads]
    with capture(model, "fc1", "fc2", params=True, grads=True, full=full) as acts:
        loss(model(batch(rank))).backward()
    for path in PARAMETERS:
        mean = (per_rank[0][path] + per_rank[1][path]) / 2
        same(acts[path].grad, mean if full else mean.chunk(2)[rank])


@pytest.mark.matrix(
    "sharded (2 gloo ranks)", "tensor parallel: values and gradients are local shards, as plain tensors"
)
@pytest.mark.parametrize("make", TENSOR_PARALLEL)
def test_tensor_parallel_ranks_see_their_shard(ranks, make):
    ranks(check_shards, make)


def check_shards(rank, make):
    x, model = batch(0), trained(make)
    expected, before = Expected(x), hooks_of(model)
    with capture(model, *PATHS, inputs=True, grads=True, params=True) as acts:
        loss(model(x)).backward()

    def shard(value, dim=-1):
        return value.chunk(2, dim)[rank]

    same(acts["fc1"].input, x)
    for path in ("fc1", "act"):
        same(acts[path].output, shard(expected.outputs[path]))
        same(acts[path].grad, shard(expected.grads[path]))
    same(acts["fc2"].input, shard(expected.inputs["fc2"]))
    same(acts["fc2"].output, expected.outputs["fc2"])
    same(acts["fc2"].grad, expected.grads["fc2"])
    for path, dim in (("fc1.weight", 0), ("fc1.bias", 0), ("fc2.weight", 1)):
        same(acts[path].param, shard(expected.params[path], dim))
        same(acts[path].grad, shard(expected.param_grads[path], dim))
    same(acts["fc2.bias"].param, expected.params["fc2.bias"])
    same(acts["fc2.bias"].grad, expected.param_grads["fc2.bias"])
    assert hooks_of(model) == before


@pytest.mark.matrix(
    "sharded (2 gloo ranks)", "tensor parallel: with `full=True` outputs and parameters are those of one process"
)
@pytest.mark.parametrize("make", TENSOR_PARALLEL)
def test_tensor_parallel_outputs_and_parameters_in_full_are_those_of_one_process(ranks, make):
    ranks(check_full, make)


def check_full(rank, make):
    x, model = batch(0), trained(make)
    expected, before = Expected(x), hooks_of(model)
    time.sleep(rank)  # ranks are never quite together
    with capture(model, "fc1", "fc2", grads=True, params=True, full=True) as acts:
        loss(model(x)).backward()
    for path in ("fc1", "fc2"):
        same(acts[path].output, expected.outputs[path])
        same(acts[path].grad, expected.grads[path])
    for path in PARAMETERS:
        same(acts[path].param, expected.params[path])
        same(acts[path].grad, expected.param_grads[path])
    assert hooks_of(model) == before


@pytest.mark.parametrize("make", TENSOR_PARALLEL)
def test_tensor_parallel_inputs_in_full_are_those_of_one_process(ranks, make):
    ranks(check_full_inputs, make)


def check_full_inputs(rank, make):
    x, model = batch(0), make()
    with capture(model, "fc1", "fc2", inputs=True, full=True) as acts:
        model(x)
    same(acts["fc1"].input, x)
    same(acts["fc2"].input, Expected(x).inputs["fc2"])


def test_full_values_are_plain_tensors_that_later_writes_leave_alone(ranks):
    ranks(check_overwritten)


def check_overwritten(rank):
    x, model = batch(0), tensor_parallel_in_dtensors()
    with torch.no_grad(), capture(model, "fc2", "", full=True) as acts:
        model(x).zero_()
    same(acts["fc2"].output, Expected(x).outputs["fc2"])
    same(acts[""].output, Expected(x).outputs["fc2"])


@pytest.mark.matrix("sharded (2 gloo ranks)", "an edit on all ranks has the same effect as in one process")
@pytest.mark.parametrize("make", ALL)
def test_an_edit_on_all_ranks_acts_as_on_one_process(ranks, make):
    ranks(check_edit, make)


def check_edit(rank, make):
    x, model = batch(rank if make in DATA_PARALLEL else 0), trained(make)
    expected, before = Expected(x, scale=-2.0), hooks_of(model)
    with edit(model, {"fc1": edits.scale(-2.0)}), capture(model, "fc2", grads=True) as acts:
        loss(model(x)).backward()
    same(acts["fc2"].output, expected.outputs["fc2"])
    same(acts["fc2"].grad, expected.grads["fc2"])
    assert hooks_of(model) == before


# --- one rank that looks on alone


@pytest.mark.matrix("sharded (2 gloo ranks)", "a capture on one rank does not block the others")
@pytest.mark.parametrize("make", ALL)
def test_a_capture_on_one_rank_keeps_no_other_waiting(ranks, make):
    ranks(check_capture_on_one_rank, make)


def check_capture_on_one_rank(rank, make):
    x, model = batch(rank if make in DATA_PARALLEL else 0), trained(make)
    expected, before = Expected(x), hooks_of(model)
    looks = capture(model, *PATHS, inputs=True, grads=True, params=make is not fsdp1) if rank else nullcontext()
    with looks as acts:
        loss(model(x)).backward()
    if rank:
        part = slice(8, 16) if make in TENSOR_PARALLEL else slice(None)
        same(acts["fc1"].output, expected.outputs["fc1"][:, part])
        same(acts["fc1"].grad, expected.grads["fc1"][:, part])
        same(acts["fc2"].output, expected.outputs["fc2"])
    assert hooks_of(model) == before
    loss(model(x)).backward()


@pytest.mark.parametrize("make", ALL)
def test_an_edit_on_one_rank_keeps_no_other_waiting(ranks, make):
    # The zeros have no graph. Where gradients are reduced, the other rank still waits for those of fc1.
    ranks(check_edit_on_one_rank, make, timeout=30)


def check_edit_on_one_rank(rank, make):
    x, model = batch(rank if make in DATA_PARALLEL else 0), trained(make)
    before = hooks_of(model)
    with edit(model, {"fc1": edits.zero}) if rank else nullcontext():
        y = model(x)
        loss(y).backward()
    if rank and make in DATA_PARALLEL:
        same(y.detach(), net().fc2.bias.expand(len(x), -1))
    assert hooks_of(model) == before
    loss(model(x)).backward()


@pytest.mark.slow
@pytest.mark.matrix("sharded (2 gloo ranks)", "`full=True` on only one rank raises, and no rank hangs")
@pytest.mark.parametrize("make", [fsdp2, *TENSOR_PARALLEL])
def test_a_full_capture_on_one_rank_alone_raises(ranks, make):
    # All ranks have to gather together, so torchhook has to notice by itself that one of them is alone: torch waits
    # for half an hour, and gloo may even abort the process when the others go on with something else.
    ranks(check_full_on_one_rank, make, timeout=30)


def check_full_on_one_rank(rank, make):
    x, model = batch(0), trained(make)
    before, patience = hooks_of(model), shards.PATIENCE
    for alone in (1, 0):  # what one rank asked for in vain must not answer the other
        if rank == alone:
            shards.PATIENCE = 1.0
            with pytest.raises(TorchhookError, match="rank"):
                with capture(model, "fc1", "fc2", grads=True, params=True, full=True):
                    loss(model(x)).backward()
            shards.PATIENCE = patience
        loss(model(x)).backward()  # the other ranks go on
        assert hooks_of(model) == before
    with capture(model, "fc1", full=True) as acts:  # and together they can
        model(x)
    same(acts["fc1"].output, Expected(x).outputs["fc1"])
