"""Processes killed in the middle of checkpointing: every reopening is whole."""
from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def killed(folder: Path, kills: int, seed: int) -> Any:
    done = subprocess.run([sys.executable, "-m", "tests.durable.crash_child", folder, str(kills), str(seed)], cwd=ROOT,
                          capture_output=True, text=True, timeout=60 + 5 * kills)
    assert done.returncode == 0, done.stderr
    assert re.match(rf"{kills} kills, \d+ commits", done.stdout)


def test_kill_9(tmp_path):
    killed(tmp_path / "store", 25, 1)


@pytest.mark.slow
def test_kill_9_many_times(tmp_path):
    killed(tmp_path / "store", 250, 2)
