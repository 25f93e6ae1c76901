"""Several stores as one: all of them happen, or none.

What changes a context is prepared first, where anything may fail, and then stored by one call into C: no bytecode runs
between two stores, so no signal handler (KeyboardInterrupt) does, and none of them allocates.  An interrupt or a failed
allocation therefore finds a context as it was before, or as it is afterwards, and never a mix.
"""
from __future__ import annotations

from collections import deque
from operator import call, setitem
from typing import Any, Iterable

Store = tuple[Any, Any, Any, Any]          # (setattr or setitem, object, attribute or index, value)


def attribute(target: Any, name: str, value: Any) -> Store:
    """target.name = value.  The attribute is a plain one or a slot."""
    return setattr, target, name, value


def item(target: list, index: Any, value: Any) -> Store:
    """target[index] = value: an element of a list, or a slice of a bytearray and a bytearray of that length."""
    return setitem, target, index, value


def commit(stores: Iterable[Store]) -> None:
    """Do all stores, in order.  MemoryError: none was done; KeyboardInterrupt: none or all.

    A finaliser of what is replaced may run in between; what it raises does not come here."""
    columns = tuple(zip(*stores))
    if not columns:
        return
    deque(map(call, *columns), 0)
