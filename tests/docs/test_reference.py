"""docs/reference/ is what the instruction table says now."""
from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import make_reference  # noqa: E402  (found through the path set above)
from m3jit.frontend import assemble  # noqa: E402
from m3jit.isa.table import OPS, RESERVED, decode  # noqa: E402


def test_pages_are_current():
    done = subprocess.run([sys.executable, ROOT / "tools/make_reference.py", "--check"], capture_output=True, text=True,
                          timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_stale_page_is_noticed(tmp_path):
    for name, text in make_reference.pages().items():
        (tmp_path / name).write_text(text)
    assert make_reference.stale(tmp_path) == []
    (tmp_path / "alu.md").write_text("old")
    (tmp_path / "gone.md").write_text("")
    (tmp_path / "io.md").unlink()
    assert make_reference.stale(tmp_path) == ["alu.md", "gone.md", "io.md"]


def test_the_index_has_all_256_numbers():
    lines = [line for line in make_reference.index().split("\n") if line.startswith("| `0x")]
    assert [int(line[5:7], 16) for line in lines] == list(range(256))
    assert {n for n, line in enumerate(lines) if "| reserved |" in line} == RESERVED


@pytest.mark.parametrize("row", OPS, ids=lambda r: r.name)
def test_the_frame_diagram_agrees_with_the_example(row):
    """Bytes the diagram calls zero or 255 are so in the example, and the example's text gives its bytes."""
    text, frame = make_reference.example(row)
    laid = make_reference.frame_bytes(row)
    assert [b for first, last, _ in laid for b in range(first, last + 1)] == list(range(row.size))
    for first, last, what in laid:
        if what in ("zero", "255"):
            assert set(frame[first:last + 1]) == {0 if what == "zero" else 255}, (row.name, first, what)
    again = assemble(f".data\nx: .f32 [1, 2]\n.text\n{text}\nnext:\nHALT\n")
    assert again.text[:len(frame)] == frame
    assert decode(frame).op is row
