"""Random requests to a server whose index and kept responses are always too small: texts, alternatives, edits of what
runs and of what has ended, clients that go away.  Every text is what a machine alone gives, and nothing stays
behind."""
from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the extra `serve` is not installed")
pytest.importorskip("uvicorn", reason="the extra `serve` is not installed")

from m3jit.api.generation import Generation, load_model  # noqa: E402
from m3jit.serve.app import Limits  # noqa: E402
from tests.serve.client import PLAIN, Running, running, wait_for  # noqa: E402

WORDS = "She had been a friend and companion such as few possessed, intelligent and well informed in every way".split()


class Client:
    """One of several, with a random stream of its own."""

    def __init__(self, server: Running, seed: int):
        self.server, self.random, self.statuses = server, random.Random(seed), []
        self.known: list[str] = []

    def run(self, count: int) -> list[int]:
        for _ in range(count):
            self.random.choice((self.text, self.text, self.edit, self.edit, self.stream))()
        return self.statuses

    def body(self) -> dict[str, Any]:
        r = self.random
        prompt = " ".join(WORDS) * r.choice((0, 0, 4)) + " ".join(WORDS[:r.randint(2, 18)])
        return {"model": "default", "prompt": prompt + r.choice(("", ",", " and")),
                "n": r.choice((1, 1, 3)), "seed": r.randint(0, 3), "temperature": r.choice((0, 0.9)),
                "repeat_penalty": r.choice((1.0, 1.3)), "max_tokens": r.randint(1, 24)}

    def text(self) -> None:
        status, found = self.server.post(PLAIN, self.body())
        self.statuses.append(status)
        self.known.append(found["id"])

    def stream(self) -> None:
        """Its client reads a little, goes away or edits what runs."""
        connection, response = self.server.open_stream(PLAIN, self.body() | {"max_tokens": 60})
        line = response.readline()
        self.known.append(json.loads(line[6:])["id"])
        if self.random.random() < 0.5:
            self.edit(self.known[-1])
        response.close()
        connection.close()

    def edit(self, name: str | None = None) -> None:
        if not self.known:
            return
        r = self.random
        body = {"position": r.choice(({"token": r.randint(0, 12)},
                                      {"text": r.choice("eta"), "which": r.randint(1, 4)})),
                "text": r.choice(("", " and", " she said, \u2014", "x")), "n": r.choice((1, 1, 2)), "max_tokens": 10}
        status, found = self.server.post(f"{PLAIN}/{name or r.choice(self.known[-r.choice((1, 2, 20)):])}/edit", body)
        assert status in (200, 400, 410), found
        self.statuses.append(status)
        if status == 200:
            self.known.append(found["id"])


@pytest.mark.parametrize("clients, requests", [(4, 6), pytest.param(8, 100, marks=pytest.mark.slow)])
def test_every_text_is_what_it_is_alone(clients, requests):
    model, plain = load_model("default", threads=1, prefix_memory=600_000), load_model("default", threads=1)
    limits = Limits(drain=30.0, kept=12, kept_bytes=1_500_000)
    with running(model, batch=6, queue=200, limits=limits) as server:
        tickets, submit = [], server.engine.submit

        def noted(jobs: Any, places: Any = None) -> Any:
            found = submit(jobs, places)
            tickets.extend(found)
            return found
        server.engine.submit = noted
        with ThreadPoolExecutor(clients) as pool:
            statuses = sum(pool.map(lambda i: Client(server, i).run(requests), range(clients)), [])
        assert wait_for(server.nothing_left)
        assert statuses.count(200) > 4                 # how many edits come in time is the machine's matter
        assert server.metric("m3jit_prefix_bytes") <= 600_000 and server.metric("m3jit_kept_bytes") <= 1_500_000
        assert server.metric("m3jit_kept_responses") <= 12
        if requests > 50:
            assert server.metric("m3jit_prefix_hits_total") > 100 and server.metric("m3jit_edits_total") > 20
    expected: dict[Any, list[int]] = {}
    for ticket in tickets:
        key = (tuple(ticket.job.ids), ticket.job.settings)
        if key not in expected:
            alone = Generation(plain.start(*key))
            alone.result()
            expected[key] = alone.tokens
        assert ticket.tokens == expected[key][:len(ticket.tokens)]
        assert ticket.cancelled or ticket.stopped or ticket.tokens == expected[key]
