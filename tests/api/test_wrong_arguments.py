"""Arguments that are nothing of the kind: the error names the argument, what is expected and what was given."""
from __future__ import annotations

import re

import pytest

import m3jit
from m3jit.api.checkpoints import EveryTokens
from m3jit.api.generation import load_model
from m3jit.errors import UserError
from tests.api.test_recorded import TEMPLATE


@pytest.fixture(scope="module")
def model():
    return load_model("default", threads=1)


@pytest.fixture(scope="module")
def talk(model):
    made = m3jit.Conversation(model, chat_template=TEMPLATE, max_tokens=4, temperature=0)
    list(made.say("Hello there"))
    return made


@pytest.fixture(scope="module")
def embedder():
    return m3jit.load_embedder("default", threads=1)


OF_A_MODEL = [
    (lambda m: m.generate([5, None]), "prompt: token ids are whole numbers, and item 1 is None"),
    (lambda m: m.generate([[1, 2]]), "prompt: token ids are whole numbers, and item 0 is [1, 2]"),
    (lambda m: m.score([True]), "prompt: token ids are whole numbers, and item 0 is True"),
    (lambda m: m.encode(5), "encode: a text is expected, got 5"),
    (lambda m: m3jit.Session(m, options=5), "options: m3jit.models.program.Options are expected, got 5"),
    (lambda m: m3jit.Session(m, checkpoints=5), "policy of m3jit.api.checkpoints is expected, or None, got 5"),
    (lambda m: m3jit.Session(m, checkpoints=EveryTokens),
     "checkpoints: a policy is expected, and EveryTokens is the class of such; make one, for example EveryTokens()"),
    (lambda m: m3jit.Session(m, "x").inject([7, "a"]), "inject: token ids are whole numbers, and item 1 is 'a'"),
    (lambda m: m3jit.Session(m, "x").save(None), "store: a m3jit.durable.Store or the name of a folder is expected"),
    (lambda m: m3jit.Session(m, "x").load(5), "or the name of a folder is expected, got 5"),
    (lambda m: m3jit.Conversation(m, chat_template=TEMPLATE, now=5), "now: a datetime is expected, got 5"),
    (lambda m: m3jit.RecordedSession(None, m), "log: the name of a file is expected, got None"),
    (lambda m: m3jit.RecordedConversation(5.5, m), "log: the name of a file is expected, got 5.5")]


@pytest.mark.parametrize("do, words", OF_A_MODEL, ids=[words for _, words in OF_A_MODEL])
def test_of_models_and_sessions(model, tmp_path, monkeypatch, do, words):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=re.escape(words)):
        do(model)
    assert not list(tmp_path.iterdir()), "no file of such a name"


@pytest.mark.parametrize("do, words", [
    (lambda t: t.say(None), "say: a text is expected, got None"),
    (lambda t: t.say(b"hi"), "say: a text is expected, got b'hi'"),
    (lambda t: t.correct("x", place=3), "correct: no place 'place'; there are to_token, to_text, after_text, which"),
    (lambda t: t.correct(5), "inject: a text or token ids are expected, got int")], ids=range(4))
def test_of_conversations(talk, do, words):
    before = talk.transcript()
    with pytest.raises(UserError, match=re.escape(words)):
        do(talk)
    assert talk.transcript() == before


@pytest.mark.parametrize("text, words", [
    (5, "text 1: a text or token ids are expected, got int"),
    (b"x", "text 1: a text or token ids are expected, got bytes"),
    ([5, "x"], "text 1: token ids are whole numbers, and item 1 is 'x'")], ids=range(3))
def test_of_embedders(embedder, text, words):
    with pytest.raises(UserError, match=re.escape(words)):
        embedder.embed_one(text)
