"""What a session refuses, and says about it; it changes nothing."""
from __future__ import annotations

import threading

import pytest

from m3jit.api.checkpoints import EveryToken, EveryTokens
from m3jit.api.session import ContextFull, Session
from m3jit.errors import UserError
from tests.api.sessions import model, run, session  # noqa: F401  (fixtures)

# What is refused.

@pytest.mark.parametrize("text, words", [
    ("", "the text is empty; generate\\(\\) goes on without one"),
    ("a\ud83d", "character 1 of the text is half of a surrogate pair \\(U\\+D83D\\)"),
    (5, "a text or token ids are expected, got int|a text, token ids or messages"), ([], "is empty; give at least one"),
    ([10 ** 7], "token 10000000 is outside the vocabulary"), ("x " * 600, "the context holds 512; go back, shorten")])
def test_text_that_cannot_be_injected(model, text, words):
    made = session(model)
    run(made, 4)
    tokens = made.tokens
    with pytest.raises(UserError, match=words):
        made.inject(text)
    assert made.tokens == tokens and not made.undo()
    run(made, 2)
    assert made.tokens[:-2] == tokens


def test_control_tokens_in_an_injection_stay_text(model):
    made = session(model)
    run(made, 4)
    made.inject("<|endoftext|>")
    assert made.text.endswith("<|endoftext|>") and model.model.tokenizer.eos not in made.tokens[made.start:]
    assert made.waiting > 2


def test_places_that_are_not_there(model):
    made = session(model)
    said = run(made, 24)
    tokens = made.tokens
    for place, words in (({"to_token": -1}, "-1 is no token of the session; it has"),
                         ({"to_token": len(tokens) + 1}, f"give 0 to {len(tokens)} \\(the text begins at {made.start}"),
                         ({"to_token": True}, "True is no token"), ({"to_token": 1.5}, "1.5 is no token"),
                         ({}, "give one of to_token, to_text and after_text, not none"),
                         ({"to_token": 1, "to_text": "a"}, "after_text, not to_token and to_text"),
                         ({"to_token": 3, "to_text": "a"}, "give one of"), ({"to_text": ""}, "a text of the answer"),
                         ({"to_text": "xyzzy"}, "'xyzzy' is not in the text, which is '"),
                         ({"to_text": "a"},
                          r"'a' is in the text \d+ times: 1: .*; 2: .*; give more of the text, or say which"),
                         ({"to_text": "a", "which": 99}, r"which: 99, but 'a' is in the text \d+ times; give 1 to"),
                         ({"to_text": "a", "which": 0}, "which: 0, but"), ({"to_text": 3}, "a text of the answer")):
        with pytest.raises(UserError, match=words):
            made.rollback(**place)
        assert made.tokens == tokens and made.text == said
    assert not made.undo()
    made.rollback(to_text="a", which=-1)
    assert made.text == said[:said.rindex("a")]


def test_an_empty_session(model):
    made = Session(model)
    with pytest.raises(UserError, match="the session is empty; append a prompt first"):
        made.generate()
    with pytest.raises(UserError, match="prompt: is empty"):
        made.append([])
    made.inject("Emma")                                # a text without a prompt
    assert made.start == 0 and run(made, 3)
    made.rollback(to_token=0)
    with pytest.raises(UserError, match="the session is empty"):
        made.generate()
    with pytest.raises(UserError, match="no setting 'temperatur'; there are"):
        Session(model, temperatur=1)
    with pytest.raises(UserError, match="max_tokens: a whole number from 1"):
        made.generate(0)
    with pytest.raises(ContextFull, match="the session would have"):
        made.append("x " * 600)
    for wrong in (0, True, "3", 2.5):
        with pytest.raises(UserError, match="n: a whole number from 1 is expected"):
            EveryTokens(wrong)
    with pytest.raises(UserError, match="keep: a whole number from 2 or None"):
        EveryToken(keep=1)


def test_a_closed_session(model):
    with session(model) as made:
        run(made, 2)
    assert made.closed
    for call in (made.fork, made.generate, made.undo, made.snapshot, lambda: made.rollback(to_token=0),
                 lambda: made.inject("x"), lambda: made.append("x")):
        with pytest.raises(UserError, match="the session is closed; fork it before closing it"):
            call()
    made.close()
    assert made.text


def test_a_session_that_generates_in_another_thread(model):
    """What would change it is refused until it is stopped."""
    made = session(model)
    inside, go_on = threading.Event(), threading.Event()
    write = made.machine.sinks["TOKENS"].write

    def hold(item, blocking):
        inside.set()
        assert go_on.wait(180)
        return write(item, blocking)
    made.machine.sinks["TOKENS"].write = hold
    said: list[str] = []
    thread = threading.Thread(target=lambda: said.append(run(made, 8)))
    thread.start()
    assert inside.wait(180)
    for call in (made.fork, made.undo, lambda: made.rollback(to_token=0), lambda: made.inject("x"), made.close):
        with pytest.raises(UserError, match="is generating in another thread: call stop"):
            call()
    made.stop()
    go_on.set()
    thread.join(180)
    assert not thread.is_alive() and made.finish_reason == "cancelled" and made.text == said[0]
    made.rollback(to_token=made.start)
