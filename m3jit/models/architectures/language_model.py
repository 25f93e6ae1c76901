"""What every model that generates shares: sizes, the embedding, a norm before each part of a layer, the head."""
from __future__ import annotations

from m3jit.models.model_source import LAYER_PREFIX, Keys, Shapes, Source
from m3jit.models.program import Options, Writer


class LanguageModel:
    """Sizes from the metadata that every such architecture has (`program.Architecture`)."""
    name = ""                           # the architecture's name in files, and the prefix of its keys

    def __init__(self, source: Source, options: Options):
        self.source, self.options = source, options
        self.keys = Keys(source, self.name)
        need = self.keys.need
        self.layers, self.width = need("block_count", int), need("embedding_length", int)
        trained = need("context_length", int)
        self.context = trained if options.context is None else min(trained, options.context)
        self.eps = need("attention.layer_norm_rms_epsilon", float)
        self.vocabulary = source.tensor("token_embd.weight").shape[0]
        self.title_name = source.value("general.name", str, default=f"{self.name} model")

    def tensors(self) -> Shapes:
        """Name -> shape of every tensor the program names."""
        expected: Shapes = {"token_embd.weight": (self.vocabulary, self.width), "output_norm.weight": (self.width,)}
        if "output.weight" in self.source.tensors or getattr(self.source, "untied", False):
            expected["output.weight"] = (self.vocabulary, self.width)
        expected |= self.tensors_of_all_layers()
        for i in range(self.layers):
            b = LAYER_PREFIX.format(i)
            expected |= {b + name: shape for name, shape in self.layer_tensors(i).items()}
        return expected

    def tensors_of_all_layers(self) -> Shapes:
        """Tensors that the layers share."""
        return {}

    def layer_tensors(self, i: int) -> Shapes:
        """The tensors of layer i, names without the layer's prefix."""
        raise NotImplementedError                      # each kind of model says its own

    def embed(self, w: Writer) -> None:
        w.embedding("rX")

    def last_norm(self, w: Writer) -> None:
        w.norm("rX", "rX", "output_norm.weight", self.eps)

    def head(self, w: Writer) -> None:
        self.last_norm(w)
        w.product("rLogits", "rX", "output.weight" if w.has("output.weight") else "token_embd.weight")
