"""Sessions with the embedded model and with recurrent ones, for the tests of sessions."""
from __future__ import annotations

import sys
from pathlib import Path

import pytest

from m3jit.api.generation import load_model
from m3jit.api.session import Session

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import make_tiny_recurrent  # noqa: E402  (found through the path set above)

PROMPT = "It is a truth universally acknowledged, that"
SAMPLED = {"temperature": 0.9, "seed": 5, "repeat_penalty": 1.2}


@pytest.fixture(scope="module")
def model():
    return load_model("default", threads=1)


@pytest.fixture(scope="module", params=["mamba/F32", "jamba/Q8_0"])
def recurrent(request, tmp_path_factory):
    """A model, and a seed with which its text goes on for 40 tokens."""
    path = make_tiny_recurrent.build(tmp_path_factory.mktemp("recurrent"), request.param)
    return load_model(path, threads=1), {"mamba/F32": 3, "jamba/Q8_0": 0}[request.param]


def session(model, prompt=PROMPT, **more) -> Session:
    return Session(model, prompt, **{"temperature": 0} | more)


def run(session: Session, tokens: int | None = None) -> str:
    return "".join(piece.text for piece in session.generate(tokens))
