"""The accuracy table is printed by one command; a part of it here."""
from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("only, rows", [("qwen2/F32", 1), ("folder/bert", 1)])
def test_rows_of_the_table(only, rows):
    done = subprocess.run([sys.executable, "-m", "benchmarks.accuracy", "--only", only], cwd=ROOT, capture_output=True,
                          text=True, timeout=240)
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and lines[-1] == "every row is met", done
    assert len([line for line in lines if line.startswith(only)]) == rows
