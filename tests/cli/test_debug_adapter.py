"""`m3jit debug --dap`: a session as an editor holds it."""
from __future__ import annotations

import io
import json

import pytest

from m3jit.cli.debug_adapter import Adapter, Closed, read_message
from m3jit.errors import UserError
from tests.cli.command import EXAMPLES, process
from tests.timetravel.test_debugger import make


def packed(*requests: dict) -> bytes:
    out = b""
    for n, request in enumerate(requests, 1):
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


def session(*requests: dict) -> tuple[dict[str, list], list[dict]]:
    """(answers by command, events)."""
    sink = io.BytesIO()
    Adapter(make(), io.BytesIO(packed(*requests)), sink).serve()
    found = unpacked(sink.getvalue())
    answers: dict[str, list] = {}
    for m in found:
        if m["type"] == "response":
            answers.setdefault(m["command"], []).append(m)
    return answers, [m for m in found if m["type"] == "event"]


def test_an_editor_goes_forward_and_back():
    line = {"command": "setBreakpoints", "arguments": {"source": {"path": "/some/where/prog.m3asm"}, "breakpoints": [
        {"line": 13}, {"line": 999}]}}
    answers, events = session(
        {"command": "initialize"}, {"command": "launch"}, line, {"command": "configurationDone"}, {"command": "threads"},
        {"command": "continue", "arguments": {"threadId": 1}}, {"command": "continue"}, {"command": "stepBack"},
        {"command": "reverseContinue"}, {"command": "next"}, {"command": "stackTrace", "arguments": {"threadId": 1}},
        {"command": "scopes", "arguments": {"frameId": 1 << 12}},
        {"command": "variables", "arguments": {"variablesReference": 1 + (1 << 14)}},
        {"command": "evaluate", "arguments": {"expression": "rN"}}, {"command": "evaluate", "arguments": {"expression": "diff @3"}},
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
    assert answers["evaluate"][0]["body"]["result"] == "rN = 1" and "R2 rN: 0 -> 1" in answers["evaluate"][1]["body"]["result"]
    assert not answers["nonsense"][0]["success"] and "not supported" in answers["nonsense"][0]["message"]
    assert not answers["stackTrace"][1]["success"] and not answers["scopes"][1]["success"]
    assert len(answers["threads"]) == 1                # nothing is answered behind the end


def test_the_end_and_a_trap_are_said():
    _, events = session({"command": "continue"})
    assert events[-1]["body"]["reason"] == "end" and events[-1]["body"]["text"] == "the program has ended"


@pytest.mark.parametrize("data", [b"Content-Length: x\r\n\r\n", b"Content-Length: 99999999999\r\n\r\n", b"\r\n",
                                  b"Content-Length: 2\r\n\r\n[]", b"Content-Length: 3\r\n\r\nabc"])
def test_bytes_that_are_no_message(data):
    with pytest.raises(UserError):
        read_message(io.BytesIO(data))
    with pytest.raises(Closed):
        read_message(io.BytesIO(b"Content-Length: 30\r\n\r\n{}"))


def test_over_standard_input_and_output():
    found = process("debug", EXAMPLES / "rollback.m3asm", "--dap", stdin=packed(
        {"command": "initialize"}, {"command": "launch"}, {"command": "continue"}, {"command": "disconnect"}))
    messages = unpacked(found.out.encode())
    assert found.code == 0 and [m.get("event") for m in messages if m["type"] == "event"] == ["initialized", "output", "output",
                                                                                             "output", "stopped"]
