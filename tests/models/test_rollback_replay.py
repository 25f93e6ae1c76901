"""Going back and computing again gives the transcript of a straight run: a transformer, an MLA model, a Mamba and
hybrids, greedy and sampled, back to random points among the tokens and in the middle of the prompt."""
from __future__ import annotations

import hashlib
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from m3jit.api.generation import LanguageModel, Settings
from m3jit.isa.cells import CellState
from m3jit.isa.kv import KVStream
from m3jit.models.program import Options
from m3jit.models.provider import Models

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import make_tiny_architectures  # noqa: E402  (found through the path set above)
import make_tiny_deepseek  # noqa: E402
import make_tiny_recurrent  # noqa: E402

PROMPT = [int(t) for t in np.random.default_rng(11).integers(4, 200, 37)]
FAMILIES = {"llama3/Q8_0": make_tiny_architectures, "plain/new/F32": make_tiny_deepseek,
            "mamba/F32": make_tiny_recurrent,
            "granitehybrid/F32": make_tiny_recurrent}
SETTINGS = {"greedy": Settings(max_tokens=9, temperature=0.0),
            "sampled": Settings(max_tokens=9, temperature=1.1, top_k=0, seed=4, repeat_penalty=1.2)}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LanguageModel]:
    folder, made = tmp_path_factory.mktemp("transcripts"), Models()
    return {name: LanguageModel(str(make.build(folder, name)), made, threads=1, options=Options(chunk=8))
            for name, make in FAMILIES.items()}


class Played:
    """A run of the hosted program from one poll point to the next; `said` holds the tokens it streamed."""

    def __init__(self, model: LanguageModel, settings: Settings):
        self.vm = model.start(PROMPT, settings).vm
        self.said: list[Any] = []
        self.vm.set_sink("TOKENS", self.said.append)

    def step(self) -> bool:
        """To the next poll point; False: the program has ended."""
        main = self.vm.main
        if main.status == "ready":
            self.vm.interpreter.run(main, 1)
            assert main.trap is None, main.trap
        return main.status == "ready"

    def transcript(self) -> str:
        """Hash of the tokens, the last logits, the random stream and every state."""
        h = hashlib.sha256(repr([bytes(b) if isinstance(b, (bytes, bytearray)) else b for b in self.said]).encode())
        h.update(self.vm.get("rLogits").tobytes() + repr(self.vm.main.rng).encode())
        for name, state in sorted(self.vm.states(KVStream, CellState).items()):
            h.update(name.encode())
            if isinstance(state, KVStream):
                for layer in sorted(state.layers):
                    h.update(b"".join(a.tobytes() for a in state.rows(layer)))
            else:
                for key in sorted(state.shapes):
                    h.update(repr(key).encode() + state.array(*key).tobytes())
        return h.hexdigest()


def straight(model: LanguageModel, settings: Settings) -> tuple[str, int, int]:
    """(transcript, poll points, those in the prompt)."""
    played, points, early = Played(model, settings), 0, 0
    while played.step():
        points += 1
        early += not played.said
    return played.transcript(), points, early


def with_rollbacks(model: LanguageModel, settings: Settings, places: list[tuple[int, int]]) -> tuple[str, int]:
    """(the transcript of a run that at each place goes on some poll points and then back to it, how often it did)."""
    played, at, done = Played(model, settings), 0, 0
    todo = dict(places)
    while True:
        back = todo.pop(at, 0)
        if back:
            kept, said = played.vm.fork(), len(played.said)
            for _ in range(back):
                if not played.step():
                    break
            played.vm.abort(kept, resume=True)
            del played.said[said:]
            done += 1
        if not played.step():
            return played.transcript(), done
        at += 1


@pytest.mark.parametrize("how", SETTINGS)
@pytest.mark.parametrize("name", FAMILIES)
def test_going_back_and_again_gives_the_straight_transcript(name, how, models):
    model, settings = models[name], SETTINGS[how]
    wanted, points, early = straight(model, settings)
    rng = random.Random(f"{name} {how}")
    places = [(rng.randrange(1, early), rng.randrange(1, 6)), (early - 1, 4)]
    places += [(rng.randrange(early, points), rng.randrange(1, 12)) for _ in range(4)]
    found, done = with_rollbacks(model, settings, places)
    assert early > 3 and points > early + 8 and done == len(dict(places))
    assert found == wanted
