"""The layers of every form of a model's program run as compiled code, not instruction by instruction.

Code of a region ends at some instructions (a SLICE that starts at a register), and another region begins behind them.
What is interpreted gives the same bytes, so only counts tell.
"""
from __future__ import annotations

import numpy as np
import pytest

import m3jit
from m3jit.models.pooling import POOLINGS
from m3jit.vm.vm import VM

IDS = np.arange(1, 151, dtype=np.int64) % 250 + 1                # a prompt of three chunks
TEMPLATE = "{% for m in messages %}{{ m.content }}\n{% endfor %}"


@pytest.fixture(scope="module")
def model():
    return m3jit.load_model("default", backend="cpu", threads=1)


@pytest.fixture
def machines(monkeypatch) -> list[VM]:
    """The machines that are made during a test."""
    made: list[VM] = []
    init = VM.__init__
    monkeypatch.setattr(VM, "__init__", lambda vm, *a, **k: (made.append(vm), init(vm, *a, **k))[1])
    return made


def check(machines: list[VM]) -> None:
    [vm] = machines
    assert vm.regions.retired > 0.75 * vm.retired, f"{vm.regions.retired} of {vm.retired} instructions were compiled"


@pytest.mark.parametrize("logprobs", [None, 3])
def test_generating(machines, logprobs):
    fresh = m3jit.load_model("default", backend="cpu", threads=1)
    fresh.generate(IDS, max_tokens=20, temperature=0, logprobs=logprobs).result()
    check(machines)


def test_scoring(model, machines):
    model.score(IDS)
    check(machines)


def test_conversations(model, machines):
    talk = m3jit.Conversation(model, chat_template=TEMPLATE, max_tokens=10, temperature=0)
    for text in ("Hello there", "And you?"):
        "".join(talk.say(text))
    check(machines)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_vectors_of_a_model_that_generates(machines, pooling):
    m3jit.load_embedder("default", backend="cpu", threads=1, pooling=pooling).rows(IDS)
    check(machines)
