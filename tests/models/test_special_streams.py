"""Latent rows, int8 streams and adapters in the machine: batches, FORK and ABORT, snapshots of any point."""
from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import m3jit
from m3jit.frontend import assemble
from m3jit.models.program import Options
from m3jit.models.provider import Models
from m3jit.vm.batch import Batch
from m3jit.vm.host_streams import CallbackSink

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import make_tiny_adapters  # noqa: E402  (found through the path set above)
import make_tiny_architectures  # noqa: E402
import make_tiny_deepseek  # noqa: E402

PROMPTS = [[5, 9, 70, 200], [4 + i * 37 % 256 for i in range(70)], [99]]


def programs(folder: Path) -> dict[str, tuple[Any, Models]]:
    """Name -> a program that streams token ids, and its models."""
    out = {}
    for name, path, options, adapter in (
            ("latent", make_tiny_deepseek.build(folder, "yarn/new/F32"), {"kv_type": "Q8_0"}, ""),
            ("adapters", make_tiny_architectures.build(folder, "qwen2/Q8_0"), {"kv_type": "Q8_0"}, "all")):
        models = Models()
        if adapter:
            options["adapters"] = (models.adapter(str(make_tiny_adapters.build(folder, adapter)), 0.5),)
        text = models.assembly(models.load(str(path)), options=Options(max_tokens=6, temperature=0.8, **options))
        text = text.replace("STREAM rToken, OUTPUT TEXT MODEL=rModel", "STREAM rToken, OUTPUT TEXT LINE")
        out[name] = assemble("\n".join("    NOP" if line.strip() == "IF_EQUAL done" else line
                                       for line in text.splitlines())), models
    return out


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Models]]:
    return programs(tmp_path_factory.mktemp("special"))


def machine(made: tuple[Any, Models], i: int) -> tuple[m3jit.VM, list[str]]:
    program, models = made
    vm = m3jit.VM(program, models=models, seed=i, threads=2)
    text: list[str] = []
    vm.sinks["OUTPUT"] = CallbackSink("tokens", lambda b: text.append(b if isinstance(b, str) else bytes(b).decode()))
    vm.push_input(np.array(PROMPTS[i], np.int64))
    return vm, text


def stream_of(vm: m3jit.VM) -> list[bytes]:
    stream = vm.machine.state_of(vm.main, 0)
    return [part.tobytes() for layer in sorted(stream.layers) for part in stream.rows(layer)]


@pytest.mark.parametrize("name", ["latent", "adapters"])
def test_a_batch_gives_what_each_gives_alone(name, made):
    alone = []
    for i in range(len(PROMPTS)):
        vm, text = machine(made[name], i)
        vm.run()
        alone.append((text, stream_of(vm)))
    batch, members = Batch(), [machine(made[name], i) for i in range(len(PROMPTS))]
    for vm, _ in members:
        batch.add(vm)
    batch.run()
    assert batch.stats["joined_launches"] > 0
    assert [(text, stream_of(vm)) for vm, text in members] == alone
    assert all(len("".join(text).split()) == 6 for text, _ in alone)


@pytest.mark.parametrize("name", ["latent", "adapters"])
def test_a_rollback_in_the_middle_gives_the_same_bytes(name, made):
    """Fork after the first token, make three more on the interpreter, go back, run on compiled: equal tokens and
    rows."""
    program, models = made[name]
    text: list[str] = []
    vm = m3jit.VM(program, models=models, seed=3, threads=1)
    vm.sinks["OUTPUT"] = CallbackSink("tokens", lambda b: text.append(b if isinstance(b, str) else bytes(b).decode()))
    vm.push_input(np.array(PROMPTS[0], np.int64))
    while len(text) < 1:
        vm.step(5)
    snapshot, rows = vm.fork(), stream_of(vm)
    while len(text) < 4:
        vm.step(5)
    first, further = text[:], stream_of(vm)
    vm.abort(snapshot, resume=True)
    assert stream_of(vm) == rows != further
    del text[1:]
    vm.run()
    assert text[:4] == first and len(text) == 6
    assert all(now.startswith(before) for now, before in zip(stream_of(vm), further))
