"""Prints the speed and memory table of versioned state: forking, rolling back, interrupting, correcting, replaying.

    python -m benchmarks.state [--smollm2 FILE] [--folder DIR] [--peer-python PYTHON] [--rows fork,...] [--json FILE]

Every row of the table is a module benchmarks/state_<row>.py with `NAME` (what it measures, in words) and
`measure(setup: Setup) -> list[Row]`.  A target of "stated" has no bound.  The exit status is 0 when every bound is met:
a row that could not be measured counts as unmet, and says why.
"""
from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any, Iterator

from benchmarks.state_setup import STATED, Setup
from benchmarks.table import Row, machine

ROWS = ("fork", "forks100", "joint", "interrupt", "cancel", "correction", "every_token", "prefix", "replay")


def row_module(name: str) -> Any:
    """The module of a row; None when there is none yet."""
    full = f"benchmarks.state_{name}"
    return importlib.import_module(full) if importlib.util.find_spec(full) else None


def measured(name: str, setup: Setup) -> Iterator[Row]:
    """The rows of one module; an error becomes a row that has no verdict, so that the others still run."""
    module = row_module(name)
    if module is None:
        yield Row(name, "", f"not measured: there is no benchmarks/state_{name}.py", None)
        return
    try:
        yield from module.measure(setup)
    except Exception as error:
        yield Row(module.NAME, "", f"not measured: {type(error).__name__}: {error}", None)


def verdict(row: Row) -> str:
    """met, NOT MET, stated (a figure without a bound) or no verdict."""
    if row.met is None:
        return "stated" if row.target == STATED else "no verdict"
    return "met" if row.met else "NOT MET"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=",".join(ROWS), help="comma-separated: " + ", ".join(ROWS))
    parser.add_argument("--smollm2", dest="model", help="SmolLM2 GGUF (default: the obtained one)")
    parser.add_argument("--folder", default=os.path.join(tempfile.gettempdir(), "m3jit-bench"),
                        help="where the models with random weights are, or are made (1.9 GB)")
    parser.add_argument("--peer-python", default=sys.executable, help="Python with llama-cpp-python")
    parser.add_argument("--json", help="write the rows to this file too")
    args = parser.parse_args(argv)
    unknown = [name for name in args.rows.split(",") if name not in ROWS]
    if unknown:
        parser.error(f"no row {', '.join(unknown)}; the rows are {', '.join(ROWS)}")
    setup = Setup(args.model, args.folder, args.peer_python)
    print(machine())
    found: list[Row] = []
    for name in args.rows.split(","):
        for row in measured(name, setup):
            found.append(row)
            print(f"{verdict(row):10} | {row.name} | {row.target} | {row.seen}", flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps({"machine": machine(), "rows": [asdict(r) for r in found]}, indent=1))
    return 0 if all(verdict(r) in ("met", "stated") for r in found) else 1


if __name__ == "__main__":
    sys.exit(main())
