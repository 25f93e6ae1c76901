"""What is said of a worker of pytest-xdist that went away (tests/conftest.py)."""
from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ending

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("status, words", [
    (None, "its process still runs: the pipe to it was closed"),
    (3, "its process ended with exit status 3"),
    (-signal.SIGTERM, "its process was ended by SIGTERM"),
    (-signal.SIGKILL, "its process was ended by SIGKILL; short of memory, or killed by hand"),
    (-signal.SIGSEGV, "its process was ended by SIGSEGV; without a traceback above: a stack overflow outside the main "
                      "thread"),
    (-99, "its process was ended by signal 99"),
])
def test_exit_statuses_in_words(status, words):
    assert ending(status) == words


def test_the_failure_of_a_lost_worker_says_how_it_ended(tmp_path):
    pytest.importorskip("xdist", reason="pytest-xdist is not installed")
    (tmp_path / "test_it.py").write_text("import os\ndef test_it():\n    os.kill(os.getpid(), 9)\n"
                                         "def test_more():\n    pass\n")
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run([sys.executable, "-m", "pytest", "-n", "1", "-p", "tests.conftest", "-p", "no:cacheprovider",
                           "test_it.py"], cwd=tmp_path, env=clean | {"PYTHONPATH": str(ROOT)}, capture_output=True,
                          text=True, timeout=300)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "crashed while running 'test_it.py::test_it'" in done.stdout
    assert re.search(r"most memory of the workers, mapped files included, in MiB: gw1 \d+\n", done.stdout), done.stdout
    assert "its process was ended by SIGKILL" in done.stdout and "most memory that an ended worker" in done.stdout
