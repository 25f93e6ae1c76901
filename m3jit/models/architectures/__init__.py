"""The architectures that m3jit compiles: the name in a file -> what writes the program.

An entry is a function (source, reference, options, ends) -> assembly text (`program.Compiler`).  Models that generate
text are classes whose instances say sizes, tensors and one layer; `program.generation` makes the function.
EMBEDDERS holds what writes the programs of vectors (`pooling.Embedder`).
"""
from __future__ import annotations

from m3jit.models.architectures.bert import Bert
from m3jit.models.architectures.bitnet import BitNet
from m3jit.models.architectures.deepseek2 import DeepSeek2
from m3jit.models.architectures.gemma import Gemma2, Gemma3
from m3jit.models.architectures.hybrid import GraniteHybrid, Jamba
from m3jit.models.architectures.llama import Llama
from m3jit.models.architectures.mamba import Mamba, Mamba2
from m3jit.models.architectures.olmo2 import Olmo2
from m3jit.models.architectures.phi3 import Phi3
from m3jit.models.architectures.qwen import Qwen2, Qwen3, Qwen3Moe
from m3jit.models.pooling import Embedder, as_stated, encoding, hidden_states
from m3jit.models.program import Compiler, generation

GENERATORS = (Llama, Qwen2, Qwen3, Qwen3Moe, Gemma2, Gemma3, Phi3, Olmo2, DeepSeek2, BitNet, Mamba,
              Mamba2, Jamba, GraniteHybrid)
EMBEDDERS: dict[str, Embedder] = {model.name: hidden_states(model) for model in GENERATORS} | {
    Bert.name: encoding(Bert)}
ARCHITECTURES: dict[str, Compiler] = {model.name: generation(model) for model in GENERATORS} | {
    Bert.name: as_stated(Bert.name, EMBEDDERS[Bert.name])}
