"""`m3jit debug --dap`: a session as an editor holds it."""
from __future__ import annotations

import io
import json
import signal
import subprocess
import threading
from typing import Any

import pytest

from m3jit.cli.debug_adapter import MOVING, Adapter, Closed, read_message
from m3jit.errors import UserError
from tests.cli.command import EXAMPLES, FOREVER, process, start
from tests.timetravel.test_debugger import make

LONG = 120                          # seconds that nothing here takes, however loaded the machine is

BEGUN = ({"command": "launch"}, {"command": "configurationDone"})


def packed(*requests: dict, first: int = 1) -> bytes:
    out = b""
    for n, request in enumerate(requests, first):
        data = json.dumps({"seq": n, "type": "request"} | request).encode()
        out += b"Content-Length: %d\r\n\r\n" % len(data) + data
    return out


def unpacked(data: bytes) -> list[dict]:
    stream, out = io.BytesIO(data), []
    while True:
        try:
            out.append(read_message(stream))
        except Closed:
            return out


class Editor(io.BytesIO):
    """Requests that are sent one at a time, each when the one before has been answered; a function among them is waited
    for instead: the next request comes when it is true.  The end of the input comes behind the last answer, too."""

    def __init__(self, *requests: Any, patient: bool = True):
        super().__init__()
        self.requests, self.sent, self.patient = iter(requests), 0, patient
        self.sink, self.answered = io.BytesIO(), threading.Condition()
        self.answers, self.going = 0, False            # going: it has been answered, and has not stopped

    def readline(self, size: int = -1) -> bytes:
        return super().readline(size) or (self._send() and super().readline(size)) or b""

    def _send(self) -> bool:
        request = next(self.requests, None)
        if callable(request):
            tries = int(LONG / 0.01)
            while not request() and tries:
                tries -= 1
                threading.Event().wait(0.01)
            request = next(self.requests, None)
        elif self.patient or request is None:
            with self.answered:
                assert self.answered.wait_for(lambda: self.answers == self.sent and not self.going, LONG), "no answer"
        if request is None:
            return False
        self.sent += 1
        at = self.tell()
        self.write(packed(request, first=self.sent))
        self.seek(at)
        return True

    def wrote(self, data: bytes) -> int:
        message = json.loads(data.partition(b"\r\n\r\n")[2])
        with self.answered:
            self.answers += message["type"] == "response"
            if message.get("command") in MOVING:
                self.going = message["success"]
            self.going = self.going and message.get("event") != "stopped"
            self.answered.notify_all()
            return self.sink.write(data)


class Shown:
    """Where an adapter writes for an editor."""

    def __init__(self, editor: Editor):
        self.write = editor.wrote

    def flush(self) -> None:
        """Nothing is held back."""


def session(*requests: Any, debugger: Any = None) -> tuple[dict[str, list], list[dict]]:
    """(answers by command, events)."""
    editor = Editor(*requests)
    Adapter(debugger or make(), editor, Shown(editor)).serve()
    return sorted_out(unpacked(editor.sink.getvalue()))


def sorted_out(found: list[dict]) -> tuple[dict[str, list], list[dict]]:
    answers: dict[str, list] = {}
    for m in found:
        if m["type"] == "response":
            answers.setdefault(m["command"], []).append(m)
    return answers, [m for m in found if m["type"] == "event"]


def test_an_editor_goes_forward_and_back():
    line = {"command": "setBreakpoints", "arguments": {"source": {"path": "/some/where/prog.m3asm"}, "breakpoints": [
        {"line": 13}, {"line": 999}]}}
    answers, events = session(
        {"command": "initialize"}, {"command": "launch"}, line, {"command": "configurationDone"},
        {"command": "threads"},
        {"command": "continue", "arguments": {"threadId": 1}}, {"command": "continue"}, {"command": "stepBack"},
        {"command": "reverseContinue"}, {"command": "next"}, {"command": "stackTrace", "arguments": {"threadId": 1}},
        {"command": "scopes", "arguments": {"frameId": 1 << 12}},
        {"command": "variables", "arguments": {"variablesReference": 1 + (1 << 14)}},
        {"command": "evaluate", "arguments": {"expression": "rN"}},
        {"command": "evaluate", "arguments": {"expression": "diff @3"}},
        {"command": "nonsense"}, {"command": "stackTrace", "arguments": {"threadId": 9}}, {"command": "scopes"},
        {"command": "disconnect"}, {"command": "threads"})
    assert answers["initialize"][0]["body"]["supportsStepBack"] is True
    stops = answers["setBreakpoints"][0]["body"]["breakpoints"]
    assert stops[0] == {"id": 1, "verified": True, "line": 13} and stops[1]["verified"] is False
    stopped = [e["body"] for e in events if e["event"] == "stopped"]
    assert [s["reason"] for s in stopped] == ["entry", "breakpoint", "breakpoint", "step", "breakpoint", "step"]
    assert [e["body"]["output"] for e in events if e["event"] == "output"] == ["1\n"]
    frame = answers["stackTrace"][0]["body"]["stackFrames"][0]
    assert frame["line"] == 14 and frame["source"]["name"] == "prog.m3asm" and "CALL" in frame["name"]
    variables = {v["name"]: v["value"] for v in answers["variables"][0]["body"]["variables"]}
    assert variables["rN"] == "1" and variables["rV"].startswith("f32[2, 3]")
    assert answers["evaluate"][0]["body"]["result"] == "rN = 1"
    assert "R2 rN: 0 -> 1" in answers["evaluate"][1]["body"]["result"]
    assert answers["nonsense"][0]["body"]["error"]["format"] == answers["nonsense"][0]["message"]
    assert not answers["nonsense"][0]["success"] and "not supported" in answers["nonsense"][0]["message"]
    assert not answers["stackTrace"][1]["success"] and not answers["scopes"][1]["success"]
    assert len(answers["threads"]) == 1                # nothing is answered behind the end


def test_the_end_and_a_trap_are_said():
    _, events = session(*BEGUN, {"command": "continue"})
    assert events[-1]["body"]["reason"] == "end" and events[-1]["body"]["text"] == "the program has ended"


@pytest.mark.parametrize("data", [b"Content-Length: x\r\n\r\n", b"Content-Length: 99999999999\r\n\r\n", b"\r\n",
                                  b"Content-Length: 2\r\n\r\n[]", b"Content-Length: 3\r\n\r\nabc"])
def test_bytes_that_are_no_message(data):
    with pytest.raises(UserError):
        read_message(io.BytesIO(data))
    with pytest.raises(Closed):
        read_message(io.BytesIO(b"Content-Length: 30\r\n\r\n{}"))


def reasons(events: list[dict]) -> list[str]:
    return [e["body"]["reason"] for e in events if e["event"] == "stopped"]


def test_the_order_of_messages_is_that_which_clients_expect():
    """An editor is told that the run goes on before it stops: it offers a pause in between."""
    editor = Editor({"command": "launch", "arguments": {"stopOnEntry": False}},
                    {"command": "setFunctionBreakpoints", "arguments": {"breakpoints": [{"name": "CALL"}]}},
                    {"command": "configurationDone"}, {"command": "continue"}, {"command": "reverseContinue"},
                    {"command": "reverseContinue"}, {"command": "terminate"})
    Adapter(make(), editor, Shown(editor)).serve()
    found = [m.get("event") or m["command"] for m in unpacked(editor.sink.getvalue())]
    assert [m for m in found if m != "output"] == [
        "launch", "initialized", "setFunctionBreakpoints", "configurationDone", "stopped", "continue", "stopped",
        "reverseContinue", "stopped", "reverseContinue", "stopped", "terminate", "terminated"]
    _, events = sorted_out(unpacked(editor.sink.getvalue()))
    assert reasons(events) == ["breakpoint", "breakpoint", "breakpoint", "entry"]


def test_a_source_that_is_not_there(tmp_path, monkeypatch):
    """A model's program never was a file: its text is asked for, and breakpoints name it."""
    monkeypatch.chdir(tmp_path)
    answers, events = session(
        *BEGUN, {"command": "stackTrace", "arguments": {"threadId": 1}},
        {"command": "source", "arguments": {"sourceReference": 1}},
        {"command": "setBreakpoints", "arguments": {"source": {"name": "prog.m3asm", "sourceReference": 1},
                                                    "breakpoints": [{"line": 13}]}},
        {"command": "continue"}, {"command": "stackTrace", "arguments": {"threadId": 1}},
        {"command": "source", "arguments": {"sourceReference": 2}})
    first, second = (a["body"]["stackFrames"][0] for a in answers["stackTrace"])
    assert first["source"] == second["source"] and "path" not in first["source"] and second["line"] == 13
    lines = answers["source"][0]["body"]["content"].splitlines()
    assert lines[first["line"] - 1].strip() == first["name"].partition(": ")[2]
    assert answers["setBreakpoints"][0]["body"]["breakpoints"][0]["verified"]
    assert reasons(events) == ["entry", "breakpoint"]
    assert not answers["source"][1]["success"] and "names no source" in answers["source"][1]["message"]


def test_what_goes_wrong_on_the_way_is_said(monkeypatch):
    debugger = make()

    def wrong() -> str:
        raise UserError("this cannot be")
    monkeypatch.setattr(debugger, "go_on", wrong)
    answers, events = session(*BEGUN, {"command": "continue"}, {"command": "threads"}, debugger=debugger)
    assert answers["continue"][0]["success"] and answers["threads"][0]["success"]
    assert {"category": "stderr", "output": "this cannot be\n"} in [e.get("body") for e in events]
    assert reasons(events) == ["entry", "exception"]


# -- what goes on is stopped ----------------------------------------------------------------------------------------

def endless(backend: str) -> Any:
    return make(FOREVER, backend)


def going(debugger: Any) -> Any:
    """True when the machine has gone on since the first question."""
    asked: list[int] = []

    def gone() -> bool:
        asked.append(debugger.vm.retired)
        return asked[-1] > asked[0] + 50
    return gone


@pytest.mark.parametrize("backend", ["interpreter", "cpu"])
def test_a_pause_ends_what_goes_on(backend):
    """Going forward at full speed, and by a command; it can be gone on with."""
    debugger = endless(backend)
    answers, events = session(
        *BEGUN, {"command": "continue"}, going(debugger), {"command": "pause"},
        {"command": "stackTrace", "arguments": {"threadId": 1}},
        {"command": "evaluate", "arguments": {"expression": "c"}},
        going(debugger), {"command": "pause"}, {"command": "stepIn"}, {"command": "disconnect"}, debugger=debugger)
    assert [e["body"]["reason"] for e in events if e["event"] == "stopped"] == ["entry", "pause", "step", "step"]
    assert [a["success"] for a in answers["pause"]] == [True, True]
    assert answers["evaluate"][0]["body"]["result"] == "paused" and answers["continue"][0]["success"]
    assert len(answers["stackTrace"][0]["body"]["stackFrames"]) == 1 and answers["disconnect"][0]["success"]


def test_a_pause_ends_a_run_with_watchpoints_and_one_that_waits_for_input():
    debugger = endless("interpreter")
    debugger.add_watch("r2")
    _, events = session(*BEGUN, {"command": "continue"}, lambda: debugger.vm.retired > 100, {"command": "pause"},
                        debugger=debugger)
    assert reasons(events) == ["entry", "pause"]
    debugger = make("SENSE r1, USER_INPUT\nHALT\n")
    debugger.vm.wait_input = True
    _, events = session(*BEGUN, {"command": "continue"}, lambda: debugger.vm.main.waiting_for is not None,
                        {"command": "pause"}, debugger=debugger)
    assert reasons(events) == ["entry", "pause"]


@pytest.mark.parametrize("last", ["disconnect", "terminate"])
def test_an_editor_that_goes_ends_what_goes_on(last):
    debugger = endless("cpu")
    answers, _ = session(*BEGUN, {"command": "continue"}, lambda: debugger.vm.retired > 100, {"command": last},
                         debugger=debugger)
    assert answers[last][0]["success"]
    debugger = endless("cpu")                          # without a word
    source = io.BytesIO(packed(*BEGUN, {"command": "continue"}))
    sink = io.BytesIO()
    Adapter(debugger, source, sink).serve()
    assert reasons(sorted_out(unpacked(sink.getvalue()))[1]) == ["entry", "pause"]


def test_a_pause_while_nothing_goes_on_changes_nothing():
    answers, events = session(*BEGUN, {"command": "pause"}, {"command": "stepIn"}, {"command": "pause"},
                              {"command": "continue"})
    assert reasons(events) == ["entry", "step", "end"]
    assert [a["success"] for a in answers["pause"]] == [True, True]


def test_several_pauses_are_one():
    """Going on is possible again behind the last of them."""
    source = io.BytesIO(packed(*BEGUN, {"command": "pause"}, {"command": "pause"}, {"command": "stepIn"},
                               {"command": "disconnect"}))
    sink = io.BytesIO()
    debugger = make()
    Adapter(debugger, source, sink).serve()
    answers, _ = sorted_out(unpacked(sink.getvalue()))
    assert len(answers["pause"]) == 2 and answers["disconnect"] and debugger.engine.time in (0, 1)


def test_over_standard_input_and_output():
    running = start("debug", EXAMPLES / "rollback.m3asm", "--dap", stdin=subprocess.PIPE)
    try:
        found: list[dict] = []
        for n, name in enumerate(("initialize", "launch", "configurationDone", "continue", "disconnect"), 1):
            running.stdin.write(packed({"command": name}, first=n))
            running.stdin.flush()
            awaited = ("event", "stopped") if name in MOVING else ("request_seq", n)
            found.append(read_message(running.stdout))
            while found[-1].get(awaited[0]) != awaited[1]:
                found.append(read_message(running.stdout))
        found += unpacked(running.stdout.read())
        assert running.wait(LONG) == 0
    finally:
        running.kill()
        running.communicate()
    assert [m["event"] for m in found if m["type"] == "event"] == ["initialized", "stopped", "output", "output",
                                                                       "output", "stopped", "terminated"]


@pytest.mark.parametrize("how", ["a signal", "no reader"])
def test_an_editor_that_ends_the_adapter(how):
    """While the adapter's thread waits for a request that never comes."""
    running = start("debug", EXAMPLES / "rollback.m3asm", "--dap", stdin=subprocess.PIPE)
    running.stdin.write(packed({"command": "initialize"}))
    running.stdin.flush()
    assert read_message(running.stdout)["success"]
    if how == "a signal":
        running.terminate()
    else:
        running.stdout.close()
        running.stdin.write(packed({"command": "threads"}))
        running.stdin.flush()
    try:
        assert running.wait(LONG) in ((143, -signal.SIGTERM) if how == "a signal" else (141,))
        assert running.stderr.read() == b""            # no abort of the interpreter
    finally:
        running.kill()
        for stream in (running.stdin, running.stdout, running.stderr):
            stream.close()


def test_an_endless_program_ends_with_its_editor(tmp_path):
    (tmp_path / "forever.m3asm").write_text(FOREVER)
    found = process("debug", tmp_path / "forever.m3asm", "--dap", stdin=packed(
        {"command": "initialize"}, *BEGUN, {"command": "continue"}, {"command": "pause"},
        {"command": "disconnect"}), timeout=LONG)
    answers, events = sorted_out(unpacked(found.out.encode()))
    assert found.code == 0 and all(answers[name] for name in ("continue", "pause", "disconnect"))
    assert reasons(events)[-1] == "pause" and events[-1]["event"] == "terminated"


@pytest.mark.parametrize("reference", [0, -1, 4, 1 + (1 << 14 | 3), 2 ** 31, 2 ** 62, 2 ** 64, 10 ** 20,
                                       1 + ((1 << 12 | 5) << 2), 1 + (7 << 14), 1.5, True, "x", None])
def test_variables_of_what_is_not_there(reference):
    answers, _ = session(*BEGUN, {"command": "variables", "arguments": {"variablesReference": reference}},
                         {"command": "threads"})
    refused = answers["variables"][0]
    assert not refused["success"] and len(refused["message"]) > 20 and answers["threads"][0]["success"]


@pytest.mark.parametrize("command, arguments, message", [
    ("setBreakpoints", {}, "'source' is missing; an object with the 'path' of a file is expected"),
    ("setBreakpoints", {"source": {}}, "'path' is missing; the path of a file is expected"),
    ("setBreakpoints", {"source": {"path": "a"}, "breakpoints": [{}]},
     "'line' is missing; the number of a line is expected"),
    ("setBreakpoints", {"source": {"path": "a"}, "breakpoints": [3]}, "a list of objects is expected"),
    ("setFunctionBreakpoints", {"breakpoints": None}, "'breakpoints' is missing; a list of objects is expected"),
    ("setFunctionBreakpoints", {"breakpoints": [{"name": 3}]}, "'name' is 3; a label is expected"),
    ("scopes", {}, "'frameId' is missing; a frame of `stackTrace` is expected"),
    ("stackTrace", {"threadId": float("inf")}, "'threadId' is inf; the number of a context is expected")])
def test_arguments_that_are_none(command, arguments, message):
    answers, _ = session({"command": command, "arguments": arguments})
    assert not answers[command][0]["success"] and message in answers[command][0]["message"]


@pytest.mark.parametrize("command", ["continue", "next", "stepBack", "reverseContinue"])
def test_going_on_before_the_beginning(command):
    answers, events = session({"command": command}, {"command": "configurationDone"}, {"command": "launch"},
                              {"command": command})
    first, second = answers[command]
    assert not first["success"]
    assert first["message"] == f"{command}: `launch` or `attach` comes first, then `configurationDone`"
    assert not answers["configurationDone"][0]["success"]
    assert not second["success"] and second["message"] == f"{command}: `configurationDone` comes first"
    assert [e["event"] for e in events] == ["initialized"]


@pytest.mark.parametrize("data, message", [(b"[]", "a message is no JSON object"), (b"abc", "a message is no JSON: "),
                                           (b"[" * 100000, "a message is no JSON: ")])
def test_a_message_that_is_none_does_not_end_the_adapter(data, message):
    sink = io.BytesIO()
    bad = b"Content-Length: %d\r\n\r\n" % len(data) + data
    Adapter(make(), io.BytesIO(bad + packed({"command": "threads"})), sink).serve()
    refused, threads = unpacked(sink.getvalue())
    assert not refused["success"] and message in refused["message"] and threads["success"]
