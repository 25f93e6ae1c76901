"""What clients may ask and what they get: wrong requests, constrained answers, calls of tools, vectors."""
from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import m3jit

pytest.importorskip("starlette", reason="the extra `serve` is not installed")
pytest.importorskip("uvicorn", reason="the extra `serve` is not installed")

from tests.serve.client import (CHAT, PLAIN, SCHEMA, TEMPLATE, TOOLS, Gate, chat_body, events, running,  # noqa: E402
                                wait_for)


# -- wrong requests ---------------------------------------------------------------------------------------------------

WRONG = [
    (PLAIN, b"{", 400, "the body is no JSON"), (PLAIN, b"[]", 400, "JSON array; an object is expected"),
    (PLAIN, b"\xff", 400, "no JSON"), (PLAIN, b"[" * 100000, 400, "no JSON"),
    (PLAIN, b'{"model": "default", "prompt": "a\\ud800"}', 400, "half a surrogate pair"),
    (PLAIN, b'{"\\udfff": 1}', 400, "half a surrogate pair"),
    (PLAIN, {}, 400, "prompt: a text, token ids"),
    (PLAIN, {"prompt": "a"}, 400, "model: a string is expected, got null"),
    (PLAIN, {"model": "no", "prompt": "a"}, 404, "model 'no': this server runs 'default'"),
    (PLAIN, {"model": "default", "prompt": ""}, 400, "prompt: is empty"),
    (PLAIN, {"model": "default", "prompt": [99999]}, 400, "token 99999 is outside the vocabulary"),
    (PLAIN, {"model": "default", "prompt": ["a"] * 17}, 400, "at most 16 texts"),
    (PLAIN, {"model": "default", "prompt": "a", "max_tokens": 0}, 400, "max_tokens: a whole number from 1"),
    (PLAIN, {"model": "default", "prompt": "a", "logprobs": 21}, 400, "logprobs: a whole number from 0 to 20"),
    (PLAIN, {"model": "default", "prompt": "a", "best_of": 3}, 400, "best_of: is not supported"),
    (PLAIN, {"model": "default", "prompt": "a " * 999}, 400, "1000 tokens, the context 512; shorten the prompt"),
    (CHAT, chat_body(temperature="hot"), 400, 'temperature: a number from 0 to 100 is expected, got "hot"'),
    (CHAT, chat_body(temperature=None, top_p=2), 400, "top_p: a number from 0 to 1"),
    (CHAT, chat_body(stop=[""]), 400, "stop: strings of 1 to"), (CHAT, chat_body(stop=5), 400, "stop"),
    (CHAT, chat_body(n=0), 400, "n: a whole number from 1"),
    (CHAT, chat_body(stream="yes"), 400, "stream: true or false"),
    (CHAT, chat_body(seed=1.5), 400, "seed: a whole number"), (CHAT, chat_body(heat=1), 400, "heat: no such field"),
    (CHAT, chat_body(logit_bias={"1": 5}), 400, "logit_bias: is not supported"),
    (CHAT, chat_body(frequency_penalty=0.5), 400, "frequency_penalty: is not supported"),
    (CHAT, chat_body(top_logprobs=2), 400, "top_logprobs: needs logprobs"),
    (CHAT, chat_body(messages=[]), 400, "messages: a list of at least one"),
    (CHAT, chat_body(messages=["hi"]), 400, 'messages[0]: an object with a role'),
    (CHAT, chat_body(messages=[{"role": "robot", "content": ""}]), 400, 'got "robot"'),
    (CHAT, chat_body(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]), 400,
     "only text is taken"),
    (CHAT, chat_body(tools="all"), 400, "tools: a list"),
    (CHAT, chat_body(tools=[{"type": "function"}]), 400, "tools[0]"),
    (CHAT, chat_body(tool_choice="required"), 400, "there are no tools"),
    (CHAT, chat_body(tool_choice="x"), 400, "tool_choice"),
    (CHAT, chat_body(response_format="json"), 400, "response_format: an object with type"),
    (CHAT, chat_body(response_format={"type": "json_schema"}), 400, "json_schema.schema is expected"),
    (CHAT, chat_body(response_format={"type": "json_schema", "json_schema": {"schema": {"type": "thing"}}}), 400,
     "Invalid type: thing"),
    (CHAT, chat_body(response_format={"type": "regex", "regex": "((("}), 400, "response_format: regex: "),
    (CHAT, chat_body(response_format={"type": "grammar", "grammar": "x", "syntax": "c"}), 400,
     "response_format: no kind of grammar 'c'"),
    (CHAT, chat_body(tools=[{"type": "function", "function": {"name": "f", "parameters": {"type": "thing"}}}],
                     tool_choice="required"), 400, "tool_choice: json_schema: Invalid type: thing"),
    (CHAT, chat_body(tools=[5]), 400, 'tools[0]: {"type": "function", "function": {"name": ...}} is expected, got 5'),
    (CHAT, chat_body(tool_choice="x"), 400, 'or one of the tools is expected, got "x"'),
]


@pytest.mark.parametrize("path, body, status, message", WRONG, ids=range(len(WRONG)))
def test_wrong_requests(server, path, body, status, message):
    found, answer = server.post(path, body)
    assert found == status and message in answer["error"]["message"]
    assert set(answer["error"]) == {"message", "type", "param", "code"} and server.idle()
    param, said = answer["error"]["param"], answer["error"]["message"]
    named = re.match(r"([a-z_0-9.\[\]]+): ", said)
    assert named is None or param == named[1], "the field that the words name is the one that is wrong"
    assert param is not None or said.startswith("the body")


def test_wrong_paths(server):
    status, _, data = server.request("GET", "/v1/unknown")
    assert status == 404 and "/v1/unknown: no such path" in json.loads(data)["error"]["message"]
    status, _, data = server.request("GET", CHAT)
    assert status == 405 and "GET is not what" in json.loads(data)["error"]["message"]
    assert server.request("GET", "/v1/models/other")[0] == 404


def test_without_a_template(model):
    from m3jit.api.generation import load_model
    with running(load_model("default", threads=1)) as server:
        status, found = server.post(CHAT, chat_body())
        assert status == 400 and "has no chat template" in found["error"]["message"]


def test_a_template_that_fails_at_a_request_is_that_requests_error(tmp_path):
    """400 with the line, to it alone: a text in the middle, and chats that the template takes, are unharmed."""
    from m3jit.api.generation import load_model
    from m3jit.models.chat_template import TemplateFile
    path = tmp_path / "some.jinja"
    path.write_text("{% if messages[0].content == 'boom' %}\n{{ nobody() }}{% endif %}" + TEMPLATE)
    model = load_model("default", threads=1, chat_template=TemplateFile.read(str(path)))
    with running(model) as server:
        said = server.post(CHAT, chat_body())[1]["choices"][0]["message"]
        alone, gate = server.text(seed=5), Gate(server.engine)
        with ThreadPoolExecutor(1) as pool:
            text = pool.submit(server.text, seed=5)
            assert wait_for(lambda: server.engine.active == 1)
            gate.rounds(5)
            assert wait_for(lambda: not gate.permits._value), "it is in the middle"
            for stream in (False, True):
                status, found = server.post(CHAT, chat_body("boom", stream=stream))
                assert status == 400 and found["error"]["param"] == "messages"
                assert found["error"]["message"] == f"{path}: chat template, line 2: fails: 'nobody' is undefined."
            assert server.engine.active == 1
            gate.release()
            assert text.result() == alone
        assert server.post(CHAT, chat_body())[1]["choices"][0]["message"] == said and wait_for(server.nothing_left)


def test_a_models_own_template_that_cannot_be_read(model):
    from m3jit.api.generation import load_model
    broken = load_model("default", threads=1)
    broken.model.tokenizer.chat_template = "a\n{% magic %}"
    with running(broken) as server, running(model) as other:
        status, found = server.post(CHAT, chat_body())
        assert status == 400 and "chat template, line 2: Encountered unknown tag 'magic'" in found["error"]["message"]
        assert server.text(seed=5) == other.text(seed=5) and wait_for(server.nothing_left)


def test_without_the_grammar_library(server, monkeypatch):
    from m3jit.models import grammar
    monkeypatch.setattr(grammar, "installed", lambda: False)
    status, found = server.post(CHAT, chat_body(response_format={"type": "json_object"}))
    assert status == 400 and "pip install 'm3jit[grammar]'" in found["error"]["message"]


def test_a_body_that_is_too_large(model):
    with running(model, body=2000) as server:
        status, found = server.post(PLAIN, {"model": "default", "prompt": "x" * 3000})
        assert status == 413 and "more than 2000 bytes" in found["error"]["message"]


# -- what a model is made to write ------------------------------------------------------------------------------------

def test_response_formats(server):
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
    _, found = server.post(CHAT, chat_body(response_format=form, temperature=1.0, max_tokens=60))
    assert json.loads(found["choices"][0]["message"]["content"])["name"] in ("Emma", "Anne")
    assert found["choices"][0]["finish_reason"] == "stop"
    _, found = server.post(CHAT, chat_body(response_format={"type": "json_object"}))
    assert found["choices"][0]["message"]["content"].startswith("{")
    for form in ({"type": "regex", "regex": "[0-9]{4}"},
                 {"type": "grammar", "grammar": 'root ::= [0-9] [0-9] "22"', "syntax": "gbnf"}):
        _, found = server.post(CHAT, chat_body(response_format=form))
        assert re.fullmatch("[0-9]{4}", found["choices"][0]["message"]["content"])


def test_grammars_at_once(server):
    """Constrained and free texts in one batch, each as alone."""
    def ask(i: int) -> str:
        form = {"type": "regex", "regex": f"[a-z]{{{i}}} [0-9]{{2}}"} if i % 3 else {"type": "text"}
        body = chat_body(response_format=form, seed=i, temperature=1.0, max_tokens=20)
        return server.post(CHAT, body)[1]["choices"][0]["message"]["content"]
    alone = [ask(i) for i in range(1, 9)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(1, 9))) == alone
    assert all(re.fullmatch(f"[a-z]{{{i}}} [0-9]{{2}}", text) for i, text in enumerate(alone, 1) if i % 3)


@pytest.mark.parametrize("choice, names", [("required", {"find", "visit"}),
                                           ({"type": "function", "function": {"name": "visit"}}, {"visit"})])
def test_calls_of_tools(server, choice, names):
    body = chat_body(tools=TOOLS, tool_choice=choice, max_tokens=80, seed=3, temperature=1.0)
    _, found = server.post(CHAT, body)
    message, reason = found["choices"][0]["message"], found["choices"][0]["finish_reason"]
    function = message["tool_calls"][0]["function"]
    assert reason == "tool_calls" and message["content"] is None and function["name"] in names
    assert json.loads(function["arguments"])["name"] in ("Emma", "Anne")
    connection, response = server.open_stream(CHAT, body)
    chunks = events(response.read())
    connection.close()
    deltas = [c["choices"][0]["delta"] for c in chunks[:-1]]
    assert [d["tool_calls"][0]["function"] for d in deltas if "tool_calls" in d] == [function]
    assert not any(d.get("content") for d in deltas) and chunks[-1] is None


def test_tools_are_in_the_prompt(server, model):
    plain, with_tools, refused = (server.post(CHAT, chat_body(**more))[1]["usage"]["prompt_tokens"] for more in (
        {}, {"tools": TOOLS}, {"tools": TOOLS, "tool_choice": "none"}))
    assert with_tools > plain == refused


def test_log_probabilities(server, model):
    pieces = [p for p in model.generate("She had been", max_tokens=3, temperature=0, logprobs=2) if p.logprobs]
    _, found = server.post(PLAIN, {"model": "default", "prompt": "She had been", "max_tokens": 3, "temperature": 0,
                                   "logprobs": 2})
    noted = found["choices"][0]["logprobs"]
    assert noted["token_logprobs"] == [p.logprobs.chosen.logprob for p in pieces] and noted["text_offset"][0] == 0
    assert noted["top_logprobs"][0] == {c.text: c.logprob for c in pieces[0].logprobs.top}
    _, found = server.post(CHAT, chat_body(logprobs=True, top_logprobs=1, max_tokens=2))
    content = found["choices"][0]["logprobs"]["content"]
    assert len(content) == 2 and content[0]["top_logprobs"][0]["logprob"] == content[0]["logprob"]
    assert bytes(content[0]["bytes"]).decode() == content[0]["token"]


def test_stop_strings_and_echo(server, model):
    whole = server.text(temperature=0, max_tokens=40)
    stop = whole[10:14]
    _, found = server.post(PLAIN, {"model": "default", "prompt": "She had been", "temperature": 0, "max_tokens": 40,
                                   "stop": stop, "echo": True})
    choice = found["choices"][0]
    assert choice["text"] == "She had been" + whole[:whole.index(stop)] and choice["finish_reason"] == "stop"


# -- vectors ----------------------------------------------------------------------------------------------------------

EMBED = "/v1/embeddings"


def test_client_gets_vectors(client):
    """OpenAI's client asks for base64; both forms are the embedder's own bytes."""
    texts = ["a guitar", "an instrument", "rain"]
    expected = m3jit.load_embedder("default").embed(texts)
    packed = client.embeddings.create(model="default", input=texts)
    assert [np.array(d.embedding, np.float32).tobytes() for d in packed.data] == [row.tobytes() for row in expected]
    plain = client.embeddings.create(model="default", input=texts[0], encoding_format="float")
    assert np.array(plain.data[0].embedding, np.float32).tobytes() == expected[0].tobytes()
    assert packed.usage.prompt_tokens == sum(len(m3jit.load_embedder("default").encode(t)) for t in texts)


@pytest.mark.parametrize("body, message", [
    ({}, "input: a text, token ids"), ({"input": [""]}, "input: text 1: a text without tokens"),
    ({"input": ["a", "a " * 999]}, "input: text 2: the text has"),
    ({"input": ["a"] * 2049}, "2049 texts; at most 2048"),
    ({"input": "a", "encoding_format": "hex"},
     'encoding_format: "float" or "base64" is expected, got "hex"'), ({"input": "a", "dimensions": 7}, "not 7"),
    ({"input": [[99999]]}, "99999")], ids=lambda value: str(value)[:40])
def test_wrong_vectors(server, body, message):
    status, found = server.post(EMBED, {"model": "default", **body})
    assert status == 400 and message in found["error"]["message"]
    assert found["error"]["param"] == next(reversed(body), "input")


def test_waiting_for_vectors_is_bounded(server):
    vectors = server.server.vectors
    with vectors._turn, ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(server.post, EMBED, {"model": "default", "input": "a"}) for _ in range(5)]
        assert wait_for(lambda: vectors.present == 5)
        status, found = server.post(EMBED, {"model": "default", "input": "a"})
        assert status == 429 and found["error"]["code"] == "queue_full"
        vectors._turn.release()
        try:
            assert [f.result()[0] for f in futures] == [200] * 5
        finally:
            vectors._turn.acquire()
    assert vectors.present == 0


def test_a_model_that_only_gives_vectors():
    with running(None) as server:
        status, found = server.post(CHAT, chat_body())
        assert status == 400 and "'default' gives vectors, not text; ask /v1/embeddings" in found["error"]["message"]
        assert server.post(EMBED, {"model": "default", "input": "a"})[0] == 200
        assert server.request("GET", "/health")[0] == 200 and server.request("GET", "/metrics")[0] == 200
        assert json.loads(server.request("GET", "/v1/models")[2])["data"][0]["id"] == "default"
