"""mamba and mamba2: layers of selective state-space scans instead of attention (Gu and Dao 2023, Dao and Gu 2024).

    x += Wout (scan(silu(conv(u))) * silu(z)),   z, u .. = Win rmsnorm(x)

mamba reads step sizes, B and C from the convolved u, with a decay for each channel and state; mamba2 takes them from
Win too, with one decay for each head, and normalises each group of channels before Wout.

The state is in sScan: for each layer h of the scan and the last rows of the convolution.
"""
from __future__ import annotations

from m3jit.models.architectures.language_model import LanguageModel
from m3jit.models.model_error import ModelFileError
from m3jit.models.model_source import FLOAT_TYPES, LAYER_PREFIX, Keys, Shapes, Source
from m3jit.models.program import Options, Writer


class Mixer:
    """What both kinds of layer have.  Key "ssm.inner_size": channels; "ssm.state_size": states of a channel."""
    exact = ("ssm_conv1d.weight", "ssm_a", "ssm_d")     # tensors that must be floats: no product reads them

    def __init__(self, keys: Keys, width: int, eps: float):
        self.keys, self.width, self.eps = keys, width, eps
        self.taps, self.channels, self.states, self.rank = (
            self.size(key) for key in ("conv_kernel", "inner_size", "state_size", "time_step_rank"))
        self.read()

    def size(self, key: str, **default: int) -> int:
        """A size from the metadata, at least 1."""
        value = self.keys.need(f"ssm.{key}", int, **default)
        if value < 1:
            raise self.keys.refuse(f"ssm.{key}", f"is {value}", "at least 1")
        return value

    def read(self) -> None:
        """Reads the metadata only this kind has."""

    def tensors(self, i: int) -> Shapes:
        """The tensors of layer i's mixer, names without the layer's prefix."""
        for name in self.exact:
            info = self.keys.source.tensor(LAYER_PREFIX.format(i) + name)
            if info.ggml_type.name not in FLOAT_TYPES:
                raise ModelFileError(self.keys.source.path, f"has type {info.ggml_type.name}",
                                     item=f"tensor {LAYER_PREFIX.format(i) + name!r}", expected="a float type")
        return self.shapes()

    def shapes(self) -> Shapes:
        raise NotImplementedError

    def write(self, w: Writer, i: int) -> None:
        """rH [T, width] -> rH, the branch's result."""
        raise NotImplementedError

    def convolve(self, w: Writer, i: int) -> None:
        """rU = silu of its causal convolution."""
        w.weight("rW", LAYER_PREFIX.format(i) + "ssm_conv1d.weight")
        w.weight("rB", LAYER_PREFIX.format(i) + "ssm_conv1d.bias")
        w(f"CONV rU, rU, rW, rB, sScan LAYER={i} SILU")

    def scan(self, w: Writer, i: int, options: str) -> None:
        """rH = scan of rU, times silu(rZ)."""
        w.weight("rA", LAYER_PREFIX.format(i) + "ssm_a")
        w.weight("rD", LAYER_PREFIX.format(i) + "ssm_d")
        w(f"SSM_SCAN rH, rU, sScan, rDt, rA B=rIn C=rOut D=rD SOFTPLUS LAYER={i}{options}")
        w("SILU rZ, rZ")
        w("MUL rH, rH, rZ")


def columns(w: Writer, rd: str, x: str, start: int, count: int, comment: str = "") -> None:
    """rd = columns start .. start + count - 1 of x."""
    w(f"SLICE {rd}, {x} AXIS=1 START={start} LEN={count}", comment)


class SelectiveMixer(Mixer):
    """Mamba's: a decay for each channel and state.  Falcon-Mamba and Jamba normalise dt, B and C."""

    def read(self) -> None:
        b = self.keys.source
        self.gains = any(name.endswith("ssm_dt_norm.weight") for name in b.tensors)
        self.norms = self.gains or self.keys.need("ssm.dt_b_c_rms", bool, default=False)

    def shapes(self) -> Shapes:
        c, n, r = self.channels, self.states, self.rank
        norms = {"ssm_dt_norm.weight": (r,), "ssm_b_norm.weight": (n,), "ssm_c_norm.weight": (n,)} if self.gains else {}
        return {"ssm_in.weight": (2 * c, self.width), "ssm_conv1d.weight": (c, self.taps), "ssm_conv1d.bias": (c,),
                "ssm_x.weight": (r + 2 * n, c), "ssm_dt.weight": (c, r), "ssm_dt.bias": (c,), "ssm_a": (c, n),
                "ssm_d": (c,), "ssm_out.weight": (self.width, c), **norms}

    def write(self, w: Writer, i: int) -> None:
        c, n, r, b = self.channels, self.states, self.rank, LAYER_PREFIX.format(i)
        w.product("rZ", "rH", b + "ssm_in.weight")
        columns(w, "rU", "rZ", 0, c)
        columns(w, "rZ", "rZ", c, c, "the gate")
        self.convolve(w, i)
        w.product("rDt", "rU", b + "ssm_x.weight")
        for register, name, start, count in (("rIn", "b", r, n), ("rOut", "c", r + n, n), ("rDt", "dt", 0, r)):
            columns(w, register, "rDt", start, count)
            if self.gains:
                w.norm(register, register, f"{b}ssm_{name}_norm.weight", self.eps)
            elif self.norms:
                w(f"NORM {register}, {register} RMS EPS={self.eps!r}")
        w.product("rDt", "rDt", b + "ssm_dt.weight")
        self.scan(w, i, "")
        w.product("rH", "rH", b + "ssm_out.weight")


class HeadMixer(Mixer):
    """Mamba-2's: one decay for each head (as many as "ssm.time_step_rank" says), B and C shared by groups of heads."""
    exact = (*Mixer.exact, "ssm_norm.weight")

    def read(self) -> None:
        self.groups = self.size("group_count", default=1)
        if self.channels % self.rank or self.rank % self.groups:
            raise self.keys.refuse("ssm.time_step_rank", f"is {self.rank}",
                                   f"a divisor of {self.channels} channels and a multiple of {self.groups} groups")
        self.mixed = self.channels + 2 * self.groups * self.states       # columns of the convolution: u, B, C

    def shapes(self) -> Shapes:
        c, heads = self.channels, self.rank
        return {"ssm_in.weight": (c + self.mixed + heads, self.width), "ssm_conv1d.weight": (self.mixed, self.taps),
                "ssm_conv1d.bias": (self.mixed,), "ssm_dt.bias": (heads,), "ssm_a": (heads, 1), "ssm_d": (heads, 1),
                "ssm_norm.weight": (self.groups, c // self.groups), "ssm_out.weight": (self.width, c)}

    def write(self, w: Writer, i: int) -> None:
        c, shared, b = self.channels, self.groups * self.states, LAYER_PREFIX.format(i)
        w.product("rZ", "rH", b + "ssm_in.weight")
        columns(w, "rU", "rZ", c, self.mixed)
        columns(w, "rDt", "rZ", c + self.mixed, self.rank)
        columns(w, "rZ", "rZ", 0, c, "the gate")
        self.convolve(w, i)
        columns(w, "rIn", "rU", c, shared)
        columns(w, "rOut", "rU", c + shared, shared)
        columns(w, "rU", "rU", 0, c)
        w.weight("rB", b + "ssm_dt.bias")
        self.scan(w, i, f" DT_BIAS=rB HEADS={self.rank} GROUPS={self.groups}")
        w(f"RESHAPE rH, rH SHAPE=[-1, {self.groups}, {c // self.groups}]")
        w.norm("rH", "rH", b + "ssm_norm.weight", self.eps)
        w(f"RESHAPE rH, rH SHAPE=[-1, {c}]")
        w.product("rH", "rH", b + "ssm_out.weight")


class Mamba(LanguageModel):
    """A model of such layers alone."""
    name = "mamba"
    mixer_type: type[Mixer] = SelectiveMixer

    def __init__(self, source: Source, options: Options):
        super().__init__(source, options)
        self.mixer = self.mixer_type(self.keys, self.width, self.eps)

    @property
    def title(self) -> str:
        return (f"{self.title_name}: {self.name}, {self.layers} layers, width {self.width}, {self.mixer.channels} "
                f"channels of {self.mixer.states} states,\n"
                f"vocabulary {self.vocabulary}, context {self.context}.  Written by m3jit compile.")

    def layer_tensors(self, i: int) -> Shapes:
        return {"attn_norm.weight": (self.width,), **self.mixer.tensors(i)}

    def layer(self, w: Writer, i: int) -> None:
        w.norm("rH", "rX", LAYER_PREFIX.format(i) + "attn_norm.weight", self.eps)
        self.mixer.write(w, i)
        w.residual()


class Mamba2(Mamba):
    name = "mamba2"
    mixer_type = HeadMixer
