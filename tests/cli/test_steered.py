"""`m3jit run` with stop strings, log-probabilities, grammars and a smaller context."""
from __future__ import annotations

import json
import re

import pytest

import m3jit
from tests.cli.command import call, process

PROMPT = ("--prompt", "Emma was", "--temp", "0", "--threads", "1")


def run(capfd, *more):
    return call(capfd, "run", *PROMPT, *more)


def test_stop(capfd):
    whole = run(capfd, "--max-tokens", 24).out
    cut = run(capfd, "--max-tokens", 24, "--stop", "never there", "--stop", whole[15:20])
    assert (cut.code, cut.out, cut.err) == (0, whole[:15], "")


def test_log_probabilities(capfd):
    found = run(capfd, "--max-tokens", 3, "--logprobs", 2)
    pieces = [p for p in m3jit.load_model("default").generate("Emma was", temperature=0, max_tokens=3, logprobs=2)
              if p.logprobs]
    assert found.out == "".join(p.text for p in pieces) == run(capfd, "--max-tokens", 3).out
    lines = found.err.splitlines()
    assert len(lines) == 3
    for line, piece in zip(lines, pieces):
        numbers = [float(x) for x in re.findall(r"-?\d+\.\d{4}", line)]
        expected = [piece.logprobs.chosen.logprob, *(c.logprob for c in piece.logprobs.top)]
        assert numbers == [round(p, 4) for p in expected] and repr(piece.logprobs.chosen.text) in line


@pytest.mark.parametrize("name, text, pattern", [
    ("--json-schema", '{"enum": ["Emma", "Anne"]}', '"(Emma|Anne)"'), ("--regex", "[0-9]{3}", "[0-9]{3}"),
    ("--grammar gbnf", 'root ::= "a" [b-c] "d"', "a[bc]d"), ("--grammar lark", 'start: "a" | "bc"', "a|bc")])
def test_grammars(capfd, tmp_path, name, text, pattern):
    name, _, suffix = name.partition(" ")
    value = text
    if name != "--regex":
        value = tmp_path / f"it.{suffix or 'json'}"
        value.write_text(text)
    found = run(capfd, name, value)
    assert found.code == 0 and re.fullmatch(pattern, found.out), found


def test_the_context(capfd):
    code, _, said = run(capfd, "--context", 1)
    assert code == 1 and "the prompt has 2 tokens, the context 1 (of the model's 512); shorten" in said
    code, out, said = run(capfd, "--context", 4, "--max-tokens", 9)
    assert code != 0 and out and "context of 4 tokens" in said
    code, _, said = call(capfd, "run", "--prompt", "word " * 600)
    assert code == 1 and re.search(r"the prompt has 60\d tokens, the context 512; shorten the prompt", said), said


def test_other_options_go_with_them(capfd, tmp_path):
    trace = tmp_path / "trace.json"
    found = run(capfd, "--regex", "[a-z]{4}", "--stats", "--profile", "--trace", trace, "--show", "rMade")
    assert re.fullmatch("[a-z]{4}", found.out) and "rMade = " in found.err and "tokens per second" in found.err
    assert json.loads(trace.read_text())
    code, _, said = run(capfd, "--regex", "[a-z]*", "--max-steps", 500, "--max-tokens", 400)
    assert code == 4 and "max_steps = 500" in said


@pytest.mark.parametrize("options, code, message", [
    (["--regex", "a", "--grammar", "x"], 2, "give one of them"), (["--logprobs", "21"], 2, "--logprobs"),
    (["--grammar", "no-such-file"], 1, "no-such-file: No such file"), (["--stop", ""], 1, "stop: strings of 1"),
    (["--regex", "((("], 1, "regex: "), (["--context", "0"], 2, "--context")])
def test_wrong_usage(capfd, options, code, message):
    found = run(capfd, *options)
    assert found.code == code and message in found.err


def test_a_schema_that_is_none(capfd, tmp_path):
    (tmp_path / "a.json").write_text("{")
    (tmp_path / "b.json").write_bytes(b"\xff")
    assert "a.json: JSON schema: is no JSON" in run(capfd, "--json-schema", tmp_path / "a.json").err
    assert "byte 0 is not UTF-8" in run(capfd, "--json-schema", tmp_path / "b.json").err


def test_programs_do_not_take_them():
    code, _, said = process("run", "examples/hello.m3asm", "--stop", "x", "--logprobs", "1", "--context", "5",
                            "--json-schema", "s")
    assert code == 2 and "--context, --stop, --logprobs, --json-schema: belong to model files" in said
