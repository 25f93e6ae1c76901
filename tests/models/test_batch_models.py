"""Models in batches: machines with prompts of different lengths give the tokens and registers they give alone,
greedily and sampled, on every CPU level and thread count (tests/models/test_same_bytes.py: of every architecture)."""
from __future__ import annotations

import numpy as np
import pytest

from m3jit.frontend import assemble
from m3jit.models.program import Options
from m3jit.models.provider import Models
from m3jit.vm.batch import Batch
from m3jit.vm.checked import comparable
from m3jit.vm.streams import CallbackSink
from m3jit.vm.vm import VM
from tests.backends.cpu_engines import LEVELS

LENGTHS = (5, 1, 23, 70, 2, 9, 64, 12)                 # tokens of the prompts; a chunk has 16 here


class Case:
    """A model's program, and machines that run it on token ids."""

    def __init__(self, path: str, temperature: float = 0.0, tokens: int = 5):
        self.models = Models()
        text = self.models.assembly(self.models.load(path), path, Options(max_tokens=tokens, temperature=temperature,
                                                                          chunk=16))
        text = text.replace("STREAM rToken, OUTPUT TEXT MODEL=rModel", "STREAM rToken, OUTPUT TEXT LINE")
        self.program = assemble(text.replace("IF_EQUAL done", "NOP"))      # the lengths do not hang on the data
        self.vocabulary = self.models.load(path).info("vocab")

    def machine(self, i: int, backend: str, threads: int) -> tuple[VM, list]:
        vm = VM(self.program, backend=backend, threads=threads, models=self.models, seed=i)
        tokens: list = []
        vm.sinks["OUTPUT"] = CallbackSink("tokens", tokens.append)
        ids = np.random.default_rng(i).integers(5, self.vocabulary - 5, LENGTHS[i % len(LENGTHS)])
        vm.push_input(ids.astype(np.int64))
        return vm, tokens

    def outcome(self, vm: VM, tokens: list) -> tuple:
        """Tokens, registers, the random stream and every row of the caches."""
        states = [comparable(vm.main.states.get(h.id)) for h in vm.main.S if h is not None]
        registers = {n: v.tobytes() if hasattr(v, "tobytes") else repr(v) for n, v in vm.registers.items()
                     if not n.startswith("S")}
        return tokens, registers, vm.main.rng, vm.retired, states

    def alone(self, i: int) -> tuple:
        vm, tokens = self.machine(i, "cpu", 1)
        vm.run()
        return self.outcome(vm, tokens)


@pytest.fixture(scope="module")
def default() -> dict[float, tuple[Case, list]]:
    """The embedded model, and what each machine gives alone."""
    cases = {t: Case("default", t) for t in (0.0, 0.8)}
    return {t: (case, [case.alone(i) for i in range(len(LENGTHS))]) for t, case in cases.items()}


WAYS = [("cpu:native", 2, 0.0), ("auto", 2, 0.8), ("cpu:native", 1, 0.8), ("cpu:native", 3, 0.8)] + \
    [(f"cpu:{level}", 2, 0.8) for level in LEVELS if level in ("avx2", "baseline")]


@pytest.mark.parametrize("backend, threads, temperature", WAYS)
def test_eight_machines_that_join_at_different_rounds(default, backend, threads, temperature):
    case, wanted = default[temperature]
    made = [case.machine(i, backend, threads) for i in range(len(LENGTHS))]
    batch = Batch()
    for i, (vm, _) in enumerate(made):
        batch.add(vm)
        for _ in range(i % 3):
            batch.step()
    batch.run()
    for (vm, tokens), want in zip(made, wanted):
        assert case.outcome(vm, tokens) == want
    stats = batch.stats
    assert stats["shared_entries"] > 20 and stats["joined_launches"] > stats["launches"] / 2


def test_backends_without_code_for_several_contexts_run_one_by_one(default):
    case, wanted = default[0.0]
    made = [case.machine(i, "interpreter", 1) for i in range(2)]
    batch = Batch()
    for vm, _ in made:
        batch.add(vm)
    batch.run()
    for (vm, tokens), want in zip(made, wanted):
        assert case.outcome(vm, tokens) == want
    assert batch.stats["shared_entries"] == 0
