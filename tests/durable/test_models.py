"""Language models: a version in the middle of a text goes on to the same tokens, in another machine, after a reload."""
from __future__ import annotations

import shutil
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import m3jit
from m3jit.api.generation import Settings
from m3jit.durable import Store, StoreError
from tests.durable.programs import state
from tests.models.families import build


def slow(name: str) -> Any:
    return pytest.param(name, marks=pytest.mark.slow)


# attention and a state space; latent attention; the others take long to compile
MODELS = ["jamba/F32", "plain/new/F32", slow("llama3/Q4_K"), slow("mamba2/Q8_0"), slow("gemma3/Q4_K")]
PROMPT = list(range(20, 90))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


def tokens(vm: Any, count: int | None = None) -> list[int]:
    """The next tokens of a hosted machine, all of them or a number."""
    return [int.from_bytes(item, "little", signed=True) for item in islice(vm.output("TOKENS"), count)]


@pytest.mark.parametrize("name", MODELS)
def test_a_text_goes_on_from_its_version(tmp_path, folder, name):
    path = build(folder, name)
    model = m3jit.load_model(path, threads=1)
    settings = Settings(max_tokens=20, seed=4, temperature=0.9, top_k=0)
    straight = model.start(PROMPT, settings).vm
    want = tokens(straight)
    vm = model.start(PROMPT, settings).vm
    with Store.open(tmp_path / "s") as store:
        got = tokens(vm, 5)
        first = store.commit(vm, "text").bytes
        got += tokens(vm, 4)
        second = store.commit(vm, "text").bytes
    assert got == want[:9] and second < first
    moved = shutil.copy2(path, tmp_path / "moved.gguf")
    again = m3jit.load_model(moved, threads=1)
    for number, done in ((2, 9), (1, 5)):
        other = again.start(PROMPT, settings).vm
        with Store.open(tmp_path / "s") as store:
            store.restore(other, "text", number)
        assert tokens(other) == want[done:]
        assert state(other) == state(straight)


def test_another_model_of_the_same_shape_is_refused(tmp_path, folder):
    path = build(folder, "llama3/Q4_K")
    vm = m3jit.load_model(path, backend="interpreter").start(PROMPT, Settings(max_tokens=8)).vm
    tokens(vm, 2)
    with Store.open(tmp_path / "s") as store:
        store.commit(vm, "text")
        raw = bytearray(path.read_bytes())
        raw[-1] ^= 1
        (tmp_path / "other.gguf").write_bytes(raw)
        changed = m3jit.load_model(tmp_path / "other.gguf", backend="interpreter")
        other = changed.start(PROMPT, Settings(max_tokens=8)).vm
        before = state(other)
        with pytest.raises(StoreError, match="'text' version 1: cannot be restored: it uses the model .* not here"):
            store.restore(other, "text")
        assert state(other) == before


def test_a_grammar_goes_on(tmp_path):
    pytest.importorskip("llguidance", reason="the extra m3jit[grammar] is not installed")
    model = m3jit.load_model("default", threads=1)
    settings = Settings(max_tokens=40, seed=2, grammar=m3jit.Grammar("regex", "[a-z]{3} [0-9]{2} [a-z]{12}\\."))
    prompt = list(model.model.encode("She had"))
    want = tokens(model.start(prompt, settings).vm)
    vm = model.start(prompt, settings).vm
    got = tokens(vm, 4)
    with Store.open(tmp_path / "s") as store:
        store.commit(vm, "text")
        other = model.start(prompt, settings).vm
        store.restore(other, "text")
        assert got + tokens(other) == want
        changed = Settings(max_tokens=40, seed=2, grammar=m3jit.Grammar("regex", "[a-z]{3} [0-9]{2} [a-z]{13}\\."))
        with pytest.raises(StoreError, match="under a grammar that is not this machine's; give it the same one"):
            store.restore(model.start(prompt, changed).vm, "text")
