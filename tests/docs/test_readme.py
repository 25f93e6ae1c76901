"""README.md: its commands give what it says, its links lead somewhere, its two main commands are those that are
checked."""
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
sys.path.insert(0, str(ROOT / "tools"))

import check_docs  # noqa: E402  (found through the path set above)

INSTALL, TEST = "pip install . && m3jit run", "pip install -e '.[test]' && pytest -n 2"


def test_commands():
    problems = check_docs.check_commands(README)
    assert not problems, "\n".join(map(str, problems))


@pytest.mark.slow
def test_slow_commands():
    """Downloads a model."""
    problems = check_docs.check_commands(README, slow=True)
    assert not problems, "\n".join(map(str, problems))


def test_links():
    assert check_docs.check_links(README) == []


def test_every_command_is_run_here_or_by_the_test_run():
    """Blocks without `$ ` hold the two main commands, each on a line of its own, and nothing else."""
    loose = [line for block in check_docs.blocks(README.read_text()) if block.language == "console"
             and not block.commands for line in block.lines]
    assert loose == [INSTALL, TEST]


def test_the_test_run_takes_its_command_from_the_readme():
    script = (ROOT / ".ci/run").read_text()
    grep = next(line for line in script.splitlines() if line.startswith("command=$("))
    found = subprocess.run(["sh", "-c", f'{grep}; echo "$command"'], cwd=ROOT, capture_output=True, text=True,
                           timeout=20)
    assert found.stdout.strip() == TEST and os.access(ROOT / ".ci/run", os.X_OK)
    assert script.rstrip().endswith('eval "$command"')
