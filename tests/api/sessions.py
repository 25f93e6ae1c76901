"""Sessions with the embedded model and with recurrent ones, for the tests of sessions."""
from __future__ import annotations

import sys
from pathlib import Path
from random import Random
from typing import Any

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


def change(what: str, made: list[Session], one: Session, kept: list[Any], random: Random, forks: int,
           appended: int) -> None:
    """One random change of a session, if it can be made now.  made: it and its forks, at most `forks` in all; kept:
    their snapshots; appended: most tokens at once."""
    size = len(one.tokens)
    if what == "rollback" and size:
        one.rollback(to_token=random.randint(max(1, size - 30), size))
    elif what in ("inject", "append") and size < one.context - 80:
        most = appended if what == "append" else 6
        getattr(one, what)([random.randint(5, 200) for _ in range(random.randint(1, most))])
    elif what == "fork" and len(made) < forks:
        made.append(one.fork())
    elif what == "undo":
        one.undo()
    elif what == "snapshot":
        kept.append(one.snapshot())
    elif what == "restore" and kept:
        one.restore(random.choice(kept))
