"""Arrays for what a region leaves behind are used again, when nobody has them any more."""
from __future__ import annotations

from typing import Any, Callable

import numpy as np
import pytest

import m3jit
from m3jit.isa.types import Tensor
from m3jit.vm.array_address import address_of
from m3jit.vm.native import MAX_SPARE
from m3jit.vm.streams import CallbackSink

ROUNDS = 20
LOOP = m3jit.assemble(f"""
loop:
    MATVEC rX, rX, rW
    MATVEC rY, rX, rW
    STREAM rN, SINK NAME="round"
    ADD rN, rN, 1
    COMPARE rN, {ROUNDS}
    IF_LESS loop
    HALT
""")
WEIGHTS = (np.random.default_rng(1).standard_normal((128, 128)) / 12).astype(np.float32)


def run(backend: str, seen: Callable[[Tensor], Any]) -> m3jit.VM:
    """seen(rX) is called in each round."""
    vm = m3jit.VM(LOOP, backend=backend, threads=1)
    vm.set("rX", np.random.default_rng(2).standard_normal((1, 128)).astype(np.float32))
    vm.set("rW", Tensor.of(WEIGHTS))
    vm.set("rN", 0)
    x = vm.register("rX")
    vm.sinks["round"] = CallbackSink("round", lambda _: seen(vm.main.read(x)))
    return vm.run()


@pytest.fixture(scope="module")
def expected() -> list[bytes]:
    found: list[bytes] = []
    run("interpreter", lambda t: found.append(t.data.tobytes()))
    assert len(found) == len(set(found)) == ROUNDS
    return found


def test_they_are_used_again(expected):
    found, places = [], set()

    def seen(t: Tensor) -> None:
        found.append(t.data.tobytes())
        places.add(address_of(t.data))
    vm = run("cpu", seen)
    assert found == expected and len(places) <= MAX_SPARE
    assert sum(region.entries for region in vm.regions.regions) >= ROUNDS


@pytest.mark.parametrize("how", [lambda t: t, lambda t: t.data, lambda t: t.data[:, 3:], lambda t: memoryview(t.data),
                                 lambda t: Tensor(t.dtype, (128,), t.data.reshape(128))],
                         ids=["tensor", "array", "view", "buffer", "reshaped"])
@pytest.mark.parametrize("which", [1, 2, 3])
def test_what_somebody_has_stays(expected, how, which):
    """Every tensor is kept, or every second or third."""
    kept: list[tuple[Any, bytes]] = []
    number = 0

    def seen(t: Tensor) -> None:
        nonlocal number
        if number % which == 0:
            kept.append((how(t), expected[number]))
        number += 1
    run("cpu", seen)
    assert number == ROUNDS
    for value, whole in kept:
        data = np.asarray(value.data if isinstance(value, Tensor) else value)
        want = np.frombuffer(whole, np.float32)
        assert data.tobytes() == (want if data.size == 128 else want[3:]).tobytes()
