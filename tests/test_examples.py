"""Every file in examples/ runs and does what it says."""
from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.cli.command import COMMAND, EXAMPLES, environment

OUTPUT = {
    "hello.m3asm": "Hello from m3jit.\n",
    "loop.m3asm": "26623 takes the most steps: 307\n",
    "tensors.m3asm": None,
    "rollback.m3asm": "[5, 8, 4, 3] weigh 20\n",
    "generate.py": None,
    "extension.py": "100.0\n1.0\n",
    "correct.py": None,
}


def run(name: str) -> str:
    command = [sys.executable] if name.endswith(".py") else [*COMMAND, "run"]
    done = subprocess.run([*command, str(EXAMPLES / name)], capture_output=True, text=True, timeout=120,
                          stdin=subprocess.DEVNULL, env=environment())
    assert done.returncode == 0 and done.stderr == "", done
    return done.stdout


def test_the_list_is_complete():
    assert set(OUTPUT) == {p.name for p in EXAMPLES.iterdir() if p.suffix in (".py", ".m3asm")}


@pytest.mark.parametrize("name", [n for n, text in OUTPUT.items() if text is not None])
def test_output(name):
    assert run(name) == OUTPUT[name]


def test_tensors():
    """Against NumPy."""
    import ast
    import numpy as np
    x = np.array([[1, 2, 3, 4], [-4, -3, -2, -1]], np.float64)
    w = np.array([[0.5, -1, 0.25], [0, 0.5, 1], [1, 0, -0.5], [-0.25, 1, 0]])
    y = x @ w + [0.1, -0.2, 0.3]
    y = 2 * y / (1 + np.exp(-y))
    p = np.exp(y - y.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    first, second = run("tensors.m3asm").splitlines()
    np.testing.assert_allclose(ast.literal_eval(first), p, rtol=1e-5)
    assert ast.literal_eval(second) == p.argmax(1)[:, None].tolist()


def test_generation():
    lines = run("generate.py").splitlines()
    text = "\n".join(lines)
    assert text.count("The carriage stopped at the door, and") == 2
    assert "[24 tokens, seed 1]" in text and "[24 tokens, seed 2]" in text
    first, second = (part.split("[24 tokens")[0] for part in text.split("The carriage stopped at the door, and")[1:])
    assert first != second


def test_correction():
    text = run("correct.py")
    shown, corrected, counts, times = re.fullmatch(r"(?s)(.*)\ncorrected: (.*)\n([^\n]+)\n([^\n]+)\n", text).groups()
    assert shown.replace("good man [no: clever woman]", "clever woman") == corrected and "clever woman" in corrected
    kept, back, put, evaluated = map(int, re.findall("[0-9]+", counts))
    assert kept > 3 and back and evaluated <= put + 1
    assert re.fullmatch(r"seen after [0-9.]+ ms, rolled back in [0-9.]+ ms, next token after [0-9.]+ ms", times)
