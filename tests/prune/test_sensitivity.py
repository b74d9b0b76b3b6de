"""`prune.sensitivity`: each layer in turn, over all batches, the one that matters most first."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from specimens import hooks_of
from torchhook.prune.ablation import sensitivity

pytestmark = pytest.mark.usefixtures("one_thread")


def data():
    x, y = torch.randn(10, 3), torch.randint(0, 4, (10,))
    return list(zip(x.split((6, 4)), y.split((6, 4)), strict=True)), x, y


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.head, self.drop, self.body, self.unused = nn.Linear(5, 4), nn.Dropout(), nn.Linear(3, 5), nn.Linear(1, 1)

    def forward(self, x):
        return self.head(self.drop(torch.relu(self.body(x))))


@pytest.mark.parametrize("with_", ["zero", "mean"])
def test_by_hand(with_):
    net, (loader, x, y) = Net(), data()
    hooks = hooks_of(net)
    found = sensitivity(net, loader, F.cross_entropy, with_=with_)
    assert net.training and hooks_of(net) == hooks
    net.eval()
    with torch.no_grad():
        whole = F.cross_entropy(net(x), y)
        parts = []
        for some, target in loader:
            body, head = net.body(some), net(some)
            body, head = (t.mean(0, keepdim=True).expand_as(t) if with_ == "mean" else t * 0 for t in (body, head))
            both = F.cross_entropy(net.head(torch.relu(body)), target), F.cross_entropy(head, target)
            parts.append(torch.stack(both) * len(some) / 10)
    expected = dict(zip(("body", "head"), sum(parts).tolist(), strict=True))
    assert found.baseline == pytest.approx(whole.item(), rel=1e-5)
    assert {row.site.path: row.value for row in found} == pytest.approx(expected, rel=1e-5)
    changes = [abs(row.change) for row in found]
    assert changes == sorted(changes, reverse=True) and found[0].change == found[0].value - found.baseline


def test_it_can_be_drawn_and_some_layers_are_enough():
    from torchhook.plot import sweep

    loader, _, _ = data()
    found = sensitivity(Net(), loader, F.cross_entropy, sites="body")
    assert [row.site.path for row in found] == ["body"]
    assert [tick.get_text() for tick in sweep(found).axes[0].get_yticklabels()] == ["body"]


def test_what_is_refused():
    loader, _, _ = data()
    with pytest.raises(ValueError, match="loader has no batches"):
        sensitivity(Net(), [], F.cross_entropy)
    with pytest.raises(ValueError, match="with_ must be 'zero' or 'mean'"):
        sensitivity(Net(), loader, F.cross_entropy, with_="noise")
    with pytest.raises(TypeError, match="metric must return one number"):
        sensitivity(Net(), loader, lambda output, target: output)
