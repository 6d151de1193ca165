"""What an implementation says of itself is from outside too: claims checked before anything is decided by them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from statescan.goldens.store import FormatError

_WORDED = ("kind", "activation", "bare", "dt_softplus")
"""What a mixer's description says in words; everything else of it that a claim may bound is a number."""
_BOUNDS = ("min", "max", "multiple")


def check_claims(claims: Sequence[Mapping[str, Any]], where: str) -> None:
    """Refuse a limit that is neither a list of sizes or words nor an object with `min`, `max`, `multiple`.

    `chunk` is one size. Everything else of a claim is in the schema of messages.
    """
    for claim in claims:
        for name, limit in claim.get("limits", {}).items():
            if name == "chunk":
                right = _size(limit) and limit > 0
            elif isinstance(limit, Mapping) and name not in _WORDED:
                right = all(key in _BOUNDS and _size(n) for key, n in limit.items()) and limit.get("multiple", 1) > 0
            else:
                right = isinstance(limit, list) and all(
                    _size(n) or (name in _WORDED and (n is None or isinstance(n, (str, bool)))) for n in limit
                )
            if not right:
                raise FormatError(
                    f"{where}: {claim['op']}: limits: {name!r:.40}: {limit!r:.80}: a list of sizes or words, an object "
                    f"with {', '.join(_BOUNDS)}, or for chunk one size is needed"
                )


def _size(n: Any) -> bool:
    return type(n) is int and 0 <= n < 1 << 31
