"""Texts that begin like earlier ones start from their states: the same bytes as computing everything, for every family
and type of keys and values, whatever comes between."""
from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import m3jit
from m3jit.api.generation import Generation, LanguageModel, Settings
from m3jit.models.adapters import Adapter
from m3jit.models.prefix_index import PrefixIndex
from m3jit.models.program import Options
from m3jit.models.provider import Models
from tests.models.families import FAMILIES, RECURRENT, build

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import make_tiny_adapters  # noqa: E402  (found through the path set above)

TEXT = [int(t) for t in np.random.default_rng(8).integers(4, 200, 200)]
OTHER = [int(t) for t in np.random.default_rng(9).integers(4, 200, 60)]
GREEDY = Settings(max_tokens=4, temperature=0.0)
SAMPLED = Settings(max_tokens=4, temperature=1.1, top_k=0, seed=4, logprobs=1, repeat_penalty=1.2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("prefixes")


def model_of(folder: Path, name: str, prefixes: PrefixIndex | None, **options: Any) -> LanguageModel:
    return LanguageModel(str(build(folder, name)), Models(), threads=1, options=Options(**options),
                         prefixes=prefixes)


def result(model: LanguageModel, ids: list[int], settings: Settings) -> tuple[Any, int]:
    """(tokens, their log-probabilities and the logits at the end; prompt tokens that were known)."""
    text = model.start(ids, settings)
    generation = Generation(text)
    noted = [p.logprobs.chosen.logprob for p in generation if p.logprobs]
    return (generation.tokens, noted, text.vm.get("rLogits").tobytes()), text.reused_tokens


PROMPTS = {"first": (TEXT[:100], 0, 0), "equal": (TEXT[:100], 100, 100), "longer": (TEXT[:112], 100, 100),
           "parts in a page": (TEXT[:80] + OTHER[:9], 80, 64), "shorter": (TEXT[:90], 89, 64),
           "parts in the first page": (TEXT[:20] + OTHER, 20, 0), "nothing in common": (OTHER, 0, 0),
           "longer again": (TEXT[:118], 112, 112)}
"""Prompt, tokens that a model which only attends finds, tokens that a recurrent one does."""


@pytest.mark.parametrize("name", FAMILIES)
def test_hits_are_what_computing_gives(name, folder):
    index = PrefixIndex()
    known, plain = model_of(folder, name, index), model_of(folder, name, None)
    for what, (ids, *reused) in PROMPTS.items():
        for settings in (GREEDY, SAMPLED):
            found, used = result(known, ids, settings)
            assert found == result(plain, ids, settings)[0], (what, settings)
            if settings is GREEDY:
                assert used == reused[name in RECURRENT], what
            else:
                assert used == len(ids), "the logits behind the prompt are known since the last time"
    assert index.stats["hits"] >= 13 and index.stats["dropped"] == 0


@pytest.mark.parametrize("kv_type", [pytest.param("BF16", marks=pytest.mark.slow),
                                     pytest.param("F32", marks=pytest.mark.slow), "F16", "Q8_0"])
def test_every_type_of_keys_and_values(kv_type, folder):
    known = model_of(folder, "llama3/Q8_0", PrefixIndex(), kv_type=kv_type)
    plain = model_of(folder, "llama3/Q8_0", None, kv_type=kv_type)
    for ids in (TEXT[:70], TEXT[:67] + OTHER[:9]):
        for settings in (GREEDY, SAMPLED):
            assert result(known, ids, settings)[0] == result(plain, ids, settings)[0]
    assert known.prefixes.stats["reused_tokens"] == 70 + 67 + 76


@pytest.mark.parametrize("name", FAMILIES)
def test_a_text_goes_on_from_its_own_tokens(name, folder):
    """As a conversation does: the next prompt begins with the last prompt and its answer."""
    known, plain = model_of(folder, name, PrefixIndex()), model_of(folder, name, None)
    first = known.start(TEXT[:40], GREEDY)
    generation = Generation(first)
    generation.result()
    ids = [*TEXT[:40], *generation.tokens, *OTHER[:5]]
    found, used = result(known, ids, GREEDY)
    assert found == result(plain, ids, GREEDY)[0]
    assert used == 43, "the last token that was drawn has not gone through the model"


def test_continuations_of_one_prefix_keep_apart(folder):
    """Two texts append behind one prefix in turn: each has its own rows in the page they share."""
    known, plain = model_of(folder, "llama3/Q8_0", PrefixIndex()), model_of(folder, "llama3/Q8_0", None)
    result(known, TEXT[:70], GREEDY)
    jobs = [(TEXT[:70] + OTHER[i:i + 3], Settings(max_tokens=40, temperature=1.0, seed=i)) for i in range(4)]
    batch, texts = m3jit.Batch(), [known.start(*job) for job in jobs]
    assert [t.reused_tokens for t in texts] == [70] * 4
    for text in texts:
        text.vm.set_sink("TOKENS", text.take_token)
        batch.add(text.vm)
    batch.run()
    pages = [text.vm.state("sKV").pages(0) for text in texts]
    assert len({id(p[0]) for p in pages}) == 1, "a whole page of the prefix is shared by all"
    assert len({id(p[1]) for p in pages}) == 4, "the page they append to is each one's own"
    for text, job in zip(texts, jobs):
        assert text.tokens == result(plain, *job)[0][0]
        assert text.vm.get("rLogits").tobytes() == result(plain, *job)[0][2]


def test_states_are_kept_apart_by_what_they_depend_on(folder):
    """One index for models that differ in weights, type of keys, adapters: no state of one serves another."""
    index = PrefixIndex()
    adapter = make_tiny_adapters.build(folder, next(iter(make_tiny_adapters.ADAPTERS)))
    keys = {model_of(folder, "llama3/Q8_0", index, kv_type="F16").key_of(None),
            model_of(folder, "llama3/Q8_0", index, kv_type="Q8_0").key_of(None),
            model_of(folder, "llama3/Q8_0", index, context=100).key_of(None),
            model_of(folder, "mamba2/F32", index).key_of(None)}
    models = Models()
    found = models.adapter(str(adapter))
    for scale in (1.0, 0.5):
        options = Options(adapters=(Adapter(found.source, found.reference, scale),))
        keys.add(model_of(folder, "llama3/Q8_0", index).key_of(options))
    assert len(keys) == 6
    same = model_of(folder, "llama3/Q8_0", index, temperature=0.3, max_tokens=9, chunk=16).key_of(None)
    assert same in keys and len(keys) == 6


def test_threads_share_an_index(folder):
    known, plain = model_of(folder, "llama3/Q8_0", PrefixIndex(400_000)), model_of(folder, "llama3/Q8_0", None)
    jobs = [TEXT[:30 + 11 * (i % 5)] + OTHER[:i % 3] for i in range(16)]
    expected = {i: result(plain, ids, GREEDY)[0] for i, ids in enumerate(jobs)}
    found: dict[int, Any] = {}

    def work(first: int) -> None:
        for i in range(first, len(jobs), 4):
            found[i] = result(known, jobs[i], GREEDY)[0]
    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == expected
    assert known.prefixes.stats["hits"] and known.prefixes.stats["bytes"] <= 400_000


@pytest.mark.parametrize("name", ["llama3/Q8_0", "mamba2/F32"])
def test_a_text_that_is_stopped_leaves_whole_states(name, folder):
    """Stopped from outside, anywhere: what is kept serves, and what may be half done is not kept."""
    known, plain = model_of(folder, name, PrefixIndex()), model_of(folder, name, None)
    text = known.start(TEXT[:70], Settings(max_tokens=50, temperature=0.0))
    generation = Generation(text)
    next(generation)
    generation.cancel()
    assert [p.finish_reason for p in generation][-1] == "cancelled"
    found, used = result(known, TEXT[:70], GREEDY)
    assert found == result(plain, TEXT[:70], GREEDY)[0] and used == 70


@pytest.mark.parametrize("name", ["llama3/Q8_0", "jamba/F32"])
def test_a_prompt_that_is_stopped_leaves_its_chunks(name, folder):
    """Cancelled after some chunks of the prompt: they need not be computed again."""
    known, plain = model_of(folder, name, PrefixIndex(), chunk=8), model_of(folder, name, None)
    text, batch = known.start(TEXT[:70], GREEDY), m3jit.Batch()
    text.vm.set_sink("TOKENS", text.take_token)
    member = batch.add(text.vm)
    while (text.vm.get("rPos") or 0) < 40:
        batch.step()
    member.cancel()
    batch.run()
    text.finish(member.error)
    assert text.finish_reason == "cancelled" and not text.tokens
    found, used = result(known, TEXT[:70], GREEDY)
    assert used in (40, 48) and found == result(plain, TEXT[:70], GREEDY)[0]


@pytest.mark.parametrize("name", ["llama3/Q8_0", "mamba2/F32"])
def test_sessions_begin_behind_known_tokens(name, folder):
    """What one session computed another one does not, of the same text or one that goes on; nor do texts of
    `generate`."""
    known, plain = model_of(folder, name, PrefixIndex()), model_of(folder, name, None)

    def said(model: LanguageModel, prompt: list[int], **options: Any) -> tuple[list[int], int]:
        with m3jit.Session(model, prompt, temperature=1.0, seed=3, **options) as session:
            list(session.generate(5))
            return list(session.tokens), session.evaluated
    expected, computed = said(plain, TEXT[:70])
    assert said(known, TEXT[:70]) == (expected, computed) == (expected, 74)
    assert said(known, TEXT[:70]) == (expected, 4), "the prompt is known, with what follows"
    longer = expected + OTHER[:6]
    found, computed = said(known, longer)
    assert found == said(plain, longer)[0] and computed == len(longer) + 4 - 74
    assert result(known, TEXT[:70], GREEDY)[1] == 70
    assert said(known, TEXT[:70], options=Options(kv_type="F32"))[1] == 74, "states of another kind serve nobody here"


def test_load_model_has_an_index_when_asked():
    assert m3jit.load_model("default").prefixes is None
    model = m3jit.load_model("default", prefix_memory=1 << 20)
    assert model.prefixes.memory == 1 << 20
    prompt = "She had been a friend and companion such as few possessed: intelligent, well-informed, useful"
    first = model.generate(prompt, max_tokens=5)
    assert first.result() and first.reused_tokens == 0
    again = model.generate(prompt, max_tokens=5)
    assert again.result() == first.text and again.reused_tokens == again.usage.prompt_tokens > 16
