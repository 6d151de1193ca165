"""The site builds without a warning: every reference resolves and every clause box is well formed."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("myst_nb")
    words = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-c", "docs", "-D", "nb_execution_mode=off",
             "-D", "data_pages=0", "spec", str(tmp_path / "html")]  # fmt: skip
    # the chapters' cells run in test_chapters, the generated pages are rendered in test_docs_pages
    done = subprocess.run(words, cwd=ROOT, text=True, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "html" / "index.html").exists()
