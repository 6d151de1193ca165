"""The suite as pytest items: one for each vector and implementation given by `--impl`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import pytest

from statescan.conformance.client import Client
from statescan.conformance.report import failed
from statescan.conformance.runner import Selection, results, target
from statescan.conformance.smoke import check_wiring
from statescan.goldens.store import load_corpus


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One item for each implementation and selected vector."""
    chosen = Selection(metafunc.config.getoption("--statescan-profile"), metafunc.config.getoption("--statescan-only"))
    pairs = [(name, key) for name in metafunc.config.getoption("--impl")
             for key, vector in _corpus().items() if chosen.picks(vector)]  # fmt: skip
    metafunc.parametrize(("implementation", "vector"), pairs, ids=[f"{name}-{key}" for name, key in pairs])


@lru_cache(maxsize=1)
def _corpus() -> dict[str, dict[str, Any]]:
    return load_corpus()


@pytest.fixture(scope="session")
def clients() -> Iterator[dict[str, Client]]:
    """The running child of each implementation."""
    running: dict[str, Client] = {}
    yield running
    for client in running.values():
        client.__exit__()


def test_vector(implementation: str, vector: str, clients: dict[str, Client]) -> None:
    """The implementation passes the vector, or does not claim what it needs."""
    if implementation not in clients:
        client = Client(list(target(implementation).command)).__enter__()
        clients[implementation] = client
        if client.hello["ok"]:
            wiring = check_wiring(client)
            assert not wiring, wiring
    client = clients[implementation]
    if not client.hello["ok"]:
        pytest.skip(client.hello.get("message", "not installed"))
    (row,) = results(client, [_corpus()[vector]], _corpus(), None)
    if row["status"] in ("not_applicable", "not_run"):
        pytest.skip(f"{row['status']}: {row.get('missing', '')}")
    assert not failed(row["status"]), f"{row['status']} {row['clause']}: {row.get('message', '')}"
