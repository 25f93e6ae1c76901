"""Faults that are forced while an operation is executed: a failed allocation, or Ctrl-C at a bytecode."""
from __future__ import annotations

import dis
import functools
import inspect
import random
import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Callable

import m3jit
from m3jit.errors import InternalError, Trap
from m3jit.isa import kv_pages, spare

try:
    import _testcapi                                   # CPython's own fault-injecting allocator
except ImportError:                                    # builds without test modules have only the blocks of states
    _testcapi = None

HOME = Path(m3jit.__file__).parent
WATCHED = {str(p) for p in (HOME / "vm").glob("*.py")} | {str(p) for p in (HOME / "isa").glob("kv*.py")} | \
    {str(HOME / "isa" / name) for name in ("cells.py", "spare.py")} | {"<m3jit handler>"}
PREPARING = {"Interpreter._bind", "Interpreter._prepare", "Interpreter._onward", "Interpreter._machine",
             "Interpreter._control", "Interpreter._stub.<locals>.first", "Interpreter._stub_slow.<locals>.first",
             "operands", "Operand.__init__", "_register", "classes_of", "value_handler", "arguments", "_getter",
             "_moved_register", "_compile"}

DEEP = 6                           # frames between a finaliser and what it calls, at most
# What an allocation that failed inside of NumPy or of a lock is reported as.
_SAID = ("MemoryError", "without setting an exception", "without exception set", "can't allocate lock",
         "NULL object passed to Py_BuildValue")


class Allocation:
    """The n-th allocation of CPython's allocators fails, once.

    CPython itself then loses a reference here and there (list.extend of an empty list does): what a snapshot or a page
    is held by cannot be audited afterwards."""
    kind = "allocation"

    def __init__(self, n: int):
        self.n, self.said = n, f"allocation {n} fails"

    def run(self, action: Callable[[], Any]) -> BaseException | None:
        failed: BaseException | None = None
        _testcapi.set_nomemory(self.n, self.n + 1)
        try:
            action()
        except BaseException as e:
            failed = bare(e)
        finally:
            _testcapi.remove_mem_hooks()
        return failed

    def hit(self, outcome: BaseException | None) -> bool:
        return _is_memory(outcome)


class Block:
    """The n-th block of memory for pages and cells is refused."""
    kind = "block"

    def __init__(self, n: int):
        self.left, self.said, self.reached = n, f"block {n} is refused", False

    def run(self, action: Callable[[], Any]) -> BaseException | None:
        real = spare.take

        def take(nbytes: int) -> Any:
            self.left -= 1
            if self.left == 0:
                self.reached = True
                raise MemoryError("forced")
            return real(nbytes)
        spare.take = take
        try:
            action()
        except BaseException as e:
            return bare(e)
        finally:
            spare.take = real
        return None

    def hit(self, outcome: BaseException | None) -> bool:
        return _is_memory(outcome)


def bare(e: BaseException) -> BaseException:
    """The exception without the frames it came through: those hold what the test wants gone."""
    e.__traceback__ = e.__context__ = e.__cause__ = None
    return e


def _is_memory(outcome: BaseException | None) -> bool:
    return isinstance(outcome, MemoryError) or isinstance(outcome, Trap) and "out of memory" in str(outcome) or \
        isinstance(outcome, InternalError) and any(said in str(outcome) for said in _SAID)


class Interrupt:
    """KeyboardInterrupt at the n-th bytecode of the machine's and the states' code."""
    kind = "interrupt"

    def __init__(self, n: int, preparing: bool = True, watched: set[str] | None = None):
        """preparing False: bytecodes that only make an instruction's handler do not count.  watched: files whose code
        counts (None: `WATCHED`)."""
        self.left, self.n, self.preparing, self.reached, self.where = n, n, preparing, False, ""
        self.watched = WATCHED if watched is None else watched

    @property
    def said(self) -> str:
        return f"interrupt at bytecode {self.n}{self.where and f' ({self.where})'}"

    def run(self, action: Callable[[], Any]) -> BaseException | None:
        def trace(frame: FrameType, event: str, argument: Any) -> Any:
            if frame.f_code.co_filename not in self.watched or _finalising(frame) or \
                    not self.preparing and _prepares(frame.f_code.co_qualname):
                return None
            frame.f_trace_opcodes = True
            if event == "opcode":
                self.left -= 1
                if self.left <= 0 and not self.reached and frame.f_lasti not in _deaf(frame.f_code):
                    self.reached, self.where = True, f"{frame.f_code.co_qualname}:{frame.f_lineno}"
                    raise KeyboardInterrupt
            return trace
        return self.traced(trace, action)

    @staticmethod
    def traced(trace: Any, action: Callable[[], Any]) -> BaseException | None:
        """What `action` raises while it is traced."""
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            action()
        except BaseException as e:
            return bare(e)
        finally:
            sys.settrace(before)
            if kv_pages.lock.locked():                 # between two bytecodes where no signal handler runs
                kv_pages.lock.release()
        return None

    def hit(self, outcome: BaseException | None) -> bool:
        return self.reached


CALLS = {"CALL", "CALL_FUNCTION_EX", "CALL_KW", "CALL_INTRINSIC_1"}


class Signal(Interrupt):
    """KeyboardInterrupt where CPython can raise it for a signal, for the n-th time: as a function begins, behind a call
    of one that is written in C, and before a jump back."""

    def __init__(self, n: int, generators: bool = False):
        """generators: in those too; one that is closed raises to nobody."""
        super().__init__(n)
        self.ignored = 0 if generators else inspect.CO_GENERATOR

    def run(self, action: Callable[[], Any]) -> BaseException | None:
        called: dict[FrameType, str] = {}              # the instruction before, of frames

        def trace(frame: FrameType, event: str, argument: Any) -> Any:
            if event == "call":
                called.pop(frame.f_back, None)         # type: ignore  # its caller's call is of a function in Python
            if frame.f_code.co_filename not in self.watched or _finalising(frame) or \
                    frame.f_code.co_flags & self.ignored:
                return None
            frame.f_trace_opcodes = True
            name = _named(frame.f_code).get(frame.f_lasti, "") if event == "opcode" else ""
            if event == "call" or name.startswith("JUMP_BACKWARD") or name and called.get(frame) in CALLS and \
                    name not in CALLS:
                self.hear(frame)
            if event == "opcode":
                called[frame] = name
            elif event == "return":
                called.pop(frame, None)
            return trace
        return self.traced(trace, action)

    def hear(self, frame: FrameType) -> None:
        self.left -= 1
        if self.left <= 0 and not self.reached and frame.f_lasti not in _deaf(frame.f_code):
            self.reached, self.where = True, f"{frame.f_code.co_qualname}:{frame.f_lineno}"
            raise KeyboardInterrupt


@functools.cache
def _named(code: CodeType) -> dict[int, str]:
    return {step.offset: step.opname for step in dis.get_instructions(code)}


@functools.cache
def _deaf(code: CodeType) -> frozenset[int]:
    """Offsets of bytecodes before which CPython hears no signal, and where a lock would stay taken for ever: between
    entering a `with` block and its first line, and between its last line and the call that leaves it.  And where the
    thread would go on handling, and keeping, an exception that is done with: between the end of an `except` block and
    the bytecode that forgets it."""
    found: set[int] = set()
    steps = list(dis.get_instructions(code))
    for i, step in enumerate(steps):
        if step.opname == "POP_EXCEPT" or step.positions is not None and step.positions.lineno is None:
            found.add(step.offset)                     # without a line: the compiler's own, around such blocks
        if step.opname == "BEFORE_WITH":
            found.add(steps[i + 1].offset)
        if step.opname == "WITH_EXCEPT_START":
            found.update((step.offset, steps[i - 1].offset))
        leaving = steps[i:i + 5]
        if [(s.opname, s.argval) for s in leaving[:3]] == [("LOAD_CONST", None)] * 3 and \
                [s.argval for s in leaving if s.opname in ("PRECALL", "CALL")][:1] == [2]:
            found.update(s.offset for s in leaving)
            if i and steps[i - 1].opname in ("SWAP", "NOP"):       # of a return, of an `if` that ends the block
                found.add(steps[i - 1].offset)
    return frozenset(found)


def _prepares(name: str) -> bool:
    return name in PREPARING or name.endswith("comp>") and name.removesuffix(".<locals>.<listcomp>") in PREPARING


def _finalising(frame: FrameType | None) -> bool:
    """Is this a finaliser, or called by one?  What those raise goes nowhere."""
    for _ in range(DEEP):
        if frame is None:
            break
        if frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False


def draw(rng: random.Random, allocations: bool) -> Any:
    """A random fault: of CPython's allocations, or else of blocks and interrupts."""
    if allocations and _testcapi is not None:
        return Allocation(int(rng.expovariate(1 / 60)))
    if rng.random() < 0.7:
        return Interrupt(1 + int(rng.expovariate(1 / 200)), rng.random() < 0.1)
    return Block(rng.randint(1, 4))
