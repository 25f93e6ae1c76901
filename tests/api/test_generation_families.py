"""One model of each family: a text alone, beside others in a batch, and scored at once are the same bytes."""
from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest

import m3jit
from m3jit.api.generation import Settings
from tests.models.folder_tokenizers import byte_pairs

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import make_tiny_architectures  # noqa: E402  (found through the path set above)
import make_tiny_folders  # noqa: E402
import make_tiny_recurrent  # noqa: E402

MODELS = ["llama3/Q4_K", "qwen3moe/Q8_0", "gemma3/Q4_K", "phi3/F32", "mamba2/Q8_0", "jamba/F32"]
PROMPTS = [[5, 6, 7], [9, 10], list(range(20, 90))]
KINDS = [dict(temperature=0.0), dict(temperature=0.9, top_k=0), dict(temperature=1.2, top_p=0.7)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


@pytest.mark.parametrize("name", MODELS)
def test_batches_and_scores(name, folder):
    tools = make_tiny_architectures if name in make_tiny_architectures.names() else make_tiny_recurrent
    model = m3jit.load_model(tools.build(folder, name), threads=1)
    jobs = [(prompt, Settings(max_tokens=10, seed=i, logprobs=1, **kind))
            for i, (prompt, kind) in enumerate(zip(PROMPTS, KINDS))]
    alone = []
    for prompt, settings in jobs:
        generation = m3jit.Generation(model.start(prompt, settings))
        noted = [p.logprobs.chosen.logprob for p in generation if p.logprobs]
        scores = model.score(prompt + generation.tokens)[len(prompt) - 1:]
        assert scores.tobytes() == np.array(noted, np.float32).tobytes()
        alone.append((generation.tokens, generation.text, noted))
    batch, texts = m3jit.Batch(), [model.start(*job) for job in jobs]
    for text in texts:
        text.vm.set_sink("TOKENS", text.take_token)
        batch.add(text.vm)
    batch.run()
    for text, (tokens, words, noted) in zip(texts, alone):
        text.finish()
        assert text.tokens == tokens and "".join(p.text for p in text.ready) == words
        assert [p.logprobs.chosen.logprob for p in text.ready if p.logprobs] == noted
    assert batch.stats["shared_entries"] > 10, "nothing was shared"


def test_a_folder_follows_grammars(folder):
    """Tokenisers of folders tell the library as much as those of GGUF files."""
    path = make_tiny_folders.build(folder, ("llama",))["llama"]
    byte_pairs(path, 264)
    model = m3jit.load_model(path, threads=1)
    grammar = m3jit.Grammar("regex", "[a-z]{4}")
    generation = model.generate("the river", seed=1, temperature=1.0, max_tokens=60, grammar=grammar)
    assert re.fullmatch("[a-z]{4}", generation.result()) and generation.finish_reason == "stop"
