"""Functions of tests in a process of their own.

CPython loses references where its allocations fail (`faults.Allocation`): an object that is in use is freed then, and
the process may crash long after, often at its end.  So whoever lets them fail does so in a process that only hands over
what it found, and is left without any cleaning up."""
from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable

LONG = 1800                        # seconds


def run_apart(function: Callable[..., Any], *args: Any) -> Any:
    """What the function of a module gives for these arguments; all of it fits into JSON.  AssertionError with the text
    of what it raised, or of how the process ended."""
    done = subprocess.run([sys.executable, "-m", __name__, function.__module__, function.__qualname__,
                           json.dumps(args)],
                          cwd=Path(__file__).parents[3], capture_output=True, text=True, timeout=LONG)
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    module, name, args = sys.argv[1:]
    found = json.dumps(getattr(importlib.import_module(module), name)(*json.loads(args)))
    print(found, flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
