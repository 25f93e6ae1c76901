"""m3jit record, replay and debug of texts that the host steers: stop strings, log-probabilities, grammars; and
--store."""
from __future__ import annotations

import json
import sys

import pytest

from m3jit.timetravel import log_file
from tests.cli.command import call

PROMPT = ("--prompt", "Emma was", "--temp", "0")


def record(capfd, log, *more):
    return call(capfd, "record", *PROMPT, "-o", log, *more)


def test_stop_strings_and_log_probabilities(capfd, tmp_path):
    log = tmp_path / "run.log"
    options = ("--max-tokens", "12", "--stop", "never there", "--stop", " way", "--logprobs", "2")
    first = record(capfd, log, *options)
    assert first.code == 0 and first.out == " obliged to be in the" and len(first.err.splitlines()) == 6
    assert call(capfd, "run", *PROMPT, *options)[1:] == first[1:]
    for more in ((), ("--backend", "interpreter"), ("--threads", "1", "--backend", "cpu:baseline")):
        again = call(capfd, "replay", log, *more)
        assert again.code == 0 and again.out == first.out and again.err.startswith(first.err)
        assert "agrees: " in again.err[len(first.err):]
    hushed = call(capfd, "replay", log, "--quiet")
    assert hushed.out == "" and hushed.err == again.err[len(first.err):]


def test_a_grammar_is_in_the_log(capfd, tmp_path):
    schema, log = tmp_path / "s.json", tmp_path / "run.log"
    schema.write_text(json.dumps({"enum": ["Emma", "Anne"]}))
    first = record(capfd, log, "--json-schema", schema)
    assert first.code == 0 and json.loads(first.out) in ("Emma", "Anne")
    schema.unlink()
    assert call(capfd, "replay", log).out == call(capfd, "replay", log, "--backend", "interpreter").out == first.out


def test_another_library_of_grammars_and_none(capfd, tmp_path, monkeypatch):
    from m3jit.timetravel import steering
    log = tmp_path / "run.log"
    monkeypatch.setattr(steering, "library_version", lambda: "1.0.7")
    first = record(capfd, log, "--regex", "[0-9]{2}")
    monkeypatch.undo()
    found = call(capfd, "replay", log)
    assert found.code == 1 and found.out == "" and "was written under a grammar of llguidance 1.0.7, " in found.err
    assert "pip install llguidance==1.0.7" in found.err and "--any-version" in found.err
    assert call(capfd, "replay", log, "--any-version").out == first.out
    monkeypatch.setitem(sys.modules, "llguidance", None)
    for command in ("replay", "debug"):
        found = call(capfd, command, log)
        assert found.code != 0 and f"{log}: was written under a grammar: " in found.err
        assert "m3jit[grammar]" in found.err


def test_the_debugger_shows_the_text_that_was_made_of_tokens(capfd, tmp_path):
    log = tmp_path / "run.log"
    options = ("--max-tokens", "12", "--stop", " way", "--logprobs", "0")
    record(capfd, log, *options)
    commands = ("-x", "t 2", "-x", "bt", "-x", "t", "-x", "output", "-x", "c")
    found = call(capfd, "debug", log, *commands)
    assert found.code == 0 and "@0 context" in found.out and "LOGPROBS" not in found.out and "TOKENS" not in found.out
    lines = found.out.splitlines()
    assert lines.count("  wrote ' to' to OUTPUT") == 2 and lines.count("  wrote ' obliged' to OUTPUT") == 1
    assert lines[-1].endswith("the end: the program has ended")
    assert call(capfd, "debug", *PROMPT, *options, *commands).out == found.out         # not recorded


def test_a_text_that_is_not_the_recorded_one_is_said(capfd, tmp_path, monkeypatch):
    """The tokens agree, what is made of them does not: another tokeniser, say."""
    from m3jit.models.tokenizer import StreamDecoder
    log, feed = tmp_path / "run.log", StreamDecoder.feed
    record(capfd, log, "--max-tokens", "6", "--stop", "never there")
    monkeypatch.setattr(StreamDecoder, "feed", lambda self, token: feed(self, token).upper())
    found = call(capfd, "replay", log)
    assert found.code == 7 and "makes ' OBLIGED' to OUTPUT of it; the log has ' obliged' to OUTPUT" in found.err
    assert call(capfd, "debug", log, "-x", "c").code == 0


@pytest.mark.parametrize("change", [{"stop": [1]}, {"grammar": "x"}, {"model": 5}, {"more": 1}, {"logprobs": "2"}])
def test_a_head_that_says_something_else(capfd, tmp_path, monkeypatch, change):
    log, init = tmp_path / "run.log", log_file.LogWriter.__init__

    def changed(self, path, head):
        init(self, path, head | {"steering": {**head["steering"], **{k: tuple(v) if isinstance(v, list) else v
                                                                    for k, v in change.items()}}})
    monkeypatch.setattr(log_file.LogWriter, "__init__", changed)
    record(capfd, log, "--max-tokens", "2", "--stop", "x")
    found = call(capfd, "replay", log)
    assert found.code == 1 and "does not say how its text was steered" in found.err


def test_torn_and_stopped(capfd, tmp_path):
    log = tmp_path / "run.log"
    first = record(capfd, log, "--max-tokens", "12", "--stop", "never there", "--max-steps", "400")
    assert first.code == 4
    again = call(capfd, "replay", log)
    assert again.code == 0 and again.out == first.out and "the run ended with: " in again.err
    log.write_bytes(log.read_bytes()[:-10])
    again = call(capfd, "replay", log)
    assert again.code == 0 and again.out == first.out and "the recording was cut off" in again.err


def test_a_run_with_a_store_is_recorded_from_its_beginning(capfd, tmp_path):
    log, store = tmp_path / "run.log", tmp_path / "store"
    options = ("--max-tokens", "12", "--checkpoint-every", "4", "--store", store)
    stopped = record(capfd, log, *options, "--max-steps", "1000")
    assert stopped.code == 4 and "is where it was stopped" in stopped.err
    again = call(capfd, "replay", log)
    assert again.code == 0 and again.out == stopped.out
    refused = record(capfd, tmp_path / "other.log", *options)
    assert refused.code == 1 and "the log of a run begins at its beginning" in refused.err
    assert "--remove run" in refused.err
    assert call(capfd, "store", store, "--remove", "run").code == 0
    first = record(capfd, tmp_path / "other.log", *options)
    again = call(capfd, "replay", tmp_path / "other.log")
    assert first.code == 0 and again.out == first.out == call(capfd, "run", *PROMPT, *options).out
    found = call(capfd, "debug", *PROMPT, "--store", store)
    assert found.code == 2 and "the debugger goes forward and back, a store forward only" in found.err
    found = record(capfd, log, *options, "--stop", "x")
    assert found.code == 2 and "a store holds what a program does by itself" in found.err
