"""A site is the name of one place in a model: a module's path and a port, in torch's own words."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

Port = Literal["input", "output", "grad_input", "grad_output", "param", "param_grad"]
PORTS: tuple[Port, ...] = get_args(Port)
GRADIENT_PORTS: tuple[Port, ...] = ("grad_input", "grad_output")


class Site(NamedTuple):
    """The name of one place: where it is (``path``) and what flows there (``port``).

    >>> str(Site("layer4.1", "grad_output"))
    "grad_output of 'layer4.1'"
    """

    path: str
    port: Port = "output"

    def __str__(self) -> str:
        return f"{self.port} of {self.path!r}"
