"""Edits of responses."""
from __future__ import annotations

import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the extra `serve` is not installed")
pytest.importorskip("uvicorn", reason="the extra `serve` is not installed")

from m3jit.api.generation import Settings  # noqa: E402
from m3jit.serve.app import Limits  # noqa: E402
from m3jit.serve.engine import Busy, Engine, Job, ignore  # noqa: E402
from tests.serve.client import (CHAT, PLAIN, PROMPT, SAMPLED, Gate, Running, ask, chat_body, events,  # noqa: E402
                                running, wait_for)


def edit(server: Running, response: Any, path: str = PLAIN, **body: Any) -> Any:
    status, found = server.post(f"{path}/{response['id']}/edit", body)
    assert status == 200, found
    return found


def refused(server: Running, response: str, path: str = PLAIN, **body: Any) -> tuple[int, str, str]:
    status, found = server.post(f"{path}/{response}/edit", body)
    error = found["error"]
    return status, error["code"], error["message"]


# -- edits ------------------------------------------------------------------------------------------------------------

def test_without_a_change_the_rest_is_as_it_was(server):
    found = ask(server)
    text = found["choices"][0]["text"]
    ids = server.model.encode(PROMPT)
    tokens = _tokens(server, found)
    assert len(tokens) == 30 and server.model.decode(tokens) == text
    for kept in (0, 1, 17, 29):
        again = edit(server, found, position={"token": kept})
        assert again["choices"][0]["text"] == server.model.decode(tokens[kept:])
        assert again["edited"]["kept_tokens"] == kept and again["edited"]["kept"] == server.model.decode(tokens[:kept])
        assert again["usage"]["prompt_tokens"] == len(ids) + kept
        assert again["usage"]["completion_tokens"] == 30 - kept, "the response's max_tokens hold for all of it"
        computed = again["usage"]["prompt_tokens"] - again["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert computed == (0 if kept == 0 else 1), "only the token at the boundary is computed"
    assert edit(server, found, position={"token": 30}, max_tokens=3)["usage"]["completion_tokens"] == 3


def _tokens(server: Running, response: Any) -> list[int]:
    """Of a response that can be edited."""
    return list(server.kept.find(response["id"], "completion").texts[0].tokens)


@pytest.mark.parametrize("settings", [{"temperature": 0}, SAMPLED], ids=["greedy", "sampled"])
def test_the_rest_is_what_these_tokens_give(server, settings):
    """As the documentation says: the same as a plain completion of the token ids, with the seed in the answer."""
    found = ask(server, **settings)
    text = found["choices"][0]["text"]
    word = text.split()[3]
    new = edit(server, found, position={"text": word, "which": 1}, text="river, and")
    told = new["edited"]
    assert told["id"] == found["id"] and told["choice"] == 0 and told["seeds"] == new["seeds"]
    assert told["kept"] + told["injected"] == text[:text.index(word)] + "river, and"
    ids = [*server.model.encode(PROMPT), *_tokens(server, found)[:told["kept_tokens"]],
           *server.model.model.tokenizer.encode(told["injected"], add_bos=False)]
    made = told["kept_tokens"] + told["injected_tokens"]
    assert len(ids) == new["usage"]["prompt_tokens"]
    same = ask(server, prompt=ids, max_tokens=30 - made, **{**settings, "seed": new["seeds"][0]})
    assert new["choices"] == same["choices"]
    behind = edit(server, found, position={"after": word, "which": 1}, text=" and", seed=5, max_tokens=4)
    assert behind["edited"]["kept"] + behind["edited"]["injected"] == text[:text.index(word) + len(word)] + " and"
    assert behind["seeds"] == [5] and behind["usage"]["completion_tokens"] == 4
    again = ask(server, **settings)
    assert again["choices"] == found["choices"], "the original is unharmed"


def test_an_edited_response_is_edited(server):
    """Places count from the beginning of the answer, through what was kept and injected."""
    found = ask(server)
    first = edit(server, found, position={"token": 10}, text=" river bank")
    text = first["edited"]["kept"] + first["edited"]["injected"] + first["choices"][0]["text"]
    word = " river bank"
    second = edit(server, first, position={"text": word}, text=" lake")
    assert second["edited"]["kept"] + second["edited"]["injected"] == text[:text.index(word)] + " lake"
    third = edit(server, second, position={"token": 10}, text=" river bank")
    assert third["choices"] == first["choices"], "the random stream goes back through both"
    unchanged = edit(server, first, position={"token": 10 + first["edited"]["injected_tokens"] + 2})
    assert unchanged["edited"]["kept"] + unchanged["choices"][0]["text"] == text


def test_alternatives_of_an_edit_and_their_choice(server):
    found = ask(server, n=3)
    assert found["seeds"] == [7, 8, 9]
    new = edit(server, found, position={"token": 4}, choice=1, n=2, text=" and")
    assert new["edited"]["choice"] == 1 and len(new["choices"]) == 2
    alone = edit(server, found, position={"token": 4}, choice=1, text=" and")
    assert alone["choices"][0]["text"] == new["choices"][0]["text"] != new["choices"][1]["text"]
    other = edit(server, found, position={"token": 4}, choice=1, text=" and", seed=new["seeds"][1])
    assert other["choices"][0]["text"] == new["choices"][1]["text"]
    assert refused(server, found["id"], position={"token": 0}, choice=3)[:2] == (400, "invalid_value")
    status, code, words = refused(server, found["id"], postion={"token": 0}, text="x")
    assert (status, code) == (400, "unknown_parameter") and words == "postion: no such field; did you mean position?"
    assert "teken: no such field; did you mean token?" in refused(server, found["id"], position={"teken": 0})[2]


@pytest.mark.parametrize("name, value", [("logit_bias", {"1": 1}), ("suffix", ""), ("user", "me"), ("metadata", {})])
def test_a_place_has_no_fields_of_the_request(server, name, value):
    """Not those that are refused by name, nor labels that have no effect."""
    found = ask(server, max_tokens=2)
    status, answer = server.post(f"{PLAIN}/{found['id']}/edit", {"position": {"token": 1, name: value}})
    assert status == 400 and answer["error"]["param"] == f"position.{name}"
    assert answer["error"]["message"].startswith(f"position.{name}: no such field")


def test_chats_are_edited_as_a_stream(server):
    status, found = server.post(CHAT, chat_body(max_tokens=20, temperature=0))
    whole = edit(server, found, CHAT, position={"token": 5}, text=" wood", model="default")
    connection, response = server.open_stream(f"{CHAT}/{found['id']}/edit",
                                              {"position": {"token": 5}, "text": " wood",
                                               "stream_options": {"include_usage": True}})
    chunks = events(response.read())
    connection.close()
    assert chunks[0]["edited"] == whole["edited"] and chunks[0]["object"] == "chat.completion.chunk"
    assert not any("edited" in c for c in chunks[1:-1]) and chunks[-1] is None
    text = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks[:-2])
    assert text == whole["choices"][0]["message"]["content"]
    assert chunks[-2]["usage"] == whole["usage"] and chunks[-3]["choices"][0]["finish_reason"] == "length"
    assert refused(server, found["id"], position={"token": 5})[0] == 404, "a chat is not at the completions' path"


@pytest.mark.parametrize("path", [PLAIN, CHAT])
def test_a_stop_string_that_begins_before_the_place(server, path):
    def begun(**more: Any) -> Any:
        if path == PLAIN:
            return ask(server, temperature=0, **more)
        return server.post(CHAT, chat_body(max_tokens=30, temperature=0, **more))[1]

    def said(choice: Any) -> str:
        return choice["text"] if path == PLAIN else choice["message"]["content"]
    change = {"position": {"token": 5}, "text": " and a very fine d"}
    first = begun()
    free = edit(server, first, path, **change)
    head, rest = free["edited"]["kept"] + free["edited"]["injected"], said(free["choices"][0])
    stop = head[-3:] + rest[:4]
    assert "cut" not in free["choices"][0] and stop not in said(first["choices"][0])
    response = begun(stop=[stop])
    found = edit(server, response, path, **change)
    assert found["edited"]["kept"] + found["edited"]["injected"] == head
    choice = found["choices"][0]
    assert (said(choice), choice["finish_reason"], choice["cut"]) == ("", "stop", 3)
    connection, stream = server.open_stream(f"{path}/{response['id']}/edit", change)
    chunks = [c["choices"][0] for c in events(stream.read())[:-1]]
    connection.close()
    assert [c.get("cut") for c in chunks if c["finish_reason"]] == [3]
    assert not any("cut" in c or c.get("text") or c.get("delta", {}).get("content") for c in chunks[:-1])
    assert edit(server, response, path, **change, n=2)["choices"][1]["cut"] == 3, "in each alternative"


def test_a_place_is_looked_for_in_what_the_response_has(server):
    """Not in a stop string that ended it, nor behind that."""
    said = ask(server, temperature=0)["choices"][0]["text"]
    word = next(w for w in said.split()[2:] if len(w) > 3 and said.count(w[1:]) == 1)
    found = ask(server, temperature=0, stop=word[1:])
    for name in ("text", "after"):
        status, code, words = refused(server, found["id"], position={name: word[1:]})
        assert (status, code) == (400, "invalid_place") and words.startswith(f"position.{name}: '{word[1:]}' is not in")
        assert word not in words.partition("which is")[2]
    kept = edit(server, found, position={"after": word[0], "which": -1})["edited"]
    assert said.index(word) + 1 == len(kept["kept"] + kept["injected"])


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


def test_a_grammar_holds_for_what_is_injected(server):
    pytest.importorskip("llguidance", reason="the extra `grammar` is not installed")
    rule = {"type": "regex", "regex": "(yes|no), (river|lake|sea){3}"}
    found = ask(server, response_format=rule)
    new = edit(server, found, position={"token": 0}, text="no, lakese")
    assert new["edited"]["injected"] == "no, lakese" and new["choices"][0]["text"].startswith("a")
    status, code, message = refused(server, found["id"], position={"token": 0}, text="perhaps")
    assert status == 400 and "the grammar does not allow token" in message


# -- bad edits --------------------------------------------------------------------------------------------------------

def test_what_cannot_be_edited(server):
    found = ask(server, temperature=0)
    name, text = found["id"], found["choices"][0]["text"]
    letter = next(c for c in text if text.count(c) > 1)
    for body, code, message in [
            ({"position": {"token": 31}}, "invalid_place",
             "position.token: 31, but the answer has 30 tokens; give 0 to 30"),
            ({"position": {"token": -1}}, "invalid_value",
             "position.token: a whole number from 0 to 2147483647 is expected, got -1"),
            ({"position": {"text": "Xanadu"}}, "invalid_place", "position.text: 'Xanadu' is not in the text"),
            ({"position": {"after": "Xanadu"}}, "invalid_place", "position.after: 'Xanadu' is not in the text"),
            ({"position": {"text": letter}}, "invalid_place",
             f"'{letter}' is in the text {text.count(letter)} times: 1:"),
            ({"position": {"text": letter, "which": 99}}, "invalid_place", "position.which: 99, but"),
            ({"position": {"text": ""}}, "invalid_place", "a text of the answer is expected, got ''"),
            ({"position": {"text": 3}}, "invalid_value", "position.text: a string is expected, got 3"),
            ({}, "invalid_value", 'position: an object with "token", "text" or "after" is expected, got null'),
            ({"position": {"token": 1, "text": "a"}}, "invalid_value", "one of them"),
            ({"position": {"token": 1, "which": 1}}, "invalid_value", '"which" only with a text'),
            ({"position": {"place": 1}}, "unknown_parameter", "position.place: no such field"),
            ({"position": {"token": 30}}, "invalid_value", "position: with it the answer has 30 tokens, and its "
             "max_tokens are 30; go further back, or give max_tokens for the rest"),
            ({"position": {"token": 1}, "text": 4}, "invalid_value", "text: a string is expected, got 4"),
            ({"position": {"token": 1}, "what": 4}, "unknown_parameter", "what: no such field"),
            ({"position": {"token": 29}, "text": " and so on"}, "invalid_value",
             "max_tokens are 30; go further back, or give max_tokens"),
            ({"position": {"token": 1}, "text": "a " * 600, "max_tokens": 5}, "invalid_value", "the context holds 512"),
            ({"position": {"token": 1}, "n": 17}, "invalid_value", "n: a whole number from 1 to 16")]:
        status, found_code, said = refused(server, name, **body)
        assert (status, found_code) == (400, code) and message in said, (body, said)
        error = server.post(f"{PLAIN}/{name}/edit", body)[1]["error"]
        assert error["message"].startswith(f"{error['param']}: ")
    assert refused(server, name, position={"token": 1}, model="other")[0] == 404
    status, code, said = refused(server, "cmpl-none", position={"token": 0})
    assert (status, code) == (404, "response_not_found") and "no such response" in said
    raw = server.request("POST", f"{PLAIN}/{name}/edit", b'{"position": {"token": 1}, "text": "\\ud800"}')
    assert raw[0] == 400 and b"half a surrogate pair" in raw[2]


def test_an_edit_that_fills_the_context_exactly(server):
    found, room = ask(server), server.model.context - len(server.model.encode(PROMPT)) - 5
    assert len(server.model.model.tokenizer.encode(" the" * room, add_bos=False)) == room
    full = edit(server, found, position={"token": 5}, text=" the" * room, max_tokens=3)
    assert full["choices"][0]["finish_reason"] == "length" and full["usage"]["completion_tokens"] == 1
    status, code, words = refused(server, found["id"], position={"token": 5}, text=" the" * (room + 1), max_tokens=3)
    assert (status, code) == (400, "invalid_value") and words == (
        f"text: with it the response has {server.model.context + 1} tokens, the context holds {server.model.context}; "
        "go further back, or shorten the text")
    for name in ("text", "after"):
        words = refused(server, found["id"], position={name: ""})[2]
        assert words == f"position.{name}: a text of the answer is expected, got ''"


def test_text_that_does_not_tokenise(server, monkeypatch):
    """The embedded model spells every byte, so another vocabulary says here what it does not have."""
    from m3jit.errors import UserError
    from m3jit.serve import editing

    def spelled(tokenizer: Any, text: str) -> list[int]:
        raise UserError("inject: this model's vocabulary cannot spell '水'; it would read ''; use other words")
    found = ask(server)
    monkeypatch.setattr(editing, "spelled", spelled)
    status, code, said = refused(server, found["id"], position={"token": 1}, text="水")
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


# -- slow clients -----------------------------------------------------------------------------------------------------

def test_a_body_that_does_not_come(model):
    with _limited(model, body_seconds=0.05) as server:
        slow = socket.create_connection(("127.0.0.1", server.port), 60)
        slow.sendall(f"POST {PLAIN} HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{{".encode())
        answer = slow.makefile("rb").read()
        slow.close()
        assert answer.startswith(b"HTTP/1.1 408 ") and b"was not here 0.05 s after" in answer
        assert b"(1 bytes were)" in answer
