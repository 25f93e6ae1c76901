"""Edits by the engine, for every family of models: what is computed before a text goes on, and that it is what
computing everything gives.  Without an index, so that the response's own states serve."""
from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("starlette", reason="the extra `serve` is not installed")

from m3jit.api.generation import Generation, LanguageModel, Settings  # noqa: E402
from m3jit.models.program import CHUNK, Options  # noqa: E402
from m3jit.models.provider import Models  # noqa: E402
from m3jit.serve import editing  # noqa: E402
from m3jit.serve.engine import Engine, Fork, Job, Ticket  # noqa: E402
from tests.models.families import RECURRENT, build  # noqa: E402

PROMPT = [int(t) for t in np.random.default_rng(8).integers(4, 200, 30)]
SETTINGS = Settings(max_tokens=80, temperature=1.1, top_k=0, seed=4, repeat_penalty=1.2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("editing")


class Errors(list):
    """What clients were told."""

    def deliver(self, pieces: Any, error: Any, ended: bool) -> None:
        if error is not None:
            self.append(error)


def finished(engine: Engine, jobs: list[Job]) -> list[Ticket]:
    errors = Errors()
    tickets = engine.submit([replace(job, deliver=errors.deliver) for job in jobs])
    for ticket in tickets:
        assert ticket.done.wait(120)
    assert not errors
    return tickets


@pytest.mark.parametrize("name", ["llama3/Q8_0", pytest.param("plain/new/F32", marks=pytest.mark.slow), *RECURRENT])
def test_edits_and_alternatives(name, folder):
    model = LanguageModel(str(build(folder, name)), Models(), threads=1, options=Options())
    recurrent, engine = name in RECURRENT, Engine(model)
    try:
        whole, other = finished(engine, [Job(PROMPT, replace(SETTINGS, seed=seed), lambda *found: None, random=(seed,),
                                             fork=fork, remember=True) for fork in [Fork()] for seed in (4, 5)])
        assert other.reused == len(PROMPT) and whole.reused == 0
        for ticket, seed in ((whole, 4), (other, 5)):
            alone = Generation(model.start(PROMPT, replace(SETTINGS, seed=seed)))
            alone.result()
            assert ticket.tokens == alone.tokens
        long = len(whole.tokens)
        assert long > (70 if recurrent else 15), "a text that is long enough for a state behind a chunk"
        for kept in (0, long // 3, long - 12):
            for text in ("", " and then"):
                asked = editing.EditRequest(None, 0, text, False, False, 2, token=kept)
                edit = editing.plan(model, whole, asked)
                jobs = edit.jobs(model, whole, 2)
                first, second = finished(engine, jobs)
                computed = len(first.job.ids) - first.reused - len(edit.injected)
                assert computed <= (CHUNK if recurrent else 1)
                assert recurrent or text or computed == min(kept, 1)
                assert second.reused == len(first.job.ids), "the alternatives begin where they part"
                for ticket, job in ((first, jobs[0]), (second, jobs[1])):
                    plain = Generation(model.start(job.ids, job.settings))
                    plain.result()
                    assert ticket.tokens == plain.tokens, (kept, text)
                if not text:
                    assert first.tokens == whole.tokens[kept:]
                again = editing.plan(model, first, replace(asked, token=kept))
                assert again.kept == edit.kept and again.random[:kept + 1] == edit.random[:kept + 1]
    finally:
        engine.close()
