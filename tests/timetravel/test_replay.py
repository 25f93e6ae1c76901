"""Recorded runs repeat exactly, on other backends and threads; what differs is said, with its place."""
from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from m3jit.errors import Divergence, Trap, UserError
from m3jit.frontend.assembler import assemble
from m3jit.timetravel import log_file
from m3jit.timetravel.debugger import open_log
from m3jit.timetravel.log_file import LogError, LogReader
from m3jit.timetravel.record import Recording
from m3jit.timetravel.replay import Replay
from m3jit.vm.models import NO_MODELS
from m3jit.vm.recording import external
from m3jit.vm.vm import VM

CLOCKS = """
    LOADI rN, 0
again:
    CYCLES_COUNT rT
    SENSE rNow, TIME
    STREAM rT, LINE
    ADD rN, rN, 1
    COMPARE rN, 20
    IF_LESS again
    SENSE rText, rStatus, USER_INPUT
    STREAM rText
    STREAM rStatus, LINE
    HALT
"""
# Two contexts and a ring, one of them waiting for input while the other one works.
CONTEXTS = """
.data
table: .f32 [1, 2, 3, 4]
.text
    FORK rChild, reader, GREEN
    LOADI rN, 0
work:
    LOADI rX, @table
    MUL rX, rX, rX
    REDUCE rS, rX, SUM
    GETELEM rS, rS
    ADD rN, rN, 1
    COMPARE rN, 6000
    IF_LESS work
    STREAM rN, LINE
wait:
    SENSE rItem, rStatus, RING, NAME="words"
    STREAM rItem, LINE
    COMPARE rStatus, 1
    IF_NOT_EQUAL wait
    HALT
reader:
    SENSE rText, rStatus, USER_INPUT
    STREAM rText, LINE
    STREAM rText, RING, TENSOR, NAME="words"
    HALT
"""


def record(path: Path, source: str, inputs: tuple = (), every: int | None = 3, **options: Any) -> bytes:
    """The log of a run at `path`; what the run wrote."""
    wrote: list[str] = []
    recording = Recording(str(path), every)
    vm = VM(assemble(source, "prog.m3asm"), options.pop("backend", "interpreter"), record=recording.recorder, **options)
    vm.set_sink("OUTPUT", wrote.append)
    for item in inputs:
        vm.push_input(item)
    recording.run(vm)
    return "".join(map(str, wrote)).encode()


def replay(path: Path, **options: Any) -> tuple[Any, bytes]:
    """(report, what it wrote)."""
    wrote: list[str] = []
    again = Replay(str(path), NO_MODELS, options.pop("backend", "interpreter"), **options)
    again.vm.set_sink("OUTPUT", wrote.append)
    return again.run(), "".join(map(str, wrote)).encode()


@pytest.mark.parametrize("backend, threads", [("interpreter", None), ("cpu", 1), ("cpu", 2), ("auto", None)])
def test_clocks_and_input_are_repeated(tmp_path, backend, threads):
    wrote = record(tmp_path / "log", CLOCKS, ("good day",))
    report, again = replay(tmp_path / "log", backend=backend, threads=threads)
    assert again == wrote and b"good day" in again
    assert report.outputs == 22 + 7 + 1 and report.error is None and not report.torn


@pytest.mark.parametrize("recorded", ["interpreter", "cpu"])
def test_contexts_take_their_turns_where_they_did(tmp_path, recorded):
    """The input comes at an arbitrary moment; the order of everything is that of the recorded run."""
    import threading
    wrote: list[str] = []
    recording = Recording(str(tmp_path / "log"), 1)
    vm = VM(assemble(CONTEXTS, "prog.m3asm"), recorded, record=recording.recorder, wait_input=True)
    begun = threading.Event()

    def later():
        begun.wait(60)
        late = time.monotonic() + 60               # of a run that died
        while not any(map(external, list(vm.scheduler.contexts.values()))) and time.monotonic() < late:
            pass                                   # until the child waits; its parent works
        vm.push_input("now")
    vm.set_sink("OUTPUT", wrote.append)
    thread = threading.Thread(target=later)
    thread.start()
    begun.set()
    recording.run(vm)
    thread.join()
    events = [e.what for e in _events(tmp_path / "log")]
    assert "block" in events and "wake" in events
    for backend in ("interpreter", "cpu", "auto"):
        report, again = replay(tmp_path / "log", backend=backend)
        assert again == "".join(map(str, wrote)).encode() and report.instructions == vm.retired


def _events(path: Path) -> list:
    return list(LogReader(str(path)).events())


def test_rings_between_contexts_are_not_input(tmp_path):
    """More items than a ring holds: the replay has to run both sides."""
    source = """
    FORK rC, squares, GREEN
    LOADI rK, 0
print:
    SENSE rItem, rStatus, RING, NAME="squares"
    STREAM rItem, LINE
    ADD rK, rK, 1
    COMPARE rK, 100
    IF_LESS print
    KILL_CONTEXT rC
    HALT
squares:
    LOADI rN, 1
more:
    MUL rS, rN, rN
    STREAM rS, RING, TENSOR, NAME="squares"
    ADD rN, rN, 1
    JUMP more
"""
    wrote = record(tmp_path / "log", source, ring_capacity=4)
    assert "sense" not in {e.what for e in _events(tmp_path / "log")}
    for backend in ("interpreter", "auto"):
        assert replay(tmp_path / "log", backend=backend)[1] == wrote


def test_a_run_that_traps_is_repeated(tmp_path):
    source = "SENSE r1, FILE, NAME=\"gone.txt\"\nHALT"
    with pytest.raises(Trap, match="gone.txt"):
        record(tmp_path / "log", source, files=tmp_path)
    report, _ = replay(tmp_path / "log")
    assert isinstance(report.error, Trap) and "gone.txt" in str(report.error)


def test_files_are_read_from_the_log(tmp_path):
    (tmp_path / "data.txt").write_text("from a file")
    source = "SENSE r1, FILE, NAME=\"data.txt\"\nSTREAM r1\nSTREAM r1, FILE, NAME=\"copy.txt\"\nHALT"
    wrote = record(tmp_path / "log", source, files=tmp_path)
    (tmp_path / "data.txt").unlink()
    (tmp_path / "copy.txt").unlink()
    assert replay(tmp_path / "log")[1] == wrote == b"from a file"
    assert not (tmp_path / "copy.txt").exists()
    out = tmp_path / "out"
    out.mkdir()
    replay(tmp_path / "log", files=str(out))
    assert (out / "copy.txt").read_text() == "from a file"


@pytest.mark.parametrize("stop", ["max_steps", "stopped"])
def test_a_run_that_was_ended_from_outside_ends_at_the_same_instruction(tmp_path, stop):
    source = "LOADI r1, 0\nloop: ADDI r1, r1, 1\nSTREAM r1, LINE\nJUMP loop"
    recording = Recording(str(tmp_path / "log"), 5)
    vm = VM(assemble(source, "prog.m3asm"), "interpreter", None, 1000 if stop == "max_steps" else None,
            record=recording.recorder)
    seen: list[str] = []

    def take(item):
        seen.append(item)
        if stop == "stopped" and len(seen) == 50:
            vm.stop()
    vm.set_sink("OUTPUT", take)
    with pytest.raises(UserError):
        recording.run(vm)
    report, again = replay(tmp_path / "log")
    assert again == "".join(seen).encode() and report.instructions == vm.retired
    assert type(report.error).__name__ == ("LimitError" if stop == "max_steps" else "NoneType")


@pytest.mark.parametrize("backend", ["interpreter", "cpu"])
@pytest.mark.parametrize("noted", [False, True])
def test_ctrl_c_between_an_output_and_the_end_of_its_instruction(tmp_path, monkeypatch, backend, noted):
    """The item is out, and its event is in the log or is not; that the instruction was completed is not."""
    recording = Recording(str(tmp_path / "log"))
    vm = VM(assemble(CLOCKS, "prog.m3asm"), "interpreter", record=recording.recorder)
    wrote: list[Any] = []
    vm.set_sink("OUTPUT", wrote.append)
    leave = recording.recorder.leave

    def broken_off(ctx: Any, sink: str, item: Any, write: Any) -> None:
        if len(wrote) < 6:
            return leave(ctx, sink, item, write)
        if noted:
            leave(ctx, sink, item, write)
        else:
            write()
        raise KeyboardInterrupt
    monkeypatch.setattr(recording.recorder, "leave", broken_off)
    with pytest.raises(KeyboardInterrupt):
        recording.run(vm)
    report, again = replay(tmp_path / "log", backend=backend)
    assert len(wrote) == 7 and again == "".join(wrote[:7 if noted else 6]).encode()
    assert report.instructions == vm.retired + noted


def test_a_recording_that_was_killed_is_repeated_as_far_as_it_came(tmp_path):
    record(tmp_path / "log", CLOCKS, ("x",))
    data = (tmp_path / "log").read_bytes()
    whole = len(_events(tmp_path / "log"))
    reader = LogReader(str(tmp_path / "log"))
    list(reader.events())
    ends = reader.at                                   # where the last record begins
    (tmp_path / "torn").write_bytes(data[:ends + 3])
    report, again = replay(tmp_path / "torn")
    assert report.torn and report.events == whole and again.endswith(b"x1\n")
    (tmp_path / "short").write_bytes(data[:-(len(data) - ends) - 5])
    report, _ = replay(tmp_path / "short")
    assert report.torn and report.events < whole


def test_host_registers_and_seed_are_part_of_the_log(tmp_path):
    source = "STREAM rX, LINE\nSTREAM rT, LINE\nHALT"
    recording = Recording(str(tmp_path / "log"))
    vm = VM(assemble(source, "prog.m3asm"), "interpreter", record=recording.recorder, seed=5)
    vm.set("rX", 7)
    vm.set("rT", "text")
    vm.set_sink("OUTPUT", lambda item: None)
    recording.run(vm)
    assert replay(tmp_path / "log")[1] == b"7\ntext\n"


# -- what is wrong is said ---------------------------------------------------------------------------------------------

def test_the_first_difference_is_said_with_its_place(tmp_path):
    record(tmp_path / "log", "LOADI r1, 1\nSTREAM r1, LINE\nLOADI r1, 2\nSTREAM r1, LINE\nHALT")
    other = Replay(str(tmp_path / "log"), NO_MODELS, "interpreter")
    other.vm.set_sink("OUTPUT", lambda item: None)
    other.vm.image.program.__dict__                    # the copy in the log; make it write something else
    other.vm.step(3)
    other.vm.set("r1", 3)
    with pytest.raises(Divergence,
                       match=r"context 1 after 3 instructions \(prog.m3asm:4\) writes '3\\n' to OUTPUT; the log "
                             r"has '2\\n' to OUTPUT"):
        other.run()


def test_a_state_that_differs_is_noticed_before_an_output_does(tmp_path):
    record(tmp_path / "log", "LOADI r1, 1\nSTREAM r1, LINE\nLOADI r2, 2\nSTREAM r1, LINE\nHALT", every=1)
    other = Replay(str(tmp_path / "log"), NO_MODELS, "interpreter", echo=False)
    other.vm.set("r9", 3)
    with pytest.raises(Divergence, match="has the state .*; the log has .*: registers, states or memory differ"):
        other.run()


def test_another_program_is_refused(tmp_path):
    record(tmp_path / "log", CLOCKS, ("x",))
    with pytest.raises(UserError, match="is a log of another program than other.m3asm"):
        Replay(str(tmp_path / "log"), NO_MODELS, program=assemble("HALT", "other.m3asm"))
    Replay(str(tmp_path / "log"), NO_MODELS, program=assemble(CLOCKS, "prog.m3asm"))


def test_another_version_is_refused_unless_asked_for(tmp_path, monkeypatch):
    import m3jit
    monkeypatch.setattr(m3jit, "__version__", "0.0.9")
    record(tmp_path / "log", CLOCKS, ("x",))
    monkeypatch.undo()
    with pytest.raises(UserError, match="was recorded by m3jit 0.0.9, this is .*--any-version"):
        Replay(str(tmp_path / "log"), NO_MODELS)
    assert replay(tmp_path / "log", any_version=True)[0].error is None


def test_another_model_is_refused(tmp_path):
    class Named:
        name = "one"

        def info(self, key):
            return 5

    class Provider:
        model = Named()

        def load(self, reference, quant=""):
            return self.model
    source = '.model m "m.gguf"\n.text\nLOADI r1, @m\nMODEL_QUERY r2, r1, "vocab"\nSTREAM r2, LINE\nHALT'
    record(tmp_path / "log", source, models=Provider())
    Replay(str(tmp_path / "log"), Provider(), echo=False).run()
    other = Provider()
    other.model = type("Other", (Named,), {"name": "two"})()
    with pytest.raises(UserError, match="another model under the name 'm.gguf'.*--model"):
        Replay(str(tmp_path / "log"), other)


def test_a_log_that_belongs_to_other_inputs_diverges(tmp_path):
    """Events of one run, head of another."""
    record(tmp_path / "log", CLOCKS, ("x",))
    other = Replay(str(tmp_path / "log"), NO_MODELS, "interpreter", echo=False)
    other.vm.step(2)
    other.vm.set("rN", 19)
    with pytest.raises(Divergence, match="comes to sense, but event .* is clock of context 1"):
        other.run()


@pytest.mark.parametrize("seed", range(10))
def test_random_programs_are_repeated(tmp_path, seed):
    """Recorded while they wait for input that comes late, repeated without the outside."""
    repeat_random(tmp_path / "log", seed, ("interpreter", "cpu") if seed < 3 else ("interpreter",))


@pytest.mark.slow
def test_many_random_programs_are_repeated(tmp_path):
    """pytest -m slow tests/timetravel: some minutes."""
    for seed in range(100, 700):
        repeat_random(tmp_path / "log", seed, ("interpreter", "cpu"))


def repeat_random(path: Path, seed: int, backends: tuple[str, ...]) -> None:
    import threading

    from tests.timetravel.random_programs import random_program
    recording = Recording(str(path), 2)
    vm = VM(assemble(random_program(seed), "prog.m3asm"), "interpreter", None, 400, record=recording.recorder,
            wait_input=True)
    wrote: list[str] = []
    vm.set_sink("OUTPUT", wrote.append)
    done = threading.Event()

    def feed() -> None:
        for item in ("a", "b"):
            done.wait(0.002)
            vm.push_input(item)
        done.wait(0.002)
        vm.close_input()
    thread = threading.Thread(target=feed)
    thread.start()
    try:
        recording.run(vm)
    except UserError:
        pass
    done.set()
    thread.join()
    for backend in backends:
        report, again = replay(path, backend=backend)
        assert again == "".join(map(str, wrote)).encode() and report.instructions == vm.retired, (seed, backend)


@pytest.mark.parametrize("recorded", ["interpreter", "cpu"])
def test_interrupts_are_seen_where_they_were_seen(tmp_path, recorded):
    """Raised from another thread, at whatever moment."""
    import threading
    source = """
    .data
    x: .f32 [[1, 0.5], [0.25, 1]]
    .text
    LOADI rX, @x
    LOADI rSeen, 0
    LOADI rN, 0
again:
    MATVEC rX, rX, rX
    SOFTMAX rX, rX
    ADD rN, rN, 1
    IF_INTERRUPT seen
    COMPARE rSeen, 5
    IF_LESS again
    STREAM rX, LINE
    HALT
seen:
    ADD rSeen, rSeen, 1
    STREAM rN, LINE
    JUMP again
    """
    wrote: list[str] = []
    recording = Recording(str(tmp_path / "log"), 2)
    vm = VM(assemble(source, "prog.m3asm"), recorded, record=recording.recorder)
    vm.set_sink("OUTPUT", wrote.append)
    done = threading.Event()

    def poke() -> None:
        while not done.wait(0.001):
            vm.interrupt()
    thread = threading.Thread(target=poke)
    thread.start()
    recording.run(vm)
    done.set()
    thread.join()
    assert [e.what for e in _events(tmp_path / "log")].count("interrupt") == 5
    for backend in ("interpreter", "cpu"):
        report, again = replay(tmp_path / "log", backend=backend)
        assert again == "".join(map(str, wrote)).encode() and report.instructions == vm.retired


@pytest.fixture
def long_log(tmp_path, monkeypatch):
    """A log of many records, and the places where they begin."""
    monkeypatch.setattr(log_file, "CHUNK", 1)          # a record an event
    monkeypatch.setattr(log_file, "PIECE", 7)          # records are checked in several pieces
    record(tmp_path / "log", CLOCKS, every=1000)
    data = (tmp_path / "log").read_bytes()
    places, at = [], 12
    while at < len(data):
        places.append(at)
        at += 12 + int.from_bytes(data[at + 4:at + 8], "little")
    assert len(places) > 40
    return tmp_path / "log", places


@pytest.mark.parametrize("behind", [1, 2, 20])
def test_a_damaged_log_is_refused_before_anything_runs(long_log, behind):
    path, places = long_log
    number = len(places) - behind
    data = bytearray(path.read_bytes())
    data[places[number] + 12] ^= 4
    path.write_bytes(data)
    for opened in (Replay, open_log):
        with pytest.raises(LogError, match=rf"log: record {number} \(byte {places[number]}\) is damaged"):
            opened(str(path), NO_MODELS)
    path.write_bytes(data[:places[number] + 15])       # cut there, it may have been killed
    assert Replay(str(path), NO_MODELS).run().torn


@pytest.mark.parametrize("backend", ["interpreter", "cpu"])
def test_a_log_cut_between_a_digest_and_its_output_ends_there(tmp_path, monkeypatch, backend):
    monkeypatch.setattr(log_file, "CHUNK", 1)          # a record an event
    record(tmp_path / "log", CLOCKS, every=1)
    data = (tmp_path / "log").read_bytes()
    at = 12
    first = next(i for i, event in enumerate(_events(tmp_path / "log")) if event.what == "digest")
    for _ in range(1 + first + 1):
        at += 12 + int.from_bytes(data[at + 4:at + 8], "little")
    (tmp_path / "log").write_bytes(data[:at])
    assert _events(tmp_path / "log")[-1].what == "digest"
    report, wrote = replay(tmp_path / "log", backend=backend)
    assert report.torn and wrote == b"" and report.outputs == 1


def test_a_log_that_is_changed_while_it_is_repeated_is_no_trap_of_the_program(long_log):
    path, places = long_log
    data = bytearray(path.read_bytes())
    again = Replay(str(path), NO_MODELS)
    data[places[30] + 12] ^= 4
    path.write_bytes(data)
    at = again.reader._file.tell()
    again.reader._file = path.open("rb")               # without what was read ahead
    again.reader._file.seek(at)
    with pytest.raises(LogError, match=r"record 30 \(byte \d+\) is damaged; the file was changed") as found:
        again.run()
    assert found.value.exit_code == 1 and not isinstance(found.value, Trap)


def test_a_log_that_cannot_be_read_is_no_trap_of_the_program(long_log, monkeypatch):
    again = Replay(str(long_log[0]), NO_MODELS)

    class Broken:
        tell = again.reader._file.tell

        def read(self, count: int) -> bytes:
            raise OSError(5, "Input/output error")
    monkeypatch.setattr(again.reader, "_file", Broken())
    with pytest.raises(LogError, match=r"log: cannot be read at byte \d+: Input/output error"):
        again.run()
