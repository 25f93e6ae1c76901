"""Text from a model: the tokens of the compiled program, log-probabilities, stop strings, limits, grammars."""
from __future__ import annotations

import gc
import json
import re
import threading
import weakref

import numpy as np
import pytest

import m3jit
from m3jit.errors import OperandError, UserError
from m3jit.models.program import Options
from m3jit.models.provider import Models

PROMPT = "She had been"


@pytest.fixture(scope="module")
def model() -> m3jit.LanguageModel:
    return m3jit.load_model("default", threads=1)


def program_text(seed: int = 1, backend: str = "auto", **options) -> str:
    """What the program of `m3jit compile` streams."""
    models = Models()
    program = models.program(models.load("default"), "default", Options(**options))
    vm = m3jit.VM(program, backend, 1, models=models, seed=seed)
    vm.push_input(PROMPT)
    return "".join(vm.output())


@pytest.mark.parametrize("settings", [dict(temperature=0.0), dict(temperature=0.8), dict(temperature=1.3, top_k=0),
                                      dict(temperature=0.7, top_p=0.6, min_p=0.0),
                                      dict(temperature=0.9, repeat_penalty=1.3)], ids=str)
def test_same_text_as_the_compiled_program(model, settings):
    text = model.generate(PROMPT, max_tokens=24, seed=1, **settings).result()
    assert text == program_text(max_tokens=24, **settings)


def test_pieces_tokens_and_usage(model):
    generation = model.generate(PROMPT, max_tokens=12, temperature=0)
    pieces = list(generation)
    assert "".join(map(str, pieces)) == generation.text == model.decode(generation.tokens)
    assert [t for p in pieces for t in p.tokens] == generation.tokens
    assert [p.finish_reason for p in pieces] == [None] * 12 + ["length"]
    prompt = len(model.encode(PROMPT))
    assert (generation.usage.prompt_tokens, generation.usage.completion_tokens) == (prompt, 12)
    assert generation.usage.total_tokens == prompt + 12
    again = model.generate(model.encode(PROMPT), max_tokens=12, temperature=0)
    assert again.result() == generation.text, "token ids are the same prompt"


def test_seeds(model):
    texts = [model.generate(PROMPT, max_tokens=12, seed=seed).result() for seed in (3, 3, 4, None, None)]
    assert texts[0] == texts[1] != texts[2] and texts[3] == texts[4]


def test_interpreter_and_native_code_agree(model):
    slow = m3jit.load_model("default", backend="interpreter")
    for settings in (dict(seed=5), dict(temperature=0, logprobs=5)):
        ours, theirs = (list(m.generate(PROMPT, max_tokens=3, **settings)) for m in (model, slow))
        assert ours == theirs


def test_log_probabilities_are_those_of_the_logits(model):
    generation = model.generate(PROMPT, max_tokens=6, temperature=0.9, seed=2, logprobs=4)
    ids = model.encode(PROMPT)
    for piece in list(generation)[:-1]:
        greedy = model.start(ids, m3jit.api.generation.Settings(max_tokens=1, temperature=0))
        list(greedy.vm.output("TOKENS"))
        logits = greedy.vm.get("rLogits").data.reshape(-1).astype(np.float64)
        expected = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
        chosen = piece.logprobs.chosen
        assert (chosen.token,) == piece.tokens and chosen.logprob == pytest.approx(expected[chosen.token], abs=1e-5)
        best = np.argsort(-logits, kind="stable")[:4]
        assert [c.token for c in piece.logprobs.top] == best.tolist()
        assert [c.logprob for c in piece.logprobs.top] == pytest.approx(expected[best].tolist(), abs=1e-5)
        ids = [*ids, chosen.token]
    assert model.generate(PROMPT, max_tokens=6, temperature=0.9, seed=2).result() == generation.text


def test_log_probability_of_the_chosen_token_alone(model):
    piece = next(model.generate(PROMPT, logprobs=0))
    assert piece.logprobs.top == () and piece.logprobs.chosen.logprob < 0


def test_stop_strings(model):
    whole = model.generate(PROMPT, max_tokens=40, temperature=0).result()
    stop = whole[20:26]
    generation = model.generate(PROMPT, max_tokens=40, temperature=0, stop=["never in there", stop])
    assert generation.result() == whole[:whole.index(stop)] and generation.finish_reason == "stop"
    made = generation._generated.vm.get("rMade")
    assert made == len(generation.tokens) < 40, "it went on behind the stop string"


def test_the_context_ends_a_text(model):
    ids = model.encode(PROMPT)
    generation = model.generate(PROMPT, max_tokens=None, temperature=0, context=len(ids) + 4)
    generation.result()
    assert generation.finish_reason == "context" and generation.usage.completion_tokens == 5
    exact = model.generate(PROMPT, max_tokens=9, temperature=0, context=len(ids))
    exact.result()
    assert exact.finish_reason == "context" and exact.usage.completion_tokens == 1


def test_a_prompt_longer_than_the_context_names_both_lengths(model):
    n = len(model.encode("x" * 3000))
    with pytest.raises(UserError, match=f"the prompt has {n} tokens, the context {model.context}; shorten"):
        model.generate("x" * 3000)
    with pytest.raises(UserError, match=f"has {len(model.encode(PROMPT))} tokens, the context 2 "
                                        rf"\(of the model's {model.context}\).*allow more"):
        model.generate(PROMPT, context=2)


def test_cancel(model):
    generation = model.generate(PROMPT, max_tokens=None)
    next(generation)
    generation.cancel()
    assert list(generation)[-1].finish_reason == generation.finish_reason == "cancelled"
    assert generation.usage.completion_tokens <= 2
    never_started = model.generate(PROMPT, max_tokens=None)
    never_started.cancel()
    assert [p.finish_reason for p in never_started] == ["cancelled"]


def test_cancel_from_another_thread(model):
    generation = model.generate(PROMPT, max_tokens=None, context=500)
    first = next(generation)
    thread = threading.Thread(target=generation.cancel)
    thread.start()
    thread.join()
    assert first.text and list(generation)[-1].finish_reason == "cancelled"


def test_a_dropped_generation_frees_its_machine(model):
    generation = model.generate(PROMPT)
    next(generation)
    machine = weakref.ref(generation._generated.vm)
    del generation
    gc.collect()
    assert machine() is None


@pytest.mark.parametrize("prompt", [None, 5, {"role": "user", "content": "x"}, [1.5], [True], ["a"]], ids=repr)
def test_wrong_prompts(model, prompt):
    with pytest.raises(UserError, match="^prompt: a text.* expected"):
        model.generate(prompt)


def test_a_name_that_no_file_can_have():
    with pytest.raises(UserError, match="File name too long; give the path of a model"):
        m3jit.load_model("x" * 5000)


@pytest.mark.parametrize("settings, message", [
    (dict(temperature=-1), "temperature: a number from 0"), (dict(temperature=float("nan")), "temperature"),
    (dict(top_p=1.5), "top_p: a number from 0 to 1 is expected, got 1.5"), (dict(top_k=-1), "top_k: a whole number"),
    (dict(top_k=True), "top_k"), (dict(max_tokens=0), "max_tokens: a whole number from 1"),
    (dict(logprobs=21), "logprobs: a whole number from 0 to 20"), (dict(seed=2 ** 64), "seed"),
    (dict(stop=""), "stop: strings of 1"), (dict(context=0), "context"),
    (dict(heat=1), "no setting 'heat'; there are max"),
    (dict(grammar="{}"), "m3jit.Grammar is expected")], ids=str)
def test_wrong_settings(model, settings, message):
    with pytest.raises(UserError, match=message):
        model.generate(PROMPT, **settings)


@pytest.mark.parametrize("prompt, message", [("", "is empty"), ([], "is empty"), ([5, 99999], "token 99999 is outside"),
                                             ([5, "x"], "ids are whole numbers, and item 1 is 'x'"), ([-1], "outside")])
def test_wrong_prompts(model, prompt, message):
    with pytest.raises(UserError, match=message):
        model.generate(prompt)


def test_no_such_model():
    with pytest.raises(UserError, match="no such file"):
        m3jit.load_model("no-such-model")


# -- grammars ---------------------------------------------------------------------------------------------------------

SCHEMA = {"type": "object", "required": ["name", "age"], "additionalProperties": False,
          "properties": {"name": {"enum": ["Emma", "Anne"]}, "age": {"type": "integer", "maximum": 99}}}


def test_a_json_schema_is_kept(model):
    for seed in range(6):
        grammar = m3jit.Grammar.of_schema(SCHEMA)
        generation = model.generate(PROMPT, seed=seed, temperature=1.5, grammar=grammar, max_tokens=200)
        value = json.loads(generation.result())
        assert generation.finish_reason == "stop"
        assert value["name"] in ("Emma", "Anne") and isinstance(value["age"], int) and value["age"] <= 99


@pytest.mark.parametrize("grammar, pattern", [
    (m3jit.Grammar("regex", "[a-f]{4}-[0-9]{2}"), r"[a-f]{4}-[0-9]{2}"),
    (m3jit.Grammar("lark", 'start: "yes" | "no" WORD\nWORD: /[a-z]{2}/'), r"yes|no[a-z]{2}"),
    (m3jit.Grammar("gbnf", 'root ::= "on" [0-9] "off"'), r"on[0-9]off")], ids=lambda g: getattr(g, "kind", ""))
def test_other_grammars(model, grammar, pattern):
    text = model.generate(PROMPT, seed=3, grammar=grammar, max_tokens=40).result()
    assert re.fullmatch(pattern, text), text


def test_grammar_masks_are_the_same_everywhere(model):
    slow = m3jit.load_model("default", backend="interpreter")
    grammar = m3jit.Grammar("regex", "[a-z ]{30}")
    ours, theirs = (list(m.generate(PROMPT, seed=9, grammar=grammar, max_tokens=4)) for m in (model, slow))
    assert ours == theirs


def test_the_state_of_a_grammar_rolls_back(model):
    """A snapshot in the middle and its return give the same text again: the grammar's state is part of the root."""
    text = model.start(model.prompt_tokens(PROMPT), m3jit.api.generation.Settings(
        seed=5, max_tokens=40, grammar=m3jit.Grammar("regex", "[a-z]{3} [0-9]{3} [a-z]{3}")))
    vm, tokens = text.vm, []
    out = vm.output("TOKENS")
    tokens += [next(out) for _ in range(2)]
    snapshot = vm.fork()
    rest = [next(out) for _ in range(3)]
    vm.abort(snapshot, resume=True)
    assert [next(out) for _ in range(3)] == rest
    everything = b"".join(tokens + rest + list(out))
    ids = np.frombuffer(everything, "<i8")
    assert re.fullmatch("[a-z]{3} [0-9]{3} [a-z]{3}", model.decode(ids.tolist()))


def test_a_matcher_is_a_value(model):
    start = model._grammars.matcher(m3jit.Grammar("regex", "ab|ac"))
    a = next(t for t in range(model.vocabulary) if model.model.decode_bytes(t) == b"a")
    before = start.mask()
    after = start.after(a)
    assert (start.mask() == before).all() and before[a] and not after.mask()[a]
    with pytest.raises(OperandError, match=f"does not allow token {a} here"):
        after.after(a)


@pytest.mark.parametrize("grammar, message", [
    (m3jit.Grammar("json_schema", '{"type": "objectt"}'), "json_schema: Invalid type: objectt"),
    (m3jit.Grammar("regex", "((("), "regex: .*unclosed group"),
    (m3jit.Grammar("lark", "start: foo"), "lark: .*unknown name"), (m3jit.Grammar("gbnf", "root = 5"), "gbnf: "),
    (m3jit.Grammar("json_schema", '{"$ref": "#"}'), "json_schema: no text is allowed by it; look for a rule"),
    (m3jit.Grammar("gbnf", "root ::= root"), "gbnf: no text is allowed"),
    (m3jit.Grammar("regex", r"[^\x00-\U0010ffff]"), "regex: no text is allowed"),
    (m3jit.Grammar("xml", ""), "no kind of grammar 'xml'; there are json_schema")],
    ids=lambda g: getattr(g, "kind", ""))
def test_wrong_grammars(model, grammar, message):
    with pytest.raises(UserError, match="(?s)" + message):
        model.generate(PROMPT, grammar=grammar)


def test_a_grammar_with_too_many_possibilities(model, capfd):
    """The text ends with what the library says, and without the dump of its state."""
    schema = {"type": "object", "properties": {f"k{i}": {"type": "integer"} for i in range(3000)}}
    with pytest.raises(UserError) as caught:
        model.generate(PROMPT, grammar=m3jit.Grammar.of_schema(schema)).result()
    assert re.fullmatch(r"json_schema: llguidance cannot follow it any further: .*2000.*; make it simpler",
                        str(caught.value)) and caught.value.exit_code == 1
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("schema, message", [("{", "is no JSON"), ([1], "an object was expected"),
                                             ("[1]", "an object")])
def test_wrong_schemas(schema, message):
    with pytest.raises(UserError, match=message):
        m3jit.Grammar.of_schema(schema)


def test_without_the_library(model, monkeypatch):
    import sys
    monkeypatch.setitem(sys.modules, "llguidance", None)
    other = m3jit.load_model("default")
    with pytest.raises(m3jit.UnsupportedError, match=r"pip install 'm3jit\[grammar\]'"):
        other.generate(PROMPT, grammar=m3jit.Grammar("regex", "a"))


def test_a_machine_without_a_grammar_says_so():
    models = Models()
    text = models.assembly(models.load("default"), "default", Options(hosted=True))
    vm = m3jit.VM(m3jit.assemble("    LOADI rT, -1\n    GRAMMAR rMask, rT\n    HALT\n"))
    assert "GRAMMAR rMask, rToken" in text
    with pytest.raises(m3jit.Trap, match="extension 240 version 1.0 is not known"):
        vm.run()
