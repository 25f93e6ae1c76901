"""Sessions: going back, correcting and going on gives what was computed from the start, and computes only what is
new."""
from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from m3jit.api.checkpoints import Checkpoint, EverySentence, EveryToken, EveryTokens, thinned
from m3jit.api.session import Session
from m3jit.api.session_state import Current, SessionState
from m3jit.errors import UserError
from m3jit.models.grammar import Grammar
from tests.api.sessions import PROMPT, SAMPLED, change, model, recurrent, run, session  # noqa: F401  (fixtures)

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
        else:
            change(what, made, one, kept, random, forks=6, appended=70)
            assert what != "restore" or not kept or one.tokens in [state.tokens for state in kept]
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
