"""Where the interpreter meets compiled code and the eager namespace; both come on first use."""
from __future__ import annotations

from typing import Any, Callable

from m3jit.errors import UnsupportedError

INTERPRETER = "interpreter"
_factories: dict[str, Callable[[Any, int | None], Any]] = {}


def register(backend: str, factory: Callable[[Any, int | None], Any]) -> None:
    """Make a backend known: factory(vm, threads) gives an object with the methods of `interpreter.Regions`."""
    _factories[backend] = factory


def make(vm: Any, backend: str, threads: int | None) -> Any:
    """The compiled regions of a machine, None for the interpreter alone.  "auto": the CPU backend when it is there."""
    if backend == INTERPRETER:
        return None
    if backend == "auto":
        factory = _factories.get("cpu")
        return factory(vm, threads) if factory is not None else None
    if backend not in _factories:
        raise UnsupportedError(f"no backend {backend!r}; available: {', '.join([INTERPRETER, *sorted(_factories)])}")
    return _factories[backend](vm, threads)


def eager_namespace(machine: Any) -> Any:
    """An `EagerXp` whose memory reads go to the machine's running context."""
    from m3jit.ir.eager import EagerXp

    class MachineXp(EagerXp):
        """The eager namespace with the machine behind it."""

        def read_block(self, address: int, shape: tuple[int, ...], dtype: Any) -> Any:
            """A block of addressed memory as a tensor."""
            if any(d < 0 for d in shape):
                raise self.error(f"shape {list(shape)} of a block in memory; every dimension must be given")
            return machine.ctx.memory.read_tensor(address, dtype, shape)
    return MachineXp()
