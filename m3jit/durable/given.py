"""What a run was given before it began, as the notes of its versions have it.

A run that goes on at a version has the input and the random stream of that version: what the command is given now would
have no effect where it is something else.  So a version says what its run was given, and the two are compared.

An item is [label, digest, length, excerpt]: blake2b of its content (16 bytes), characters of what stands for it in
messages, and the beginning of that.  Items are the same whose digests are.  An item whose content nobody knows before
the run (a pipe) has an empty digest.
"""
from __future__ import annotations

import hashlib
from typing import Any

EXCERPT = 40                       # characters of a text that are kept and shown


def item(label: str, content: str | bytes | None, shown: str | None = None) -> list[Any]:
    """One thing that a run is given.  content: None where it is not known.  shown: stands for it in messages, and is
    not compared (the name of a file)."""
    if content is None:
        return [label, b"", 0, ""]
    raw = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
    text = raw.decode("utf-8", "replace") if shown is None else shown
    excerpt = (text[:EXCERPT] if shown is None else text).encode("utf-8", "replace").decode()
    return [label, hashlib.blake2b(raw, digest_size=16).digest(), len(text), excerpt]


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
        if old is not None and (not old[1] or new is not None and old[1] == new[1]) or new is not None and not new[1]:
            continue
        how = ""
        if old is not None and new is not None and old[3] == new[3]:
            whole = old[2] == len(old[3]) and new[2] == len(new[3])
            how = "; its content is another" if whole else " (they begin alike and differ further on)"
        found.append(f"{label} was {_shown(old)} and is {_shown(new)} here{how}")
    return found


def kept(noted: list[list[Any]], now: list[list[Any]]) -> list[list[Any]]:
    """What the versions of a run note that goes on and is given `now`: an item not known now as it was noted."""
    before = {i[0]: i for i in noted}
    return [i if i[1] else before.get(i[0], i) for i in now]


def _shown(given: list[Any] | None) -> str:
    if given is None:
        return "not given"
    _, _, length, excerpt = given
    return repr(excerpt) + (f"... ({length} long)" if length > len(excerpt) else "")
