"""Named exceptions from the regular assembly syntax, keyed by `Op.syntax`.  Anything else is derived from the
fields."""
from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Quirk:
    """What is irregular.  tail: key of the bytes after the fields (`PAYLOAD="00ff..."`, hexadecimal)."""
    tail: str = ""


QUIRKS: dict[str, Quirk] = {
    "escape": Quirk(tail="PAYLOAD"),
}
