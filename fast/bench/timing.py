"""Times of launches: replays of CUDA graphs, all contenders in turn in every round, medians."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from typing import Any

import torch

from statescan.fast.bench.yardsticks import Launches

ROUNDS = 15


class Graph:
    """All launches of one contender, captured.

    The results are kept so that none overwrites another in the cache, and the launches because they hold the memory
    that the graph reads: capturing the next graph would unmap it.
    """

    def __init__(self, launches: Launches) -> None:
        for launch in launches[:2]:
            launch()
        torch.cuda.synchronize()
        self.launches, self.graph, self.kept = launches, torch.cuda.CUDAGraph(), []
        with torch.cuda.graph(self.graph):
            for launch in launches:
                self.kept.append(launch())
        self.graph.replay()
        torch.cuda.synchronize()

    def time(self) -> float:
        """Microseconds of one launch in one replay."""
        event: Any = torch.cuda.Event
        start, end = event(enable_timing=True), event(enable_timing=True)
        start.record()
        self.graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3 / len(self.launches)


def time_in_turn(graphs: Mapping[str, Graph], rounds: int = ROUNDS) -> dict[str, list[float]]:
    """Microseconds of one launch by contender, one number a round; all of a round meet the device in one state."""
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(rounds):
        for name, graph in graphs.items():
            times[name].append(graph.time())
    return times


def median(times: list[float]) -> float:
    return float(statistics.median(times))


def ratio(times: list[float], against: list[float]) -> float:
    """The median over rounds of one contender's time over another's in the same round."""
    return median([a / b for a, b in zip(times, against, strict=True)])


def host_time(launches: Launches, calls: int = 300) -> float:
    """Microseconds of host time of one eager call, the device idle at its start."""
    for launch in launches[:3]:
        launch()
    best = []
    for _ in range(5):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for i in range(calls // 5):
            launches[i % len(launches)]()
        best.append((time.perf_counter() - began) * 1e6 / (calls // 5))
    torch.cuda.synchronize()
    return median(best)
