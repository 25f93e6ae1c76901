"""Processes killed in the middle of checkpointing: every reopening is whole."""
from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def killed(folder: Path, kills: int, seed: int, kind: str) -> Any:
    done = subprocess.run([sys.executable, "-m", "tests.durable.crash_child", folder, str(kills), str(seed), kind],
                          cwd=ROOT, capture_output=True, text=True, timeout=200 + 5 * kills)
    assert done.returncode == 0, done.stderr
    assert re.match(rf"{kills} kills, \d+ commits", done.stdout)


@pytest.mark.parametrize("kind, kills", [("one", 20), ("team", 12)])
def test_kill_9(tmp_path, kind, kills):
    killed(tmp_path / "store", kills, 1, kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["one", "team"])
def test_kill_9_many_times(tmp_path, kind):
    killed(tmp_path / "store", 250, 2, kind)
