"""Every error m3jit raises on purpose.  This module imports nothing of it.

`UserError`: the program, file, option or input is at fault; the message is one clear sentence or a list of them, and no
traceback helps.  `InternalError`: m3jit is at fault; the message asks for a report.
"""
from __future__ import annotations

import errno
import importlib

LONGEST_WORD, LONGEST_TEXT = 100, 1000                 # characters of what a message quotes


def brief(text: str, word: int = LONGEST_WORD, whole: int | None = LONGEST_TEXT) -> str:
    """A message with over-long words, and an over-long whole (None: of any length), shortened in the middle."""
    if len(text) > word:
        text = " ".join(_shortened(w, word) for w in text.split(" "))
    return text if whole is None else _shortened(text, whole)


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else text[:most * 2 // 3] + "..." + text[-(most // 4):]


def printable(text: str) -> str:
    """A message that terminals show as it is: control and format characters escaped, but for line feeds and tabs."""
    if text.isascii() and text.replace("\n", "").replace("\t", "").isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else
                   f"\\x{ord(c):02x}" if ord(c) < 256 else f"\\u{{{ord(c):x}}}" for c in text)


class M3Error(Exception):
    """Base of all of them."""
    exit_code = 1


class UserError(M3Error):
    """Something the user can put right.  Message: what happened, where, what was expected, what to do."""


class InternalError(M3Error):
    """A bug in m3jit."""
    exit_code = 70

    def __init__(self, message: str):
        super().__init__(f"internal error: {message}; this is a bug in m3jit, please report it with the program")


class OperandError(UserError):
    """An instruction got operands it does not accept (`xp.error`).  The machine turns it into a `Trap`.

    register: the operand's register or field, where the message is about one."""

    def __init__(self, message: str, register: str | None = None):
        super().__init__(message)
        self.message, self.register = message, register


class NoRoom(OperandError):
    """An instruction wants more memory than the machine's own limits give it; the message names the limit."""


class Trap(UserError):
    """A running program did what the instruction set forbids; its context ended before that instruction wrote anything.

    message: what is wrong; pc: byte offset of the instruction in TEXT; line: (file, line) or None; instruction: its
    text; register: the operand concerned, or None; context: number of the context; retired: instructions that the
    context had completed; code: the number an ASSERT carries.
    """
    exit_code = 3

    def __init__(self, message: str, pc: int = -1, line: tuple[str, int] | None = None, instruction: str = "",
                 register: str | None = None, context: int = 0, retired: int = 0, code: int | None = None):
        self.message, self.pc, self.line, self.instruction = message, pc, line, instruction
        self.register, self.context, self.retired, self.code = register, context, retired, code
        where = f"{line[0]}:{line[1]}: " if line else ""
        at = f" (pc 0x{pc:04x}{f', context {context}' if context > 1 else ''})" if pc >= 0 else ""
        super().__init__(f"{where}trap: {instruction + ': ' if instruction else ''}{message}{at}")


class LimitError(UserError):
    """A limit the user set was reached: steps, time, memory."""
    exit_code = 4


class Deadlock(UserError):
    """Every context waits for something that no one is left to provide."""
    exit_code = 5


class Interrupted(UserError):
    """The run was stopped from outside (Ctrl-C, `VM.stop`)."""
    exit_code = 130


class Divergence(UserError):
    """A replayed run did something else than its log says."""
    exit_code = 7


class SinkClosed(UserError):
    """The reader of a sink went away (a closed pipe)."""
    exit_code = 141


class StreamError(UserError):
    """A sink or source cannot be opened, written or read."""


class BeyondReach(StreamError):
    """A rollback asks an input for what it no longer has."""


class UnsupportedError(UserError):
    """A backend or this machine cannot do what was asked; the message names what would."""
    exit_code = 6


# What the dynamic linker says of a library that it finds no room for.
_NOT_LOADED = ("failed to map segment", "cannot map zero-fill pages", "Cannot allocate memory")
# What CPython says where it forgets to say that an allocation of its own failed (of a frame, of a lock).
_FORGOTTEN = ("without setting an exception", "without exception set", "can't allocate lock",
              "NULL object passed to Py_BuildValue")


def no_thread(error: BaseException) -> bool:
    """Did the system not start a thread?  It does not say whether that was for its stack or for their number."""
    return isinstance(error, RuntimeError) and "can't start new thread" in str(error)


def no_memory(error: BaseException | None) -> BaseException | None:
    """What says that there was no memory for an object, a library, a thread, or what the system needs itself (to list a
    folder): the error, or what it comes of (was raised from, or while that was handled and not in its place).  None:
    it has nothing to do with memory."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, MemoryError) or no_thread(error) or \
                isinstance(error, OSError) and error.errno == errno.ENOMEM or \
                isinstance(error, (ImportError, OSError)) and any(said in str(error) for said in _NOT_LOADED) or \
                isinstance(error, (SystemError, RuntimeError)) and any(said in str(error) for said in _FORGOTTEN):
            return error
        seen.add(id(error))
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return None


def needs_library(name: str, extra: str, who: str) -> None:
    """Import a library that only `who` needs.  UnsupportedError: it is not installed (it comes with the extra `extra`
    of m3jit), or cannot be loaded."""
    try:
        importlib.import_module(name)
    except ImportError as error:
        if no_memory(error):
            raise
        why = "is not installed" if error.name == name else f"cannot be loaded ({error})"
        raise UnsupportedError(f"{who} needs {name}, which {why}: pip install 'm3jit[{extra}]', or use the backend "
                               "cpu, which needs nothing more") from None
