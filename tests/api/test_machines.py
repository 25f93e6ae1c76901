"""`m3jit.VM` from the host: streams as iterators, input, snapshots, threads and asyncio, on compiled code."""
from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest

import m3jit
from m3jit import VM
from tests.api.outcomes import exact

WORK = """
    LOADI rI, 0
more:
    MUL rY, rX, rX
    ADD rY, rY, rI
    TANH rX, rY
    REDUCE rM, rX, MEAN
    STREAM rM LINE
    ADD rI, rI, 1
    COMPARE rI, 20
    IF_LESS more
    HALT
"""


def started(source: str = WORK, backend: str = "cpu", n: int = 50_000, **options) -> VM:
    vm = VM(m3jit.assemble(source), backend=backend, threads=options.pop("threads", 2), **options)
    vm.set("rX", np.random.default_rng(0).standard_normal(n).astype(np.float32))
    return vm


@pytest.fixture(scope="module")
def expected() -> list:
    vm = started(backend="interpreter")
    return [exact(x) if not isinstance(x, str) else x for x in vm.output()]


def test_output_is_an_iterator(expected):
    vm = started()
    assert [exact(x) if not isinstance(x, str) else x for x in vm.output()] == expected and len(expected) == 20
    assert vm.finished and vm.get("rI") == 20


def test_many_machines_at_once_on_compiled_code(expected):
    vms = [started(threads=1 + i % 3) for i in range(6)]
    got: dict[int, list] = {}

    def work(i: int) -> None:
        got[i] = list(vms[i].output())
    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(120)
    assert all([exact(x) if not isinstance(x, str) else x for x in got[i]] == expected for i in range(6))


def test_one_machine_from_several_threads():
    """While one thread runs compiled code, others read and write registers, take snapshots and push input."""
    vm = started("LOADI rN, 0\nloop: MUL rY, rX, rX\nTANH rX, rY\nADD rN, rN, 1\nCOMPARE rStop, 1\n"
                 "IF_NOT_EQUAL loop\nHALT")
    vm.set("rStop", 0)
    errors: list = []

    def guard(f):
        def body():
            try:
                f()
            except Exception as e:
                errors.append(e)
        return threading.Thread(target=body)
    runner = guard(vm.run)
    seen: list[list[int]] = [[], []]

    def watch(k: int):
        for _ in range(30):
            seen[k].append(vm.get("rN") or 0)
            vm.fork()
    watchers = [guard(lambda k=k: watch(k)) for k in range(2)]
    runner.start()
    for t in watchers:
        t.start()
    for t in watchers:
        t.join(180)
    vm.set("rStop", 1)
    runner.join(180)
    assert not runner.is_alive() and not errors
    assert all(s == sorted(s) for s in seen) and vm.get("rN") >= max(map(max, seen))


def test_input_pushed_by_one_thread_output_read_by_another():
    source = "loop: SENSE rX, rLeft, USER_INPUT\nCOMPARE rLeft, 0\nIF_LESS out\nADD rY, rX, rX\nSTREAM rY\n" \
             "JUMP loop\nout: HALT"
    vm = VM(m3jit.assemble(source), backend="cpu", wait_input=True)
    got: list = []

    def read() -> None:
        got.extend(vm.output(capacity=2))
    reader = threading.Thread(target=read)
    reader.start()
    arrays = [np.full(3, i, np.float32) for i in range(20)]
    for a in arrays:
        vm.push_input(a)
    vm.close_input()
    reader.join(180)
    assert not reader.is_alive()
    assert [np.asarray(x).tolist() for x in got] == [(a + a).tolist() for a in arrays]


def test_fork_and_abort_from_the_host():
    vm = started("EXP rY, rX\nREDUCE rM, rY, SUM\nHALT", n=10)
    before = vm.fork()
    vm.run()
    first = exact(vm.get("rM"))
    assert vm.get("rY") is not None
    vm.abort(before)
    assert vm.get("rY") is None and vm.get("rM") is None
    again = VM(m3jit.assemble("EXP rY, rX\nREDUCE rM, rY, SUM\nHALT"), backend="interpreter")
    again.set("rX", vm.get("rX"))
    assert exact(again.run().get("rM")) == first


def test_what_if_from_the_host():
    """A point is taken back and gone on from again; input read since then is read again."""
    vm = VM(m3jit.assemble("loop: SENSE rX, USER_INPUT\nADD rS, rS, rX\nSTREAM rS\nJUMP loop"), backend="cpu",
            wait_input=True)
    vm.set("rS", 0)
    out = vm.output()
    vm.push_input(1)
    assert next(out) == "1"
    point = vm.fork()
    vm.push_input(10)
    assert next(out) == "11"
    vm.abort(point)
    assert next(out) == "11"
    vm.abort(point)
    vm.set("rS", 1000)
    assert next(out) == "1010"


def test_asyncio(expected):
    async def collect() -> list:
        return [x async for x in started().output_async(capacity=3)]

    async def both() -> None:
        a, b = await asyncio.gather(collect(), collect())
        assert [exact(x) if not isinstance(x, str) else x for x in a] == expected and a == b
        endless = started("loop: MUL rY, rX, rX\nTANH rX, rY\nJUMP loop")
        task = asyncio.create_task(endless.run_async())
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert endless.finished and isinstance(endless.error, m3jit.Interrupted)
    asyncio.run(asyncio.wait_for(both(), 120))


def test_limits_on_compiled_code():
    with pytest.raises(m3jit.LimitError, match="timeout"):
        started("loop: MUL rY, rX, rX\nTANH rX, rY\nJUMP loop", timeout=0.2).run()
    with pytest.raises(m3jit.LimitError, match="max_steps"):
        started("loop: MUL rY, rX, rX\nTANH rX, rY\nJUMP loop", max_steps=1000).run()


def test_registers_by_name():
    vm = started("LOADI rK, 1.0\nADD rY, rX, rK\nHALT", n=3)
    vm.run()
    assert set(vm.registers) == {"R0", "R1", "R2"} or {"rX", "rY", "rK"} <= set(vm.registers)
    assert exact(vm.get("rY")) == exact(vm.get(str(vm.register("rY"))))
    with pytest.raises(m3jit.UserError, match="no register rQ"):
        vm.get("rQ")
