"""The house rules that a machine can check: who imports whom, and what importing m3jit does not load."""
from __future__ import annotations

import ast
import functools
import importlib
import inspect
import subprocess
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Iterator

import pytest

ROOT = Path(__file__).parent.parent
# A module may import from its own layer group and from those before it.
LAYERS = [{"cache_files", "errors", "new_file", "paths"}, {"isa"}, {"ir"}, {"frontend", "kernels", "backends"}, {"vm"},
          {"durable"}, {"models"}, {"timetravel"}, {"api"}, {"serve"}, {"cli", "__main__"}]
BASE_OF = {name: i for i, group in enumerate(LAYERS) for name in group}
FOLDERS = ("m3jit", "kernels", "tests", "tools", "benchmarks", "examples")
LINE, FILE, FUNCTION = 120, 500, 60                     # columns; lines of a file and of a function
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


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = ("m3jit", *parts) if parts[0] == "kernels" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_at_run_time(node: ast.AST) -> Iterator[str]:
    """Names that `import` and `from` bind, in functions too, but not those that only annotations need."""
    if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
        return
    if isinstance(node, ast.Import):
        yield from (a.name for a in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield from (f"{node.module}.{a.name}" for a in node.names)
    for child in ast.iter_child_nodes(node):
        yield from imports_at_run_time(child)


def circles(edges: dict[str, set[str]]) -> list[tuple[str, ...]]:
    """Groups of modules that reach each other."""
    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        todo = [start]
        while todo:
            new = edges[todo.pop()] - seen
            seen |= new
            todo += new
        return seen
    far = {name: reached(name) for name in edges}
    return sorted({tuple(sorted(other for other in far[name] if name in far[other])) for name in far
                   if name in far[name]})


def test_no_modules_import_each_other():
    """Not in functions either; `m3jit` and what it hands out on demand aside."""
    paths = {module_name(path): path for path in [ROOT / "m3jit/__init__.py", *(path for _, path in modules())]}
    edges: dict[str, set[str]] = {}
    for name, path in paths.items():
        found = imports_at_run_time(ast.parse(path.read_text()))
        edges[name] = {n if n in paths else n.rpartition(".")[0] for n in found} & set(paths) - {name, "m3jit"}
    assert not circles(edges)


def test_no_line_is_too_long():
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    found = [f"{path.relative_to(ROOT)}:{number}" for path in paths
             for number, line in enumerate(path.read_text().splitlines(), 1) if len(line) > LINE]
    assert not found, f"lines over {LINE} columns: {', '.join(found)}"


def test_files_and_functions_are_short():
    found = []
    for path in (path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))):
        text, name = path.read_text(), path.relative_to(ROOT)
        if text.count("\n") >= FILE:
            found.append(f"{name} has {FILE} lines or more")
        found += [f"{name}:{node.lineno} {node.name} has over {FUNCTION} lines" for node in ast.walk(ast.parse(text))
                  if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                  and node.end_lineno - node.lineno >= FUNCTION]
    assert not found, "; ".join(found)


def undocumented(module: object) -> Iterator[str]:
    """Public classes and functions of a module, and public members of these classes, without a docstring of their own
    or of what they override; what dataclasses write is none."""
    for name, found in vars(module).items():
        if name.startswith("_") or getattr(found, "__module__", None) != module.__name__ or not callable(found):
            continue
        if isinstance(found, type) or inspect.isfunction(found):
            if (inspect.getdoc(found) or f"{name}(").startswith(f"{name}("):
                yield f"{module.__name__}.{name}"
        for member, value in vars(found).items() if isinstance(found, type) else ():
            kinds = (property, functools.cached_property, classmethod, staticmethod)
            if not member.startswith("_") and (inspect.isfunction(value) or isinstance(value, kinds)) and \
                    not inspect.getdoc(getattr(found, member)):
                yield f"{module.__name__}.{name}.{member}"


def test_what_is_public_in_the_python_interface_says_what_it_is():
    names = [f"m3jit.api.{path.stem}" for path in sorted((ROOT / "m3jit/api").glob("*.py")) if path.stem != "__init__"]
    found = [name for module in map(importlib.import_module, names) for name in undocumented(module)]
    assert not found, f"without a docstring: {', '.join(found)}"


def test_a_member_without_a_docstring_is_found():
    @dataclass
    class Plain:
        number: int

    class Made:
        """A class."""

        def said(self) -> None:
            """What it does."""

        def unsaid(self) -> None:
            pass

        @property
        def unsaid_too(self) -> int:
            return 1
    module = types.ModuleType(Made.__module__)
    module.Made, module.Plain, module.plain = Made, Plain, lambda: None
    name = Made.__module__
    assert list(undocumented(module)) == [f"{name}.Made.unsaid", f"{name}.Made.unsaid_too", f"{name}.Plain",
                                          f"{name}.plain"]


def test_native_libraries_load_on_first_use():
    code = f"import sys, m3jit; print([m for m in {NATIVE!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_table_is_complete():
    from m3jit.isa import table
    table.load_table()
    assert table.missing_numbers() == []
    assert len({row.code for row in table.OPS}) == 243
