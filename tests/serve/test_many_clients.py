"""Crowds of clients at once, on all paths: each gets its text or a clear refusal, and nothing stays behind."""
from __future__ import annotations

import gc
import http.client
import json
import os
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the extra `serve` is not installed")
pytest.importorskip("uvicorn", reason="the extra `serve` is not installed")

from tests.serve.client import CHAT, PLAIN, Gate, Running, chat_body, events, running, wait_for  # noqa: E402

OPEN = Path("/proc/self/fd")
pytestmark = pytest.mark.skipif(not OPEN.is_dir(), reason="this system does not list the files a process has open")
SEEDS, TOKENS = 8, 12
STACK = 1 << 18                                        # bytes of a client's: these threads are not the server's
WAYS = ("completion", "streamed completion", "chat", "streamed chat", "gone in the middle", "vectors")


def open_files() -> tuple[int, int]:
    """(descriptors, sockets among them) of this process."""
    count = sockets = 0
    for name in os.listdir(OPEN):
        try:
            sockets += os.readlink(OPEN / name).startswith("socket:")
        except OSError:                                # the one that listed them
            continue
        count += 1
    return count, sockets


def resident() -> int:
    """Bytes of memory this process takes, without mapped files."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) << 10


def body(way: str, seed: int) -> tuple[str, dict[str, Any]]:
    """(path, body) of a request."""
    more = {"max_tokens": TOKENS, "seed": seed, "temperature": 0.9}
    if way == "vectors":
        return "/v1/embeddings", {"model": "default", "input": f"a river {seed}"}
    if "chat" in way:
        return CHAT, chat_body(**more, stream=way.startswith("streamed"))
    return PLAIN, {"model": "default", "prompt": "She had been", **more, "stream": way != "completion"}


def ask(server: Running, way: str, seed: int) -> tuple[int, Any]:
    """(status, what it got): a text, vectors, an error's message, or None where it went away."""
    path, asked = body(way, seed)
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=600)
    try:
        connection.request("POST", path, json.dumps(asked).encode())
        response = connection.getresponse()
        if response.status != 200:
            return response.status, json.loads(response.read())["error"]["message"]
        if way == "gone in the middle":
            response.readline()
            response.close()
            return 200, None
        return 200, said(way, response.read())
    finally:
        connection.close()


def said(way: str, data: bytes) -> Any:
    """The text (the vectors) of an answer."""
    if not way.startswith("streamed"):
        found = json.loads(data)
        choice = found["choices"][0] if way != "vectors" else None
        return found["data"][0]["embedding"] if choice is None else choice.get("text") or choice["message"]["content"]
    chunks = events(data)
    assert chunks.pop() is None, chunks
    choices = [chunk["choices"][0] for chunk in chunks]
    return "".join(c.get("text") or c.get("delta", {}).get("content") or "" for c in choices)


def crowd(server: Running, count: int) -> list[tuple[str, int, int, Any]]:
    """(way, seed, status, what it got) of clients that all begin at one moment."""
    answers: list[tuple[str, int, int, Any]] = []
    start = threading.Barrier(count, timeout=600)

    def client(i: int) -> None:
        way, seed = WAYS[i % len(WAYS)], i // len(WAYS) % SEEDS
        start.wait()
        answers.append((way, seed, *ask(server, way, seed)))
    clients = [threading.Thread(target=client, args=(i,), daemon=True) for i in range(count)]
    before = threading.stack_size(STACK)
    try:
        for c in clients:
            c.start()
    finally:
        threading.stack_size(before)
    for c in clients:
        c.join(900)
    return answers


def check(server: Running, count: int, answers: list[tuple[str, int, int, Any]], alone: dict[tuple[str, int], Any],
          most: tuple[int, int]) -> Counter:
    """Everyone got what there is for it alone, or was told to come again; nothing is left.  How many got what."""
    assert len(answers) == count
    for way, seed, status, found in answers:
        assert status in (200, 429), (way, status, found)
        if status == 429:
            assert "try again in" in found, found
        elif way != "gone in the middle":
            assert found == alone[way, seed], (way, seed)
    assert wait_for(server.nothing_left) and server.server.vectors.present == 0
    assert wait_for(lambda: all(now <= was for now, was in zip(open_files(), most))), (open_files(), most)
    assert server.text(seed=3, max_tokens=TOKENS, temperature=0.9) == alone["completion", 3]
    return Counter((way, status) for way, _, status, _ in answers)


def answers_alone(server: Running) -> dict[tuple[str, int], Any]:
    """What each gets by itself.  Afterwards all that is made once is there: threads, code, files."""
    found = {(way, seed): ask(server, way, seed)[1] for way in WAYS for seed in range(SEEDS)}
    assert found["completion", 1] == found["streamed completion", 1] != found["completion", 2]
    assert found["chat", 1] == found["streamed chat", 1] and wait_for(server.nothing_left)
    return found


def test_a_crowd(model):
    """More than there are places, on all paths: as many as fit are served, exactly the others are refused."""
    with running(model, batch=4, queue=8) as server:
        alone, before, rejected = answers_alone(server), open_files(), server.metric("m3jit_rejected_total")
        gate = Gate(server.engine)
        texts = 60 * 5 // 6                            # the others ask for vectors

        def full() -> bool:
            return server.engine.active + server.engine.waiting == 12 and \
                server.metric("m3jit_rejected_total") - rejected >= texts - 12

        reached: list[bool] = []

        def release() -> None:
            try:
                reached.append(wait_for(full))
            finally:                                   # whatever happens, nobody waits for ever
                gate.release()
        releasing = threading.Thread(target=release)
        releasing.start()
        counts = check(server, 60, crowd(server, 60), alone, before)
        releasing.join(180)
        assert reached == [True], "the places and the queue never filled"
        assert sum(n for (way, status), n in counts.items() if status == 200 and way != "vectors") == 12
        assert counts["vectors", 200] >= 4, "as many as may wait for vectors"


@pytest.mark.slow
@pytest.mark.parametrize("queue, served", [(64, 80), (1000, 834)])
def test_a_thousand_clients(model, queue, served):
    """With few places, and with one for everybody; three times: what the first crowd needed is there for the next."""
    import resource
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    try:
        with running(model, batch=16, queue=queue) as server:
            alone, before, threads = answers_alone(server), open_files(), threading.active_count()
            memory = []
            for _ in range(3):
                counts = check(server, 1000, crowd(server, 1000), alone, before)
                print(f"\n1,000 clients at once: {dict(counts)}")
                assert sum(n for (way, status), n in counts.items() if status == 200 and way != "vectors") >= served
                gc.collect()
                memory.append(resident())
            print(f"memory after each crowd, MB: {[n >> 20 for n in memory]}")
            assert memory[2] < memory[0] + (32 << 20), "it grows with the clients"
            assert wait_for(lambda: threading.active_count() <= threads + 48)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
