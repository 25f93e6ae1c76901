"""Sessions that are kept: forks, what is undone, snapshots, and sessions on disk."""
from __future__ import annotations

import os
import shutil

import pytest

from m3jit.api.checkpoints import EveryTokens
from m3jit.api.generation import load_model
from m3jit.api.session import Session
from m3jit.durable import Store
from m3jit.errors import UserError
from m3jit.models.grammar import Grammar
from m3jit.models.program import Options
from m3jit.models.provider import DEFAULT_MODEL
from tests.api.sessions import SAMPLED, model, recurrent, run, session  # noqa: F401  (fixtures)

# Forks, undoing, snapshots.

def test_a_fork_goes_its_own_way(model):
    made = session(model, **SAMPLED)
    run(made, 10)
    tokens = made.tokens
    fork = made.fork()
    assert fork.tokens == tokens and fork.evaluated == 0 and fork.waiting == 1
    made.rollback(to_token=made.start + 2)
    made.inject(" never")
    run(made, 12)
    assert fork.tokens == tokens
    run(fork, 12)
    straight = session(model, **SAMPLED)
    run(straight, 22)
    assert fork.tokens == straight.tokens and fork.evaluated == 12
    made.close()
    assert run(fork.fork(), 3)
    pages = [s.machine.state("S0").pages(0)[0] for s in (fork, made)]
    long = session(model, "Emma was happy. " * 20)
    run(long, 2)
    shared = long.fork()
    run(shared, 2)
    assert pages and long.machine.state("S0").pages(0)[0] is shared.machine.state("S0").pages(0)[0]


def test_undo_takes_a_correction_back(model):
    made = session(model, **SAMPLED)
    run(made, 12)
    tokens = made.tokens
    for number in range(3):
        made.rollback(to_token=made.start + 4 + number)
        made.inject(" one")
        made.inject(" two")
        run(made, 3 + number)
    assert made.undo() and made.undo() and made.undo() and made.tokens == tokens and not made.undo()
    run(made, 6)
    straight = session(model, **SAMPLED)
    run(straight, 18)
    assert made.tokens == straight.tokens
    made.inject(" x")
    made.append(" And then")
    assert not made.undo()                             # what is before a prompt stays


def test_snapshots_of_a_session(model):
    made = session(model, **SAMPLED)
    run(made, 5)
    there = made.snapshot()
    first = run(made, 8)
    made.restore(there)
    assert made.tokens == there.tokens and run(made, 8) == first
    fork = made.fork()
    fork.restore(there)
    assert run(fork, 8) == first
    with pytest.raises(UserError, match="restore: what snapshot"):
        made.restore(3)


def test_a_loop_ends_when_the_session_changes(model):
    made = session(model)
    seen = 0
    for piece in made.generate():
        seen += 1
        if seen == 5:
            made.rollback(to_token=made.start + 3)
            made.inject(" well")
    assert seen == 5 and made.finish_reason is None
    stopped = 0
    for piece in made:
        stopped += bool(piece.text)
        if stopped == 3:
            made.stop()
    assert made.finish_reason == "cancelled" and run(made, 2)


def test_prompts_that_follow(model):
    made = session(model)
    run(made, 8)
    middle = len(made.tokens)
    made.append(" Emma was")
    assert made.start == len(made.tokens) > middle and made.text == ""
    run(made, 8)
    fresh = model.generate(made.tokens[:made.start], temperature=0, max_tokens=8)
    assert fresh.result() == made.text
    same = made.tokens[:middle] + made.tokens[made.start:made.start + 2]
    before = made.evaluated
    made.become(same)
    assert made.waiting == 2 and made.text == "" and made.start == len(same)
    run(made, 2)
    assert made.evaluated - before == 3
    assert made.rollback(to_token=2) == len(same) and made.start == 2 and made.text == ""


# On disk.

@pytest.mark.parametrize("settings", [SAMPLED, {"grammar": Grammar("regex", "(very |quite ){9,12}good")}],
                         ids=["sampled", "grammar"])
def test_a_saved_session_goes_on_without_computing(model, tmp_path, settings):
    made = session(model, **settings)
    run(made, 12)
    made.rollback(to_token=made.start + 6)
    if "grammar" not in settings:
        made.inject(" the garden")
        run(made, 3)
    made.save(tmp_path / "store", notes=["mine", 3])
    other = Session(model, **{"temperature": 0} | settings)
    assert other.load(tmp_path / "store") == ["mine", 3]
    assert other.tokens == made.tokens and other.text == made.text and other.evaluated == 0
    assert other.waiting == made.waiting == 1
    run(other, 6)
    run(made, 6)
    assert other.tokens == made.tokens and other.evaluated <= 6


def test_saved_checkpoints_of_recurrent_states(recurrent, tmp_path):
    model, seed = recurrent
    made = session(model, [5, 9, 3, 200, 17, 40, 6], checkpoints=EveryTokens(5), temperature=1.0, seed=seed)
    run(made, 30)
    made.save(tmp_path / "store", "a")
    other = Session(model, temperature=1.0, seed=seed)
    other.load(tmp_path / "store", "a")
    for kept in (made.start, made.start + 12, len(made.tokens) - 1):
        one, two = made.fork(), other.fork()
        for each in (one, two):
            each.rollback(to_token=kept)
        assert two.waiting == one.waiting <= 5
        run(one, 4)
        run(two, 4)
        assert one.tokens == two.tokens


def test_what_cannot_be_loaded(model, recurrent, tmp_path):
    made = session(model)
    run(made, 4)
    made.save(tmp_path / "store")
    tokens = made.tokens
    for target, words in (
            (Session(recurrent[0]), "was saved with another model, 'm3jit default' .* and the one here is"),
            (Session(model, context=3), "the context holds 3"),
            (Session(model, repeat_penalty=1.3), "without a repeat penalty, and here there is one .*--repeat-penalty"),
            (Session(model, options=Options(kv_type="Q8_0")),
             "kv_type = F16, and here it is Q8_0 .--kv-type.; open it")):
        with pytest.raises(UserError, match=words):
            target.load(tmp_path / "store")
        assert target.tokens == ()
    with pytest.raises(UserError, match="has no 'other'|no such"):
        made.load(tmp_path / "store", "other")
    with pytest.raises(UserError):
        made.load(tmp_path / "nothing")
    with Store.open(tmp_path / "store") as store:
        store.commit(made.machine, "plain")
        with pytest.raises(UserError, match="is no session; Store.restore reads"):
            made.load(store, "plain")
    assert made.tokens == tokens
    run(made, 2)
    assert made.tokens[:-2] == tokens


def test_a_saved_session_is_known_by_the_content_of_its_model(tmp_path):
    """Another time, name and place of the same bytes is the same model; other bytes are another one."""
    path = tmp_path / "a.gguf"
    shutil.copyfile(DEFAULT_MODEL, path)
    made = session(load_model(path, threads=1))
    run(made, 4)
    made.save(tmp_path / "store")
    os.utime(path, ns=(1, 1))
    moved = path.rename(tmp_path / "b.gguf")
    other = Session(load_model(moved, threads=1), temperature=0)
    other.load(tmp_path / "store")
    assert (other.tokens, other.evaluated) == (made.tokens, 0)
    raw = bytearray(moved.read_bytes())
    raw[-3000] ^= 1
    changed = tmp_path / "c.gguf"
    changed.write_bytes(raw)
    with pytest.raises(UserError,
                       match="with another model, .* of content [0-9a-f]{32}, and the one here .*open it so"):
        Session(load_model(changed, threads=1), temperature=0).load(tmp_path / "store")


def test_mistakes_in_the_type_of_a_correction_are_named(model):
    made = session(model)
    run(made, 4)
    for call, words in ((lambda: made.rollback("am sure"),
                         r"rollback: 'am sure' is a text.*write rollback\(to_text='am sure'\)"),
                        (lambda: made.inject(None), "inject: a text or token ids are expected, got NoneType"),
                        (lambda: made.inject([{"role": "user", "content": "x"}]),
                         "inject: a text or token ids are expected, got messages"),
                        (lambda: made.append([{"role": "user", "content": "x"}]),
                         "prompt: a text or token ids are expected, got messages"),
                        (lambda: made.inject(b"text"), "are expected, got bytes; decode them first"),
                        (lambda: model.generate(bytearray(b"x")), "messages are expected, got bytearray; decode them"),
                        (lambda: made.rollback(after_text=""), "after_text: a text of the answer is expected, got ''"),
                        (lambda: made.inject([999999]), "inject: token 999999 is outside the vocabulary of"),
                        (lambda: made.inject([]), "inject: is empty")):
        before = made.tokens
        with pytest.raises(UserError, match=words):
            call()
        assert made.tokens == before
