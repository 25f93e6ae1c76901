"""The machine from the host: threads, asyncio, stopping, registers during a run, recording and replay, profiles."""
from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest

from m3jit.errors import Divergence, Interrupted, LimitError, Trap, UnsupportedError, UserError
from m3jit.vm.recording import Recorder
from m3jit.vm.streams import Item
from m3jit.vm.vm import VM
from tests.vm.programs import LONG, ins, machine, run, wait_until, wait_until_all_wait

FOREVER = "LOADI r1, 0\nloop: ADDI r1, r1, 1\nJUMP loop"
COUNT = "LOADI r1, 0\nmore: STREAM r1\nADDI r1, r1, 1\nCOMPARE r1, {n}\nIF_LESS more\nHALT"


def start(vm: VM) -> tuple[threading.Thread, list]:
    errors: list = []

    def body():
        try:
            vm.run()
        except Exception as e:
            errors.append(e)
    thread = threading.Thread(target=body)
    thread.start()
    return thread, errors


def test_stop_from_another_thread():
    vm = machine(FOREVER)
    thread, errors = start(vm)
    wait_until(lambda: vm.get("r1"))
    vm.stop()
    thread.join(LONG)
    assert not thread.is_alive() and isinstance(errors[0], Interrupted)
    assert "stopped; context 1 was at pc" in str(errors[0])


def test_registers_snapshots_and_interrupts_while_it_runs():
    vm = machine("LOADI r1, 0\nloop: ADDI r1, r1, 1\nIF_INTERRUPT out\nJUMP loop\nout: HALT")
    thread, errors = start(vm)
    seen = [vm.get("r1") or 0 for _ in range(20)]
    snap = vm.fork()
    vm.set("r1", -10 ** 9)
    low = vm.get("r1")
    vm.abort(snap)
    vm.interrupt()
    thread.join(LONG)
    assert not errors and not thread.is_alive()
    assert seen == sorted(seen) and low < 0 <= vm.get("r1")


def test_input_pushed_while_the_program_waits():
    got = []
    vm = machine("loop: SENSE r1, r2, USER_INPUT\nCOMPARE r2, 0\nIF_LESS out\nSTREAM r1\nJUMP loop\nout: HALT",
                 wait_input=True)
    vm.set_sink("OUTPUT", got.append)
    thread, errors = start(vm)
    for text in ("a", "b", "c"):
        wait_until_all_wait(vm)
        vm.push_input(text)
    vm.close_input()
    thread.join(LONG)
    assert not errors and got == ["a", "b", "c"]
    with pytest.raises(UserError, match="is closed"):
        vm.push_input("d")


def test_stop_and_timeout_while_it_waits():
    vm = machine("SENSE r1, USER_INPUT\nHALT", wait_input=True)
    thread, errors = start(vm)
    wait_until_all_wait(vm)
    vm.stop()
    thread.join(LONG)
    assert isinstance(errors[0], Interrupted)
    with pytest.raises(LimitError, match="timeout"):
        machine("SENSE r1, USER_INPUT\nHALT", wait_input=True, timeout=0.1).run()


def test_many_machines_in_many_threads():
    vms = [machine(COUNT.format(n=300)) for _ in range(6)]
    got = [[] for _ in vms]
    for vm, out in zip(vms, got):
        vm.set_sink("OUTPUT", out.append)
    threads = [start(vm) for vm in vms]
    for thread, errors in threads:
        thread.join(LONG)
        assert not errors
    assert all(out == [str(i) for i in range(300)] for out in got)


def test_one_machine_from_many_threads():
    vm = machine("LOADI r1, 0\nHALT")
    vm.run()

    def add():
        for _ in range(200):
            vm.set("r2", vm.get("r1"))
            vm.fork()
    threads = [threading.Thread(target=add) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(LONG)
    assert vm.get("r2") == 0


def test_asyncio():
    async def main():
        vm = machine(COUNT.format(n=40))
        got = [x async for x in vm.output_async(capacity=4)]
        assert got == [str(i) for i in range(40)]
        other = machine(COUNT.format(n=10))
        other.set_sink("OUTPUT", lambda _: None)
        assert (await other.run_async()).finished
        endless = machine(FOREVER)
        task = asyncio.create_task(endless.run_async())
        while not endless.get("r1"):
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert endless.finished and isinstance(endless.error, Interrupted)
    asyncio.run(asyncio.wait_for(main(), LONG))


def test_arrays_are_copied_in():
    vm = machine("HALT")
    array = np.ones(3, np.float32)
    vm.set("r1", array)
    array[:] = 7
    assert vm.get("r1").numpy().tolist() == [1, 1, 1]


def test_steps():
    vm = machine("LOADI r1, 1\nLOADI r2, 2\nHALT")
    assert [vm.step(), vm.get("r1"), vm.get("r2"), vm.step(5), vm.get("r2"), vm.finished] == [1, 1, None, 2, 2, True]
    assert vm.stats["instructions"] == 3


def test_recorded_runs_replay_without_the_outside():
    source = "SENSE r1, TIME\nSENSE r2, USER_INPUT\nCYCLES_COUNT r3\nSENSE r4, r5, USER_INPUT\nHALT"
    vm = machine(source, record=True)
    vm.push_input("hello")
    vm.run()
    again = machine(source, replay=vm.recorder.log)
    again.run()
    assert {k: getattr(v, "tobytes", lambda: v)() for k, v in vm.registers.items()} == \
        {k: getattr(v, "tobytes", lambda: v)() for k, v in again.registers.items()}
    with pytest.raises(Divergence, match="log belongs to another program"):
        machine("NOP\n" + source, replay=vm.recorder.log).run()
    with pytest.raises(Divergence, match="clock, but the log has nothing more"):
        machine("CYCLES_COUNT r3\nHALT", replay=[]).run()


def test_backends_that_are_not_there():
    with pytest.raises(UnsupportedError, match="no backend 'abacus'; available: .*interpreter"):
        machine("HALT", backend="abacus")


def test_profiles_count_instructions():
    vm = machine("LOADI r1, 0\nloop: ADDI r1, r1, 1\nCOMPARE r1, 50\nIF_LESS loop\nHALT", profile=True)
    vm.run()
    rows = {name: n for name, _, n, _ in vm.profile()}
    assert rows == {"LOADI": 1, "ADDI": 50, "COMPAREI": 50, "IF_LESS": 50, "HALT": 1}
    assert vm.retired == 152


def test_an_empty_program_has_ended():
    assert VM([], backend="interpreter").run().finished


def test_a_compiled_region_is_asked_where_it_begins():
    """A stand-in for compiled code: adds ten at the loop's head, every other time."""
    class Regions:
        entries = (32,)
        calls = 0

        def enter(self, ctx, pc):
            self.calls += 1
            assert pc == 32 and ctx.budget > 0
            if self.calls % 2:
                return None
            ctx.R[1] += 10
            ctx.retired += 30
            return pc
    regions = Regions()
    program = [ins("LOADI", rd="R1", imm=0), ins("ADDI", rd="R1", a="R1", imm=1), ins("COMPAREI", a="R1", imm=30),
               ins("IF_LESS", target=-64), ins("HALT")]
    vm = VM(program, regions=regions)
    vm.run()
    assert vm.get("R1") == 34 and regions.calls == 7       # 1, 11, 12, 22, 23, 33, 34
    assert vm.retired == 1 + 3 * 30 + 4 * 3 + 1


@pytest.mark.parametrize("limits", [{"timeout": t} for t in (0, -1.0, float("nan"), float("inf"), 1e300, "1", True)] +
                         [{"max_steps": n} for n in (-1, 1.5, float("inf"), True)])
def test_limits_that_are_none(limits):
    with pytest.raises(UserError, match=next(iter(limits))):
        machine("HALT\n", **limits)


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_files_get_their_names_together(tmp_path, monkeypatch, error):
    """A file that cannot be completed leaves none of the run's files, and what stood there before; so does Ctrl-C."""
    from m3jit.vm.streams import FileSink
    (tmp_path / "a.txt").write_text("old")
    source = 'LOADS r1, "x"\nSTREAM r1, FILE NAME="a.txt"\nSTREAM r1, FILE NAME="b.txt"\nHALT\n'

    def prepare(sink: FileSink) -> None:
        if sink.name.endswith("b.txt"):
            raise error
    monkeypatch.setattr(FileSink, "prepare", prepare)
    with pytest.raises(error):
        run(source, files=tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"] and (tmp_path / "a.txt").read_text() == "old"


@pytest.mark.parametrize("backend", ["interpreter", "cpu"])
def test_tensors_that_no_machine_holds(backend):
    for shape in ("2147483647, 2147483647, 2147483647, 2147483647, 2147483647", "2147483647, 2147483647"):
        vm = machine(f"LOADI r2, 7\nTENSOR r1, SHAPE=[{shape}]\nHALT\n", backend=backend)
        with pytest.raises(Trap, match="out of memory") as caught:
            vm.run()
        assert caught.value.pc == 8 or caught.value.instruction.startswith("TENSOR")
        assert vm.get("R2") == 7


def test_text_from_the_host_that_is_no_unicode():
    vm = machine("SENSE r1, USER_INPUT\nHALT\n")
    vm.push_input("a\ud800")
    with pytest.raises(Trap, match="surrogate"):
        vm.run()
    with pytest.raises(UserError, match="surrogate"):
        machine("HALT\n").set("R1", "\ud800")


def test_misuse_from_the_host_is_said_plainly():
    from m3jit.frontend import assemble
    with pytest.raises(UserError, match="m3jit.assemble makes one"):
        VM("    HALT")
    with pytest.raises(UserError, match="threads: 1 to 256, got 300"):
        VM(assemble("    HALT\n"), threads=300)
    with pytest.raises(UserError, match="abort takes a snapshot"):
        VM(assemble("    HALT\n")).abort(None)


def test_whoever_is_interrupted_while_it_asks_for_the_machine_no_longer_wants_it(monkeypatch):
    """Else a run would pause for it again and again."""
    vm = machine(FOREVER)

    class Held:
        def acquire(self, blocking: bool) -> bool:
            if blocking:
                assert vm._wanting
                raise KeyboardInterrupt
            return False
    with monkeypatch.context() as patched:
        patched.setattr(vm._gate, "_locks", (Held(),))
        patched.setattr(vm._gate, "_acquire", Held().acquire)
        with pytest.raises(KeyboardInterrupt):
            vm.get("r1")
    assert not vm._wanting


def test_what_a_host_says_behind_a_replay_that_keeps_no_log():
    said = Item("TEXT", b"x", 0)
    recorder = Recorder(replay=[], goes_on=True)
    vm = machine("LOADI r1, 1\nSTREAM r1\nHALT", record=recorder)
    vm.set_sink("OUTPUT", lambda _: recorder.said(vm.main, "text", said))
    vm.run()
    recorder.said(vm.main, "text", said)
    assert vm.finished and recorder.log is None
