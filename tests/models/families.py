"""Tiny models by name, and one of each architecture that generates text."""
from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import make_tiny_architectures  # noqa: E402  (found through the path set above)
import make_tiny_bitnet  # noqa: E402
import make_tiny_deepseek  # noqa: E402
import make_tiny_recurrent  # noqa: E402

RECURRENT = ("mamba2/F32", "jamba/F32")
FAMILIES = ("llama3/Q8_0", "plain/new/F32", *RECURRENT)        # one for each way a model can keep its state
EVERY = {"llama": "llama3/Q8_0", "llama-experts": "llama-experts/Q4_K", "qwen2": "qwen2/Q8_0", "qwen3": "qwen3/Q8_0",
         "qwen3moe": "qwen3moe/Q8_0", "gemma2": "gemma2/Q4_K", "gemma3": "gemma3/Q8_0", "phi3": "phi3-long/Q4_K",
         "olmo2": "olmo2/Q8_0", "deepseek2": "plain/old/Q8_0", "deepseek2-experts": "experts/new/F32",
         "bitnet": "scales/TQ2_0", "bitnet-relu2": "relu2/TQ2_0", "mamba": "mamba/Q8_0", "mamba2": "mamba2/Q8_0",
         "jamba": "jamba/Q8_0", "granitehybrid": "granitehybrid-experts/Q8_0",
         "deepseek2-experts-q8_0": "routed/new/Q8_0", "deepseek2-experts-q4_k": "routed/new/Q4_K"}
CONTEXT = make_tiny_architectures.CONTEXT


def build(folder: Path, name: str) -> Path:
    """The file of a tiny model, written into the folder if it is not there."""
    for tools in (make_tiny_architectures, make_tiny_recurrent, make_tiny_deepseek):
        if name in tools.names():
            return tools.build(folder, name)
    if name in make_tiny_bitnet.names() + make_tiny_bitnet.names(peer=False):
        return make_tiny_bitnet.build(folder, name)
    raise KeyError(name)


def with_context(path: Path, tokens: int) -> Path:
    """The file beside `path` that has the same model with a context of so many tokens."""
    data = bytearray(path.read_bytes())
    at = data.index(b".context_length") + len(b".context_length")
    at += 4                                                    # the kind of the value: u32
    assert int.from_bytes(data[at:at + 4], "little") == CONTEXT
    data[at:at + 4] = tokens.to_bytes(4, "little")
    new = path.with_name(f"{path.stem}-{tokens}.gguf")
    new.write_bytes(data)
    return new
