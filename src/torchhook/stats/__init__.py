"""Statistics of what flows: each a `Stat`, whose states are plain tensors that merge exactly."""

from torchhook.stats.attention import Attention, Focus
from torchhook.stats.channels import Channels, Units
from torchhook.stats.covariance import Covariance, Spread
from torchhook.stats.histogram import Bins, Histogram, Quantiles
from torchhook.stats.limits import Headroom, Saturation
from torchhook.stats.moments import Moments
from torchhook.stats.stat import Stat
from torchhook.stats.topk import Largest, TopK

__all__ = [
    "Attention",
    "Bins",
    "Channels",
    "Covariance",
    "Focus",
    "Headroom",
    "Histogram",
    "Largest",
    "Moments",
    "Quantiles",
    "Saturation",
    "Spread",
    "Stat",
    "TopK",
    "Units",
    "named",
]

_NAMED: dict[str, type[Stat]] = {
    kind.name: kind
    for kind in (Moments, Histogram, Quantiles, Channels, Covariance, TopK, Headroom, Saturation, Attention)
}


def named(stat: Stat | str) -> Stat:
    """A statistic by its name, or the one that is given.

    >>> named("moments")
    Moments()
    """
    if isinstance(stat, Stat):
        if not isinstance(getattr(stat, "name", None), str):
            raise TypeError(f"a {type(stat).__name__} has no name to read it by; give the class one: name = ...")
        return stat
    if not isinstance(stat, str):
        raise TypeError(f"stats must be names or Stat objects such as Moments(), not {stat!r}")
    if stat not in _NAMED:
        raise ValueError(f"there is no statistic called {stat!r}; there are {', '.join(_NAMED)}, and your own Stat")
    return _NAMED[stat]()
