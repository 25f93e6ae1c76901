"""Edits of responses, alternatives from one point, and prompts that begin with known tokens."""
from __future__ import annotations

import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the extra `serve` is not installed")
pytest.importorskip("uvicorn", reason="the extra `serve` is not installed")

from m3jit.api.generation import Settings, load_model  # noqa: E402
from m3jit.serve.app import Limits  # noqa: E402
from m3jit.serve.engine import Busy, Engine, Job, ignore  # noqa: E402
from tests.serve.client import (CHAT, PLAIN, TEMPLATE, Gate, Running, chat_body, events, running,  # noqa: E402
                                wait_for)

PROMPT = "She had been a friend and companion such as few possessed: intelligent, well-informed, useful, gentle"
SAMPLED = {"seed": 7, "temperature": 1.0, "repeat_penalty": 1.2}


@pytest.fixture(scope="module")
def server():
    """With a prefix index."""
    with running(load_model("default", threads=1, chat_template=TEMPLATE, prefix_memory=64 << 20)) as found:
        yield found
    assert wait_for(found.nothing_left)


@pytest.fixture(scope="module")
def plain(model):
    """Without one."""
    with running(model) as found:
        yield found
    assert wait_for(found.nothing_left)


def ask(server: Running, **body: Any) -> Any:
    status, found = server.post(PLAIN, {"model": "default", "prompt": PROMPT, "max_tokens": 30, **SAMPLED, **body})
    assert status == 200, found
    return found


def edit(server: Running, response: Any, path: str = PLAIN, **body: Any) -> Any:
    status, found = server.post(f"{path}/{response['id']}/edit", body)
    assert status == 200, found
    return found


def refused(server: Running, response: str, path: str = PLAIN, **body: Any) -> tuple[int, str, str]:
    status, found = server.post(f"{path}/{response}/edit", body)
    error = found["error"]
    return status, error["code"], error["message"]


# -- edits ------------------------------------------------------------------------------------------------------------

def test_without_a_change_the_rest_is_as_it_was(plain):
    found = ask(plain)
    text = found["choices"][0]["text"]
    ids = plain.model.encode(PROMPT)
    tokens = _tokens(plain, found)
    assert len(tokens) == 30 and plain.model.decode(tokens) == text
    for kept in (0, 1, 17, 29):
        again = edit(plain, found, position={"token": kept})
        assert again["choices"][0]["text"] == plain.model.decode(tokens[kept:])
        assert again["edited"]["kept_tokens"] == kept and again["edited"]["kept"] == plain.model.decode(tokens[:kept])
        assert again["usage"]["prompt_tokens"] == len(ids) + kept
        assert again["usage"]["completion_tokens"] == 30 - kept, "the response's max_tokens hold for all of it"
        computed = again["usage"]["prompt_tokens"] - again["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert computed == (0 if kept == 0 else 1), "only the token at the boundary is computed"
    assert edit(plain, found, position={"token": 30}, max_tokens=3)["usage"]["completion_tokens"] == 3


def _tokens(server: Running, response: Any) -> list[int]:
    """Of a response that can be edited."""
    return list(server.kept.find(response["id"], "completion").texts[0].tokens)


@pytest.mark.parametrize("settings", [{"temperature": 0}, SAMPLED], ids=["greedy", "sampled"])
def test_the_rest_is_what_these_tokens_give(plain, settings):
    """As the documentation says: the same as a plain completion of the token ids, with the seed in the answer."""
    found = ask(plain, **settings)
    text = found["choices"][0]["text"]
    word = text.split()[3]
    new = edit(plain, found, position={"text": word, "which": 1}, text="river, and")
    told = new["edited"]
    assert told["id"] == found["id"] and told["choice"] == 0 and told["seeds"] == new["seeds"]
    assert told["kept"] + told["injected"] == text[:text.index(word)] + "river, and"
    ids = [*plain.model.encode(PROMPT), *_tokens(plain, found)[:told["kept_tokens"]],
           *plain.model.model.tokenizer.encode(told["injected"], add_bos=False)]
    made = told["kept_tokens"] + told["injected_tokens"]
    assert len(ids) == new["usage"]["prompt_tokens"]
    same = ask(plain, prompt=ids, max_tokens=30 - made, **{**settings, "seed": new["seeds"][0]})
    assert new["choices"] == same["choices"]
    behind = edit(plain, found, position={"after": word, "which": 1}, text=" and", seed=5, max_tokens=4)
    assert behind["edited"]["kept"] + behind["edited"]["injected"] == text[:text.index(word) + len(word)] + " and"
    assert behind["seeds"] == [5] and behind["usage"]["completion_tokens"] == 4
    again = ask(plain, **settings)
    assert again["choices"] == found["choices"], "the original is unharmed"


def test_an_edited_response_is_edited(plain):
    """Places count from the beginning of the answer, through what was kept and injected."""
    found = ask(plain)
    first = edit(plain, found, position={"token": 10}, text=" river bank")
    text = first["edited"]["kept"] + first["edited"]["injected"] + first["choices"][0]["text"]
    word = " river bank"
    second = edit(plain, first, position={"text": word}, text=" lake")
    assert second["edited"]["kept"] + second["edited"]["injected"] == text[:text.index(word)] + " lake"
    third = edit(plain, second, position={"token": 10}, text=" river bank")
    assert third["choices"] == first["choices"], "the random stream goes back through both"
    unchanged = edit(plain, first, position={"token": 10 + first["edited"]["injected_tokens"] + 2})
    assert unchanged["edited"]["kept"] + unchanged["choices"][0]["text"] == text


def test_alternatives_of_an_edit_and_their_choice(plain):
    found = ask(plain, n=3)
    assert found["seeds"] == [7, 8, 9]
    new = edit(plain, found, position={"token": 4}, choice=1, n=2, text=" and")
    assert new["edited"]["choice"] == 1 and len(new["choices"]) == 2
    alone = edit(plain, found, position={"token": 4}, choice=1, text=" and")
    assert alone["choices"][0]["text"] == new["choices"][0]["text"] != new["choices"][1]["text"]
    other = edit(plain, found, position={"token": 4}, choice=1, text=" and", seed=new["seeds"][1])
    assert other["choices"][0]["text"] == new["choices"][1]["text"]
    assert refused(plain, found["id"], position={"token": 0}, choice=3)[:2] == (400, "invalid_value")
    status, code, words = refused(plain, found["id"], postion={"token": 0}, text="x")
    assert (status, code) == (400, "unknown_parameter") and words == "postion: no such field; did you mean position?"
    assert "teken: no such field; did you mean token?" in refused(plain, found["id"], position={"teken": 0})[2]


def test_chats_are_edited_as_a_stream(plain):
    status, found = plain.post(CHAT, chat_body(max_tokens=20, temperature=0))
    whole = edit(plain, found, CHAT, position={"token": 5}, text=" wood", model="default")
    connection, response = plain.open_stream(f"{CHAT}/{found['id']}/edit",
                                             {"position": {"token": 5}, "text": " wood",
                                              "stream_options": {"include_usage": True}})
    chunks = events(response.read())
    connection.close()
    assert chunks[0]["edited"] == whole["edited"] and chunks[0]["object"] == "chat.completion.chunk"
    assert not any("edited" in c for c in chunks[1:-1]) and chunks[-1] is None
    text = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks[:-2])
    assert text == whole["choices"][0]["message"]["content"]
    assert chunks[-2]["usage"] == whole["usage"] and chunks[-3]["choices"][0]["finish_reason"] == "length"
    assert refused(plain, found["id"], position={"token": 5})[0] == 404, "a chat is not at the completions' path"


@pytest.mark.parametrize("path", [PLAIN, CHAT])
def test_a_stop_string_that_begins_before_the_place(plain, path):
    def begun(**more: Any) -> Any:
        if path == PLAIN:
            return ask(plain, temperature=0, **more)
        return plain.post(CHAT, chat_body(max_tokens=30, temperature=0, **more))[1]

    def said(choice: Any) -> str:
        return choice["text"] if path == PLAIN else choice["message"]["content"]
    change = {"position": {"token": 5}, "text": " and a very fine d"}
    first = begun()
    free = edit(plain, first, path, **change)
    head, rest = free["edited"]["kept"] + free["edited"]["injected"], said(free["choices"][0])
    stop = head[-3:] + rest[:4]
    assert "cut" not in free["choices"][0] and stop not in said(first["choices"][0])
    response = begun(stop=[stop])
    found = edit(plain, response, path, **change)
    assert found["edited"]["kept"] + found["edited"]["injected"] == head
    choice = found["choices"][0]
    assert (said(choice), choice["finish_reason"], choice["cut"]) == ("", "stop", 3)
    connection, stream = plain.open_stream(f"{path}/{response['id']}/edit", change)
    chunks = [c["choices"][0] for c in events(stream.read())[:-1]]
    connection.close()
    assert [c.get("cut") for c in chunks if c["finish_reason"]] == [3]
    assert not any("cut" in c or c.get("text") or c.get("delta", {}).get("content") for c in chunks[:-1])
    assert edit(plain, response, path, **change, n=2)["choices"][1]["cut"] == 3, "in each alternative"


def test_a_running_response_is_stopped_and_edited(model):
    with running(model) as server:
        expected = ask(server, max_tokens=200)
        gate = Gate(server.engine)
        connection, response = server.open_stream(PLAIN, {"model": "default", "prompt": PROMPT, "max_tokens": 200,
                                                          **SAMPLED})
        assert wait_for(lambda: gate.one_more() or server.made >= 209)
        first = json.loads(response.readline()[6:])
        wrong = refused(server, first["id"], position={"token": 150})
        assert wrong[:2] == (400, "invalid_place") and server.engine.active == 1, "what cannot be done stops nothing"
        with ThreadPoolExecutor(1) as pool:
            new = pool.submit(edit, server, first, position={"token": 6}, max_tokens=7)
            ticket = server.engine._active[0]
            assert wait_for(lambda: ticket.stopped)
            gate.release()
            found = new.result()
        chunks = events(response.read().lstrip())
        connection.close()
        assert chunks[-1] is None and chunks[-2]["choices"][0]["finish_reason"] == "edited"
        assert server.made < 209 + 20
        tokens = _tokens(server, {"id": expected["id"]})
        assert found["choices"][0]["text"] == server.model.decode(tokens[6:13])
        assert wait_for(server.nothing_left)
        again = edit(server, first, position={"token": 6}, max_tokens=7)
        assert again["choices"] == found["choices"], "a stopped one can be edited again"


def test_an_edit_without_room_stops_nothing(model):
    with running(model, batch=1, queue=1) as server:
        gate = Gate(server.engine)
        body = {"model": "default", "prompt": PROMPT, "max_tokens": 20, **SAMPLED}
        connection, response = server.open_stream(PLAIN, body)
        assert wait_for(lambda: gate.one_more() or server.made >= 4)
        first = json.loads(response.readline()[6:])
        ticket = server.engine._active[0]
        with ThreadPoolExecutor(2) as pool:
            waits = pool.submit(ask, server, max_tokens=2)
            assert wait_for(lambda: server.engine.waiting == 1)
            status, code, message = refused(server, first["id"], position={"token": 1}, n=2)
            assert (status, code) == (429, "queue_full") and "1 requests are waiting" in message and not ticket.stopped
            status, code, message = refused(server, first["id"], position={"token": 1}, n=3)
            assert (status, code) == (400, "invalid_value") and not ticket.stopped
            assert "n: 3 texts in one request, but this server has 2 places (--batch 1 and --queue 1)" in message
            assert "; ask for 2" in message
            new = pool.submit(edit, server, first, position={"token": 1}, max_tokens=2)    # the original's own place
            assert wait_for(lambda: ticket.stopped)
            gate.release()
            assert len(new.result()["choices"]) == 1 and len(waits.result()["choices"]) == 1
        connection.close()
        found = edit(server, first, position={"token": 1}, max_tokens=2, n=2)
        assert len(found["choices"]) == 2 and server.engine._promised == 0, "and now there is room"
        status, answer = server.post(PLAIN, {**body, "n": 3})
        assert status == 400 and "n: 3 texts in one request" in answer["error"]["message"]
        assert server.metric("m3jit_rejected_total") == 1


def test_places_are_promised_once(model):
    """Of two edits of one running text only one counts on its place."""
    engine = Engine(model, batch=1, queue=0)
    gate = Gate(engine)
    try:
        ticket, = engine.submit([Job([5, 6, 7], Settings(max_tokens=9, seed=1), ignore, random=(1,), remember=True)])
        places = engine.replace(ticket, 1)
        with pytest.raises(Busy):
            engine.replace(ticket, 1)
        gate.release()
        assert ticket.done.wait(180) and ticket.stopped
        with pytest.raises(Busy):
            engine.submit([Job([5], Settings(max_tokens=1, seed=1), ignore)])
        new, = engine.submit([Job([5, 6, 7], Settings(max_tokens=1, seed=1), ignore)], places)
        places.free()
        assert new.done.wait(180) and engine._promised == 0
    finally:
        gate.release()
        engine.close()


def test_an_original_that_does_not_end(model):
    with _limited(model, ending=0.01) as server:
        gate = Gate(server.engine)
        connection, response = server.open_stream(PLAIN, {"model": "default", "prompt": PROMPT, "max_tokens": 20,
                                                          **SAMPLED})
        assert wait_for(lambda: gate.one_more() or server.made >= 4)
        first = json.loads(response.readline()[6:])
        ticket = server.engine._active[0]
        hand_over, ending = server.engine._hand_over, threading.Event()
        server.engine._hand_over = lambda t: hand_over(t) if ending.is_set() else None
        status, code, message = refused(server, first["id"], position={"token": 1})
        assert (status, code) == (503, "response_not_ended") and ticket.stopped
        assert "was stopped for the edit, but has not ended after 0.01 s; send the same edit again" in message
        assert server.engine._promised == 0
        ending.set()
        gate.release()
        assert ticket.done.wait(180)
        assert edit(server, first, position={"token": 1}, max_tokens=2)["usage"]["completion_tokens"]
        connection.close()


def test_a_response_that_waits_is_edited(model):
    with running(model, batch=1) as server:
        gate = Gate(server.engine)
        with ThreadPoolExecutor(3) as pool:
            pool.submit(server.text, max_tokens=2)
            assert wait_for(lambda: server.engine.active == 1)
            waits = pool.submit(server.post, PLAIN, {"model": "default", "prompt": "She", "max_tokens": 5})
            assert wait_for(lambda: server.engine.waiting == 1)
            name = next(n for n, given in server.kept._all.items() if given.texts[0].state == "queued")
            new = pool.submit(edit, server, {"id": name}, position={"token": 0}, text=" was")
            assert waits.result()[1]["choices"][0]["finish_reason"] == "edited"
            gate.release()
            assert new.result()["usage"]["completion_tokens"] == 4


def test_a_grammar_holds_for_what_is_injected(plain):
    pytest.importorskip("llguidance", reason="the extra `grammar` is not installed")
    rule = {"type": "regex", "regex": "(yes|no), (river|lake|sea){3}"}
    found = ask(plain, response_format=rule)
    new = edit(plain, found, position={"token": 0}, text="no, lakese")
    assert new["edited"]["injected"] == "no, lakese" and new["choices"][0]["text"].startswith("a")
    status, code, message = refused(plain, found["id"], position={"token": 0}, text="perhaps")
    assert status == 400 and "the grammar does not allow token" in message


# -- bad edits --------------------------------------------------------------------------------------------------------

def test_what_cannot_be_edited(plain):
    found = ask(plain, temperature=0)
    name, text = found["id"], found["choices"][0]["text"]
    letter = next(c for c in text if text.count(c) > 1)
    for body, code, message in [
            ({"position": {"token": 31}}, "invalid_place",
             "position.token: 31, but the answer has 30 tokens; give 0 to 30"),
            ({"position": {"token": -1}}, "invalid_value",
             "token: a whole number from 0 to 2147483647 is expected, got -1"),
            ({"position": {"text": "Xanadu"}}, "invalid_place", "'Xanadu' is not in the text"),
            ({"position": {"text": letter}}, "invalid_place",
             f"'{letter}' is in the text {text.count(letter)} times: 1:"),
            ({"position": {"text": letter, "which": 99}}, "invalid_place", "which: 99, but"),
            ({"position": {"text": ""}}, "invalid_place", "a text of the answer is expected, got ''"),
            ({"position": {"text": 3}}, "invalid_value", "text: a string is expected, got 3"),
            ({}, "invalid_value", 'position: an object with "token", "text" or "after" is expected, got null'),
            ({"position": {"token": 1, "text": "a"}}, "invalid_value", "one of them"),
            ({"position": {"token": 1, "which": 1}}, "invalid_value", '"which" only with a text'),
            ({"position": {"place": 1}}, "unknown_parameter", "place: no such field"),
            ({"position": {"token": 1}, "text": 4}, "invalid_value", "text: a string is expected, got 4"),
            ({"position": {"token": 1}, "what": 4}, "unknown_parameter", "what: no such field"),
            ({"position": {"token": 29}, "text": " and so on"}, "invalid_value", "max_tokens are 30; give max_tokens"),
            ({"position": {"token": 1}, "text": "a " * 600, "max_tokens": 5}, "invalid_value", "the context holds 512"),
            ({"position": {"token": 1}, "n": 17}, "invalid_value", "n: a whole number from 1 to 16")]:
        status, found_code, said = refused(plain, name, **body)
        assert (status, found_code) == (400, code) and message in said, (body, said)
    assert refused(plain, name, position={"token": 1}, model="other")[0] == 404
    status, code, said = refused(plain, "cmpl-none", position={"token": 0})
    assert (status, code) == (404, "response_not_found") and "no such response" in said
    raw = plain.request("POST", f"{PLAIN}/{name}/edit", b'{"position": {"token": 1}, "text": "\\ud800"}')
    assert raw[0] == 400 and b"half a surrogate pair" in raw[2]


def test_an_edit_that_fills_the_context_exactly(plain):
    found, room = ask(plain), plain.model.context - len(plain.model.encode(PROMPT)) - 5
    assert len(plain.model.model.tokenizer.encode(" the" * room, add_bos=False)) == room
    full = edit(plain, found, position={"token": 5}, text=" the" * room, max_tokens=3)
    assert full["choices"][0]["finish_reason"] == "length" and full["usage"]["completion_tokens"] == 1
    status, code, words = refused(plain, found["id"], position={"token": 5}, text=" the" * (room + 1), max_tokens=3)
    assert (status, code) == (400, "invalid_value") and words == (
        f"text: with it the response has {plain.model.context + 1} tokens, the context holds {plain.model.context}; go "
        "further back, or shorten the text")
    for name in ("text", "after"):
        words = refused(plain, found["id"], position={name: ""})[2]
        assert words == f"position: {name}: a text of the answer is expected, got ''"


def test_text_that_does_not_tokenise(plain, monkeypatch):
    """The embedded model spells every byte, so another vocabulary says here what it does not have."""
    from m3jit.errors import UserError
    from m3jit.serve import editing

    def spelled(tokenizer: Any, text: str) -> list[int]:
        raise UserError("inject: this model's vocabulary cannot spell '水'; it would read ''; use other words")
    found = ask(plain)
    monkeypatch.setattr(editing, "spelled", spelled)
    status, code, said = refused(plain, found["id"], position={"token": 1}, text="水")
    assert (status, code) == (400, "invalid_text") and said.startswith("text: this model's vocabulary cannot spell '水'")


def test_released_responses_say_which_bound_they_met(model):
    with _limited(model, kept=2) as server:
        names = [ask(server, max_tokens=2)["id"] for _ in range(3)]
        status, code, message = refused(server, names[0], position={"token": 0})
        assert (status, code) == (410, "response_released") and "the newest 2 are kept (--keep-responses)" in message
        assert edit(server, {"id": names[2]}, position={"token": 1})["edited"]["id"] == names[2]
        assert server.metric("m3jit_kept_responses") == 2 and server.metric("m3jit_kept_bytes") > 0
    with _limited(model, kept_bytes=1) as server:
        name = ask(server, max_tokens=2)["id"]
        status, code, message = refused(server, name, position={"token": 0})
        assert status == 410 and "those that are kept reach 1 bytes at most (--keep-memory)" in message
        assert server.metric("m3jit_kept_bytes") == 0
    with _limited(model) as server:
        small = ask(server, max_tokens=2)["id"]
        kept = server.metric("m3jit_kept_bytes")
        server.kept.memory = int(2 * kept)
        large = ask(server, max_tokens=2, prompt=PROMPT * 8)["id"]
        assert 0 < kept == server.metric("m3jit_kept_bytes"), "one that alone is too large takes no other's place"
        assert refused(server, large, position={"token": 0})[0] == 410
        assert edit(server, {"id": small}, position={"token": 1})["edited"]["id"] == small
    with _limited(model, kept=0) as server:
        name = ask(server, max_tokens=2)["id"]
        status, code, message = refused(server, name, position={"token": 0})
        assert status == 404 and "this server keeps none (--keep-responses 0)" in message


def _limited(model: Any, **limits: Any) -> Any:
    return running(model, limits=Limits(drain=30.0, **limits))


# -- one prompt, several texts ----------------------------------------------------------------------------------------

@pytest.mark.parametrize("which", ["server", "plain"])
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

def test_prompts_start_from_known_tokens(server, plain):
    prompts = [PROMPT, PROMPT + ", knowing all the ways of the family", PROMPT, "Of her mother she knew nothing at all"]
    for prompt in prompts:
        for settings in ({"temperature": 0}, SAMPLED):
            assert ask(server, prompt=prompt, **settings)["choices"] == ask(plain, prompt=prompt, **settings)["choices"]
    usage = ask(server)["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"]
    assert server.metric("m3jit_prefix_hits_total") >= 6 and server.metric("m3jit_prefix_bytes") > 0
    assert server.metric("m3jit_prefix_searches_total") > server.metric("m3jit_prefix_hits_total")


def test_a_chat_goes_on_from_its_last_turn(server):
    messages = [{"role": "user", "content": "Tell me of the long walk to the village"}]
    _, first = server.post(CHAT, {"model": "default", "messages": messages, "max_tokens": 8, "temperature": 0})
    messages += [first["choices"][0]["message"] | {"role": "assistant"}, {"role": "user", "content": "And then?"}]
    messages = [{"role": m["role"], "content": m["content"]} for m in messages]
    _, second = server.post(CHAT, {"model": "default", "messages": messages, "max_tokens": 8, "temperature": 0})
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


def test_many_at_once_share_an_index(server, plain):
    jobs = [(PROMPT[:50 + 5 * (i % 4)], i) for i in range(12)]
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda job: ask(server, prompt=job[0], seed=job[1], max_tokens=9)["choices"], jobs))
    assert found == [ask(plain, prompt=p, seed=s, max_tokens=9)["choices"] for p, s in jobs]


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


# -- slow clients -----------------------------------------------------------------------------------------------------

def test_a_body_that_does_not_come(model):
    with _limited(model, body_seconds=0.05) as server:
        slow = socket.create_connection(("127.0.0.1", server.port), 60)
        slow.sendall(f"POST {PLAIN} HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{{".encode())
        answer = slow.makefile("rb").read()
        slow.close()
        assert answer.startswith(b"HTTP/1.1 408 ") and b"was not here 0.05 s after" in answer
        assert b"(1 bytes were)" in answer
