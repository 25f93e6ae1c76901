"""Importing m3jit is cheap: names load their part on first use."""
from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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


def test_a_checkout_is_whole_without_being_installed():
    """Python that runs in a checkout finds its `m3jit` before an installed one, and the kernels with it."""
    root = str(Path(m3jit.__file__).parents[1])
    code = ("import sys\nsys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in repr(f).lower()]\n"
            f"sys.path.insert(0, {root!r})\nimport m3jit.kernels\nprint(m3jit.kernels.__path__)\n"
            "f = m3jit.compile('ADD rY, rX, rX\\nHALT', inputs=['rX'], outputs=['rY'])\nprint(f(2))")
    assert fresh(code).splitlines() == [str([str(Path(root) / "kernels")]), "4"]


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
