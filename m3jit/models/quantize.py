"""A model file with its matrices in another type: which type each tensor gets, and the file.

Matrices are the tensors named "... .weight" with two axes or more, but for small ones that decide much (`KEPT`: norms,
a router's gate, convolutions, position tables); all other tensors are copied as they are.  The output matrix (the token
table where that is it) gets Q6_K, or Q8_0 where its rows are no whole blocks of 256, unless a larger type is asked for:
its errors go into every logit.  A token table of its own gets Q4_K beside ternary and MXFP4 matrices.  Where a row is
no whole number of blocks, the type is that of FALLBACK, or F16.
"""
from __future__ import annotations

import re
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

from m3jit.errors import OperandError
from m3jit.ir import eager_blocks, eager_encode
from m3jit.ir.eager_values import narrow, widen
from m3jit.isa.types import DTYPES, Tensor
from m3jit.models.ggml_types import GGML_TYPES
from m3jit.models.gguf_writer import ALIGNMENT, U32, NewTensor, write_gguf
from m3jit.models.model_error import ModelFileError
from m3jit.models.model_source import BLOCK_TYPES, FLOAT_TYPES, ONE_OF_THE_TYPES

FLOATS = ("F32", "F16", "BF16")
TYPES = (*FLOATS, *eager_encode.TYPES)
FALLBACK = {"Q4_K": "Q5_0", "Q6_K": "Q8_0", "TQ1_0": "Q4_0", "TQ2_0": "Q4_0"}
KEPT = re.compile(r"_norm\.weight|ffn_gate_inp|position_embd|token_types|ssm_conv1d|shortconv\.conv|attn_rel_b|"
                  r"time_mix_")
# number that general.file_type gives a file by the type of most of its matrices
FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q4_K": 14, "Q6_K": 18,
              "BF16": 32, "TQ1_0": 36, "TQ2_0": 37, "MXFP4": 38}
ROWS_BYTES = 4 << 20                         # f32 bytes of the rows that are packed together


@dataclass(frozen=True)
class Choice:
    """What is asked for: the type of the matrices; output, embedding: of those two (None: by the rules above);
    requantize: pack what is in blocks already."""
    type: str
    output: str | None = None
    embedding: str | None = None
    requantize: bool = False


@dataclass
class Summary:
    """What was done: tensors by type, those that got another type because of their rows, sizes in bytes."""
    types: Counter
    fallbacks: dict[str, str]
    before: int = 0
    after: int = 0


def _fitting(wanted: str, columns: int) -> str:
    """`wanted`, or what stands in for it where rows of `columns` are no whole blocks."""
    while columns % GGML_TYPES[wanted].block:
        wanted = FALLBACK.get(wanted, "F16")
    return wanted


def type_of(source: Any, name: str, choice: Choice) -> str:
    """The type a tensor gets.  ModelFileError: it is a matrix in a type that cannot be read."""
    info = source.tensors[name]
    kind = info.ggml_type.name
    if len(info.shape) < 2 or not name.endswith(".weight") or KEPT.search(name) or \
            DTYPES.get(kind, DTYPES["F32"]).kind not in ("float", "block"):
        return kind
    if kind not in BLOCK_TYPES | FLOAT_TYPES:
        raise ModelFileError(source.path, f"has type {kind}", item=f"tensor {name!r}", expected=ONE_OF_THE_TYPES,
                             remedy="Start from a file in one of them.")
    wanted = choice.type
    last = name == "output.weight" or name == "token_embd.weight" and "output.weight" not in source.tensors
    if last and choice.output:
        wanted = choice.output
    elif name == "token_embd.weight" and choice.embedding:
        wanted = choice.embedding
    elif last and wanted not in (*FLOATS, "Q8_0", "Q6_K"):
        wanted = "Q6_K"
    elif name == "token_embd.weight" and wanted in ("TQ1_0", "TQ2_0", "MXFP4"):
        wanted = "Q4_K"
    return _fitting(wanted, info.shape[-1])


def _widened(kind: str, raw: np.ndarray, columns: int) -> np.ndarray:
    """Stored rows, uint8 [rows, bytes], as f32 [rows, columns]."""
    if kind == "F64":
        return raw.view("<f8").astype(np.float32)
    if kind in FLOATS:
        return widen(Tensor(DTYPES[kind], (len(raw), columns), raw.view(DTYPES[kind].numpy)))
    return eager_blocks.decode(DTYPES[kind], raw)


def _packed(kind: str, x: np.ndarray) -> bytes:
    if kind in FLOATS:
        out = narrow(x, DTYPES[kind])
        if kind == "F16" and np.isinf(out).any():
            raise OperandError(f"a value of {float(np.abs(x).max()):g} is beyond F16 (65504 at most)")
        return out.tobytes()
    return eager_encode.encode(DTYPES[kind], x).tobytes()


def _rows(source: Any, t: NewTensor, pool: ThreadPoolExecutor) -> Iterator[bytes]:
    """A tensor's bytes in its new type, some rows at a time."""
    info = source.tensors[t.name]
    kind, columns = info.ggml_type.name, info.shape[-1]
    raw = source.tensor_bytes(t.name)
    if kind == t.ggml_type.name:
        yield raw.tobytes()
        return
    rows = raw.reshape(info.size // columns, -1)
    step = max(1, ROWS_BYTES // (4 * columns))

    def part(at: int) -> bytes:
        x = _widened(kind, rows[at:at + step], columns)
        if not np.isfinite(x).all():
            row, column = np.argwhere(~np.isfinite(x))[0].tolist()
            raise ModelFileError(source.path, f"holds {x[row, column]} in row {at + row}, column {column}",
                                 item=f"tensor {t.name!r}", expected="finite weights",
                                 remedy="Obtain or convert the model again.")
        return _packed(t.ggml_type.name, x)
    try:
        yield from pool.map(part, range(0, len(rows), step))
    except OperandError as error:
        raise ModelFileError(source.path, f"cannot be packed as {t.ggml_type}: {error}", item=f"tensor {t.name!r}",
                             remedy="Take a type with a wider range, such as BF16.") from None


def quantize(source: Any, choice: Choice, out: BinaryIO, threads: int = 1,
             progress: Callable[[int, int], None] | None = None) -> Summary:
    """Writes the model of `source` (a GGUF file, or several that belong together) to `out`, as one file.

    ModelFileError: a tensor that is in blocks already without choice.requantize, holds a NaN or infinity, or has a
    value the type cannot hold.  progress(bytes done, bytes in all) is called after each tensor."""
    tensors, summary = [], Summary(Counter(), {})
    for name, info in source.tensors.items():
        kind, stored = type_of(source, name, choice), info.ggml_type.name
        if kind != stored and DTYPES.get(stored, DTYPES["F32"]).is_block and not choice.requantize:
            raise ModelFileError(source.path, f"is in blocks already ({stored})", item=f"tensor {name!r}",
                                 expected="a model with float weights",
                                 remedy="Start from the unpacked model, or allow the loss with --requantize.")
        if kind != stored and _fitting(choice.type, info.shape[-1]) != choice.type:
            summary.fallbacks[name] = kind
        tensors.append(NewTensor(name, GGML_TYPES[kind], info.shape))
        summary.types[kind] += 1
        summary.before += info.nbytes
    alignment = getattr(source, "alignment", ALIGNMENT)
    with ThreadPoolExecutor(threads) as pool:
        def data(t: NewTensor) -> Iterable[bytes]:
            yield from _rows(source, t, pool)
            summary.after += t.nbytes
            if progress:
                progress(summary.after, sum(x.nbytes for x in tensors))
        write_gguf(out, _metadata(source, choice), tensors, data, alignment)
    return summary


def _metadata(source: Any, choice: Choice) -> list[tuple[str, int, bytes]]:
    """The source's metadata, with what says how the file is packed renewed."""
    own = {"general.file_type": FILE_TYPES[choice.type]}
    if choice.type not in FLOATS:
        own["general.quantization_version"] = 2
    kept = [(key, *source.metadata.stored(key)) for key in source.metadata
            if key not in own and not key.startswith("split.")]
    return kept + [(key, U32, struct.pack("<I", value)) for key, value in own.items()]
