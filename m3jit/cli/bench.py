"""`m3jit bench`: the speed and memory table of a source checkout."""
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import click

from m3jit.errors import UserError

TABLE = "benchmarks/table.py"


def checkout() -> Path | None:
    """The source checkout here or around the package, which has the benchmarks."""
    import m3jit
    return next((root for root in (Path.cwd(), Path(m3jit.__file__).parent.parent) if (root / TABLE).is_file()), None)


@click.command(context_settings={"ignore_unknown_options": True, "help_option_names": []})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGUMENTS]...")
def bench(arguments: tuple[str, ...]) -> int:
    """Measure m3jit and its peers and print the table (benchmarks/ of a source checkout).

    ARGUMENTS go to `python -m benchmarks.table`: --help lists them, --rows chain,scalar measures some rows.
    """
    root = checkout()
    if root is None:
        raise UserError("no benchmarks here: they are part of the source, not of the installed package; run "
                        "`m3jit bench` in a checkout, after pip install -e '.[bench]'")
    path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH", "")]))
    code = subprocess.run([sys.executable, "-m", "benchmarks.table", *arguments], cwd=root,
                          env=os.environ | {"PYTHONPATH": path}).returncode
    return code if code >= 0 else 128 - code
