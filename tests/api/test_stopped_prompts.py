"""A prompt that is stopped between two of its chunks: its states serve, and no logits of other tokens go with them."""
from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import m3jit
from m3jit.api.generation import Generation, LanguageModel, Settings
from m3jit.models.prefix_index import PrefixIndex
from m3jit.models.program import Options
from m3jit.models.provider import Models
from tests.models.families import build

IDS = [int(t) for t in np.random.default_rng(8).integers(4, 200, 120)]
FIRST, CHUNK = 20, 8                # tokens of the prompt before; of a chunk


@pytest.fixture(scope="module", params=["llama3/Q8_0", "jamba/F32"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build(tmp_path_factory.mktemp("stopped"), request.param))


def model_of(path: str, prefixes: PrefixIndex | None = None) -> LanguageModel:
    return LanguageModel(path, Models(), threads=1, options=Options(chunk=CHUNK), prefixes=prefixes)


def following(session: m3jit.Session, count: int = 4) -> list[int]:
    return [token for piece in session.generate(count) for token in piece.tokens]


def stop_behind(vm: Any, chunks: int) -> None:
    """Interrupt a machine when so many chunks of its prompt are done."""
    left = [chunks]

    def mark(item: bytes) -> None:
        left[0] -= 1
        if left[0] == 0:
            vm.interrupt()
    vm.set_sink("MARKS", mark)
    vm.set("rMarks", 1)


def stopped(model: LanguageModel, monkeypatch: pytest.MonkeyPatch, chunks: int) -> tuple[m3jit.Session, int]:
    """A session whose second prompt was stopped behind so many chunks; the tokens that its states hold."""
    made = m3jit.Session(model, IDS[:FIRST], temperature=0)
    following(made, 3)
    made.append(IDS[FIRST:80])
    machine = made._machine
    entered = machine.enter

    def enter(*arguments: Any) -> None:
        entered(*arguments)
        stop_behind(machine.vm, chunks)
    with monkeypatch.context() as patch:
        patch.setattr(machine, "enter", enter)
        assert following(made) == [] and made.finish_reason == "cancelled"
    rows = made.snapshot().latest.rows
    assert rows == 22 + chunks * CHUNK < len(made.tokens)
    return made, rows


@pytest.mark.parametrize("chunks", [1, 3])
def test_a_session_that_goes_back_to_where_its_prompt_was_stopped(path, chunks, monkeypatch, tmp_path):
    made, rows = stopped(model_of(path), monkeypatch, chunks)
    assert made.snapshot().latest.logits is None
    made.save(tmp_path / "store")
    expected = following(m3jit.Session(model_of(path), made.tokens[:rows], temperature=0))
    whole = following(m3jit.Session(model_of(path), made.tokens, temperature=0))
    loaded = m3jit.Session(model_of(path), temperature=0)
    loaded.load(tmp_path / "store")
    for each in (made.fork(), loaded):
        each.rollback(to_token=rows)
        assert each.waiting >= 1, "what follows was never computed"
        assert following(each) == expected
    assert following(made) == whole


def test_another_text_that_begins_like_a_stopped_prompt(path, monkeypatch):
    known = model_of(path, PrefixIndex())
    made, rows = stopped(known, monkeypatch, 2)
    for total in (rows, rows + 1, len(made.tokens)):
        expected = following(m3jit.Session(model_of(path), made.tokens[:total], temperature=0))
        assert following(m3jit.Session(known, made.tokens[:total], temperature=0)) == expected


def test_a_served_text_that_is_stopped_in_its_prompt(path):
    """As the server runs texts: one begins behind states with logits, and is stopped before its own are computed."""
    known, settings, kept = model_of(path, PrefixIndex()), Settings(max_tokens=4, temperature=0.0), []
    Generation(known.start(IDS[:FIRST], settings)).result()
    text = known.start(IDS[:80], settings, keep=lambda ids, found: kept.append(found))
    assert text.reused_tokens == FIRST
    stop_behind(text.vm, 2)
    generation = Generation(text)
    assert generation.result() == "" and generation.finish_reason == "cancelled"
    rows = FIRST + 2 * CHUNK
    assert kept[-1].rows == text.vm.get("rPos") == rows and kept[-1].logits is None
    assert text.vm.get("rLogits") is None
    for total in (rows, rows + 1, 80):
        expected = Generation(model_of(path).start(IDS[:total], settings))
        found = Generation(known.start(IDS[:total], settings))
        assert (found.result(), found.tokens) == (expected.result(), expected.tokens)
