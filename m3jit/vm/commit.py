"""Several stores as one: all of them happen, or none.

What changes a context is prepared first, where anything may fail, and then stored by one call into C: no bytecode runs
between two stores, so no signal handler (KeyboardInterrupt) does, and none of them allocates.  An interrupt or a failed
allocation therefore finds a context as it was before, or as it is afterwards, and never a mix.
"""
from __future__ import annotations

from operator import call, setitem
from typing import Any, Iterable

Store = tuple[Any, Any, Any, Any]          # (setattr or setitem, object, attribute or index, value)
# Both return None, so `any` of their results calls all of them; it is the cheapest loop that is one call into C.


def attribute(target: Any, name: str, value: Any) -> Store:
    """target.name = value.  The attribute is a plain one or a slot."""
    return setattr, target, name, value


def item(target: list | dict | memoryview, index: Any, value: Any) -> Store:
    """target[index] = value: an element of a list, or of a dict that has one there, or a slice of a view of bytes and
    another view of that length."""
    return setitem, target, index, value


def commit(stores: Iterable[Store]) -> None:
    """Do all stores, in order.  MemoryError: none was done; KeyboardInterrupt: none or all.

    A finaliser of what is replaced may run in between; what it raises does not come here."""
    columns = tuple(zip(*stores))
    if columns:
        any(map(call, *columns))


def commit_columns(calls: Iterable[Any], targets: Iterable[Any], keys: Iterable[Any], values: Iterable[Any]) -> None:
    """`commit` of stores that are given as columns; they are lists or tuples, which can be walked without
    allocating."""
    any(map(call, calls, targets, keys, values))
