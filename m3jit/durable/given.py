"""What a run was given before it began, as the notes of its versions have it.

A run that goes on at a version has the input and the random stream of that version: what the command is given now would
have no effect where it is something else.  So a version says what its run was given, and the two are compared.

An item is [label, digest, length, excerpt]: blake2b of its content (16 bytes), characters or bytes of that, and its
beginning.  An item whose content nobody knows before the run (a pipe) has an empty digest.
"""
from __future__ import annotations

import hashlib
from typing import Any

EXCERPT = 40                       # characters of a text that are kept and shown


def item(label: str, content: str | bytes | None, shown: str | None = None) -> list[Any]:
    """One thing that a run is given.  content: None where it is not known.  shown: stands for it in messages."""
    if content is None:
        return [label, b"", 0, ""]
    raw = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
    text = raw.decode("utf-8", "replace") if shown is None else shown
    return [label, hashlib.blake2b(raw, digest_size=16).digest(), len(text),
            text[:EXCERPT].encode("utf-8", "replace").decode()]


def is_given(noted: Any) -> bool:
    """Is a tree a list of items?"""
    return isinstance(noted, list) and all(
        isinstance(i, list) and list(map(type, i)) == [str, bytes, int, str] for i in noted)


def differences(noted: list[list[Any]], now: list[list[Any]]) -> list[str]:
    """What a run was given and what one is given now, where they differ: a clause for each, both shown."""
    before, here = {i[0]: i for i in noted}, {i[0]: i for i in now}
    found = []
    for label in [*before, *(label for label in here if label not in before)]:
        old, new = before.get(label), here.get(label)
        if old == new or old is not None and not old[1] or new is not None and not new[1]:
            continue
        alike = old is not None and new is not None and old[3] == new[3]
        found.append(f"{label} was {_shown(old)} and is {_shown(new)} here"
                     + (" (they begin alike and differ further on)" if alike else ""))
    return found


def _shown(given: list[Any] | None) -> str:
    if given is None:
        return "not given"
    _, _, length, excerpt = given
    return repr(excerpt) + (f"... ({length} long)" if length > len(excerpt) else "")
