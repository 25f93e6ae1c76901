"""Results as bytes, and a program run in every way that must give the same ones."""
from __future__ import annotations

from typing import Any

import numpy as np

from m3jit import VM, Tensor
from tests.api.random_items import Item, Program


def exact(value: Any) -> tuple:
    """Kind, dtype, shape and bytes of a result."""
    if isinstance(value, Tensor):
        return "tensor", value.dtype.name, value.shape, value.tobytes()
    if isinstance(value, np.ndarray):
        return "array", str(value.dtype), value.shape, value.tobytes()
    return type(value).__name__, np.float64(value).tobytes() if isinstance(value, float) else value


def called(p: Program, outputs: list[Item], backend: str, threads: int = 1) -> tuple[list[tuple], Any]:
    """Outputs of one call through `Builder.compile`, and the compiled program."""
    f = p.builder.compile([i.value for i in p.inputs], [i.value for i in outputs], backend=backend, threads=threads)
    result = f(*p.arguments)
    return [exact(v) for v in (result if len(outputs) > 1 else (result,))], f


def machine(p: Program, backend: str, threads: int = 1) -> dict[str, tuple]:
    """Every register after a run of `VM`."""
    vm = VM(p.builder.build(), backend=backend, threads=threads)
    for item, value in zip(p.inputs, p.arguments):
        vm.set(item.value.name, value)
    vm.run()
    return {name: exact(v) for name, v in vm.registers.items()}


def differences(p: Program, want: list[tuple], got: list[tuple], outputs: list[Item]) -> str:
    """The first output that differs, for a message."""
    for i, (a, b) in enumerate(zip(want, got)):
        if a != b:
            item = outputs[i]
            place = p.items.index(item) - len(p.inputs)
            near = p.opcodes[max(0, place - 2):place + 1]
            what = f"output {i} ({item.dtype} {item.shape}, near {near})"
            return f"{what}: {a[:3]} against {b[:3]}\n{_some(a)}\n{_some(b)}"
    return ""


def _some(v: tuple) -> str:
    if v[0] != "array":
        return str(v[-1])[:80]
    return str(np.frombuffer(v[3], v[1])[:8])
