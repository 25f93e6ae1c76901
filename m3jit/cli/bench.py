"""`m3jit bench`: the benchmarks of a source checkout."""
from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import click

from m3jit.errors import UserError

NEEDED = ("pytest", "pytest_benchmark")


def benchmark_folder() -> Path | None:
    """benchmarks/ here or beside the package."""
    import m3jit
    for root in (Path.cwd(), Path(m3jit.__file__).parent.parent):
        folder = root / "benchmarks"
        if (folder / "conftest.py").is_file() or any(folder.glob("test_*.py")) or any(folder.glob("bench_*.py")):
            return folder
    return None


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[PYTEST ARGUMENTS]...")
def bench(arguments: tuple[str, ...]) -> int:
    """Run the benchmarks (benchmarks/ of a source checkout) and print their table.

    ARGUMENTS go to pytest: `m3jit bench -k fused` runs some of them.
    """
    folder = benchmark_folder()
    if folder is None:
        raise UserError("no benchmarks here: they are part of the source, not of the installed package; run `m3jit bench` "
                        "in a checkout")
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"the benchmarks need {', '.join(missing)}: pip install -e '.[bench]'")
    files = sorted(str(p) for pattern in ("test_*.py", "bench_*.py") for p in folder.glob(pattern))
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-p", "no:cacheprovider", *files, *arguments]
    code = subprocess.run(command, cwd=folder.parent, env=os.environ | {"PYTHONPATH": str(folder.parent)}).returncode
    return {0: 0, 2: 130}.get(code, 1)
