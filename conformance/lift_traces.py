"""One trace, every size: a story of size 1 carried to the key, value and state sizes that a kernel has.

New channels of tokens hold zeros, so they write nothing into a state and read nothing out of it; the story's own
numbers stay where they were, in front. What no request has touched keeps its filling, padding rows keep their NaN.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from statescan.conformance.hooks import ENTRIES, POOLS, SNAPSHOTS
from statescan.goldens.tensors import Array, from_nested, nested

Trace = Mapping[str, Any]
Sizes = Mapping[str, int]

LAST_AXIS: dict[str, dict[str, str]] = {
    "mamba2": {"x": "headdim", "B": "d_state", "C": "d_state"},
    "gdn": {"q": "key_dim", "k": "key_dim", "v": "value_dim"},
    "gdp": {"V": "value_dim", "K": "key_dim", "Q": "key_dim"},
    "kda": {"q": "key_dim", "k": "key_dim", "v": "value_dim", "f": "key_dim"},
}  # fmt: skip
"""The size that each part of a row ends with; parts that are not here have one number a head."""
STATE_AXES: dict[str, tuple[str, str]] = {
    "mamba2": ("headdim", "d_state"), **dict.fromkeys(("gdn", "gdp", "kda"), ("key_dim", "value_dim")),
}  # fmt: skip


def fit_sizes(mixer: Mapping[str, Any], limits: Mapping[str, Any]) -> dict[str, int]:
    """The least sizes within `limits` that a mixer can be carried to; none where it fits, or where nothing helps."""
    sizes = {}
    for name in STATE_AXES.get(mixer["kind"], ()) if "row" in mixer else ():
        own, limit = mixer.get(name, 1), limits.get(name)
        if isinstance(limit, Mapping):
            step = limit.get("multiple", 1)
            wanted = -(-max(own, limit.get("min", 1)) // step) * step
            sizes[name] = wanted if wanted <= limit.get("max", wanted) else own
        elif limit is not None:
            sizes[name] = min((size for size in limit if size >= own), default=own)
    return {name: size for name, size in sizes.items() if size != mixer.get(name, 1)}


def lift_trace(trace: Trace, sizes: Sizes) -> dict[str, Any]:
    """The same story with its mixer at `sizes`, none of them smaller than it was."""
    return Lift(trace, sizes).trace()


def lift_mixer(mixer: Mapping[str, Any], sizes: Sizes) -> dict[str, Any]:
    """A mixer's description at `sizes`."""
    return Lift({"mixer": mixer, "sizes": {}}, sizes).lifted_mixer() if sizes else dict(mixer)


class Lift:
    """Where the numbers of a trace go when its sizes grow."""

    def __init__(self, trace: Trace, sizes: Sizes) -> None:
        self.source, self.mixer, self.sizes = trace, trace["mixer"], sizes
        self.last = LAST_AXIS[self.mixer["kind"]]
        self.parts = [(name, int(width)) for name, _, width in (part.partition(":") for part in self.mixer["row"])]
        fills = [trace["sizes"].get(name, "nan") for name in ("pool_fill", "scratch_fill")]
        self.fills = from_nested([*fills, "nan"], "f64")

    def trace(self) -> dict[str, Any]:
        """The lifted trace."""
        alone = {name: self.pair(one, ("conv_state", "ssm_state"), 0) for name, one in self.source["alone"].items()}
        found = {**self.source, "mixer": self.lifted_mixer(), "alone": alone,
                 "steps": [self.step(step) for step in self.source["steps"]]}  # fmt: skip
        if "rows" in found:
            found["rows"] = nested(self.rows(from_nested(found["rows"], "f64")))
        return found

    def lifted_mixer(self) -> dict[str, Any]:
        """The description: sizes, the layout of a row, taps of new channels (which see only zeros)."""
        widths = [f"{name}:{self.grown(name, width)}" for name, width in self.parts]
        taps = from_nested(self.mixer["conv_weight"], "f64")
        return {**self.mixer, **self.sizes, "row": widths,
                "conv_weight": nested(self.channels(taps, np.zeros(())))}  # fmt: skip

    def step(self, step: Mapping[str, Any]) -> dict[str, Any]:
        """One step with everything that a hook is given or must give."""
        found = dict(step)
        for hook, names in (("decode", ENTRIES), ("prefill", SNAPSHOTS)):
            if hook in step:
                lead = 2 if hook == "decode" else 1
                rows = self.rows(from_nested(step[hook]["zxBCdt"], "f64")) if step[hook]["zxBCdt"] else np.zeros(0)
                found[hook] = {**step[hook], "zxBCdt": nested(rows),
                               "expect": self.pair(step[hook]["expect"], names, lead)}  # fmt: skip
        for when in ("pools_after_hooks", "pools_after_step"):
            found[when] = self.pair(step[when], POOLS, 1)
        return found

    def pair(self, given: Mapping[str, Any], names: Sequence[str], lead: int) -> dict[str, Any]:
        """Windows and states behind `lead` axes, one filling for both, and the outputs beside them."""
        found = dict(given)
        if given.get("y") and names != POOLS:
            y = from_nested(given["y"], "f64")
            channel = "headdim" if self.mixer["kind"] == "mamba2" else "value_dim"
            found["y"] = nested(self.last_axis(y, channel, np.zeros(y.shape[:-1])))
        if names[0] in given:
            windows, states = (from_nested(given[name], "f64") for name in names)
            fill = self.filling(windows, states, lead)
            found[names[0]] = nested(self.channels(windows, fill))
            for axis, name in zip((-2, -1), STATE_AXES[self.mixer["kind"]], strict=True):
                states = widened(states, axis, self.sizes.get(name, states.shape[axis]), fill)
            found[names[1]] = nested(states)
        return found

    def filling(self, windows: Array, states: Array, lead: int) -> Array:
        """What new channels of each slot hold: its filling where nobody has touched it, else 0."""
        shape = windows.shape[:lead]
        flat = np.concatenate([windows.reshape(*shape, -1), states.reshape(*shape, -1)], axis=-1)
        first = flat[..., :1]
        same = ((flat == first) | (np.isnan(flat) & np.isnan(first))).all(axis=-1)
        known = (first == self.fills).any(axis=-1) | np.isnan(first[..., 0])
        return np.where(same & known, first[..., 0], 0.0)  # an array even without leading axes

    def rows(self, rows: Array) -> Array:
        """Projected rows `[..., D]`, part by part."""
        ends = np.cumsum([width for _, width in self.parts])[:-1]
        fill = np.where(np.isnan(rows[..., 0]), np.nan, 0.0)
        found = [self.last_axis(part, self.last[name], fill) if name in self.last else part
                 for (name, _), part in zip(self.parts, np.split(rows, ends, axis=-1), strict=True)]  # fmt: skip
        return np.concatenate(found, axis=-1)

    def channels(self, windows: Array, fill: Array) -> Array:
        """Windows `[..., C, W]`: the convolved parts lie in them in the order of a row."""
        widths = [(name, width) for name, width in self.parts if name in self.last and name != "f"]
        ends = np.cumsum([width for _, width in widths])[:-1]
        found = []
        for (name, _), part in zip(widths, np.split(windows, ends, axis=-2), strict=True):
            turned = np.swapaxes(part, -1, -2)
            wide = self.last_axis(turned, self.last[name], np.broadcast_to(fill[..., None], turned.shape[:-1]))
            found.append(np.swapaxes(wide, -1, -2))
        return np.concatenate(found, axis=-2)

    def last_axis(self, values: Array, name: str, fill: Array) -> Array:
        """`[..., n * old]` as `[..., n * new]` with `fill [...]` in the new places."""
        old, new = self.mixer.get(name, 1), self.sizes.get(name, self.mixer.get(name, 1))
        lead = values.shape[:-1]
        apart = values.reshape(*lead, values.shape[-1] // old, old)
        more = np.broadcast_to(fill[..., None, None], (*apart.shape[:-1], new - old))
        return np.concatenate([apart, more], axis=-1).reshape(*lead, -1)

    def grown(self, name: str, width: int) -> int:
        """The width of a part at the new sizes."""
        size = self.last.get(name, "")
        old = int(self.mixer.get(size, 1))
        return width // old * self.sizes.get(size, old)


def widened(values: Array, axis: int, size: int, fill: Array) -> Array:
    """One axis longer, with `fill` (by slot, on the leading axes) in the new places."""
    shape = list(values.shape)
    shape[axis] = size - shape[axis]
    more = np.broadcast_to(fill.reshape(*fill.shape, *[1] * (values.ndim - fill.ndim)), shape)
    return np.concatenate([values, more], axis=axis)
