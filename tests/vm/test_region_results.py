"""Arrays for what a region leaves behind are used again, when nobody has them any more."""
from __future__ import annotations

import threading
from collections import deque
from typing import Any, Callable

import numpy as np
import pytest

import m3jit
from m3jit.isa.types import Tensor
from m3jit.vm.array_address import address_of
from m3jit.vm.native import MAX_SPARE
from m3jit.vm.streams import CallbackSink
from tests.vm.programs import LONG

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


def test_machines_in_threads_share_a_region(expected):
    """Each gets its bytes, and keeps what it has, snapshots included, while the others' arrays are used again."""
    run("cpu", lambda t: None)                         # compiled from now on
    found: list[tuple[list[bytes], list[Any]]] = []
    begin = threading.Barrier(3)

    def work() -> None:
        said, kept, machine = [], [], m3jit.VM(LOOP, backend="cpu", threads=1)
        machine.set("rX", np.random.default_rng(2).standard_normal((1, 128)).astype(np.float32))
        machine.set("rW", Tensor.of(WEIGHTS))
        machine.set("rN", 0)
        x = machine.register("rX")

        def seen(_: Any) -> None:
            said.append(machine.main.read(x).data.tobytes())
            kept.append(machine.fork())
        machine.sinks["round"] = CallbackSink("round", seen)
        begin.wait(LONG)
        machine.run()
        found.append((said, [s.get().root.R[x.index].data.tobytes() for s in kept]))
    for _ in range(5):
        threads = [threading.Thread(target=work) for _ in range(3)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(LONG)
    assert len(found) == 15 and all(said == kept == expected for said, kept in found)


def test_another_thread_takes_the_last_spare_arrays(expected):
    class Emptied(deque):
        """Another thread was there between the look and the call."""

        def __bool__(self) -> bool:
            return True

        def popleft(self) -> Any:
            raise IndexError("pop from an empty deque")
    vm = run("cpu", lambda t: None)
    shared = [r for r in vm.regions.regions if r.fixed is not None]
    assert shared
    for region in shared:
        region.spare = Emptied()
    found: list[bytes] = []
    try:
        again = run("cpu", lambda t: found.append(t.data.tobytes()))
        assert found == expected and {*shared} & {*again.regions.regions}
    finally:
        for region in shared:
            region.spare = deque()
