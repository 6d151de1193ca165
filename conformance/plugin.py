"""Options of `pytest --pyargs statescan.conformance --impl X`, registered by entry point.

Options that stand in a conftest are read too late for `--pyargs`, so they live here; nothing else does.
"""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the suite's options."""
    group = parser.getgroup("statescan", "statescan conformance suite")
    group.addoption("--impl", action="append", default=[], metavar="NAME",
                    help="implementation to judge: a shipped adapter, module:object or run:COMMAND")  # fmt: skip
    group.addoption("--statescan-profile", default="quick", metavar="PROFILE", help="quick, full or a profile's name")
    group.addoption("--statescan-only", action="append", default=[], metavar="PATTERN",
                    help="a clause, a family or a pattern over vector ids")  # fmt: skip
