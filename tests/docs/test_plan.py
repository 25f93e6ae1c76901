"""The plans of the parts (docs/dev): the files that they name are there, and their prose can be read in a terminal."""
from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLANS = sorted((ROOT / "docs/dev").glob("*.md"))
FILES = {str(path.relative_to(ROOT)) for folder in ("m3jit", "kernels", "tests", "benchmarks", "docs", "tools")
         for path in (ROOT / folder).rglob("*.*") if "__pycache__" not in path.parts}
COLUMNS = 120


def named(text: str) -> list[str]:
    """Files in code spans: "m3jit/isa/kv.py kv_pages.py" names two, with the last folder for both or none."""
    return [name for span in re.findall(r"`([^`]+)`", text) for name in re.findall(r"[\w/]+\.(?:py|md)\b", span)]


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_the_files_that_it_names_are_there(path):
    found = named(path.read_text(encoding="utf-8"))
    assert found and not [name for name in found if not any(("/" + file).endswith("/" + name) for file in FILES)]


def test_the_lines_of_the_machines_plan_fit_a_terminal():
    lines = (ROOT / "docs/dev/plan.md").read_text(encoding="utf-8").splitlines()
    assert not [number for number, line in enumerate(lines, 1) if len(line) > COLUMNS and not line.startswith("|")]
