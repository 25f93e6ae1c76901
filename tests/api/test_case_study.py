"""The case study of docs/correcting.md: a model takes a wrong turn, is corrected in mid-sentence, and goes on."""
from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from m3jit.api.generation import load_model
from m3jit.errors import UserError

EXAMPLE = Path(__file__).parents[2] / "examples" / "correct.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("correct_example", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def study(example, model, prompt: str, wrong: str, right: str) -> str:
    """The corrected text, after checks of all that is counted."""
    session = example.begin(model, prompt)
    shown: list[str] = []
    found = example.correct(session, wrong, right, shown.append, tokens=40)
    assert found is not None and wrong in "".join(shown) and wrong not in session.text and right in session.text
    assert found.kept > 0 and found.taken_back > 0 and found.injected <= found.evaluated <= found.injected + 1
    assert min(found.detection, found.rollback, found.resume) > 0
    at = session.start + found.kept + found.injected
    begun = model.decode(session.tokens[session.start:at])
    assert begun.endswith(right)
    fresh = model.generate(session.tokens[:at], temperature=0, max_tokens=len(session.tokens) - at)
    assert begun + fresh.result() == session.text and tuple(fresh.tokens) == session.tokens[at:]
    straight = example.begin(model, prompt)            # what came before the wrong turn is what it was
    for _ in straight.generate(found.kept + found.taken_back):
        pass
    assert straight.tokens[:session.start + found.kept] == session.tokens[:session.start + found.kept]
    assert session.undo() and session.text == straight.text
    return session.text


def test_the_embedded_model(example):
    text = study(example, load_model("default", threads=1), "It is a truth universally acknowledged, that", "good man",
                 "clever woman")
    assert text.endswith("good man")


@pytest.mark.slow
def test_smollm2(example):
    """pytest -m slow tests/api/test_case_study.py, with SmolLM2 obtained or named by M3JIT_TEST_SMOLLM2."""
    reference = os.environ.get("M3JIT_TEST_SMOLLM2") or "smollm2"
    try:
        model = load_model(reference)
    except UserError as error:
        pytest.skip(f"SmolLM2 is not here ({error}): m3jit model get smollm2, or set M3JIT_TEST_SMOLLM2")
    text = study(example, model, "Who wrote the novel Emma, and what is it about?", "Emma Stone", "Jane Austen")
    assert text.endswith("Emma Stone")
