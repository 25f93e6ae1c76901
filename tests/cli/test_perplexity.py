"""`m3jit perplexity` and the log-probabilities behind it."""
from __future__ import annotations

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

import m3jit
from m3jit.api.generation import LanguageModel
from m3jit.models.program import Options
from m3jit.models.provider import Models
from tests.cli.command import call

ORACLES = Path(__file__).parents[1] / "oracles"
TEXT = (ORACLES / "perplexity_text.txt").read_text()[:4000]


@pytest.fixture(scope="module")
def model():
    return m3jit.load_model("default", threads=1)


def test_scores_are_the_log_probabilities_of_generation(model):
    """Token by token against all at once: the same bytes."""
    generation = model.generate("She had been", max_tokens=90, seed=3, logprobs=0)
    noted = np.array([p.logprobs.chosen.logprob for p in generation if p.logprobs], np.float32)
    prompt = model.encode("She had been")
    scores = model.score(prompt + generation.tokens)
    assert scores.dtype == np.float32 and scores[len(prompt) - 1:].tobytes() == noted.tobytes()


def test_scores_do_not_depend_on_chunks_or_executors(model):
    ids = model.encode(TEXT)[:70]
    expected = model.score(ids).tobytes()
    for chunk in (1, 7, 64, 128):
        other = LanguageModel("default", Models(), threads=2, options=Options(chunk=chunk))
        assert other.score(ids).tobytes() == expected, chunk
    slow = m3jit.load_model("default", backend="interpreter")
    assert slow.score(ids[:12]).tobytes() == model.score(ids[:12]).tobytes()


def test_scores_of_short_texts(model):
    assert len(model.score([5])) == 0 and len(model.score([5, 6])) == 1
    with pytest.raises(m3jit.UserError, match="has 513 tokens, the context 512"):
        model.score([5] * 513)
    assert len(model.score([5] * 512)) == 511


def said(model, size, windows):
    """What the command says of a text, from the definition."""
    ids = model.model.tokenizer.encode(TEXT, add_bos=False, add_eos=False)
    parts = [ids[at:at + size] for at in range(0, len(ids) - size + 1, size)][:windows]
    loss = -np.concatenate([model.score(p) for p in parts]).astype(np.float64)
    mean = loss.mean()
    return f"perplexity {math.exp(mean):.4f}: {len(loss)} tokens in {len(parts)} windows of {size}, {mean:.6f}"


def test_the_command(capfd, model, tmp_path):
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    assert not model.model.tokenizer.adds_bos
    for options, expected in (([], said(model, 512, None)), (["--window", 100], said(model, 100, None)),
                              (["-w", 64, "--max-windows", 2], said(model, 64, 2))):
        code, out, _ = call(capfd, "perplexity", "default", file, "--threads", 1, *options)
        assert code == 0 and out.startswith(expected), (out, expected)


def test_a_model_with_a_start_token():
    """Each window begins with it, in place of one token of the text."""
    from m3jit.cli.perplexity import cut

    class Tokenizer:
        adds_bos, bos = True, 1

        def encode(self, text, **_):
            return list(range(10, 21))

    class Stub:
        pass
    stub = Stub()
    stub.model = Stub()
    stub.model.tokenizer = Tokenizer()
    assert cut(stub, "", 4) == [[1, 10, 11, 12], [1, 13, 14, 15], [1, 16, 17, 18]]


@pytest.mark.parametrize("options, code, message", [
    (["default", "FILE", "--window", 513], 2, "--window 513: the model's context is 512"),
    (["default", "FILE", "--window", 1], 2, "--window"), (["default", "SHORT"], 1, "has fewer than 512 tokens"),
    (["default", "no-such-file"], 1, "no-such-file: No such file"), (["no-such-model", "FILE"], 1, "no such file"),
    (["examples/hello.m3asm", "FILE"], 1, "is no model")])
def test_wrong_usage(capfd, tmp_path, monkeypatch, options, code, message):
    monkeypatch.chdir(Path(__file__).parents[2])
    for name, text in (("FILE", TEXT), ("SHORT", "a b c")):
        (tmp_path / name).write_text(text)
    found = call(capfd, "perplexity", *(tmp_path / o if o in ("FILE", "SHORT") else o for o in options))
    assert found.code == code and message in found.err


@pytest.mark.slow
def test_smollm2_against_llama_cpp(capfd):
    """What the command says of the oracle's text, in the oracle's windows: within 1 % of llama.cpp."""
    from tests.models.test_llama import smollm2
    if smollm2() is None:
        pytest.skip("SmolLM2 is not here: m3jit model get smollm2, or set M3JIT_TEST_SMOLLM2")
    oracle = json.loads((ORACLES / "smollm2_perplexity.json").read_text())
    windows, size = len(oracle["window_nll"]), oracle["window"]
    code, out, _ = call(capfd, "perplexity", smollm2(), ORACLES / oracle["text"], "--window", size, "--max-windows",
                        windows)
    found = re.match(rf"perplexity (\d+\.\d+): {windows * (size - 1)} tokens in {windows} windows of {size}, ", out)
    assert code == 0 and found, out
    assert abs(float(found[1]) / oracle["perplexity"] - 1) < 0.01
    ids = m3jit.load_model(smollm2()).model.tokenizer.encode((ORACLES / oracle["text"]).read_text(), add_bos=False)
    assert ids[:windows * size] == oracle["ids"], "the command has scored the tokens that llama.cpp did"
