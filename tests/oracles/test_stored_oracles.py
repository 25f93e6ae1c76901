"""The stored oracles are whole, and the tiny models made here are the ones the peer ran."""
from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

import numpy as np
import pytest

ORACLES = Path(__file__).parent
sys.path.insert(0, str(ORACLES.parent.parent / "tools"))

import make_tiny_models  # noqa: E402  (found through the path set above)
import oracle_text  # noqa: E402
from nasty_strings import nasty_strings, special_strings  # noqa: E402
from reference_llama import ReferenceLlama  # noqa: E402


TYPES = (*make_tiny_models.TYPES, *make_tiny_models.MORE_TYPES)


def read(name: str) -> dict:
    raw = (ORACLES / name).read_bytes()
    return json.loads(gzip.decompress(raw) if name.endswith(".gz") else raw)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_tiny_models.build(tmp_path_factory.mktemp("tiny"), TYPES)


def tiny_row(name: str) -> dict:
    return read("tiny_logits.json.gz" if name in make_tiny_models.TYPES else "tiny_types.json.gz")["models"][name]


@pytest.mark.parametrize("name", TYPES)
def test_tiny_model_is_the_one_the_peer_ran(name: str, models: dict[str, Path]) -> None:
    assert make_tiny_models.sha256(models[name]) == tiny_row(name)["sha256"]


@pytest.mark.parametrize("name", TYPES)
def test_float64_model_is_near_the_peer(name: str, models: dict[str, Path]) -> None:
    """Two unrelated programs on the same file: a wrong block layout or rotation would be off by far more."""
    oracle = read("tiny_logits.json.gz")
    row = tiny_row(name)
    exact = ReferenceLlama(models[name]).forward(oracle["prompt"])
    np.testing.assert_allclose(exact, row["exact_logits"], rtol=1e-6, atol=1e-6)
    error = np.abs(np.array(row["logits"]) - exact)
    # f16 keys and values (and activations); bf16 activations; int8 activations per 32; the same per 256
    limit = {"F64": 0.005, "F32": 0.005, "F16": 0.005, "BF16": 0.04, "Q4_K": 0.25, "Q6_K": 0.25}.get(name, 0.15)
    assert error.mean() < limit < 0.1 * np.std(exact)


def test_texts_are_those_that_the_float64_model_writes(models: dict[str, Path]) -> None:
    """Drawn anew: the same tokens, and what is stored of the unrounded model; a text is no repetition."""
    prompt, text = read("tiny_logits.json.gz")["prompt"], tiny_row("Q8_0")["text"]
    model = ReferenceLlama(models["Q8_0"], keep=True)
    first = oracle_text.prompts(prompt, make_tiny_models.VOCAB)[:1]
    found = oracle_text.drawn(prompt, make_tiny_models.VOCAB, model.forward, first)
    assert [ids[len(prompt):] for ids in found] == text["drawn"][:1]
    assert len(set(sum(text["drawn"], []))) > 100
    assert [len(text[part]) for part in ("drawn", "best", "margin")] == [oracle_text.PROMPTS] * 3


def test_seed_changes_the_weights(tmp_path: Path) -> None:
    first, second = (make_tiny_models.build(tmp_path / str(seed), ("Q4_K",), seed)["Q4_K"] for seed in (1, 2))
    assert first.read_bytes() != second.read_bytes()


def test_k_quant_scales_cover_their_range() -> None:
    """A reader that loses the upper two bits of a scale must not pass by luck."""
    scales = make_tiny_models.q6_k_blocks(1, "t", 512, 256, 1.0).reshape(-1, 210)[:, 192:208].view(np.int8)
    assert scales.min() == -128 and scales.max() == 127
    packed = make_tiny_models.q4_k_blocks(1, "t", 512, 256, 1.0).reshape(-1, 144)
    low, high = packed[:, 4:8] & 63, packed[:, 12:16] & 15 | packed[:, 4:8] >> 6 << 4
    assert (low.min(), low.max(), high.min(), high.max()) == (0, 63, 0, 63)


def test_nasty_strings_are_the_stored_ones() -> None:
    oracle = read("smollm2_tokens.json.gz")
    assert [text for text, _ in oracle["plain"]] == nasty_strings()
    assert [text for text, _ in oracle["special"]] == special_strings()


def test_greedy_oracle_is_whole() -> None:
    prompts = read("smollm2_greedy.json")["prompts"]
    assert len(prompts) == 20
    for row in prompts:
        assert len(row["tokens"]) == len(row["margin"]) == len(row["exact"]) == 64
        differing = {i for i, (mine, peer) in enumerate(zip(row["exact"], row["tokens"])) if mine != peer}
        # the peer's error is under 0.75 on every logit compared, so a clear choice is the float64 model's choice too
        assert all(row["margin"][i] < 0.5 for i in differing)


def test_perplexity_oracle_adds_up() -> None:
    oracle = read("smollm2_perplexity.json")
    assert len(oracle["ids"]) == oracle["window"] * len(oracle["window_nll"]) >= 4096
    assert oracle["mean_nll"] == pytest.approx(np.mean(oracle["window_nll"]), rel=1e-12)
    assert oracle["perplexity"] == pytest.approx(np.exp(oracle["mean_nll"]), rel=1e-12)
