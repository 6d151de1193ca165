"""Keep a report for the site: `statescan run --all --profile full --out FOLDER`, then this on its `report.json`.

What a page shows stays; what did not apply, times and candidates go. The file remains a report by its schema, so that
`statescan matrix docs/compatibility.json` prints the same table.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from statescan.conformance.report import NOT_JUDGED, Report, printable, read
from statescan.goldens.store import check_schema

KEPT = Path(__file__).parent / "compatibility.json"
FIELDS = ("vector", "status", "clause", "clauses", "message")


def shortened(report: Report) -> Report:
    """The report without what no page shows."""
    runs = []
    for run in report["runs"]:
        rows = [
            {key: printable(row[key])[:300] if key == "message" else row[key] for key in FIELDS if row.get(key)}
            for row in run["results"]
            if row["status"] not in NOT_JUDGED or row["status"] == "not_run"
        ]
        for row in rows:
            if row["status"] == "pass":
                row.pop("message", None)
        runs.append({**{key: value for key, value in run.items() if key != "claims"}, "results": rows})
    return {**report, "runs": runs}


def main(path: str) -> None:
    kept = shortened(read(Path(path)))
    check_schema("report", kept, path)
    lines = json.dumps(kept, indent=1, ensure_ascii=False).replace("\n     ", " ").replace("\n    }", " }")
    KEPT.write_text(lines + "\n", "utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
