"""Lengths are symbolic: no length of a prompt or a text, once its kinds of chunks are known, compiles anything.

A dimension of 0 or 1 is part of a type, a larger one is a symbol (m3jit.vm.native.type_of_value).  A prompt is
computed in chunks of 64 tokens, or as many as an option says (512 here), so there are three kinds of a chunk: several
rows, one row that is a whole prompt, and one row left over from a longer one.  A prompt of a chunk and one token has
the first and the last, one of one token the second.  The rule: behind those two prompts (in batches: two of each, side
by side, and two that share a chunk) nothing asks for code again, whatever the length of the prompt and of the text
behind it, and however many texts join and leave.  Code that is asked for is counted, also what the process or the disk
has already: another model may have had it compiled."""
from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Sequence

import numpy as np
import pytest

import m3jit
from m3jit.api.generation import LanguageModel, Settings
from m3jit.frontend import assemble
from m3jit.models.architectures import GENERATORS
from m3jit.models.program import CHUNK, Options
from m3jit.models.provider import Models
from m3jit.vm.batch import ROWS, Batch
from m3jit.vm.regions import engine
from m3jit.vm.streams import CallbackSink
from m3jit.vm.vm import VM
from tests.models import families

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import make_tiny_bert  # noqa: E402  (found through the path set above)

PAGES = 200                                                    # tokens that cross three borders of pages of 64 rows


@dataclass(frozen=True)
class Lengths:
    """Of a chunk size, what runs behind the two prompts of `first`, which may compile: single prompts, turns of a
    session, prompts side by side; context: room for all."""
    chunk: int
    context: int
    prompts: tuple[int, ...]
    turns: tuple[int, ...]
    batches: tuple[tuple[int, ...], ...]

    @property
    def first(self) -> tuple[int, int]:
        return self.chunk + 1, 1

    @property
    def sharing(self) -> tuple[int, int]:
        """Prompts that share a chunk's code in a batch: whole chunks, unless two are too much for a round."""
        rows = min(self.chunk, ROWS // 2)
        return rows, rows


USUAL = Lengths(CHUNK, 512, (2, 3, 17, 64, 65, 66, 129, 130, 200), (1, 2, 3, 17, 64, 65, 66),
                ((2, 3), (1, 2, 3), (17, 65, 1), (64, 65, 66), (128, 3, 129), (1, 200, 130)))
LARGE = Lengths(512, 4096, (2, 3, 64, 65, 130, 511, 512, 513, 514, 1023, 1025, 1030), (1, 2, 17, 65, 511, 512, 514),
                ((2, 3), (1, 2, 65), (120, 130, 511), (512, 514, 66), (1025, 3, 1024)))
# Code of everything at once, and of what is worth it; the second, and large chunks, of two families by default, of all
# with -m slow.
RUNS = [pytest.param(family, backend, lengths, id=f"{family}-{backend}{name}",
                     marks=[] if (backend, name) == ("cpu", "") or family in ("llama", "granitehybrid") else
                     pytest.mark.slow)
        for family in families.EVERY
        for backend, lengths, name in (("cpu", USUAL, ""), ("auto", USUAL, ""), ("cpu", LARGE, f"-{LARGE.chunk}"))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lengths")


def endless(folder: Path, family: str, lengths: Lengths) -> tuple[Models, str]:
    """The model of a family with room for long texts, in which no token ends a text: lengths do not hang on data."""
    path = families.with_context(families.build(folder, families.EVERY[family]), lengths.context)
    models = Models()
    models.load(str(path)).tokenizer.ends = frozenset()
    return models, str(path)


def prompt(length: int) -> list[int]:
    ids: list[int] = np.random.default_rng(length).integers(5, 260, length).tolist()
    return ids


def asked_for(backend: str, work: Callable[[], object]) -> int:
    """Kernels and regions that `work` asks the code generator for."""
    s = engine(backend).statistics
    before = s.compiled + s.cached + s.reused
    work()
    return s.compiled + s.cached + s.reused - before


@pytest.mark.parametrize("pooling", ["none", "mean"])
def test_texts_of_an_encoder(pooling, tmp_path):
    """One row is another kind, as it is of a chunk; the context is 64."""
    path = make_tiny_bert.write(tmp_path / "bert.gguf")
    embedder = m3jit.load_embedder(path, pooling=pooling, backend="cpu", threads=1)

    def embed(length: int) -> None:
        assert len(embedder.rows(prompt(length))) == (length if pooling == "none" else 1)
    assert all(asked_for("cpu", lambda n=n: embed(n)) for n in (2, 1))
    growing = (3, 5, 17, 63, 64)
    assert {n: asked_for("cpu", lambda n=n: embed(n)) for n in growing} == dict.fromkeys(growing, 0)


def test_every_generating_architecture_is_here():
    assert {model.name for model in GENERATORS} == {family.partition("-")[0] for family in families.EVERY}


@pytest.mark.parametrize("family, backend, lengths", RUNS)
def test_the_program_of_a_run(family, backend, lengths, folder):
    """What `m3jit run` runs."""
    models, path = endless(folder, family, lengths)
    program = models.program(models.load(path), options=Options(max_tokens=3, chunk=lengths.chunk))
    long = assemble(models.assembly(models.load(path), options=Options(max_tokens=PAGES, chunk=lengths.chunk)))

    def run(what: object, length: int, tokens: int) -> None:
        vm = VM(what, backend=backend, threads=1, models=models)
        vm.sinks["OUTPUT"] = CallbackSink("text", lambda _: None)
        vm.push_input(np.array(prompt(length), np.int64))
        vm.run()
        assert vm.get("rMade") == tokens and vm.get("rPos") == length + tokens - 1
        assert vm.regions.retired > 0.8 * vm.retired, "hardly anything ran as code"
    assert all(asked_for(backend, lambda n=n: run(program, n, 3)) for n in lengths.first)
    growing = lengths.prompts
    assert {n: asked_for(backend, lambda n=n: run(program, n, 3)) for n in growing} == dict.fromkeys(growing, 0)
    run(long, lengths.first[0], PAGES)                         # the longer text is another program
    assert asked_for(backend, lambda: run(long, 30, PAGES)) == 0


@pytest.mark.parametrize("family, backend, lengths", RUNS)
def test_hosted_programs_and_sessions(family, backend, lengths, folder):
    """What `generate` and a server run; a session, whose prompts stand behind one another, needs the first kinds
    alone."""
    models, path = endless(folder, family, lengths)
    model = LanguageModel(path, models, backend=backend, threads=1, options=Options(chunk=lengths.chunk))

    def text(length: int, tokens: int = 3) -> None:
        made = model.generate(prompt(length), max_tokens=tokens, temperature=0.9, seed=length, logprobs=3)
        made.result()
        assert len(made.tokens) == tokens
    assert all(asked_for(backend, lambda n=n: text(n)) for n in lengths.first)
    growing = lengths.prompts
    assert {n: asked_for(backend, lambda n=n: text(n)) for n in growing} == dict.fromkeys(growing, 0)
    assert asked_for(backend, lambda: text(30, PAGES)) == 0

    session = m3jit.Session(model, temperature=0.9, seed=3)

    def turn(length: int, tokens: int = 3) -> None:
        before = len(session.tokens)
        session.append(prompt(length))
        list(session.generate(tokens))
        assert len(session.tokens) == before + length + tokens
    assert asked_for(backend, lambda: turn(lengths.first[0]))
    growing = lengths.turns
    assert {n: asked_for(backend, lambda n=n: turn(n)) for n in growing} == dict.fromkeys(growing, 0)
    assert asked_for(backend, lambda: turn(5, 150)) == 0 and len(session.tokens) > 7 * 64
    session.close()


@pytest.mark.parametrize("family, backend, lengths", RUNS)
def test_batches(family, backend, lengths, folder):
    """Texts of different lengths that join in different rounds and leave behind different numbers of tokens."""
    models, path = endless(folder, family, lengths)
    model = LanguageModel(path, models, backend=backend, threads=1, options=Options(chunk=lengths.chunk))

    def batch(lengths: Sequence[int], tokens: int = 3, apart: int = 1) -> None:
        together, members = Batch(), []
        for i, length in enumerate(lengths):
            made = model.start(prompt(length), Settings(max_tokens=tokens + i, temperature=0.9, seed=i, logprobs=3))
            made.vm.set_sink("TOKENS", made.take_token)
            members.append((together.add(made.vm), made))
            for _ in range(i * apart):
                together.step()
        together.run()
        assert [(m.error, len(made.tokens)) for m, made in members] == [(None, tokens + i) for i in range(len(members))]
        assert together.stats["shared_entries"] > 0
    assert all(asked_for(backend, lambda n=n: batch((n, n), apart=0)) for n in lengths.first)
    shared = asked_for(backend, lambda: batch(lengths.sharing, apart=0))
    assert not shared or 2 * lengths.chunk > ROWS, "two prompts of `first` have shared their first chunk"
    growing = lengths.batches
    assert {n: asked_for(backend, lambda n=n: batch(n)) for n in growing} == dict.fromkeys(growing, 0)
    assert asked_for(backend, lambda: batch((30, 129, 64), PAGES, apart=20)) == 0
