"""Memory that is not there: exit code 4 and whose limit it was, wherever it is missed first; never a bug of m3jit."""
from __future__ import annotations

import errno
import re
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from m3jit import cli
from m3jit.cli import report, size_text
from m3jit.cli.chat import take_lines
from m3jit.cli.dialogue import Dialogue
from m3jit.cli.machine import limit_memory
from m3jit.errors import InternalError, NoRoom, StreamError, Trap, UserError, no_memory
from m3jit.vm import regions, stopping
from m3jit.vm.extensions import Extension
from m3jit.vm.vm import VM
from tests.cli.command import call, source
from tests.vm.programs import ins
from tests.vm.test_system_ops import escape, with_extensions

TENSORS = """
    LOADS r2, "seen\\n"
    STREAM r2
    LOADI rI, 0
    TENSOR r1, SHAPE=[4] FILL=1
loop:
    ADD r1, r1, r1
    ADD rI, rI, 1
    COMPARE rI, 100
    IF_LESS loop
    HALT
"""


def not_loaded() -> None:
    """As llvmlite fails to load its library where there is no room to map it."""
    try:
        raise OSError("libllvmlite.so: failed to map segment from shared object")
    except OSError:
        raise OSError("Could not find/load shared object file 'libllvmlite.so'. This could mean that it literally "
                      "cannot be found")


def raised(action: Any) -> BaseException:
    with pytest.raises(BaseException) as caught:
        action()
    return caught.value


def caused(error: Exception, cause: BaseException | None) -> Exception:
    error.__cause__ = cause
    return error


MISSING = {"object": MemoryError("Unable to allocate 3 GiB"), "thread": RuntimeError("can't start new thread"),
           "system": OSError(errno.ENOMEM, "Cannot allocate memory"), "library": raised(not_loaded),
           "frame": SystemError("<function run at 0x7f> returned NULL without setting an exception"),
           "lock": RuntimeError("can't allocate lock"),
           "module": ImportError("a.so: failed to map segment from shared object")}


@pytest.mark.parametrize("error", MISSING.values(), ids=MISSING)
def test_missing_memory_is_no_bug(monkeypatch, capsys, error):
    wrapped = caused(InternalError("x.m3asm:3: trap: ADD: it failed"), error)
    named = ": this needs more than --memory-limit 1.5G; give a larger one, or leave it out\n"
    for limit, advice in ((None, "; close other programs, or work on less at once\n"), (3 << 29, named)):
        monkeypatch.setattr(cli, "memory_limit", limit)
        for found in (error, wrapped):
            assert no_memory(found) is not None and report(found) == 4
            said = capsys.readouterr().err
            assert said.startswith("error: out of memory") and said.endswith(advice) and "bug" not in said, said
            assert "literally cannot be found" not in said
        trap = caused(Trap("out of memory", 8, ("x.m3asm", 3), "ADD R1, R1, R1"), MemoryError())
        assert report(trap) == 4
        assert capsys.readouterr().err == "x.m3asm:3: trap: ADD R1, R1, R1: out of memory (pc 0x0008)" + \
            advice.replace(": ", "; ", 1)


@pytest.mark.parametrize("error", [
    RuntimeError("can't find it"), SystemError("bad call flags"),
    OSError("Could not find/load shared object file 'libllvmlite.so'"),
    ImportError("no x"), caused(InternalError("it failed"), ValueError("memory"))])
def test_what_is_not_about_memory(capsys, error):
    assert no_memory(error) is None and report(error) in (1, 70)
    assert "out of memory" not in capsys.readouterr().err


def test_what_was_put_right_is_not_what_went_wrong():
    def behind() -> None:
        try:
            raise MemoryError
        except MemoryError:
            raise UserError("the template is wrong") from None
    assert no_memory(raised(behind)) is None
    first, second = ValueError(), ValueError()
    first.__cause__, second.__cause__ = second, first
    assert no_memory(first) is None


def test_no_thread_to_hear_signals(monkeypatch, capfd, tmp_path):
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")
    monkeypatch.setattr(stopping, "_listener", None)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    got = call(capfd, "run", source(tmp_path, TENSORS))
    assert got.code == 4 and got.err.startswith("error: out of memory, or of threads: can't start new thread; close")


@pytest.mark.parametrize("failing", [not_loaded, lambda: raised_by(RuntimeError("can't start new thread")),
                                     lambda: raised_by(MemoryError("Unable to allocate 3 GiB"))])
def test_an_instruction_that_finds_none(monkeypatch, capfd, tmp_path, failing):
    monkeypatch.setattr(regions, "engine", lambda backend: failing())
    got = call(capfd, "run", source(tmp_path, TENSORS))
    assert got.code == 4 and got.out == "seen\n"
    assert re.match(r".*prog.m3asm:\d+: trap: [A-Z]+ .*: out of memory: (lib|can't|Unable)", got.err)
    assert got.err.endswith("; close other programs, or work on less at once\n") and "literally" not in got.err


def raised_by(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize("program", [[ins("STREAM", src="R1"), ins("HALT")], [escape(7), ins("HALT")]])
def test_an_extension_and_a_host_that_find_none(program):
    """What they raise is not a fault of theirs; what took the memory is not held by the trap."""
    def full(item: Any = None, immediate: bytes = b"") -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")
    extensions = with_extensions(Extension("fails", 7, (1, 0), full))
    vm = VM(program, backend="interpreter", extensions=extensions)
    vm.set("R1", 5)
    vm.set_sink("OUTPUT", full)
    with pytest.raises(Trap, match="out of memory: .*Cannot allocate memory") as caught:
        vm.run()
    assert isinstance(caught.value.__cause__, MemoryError) and caught.value.__cause__.__traceback__ is None


@pytest.mark.parametrize("backend", ["interpreter", "cpu"])
def test_a_limit_of_the_machine(capfd, tmp_path, backend):
    got = call(capfd, "run", source(tmp_path, "TENSOR r1, SHAPE=[200000, 200000000]\nHALT\n"), "--backend", backend)
    assert got.code == 4 and "trap: TENSOR" in got.err and "the limit is" in got.err and "--memory-limit" not in got.err
    assert report(caused(Trap("out of memory"), NoRoom("out of memory"))) == 4


def test_a_message_of_a_chat_that_finds_none(monkeypatch, capsys):
    def take(line: str) -> bool:
        raise caused(Trap("out of memory"), MemoryError())
    monkeypatch.setattr(cli, "memory_limit", 3 << 29)
    talk = SimpleNamespace(take=take, say=take)
    for take_one, where in ((lambda: take_lines(talk, ["Hello"]) == 4, "line 1: "),
                            (lambda: Dialogue(talk, True, False).take("Hello"), "")):
        assert take_one()
        assert capsys.readouterr().err == (f"error: {where}trap: out of memory; this needs more than --memory-limit "
                                           "1.5G; give a larger one, or leave it out\n")


# -- whose limit it was ---------------------------------------------------------------------------------------------

@pytest.mark.parametrize("limit, before, named", [
    (1 << 30, (-1, -1), True), (1 << 30, (1 << 31, 1 << 32), True), (1 << 30, (1 << 30, -1), True),
    (1 << 30, (1 << 29, -1), False), (1 << 30, (-1, 1 << 29), False), (None, (-1, -1), False)])
def test_a_limit_that_holds_is_named_and_no_other(monkeypatch, limit, before, named):
    resource = pytest.importorskip("resource", reason="this system has no limits of processes")
    monkeypatch.setattr(cli, "memory_limit", 7)
    before = tuple(resource.RLIM_INFINITY if b == -1 else b for b in before)
    asked = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: before)
    monkeypatch.setattr(resource, "setrlimit", lambda which, bounds: asked.append(bounds))
    limit_memory(limit)
    assert len(asked) == 1 and cli.memory_limit == (limit if named else None)


def test_a_limit_that_the_system_does_not_take_is_not_named(monkeypatch, capsys):
    resource = pytest.importorskip("resource", reason="this system has no limits of processes")
    monkeypatch.setattr(cli, "memory_limit", None)

    def refuse(which: int, bounds: tuple[int, int]) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")
    monkeypatch.setattr(resource, "setrlimit", refuse)
    limit_memory(1 << 30)
    assert cli.memory_limit is None
    assert "--memory-limit: this system does not limit memory" in capsys.readouterr().err


@pytest.mark.parametrize("size, text", [
    (1 << 20, "1M"), (3 << 19, "1.5M"), (512 << 20, "512M"), (1 << 30, "1G"), (1 << 40, "1T"), (1 << 62, "4194304T"),
    (1025 << 20, "1025M"), (117 << 20, "117M"), (10 ** 9, "953.68M"), (5 << 38, "1.25T"), ((100 << 20) + 1, "100.01M")])
def test_sizes_as_the_option_takes_them(size, text):
    assert size_text(size) == text
