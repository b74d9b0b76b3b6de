"""Reduce what flows to statistics: each is a `Stat`, whose states are plain tensors that merge exactly."""

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
    """A statistic by its name, or `stat` itself if it is one.

    >>> named("moments")
    Moments()
    """
    if isinstance(stat, Stat):
        if not isinstance(getattr(stat, "name", None), str):
            raise TypeError(f"{type(stat).__name__} has no name to read it by; set one in the class: name = ...")
        return stat
    if not isinstance(stat, str):
        raise TypeError(f"stats must be names or Stat objects such as Moments(), not {stat!r}")
    if stat not in _NAMED:
        raise ValueError(f"there is no statistic called {stat!r}; pass one of {', '.join(_NAMED)}, or your own Stat")
    return _NAMED[stat]()
