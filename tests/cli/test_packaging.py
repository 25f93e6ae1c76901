"""What is installed: the packages and data pyproject.toml names, and a wheel that works away from the checkout."""
from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.cli.command import EXAMPLES, ROOT, environment

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_package_is_listed():
    folders = {".".join(p.parent.relative_to(ROOT).parts) for p in (ROOT / "m3jit").rglob("__init__.py")}
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == folders | {"m3jit.kernels"}
    folders = {p.parent for p in (ROOT / "m3jit").rglob("*.py")}
    assert folders == {p.parent for p in (ROOT / "m3jit").rglob("__init__.py")}


def test_data_files_are_listed():
    data = {p.relative_to(ROOT / "m3jit") for p in (ROOT / "m3jit").rglob("*") if p.is_file() and p.suffix != ".py"
            and "__pycache__" not in p.parts}
    listed = {p.relative_to(ROOT / "m3jit") for pattern in PROJECT["tool"]["setuptools"]["package-data"]["m3jit"]
              for p in (ROOT / "m3jit").glob(pattern)}
    assert data == listed and Path("py.typed") in data and Path("models/data/default.gguf") in data


def test_what_is_imported_is_required():
    """Third-party modules that the package imports are dependencies or extras."""
    import ast
    own = {"numpy": "numpy", "llvmlite": "llvmlite", "tokenizers": "tokenizers", "xxhash": "xxhash", "click": "click",
           "numba": "numba", "pyopencl": "pyopencl", "jinja2": "jinja2", "gguf": "gguf", "starlette": "starlette",
           "uvicorn": "uvicorn", "llguidance": "llguidance"}
    project = PROJECT["project"]
    named = " ".join([*project["dependencies"],
                      *(d for extra in project["optional-dependencies"].values() for d in extra)])
    for path in [*(ROOT / "m3jit").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else \
                [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            for name in names:
                top = name.partition(".")[0]
                if top not in sys.stdlib_module_names and top != "m3jit":
                    assert top in own and own[top] in named, f"{path}: {name}"


def test_the_installed_metadata():
    meta = importlib.metadata.metadata("m3jit")
    assert meta["Requires-Python"] == ">=3.11" and meta["License-Expression"] == "Apache-2.0"
    entry = {e.name: e.value for e in importlib.metadata.entry_points(group="console_scripts")}
    assert entry["m3jit"] == "m3jit.cli:main"


def test_importing_loads_no_code_generator():
    code = ("import sys, numpy, m3jit; print(sorted(m for m in "
            "('llvmlite', 'numba', 'tokenizers', 'gguf', 'pyopencl', 'click') if m in sys.modules))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=180, env=environment())
    assert done.stdout == "[]\n", done.stderr


def test_a_wheel_works_elsewhere(tmp_path):
    """Built from the checkout, unpacked alone, run in another folder."""
    source = tmp_path / "source"                       # building writes beside the sources
    for name in ("m3jit", "kernels"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, source / name)
    built = subprocess.run([sys.executable, "-m", "pip", "wheel", "--no-deps", "-q", "-w", tmp_path / "wheel", source],
                           capture_output=True, text=True, timeout=300)
    if built.returncode and "setuptools" in built.stderr and "No matching distribution" in built.stderr:
        pytest.skip("no package index to take setuptools from")
    assert built.returncode == 0, built.stderr
    (wheel,) = (tmp_path / "wheel").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path / "site")
    assert {"m3jit/py.typed", "m3jit/kernels/fused.py", "m3jit/models/data/default.gguf",
            "m3jit/ir/passes/fuse.py"} <= set(names)
    assert not [n for n in names if n.startswith(("tests/", "kernels/", "tools/"))]
    for arguments in (["run", EXAMPLES / "hello.m3asm"], ["run", "-n", "2"], ["doctor"]):
        done = subprocess.run([sys.executable, "-m", "m3jit", *map(str, arguments)], cwd=tmp_path, capture_output=True,
                              text=True, timeout=120, stdin=subprocess.DEVNULL,
                              env=environment(PYTHONPATH=str(tmp_path / "site")))
        assert done.returncode == 0 and done.stdout, done
    assert f"{tmp_path}/site/m3jit" in done.stdout
