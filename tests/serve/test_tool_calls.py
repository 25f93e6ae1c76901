"""Calls of tools in a model's text, whole and in pieces."""
from __future__ import annotations

import json

import pytest
from hypothesis import given, settings, strategies as st

from m3jit.serve.tool_calls import OPEN, CallFilter, parse_calls

NAMES = ("look", "go")
CALL = '{"name": "look", "arguments": {"at": 1}}'
CASES = [                                              # (text, text beside the calls, (name, arguments) of each call)
    ("just text", "just text", []), ("", "", []),
    (CALL, "", [("look", {"at": 1})]), (f"\n {CALL} \n", "", [("look", {"at": 1})]),
    (f"[{CALL}, {CALL}]", "", [("look", {"at": 1})] * 2), (f"```json\n{CALL}\n```", "", [("look", {"at": 1})]),
    ('{"name": "go", "parameters": {}}', "", [("go", {})]), ('{"name": "go"}', "", [("go", {})]),
    (f"<tool_call>\n{CALL}\n</tool_call>", "", [("look", {"at": 1})]),
    (f"I look.\n<tool_call>{CALL}</tool_call>", "I look.", [("look", {"at": 1})]),
    (f"<tool_call>{CALL}", "", [("look", {"at": 1})]),
    ('{"name": "unknown", "arguments": {}}', '{"name": "unknown", "arguments": {}}', []),
    ("<tool_call>no json</tool_call>", "<tool_call>no json</tool_call>", []), ("[1, 2]", "[1, 2]", []),
    (f"{CALL} and so", f"{CALL} and so", []), ('{"at": 1}', '{"at": 1}', []), ("{" * 5000, "{" * 5000, []),
]


def facts(calls):
    return [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in calls]


@pytest.mark.parametrize("text, beside, expected", CASES, ids=range(len(CASES)))
def test_calls(text, beside, expected):
    rest, calls = parse_calls(text, NAMES)
    assert (rest, facts(calls)) == (beside, expected)
    assert len({c["id"] for c in calls}) == len(calls) and all(c["type"] == "function" for c in calls)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from([c for c in CASES if len(c[0]) < 200]), st.data())
def test_pieces_do_not_matter(case, data):
    text, beside, expected = case
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=6)))
    stream, out = CallFilter(NAMES), ""
    for a, b in zip([0, *cuts], [*cuts, len(text)]):
        out += stream.feed(text[a:b])
        assert not expected or OPEN[:6] not in out
    rest, calls = stream.end()
    assert facts(calls) == expected and (out + rest).strip() == beside.strip()


def test_ordinary_text_is_not_held_back():
    stream = CallFilter(NAMES)
    assert [stream.feed(t) for t in ("He", " said <b>", "x < y", " <tool")] == ["He", " said <b>", "x < y", " "]
    assert CallFilter(()).feed("{") == "{"
