"""docs/internals.md: its stages are what the compiler does now, its map names every file."""
from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import render_internals  # noqa: E402  (found through the path set above)


def test_stages_are_current():
    _, stale = render_internals.current()
    assert not stale, f"run python tools/render_internals.py: {stale} changed"


def test_a_stale_stage_is_noticed(tmp_path):
    page = tmp_path / "internals.md"
    text = render_internals.DOCUMENT.read_text()
    page.write_text(text.replace("op=SUM", "op=MAX").replace("vaddps", "vsubps"))
    fresh, stale = render_internals.current(page)
    assert fresh == render_internals.current()[0]
    assert {"lifted", "optimised"} <= set(stale) and ("asm" in stale) == ("asm (LLVM " + render_internals.llvm_version()
                                                                         in text)


def test_another_llvm_is_not_compared(tmp_path):
    page = tmp_path / "internals.md"
    text = render_internals.DOCUMENT.read_text()
    page.write_text(re.sub(r"\(LLVM [\d.]+\)", "(LLVM 1.0)", text).replace("vaddps", "vsubps"))
    assert "asm" not in render_internals.current(page)[1]


def _map() -> list[str]:
    """Globs of the file map, completed with the folder of their row's first file."""
    text = render_internals.DOCUMENT.read_text().partition("## Where everything is")[2]
    out = []
    for row in re.findall(r"(?m)^\| (`.*?) \|", text):
        folder = ""
        for name in re.findall(r"`([^`]+)`", row):
            if "/" in name:
                folder = name.rpartition("/")[0]
            if not name.endswith("/"):
                out.append(name if "/" in name else f"{folder}/{name}")
    return out


def test_the_map_names_every_file_and_only_files():
    globs = _map()
    assert len(globs) > 50
    for glob in globs:
        assert list(ROOT.glob(glob)), f"{glob}: no such file"
    found = {p for glob in globs for p in ROOT.glob(glob)}
    files = [p for folder in ("m3jit", "kernels") for p in (ROOT / folder).rglob("*.py") if p.name != "__init__.py"]
    missing = [str(p.relative_to(ROOT)) for p in files if p not in found]
    assert not missing, f"not in the map of docs/internals.md: {missing}"


@pytest.mark.parametrize("text, needle, first, last, want", [
    ("a\nb\nc\nd", "b", "b", "c", "...\nb\nc\n..."), ("a\nb\nc", "b", "a", "c", "a\nb\nc"),
    ("l1:\nx\nl2:\ny\nz\nend", "y", "^l", "^e", "...\nl2:\ny\nz\nend")])
def test_excerpts(text, needle, first, last, want):
    assert render_internals.excerpt(text, needle, first, last) == want
