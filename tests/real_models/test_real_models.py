"""Public architectures with our mixers: two of them here, all in `make real-models`; what does not map is told."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

from statescan.reference.mixers import MIXERS
from statescan.reference.mixers.checkpoints import load_mixer
from statescan.spec.contract import UnsupportedError

HERE = Path(__file__).parent


ABSENT = importlib.util.find_spec("transformers") is None


@pytest.mark.skipif(ABSENT, reason="transformers is not installed: run `make peers`")
def test_two_architectures_are_equal(tmp_path: Path) -> None:
    told = tmp_path / "told.json"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(HERE / "check.py"), "mamba2", "qwen3_next", "--json", str(told)],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    rows = json.loads(told.read_text("utf-8"))["rows"]
    assert {row["model"] for row in rows} == {"mamba2", "qwen3_next"}
    assert all(row["equal"] and 0 < row["deviation"] <= row["bound"] < 1e-3 for row in rows)


def test_the_stored_run_has_every_architecture() -> None:
    told = json.loads((HERE / "results.json").read_text("utf-8"))
    assert len({row["model"] for row in told["rows"]}) == 8
    assert len({row["check"] for row in told["rows"]}) == 6
    assert all(row["equal"] for row in told["rows"])


def test_a_module_that_is_not_served_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match=r"Linear: one of .*Mamba2Mixer.* is read \(ERR-5\)"):
        load_mixer(nn.Linear(2, 2), MIXERS)
