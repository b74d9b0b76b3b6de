"""Sessions: order, nesting, adding and removing, stopping, bad input."""

import pytest
import torch
from torch import nn

from specimens import Shared, hooks_of
from torchhook import Event, Record, Ring, SelectionError, Session, SessionError, Sink, Site, Tap, TapError, capture


def net():
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 2))


def test_one_torch_hook_a_module_and_list_order_is_call_order():
    model, seen = net(), []
    taps = [Tap("0", lambda event, name=name: seen.append(name)) for name in "abc"]
    with Session(model, taps) as session:
        assert len(model[0]._forward_hooks) == 1 and not model[1]._forward_hooks
        model(torch.ones(1, 4))
        session.add(Tap("0", lambda event: seen.append("d")))
        session.remove(taps[1])
        assert len(model[0]._forward_hooks) == 1
        model(torch.ones(1, 4))
        for tap in list(session.taps):
            session.remove(tap)
        assert not model[0]._forward_hooks
    assert seen == ["a", "b", "c", "a", "c", "d"]


def test_an_event_has_its_full_address():
    model, events = net(), []
    with Session(model, [Tap("0", events.append, port=port) for port in ("input", "output", "grad_output")]):
        for _ in range(2):
            model(torch.ones(1, 4)).sum().backward()
    event = events[4]
    assert isinstance(event, Event) and event.site == Site("0", "output") and event.module is model[0]
    assert (event.path, event.port, event.call, event.pass_number, event.recomputed) == ("0", "output", 0, 1, False)
    assert event.device == torch.device("cpu") and event.rank == 0
    assert event.live.requires_grad and not event.value.requires_grad
    assert torch.equal(event.args[0], events[3].value)
    assert [event.port for event in events] == ["input", "output", "grad_output"] * 2


def test_the_value_of_an_event_is_safe_to_keep_and_to_change():
    model, kept = net(), []
    plain = model(torch.ones(1, 4))

    def spoil(event):
        kept.append(event.value.clone())
        event.value.zero_()

    with Session(model, [Tap("0", spoil), Tap("0", lambda event: kept.append(event.value))]):
        assert torch.equal(model(torch.ones(1, 4)), plain)
    assert torch.equal(kept[0], kept[1]) and kept[0].min() < 0


def test_a_plain_callable_observes_and_returns_none():
    model = net()
    with (
        pytest.raises(TapError, match=r"output of '0' returned a Tensor.*use an Edit"),
        Session(model, [Tap("0", lambda e: e.value)]),
    ):
        model(torch.ones(1, 4))
    assert hooks_of(model) == hooks_of(net())


def test_a_sink_of_ones_own():
    class Count(Sink):
        def __init__(self):
            self.seen = 0

        def receive(self, event):
            self.seen += 1

    model, count = net(), Count()
    with Session(model, [Tap("*", count, transform=torch.mean)]):
        model(torch.ones(1, 4))
    assert count.seen == 3


def test_sessions_nest_and_overlap_and_close_in_any_order():
    model = net()
    before = hooks_of(model)
    a, b, c = (capture(model, path).open() for path in ("0", "1", "2"))
    model(torch.ones(1, 4))
    b.close()
    a.close()
    model(torch.ones(2, 4))
    c.close()
    assert hooks_of(model) == before
    assert a["0"].output.shape == b["1"].output.shape == (1, 4) and c["2"].output.shape == (2, 2)


def test_others_hooks_still_fire_and_stay():
    model, seen = net(), []
    model[0].register_forward_hook(lambda *_: seen.append("forward"))
    model[0].register_forward_pre_hook(lambda *_: seen.append("pre"))
    model.register_full_backward_hook(lambda *_: seen.append("backward"))
    before = hooks_of(model)
    with capture(model, grads=True, inputs=True, params=True):
        model(torch.ones(1, 4, requires_grad=True)).sum().backward()
    assert seen == ["pre", "forward", "backward"] and hooks_of(model) == before


def test_a_model_that_was_compiled_keeps_its_compiled_call():
    model = net()
    calls = []
    model._compiled_call_impl = lambda x: (calls.append(1), model._call_impl(x))[1]
    compiled = model._compiled_call_impl
    with capture(model, "0") as acts:
        model(torch.ones(1, 4))
    assert model._compiled_call_impl is compiled and calls == [1] and len(acts) == 1


def test_stop_ends_the_forward_and_the_block_goes_on():
    model, after = net(), []
    model[2].register_forward_hook(lambda *_: after.append(1))
    with capture(model, "0", "1", stop=True) as acts:
        result = model(torch.ones(1, 4))
        again = model(torch.ones(2, 4))
    assert result is None and again is None and not after
    assert acts["1"].output.shape == (2, 4) and acts["0"].output.min() < 0
    assert model(torch.ones(1, 4)) is not None and after == [1]


def test_stop_waits_for_every_site_and_only_the_first_call_of_each():
    model = Shared()
    with capture(model, nn.Linear, nn.ReLU, stop=True) as acts:
        assert model(torch.ones(1, 4)) is None
    assert acts.order == [("first", 0), ("relu", 0)]
    with capture(nn.Sequential(nn.ReLU()), "0", inputs=True, outputs=False, stop=True) as acts:
        assert acts._session.model(torch.ones(1)) is None
    assert acts["0"].input.item() == 1


@pytest.mark.parametrize("caught", [Exception, BaseException])
def test_a_models_own_handlers_do_not_undo_a_stop(caught):
    class Guarded(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Identity()

        def forward(self, x):
            try:
                return self.layer(x)
            except caught:
                return "caught"

    model = Guarded()
    with capture(model, "layer", stop=True) as acts:
        assert model(torch.ones(1)) is None
    assert acts["layer"].output.item() == 1 and model(torch.ones(1)).item() == 1


def test_stop_of_one_session_beside_another():
    model = net()
    with capture(model, on_silent="ignore") as whole, capture(model, "0", stop=True) as part:
        assert model(torch.ones(1, 4)) is None
    assert list(whole) == ["0"] and list(part) == ["0"]
    with pytest.raises(ValueError, match="stop=True.*grads"):
        capture(model, grads=True, stop=True)
    with pytest.raises(ValueError, match="DataParallel"):
        capture(nn.DataParallel(model), stop=True)


def test_bad_input_names_the_argument_and_leaves_nothing():
    model = net()
    before = hooks_of(model)
    cases = [
        (TypeError, "model", lambda: Session("model")),
        (TypeError, "taps", lambda: Session(model, ["0"])),
        (TypeError, "taps must be a list", lambda: Session(model, Tap("0", print))),
        (TypeError, "inputs", lambda: capture(model, inputs="no")),
        (TypeError, "stop", lambda: capture(model, stop=1)),
        (ValueError, "to='nonsense'", lambda: capture(model, to="nonsense")),
        (SelectionError, "has parameters", lambda: capture(model, nn.ReLU, params=True).open()),
        (SessionError, "open", lambda: capture(model)["0"]),
        (TypeError, "a key must be", lambda: Ring()[3]),
        (ValueError, "scope", lambda: Session(model, scope="process")),
        (SelectionError, "nearest: '0'", lambda: Session(model, [Tap("1", print), Tap("9", print)]).open()),
        (TypeError, "action", lambda: Tap("0", 3)),
        (TypeError, "not a class: write Record", lambda: Tap("0", Record)),
        (ValueError, "port must be one of input, output", lambda: Tap("0", print, port="out")),
        (TypeError, "transform", lambda: Tap("0", print, transform=3)),
        (TypeError, "when", lambda: Tap("0", print, when=3)),
        (TypeError, "group", lambda: Tap("0", print, group=3)),
        (SelectionError, "pass a path", lambda: Tap(7, print)),
        (TypeError, "model", lambda: capture(None)),
        (ValueError, "keep", lambda: capture(model, keep=0)),
        (ValueError, "keep", lambda: capture(model, keep=-1)),
        (TypeError, "keep", lambda: capture(model, keep=True)),
        (TypeError, "max_bytes", lambda: capture(model, max_bytes=True)),
        (ValueError, "max_bytes", lambda: capture(model, max_bytes=-5)),
        (ValueError, "copy", lambda: capture(model, copy="deep")),
        (TypeError, "dtype", lambda: capture(model, dtype="float16")),
        (ValueError, "reference", lambda: capture(model, copy="reference", dtype=torch.float16)),
        (ValueError, "reference", lambda: capture(model, copy="reference", transform=abs).open()),
        (ValueError, "nothing to capture", lambda: capture(model, outputs=False)),
        (TypeError, "max_entries", lambda: Ring(max_entries=1.5)),
        (TypeError, "store", lambda: Record({})),
        (SelectionError, "'9'", lambda: capture(model, "0", "9").open()),
    ]
    for kind, message, call in cases:
        with pytest.raises(kind, match=message):
            call()
        assert hooks_of(model) == before, message


def test_a_closed_session_says_so():
    model = net()
    session = Session(model, [])
    with pytest.raises(SessionError, match="new session"):
        session.add(Tap("0", print))
    session.open()
    with pytest.raises(SessionError, match="already open"):
        session.open()
    session.close()
    with pytest.raises(SessionError, match="closed session; open it first"):
        session.add(Tap("0", print))
    with pytest.raises(SessionError, match="already closed; make a new one"):
        session.open()
    with pytest.raises(SessionError, match="this tap is not attached by this session"):
        session.remove(Tap("0", print))


def test_a_transform_that_raises_names_itself_and_the_site_and_nothing_stays():
    model = net()
    acts = capture(model, "1", transform=lambda value: value.nope).open()
    with pytest.raises(TapError, match="transform raised AttributeError on the output of '1'") as caught:
        model(torch.ones(1, 4))
    assert isinstance(caught.value.__cause__, AttributeError)
    assert hooks_of(model) == hooks_of(net()) and len(acts) == 0


def test_an_error_of_a_tap_in_the_backward():
    model = net()
    with pytest.raises(ZeroDivisionError), Session(model, [Tap("0", lambda event: 1 / 0, port="grad_output")]):
        model(torch.ones(1, 4)).sum().backward()
    assert hooks_of(model) == hooks_of(net())


def test_sites_are_listed_in_order():
    model = Shared()
    with Session(model, [Tap(nn.Linear, print, port="param_grad"), Tap("**", Record())], on_silent="ignore") as session:
        assert session.sites == [
            Site("first.weight", "param_grad"),
            Site("first.bias", "param_grad"),
            Site("first"),
            Site("relu"),
        ]
        assert session.aliases["second"] == "first" and session.aliases["second.bias"] == "first.bias"
        assert repr(session) == "Session(Shared, 2 taps, open)"


class Turn:
    active = False


PORTS = ("input", "output", "grad_input", "grad_output", "param", "param_grad")


@pytest.mark.parametrize("sink", [False, True])
def test_calls_pass_by_unseen_while_it_is_nobodys_turn(sink):
    model, turn, ring, seen = net(), Turn(), Ring(max_entries=100), []
    taps = [Tap("0", Record(ring) if sink else lambda event: seen.append(event.port), port=port) for port in PORTS]
    counts = []
    with Session(model, taps, when=turn):
        for active in (False, True, False, True):
            turn.active = active
            model(torch.ones(1, 4, requires_grad=True)).sum().backward()
            counts.append(len(list(ring.entries())) if sink else len(seen))
    a_turn = len(PORTS) + 2  # weight and bias
    assert counts == [0, a_turn, a_turn, 2 * a_turn]


def test_a_turn_may_begin_and_end_inside_of_a_pass():
    model, turn, seen = net(), Turn(), []
    model[1].register_forward_hook(lambda *_: setattr(turn, "active", not turn.active))
    taps = [Tap("**", lambda event: seen.append((event.path, event.port)), port=port) for port in ("input", "output")]
    with Session(model, taps, when=turn):
        model(torch.ones(1, 4))
        assert seen == [("2", "input"), ("2", "output")]
        model(torch.ones(1, 4))
        assert seen[2:] == [("0", "input"), ("0", "output"), ("1", "input")]
        model(torch.ones(1, 4))
    assert seen[5:] == seen[:2]
