"""Sessions: going back, correcting and going on gives what was computed from the start, and computes only what is
new."""
from __future__ import annotations

import os
import shutil
import sys
import threading
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from m3jit.api.checkpoints import Checkpoint, EverySentence, EveryToken, EveryTokens, thinned
from m3jit.api.generation import load_model
from m3jit.api.session import ContextFull, Session
from m3jit.api.session_state import Current, SessionState
from m3jit.durable import Store
from m3jit.errors import UserError
from m3jit.models.grammar import Grammar
from m3jit.models.program import Options
from m3jit.models.provider import DEFAULT_MODEL

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import make_tiny_recurrent  # noqa: E402  (found through the path set above)

PROMPT = "It is a truth universally acknowledged, that"
SAMPLED = {"temperature": 0.9, "seed": 5, "repeat_penalty": 1.2}


@pytest.fixture(scope="module")
def model():
    return load_model("default", threads=1)


@pytest.fixture(scope="module", params=["mamba/F32", "jamba/Q8_0"])
def recurrent(request, tmp_path_factory):
    """A model, and a seed with which its text goes on for 40 tokens."""
    path = make_tiny_recurrent.build(tmp_path_factory.mktemp("recurrent"), request.param)
    return load_model(path, threads=1), {"mamba/F32": 3, "jamba/Q8_0": 0}[request.param]


def session(model, prompt=PROMPT, **more) -> Session:
    return Session(model, prompt, **{"temperature": 0} | more)


def run(session: Session, tokens: int | None = None) -> str:
    return "".join(piece.text for piece in session.generate(tokens))


# Going back.

@pytest.mark.parametrize("settings", [{"temperature": 0}, SAMPLED], ids=["greedy", "sampled"])
def test_back_and_on_without_a_change_gives_the_same_tokens(model, settings):
    made = session(model, **settings)
    said, tokens, first = run(made, 24), made.tokens, made.start
    plain = model.generate(PROMPT, max_tokens=24, **settings)
    assert plain.result() == said == made.text and tuple(plain.tokens) == tokens[made.start:]
    for kept in (len(tokens) - 1, first + 7, first + 1, first, 3):
        evaluated = made.evaluated
        assert made.rollback(to_token=kept) == len(tokens) - kept and made.waiting <= 1
        if kept < first:
            made.inject(tokens[kept:first])
            assert made.waiting == len(tokens[kept:first])
        run(made, len(tokens) - len(made.tokens))
        assert made.tokens == tokens and made.evaluated - evaluated <= len(tokens) - kept


def test_a_correction_evaluates_what_is_injected_and_at_most_one_token_more(model):
    made = session(model)
    run(made, 20)
    before, at = made.evaluated, made.start + 9
    made.rollback(to_token=at)
    made.inject(" a very fine day")
    injected = len(made.tokens) - at
    assert injected == made.waiting == len(model.model.tokenizer.encode(" a very fine day", add_bos=False))
    next(made.generate())
    assert made.evaluated - before == injected
    fresh = model.generate(made.tokens[:at + injected], temperature=0, max_tokens=12)
    run(made, 11)
    assert fresh.result() == made.text[len(model.decode(made.tokens[made.start:at + injected])):]
    made.rollback(to_token=at)                         # nothing injected: the token at the boundary
    before = made.evaluated
    next(made.generate())
    assert made.evaluated - before == 1


def test_after_the_end_of_what_was_drawn_the_last_token_is_still_to_compute(model):
    made = session(model)
    run(made, 6)
    made.inject(" indeed")
    assert made.waiting == len(made.tokens) - made.start - 6 + 1


def test_to_text(model):
    made = session(model)
    said = run(made, 20)
    word = said.split()[6]
    at = said.index(word, said.index(said.split()[5]))
    made.rollback(to_text=word, which=said[:at + len(word)].count(word))
    assert made.text == said[:at]
    made.inject("London")
    assert made.text == said[:at] + "London"
    run(made, 3)
    assert made.text.startswith(said[:at] + "London")
    made.undo()
    assert made.text == said
    made.rollback(after_text=said[:30])
    assert made.text == said[:30] and made.undo() and made.text == said


@pytest.mark.parametrize("how", ["inject", "append"])
def test_token_ids_behind_a_place_inside_a_token_leave_the_rest_where_it_is(model, how):
    made = session(model)
    said = run(made, 16)
    pieces = [model.model.tokenizer.decode_bytes(t).decode() for t in made.tokens[made.start:]]
    long = next(i for i, piece in enumerate(pieces) if i > 3 and len(piece.strip()) > 3)
    made.rollback(after_text=said[:len("".join(pieces[:long])) + 2])
    before, first = made.text, made.start
    getattr(made, how)([5, 6, 7])
    assert model.decode(made.tokens[first:]) == before + model.decode([5, 6, 7])
    next(made.generate())
    assert made.undo() is (how == "inject") and (how == "append" or made.text == said)


def test_a_place_inside_a_token_keeps_the_tokens_before_and_spells_the_rest(model):
    made = session(model)
    said = run(made, 16)
    pieces = [model.model.tokenizer.decode_bytes(t).decode() for t in made.tokens[made.start:]]
    long = next(i for i, piece in enumerate(pieces) if i > 3 and len(piece.strip()) > 3)
    cut = len("".join(pieces[:long])) + 2
    made.rollback(after_text=said[:cut])
    assert made.tokens[made.start:] == tuple(made.tokens[made.start:made.start + long])
    assert made.text == said[:cut] and len(made.tokens) == made.start + long
    rest = model.model.tokenizer.encode(pieces[long][:2], add_bos=False)
    assert made.waiting == len(rest)                   # generate() would inject what is left of the token
    fork = made.fork()
    next(fork.generate())
    assert fork.tokens[fork.start + long:][:len(rest)] == tuple(rest) and fork.text.startswith(said[:cut])
    made.inject("zz")
    assert made.text == said[:cut] + "zz" and made.tokens[made.start + long:] == \
        tuple(model.model.tokenizer.encode(pieces[long][:2] + "zz", add_bos=False))


def test_places_in_characters_of_several_tokens(model):
    made = session(model)
    run(made, 3)
    made.inject("naïve 😀 café")
    whole = made.text
    for text in ("ïve", "😀", "é", "ve"):
        made.rollback(to_text=text)
        assert made.text == whole[:whole.index(text)]
        made.inject("ü")
        assert made.text == whole[:whole.index(text)] + "ü"
        assert made.undo() and made.text == whole
    at = next(i for i in range(made.start, len(made.tokens))
              if "�" in model.decode(made.tokens[made.start:i]))
    made.rollback(to_token=at)                         # in the middle of a character
    run(made, 4)
    assert made.tokens[:at] and len(made.tokens) == at + 4


def test_the_state_behind_a_rollback_is_that_of_a_fresh_machine(model):
    """Keys and values of every layer, byte for byte."""
    made = session(model)
    run(made, 20)
    made.rollback(to_token=made.start + 5)
    made.inject(" the garden")
    run(made, 4)
    fresh = session(model, made.tokens[:-1])
    run(fresh, 1)
    ours, theirs = (s.machine.state("S0") for s in (made, fresh))
    assert ours.lengths(tuple(ours.layers)) == theirs.lengths(tuple(theirs.layers))
    for layer in ours.layers:
        for a, b in zip(ours.rows(layer), theirs.rows(layer)):
            assert a.tobytes() == b.tobytes()


# Recurrent states.

@pytest.mark.parametrize("policy", [None, EveryToken(), EveryTokens(5), EverySentence(), EveryTokens(100)])
def test_recurrent_states_are_computed_again_from_a_checkpoint(recurrent, policy):
    model, seed = recurrent
    made = session(model, [5, 9, 3, 200, 17, 40, 6], checkpoints=policy, temperature=1.0, seed=seed)
    run(made, 40)
    tokens = made.tokens
    n = policy.n if isinstance(policy, EveryTokens) else 1 if isinstance(policy, EveryToken) else 16 if policy is None \
        else policy.most
    assert len(tokens) > made.start + 20
    for kept in (len(tokens) - 1, made.start + 13, made.start + 2, made.start):
        made.rollback(to_token=kept)
        assert 0 <= made.waiting <= n
        run(made, len(tokens) - kept)
        assert made.tokens == tokens
    made.rollback(to_token=made.start + 8)
    made.inject([9, 9])
    assert 2 <= made.waiting <= 2 + n
    run(made, 5)
    fresh = session(model, made.tokens[:made.start + 10], temperature=1.0, seed=seed)
    fresh._now.random[-1] = made.snapshot().random[made.start + 9]
    run(fresh, 5)
    assert fresh.tokens == made.tokens


def test_every_token_leaves_nothing_but_the_boundary_to_compute(recurrent):
    model, seed = recurrent
    made = session(model, [5, 9, 3, 200, 17, 40, 6], checkpoints=EveryToken(keep=None), temperature=1.0, seed=seed)
    run(made, 30)
    assert len(made.tokens) > made.start + 20
    for kept in range(len(made.tokens) - 1, made.start, -1):
        fork = made.fork()
        fork.rollback(to_token=kept)
        assert fork.waiting <= 1                       # 0: what followed it was known
        fork.inject([7, 8, 9])
        assert fork.waiting == 3
    made.rollback(to_token=made.start)                 # what follows a prompt is kept as well
    assert made.waiting == 0


def test_thinning_keeps_a_bounded_number_and_the_newest():
    points: list = []
    for row in range(1000):
        points = thinned([*points, row], 8)
        assert len(points) <= 8 and points[-1] == row and points == sorted(points) and points[0] == 0
    gaps = [b - a for a, b in zip(points, points[1:])]
    assert gaps[-3:] == [1, 1, 1] and gaps[0] > gaps[-1]
    assert thinned(list(range(50)), None) == list(range(50))


def test_sentences():
    policy = EverySentence(most=50)
    assert all(policy.due(3, text) for text in (".", "!”", "? ", "\n", "end.)", "…"))
    assert not any(policy.due(3, text) for text in (" and", ",", "3.5", "", "”"))
    assert policy.due(50, "and")


def test_a_policy_is_given_the_text_unless_it_says_that_it_does_not_read_it(model):
    class Asked:
        keep = 4

        def __init__(self) -> None:
            self.texts: list[str] = []

        def due(self, since: int, text: str) -> bool:
            self.texts.append(text)
            return True

    class Deaf(Asked):
        reads_text = False

    said = {}
    for policy in (Asked(), Deaf()):
        session = Session(model, PROMPT, temperature=0, checkpoints=policy)
        for _ in session.generate(6):
            pass
        said[type(policy)], held = policy.texts, session.snapshot().points
        assert len(held) == 4 and held[-1].rows == len(session.tokens) - 1
    assert "".join(said[Asked]) and session.text.startswith("".join(said[Asked]))
    assert said[Deaf] == [""] * len(said[Asked])


def test_noting_checkpoints_changes_nothing_else():
    now = Current([1, 2, 3], 1, "rest", None, [4, 5, 6], correcting=True, evaluated=7, last_point=1)
    points = (Checkpoint(1, {}), Checkpoint(2, {}))
    assert now.noted(iter(points), 2) == replace(now, points=points, last_point=2)
    assert now.points == () and now.last_point == 1


# Anything in any order.

def wander(session: Session, steps: int, random: Random) -> None:
    """Random operations; whenever something was generated, a session that begins with the same tokens gives the
    same."""
    made, kept = [session], []
    for _ in range(steps):
        one = random.choice(made)
        size = len(one.tokens)
        what = random.choice(("generate", "generate", "rollback", "inject", "fork", "undo", "snapshot", "restore",
                              "append"))
        if what == "generate" and size and size < one.context - 12 and one.finish_reason != "stop":
            fresh = session.fork()                     # of the same program; it computes all tokens again
            there = one.snapshot()
            fresh.restore(SessionState(tokens=one.tokens, start=one.start, rest=there.rest, random=there.random))
            count, waiting, evaluated = random.randint(1, 9), one.waiting, one.evaluated
            said = [(p.text, p.tokens, p.finish_reason) for p in one.generate(count)]
            assert said == [(p.text, p.tokens, p.finish_reason) for p in fresh.generate(count)]
            assert one.tokens == fresh.tokens and one.snapshot().random == fresh.snapshot().random
            assert one.text == fresh.text
            assert waiting <= one.evaluated - evaluated <= waiting + count
            fresh.close()
        elif what == "rollback" and size:
            one.rollback(to_token=random.randint(max(1, size - 30), size))
        elif what in ("inject", "append") and size < one.context - 80:
            getattr(one, what)([random.randint(5, 200)
                                for _ in range(random.randint(1, 70 if what == "append" else 6))])
        elif what == "fork" and len(made) < 6:
            made.append(one.fork())
        elif what == "undo":
            one.undo()
        elif what == "snapshot":
            kept.append(one.snapshot())
        elif what == "restore" and kept:
            one.restore(random.choice(kept))
            assert one.tokens in [state.tokens for state in kept]
    for one in made:
        one.close()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("settings", [SAMPLED, {"temperature": 1.0}], ids=["penalty", "plain"])
def test_any_order(model, seed, settings):
    wander(session(model, [9, 8, 7], **settings), 60, Random(seed))


@pytest.mark.parametrize("seed", range(2))
def test_any_order_with_recurrent_states(recurrent, seed):
    wander(session(recurrent[0], [9, 8, 7], temperature=1.0, checkpoints=[EveryTokens(4), EveryToken(keep=3)][seed]),
           50, Random(seed))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 130))
def test_many_orders(model, recurrent, seed):
    """pytest -m slow tests/api/test_session.py -k many_orders"""
    wander(session(model, [9, 8, 7], **SAMPLED), 200, Random(seed))
    wander(session(recurrent[0], [9, 8, 7], temperature=1.0, checkpoints=EveryTokens(1 + seed % 9)), 100, Random(seed))


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


# How a text ends.

def test_ends(model):
    made = session(model, max_tokens=6)
    run(made)
    assert made.finish_reason == "length" and run(made) == "" and made.finish_reason == "length"
    made.rollback(to_token=made.start + 4)
    run(made)
    assert len(made.tokens) == made.start + 6 and made.finish_reason == "length"
    small = session(model, context=len(model.encode(PROMPT)) + 5)
    run(small)
    assert small.finish_reason == "context" and len(small.tokens) <= small.context + 1
    full = small.tokens
    assert run(small) == "" and small.finish_reason == "context" and small.tokens == full
    said = model.generate(PROMPT, temperature=0, max_tokens=20).result()
    stop = said.split()[4]
    stopping = session(model, stop=[stop])
    assert run(stopping) == said[:said.index(stop)] and stopping.finish_reason == "stop"
    assert run(stopping) == "" and stopping.finish_reason == "stop"


@pytest.mark.parametrize("place", ["an edit", "a pause"])
def test_a_stop_string_that_begins_before_the_place_where_it_goes_on(model, place):
    def begun(**more) -> Session:
        made = session(model, **more)
        run(made, 12)
        if place == "an edit":
            made.rollback(to_token=made.start + 5)
            made.inject(" and a very fine d")
        return made
    plain = begun()
    p = len(plain.text)
    run(plain, 12)
    stop = plain.text[p - 3:p + 4]
    assert plain.text.index(stop) == p - 3
    made = begun(stop=[stop, "never there"])
    *pieces, last = made.generate(12)
    assert [piece.text for piece in pieces] == [""] * len(pieces) and (last.text, last.back) == ("", 3)
    assert made.finish_reason == "stop" and made.snapshot().ended_at == p - 3
    assert made.text.startswith(plain.text[:p + 4])
    if place == "an edit":                             # one that was injected whole
        whole = begun(stop=[plain.text[p - 3:p]])
        assert run(whole, 5) and whole.finish_reason != "stop"


def test_a_stop_string_that_comes_with_the_last_token(model):
    """Going on then says the same again."""
    said = model.generate(PROMPT, temperature=0, max_tokens=20).result()
    made = session(model, stop=[said[-4:]], max_tokens=20)
    assert said.index(said[-4:]) == len(said) - 4 and run(made) == said[:-4]
    assert made.finish_reason == "stop" and run(made) == "" and made.finish_reason == "stop"


def test_a_text_that_the_model_ends(model):
    ends = model.model.tokenizer.ends
    made = session(model, grammar=Grammar("regex", "(yes|no), maybe"))
    said = run(made)
    assert made.finish_reason == "stop" and said in ("yes, maybe", "no, maybe") and not set(made.tokens) & ends
    assert run(made) == ""
    made.rollback(to_text="maybe")
    assert run(made) == "maybe" and made.text == said
    with pytest.raises(UserError, match="inject: the grammar does not allow token"):
        made.inject(" perhaps")
    assert made.text == said and not made.undo() or made.text == said
    made.rollback(to_token=made.start)
    other = "no, " if said.startswith("yes") else "yes, "
    made.inject(other)
    assert run(made) == "maybe" and made.text == other + "maybe"


def test_logprobs(model):
    made = session(model, logprobs=2)
    first = [piece for piece in made.generate(6) if piece.tokens]
    made.rollback(to_token=made.start + 3)
    again = [piece for piece in made.generate(3) if piece.tokens]
    assert again == first[3:] and all(len(piece.logprobs.top) == 2 for piece in again)


def test_a_machine_that_fails_is_replaced(model):
    made = session(model)
    run(made, 5)
    tokens, machine = made.tokens, made.machine

    def broken(item, blocking):
        raise RuntimeError("no room")
    machine.sinks["TOKENS"].write = broken
    with pytest.raises(UserError, match="no room"):
        run(made, 3)
    assert made.machine is not machine and made.tokens == tokens
    run(made, 3)
    plain = model.generate(PROMPT, temperature=0, max_tokens=8)
    assert plain.result() == made.text and tuple(plain.tokens) == made.tokens[made.start:]


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
                         ({}, "give one of to_token, to_text and after_text"),
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
