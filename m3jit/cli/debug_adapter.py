"""A part of the Debug Adapter Protocol over standard input and output, for editors.

Messages are JSON behind a `Content-Length` header.  A context is a thread, a call frame a stack frame.  The variables
of a frame are its registers; `evaluate` takes the commands of the terminal (`print rX`, `diff @100`).

Requests are answered one after another.  A thread reads them, so that `pause`, `disconnect`, `terminate` and the end of
the input stop what goes on, and what was asked for before them and has not begun.

https://microsoft.github.io/debug-adapter-protocol/specification
"""
from __future__ import annotations

import json
import os
import queue
import threading
from typing import Any, BinaryIO, Callable

from m3jit.cli.debug_commands import Commands
from m3jit.errors import Divergence, InternalError, M3Error, UserError, brief
from m3jit.timetravel import views
from m3jit.timetravel.debugger import Debugger
from m3jit.timetravel.engine import Paused
from m3jit.vm.values import Handle

LONGEST = 1 << 24                  # bytes of a message
CAPABILITIES = {"supportsConfigurationDoneRequest": True, "supportsStepBack": True, "supportsDataBreakpoints": False,
                "supportsEvaluateForHovers": False, "supportsFunctionBreakpoints": True}
STOPS = ("pause", "disconnect", "terminate")           # requests that what goes on ends
GOING = ("next", "stepIn", "stepOut", "stepBack", "continue", "reverseContinue")
MOVING = ("configurationDone", *GOING)                 # requests that are answered first, and done then
EVENTS = {"launch": "initialized", "attach": "initialized", "terminate": "terminated", "disconnect": "terminated"}
SCOPES = (("Registers", "R"), ("Vectors", "V"), ("States", "S"))


class Closed(Exception):
    """The editor has gone."""


class BadMessage(UserError):
    """A message that is no request; what follows it can be read."""


def read_message(stream: BinaryIO) -> dict[str, Any]:
    """The next message.  Closed: there is none; BadMessage: it is none; UserError: nor is its length."""
    length = -1
    while (line := stream.readline(1 << 12)) not in (b"\r\n", b"\n"):
        if not line:
            raise Closed
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-length":
            length = int(value) if value.strip().isdigit() else -1
    if not 0 <= length <= LONGEST:
        raise UserError(f"a message needs a Content-Length from 0 to {LONGEST}")
    data = stream.read(length)
    if len(data) < length:
        raise Closed
    try:
        message = json.loads(data)
    except (ValueError, RecursionError) as e:
        raise BadMessage(f"a message is no JSON: {e}") from None
    if not isinstance(message, dict):
        raise BadMessage("a message is no JSON object")
    return message


def argument(arguments: dict[str, Any], name: str, kind: type, what: str) -> Any:
    """An argument of a request.  UserError: it is missing or of another kind; `what` says what is expected."""
    value = arguments.get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise UserError(f"{name!r} is missing; {what} is expected" if value is None else
                        f"{name!r} is {brief(repr(value))}; {what} is expected")
    return value


def _breaks(arguments: dict[str, Any]) -> list[dict[str, Any]]:
    """The breakpoints of a request; none where it names none.  UserError: no list of objects."""
    found = argument({"breakpoints": []} | arguments, "breakpoints", list, "a list of objects")
    if not all(isinstance(b, dict) for b in found):
        raise UserError("'breakpoints' holds something else than objects; a list of objects is expected")
    return found


class Adapter:
    """Answers requests for one debugger."""

    def __init__(self, debugger: Debugger, source: BinaryIO, sink: BinaryIO):
        self.debugger, self.vm, self.source, self.sink = debugger, debugger.vm, source, sink
        self.commands = Commands(debugger)
        self.sequence = 0
        self.done = self.launched = self.configured = False
        self._lines: dict[str, list[int]] = {}         # file -> numbers of its breakpoints
        self._functions: list[int] = []
        self._sources: list[str] = []                  # files that are not there, by their numbers - 1
        self._stop_on_entry = True
        self._shown = 0                                # events whose outputs the editor has
        going = self.debugger.engine
        self._handlers: dict[str, Callable[[dict], Any]] = {
            "initialize": lambda a: CAPABILITIES, "launch": self._launch, "attach": self._launch,
            "configurationDone": self._begin, "source": self._source, "setBreakpoints": self._set_lines,
            "setFunctionBreakpoints": self._set_functions, "setExceptionBreakpoints": lambda a: {"breakpoints": []},
            "threads": self._threads, "stackTrace": self._stack, "scopes": self._scopes, "variables": self._variables,
            "next": lambda a: self._moved("step", lambda: going.step()),
            "stepIn": lambda a: self._moved("step", lambda: going.step()),
            "stepOut": lambda a: self._moved("step", lambda: going.step()),
            "stepBack": lambda a: self._moved("step", lambda: going.back()),
            "continue": lambda a: self._moved("breakpoint", self.debugger.go_on),
            "reverseContinue": lambda a: self._moved("breakpoint", self.debugger.go_back),
            "pause": lambda a: None, "evaluate": self._evaluate, "disconnect": self._disconnect,
            "terminate": self._disconnect}
        self._later: list[tuple[str, dict]] = []       # events behind the answer
        self._requests: queue.SimpleQueue = queue.SimpleQueue()      # messages, at last what ended the reading
        self._stops = 0                                # requests among them that stop what goes on
        self._count = threading.Lock()

    def serve(self) -> None:
        """Answer until the editor goes.  UserError: it sent something that is no message."""
        threading.Thread(target=self._read, name="m3jit editor", daemon=True).start()
        while not self.done:
            message = self._requests.get()
            if isinstance(message, Closed):
                return
            if isinstance(message, BadMessage):
                self._refuse(message)
                continue
            if isinstance(message, BaseException):
                raise message
            if message.get("command") in STOPS:
                with self._count:
                    self._stops -= 1
                    if not self._stops:
                        self.debugger.engine.resume()
            self._answer(message)

    def _read(self) -> None:
        """Read requests until there is none; what ends that also ends what goes on."""
        while True:
            try:
                message: Any = read_message(self.source)
            except Exception as e:                     # `serve` raises it
                message = e
            if isinstance(message, BadMessage):
                self._requests.put(message)
                continue
            ends = isinstance(message, BaseException)
            if not ends and message.get("type") != "request":
                continue
            if ends or message.get("command") in STOPS:
                with self._count:
                    self._stops += 1
                    self.debugger.engine.pause()
            self._requests.put(message)
            if ends or message.get("command") in STOPS[1:]:
                return

    def _answer(self, request: dict[str, Any]) -> None:
        command = str(request.get("command"))
        arguments = request.get("arguments") if isinstance(request.get("arguments"), dict) else {}
        answer = {"type": "response", "request_seq": request.get("seq", 0), "command": command, "success": True}
        try:
            handler = self._handlers.get(command)
            if handler is None:
                raise UserError(f"the request {brief(repr(command))} is not supported")
            self._check_order(command)
            moves = command in MOVING
            body = {"allThreadsContinued": True} if command == "continue" else None if moves else handler(arguments)
            if body is not None:
                answer["body"] = body
        except (Divergence, InternalError):
            raise
        except (M3Error, KeyError, TypeError, ValueError) as e:
            why = str(e) or type(e).__name__
            answer |= {"success": False, "message": why, "body": {"error": {"id": 1, "format": why}}}
        self._send(answer)
        if command in EVENTS:
            self._send({"type": "event", "event": EVENTS[command]})
        if command in MOVING and answer["success"]:    # the editor knows that it goes on, and can pause it
            self._go(self._handlers[command], arguments)
        later, self._later = self._later, []
        for name, body in later:
            self._send({"type": "event", "event": name, "body": body})

    def _go(self, handler: Callable[[dict], Any], arguments: dict) -> None:
        """Go on, behind the answer; what goes wrong is said on the editor's console, and it stands where it stood."""
        try:
            handler(arguments)
        except (Divergence, InternalError):
            raise
        except M3Error as error:
            self._later.append(("output", {"category": "stderr", "output": f"{error}\n"}))
            self._moved("exception")

    def _check_order(self, command: str) -> None:
        """Note how far the editor has begun.  UserError: it goes on before that."""
        self.launched = self.launched or command in ("launch", "attach")
        if command in ("configurationDone", *GOING) and not self.launched:
            raise UserError(f"{command}: `launch` or `attach` comes first, then `configurationDone`")
        self.configured = self.configured or command == "configurationDone"
        if command in GOING and not self.configured:
            raise UserError(f"{command}: `configurationDone` comes first")

    def _refuse(self, error: BadMessage) -> None:
        """Answer what is no request: nobody knows its number."""
        self._send({"type": "response", "request_seq": 0, "command": "", "success": False, "message": str(error),
                    "body": {"error": {"id": 1, "format": str(error)}}})

    def _send(self, message: dict[str, Any]) -> None:
        self.sequence += 1
        data = json.dumps(message | {"seq": self.sequence}).encode()
        self.sink.write(b"Content-Length: %d\r\n\r\n" % len(data) + data)
        self.sink.flush()

    # -- going ------------------------------------------------------------------------------------------------------
    def _moved(self, reason: str, action: Callable[[], Any] = lambda: None) -> None:
        engine = self.debugger.engine
        try:
            if action() == "beginning":                # no stop before it
                reason = "entry"
        except Paused:
            reason = "pause"
        before, self._shown = self._shown, max(self._shown, engine.history.at)
        for item in engine.history.outputs(before):    # once: an editor keeps what it has shown
            text = item.head.decode("utf-8", "replace") if item.form == "TEXT" else f"{item}\n"
            self._later.append(("output", {"category": "stdout" if item.form else "console", "output": text}))
        if engine.ended is not None:
            reason = "exception" if isinstance(engine.ended, BaseException) else "end"
        body = {"reason": reason, "threadId": self.debugger.context.id, "allThreadsStopped": True}
        self._later.append(("stopped", body | ({"text": str(engine.ended)} if engine.ended is not None else {})))

    def _launch(self, arguments: dict) -> None:
        self._stop_on_entry = arguments.get("stopOnEntry") is not False

    def _begin(self, arguments: dict) -> None:
        if self._stop_on_entry:
            self._moved("entry")
        else:
            self._moved("breakpoint", self.debugger.go_on)

    def _disconnect(self, arguments: dict) -> None:
        self.done = True

    # -- stops ------------------------------------------------------------------------------------------------------
    def _set_lines(self, arguments: dict) -> dict[str, Any]:
        source = argument(arguments, "source", dict, "an object with the 'path' of a file")
        if source.get("sourceReference"):              # one of `_source_of`, whose name alone is known
            source = {"path": source.get("name")} | source
        path = argument(source, "path", str, "the path of a file")
        lines = [argument(b, "line", int, "the number of a line") for b in _breaks(arguments)]
        wanted = [f"{os.path.basename(path)}:{line}" for line in lines]
        for number in self._lines.pop(path, []):
            self.debugger.delete(number)
        self._lines[path] = numbers = []
        return {"breakpoints": [self._add(place, numbers) for place in wanted]}

    def _set_functions(self, arguments: dict) -> dict[str, Any]:
        wanted = [argument(b, "name", str, "a label") for b in _breaks(arguments)]
        for number in self._functions:
            self.debugger.delete(number)
        self._functions = []
        return {"breakpoints": [self._add(place, self._functions) for place in wanted]}

    def _add(self, place: str, numbers: list[int]) -> dict[str, Any]:
        try:
            number, made = self.debugger.add_break(place)
        except UserError as e:
            return {"verified": False, "message": str(e)}
        numbers.append(number)
        line = self.vm.image.line(min(made.pcs))
        return {"id": number, "verified": True} | ({"line": line[1]} if line else {})

    # -- showing ----------------------------------------------------------------------------------------------------
    def _threads(self, arguments: dict) -> dict[str, Any]:
        found = self.debugger.engine.contexts
        return {"threads": [{"id": c.id, "name": f"context {c.id} ({c.status})"} for c in found]}

    def _stack(self, arguments: dict) -> dict[str, Any]:
        ctx = self.debugger.find_context(argument(arguments, "threadId", int, "the number of a context"))
        found, frame = [ctx.index], ctx.frames
        while frame is not None:
            found.append(frame.back)
            frame = frame.parent
        frames = [self._frame(ctx.id, depth, at) for depth, at in enumerate(found)]
        return {"stackFrames": frames, "totalFrames": len(frames)}

    def _frame(self, context: int, depth: int, index: int) -> dict[str, Any]:
        image = self.vm.image
        pc = image.pcs[min(index, len(image.pcs) - 1)]
        line = image.line(pc)
        name = f"{views.label_before(image.program, pc) or hex(pc)}: {views.instruction(self.vm, image.index_of[pc])}"
        frame = {"id": context << 12 | depth, "name": name, "line": line[1] if line else 0, "column": 1}
        if line:
            frame["source"] = self._source_of(line[0])
        return frame

    def _source_of(self, name: str) -> dict[str, Any]:
        """A source file; where it is none (a model's program never was one), a number to ask for its text by."""
        where = os.path.abspath(name)
        if os.path.isfile(where):
            return {"name": os.path.basename(name), "path": where}
        if name not in self._sources:
            self._sources.append(name)
        return {"name": os.path.basename(name), "sourceReference": self._sources.index(name) + 1,
                "origin": "what the program knows of it"}

    def _source(self, arguments: dict) -> dict[str, Any]:
        number = argument(arguments, "sourceReference", int, "one of `stackTrace`")
        if not 0 < number <= len(self._sources):
            raise UserError(f"'sourceReference' is {number}, which names no source; `stackTrace` gives those there are")
        return {"content": views.reconstructed(self.vm, self._sources[number - 1])}

    def _scopes(self, arguments: dict) -> dict[str, Any]:
        frame = argument(arguments, "frameId", int, "a frame of `stackTrace`")
        return {"scopes": [{"name": name, "variablesReference": 1 + (frame << 2 | n), "expensive": False}
                           for n, (name, _) in enumerate(SCOPES)]}

    def _variables(self, arguments: dict) -> dict[str, Any]:
        given = argument(arguments, "variablesReference", int, "one of `scopes`")
        frame, number = divmod(given - 1, 4)
        if given < 1 or number >= len(SCOPES):
            raise UserError(f"'variablesReference' is {given}, which names no scope; `scopes` gives those there are")
        scope, depth = SCOPES[number][1], frame & 0xFFF
        ctx = self.debugger.find_context(frame >> 12)
        if depth > ctx.depth:
            raise UserError(f"'variablesReference' is {given}: context {ctx.id} has no call frame {depth} now; it has "
                            f"{ctx.depth + 1}")
        held: Any = ctx
        for _ in range(depth if scope != "S" else 0):
            held = ctx.frames if held is ctx else held.parent
        names = views.register_names(self.vm.image.program) if depth == ctx.depth else {}      # of the main program
        return {"variables": [
            {"name": names.get(f"{scope}{i}") or f"{scope}{i}", "value": views.brief_value(value, ctx),
             "variablesReference": 0, "type": value.what if isinstance(value, Handle) else type(value).__name__.lower()}
            for i, value in enumerate(getattr(held, scope)) if value is not None]}

    def _evaluate(self, arguments: dict) -> dict[str, Any]:
        expression = str(arguments.get("expression", ""))
        try:
            self.vm.register(expression)
            expression = f"print {expression}"
        except (UserError, ValueError):                # no register: a command of the debugger
            pass
        engine = self.debugger.engine
        before = engine.time
        try:
            said = "\n".join(self.commands.run(expression)) if expression.strip() else ""
        except Paused:
            said = "paused"
        if engine.time != before:
            self._moved("step")
        return {"result": said, "variablesReference": 0}
