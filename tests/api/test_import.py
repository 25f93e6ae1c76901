"""Importing m3jit is cheap: names load their part on first use."""
from __future__ import annotations

import subprocess
import sys

import pytest

import m3jit

HEAVY = ("llvmlite", "numba", "tokenizers", "gguf", "pyopencl", "scipy")


def fresh(code: str) -> str:
    """Output of a new interpreter."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_loads_no_code_generator():
    out = fresh("import time, numpy\nt = time.perf_counter()\nimport m3jit, sys\n"
                f"print(time.perf_counter() - t)\nprint([m for m in {HEAVY!r} if m in sys.modules])")
    seconds, loaded = out.splitlines()
    print(f"\nimport m3jit beyond NumPy: {float(seconds) * 1e3:.1f} ms")
    assert loaded == "[]"


@pytest.mark.parametrize("use", [
    "m3jit.assemble('HALT')", "m3jit.VM(m3jit.assemble('HALT'), backend='interpreter').run()",
    "m3jit.Builder().build()",
    "m3jit.VM(m3jit.assemble('HALT')).run()", "m3jit.disassemble(m3jit.assemble('NOP'))", "m3jit.extension"])
def test_what_needs_no_code_generator_loads_none(use):
    assert fresh(f"import m3jit, sys\n{use}\nprint([m for m in {HEAVY!r} if m in sys.modules])").strip() == "[]"


def test_every_public_name_exists():
    for name in m3jit.__all__:
        assert getattr(m3jit, name) is not None
    assert set(m3jit.__all__) <= set(dir(m3jit))
    with pytest.raises(AttributeError, match="no attribute 'assembel'"):
        m3jit.assembel


def test_type_checkers_see_the_same_names():
    """The names under TYPE_CHECKING are those that load lazily."""
    import ast
    tree = ast.parse(open(m3jit.__file__).read())
    block = next(n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING")
    declared = {a.name: s.module for s in block.body for a in s.names}
    assert declared == m3jit._MODULE_OF
    assert set(m3jit.__all__) == {*declared, "__version__"}


def test_an_error_of_the_program_is_a_user_error():
    with pytest.raises(m3jit.UserError, match="did you mean SOFTMAX"):
        m3jit.assemble("SOFTMX rA, rB")
    assert issubclass(m3jit.AssemblyError, m3jit.M3Error) and issubclass(m3jit.Trap, m3jit.UserError)
