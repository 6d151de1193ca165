"""Rounding sites: the places where an implementation rounds, named in the reference, where nothing is rounded.

Every step passes such a value through `at(site, value)`. The default, `keep`, returns it as it is, unless a
measurement is on: `perturbing(hook)` lets the hook change it, and so the noise gains of numeric vectors are found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from statescan.reference.arrays import Float64

Site = Callable[[str, Float64], Float64]

_hooks: list[Site] = []


def keep(site: str, value: Float64) -> Float64:
    """The definition itself: no rounding (and, while a measurement is on, what its hook makes of the value)."""
    return _hooks[-1](site, value) if _hooks else value


@contextmanager
def perturbing(hook: Site) -> Iterator[None]:
    """Let `hook` change every value that passes a site, for the length of the block."""
    _hooks.append(hook)
    try:
        yield
    finally:
        _hooks.pop()
