"""Stops, going to them both ways, versions and their differences, what is shown; the commands of the terminal."""
from __future__ import annotations

import numpy as np
import pytest

from m3jit.cli.debug_commands import Commands
from m3jit.errors import UserError
from m3jit.frontend.assembler import assemble
from m3jit.isa.types import Tensor
from m3jit.timetravel import engine as engines
from m3jit.timetravel import views
from m3jit.timetravel.debugger import Debugger
from m3jit.timetravel.differences import arrays
from m3jit.timetravel.history import History, Watcher
from m3jit.vm.vm import VM

SOURCE = """
.data
v: .f32 [[1, 2, 3], [4, 5, 6]]
.text
    LOADI rV, @v
    LOADI rA, 0x3000000000000000
    LOADI rN, 0
next:
    ADD rV, rV, rV
    MEMSET rA, PATTERN=7, LEN=3, OFFSET=rN
    FORK rBack
    ADD rN, rN, 1
    STREAM rN, LINE
    CALL twice, [rN]
    COMPARE rN, 20
    IF_LESS next
    ABORT rBack
    HALT
.func twice(rX)
    ADD rX, rX, rX
    RET
"""

LONG = """
    LOADI rN, 0
next:
    ADD rN, rN, 1
    ADD rM, rN, rN
    ADD rM, rM, rN
    STREAM rN, LINE
    COMPARE rN, 60
    IF_LESS next
    HALT
"""


def make(source: str = SOURCE, backend: str = "interpreter") -> Debugger:
    watcher = Watcher(History(), live=True)
    vm = VM(assemble(source, "prog.m3asm"), backend, record=watcher)
    vm.set_sink("OUTPUT", lambda item: None)
    return Debugger(vm, watcher)


def session(source: str = SOURCE, backend: str = "interpreter"):
    """A function that executes a command and gives its lines as one text."""
    commands = Commands(make(source, backend))

    def run(line: str) -> str:
        return "\n".join(commands.run(line))
    run.commands = commands                            # type: ignore[attr-defined]
    return run


@pytest.fixture(autouse=True)
def _close_checkpoints(monkeypatch):
    monkeypatch.setattr(engines, "FIRST_DISTANCE", 11)


@pytest.mark.parametrize("backend", ["interpreter", "cpu"])
def test_breakpoints_both_ways(backend):
    run = session(backend=backend)
    assert run("break twice") == "breakpoint 1: twice (0x01a0)"
    places = [run("c") for _ in range(4)]
    assert all("breakpoint 1" in p and "<twice>" in p for p in places)
    back = [run("rc") for _ in range(3)]
    assert [b.splitlines()[-1] for b in back] == [p.splitlines()[-1] for p in reversed(places[:3])]
    assert run("rc").startswith("beginning\n@0 ")
    run("delete 1")
    assert "@88 the end: the program has ended" in run("c") or "the end" in run("where")


@pytest.mark.parametrize("text, pcs", [("next", {0x60}), ("next+1", {0x80}), ("9", {0x60}), ("prog.m3asm:12", {0xC0}),
                                       ("0x80", {0x80}), ("stream", {0xE0}), ("ADD", {0x60, 0xC0, 0x1A0}),
                                       ("8", {0x60})])
def test_places(text, pcs):
    assert make().add_break(text)[1].pcs == pcs


@pytest.mark.parametrize("text, message", [
    ("nex", "no label, line, pc or instruction of this program; did you mean next"),
    ("0x81", "not the start of an instruct"),
    ("0xzz", "is no number"), ("999", "the last line of prog.m3asm with code is"),
    ("other.m3asm:3", "no code comes from"), ("next+99", "ends before"), ("MATMUL", "no label, line")])
def test_wrong_places(text, message):
    with pytest.raises(UserError, match=message):
        make().add_break(text)


def test_watchpoints_on_registers_tensors_and_memory():
    run = session()
    run("s 3")
    assert run("watch rN") == "watchpoint 1: rN in context 1"
    assert "rN has changed: 0 -> 1" in run("c") and "STREAM" in run("where")
    run("delete 1")
    run("watch rV")
    assert "rV has changed" in run("c")
    assert run("where").startswith("@14 ")             # behind the second ADD, not in the function
    run("delete 2")
    run("watch 0x3000000000000000 4")
    assert "has changed" in run("c") and "FORK" in run("where")
    assert "has changed" in run("rc") and run("where").startswith("@5 ")
    with pytest.raises(UserError, match="1 to 1048576 can be watched"):
        run("watch 0x3000000000000000 99999999")
    with pytest.raises(UserError, match="cannot be watched"):
        run("watch 0x5000000000000000 8")
    with pytest.raises(UserError, match="rOther"):
        run("watch rOther")


def test_versions_and_their_differences():
    run = session()
    run("s 3")
    run("mark begin")
    run("go 18")
    said = run("diff begin")
    assert said.startswith("begin -> now:\n")
    assert "R0 rV: f32[2, 3] 6 of 6 differ, by at most 18; first at [0, 0]: 1 -> 4" in said
    assert "R2 rN: 0 -> 3" in said and "memory ACTIVATION 0x3000000000000000 to 0x3000000000000004 (5 bytes)" in said
    assert "<snapshot" in said
    assert run("diff @3 begin") == "@3 -> begin: equal" and run("where").startswith("@18 ")
    assert "R2 rN: 0 -> 3" in run("diff #1")
    for wrong in ("diff nothing", "diff #99", "mark 1x", "diff", "diff @x"):
        with pytest.raises(UserError):
            run(wrong)


def test_what_is_shown():
    run = session()
    run("break twice")
    run("c")
    run("c")
    assert "#1 returns to 0x0120 prog.m3asm:15 <next+0xc0>, 4 registers" in run("frames")
    assert ">" in run("list") and "ADD rX, rX, rX" in run("list")
    run("go 18")
    assert "rN     3" in run("regs") and "flags" in run("regs") and "R0" in run("regs")
    assert run("print rN") == "rN = 3"
    assert "@" in run("picture rV") and run("picture rV").startswith("|")
    assert run("snapshots").splitlines()[1].startswith("  * #2 context 1, resumes at 0x00c0 prog.m3asm:12")
    assert run("memory 0x3000000000000000 16").startswith("3000000000000000  07 07 07")
    assert "> 1: GREEN ready" in run("contexts")
    assert run("output") == "'1\\n' to OUTPUT\n'3\\n' to OUTPUT"
    assert "go" in run("help") and run("stops") == "breakpoint 1: twice"
    with pytest.raises(UserError, match="no command 'steep'; did you mean step"):
        run("steep")
    with pytest.raises(UserError, match="no number"):
        run("s x")
    with pytest.raises(UserError, match="there are pictures of tensors only"):
        run("picture rN")
    with pytest.raises(UserError, match="there is no context 7"):
        run("context 7")


def test_tokens_are_outputs_and_labels_are_layers():
    run = session()
    assert "wrote '1\\n' to OUTPUT" in run("t") and "CALL" in run("where")
    first = run("where")
    run("t 2")
    assert run("bt 2") == first
    assert "no output before" in run("bt")
    assert "<next>" in run("l") and "<twice>" in run("l")
    run("t 99")
    assert "no more outputs" in run("t") and "the end" in run("where")


@pytest.mark.parametrize("backend", ["interpreter", "cpu"])
@pytest.mark.parametrize("back", ["bt", "bl"])
@pytest.mark.parametrize("count", [2, 7, 19])
def test_many_places_back_are_found_in_one_search(count, back, backend, monkeypatch):
    """The same place as one by one, for about twice the instructions that lie between: once to count, once to go."""
    one, many = session(LONG, backend), session(LONG, backend)
    for run in (one, many):
        run("t 40")
    here = many.commands.engine.time
    ran, run_from = [], many.commands.engine._run

    def counted(until=None):
        before = many.commands.engine.time
        try:
            return run_from(until)
        finally:
            ran.append(many.commands.engine.time - before)
    monkeypatch.setattr(many.commands.engine, "_run", counted)
    for _ in range(count):
        one(back)
    assert many(f"{back} {count}").splitlines()[-1] == one("where") and "@" in one("where")
    between = here - many.commands.engine.time
    assert between > 0 and sum(ran) <= 4 * between + 4 * many.commands.engine.distance
    assert many("t").splitlines()[-1] == one("t").splitlines()[-1]


def test_more_places_back_than_there_are():
    run = session(LONG)
    run("t 30")
    assert run("bt 31") == "no output before\n" + run("go 0")
    run("t 30")
    assert "no output before" in run("bt 30")          # behind the first output it is 29 back
    run("t 30")
    assert run("bt 29").splitlines()[-1].startswith("@5 ")


def test_going_from_output_to_output_leaves_checkpoints():
    """A way back from there need not begin at the beginning."""
    run = session(LONG)
    run("t 40")
    assert len(run.commands.engine._kept) > 5


@pytest.mark.parametrize("source, message", [("GETELEM r1, r0\nHALT", "never written"), ("HALT", "has ended"),
                                             ("ASSERT r0, 3\nHALT", "never written")])
def test_a_program_that_ends_at_once(source, message):
    run = session(source)
    assert message in run("c")
    assert run("back").startswith("@0 context 1 0x0000")
    assert message in run("c")


def test_pictures():
    t = Tensor.of(np.array([[0, 0], [0, 8]], np.float32))
    assert views.picture(t)[:2] == ["|  |", "| @|"]
    assert "|!|" in views.picture(Tensor.of(np.array([np.nan], np.float32)))
    assert len(views.picture(Tensor.of(np.ones((500, 500), np.float32)))) == views.HEIGHT + 1
    assert views.picture(Tensor.of(np.zeros((0, 3), np.float32))) == ["(no picture of a packed or empty tensor)"]
    assert "2 NaN" in views.statistics(np.array([1, np.nan, np.nan, np.inf])) and "1 infinite" in \
        views.statistics(np.array([1, np.inf]))


def test_arrays():
    assert arrays(np.array([1.0, 2]), np.array([1.0, 2.5])) == "1 of 2 differ, by at most 0.5; first at [1]: 2 -> 2.5"
    assert "-0" in arrays(np.array([0.0]), np.array([-0.0])) and arrays(np.array([np.nan]), np.array([np.nan])) == \
        "the same values, other bits"
