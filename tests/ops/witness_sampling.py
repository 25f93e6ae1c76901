"""Witnesses of the sampling family: published vectors, a sampler in plain Python floats, zlib."""
from __future__ import annotations

import math
import zlib
from collections.abc import Iterator

import numpy as np

from m3jit.isa.types import BF16, F16, F32, I32, I64, Q8_0, U8, Tensor
from tests.ops.cases import FLOATS, Case, noise, same, tensor, values, witness
from tests.ops.witness_layout import blocks, decoded

# Sebastiano Vigna's splitmix64.c with seed 1234567, as published with Rosetta Code's task "Pseudo-random numbers"
VECTORS = {1234567: [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431,
                     16408922859458223821]}
STEP = 0x9E3779B97F4A7C15


def signed(v: int) -> int:
    return (v + 2 ** 63) % 2 ** 64 - 2 ** 63


def draws(seed: int, count: int) -> list[int]:
    """splitmix64 from its definition, unsigned."""
    out = []
    for i in range(1, count + 1):
        z = (seed + i * STEP) % 2 ** 64
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2 ** 64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2 ** 64
        out.append(z ^ z >> 31)
    return out


def test_the_definition_gives_the_published_numbers():
    for seed, numbers in VECTORS.items():
        assert draws(seed, len(numbers)) == numbers


@witness("RNG_SEED")
def rng_seed() -> Iterator[Case]:
    for seed in (0, 1, -1, 2 ** 63 - 1, 42):
        yield Case(f"{seed}", {"rng": 99, "seed": seed}, same(seed))
    yield Case("default", {"rng": 99}, same(signed(STEP)))


@witness("RNG_NEXT")
def rng_next() -> Iterator[Case]:
    for seed, numbers in [*VECTORS.items(), *((s, draws(s, 3)) for s in (0, 2 ** 64 - 1, 2 ** 63))]:
        for i, number in enumerate(numbers):
            def check(value, state, number=number, i=i, seed=seed):
                assert value == signed(number) and state == signed(seed + (i + 1) * STEP)
            yield Case(f"seed {seed}, draw {i}", {"rng": signed(seed + i * STEP)}, check)


@witness("RNG_UNIFORM")
def rng_uniform() -> Iterator[Case]:
    for a, b in ((0.0, 1.0), (-2.0, 3.0), (1e6, 1e7)):
        for i, z in enumerate(draws(7, 5)):
            def check(value, state, z=z, i=i, a=a, b=b):
                assert value == a + (z >> 40) / 2 ** 24 * (b - a) and a <= value < b
                assert state == signed(7 + (i + 1) * STEP)
            yield Case(f"{a}..{b}, draw {i}", {"rng": signed(7 + i * STEP), "a": a, "b": b}, check)


@witness("RNG_NORMAL")
def rng_normal() -> Iterator[Case]:
    numbers = draws(7, 20)
    for mean, std in ((0.0, 1.0), (-3.0, 0.25)):
        for i in range(0, 20, 2):
            u1, u2 = (z >> 40 for z in numbers[i:i + 2])
            n = math.sqrt(-2 * math.log(max(u1 / 2 ** 24, 2.0 ** -126))) * math.cos(2 * math.pi * u2 / 2 ** 24)

            def check(value, state, n=n, mean=mean, std=std, i=i):
                assert abs(value - (mean + std * n)) <= std * 2e-6 and type(value) is float
                assert state == signed(7 + (i + 2) * STEP)
            yield Case(f"{mean} {std} draw {i}", {"rng": signed(7 + i * STEP), "mean": mean, "std": std}, check)


# -- SAMPLE -----------------------------------------------------------------------------------------------------------

def pick(logits, seed, temp=1.0, topk=0, topp=1.0, minp=0.0, penalty=1.0, history=(), window=64, mask=None):
    """The documented steps in plain Python floats: (token, draws used)."""
    score = [float(v) for v in logits]
    for t in set(history[-window:] if window else history):
        score[t] = score[t] * penalty if score[t] <= 0 else score[t] / penalty
    ids = [i for i, v in enumerate(score) if v == v and (mask is None or mask[i])]
    ids.sort(key=lambda i: (-score[i], i))
    if temp == 0:
        return ids[0], 0
    ids = ids[:topk] if topk else ids

    def weigh(scale):
        top = score[ids[0]]
        return [1.0 if score[i] == top else math.exp((score[i] - top) / scale) for i in ids]
    w, total, kept = weigh(1.0), 0.0, 0
    while topp < 1 and kept < len(ids) and total < topp * sum(w):
        total, kept = total + w[kept], kept + 1
    ids = ids[:kept] if topp < 1 else ids
    ids = [i for i, v in zip(ids, weigh(1.0)) if v >= minp]
    w = weigh(temp)
    target, total = (draws(seed, 1)[0] >> 40) / 2 ** 24 * sum(w), 0.0
    for i, v in zip(ids, w):
        total += v
        if total > target:
            return i, 1
    return ids[-1], 1


OPTIONS = [{}, {"temp": 0.7}, {"temp": 0.0}, {"topk": 5}, {"topp": 0.5}, {"minp": 0.2},
           {"temp": 3.0, "topk": 40, "topp": 0.9},
           {"temp": 0.8, "topk": 40, "topp": 0.95, "minp": 0.05, "penalty": 1.3}, {"temp": 0.0, "penalty": 4.0},
           {"penalty": 2.0, "window": 2}, {"penalty": 2.0, "window": 0}]


@witness("SAMPLE")
def sample() -> Iterator[Case]:
    history = [3, 1, 4, 1, 5, 0, 2]
    for n in (7, 67, 1000):
        for i, options in enumerate(OPTIONS):
            for dtype in FLOATS:
                logits = tensor(noise(1, n, seed=i, scale=2.0), dtype)
                plain = {k: float(np.float32(v)) if isinstance(v, float) else v for k, v in options.items()}
                for mask in (None, np.arange(n) % 3 != 0):
                    yield _sample_case(f"{n} {options} {dtype} mask {mask is not None}", logits, 100 * i + n, plain,
                                       history if "penalty" in options else None, mask)
    yield Case("one", {"logits": tensor([5.0]), "rng": 1}, _token(0, 1, 1))
    yield Case("ties go to the lower index", {"logits": tensor([1.0, 2.0, 2.0]), "rng": 1, "temp": 0.0},
               _token(1, 1, 0))
    yield Case("NaN is out", {"logits": tensor([np.nan, 2.0, np.nan]), "rng": 1}, _token(1, 1, 1))
    yield Case("only NaN", {"logits": tensor([np.nan, np.nan]), "rng": 1}, _token(0, 1, 0))
    yield Case("infinities tie", {"logits": tensor([1.0, np.inf, np.inf]), "rng": 1},
               _token(1 if draws(1, 1)[0] >> 63 == 0 else 2, 1, 1))
    empty = tensor(np.zeros(0), I32)
    yield Case("empty history", {"logits": tensor([1.0, 3.0]), "rng": 1, "temp": 0.0, "penalty": 9.0, "history": empty},
               _token(1, 1, 0))


def _token(token: int, seed: int, used: int):
    def check(got, state):
        assert got == token and type(got) is int and state == signed(seed + used * STEP)
    return check


def _sample_case(label: str, logits: Tensor, seed: int, options: dict, history, mask) -> Case:
    token, used = pick(values(logits).ravel(), seed, **options, history=history or (), mask=mask)
    operands = {"logits": logits, "rng": seed, **options}
    if history is not None:
        operands["history"] = tensor(history, I64)
    if mask is not None:
        operands["mask"] = Tensor.of(mask)
    return Case(label, operands, _token(token, seed, used))


# -- digests ----------------------------------------------------------------------------------------------------------

def _tensors() -> Iterator[tuple[str, Tensor, bytes]]:
    """(label, tensor, its canonical bytes)."""
    for text in (b"", b"a", b"foobar", b"123456789", bytes(range(67))):
        yield repr(text[:9]), Tensor.of(np.frombuffer(text, np.uint8), U8), text
    x = noise(3, 5, seed=1)
    for dtype in (F32, F16, BF16):
        yield f"{dtype}", tensor(x, dtype), values(tensor(x, dtype)).astype("<f4").tobytes()
    yield "I64", tensor([[1, -2]], I64), np.array([1, -2], "<i8").tobytes()
    w = blocks((2, 32), Q8_0)
    yield "Q8_0", w, decoded(w).astype("<f4").tobytes()


@witness("HASH")
def hash_() -> Iterator[Case]:
    # test vectors of the FNV reference distribution (Fowler, Noll, Vo)
    published = {b"": 0xCBF29CE484222325, b"a": 0xAF63DC4C8601EC8C, b"foobar": 0x85944171F73967E8}
    for label, x, data in _tensors():
        want = 0xCBF29CE484222325
        for byte in data:
            want = (want ^ byte) * 0x100000001B3 % 2 ** 64
        assert published.get(data, want) == want
        yield Case(label, {"x": x}, same(signed(want)))


@witness("CHECKSUM")
def checksum() -> Iterator[Case]:
    assert zlib.crc32(b"123456789") == 0xCBF43926
    for label, x, data in _tensors():
        yield Case(label, {"x": x}, same(_crc(data)))


def _crc(data: bytes) -> int:
    """CRC-32 bit by bit."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0xEDB88320 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF
