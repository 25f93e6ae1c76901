"""Attention and exponentials computed once for equal operands: arithmetic is not what the model-based test is about."""
from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Callable, Iterator

from m3jit.ir import eager_attention, eager_recurrent

MOST = 20_000                      # results that are kept of each function


def _remembering(real: Callable[..., Any]) -> Callable[..., Any]:
    known: dict[tuple, Any] = {}

    def look_up(*operands: Any) -> Any:
        key = tuple((x.shape, x.tobytes()) for x in operands)
        found = known.get(key)
        if found is None:
            if len(known) >= MOST:
                known.clear()
            found = known[key] = real(*operands)
        return found.copy()
    return look_up


@contextmanager
def remembered() -> Iterator[None]:
    """While inside, attention and exponentials of the eager namespace look results up by their operands' bytes."""
    places = [(eager_attention, "attend"), (eager_attention, "exp32"), (eager_recurrent, "exp32")]
    real = [getattr(module, name) for module, name in places]
    for (module, name), function in zip(places, real):
        setattr(module, name, _remembering(function))
    try:
        yield
    finally:
        for (module, name), function in zip(places, real):
            setattr(module, name, function)
