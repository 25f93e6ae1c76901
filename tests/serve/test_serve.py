"""The server over a real socket: many texts at once, clients that go away, limits, and the end."""
from __future__ import annotations

import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the extra `serve` is not installed")
pytest.importorskip("uvicorn", reason="the extra `serve` is not installed")

from m3jit.api.generation import Settings  # noqa: E402
from m3jit.backends.cpu.engine import BoundBatch  # noqa: E402
from m3jit.models.program import CHUNK  # noqa: E402
from m3jit.serve.engine import Engine, Job, ignore  # noqa: E402
from m3jit.vm.jit import Compiler  # noqa: E402
from tests.serve.client import CHAT, PLAIN, Gate, chat_body, events, half_a_request, running, wait_for  # noqa: E402

PROMPTS = ["She had been", "Emma was", "The carriage stopped", "It is a truth", "He said", "My dear", "There was",
           "In town"]


# -- many together ----------------------------------------------------------------------------------------------------

def test_sixteen_really_run_together(model):
    """In one batch, by the engine's own count, and each as alone."""
    with running(model, batch=16) as server:
        gate = Gate(server.engine)
        with ThreadPoolExecutor(16) as pool:
            futures = [pool.submit(server.text, prompt=PROMPTS[i % 8], seed=i, temperature=i % 3 / 2)
                       for i in range(16)]
            assert wait_for(lambda: server.engine.active == 16)
            gate.release()
            together = [f.result() for f in futures]
        assert together == [server.text(prompt=PROMPTS[i % 8], seed=i, temperature=i % 3 / 2) for i in range(16)]
        largest = server.metric('m3jit_batch_size_bucket{le="16"}') - server.metric('m3jit_batch_size_bucket{le="8"}')
        assert largest >= 16 and server.engine.batch_stats["entries"] > 16 * 16
        assert wait_for(server.nothing_left)


def test_texts_join_and_leave(model):
    """A text is the same whoever comes and goes beside it."""
    with running(model, batch=4) as server:
        gate = Gate(server.engine)
        with ThreadPoolExecutor(8) as pool:
            first = pool.submit(server.text, seed=5, max_tokens=40)
            assert wait_for(lambda: server.engine.active == 1)
            gate.rounds(10)
            assert wait_for(lambda: not gate.permits._value), "the first one alone has made them"
            others = [pool.submit(server.text, seed=i, max_tokens=3 + i) for i in range(6)]
            assert wait_for(lambda: server.engine.active + server.engine.waiting == 7)
            gate.release()
            found = [first.result(), *(f.result() for f in others)]
        assert found == [server.text(seed=5, max_tokens=40), *(server.text(seed=i, max_tokens=3 + i) for i in range(6))]


def test_choices_have_seeds_of_their_own(server):
    status, found = server.post(PLAIN, {"model": "default", "prompt": PROMPTS[:2], "n": 2, "seed": 7, "max_tokens": 8})
    assert status == 200 and found["seeds"] == [7, 8, 7, 8]
    texts = [c["text"] for c in sorted(found["choices"], key=lambda c: c["index"])]
    assert texts == [server.text(prompt=p, seed=s, max_tokens=8) for p in PROMPTS[:2] for s in (7, 8)]


def test_a_text_without_a_seed_can_be_had_again(server):
    _, found = server.post(PLAIN, {"model": "default", "prompt": "She", "max_tokens": 12})
    _, other = server.post(PLAIN, {"model": "default", "prompt": "She", "max_tokens": 12})
    assert found["seeds"] != other["seeds"]
    assert server.text(prompt="She", max_tokens=12, seed=found["seeds"][0]) == found["choices"][0]["text"]


# -- clients that go away ---------------------------------------------------------------------------------------------

@pytest.mark.parametrize("path, body", [(CHAT, chat_body(max_tokens=400)),
                                        (PLAIN, {"model": "default", "prompt": "She", "max_tokens": 400})])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_leaves_nothing(model, path, body, stream):
    """In the middle of its text and of another one, which says what it says alone."""
    with running(model) as server:
        alone, made, gate = server.text(seed=5, max_tokens=60), server.made, Gate(server.engine)
        with ThreadPoolExecutor(1) as pool:
            neighbour = pool.submit(server.text, seed=5, max_tokens=60)
            assert wait_for(lambda: server.engine.active == 1)
            if stream:
                connection, response = server.open_stream(path, body)
            else:
                import http.client
                connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
                connection.request("POST", path, json.dumps(body).encode())
            assert wait_for(lambda: server.engine.active == 2)
            ticket = next(t for t in server.engine._active if t.job.settings.max_tokens == 400)
            assert wait_for(lambda: gate.one_more() or len(ticket.tokens) > 1)
            if stream:
                assert response.readline().startswith(b"data: ")
            (response if stream else connection).close()
            connection.close()
            assert wait_for(lambda: ticket.cancelled), "nobody noticed"
            assert wait_for(lambda: gate.one_more() or ticket.done.is_set()), "it went on without its client"
            assert wait_for(lambda: server.engine.active == 1) and not neighbour.done()
            gate.release()
            assert neighbour.result() == alone
        assert wait_for(server.nothing_left) and server.metric("m3jit_cancelled_total") == 1
        assert ticket.finish_reason == "cancelled" and 1 < len(ticket.tokens) < 16
        assert server.made == 2 * made + len(ticket.tokens)
        assert server.text(seed=5, max_tokens=60) == alone             # and the server goes on


@pytest.mark.parametrize("way, reason", [("cancel", "cancelled"), ("stop", "edited")])
def test_a_long_prompt_is_left_in_the_middle(model, monkeypatch, way, reason):
    """It ends when its work is dropped, not with the others' round; those compute theirs again, and say the same."""
    prompts = [model.encode(f"{first} " + "and a very fine day " * 40) for first in ("It", "She", "Who")]
    jobs = [Job(ids, Settings(max_tokens=6, seed=3), ignore) for ids in prompts]
    engine, run, ended = Engine(model), BoundBatch.__call__, []
    tickets: list[Any] = []

    def entered(bound: BoundBatch) -> None:
        if len(bound.frames) > 1 and tickets:
            ended.append(tickets[0].done.is_set())
            if len(ended) == 2:
                getattr(tickets[0], way)()
        run(bound)
    monkeypatch.setattr(BoundBatch, "__call__", entered)
    try:
        with engine._lock:                             # all three begin together
            tickets += engine.submit(jobs)
        assert all(t.done.wait(180) for t in tickets)
    finally:
        engine.close()
    assert ended[:3] == [False, False, True] and tickets[0].finish_reason == reason and tickets[0].tokens == []
    for ticket, ids in zip(tickets[1:], prompts[1:]):
        alone = model.generate(ids, max_tokens=6, seed=3)
        alone.result()
        assert ticket.tokens == alone.tokens and ticket.finish_reason == "length"


def test_a_client_that_goes_away_while_it_waits(model):
    with running(model, batch=1, queue=4) as server:
        gate = Gate(server.engine)
        first, _ = server.open_stream(PLAIN, {"model": "default", "prompt": "She", "max_tokens": 3})
        second, _ = server.open_stream(PLAIN, {"model": "default", "prompt": "She", "max_tokens": 3})
        assert wait_for(lambda: server.engine.active == 1 and server.engine.waiting == 1)
        _.close()
        second.close()
        assert wait_for(lambda: server.engine.waiting == 0) and server.engine.active == 1
        assert wait_for(lambda: len(server.kept._ended) == 1), "it is kept as one that has ended"
        gate.release()
        assert wait_for(server.idle)
        first.close()


def test_a_client_that_goes_away_before_its_request_is_here(model):
    with running(model) as server:
        half_a_request(server.port).close()
        line = f'm3jit_requests_total{{path="{PLAIN}",status='
        assert wait_for(lambda: line in server.request("GET", "/metrics")[2].decode())
        assert server.metric(line) == server.metric(line + '"499"') == 1, "counted as an error of the server"


# -- limits -----------------------------------------------------------------------------------------------------------

def test_a_full_queue_refuses(model):
    with running(model, batch=1, queue=2) as server:
        gate = Gate(server.engine)
        with ThreadPoolExecutor(3) as pool:
            futures = [pool.submit(server.text, seed=1) for _ in range(3)]
            assert wait_for(lambda: server.engine.active == 1 and server.engine.waiting == 2)
            status, headers, data = server.request("POST", PLAIN, {"model": "default", "prompt": "She"})
            error = json.loads(data)["error"]
            assert status == 429 and int(headers["retry-after"]) >= 1
            assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
            assert "2 requests are waiting" in error["message"]
            assert server.metric("m3jit_queue_length") == 2 and server.metric("m3jit_rejected_total") == 1
            gate.release()
            assert len({f.result() for f in futures}) == 1
        assert server.text(seed=1) == futures[0].result()


def test_more_choices_than_fit_are_refused_whole(model):
    with running(model, batch=1, queue=1) as server:
        status, found = server.post(PLAIN, {"model": "default", "prompt": "She", "n": 3})
        assert status == 400 and server.idle() and "n: 3 texts in one request" in found["error"]["message"]
        assert "this server has 2 places (--batch 1 and --queue 1); ask for 2 at most" in found["error"]["message"]
        found = server.post(PLAIN, {"model": "default", "prompt": ["She"] * 3})[1]["error"]
        assert found["param"] == "prompt" and found["message"].startswith("prompt: 3 texts in one request")
        gate = Gate(server.engine)
        with ThreadPoolExecutor(1) as pool:
            one = pool.submit(server.text)
            assert wait_for(lambda: server.engine.active == 1)
            assert server.post(PLAIN, {"model": "default", "prompt": "She", "n": 2})[0] == 429
            assert server.engine.waiting == 0
            gate.release()
            assert one.result()


def test_api_keys(model):
    with running(model, keys=("first", "second")) as server:
        for headers, message in (({}, "is missing"), ({"Authorization": "Bearer wrong"}, "is not one"),
                                 ({"Authorization": "Basic first"}, "is not one")):
            status, found = server.post(CHAT, chat_body(), **headers)
            assert status == 401 and message in found["error"]["message"]
            assert found["error"]["code"] == "invalid_api_key"
        for key in ("first", "second"):
            assert server.post(CHAT, chat_body(), Authorization=f"Bearer {key}")[0] == 200
        assert server.request("GET", "/health")[0] == 200 and server.request("GET", "/metrics")[0] == 401


# -- errors in the middle ---------------------------------------------------------------------------------------------

def test_an_error_of_one_text_is_that_texts_own(model, monkeypatch):
    """A machine that traps in the middle: its client is told, the others are unharmed."""
    with running(model) as server:
        gate, start = Gate(server.engine), server.engine.model.start

        def spoiled(ids, settings, **more):
            text = start(ids, settings, **more)
            if settings.seed == 13:
                text.vm.set("rTemp", -1.0)
            return text
        server.engine.model.start = spoiled
        with ThreadPoolExecutor(2) as pool:
            good = pool.submit(server.text, seed=1)
            bad = pool.submit(server.post, PLAIN, {"model": "default", "prompt": "She", "seed": 13})
            assert wait_for(lambda: server.engine.active == 2)
            gate.release()
            status, found = bad.result()
            assert status in (400, 500) and "SAMPLE TEMP is -1" in found["error"]["message"]
            assert good.result() == server.text(seed=1)
        connection, response = server.open_stream(PLAIN, {"model": "default", "prompt": "She", "seed": 13})
        assert response.status == 200 and "SAMPLE TEMP" in events(response.read())[-1]["error"]["message"]
        connection.close()
        assert wait_for(server.nothing_left)


def test_an_error_of_the_batch_itself(model):
    """Its texts begin again where they were, each by itself: the one that is the cause fails alone, the others say
    what they would have said, with all settings that look back."""
    bodies = [{"prompt": "She", "seed": 3, "temperature": 1.0, "repeat_penalty": 1.3, "max_tokens": 30},
              {"prompt": "Emma was naïve 😀", "seed": 4, "temperature": 1.4, "logprobs": 2, "max_tokens": 25},
              {"prompt": "He said", "temperature": 0, "stop": "the", "max_tokens": 60}]
    with running(model) as server:
        expected = [server.post(PLAIN, {"model": "default", **body}) for body in bodies]
        gate = Gate(server.engine)

        def broken() -> bool:
            raise RuntimeError("broken")
        with ThreadPoolExecutor(4) as pool:
            futures = [pool.submit(server.post, PLAIN, {"model": "default", **body}) for body in bodies]
            bad = pool.submit(server.post, PLAIN, {"model": "default", "prompt": "It", "seed": 13})
            assert wait_for(lambda: server.engine.active == 4)
            gate.rounds(7)
            assert wait_for(lambda: not gate.permits._value)
            ticket = next(t for t in server.engine._active if t.job.settings.seed == 13)
            start = server.engine._start

            def spoiled(restarted: Any, before: Any = None) -> None:
                start(restarted, before)
                if restarted is ticket:
                    restarted.alone.step = broken
            server.engine._start = spoiled
            server.engine._batch.step = broken
            answers = [f.result() for f in futures]
            status, error = bad.result()
        for (_, was), (code, now) in zip(expected, answers):
            assert code == 200 and now["choices"] == was["choices"]
        assert status == 500 and "RuntimeError: broken" in error["error"]["message"]
        assert server.metric("m3jit_restarted_total") == 4
        assert server.text(seed=1) and wait_for(server.nothing_left)


def test_states_that_are_kept_make_room(model):
    """A text that finds no memory goes on when the index and the kept responses let theirs go; without them it
    fails."""
    from m3jit.api.generation import load_model
    from m3jit.errors import Trap
    with running(load_model("default", threads=1, prefix_memory=8 << 20)) as server:
        expected = server.text(prompt="Emma was a young woman of the village, and", seed=3)
        start, failures = server.engine.model.start, []

        def spoiled(ids, settings, **more):
            text = start(ids, settings, **more)
            advance = text.vm._slice

            def full(*given: Any) -> Any:
                if text.tokens and len(failures) < limit:
                    failures.append(text)
                    raise Trap("out of memory: no page for layer 1", 0)
                return advance(*given)
            text.vm._slice = full
            return text
        server.engine.model.start, limit = spoiled, 1
        name = next(iter(server.kept._all))
        assert server.text(prompt="Emma was a young woman of the village, and", seed=3) == expected
        assert len(failures) == 1
        status, found = server.post(f"{PLAIN}/{name}/edit", {"position": {"token": 0}})
        assert status == 410 and "a text needed its memory" in found["error"]["message"]
        failures.clear()
        limit = 2
        status, found = server.post(PLAIN, {"model": "default", "prompt": "She", "seed": 3})
        assert status == 500 and "out of memory: no page for layer 1" in found["error"]["message"]
        server.engine.model.start = start
        failures.clear()
        assert wait_for(server.nothing_left)


# -- health, metrics, the end -----------------------------------------------------------------------------------------

def test_health_and_metrics(server):
    status, _, data = server.request("GET", "/health")
    assert status == 200 and json.loads(data) == {"status": "ok", "active": 0, "waiting": 0}
    before = server.metric("m3jit_generated_tokens_total")
    server.text(max_tokens=5)
    assert server.metric("m3jit_generated_tokens_total") == before + 5
    _, headers, data = server.request("GET", "/metrics")
    assert headers["content-type"].startswith("text/plain; version=0.0.4")
    names = {}
    for line in data.decode().splitlines():
        if line.startswith("# TYPE"):
            _, _, name, kind = line.split()
            names[name] = kind
        elif not line.startswith("#"):
            name = re.fullmatch(r"(\w+?)(_bucket|_sum|_count)?(\{.*\})? [-+.e0-9]+", line)
            assert name, line
            assert name[1] in names or name[1] + (name[2] or "") in names, line
    assert names["m3jit_request_seconds"] == "histogram" and names["m3jit_active_texts"] == "gauge"
    assert f'm3jit_requests_total{{path="{PLAIN}",status="200"}}' in data.decode()


def test_an_end_waits_for_texts(model):
    with running(model, drain=60.0) as server:
        gate = Gate(server.engine)
        body = {"model": "default", "prompt": "She", "max_tokens": 5, "seed": 1}
        connection, response = server.open_stream(PLAIN, body)
        assert wait_for(lambda: server.engine.active == 1)
        stopping = threading.Thread(target=server.stop)
        stopping.start()
        gate.release()
        found = events(response.read())
        assert found[-1] is None and found[-2]["choices"][0]["finish_reason"] == "length"
        connection.close()
        stopping.join(180)
        assert not stopping.is_alive() and wait_for(server.nothing_left)


def test_an_end_tells_clients_it_does_not_wait_for(model, monkeypatch, capfd):
    """A stream in the middle gets an error event, a request whose body is not here yet a status; nobody is just cut."""
    monkeypatch.setattr("m3jit.serve.server.LAST_WORDS", 1.0)
    with running(model, drain=0.0) as server:
        gate = Gate(server.engine)
        connection, response = server.open_stream(PLAIN, {"model": "default", "prompt": "She", "max_tokens": 400})
        assert wait_for(lambda: gate.one_more() or server.made > 0)
        late = half_a_request(server.port)
        assert server.request("GET", "/health")[0] == 200          # behind the half request: that has arrived
        stopping = threading.Thread(target=server.stop)
        stopping.start()
        assert wait_for(lambda: server.engine._closing)            # or it might say all of its text before
        assert wait_for(lambda: gate.one_more() or not server.engine._thread.is_alive())
        assert events(response.read())[-1]["error"]["code"] == "server_stopping"
        assert late.makefile("rb").read().startswith(b"HTTP/1.1 503 ")
        late.close()
        connection.close()
        stopping.join(180)
        assert not stopping.is_alive() and wait_for(server.nothing_left)
    assert "Traceback" not in capfd.readouterr().err


def test_an_end_tells_clients_that_wait(model, monkeypatch):
    monkeypatch.setattr("m3jit.serve.server.LAST_WORDS", 30.0)     # a slow machine has the time to say it
    with running(model, batch=1, drain=0.0) as server:
        gate = Gate(server.engine)
        body = {"model": "default", "prompt": "She", "max_tokens": 400}
        with ThreadPoolExecutor(3) as pool:
            first = pool.submit(server.post, PLAIN, body)
            assert wait_for(lambda: server.engine.active == 1)
            second = pool.submit(server.post, PLAIN, body)
            assert wait_for(lambda: server.engine.waiting == 1)
            connection, response = server.open_stream(PLAIN, body)
            assert wait_for(lambda: server.engine.waiting == 2)
            stopping = pool.submit(server.stop)
            assert wait_for(lambda: server.engine._closing and server.engine.waiting == 0), "while the first one stands"
            status, found = second.result()
            assert status == 503 and found["error"]["code"] == "server_stopping"
            assert events(response.read())[-1]["error"]["code"] == "server_stopping"
            connection.close()
            assert wait_for(lambda: gate.one_more() or not server.engine._thread.is_alive())
            stopping.result()
        assert wait_for(server.nothing_left)


def test_an_engine_that_ends_cancels_and_refuses(model):
    from m3jit.api.generation import Settings
    from m3jit.serve.engine import Stopping
    engine = Engine(model, batch=1, queue=4)
    gate, heard = Gate(engine), []
    jobs = [Job([5, 6], Settings(max_tokens=None), lambda *found: heard.append(found))] * 3
    engine.submit(jobs)
    assert wait_for(lambda: engine.active == 1)
    gate.release()
    engine.close(0)
    assert engine.active == engine.waiting == 0 and [h for h in heard if h[2]]
    with pytest.raises(Stopping):
        engine.submit(jobs)


def test_an_engine_compiles_ahead(model, monkeypatch):
    """In a thread of its own, both programs, without a word in the metrics or the index; its end does not wait for
    it."""
    from m3jit.api.generation import Settings, load_model
    model = load_model("default", threads=1, prefix_memory=1 << 20)
    engine = Engine(model)
    engine.warm()
    engine._warmer.join()
    assert model._program.cache_info().currsize == 2 and model.prefixes.stats["versions"] == 0
    assert engine.metrics._counters["m3jit_texts_total"][1] == 0
    compiled, compiling = [], Compiler.compile
    monkeypatch.setattr(Compiler, "compile", lambda c, f, name: compiled.append(name) or compiling(c, f, name))
    for length in (1, 2, CHUNK, CHUNK + 1, CHUNK + 2, 2 * CHUNK + 1):
        for penalty in (1.0, 1.1):
            settings = Settings(max_tokens=3, repeat_penalty=penalty)
            for _ in range(2):                         # the second time its prompt is known
                ticket, = engine.submit([Job([length] * length, settings, lambda *found: None)])
                assert ticket.done.wait(180) and not compiled, (length, penalty)
    assert model._program.cache_info().currsize == 2
    engine.close()
    ending = Engine(model)
    ending.warm()
    ending.close()
    assert not ending._warmer.is_alive()
