"""Alternatives from one point, and prompts that begin with known tokens."""
from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the extra `serve` is not installed")
pytest.importorskip("uvicorn", reason="the extra `serve` is not installed")

from m3jit.api.generation import load_model  # noqa: E402
from tests.serve.client import CHAT, PLAIN, PROMPT, SAMPLED, TEMPLATE, Gate, ask, running, wait_for  # noqa: E402


@pytest.fixture(scope="module")
def indexed():
    """A server with a prefix index; `server` has none."""
    with running(load_model("default", threads=1, chat_template=TEMPLATE, prefix_memory=64 << 20)) as found:
        yield found
    assert wait_for(found.nothing_left)


# -- one prompt, several texts ----------------------------------------------------------------------------------------

@pytest.mark.parametrize("which", ["indexed", "server"])
def test_alternatives_are_what_single_requests_give(which, request):
    """With the seeds seed + 0 .. n - 1; the prompt is computed once, also where no index keeps it."""
    found = request.getfixturevalue(which)
    ids = len(found.model.encode(PROMPT))
    before = found.metric("m3jit_prompt_tokens_reused_total")
    answer = ask(found, n=4, logprobs=1, seed=21, max_tokens=12)
    reused = found.metric("m3jit_prompt_tokens_reused_total") - before
    assert answer["seeds"] == [21, 22, 23, 24] and reused >= 3 * ids
    for choice, seed in zip(answer["choices"], answer["seeds"]):
        alone = ask(found, logprobs=1, seed=seed, max_tokens=12)["choices"][0]
        assert {**choice, "index": 0} == alone
    assert answer["usage"]["completion_tokens"] == sum(_made(c) for c in answer["choices"])


def _made(choice: Any) -> int:
    return len(choice["logprobs"]["tokens"])


def test_alternatives_when_the_first_client_text_is_gone(model):
    """The text that computes the prompt is cancelled: another one takes its place."""
    with running(model) as server:
        gate, alone = Gate(server.engine), []
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(server.post, PLAIN, {"model": "default", "prompt": PROMPT, "n": 3, "max_tokens": 4,
                                                      **SAMPLED})
            waiting = wait_for(lambda: server.engine.active == 1 and server.engine.waiting == 2)
            assert waiting, "they wait for the prompt"
            server.engine._active[0].stop()
            gate.release()
            _, found = answer.result()
        assert [c["finish_reason"] for c in found["choices"]] == ["edited", "length", "length"]
        alone = [ask(server, max_tokens=4, seed=seed)["choices"][0]["text"] for seed in (8, 9)]
        assert [c["text"] for c in found["choices"][1:]] == alone


# -- known tokens -----------------------------------------------------------------------------------------------------

def test_prompts_start_from_known_tokens(indexed, server):
    prompts = [PROMPT, PROMPT + ", knowing all the ways of the family", PROMPT, "Of her mother she knew nothing at all"]
    for prompt in prompts:
        for settings in ({"temperature": 0}, SAMPLED):
            found, plain = (ask(where, prompt=prompt, **settings)["choices"] for where in (indexed, server))
            assert found == plain
    usage = ask(indexed)["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"]
    assert indexed.metric("m3jit_prefix_hits_total") >= 6 and indexed.metric("m3jit_prefix_bytes") > 0
    assert indexed.metric("m3jit_prefix_searches_total") > indexed.metric("m3jit_prefix_hits_total")


def test_a_chat_goes_on_from_its_last_turn(indexed):
    messages = [{"role": "user", "content": "Tell me of the long walk to the village"}]
    _, first = indexed.post(CHAT, {"model": "default", "messages": messages, "max_tokens": 8, "temperature": 0})
    messages += [first["choices"][0]["message"] | {"role": "assistant"}, {"role": "user", "content": "And then?"}]
    messages = [{"role": m["role"], "content": m["content"]} for m in messages]
    _, second = indexed.post(CHAT, {"model": "default", "messages": messages, "max_tokens": 8, "temperature": 0})
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= first["usage"]["prompt_tokens"] - 1


def test_a_prompt_that_is_being_computed_is_waited_for(model):
    """A text that begins alike starts when the first one's prompt is known; another one, or another key's, at once."""
    long = " ".join(f"{word}, and" for word in PROMPT.split()) * 4
    with running(load_model("default", threads=1, prefix_memory=32 << 20), keys=("first", "second")) as server:
        body = {"model": "default", "max_tokens": 4, **SAMPLED}

        def post(prompt: str, key: str = "first") -> Any:
            return server.post(PLAIN, {**body, "prompt": prompt}, Authorization=f"Bearer {key}")[1]
        assert len(server.model.encode(long)) > 160
        gate = Gate(server.engine)
        with ThreadPoolExecutor(4) as pool:
            first = pool.submit(post, long + " she")
            assert wait_for(lambda: server.engine.active == 1)
            second = pool.submit(post, long + " and he")
            assert wait_for(lambda: server.engine.waiting == 1)
            others = [pool.submit(post, "Of her mother"), pool.submit(post, long + " and it", "second")]
            assert wait_for(lambda: server.engine.active == 3) and server.engine.waiting == 1
            gate.release()
            found = second.result()
            assert first.result()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            assert found["usage"]["prompt_tokens_details"]["cached_tokens"] > 150
            assert [o.result()["usage"]["prompt_tokens_details"]["cached_tokens"] for o in others] == [0, 0]
        alone = model.generate(long + " and he", max_tokens=4, top_k=0, top_p=1.0, min_p=0.0, **SAMPLED)
        assert found["choices"][0]["text"] == alone.result()


def test_many_at_once_share_an_index(indexed, server):
    jobs = [(PROMPT[:50 + 5 * (i % 4)], i) for i in range(12)]
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda job: ask(indexed, prompt=job[0], seed=job[1], max_tokens=9)["choices"], jobs))
    assert found == [ask(server, prompt=p, seed=s, max_tokens=9)["choices"] for p, s in jobs]


def test_keys_keep_clients_apart(model):
    """Neither states nor responses of one key serve another."""
    with running(load_model("default", threads=1, prefix_memory=8 << 20), keys=("first", "second")) as server:
        body = {"model": "default", "prompt": PROMPT, "max_tokens": 5, **SAMPLED}

        def cached(key: str) -> tuple[int, str]:
            status, found = server.post(PLAIN, body, Authorization=f"Bearer {key}")
            assert status == 200
            return found["usage"]["prompt_tokens_details"]["cached_tokens"], found["id"]
        nothing, name = cached("first")
        assert nothing == 0 and cached("second")[0] == 0 and cached("first")[0] > 0 and cached("second")[0] > 0
        for key, status in (("second", 404), ("first", 200)):
            found = server.post(f"{PLAIN}/{name}/edit", {"position": {"token": 1}}, Authorization=f"Bearer {key}")
            assert found[0] == status
        server.kept.clear()
        for key, status in (("second", 404), ("first", 410)):
            found = server.post(f"{PLAIN}/{name}/edit", {"position": {"token": 1}}, Authorization=f"Bearer {key}")
            assert found[0] == status, "nor does it say that there was one"
