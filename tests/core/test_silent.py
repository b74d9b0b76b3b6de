"""Sites that were asked for and saw nothing are reported with the reason; only HookManager stays quiet."""

import threading
import warnings

import pytest
import torch
from torch import nn

from specimens import hooks_of
from torchhook import HookManager, Record, Session, SilentError, Tap, capture, edit, edits, trace


class Net(nn.Module):
    """A branch that is not taken, a layer whose forward is called, a container, and layers that run."""

    def __init__(self):
        super().__init__()
        self.used = nn.Linear(2, 2)
        self.branch = nn.Linear(2, 2)
        self.direct = nn.Linear(2, 2)
        self.layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])

    def forward(self, x, branch=False):
        x = self.direct.forward(self.used(x))
        return self.layers[0](self.branch(x) if branch else x)


@pytest.mark.parametrize("place", ["used", "layers.0"])
def test_what_another_session_stopped_before_is_told_so(place):
    net = Net()
    with pytest.raises(SilentError, match="another session's stop= ended the forward first"):
        with capture(net, "used", stop=True), edit(net, {place: edits.zero}):
            net(torch.ones(1, 2))
    with edit(net, {"used": edits.zero}), capture(net, "used", stop=True) as acts:  # the remedy
        net(torch.ones(1, 2))
    assert not acts["used"].output.any()


@pytest.mark.matrix("anywhere", "a path or a query that saw nothing raises, with the likely reason")
@pytest.mark.parametrize(
    "query, reason",
    [
        ("branch", "a branch that was not taken"),
        ("direct", r"its \.forward\(\)"),
        ("layers", "only holds other modules"),
        ("layers.[1-9]", "a branch that was not taken"),
    ],
)
def test_an_exact_path_or_a_whole_query_that_is_silent_raises_with_the_reason(query, reason):
    net = Net()
    before = hooks_of(net)
    with pytest.raises(SilentError, match=f"nothing was seen at the output of .*{reason}"):
        with capture(net, "used", query) as acts:
            net(torch.ones(1, 2))
    assert acts["used"].output.shape == (1, 2) and hooks_of(net) == before  # what came is there
    with pytest.raises(SilentError):
        with edit(net, {query: edits.zero}):
            net(torch.ones(1, 2))
    with pytest.raises(SilentError):
        with Session(net, [Tap(query, Record())]):
            net(torch.ones(1, 2))


@pytest.mark.matrix("anywhere", "other silent sites are listed in `.silent`, with one warning")
def test_other_silent_sites_of_a_bulk_query_are_listed_with_one_warning():
    net = Net()
    with pytest.warns(UserWarning, match=r"'branch', output of 'direct', output of 'layers.1'") as record:
        with capture(net, nn.Linear) as acts:
            net(torch.ones(1, 2))
    assert len(record) == 1 and record[0].filename == __file__
    assert list(acts) == ["used", "layers.0"] and sorted(acts.silent) == ["branch", "direct", "layers.1"]
    assert "branch that was not taken" in acts.silent["branch"]


def test_the_user_may_decide_otherwise():
    net = Net()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with capture(net, "branch", nn.Linear, on_silent="ignore") as acts:
            net(torch.ones(1, 2))
    assert "branch" in acts.silent
    with pytest.warns(UserWarning, match="branch"), capture(net, "branch", on_silent="warn"):
        net(torch.ones(1, 2))
    with pytest.raises(SilentError, match=r"layers\.1"), capture(net, nn.Linear, on_silent="raise"):
        net(torch.ones(1, 2))
    with pytest.raises(ValueError, match="on_silent"):
        capture(net, on_silent="shout")


def test_a_site_that_fired_once_is_not_silent():
    net = Net()
    for keep in (1, None):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with capture(net, "branch", keep=keep):
                net(torch.ones(1, 2), branch=True)
                net(torch.ones(1, 2))


def test_never_while_another_exception_is_on_its_way_and_never_for_the_manager():
    net = Net()
    with pytest.raises(ZeroDivisionError):
        with capture(net, "branch"):
            net(torch.ones(1, 2))
            _ = 1 / 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        manager = HookManager(net)
        manager.add("branch")
        net(torch.ones(1, 2))
        manager.clear_hooks()
        with trace(net, progress=False):
            net(torch.ones(1, 2))


def test_nothing_ran_or_it_ran_elsewhere():
    net = Net()
    with pytest.raises(SilentError, match="did not run while the taps were attached"), capture(net):
        pass
    with pytest.raises(SilentError, match="a thread or context other than.*scope='all'"), capture(net, "used"):
        thread = threading.Thread(target=net, args=(torch.ones(1, 2),))
        thread.start()
        thread.join()


def test_gradients_that_do_not_come_are_an_answer():
    net = Net()
    with pytest.warns(UserWarning, match="grad_output of 'used': no gradient arrived"):
        with capture(net, "used", "layers.0", grads=True) as acts:
            net.layers[0](net.used(torch.ones(1, 2)).detach()).sum().backward()
    assert acts["used"].grad is None and acts["layers.0"].grad is not None
    assert "no gradient arrived" in acts.silent["used"]
    with (
        pytest.warns(UserWarning, match="no backward ran while the taps"),
        capture(net, "used", grads=True),
    ):
        net(torch.ones(1, 2))


def test_a_schedule_that_chose_no_pass_is_not_silence():
    net = Net()
    with Session(net, [Tap("used", Record(), when=lambda number: False)]):
        net(torch.ones(1, 2))
