"""A result file as a picture: every row's time over its yardstick's, peers beside it.

    python -m statescan.fast.bench.plot RESULT.json ...     # writes RESULT.svg beside each; needs matplotlib
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROW_INCHES = 0.26
OURS, PEER, TARGET = "#1f6fb2", "#e39a2d", "#3fae86"


def plot(path: Path) -> Path:
    """Draw the table in `path`; the file written."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "statescan"  # the same table gives the same file
    from matplotlib import pyplot

    result: dict[str, Any] = json.loads(path.read_text("utf-8"))
    facts, rows = result["environment"], result["rows"][::-1]
    figure, axes = pyplot.subplots(figsize=(9, 1.2 + ROW_INCHES * len(rows)))
    for at, row in enumerate(rows):
        peers = [us / row["yardstick_us"] for us in row["peers"].values()]
        axes.plot(peers, [at] * len(peers), "x", color=PEER, label="" if at else "peers")
        axes.plot([row["ratio"]], [at], "o", color=OURS, label="" if at else "statescan")
        limit, _, kind = row["target"].partition(" ")
        if kind:
            bound = float(limit) / row["yardstick_us"] if kind == "us" else float(limit)
            axes.plot([bound], [at], "|", color=TARGET, markersize=11, label="" if at else "target")
    axes.axvline(1.0, color="#888888", linewidth=0.8)
    axes.set_yticks(range(len(rows)), [row["row"] for row in rows], fontsize=7)
    axes.set_xscale("log")
    axes.set_xticks([0.5, 1, 2, 5, 10], ["0.5", "1", "2", "5", "10"])
    axes.set_xlabel("time over the yardstick's (copy or update of the same bytes, same run)")
    axes.set_title(f"{facts['device']}, {facts['date']}, torch {facts['torch']}, triton {facts['triton']}", fontsize=9)
    axes.grid(axis="x", alpha=0.3)
    axes.legend(fontsize=7, loc="lower right")
    target = path.with_suffix(".svg")
    figure.savefig(target, bbox_inches="tight", metadata={"Date": None})
    pyplot.close(figure)
    return target


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(plot(Path(name)))
