"""SAMPLE and the random stream: published numbers, distributions, how many numbers are drawn."""
from __future__ import annotations

import numpy as np
import pytest
from scipy import special, stats

from m3jit.isa.sampling import DEFAULT_SEED
from m3jit.isa.types import I64, Tensor
from tests.ops.cases import execute, noise, tensor
from tests.ops.witness_sampling import STEP, VECTORS, draws, signed


def test_the_written_out_generator_gives_the_published_numbers():
    for seed, numbers in VECTORS.items():
        assert draws(seed, len(numbers)) == numbers


def stream(name: str, count: int, seed: int = DEFAULT_SEED, **operands) -> list:
    out, rng = [], seed
    for _ in range(count):
        value, rng = execute(name, {"rng": rng, **operands})
        out.append(value)
    return out


def test_a_stream_of_draws_is_the_published_one():
    assert [v % 2 ** 64 for v in stream("RNG_NEXT", 5, 1234567)] == VECTORS[1234567]


def test_uniform_and_normal_numbers_have_their_distributions():
    assert stats.kstest(stream("RNG_UNIFORM", 4000, a=-1.0, b=3.0), stats.uniform(-1, 4).cdf).pvalue > 0.01
    assert stats.kstest(stream("RNG_NORMAL", 2000, mean=5.0, std=2.0), stats.norm(5, 2).cdf).pvalue > 0.01


@pytest.mark.parametrize("temp", [0.5, 1.0, 2.0])
def test_tokens_are_drawn_with_softmax_probabilities(temp):
    logits = noise(12, seed=3)
    counts = np.bincount(stream("SAMPLE", 6000, logits=tensor(logits), temp=temp), minlength=12)
    expected = special.softmax(logits.astype(np.float64) / temp) * counts.sum()
    assert stats.chisquare(counts, expected).pvalue > 0.01


def test_filters_only_remove_tokens():
    logits = noise(50, seed=4, scale=2.0)
    p = special.softmax(logits.astype(np.float64))
    ranked = np.argsort(-logits)
    for options, kept in (({"topk": 7}, set(ranked[:7])), ({"minp": 0.1}, set(np.flatnonzero(p >= 0.1 * p.max()))),
                          ({"topp": 0.8}, set(ranked[:1 + int(np.searchsorted(np.cumsum(p[ranked]), 0.8))]))):
        seen = set(stream("SAMPLE", 3000, logits=tensor(logits), **options))
        assert seen <= kept and len(seen) > len(kept) // 2


def test_exactly_one_number_is_drawn_whatever_the_logits_are():
    for seed in range(20):
        logits = tensor(noise(1 + 37 * seed, seed=seed))
        for options in ({}, {"topk": 1}, {"topp": 0.01}, {"temp": 1e-3}, {"temp": 1e3}):
            assert execute("SAMPLE", {"logits": logits, "rng": seed, **options})[1] == signed(seed + STEP)
        assert execute("SAMPLE", {"logits": logits, "rng": seed, "temp": 0.0})[1] == seed


def test_greedy_agrees_with_the_general_path():
    for seed in range(30):
        logits = tensor(np.rint(noise(100, seed=seed)))
        mask = Tensor.of(np.ones(100, bool))
        history = tensor([0], I64)
        plain = execute("SAMPLE", {"logits": logits, "rng": 1, "temp": 0.0})
        assert plain == execute("SAMPLE", {"logits": logits, "rng": 1, "temp": 0.0, "mask": mask})
        assert plain == execute("SAMPLE", {"logits": logits, "rng": 1, "temp": 0.0, "history": history})
