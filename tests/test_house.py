"""The house rules that a machine can check: who imports whom, and what importing m3jit does not load."""
from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# A module may import from its own layer group and from those before it.
LAYERS = [{"errors", "new_file", "paths"}, {"isa"}, {"ir"}, {"frontend", "kernels", "backends"}, {"vm"}, {"durable"},
          {"models"}, {"timetravel"}, {"api"}, {"serve"}, {"cli", "__main__"}]
BASE_OF = {name: i for i, group in enumerate(LAYERS) for name in group}
FOLDERS = ("m3jit", "kernels", "tests", "tools", "benchmarks", "examples")
LINE, FILE, FUNCTION = 120, 500, 60                     # columns; lines of a file and of a function of the product
NATIVE = ("llvmlite", "numba", "pyopencl", "cuda", "tokenizers", "gguf")


def modules() -> list[tuple[str, Path]]:
    found = []
    for path in sorted((ROOT / "m3jit").rglob("*.py")):
        parts = path.relative_to(ROOT / "m3jit").with_suffix("").parts
        if parts != ("__init__",):
            found.append((parts[0], path))
    return found + [("kernels", path) for path in sorted((ROOT / "kernels").rglob("*.py"))]


def imported(path: Path) -> set[str]:
    """Parts of m3jit a file imports, anywhere in it."""
    out = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else \
            [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        for name in names:
            if name.startswith("m3jit."):
                out.add(name.split(".")[1])
            elif name == "m3jit" and isinstance(node, ast.ImportFrom):
                out.update(a.name for a in node.names if (ROOT / "m3jit" / a.name).exists())
    return out


@pytest.mark.parametrize("part, path", modules(), ids=lambda v: str(v) if isinstance(v, str) else v.name)
def test_nothing_imports_against_the_arrows(part, path):
    against = {p for p in imported(path) if BASE_OF[p] > BASE_OF[part]}
    assert not against, f"{path.relative_to(ROOT)} imports {', '.join(sorted(against))}"


def test_no_line_is_too_long():
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    found = [f"{path.relative_to(ROOT)}:{number}" for path in paths
             for number, line in enumerate(path.read_text().splitlines(), 1) if len(line) > LINE]
    assert not found, f"lines over {LINE} columns: {', '.join(found)}"


def test_files_and_functions_of_the_product_are_short():
    found = []
    for _, path in modules():
        text, name = path.read_text(), path.relative_to(ROOT)
        if text.count("\n") >= FILE:
            found.append(f"{name} has {FILE} lines or more")
        found += [f"{name}:{node.lineno} {node.name} has over {FUNCTION} lines" for node in ast.walk(ast.parse(text))
                  if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                  and node.end_lineno - node.lineno >= FUNCTION]
    assert not found, "; ".join(found)


def test_native_libraries_load_on_first_use():
    code = f"import sys, m3jit; print([m for m in {NATIVE!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_table_is_complete():
    from m3jit.isa import table
    table.load_table()
    assert table.missing_numbers() == []
    assert len({row.code for row in table.OPS}) == 243
