"""Hosted programs that begin behind tokens whose state the host has: the same bytes as from the beginning.

One machine computes a prompt and its states are taken (`VM.states`); another one is given them (`VM.set_state`), the
whole prompt, and how much of it is known (rStart)."""
from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from m3jit.api.generation import Generation, LanguageModel, Settings
from m3jit.errors import UserError
from m3jit.isa.cells import CellState
from m3jit.isa.kv import KVStream
from m3jit.models.program import Options
from m3jit.models.provider import Models

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import make_tiny_architectures  # noqa: E402  (found through the path set above)
import make_tiny_deepseek  # noqa: E402
import make_tiny_recurrent  # noqa: E402

PROMPT = [int(t) for t in np.random.default_rng(5).integers(4, 200, 39)]
GREEDY = Settings(max_tokens=5, temperature=0.0)
SAMPLED = Settings(max_tokens=5, temperature=1.1, top_k=0, seed=4, repeat_penalty=1.2)
FAMILIES = {"llama3/Q8_0": make_tiny_architectures, "plain/new/F32": make_tiny_deepseek,
            "mamba2/F32": make_tiny_recurrent, "jamba/F32": make_tiny_recurrent}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("behind")


def model_of(folder: Path, name: str, **options) -> LanguageModel:
    path = FAMILIES[name].build(folder, name)
    return LanguageModel(str(path), Models(), threads=1, options=Options(chunk=8, **options))


def result(text) -> tuple[list[int], bytes]:
    """The tokens of a text, and the logits it ended with."""
    tokens = Generation(text)
    tokens.result()
    return tokens.tokens, text.vm.get("rLogits").tobytes()


def states_after(model: LanguageModel, ids: list[int]) -> dict:
    """The states behind these tokens, and the logits there."""
    text = model.start(ids, Settings(max_tokens=1))
    Generation(text).result()
    return {**text.vm.states(KVStream, CellState), "rLogits": text.vm.get("rLogits")}


def start_behind(model: LanguageModel, known: int, states: dict, settings: Settings):
    text = model.start(PROMPT, settings)
    for name, value in states.items():
        if name.startswith("S"):
            text.vm.set_state(name, value)
    if known == len(PROMPT):
        text.vm.set("rLogits", states["rLogits"])
    text.vm.set("rStart", known)
    return text


@pytest.mark.parametrize("name", FAMILIES)
def test_the_same_bytes_as_from_the_beginning(name, folder):
    model = model_of(folder, name)
    straight = {s: result(model.start(PROMPT, s)) for s in (GREEDY, SAMPLED)}
    for known in (1, 17, len(PROMPT) - 1, len(PROMPT)):
        states = states_after(model, PROMPT[:known])
        for settings, expected in straight.items():
            assert result(start_behind(model, known, states, settings)) == expected, (known, settings)


def test_marks_say_where_the_state_stands(folder):
    """MARKS comes after each chunk but the last one, with the state of so many tokens, and only when asked for."""
    model = model_of(folder, "mamba2/F32")
    straight = result(model.start(PROMPT, GREEDY))
    text, kept = model.start(PROMPT, GREEDY), {}
    text.vm.set("rMarks", 1)
    text.vm.set_sink("MARKS", lambda item: kept.update({int.from_bytes(item, "little"): text.vm.states(CellState)}))
    assert result(text) == straight and list(kept) == [8, 16, 24, 32]
    for known, states in kept.items():
        assert result(start_behind(model, known, states, GREEDY)) == straight


def test_a_conversation_begins_behind_known_tokens(folder):
    """The first prompt of a turn counts rStart tokens that are there already, the next turn none."""
    model, settings = model_of(folder, "llama3/Q8_0"), GREEDY

    def turns(start: int, states: dict) -> list[int]:
        vm = model.machine(model.program(conversation=True), settings, 200, None)
        for name, value in states.items():
            vm.set_state(name, value)
        vm.set("rStart", start)
        vm.push_input(np.array(PROMPT, np.int64))
        vm.push_input(np.array(PROMPT[:7], np.int64))
        return [int.from_bytes(item, "little", signed=True) for item in vm.output("TOKENS")] + [vm.get("rPos")]
    states = {name: value for name, value in states_after(model, PROMPT[:20]).items() if name.startswith("S")}
    assert turns(20, states) == turns(0, {})


def test_states_are_put_in_and_taken_out(folder):
    model = model_of(folder, "jamba/F32")
    text = model.start(PROMPT, GREEDY)
    assert text.vm.states(KVStream, CellState) == {} and text.vm.state("S0") is None
    found = {name: v for name, v in states_after(model, PROMPT).items() if name.startswith("S")}
    assert {type(v) for v in found.values()} == {KVStream, CellState}
    text.vm.set_state("sKV", found["S1"])
    assert text.vm.state("sKV") is found["S1"] and text.vm.states(KVStream) == {"S1": found["S1"]}
    text.vm.set_state("sKV", None)
    assert text.vm.state("sKV") is None and text.vm.get("sKV") is None
    with pytest.raises(UserError, match="sKV: a state that `VM.state` gave is expected, got int"):
        text.vm.set_state("sKV", 3)
    with pytest.raises(UserError, match="rPos: is R.*, which holds no state; states are in S0 to S63"):
        text.vm.state("rPos")
