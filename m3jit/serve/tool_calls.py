"""Calls of functions in what a model writes.

Two forms are read, those most templates ask for: JSON objects between `<tool_call>` and `</tool_call>`, and a text that
is nothing but such an object or a list of them (in a fence of backticks, if the model likes).  An object names a
function under "name" and has its "arguments" (or "parameters").  A text that names no function of the request stays a
text.
"""
from __future__ import annotations

import json
import re
import uuid
from typing import Any, Sequence

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_BLOCK = re.compile(rf"{OPEN}\s*(.*?)\s*(?:{CLOSE}|\Z)", re.S)
_FENCE = re.compile(r"\A```(?:json)?\s*(.*?)\s*```\Z", re.S)


def parse_calls(text: str, names: Sequence[str]) -> tuple[str, list[dict[str, Any]]]:
    """(the text beside the calls, the calls as OpenAI's clients read them)."""
    blocks = _BLOCK.findall(text)
    if blocks:
        found = [c for block in blocks for c in _calls(block, names)]
        return (_BLOCK.sub("", text).strip(), found) if found else (text, [])
    bare = text.strip()
    fenced = _FENCE.match(bare)
    found = _calls(fenced[1] if fenced else bare, names)
    return ("", found) if found else (text, [])


def _calls(text: str, names: Sequence[str]) -> list[dict[str, Any]]:
    """The calls in a JSON text; none when any part of it is something else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return []
    out = []
    for item in value if isinstance(value, list) else [value]:
        if not isinstance(item, dict) or item.get("name") not in names:
            return []
        arguments = item.get("arguments", item.get("parameters", {}))
        out.append({"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": {
            "name": item["name"], "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments)}})
    return out


class CallFilter:
    """Text of a stream, without what may become a call: held back until the text ends.  names: none means no calls."""

    def __init__(self, names: Sequence[str]):
        self.names, self.held, self.begun = tuple(names), "", False

    def feed(self, text: str) -> str:
        """What is surely no call."""
        if not self.names:
            return text
        self.held += text
        if not self.begun:                             # only a text that begins as JSON or a fence can be bare calls
            start = self.held.lstrip()
            if not start or start[0] in "{[" or "```".startswith(start[:3]):
                return ""
            self.begun = True
        at = self.held.find(OPEN)
        if at < 0:
            at = len(self.held) - next((n for n in range(min(len(OPEN), len(self.held)), 0, -1)
                                        if self.held.endswith(OPEN[:n])), 0)
        certain, self.held = self.held[:at], self.held[at:]
        return certain

    def end(self) -> tuple[str, list[dict[str, Any]]]:
        """(the rest of the text, the calls)."""
        held, self.held = self.held, ""
        return parse_calls(held, self.names) if held else ("", [])
