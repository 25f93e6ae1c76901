"""The same bytes for a model of every architecture: whatever executes it (interpreter, CPU level, 1 or 2 threads),
in chunks of 1, 7, 64 or all of a prompt, alone or beside other texts, greedily and sampled.

Three texts are compared in all that they leave: tokens, log-probabilities (of the chosen token and the 20 best, for
each token), every register, the logits among them, the random stream, and every row and cell of the states.  Two have
a prompt of 101 tokens, which is longer than a page of a stream and a chunk, and are drawn greedily and at a temperature
of 0.9; generation takes the third over the border of a page.  Of an encoder the vectors are compared.

By default the combinations are thinned: on the native level a family meets every chunk size, both thread counts, and
company or none; every other executor once.  Which chunk size, thread count and company that is goes on from family to
family, so that all pairs come up.  On the baseline level, for which LLVM needs ten times as long, the families of
BASELINE run by default: together they have every kind of layer there is.  All combinations of all families:

    pytest -m slow tests/models/test_same_bytes.py
"""
from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Sequence

import numpy as np
import pytest

import m3jit
from m3jit.api.generation import LanguageModel, Settings
from m3jit.models.program import Options
from m3jit.models.provider import Models
from m3jit.vm.batch import Batch
from m3jit.vm.checked import comparable
from m3jit.vm.vm import VM
from tests.backends.cpu_engines import LEVELS
from tests.models import families

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import make_tiny_bert  # noqa: E402  (found through the path set above)

LENGTH, TOKENS = 101, 4
CHUNKS = (1, 7, 64, LENGTH)
BETWEEN = tuple(level for level in LEVELS if level not in ("baseline", "native"))
BASELINE = ("llama", "gemma3", "qwen3moe", "deepseek2-experts-q4_k", "bitnet-relu2", "mamba", "mamba2", "jamba",
            "granitehybrid")
INTERPRETER = "interpreter"


@dataclass(frozen=True)
class Text:
    """A prompt and how it is drawn from; join: the round in which it joins others."""
    length: int
    temperature: float
    join: int

    def prompt(self) -> list[int]:
        ids: list[int] = np.random.default_rng(self.length).integers(5, 260, self.length).tolist()
        return ids


TEXTS = (Text(LENGTH, 0.0, 0), Text(LENGTH, 0.9, 0), Text(62, 0.9, 1))


@dataclass(frozen=True)
class Way:
    """How texts are computed.  together: all three in a batch."""
    level: str
    threads: int
    chunk: int
    together: bool = False
    texts: tuple[Text, ...] = TEXTS

    @property
    def backend(self) -> str:
        return self.level if self.level == INTERPRETER else f"cpu:{self.level}"


REFERENCE = Way("native", 1, 64)


def thinned(number: int) -> list[Way]:
    """The ways of family `number` but on the baseline level."""
    odd, late = bool(number % 2), bool(number // 2 % 2)
    ways = [replace(REFERENCE, together=True), Way("native", 2, 7, late), Way("native", 1 + odd, 1, odd),
            Way("native", 2 - odd, LENGTH, not odd),
            Way(INTERPRETER, 1, CHUNKS[(number + 2) % 4], False, TEXTS[odd:odd + 1])]
    return ways + [Way(level, 2 - odd, CHUNKS[number % 4], not late) for level in BETWEEN[:1]]


def on_baseline(number: int) -> list[Way]:
    odd, late = bool(number % 2), bool(number // 2 % 2)
    return [Way("baseline", 1 + odd, CHUNKS[(number + 1) % 4], late)]


EVERYTHING = [Way(level, threads, chunk, together)
              for level, threads, chunk, together in product(LEVELS, (1, 2), CHUNKS, (False, True))] + \
    [Way(INTERPRETER, 1, chunk) for chunk in CHUNKS]


class Family:
    """A model with a program for each chunk size, in which no token ends a text."""

    def __init__(self, path: Path):
        self.models, self.path, self.chunks = Models(), str(path), {}
        self.models.load(self.path).tokenizer.ends = frozenset()
        self.expected = dict(zip(TEXTS, self.outcomes(REFERENCE)))

    def machine(self, text: Text, way: Way) -> tuple[VM, list[Any]]:
        model = self.chunks.get(way.chunk)
        if model is None:
            options = Options(chunk=way.chunk)
            model = self.chunks[way.chunk] = LanguageModel(self.path, self.models, options=options)
        settings = Settings(max_tokens=TOKENS, temperature=text.temperature, seed=7, logprobs=20)
        vm = model.start(text.prompt(), settings, backend=way.backend, threads=way.threads).vm
        out: list[Any] = []
        for name in ("TOKENS", "LOGPROBS"):
            vm.set_sink(name, out.append)
        return vm, out

    def outcomes(self, way: Way) -> list[dict[str, Any]]:
        """What each text leaves."""
        made = [self.machine(text, way) for text in way.texts]
        if way.together:
            run_together([vm for vm, _ in made], [text.join for text in way.texts])
        else:
            for vm, _ in made:
                vm.run()
        for vm, _ in made:
            check_executor(vm, way)
        return [outcome(vm, out) for vm, out in made]

    def check(self, way: Way) -> None:
        for text, found in zip(way.texts, self.outcomes(way)):
            wanted = self.expected[text]
            apart = [name for name in wanted if wanted[name] != found[name]]
            assert not apart, f"{way}, {text}: {', '.join(apart)} differ from {REFERENCE}"


def run_together(machines: Sequence[VM], joins: Sequence[int]) -> None:
    """Run them in a batch, each of which joins behind so many rounds; they must have shared launches."""
    batch, members = Batch(), []
    for vm, rounds in zip(machines, joins):
        for _ in range(rounds):
            batch.step()
        members.append(batch.add(vm))
    batch.run()
    assert [m.error for m in members] == [None] * len(members)
    assert batch.stats["shared_entries"] > 0 and batch.stats["joined_launches"] > 0, batch.stats


def check_executor(vm: VM, way: Way) -> None:
    """The machine ran where it was told to, and most of it in compiled code with launches for the threads."""
    if way.level == INTERPRETER:
        assert vm.regions is None
        return
    assert vm.regions.retired > 0.8 * vm.retired, f"{way}: hardly ran compiled code"
    used = vm.regions.regions
    assert {r.native.engine.target.level for r in used} == {way.level}
    assert {r.nthreads for r in used} == {way.threads}
    assert any(r.region.has_launches and r.native.parallel for r in used), f"{way}: no launch for threads"


def outcome(vm: VM, out: list[Any]) -> dict[str, Any]:
    """All that a text leaves: what it handed out, registers by name, the random stream, states.

    Left out: what is left of a prompt in front of its last chunk, the one number that the chunks decide."""
    registers = {name: v.tobytes() if hasattr(v, "tobytes") else repr(v) for name, v in vm.registers.items()
                 if not name.startswith("S")}
    del registers[str(vm.register("rLeft"))]
    states = [comparable(vm.main.states.get(h.id)) for h in vm.main.S if h is not None]
    handed = [item if isinstance(item, bytes) else item.tobytes() for item in out]
    assert vm.get("rMade") == TOKENS and len(handed) == 4 * TOKENS and vm.get("rLogits").shape[-1] > 200
    assert states and all(state[-1] for state in states), "a state without rows or cells"
    return {"tokens and log-probabilities": handed, "the random stream": vm.main.rng, "states": states, **registers}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The families by name, made when they are asked for; one is kept."""
    folder, kept = tmp_path_factory.mktemp("same"), {}

    def family(name: str) -> Family:
        if name not in kept:
            kept.clear()
            kept[name] = Family(families.build(folder, families.EVERY[name]))
        return kept[name]
    return family


NUMBERS = {name: number for number, name in enumerate(families.EVERY)}


@pytest.mark.parametrize("name", NUMBERS)
def test_thinned_combinations(name, made):
    family = made(name)
    drawn = [family.expected[text]["tokens and log-probabilities"] for text in TEXTS[:2]]
    assert drawn[0] != drawn[1], "the temperature changes nothing"
    for way in thinned(NUMBERS[name]):
        family.check(way)


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in BASELINE else pytest.mark.slow)
                                  for name in NUMBERS])
def test_baseline(name, made):
    for way in on_baseline(NUMBERS[name]):
        made(name).check(way)


def test_the_thinned_combinations_have_every_pair():
    """Of levels with chunk sizes, thread counts, and company; and of chunk sizes with thread counts and company."""
    ways = [REFERENCE, *(way for name, i in NUMBERS.items()
                         for way in thinned(i) + on_baseline(i) * (name in BASELINE))]
    native = [way for way in ways if way.level != INTERPRETER]
    levels = {way.level for way in native}
    assert levels == {"native", "baseline", *BETWEEN[:1]}
    assert {(w.level, w.chunk) for w in ways} >= set(product((*levels - {"native"}, INTERPRETER), CHUNKS))
    assert {(w.level, w.threads) for w in native} == set(product(levels, (1, 2)))
    assert {(w.level, w.together) for w in native} == set(product(levels, (False, True)))
    assert {(w.chunk, w.threads) for w in native} == set(product(CHUNKS, (1, 2)))
    assert {(w.chunk, w.together) for w in native} == set(product(CHUNKS, (False, True)))


@pytest.mark.parametrize("pooling", ["none", "mean"])
@pytest.mark.parametrize("level", [INTERPRETER, *(level for level in LEVELS if level in ("baseline", "native") or
                                                  level in BETWEEN[:1])])
def test_texts_of_an_encoder(level, pooling, tmp_path):
    """Vectors of an encoder, whose texts are not cut in chunks: 64, 62 and 9 tokens, a row for each or one for all."""
    path = make_tiny_bert.write(tmp_path / "bert.gguf")
    expected = encoded(path, pooling, Way("native", 1, 0))
    for threads, together in product((1, 2), (False, True)) if level != INTERPRETER else [(1, False)]:
        way = Way(level, threads, 0, together)
        assert encoded(path, pooling, way) == expected, way


def encoded(path: Path, pooling: str, way: Way) -> list[bytes]:
    """The bytes of the vectors of three texts."""
    embedder = m3jit.load_embedder(path, pooling=pooling)
    machines, rows = [], []
    for length in (64, 62, 9):
        vm = VM(embedder._program, way.backend, way.threads, models=embedder._models)
        rows.append([])
        vm.set_sink("OUTPUT", rows[-1].append)
        vm.push_input(np.array(Text(length, 0, 0).prompt(), np.int64))
        vm.close_input()
        machines.append(vm)
    if way.together:
        run_together(machines, (0, 0, 0))
    else:
        for vm in machines:
            vm.run()
    for vm, (found,), length in zip(machines, rows, (64, 62, 9)):
        check_executor(vm, way)
        assert found.shape == (length if pooling == "none" else 1, embedder.width)
    return [found.tobytes() for found, in rows]


@pytest.mark.slow
@pytest.mark.parametrize("name", NUMBERS)
def test_all_combinations(name, made):
    for way in EVERYTHING:
        made(name).check(way)
