"""Who a message says holds a lock, on this system."""
from __future__ import annotations

import fcntl
import os
from pathlib import Path


def held_by(process: int, folder: Path) -> str:
    """"process N" where /proc/locks shows the locks of files in this folder as those of their device and number, which
    is tried with one of this process; "another process" where it does not (subvolumes of btrfs, sandboxes)."""
    path = folder / ".lock of a test"
    with open(path, "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        found = os.fstat(file.fileno())
        place = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
        try:
            with open("/proc/locks", encoding="ascii") as table:
                lines = [line.split() for line in table]
        except OSError:
            lines = []
    path.unlink()
    told = any("FLOCK" in fields and str(os.getpid()) in fields and place in fields for fields in lines)
    return f"process {process}" if told else "another process"
