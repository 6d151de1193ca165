"""What is installed from a wheel is whole: modules, clauses, chapters, vectors, blobs and templates."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
NOT_SHIPPED = ("__pycache__", ".rej")


def test_a_wheel_holds_what_the_tree_holds(tmp_path):
    tree = tmp_path / "tree"  # a copy, so that nothing of an earlier build helps
    shutil.copytree(ROOT, tree, symlinks=True, ignore=shutil.ignore_patterns(".*", "build", "reports", "_build"))
    words = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), "."]
    done = subprocess.run(words, cwd=tree, text=True, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    inside = set(zipfile.ZipFile(wheel).namelist())
    for part in sorted(path.name for path in (ROOT / "src/statescan").iterdir() if path.is_symlink()):
        for path in (ROOT / part).rglob("*"):
            kept = path.suffix in (".py", ".json", ".safetensors", ".html") or path.name in ("CLAUSES", "LICENSE")
            if path.is_file() and kept and not any(word in str(path) for word in NOT_SHIPPED):
                assert f"statescan/{path.relative_to(ROOT)}" in inside
    assert "statescan/py.typed" in inside


def test_the_links_are_relative_and_lead_to_the_folders():
    for link in (ROOT / "src/statescan").iterdir():
        if link.is_symlink():
            assert not Path(link.readlink()).is_absolute()
            assert link.resolve() == ROOT / link.name
