"""Passes: what keep= counts, where they end, and who sees them."""

import asyncio
import contextvars
import threading

import pytest
import torch
from torch import nn

from specimens import hooks_of
from torchhook import NotRecordedError, Record, Ring, Session, SilentError, Tap, capture, every, first, sample


class Branching(nn.Module):
    """Calls one of two layers, one of them several times."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Identity(), nn.Identity()

    def forward(self, x, times=1, other=False):
        if other:
            return self.b(x)
        for _ in range(times):
            x = self.a(x + 1)
        return x


def values(outputs):
    return [int(value) for value in outputs]


def test_keep_holds_every_call_of_the_newest_passes():
    net = Branching()
    for keep, expected in ((1, [31, 32]), (2, [21, 31, 32]), (None, [11, 12, 13, 21, 31, 32])):
        with capture(net, "a", keep=keep) as acts:
            for start, times in ((10, 3), (20, 1), (30, 2)):
                net(torch.tensor(start), times=times)
        assert values(acts["a"].outputs) == expected
        assert int(acts["a"].output) == 32
        assert acts.order[-2:] == [("a", 0), ("a", 1)]


def test_what_did_not_fire_in_the_newest_pass_is_not_there():
    net = Branching()
    with capture(net) as acts:
        net(torch.tensor(1))
        net(torch.tensor(1), other=True)
        assert list(acts) == ["b"] and acts["a"].outputs == []
        with pytest.raises(NotRecordedError, match="'a' was not called in the kept passes.*branch was not taken"):
            _ = acts["a"].output


def test_a_forward_inside_the_models_forward_is_the_same_pass():
    class Recursive(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Identity()

        def forward(self, x):
            x = self.layer(x - 1)
            return self(x) if x > 0 else x

    net = Recursive()
    with capture(net, "layer", "", inputs=True, keep=2) as acts:
        net(torch.tensor(3))
        net(torch.tensor(2))
    assert values(acts["layer"].outputs) == [2, 1, 0, 1, 0]
    assert values(acts[""].inputs) == [3, 2, 1, 2, 1]
    assert [call for path, call in acts.order if path == ""] == [2, 1, 0, 1, 0]  # the innermost returns first


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_pass_that_raised_is_over(error):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Identity()

        def forward(self, x):
            x = self.a(x)
            if x < 0:
                raise error
            return x

    net = Net()
    with capture(net, inputs=True) as acts:
        with pytest.raises(error):
            net(torch.tensor(-1))
        assert values(acts["a"].outputs) == [-1]
        net(torch.tensor(2))
        assert values(acts["a"].outputs) == values(acts["a"].inputs) == [2]


def test_an_error_that_the_model_handles_does_not_confuse_the_calls():
    class Fragile(nn.Module):
        def forward(self, x):
            if x < 0:
                raise ValueError
            return x

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Fragile()

        def forward(self, x):
            try:
                return self.inner(-x)
            except ValueError:
                return self.inner(x)

    with capture(Net(), "inner", inputs=True) as acts:
        acts._session.model(torch.tensor(5))
    assert values(acts["inner"].inputs) == [-5, 5] and values(acts["inner"].outputs) == [5]
    assert acts.order == [("inner", 1)]


def test_calls_outside_of_a_forward_are_kept_one_by_one_and_bounded():
    net = nn.Sequential(nn.Identity(), nn.Identity())
    with capture(net, keep=2, inputs=True) as acts:
        for number in range(5):
            net[0](torch.tensor(number))
        net[1](torch.tensor(9))
        assert values(acts["0"].outputs) == [3, 4] and values(acts["1"].outputs) == [9]
        net.forward(torch.tensor(7))
        assert values(acts["0"].outputs) == [4, 7] and values(acts["1"].inputs) == [9, 7]
        net(torch.tensor(8))
        net(torch.tensor(8))
        assert values(acts["0"].outputs) == [4, 7, 8, 8]  # until a pass has to go
        net(torch.tensor(8))
        assert values(acts["0"].outputs) == [8, 8]


def test_a_thread_sees_its_own_passes_and_scope_all_everybodys():
    net = nn.Sequential(nn.Identity())
    with capture(net, keep=None) as mine, capture(net, keep=None, scope="all") as all_of_them:
        thread = threading.Thread(target=lambda: net(torch.tensor(1)))
        thread.start()
        thread.join()
        net(torch.tensor(2))
    assert values(mine["0"].outputs) == [2]
    assert sorted(values(all_of_them["0"].outputs)) == [1, 2]


def test_scope_all_keeps_the_calls_of_each_thread_together():
    net = nn.Sequential(nn.Identity(), nn.Identity())
    ring = Ring()
    start = threading.Barrier(4)

    def work(number):
        start.wait()
        for _ in range(200):
            net(torch.tensor(number))

    with Session(net, [Tap("*", Record(ring))], scope="all"):
        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    by_pass = {}
    for entry in ring.entries():
        by_pass.setdefault(entry.pass_number, []).append((entry.site.path, entry.call, int(entry.value)))
    assert len(by_pass) == 800
    assert all([(path, call) for path, call, _ in calls] == [("0", 0), ("1", 0)] for calls in by_pass.values())
    assert all(len({value for _, _, value in calls}) == 1 for calls in by_pass.values())


def test_asyncio_tasks_see_their_own_passes():
    net = nn.Sequential(nn.Identity())

    async def work(number):
        with capture(net, keep=None) as acts:
            for _ in range(5):
                await asyncio.sleep(0)
                net(torch.tensor(number))
            await asyncio.sleep(0)
        return values(acts["0"].outputs)

    async def main():
        with capture(net, keep=None) as outer:
            results = await asyncio.gather(work(1), work(2))
        return results, values(outer["0"].outputs)

    results, outer = asyncio.run(main())
    assert results == [[1] * 5, [2] * 5]
    assert sorted(outer) == [1] * 5 + [2] * 5  # tasks that were started inside see the outer session


def test_another_context_is_not_seen_but_a_later_notebook_cell_is():
    net = nn.Sequential(nn.Identity())
    acts = contextvars.copy_context().run(lambda: capture(net).open())
    net(torch.tensor(1))
    assert len(acts) == 0
    with pytest.raises(SilentError, match="in a thread or context other than.*scope='all'"):
        acts.close()

    async def cell():
        return capture(net).open()

    async def next_cell():
        net(torch.tensor(2))

    loop = asyncio.new_event_loop()
    acts = loop.run_until_complete(cell())
    loop.run_until_complete(next_cell())
    loop.close()
    assert values(acts["0"].outputs) == [2]
    acts.close()


def test_replicas_of_data_parallel_are_routed_to_the_session_that_runs_them():
    inner = nn.Sequential(nn.Identity(), nn.Identity())

    class Parallel(nn.Module):  # what DataParallel does, without its devices
        def __init__(self):
            super().__init__()
            self.module = inner

        def forward(self, xs):
            replicas = []
            for _ in xs:
                replica = self.module._replicate_for_data_parallel()
                for name, child in self.module._modules.items():
                    replica._modules[name] = child._replicate_for_data_parallel()
                replicas.append(replica)
            threads = [threading.Thread(target=replica, args=(x,)) for replica, x in zip(replicas, xs, strict=True)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

    net = Parallel()
    before = hooks_of(net)
    with capture(net, "module.*") as acts, capture(inner, keep=None) as below:
        for _ in range(3):
            net([torch.tensor(1), torch.tensor(2)])
        assert sorted(values(acts["module.0"].outputs)) == [1, 2]
        assert sorted(acts.order) == [("module.0", 0), ("module.0", 1), ("module.1", 0), ("module.1", 1)]
    assert sorted(values(below["1"].outputs)) == [1, 1, 1, 2, 2, 2]
    assert hooks_of(net) == before


def test_a_replica_runs_itself_and_not_the_model_it_was_made_from():
    net = nn.Sequential(nn.Linear(1, 1))
    replica = net._replicate_for_data_parallel()
    results = []
    with capture(net):
        inner = net[0]._replicate_for_data_parallel()
        inner.weight, inner.bias = torch.full((1, 1), 5.0), torch.zeros(1)
        replica = net._replicate_for_data_parallel()
        replica._modules["0"] = inner
        thread = threading.Thread(target=lambda: results.append(replica(torch.ones(1, 1))))
        thread.start()
        thread.join()
    assert results[0].item() == 5.0


def test_schedules_choose_passes():
    net = nn.Sequential(nn.Identity())
    for when, expected in ((every(3), [0, 3, 6]), (first(2), [0, 1]), (lambda number: number == 4, [4])):
        ring = Ring()
        with Session(net, [Tap("0", Record(ring), when=when)]):
            for number in range(8):
                net(torch.tensor(number))
        assert values(ring["0"]) == expected
    chosen = [number for number in range(2000) if sample(0.1, seed=1)(number)]
    assert 150 < len(chosen) < 250 and chosen != [number for number in range(2000) if sample(0.1)(number)]
    with pytest.raises(ValueError, match="n must be at least 1"):
        every(0)
    with pytest.raises(TypeError, match="n must be a whole number"):
        first(True)
    with pytest.raises(ValueError, match="fraction"):
        sample(0)
