"""The GGUF reader: the gguf package as oracle, then damage of every kind, which must end in ModelFileError."""

import mmap
import os
import struct
import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from m3jit.models.ggml_types import GGML_TYPES, GGML_TYPES_BY_NUMBER
from m3jit.models.gguf_file import GGUFFile
from m3jit.models.gguf_strings import StringArray, index_strings
from m3jit.models.model_error import ModelFileError
from m3jit.models.model_source import ONE_OF_THE_TYPES


def smollm2_path() -> Path | None:
    """The real model, when the machine has it: the environment variable first, then the user cache."""
    named = os.environ.get("M3JIT_TEST_SMOLLM2")
    if named:
        return Path(named)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    found = sorted((cache / "m3jit").rglob("SmolLM2-135M-Instruct.Q4_1.gguf"))
    return found[0] if found else None


def touch(path: Path) -> None:
    """Open a file and read everything in it."""
    with GGUFFile(path) as file:
        for value in file.metadata.values():
            value.tolist() if isinstance(value, (np.ndarray, StringArray)) else value
        for name in file.tensors:
            file.tensor_bytes(name).sum()
        assert len(file.content_hash) == len(file.full_hash()) == len(file.metadata_hash("")) == 32


def refused(path: Path, data: bytes) -> ModelFileError:
    """The error `data` is refused with."""
    path.write_bytes(data)
    with pytest.raises(ModelFileError) as caught:
        touch(path)
    return caught.value


# Files made by hand: the writer of the gguf package refuses to write what we must refuse to read.

def text(value: bytes | str) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def entry(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def array(kind: int, items: list[bytes], count: int | None = None) -> bytes:
    return struct.pack("<IQ", kind, len(items) if count is None else count) + b"".join(items)


def tensor(name: str, dims: tuple[int, ...], kind: int, offset: int, rank: int | None = None) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims) if rank is None else rank, *dims, kind, offset)


def container(entries: Sequence[bytes], tensors: Sequence[bytes] = (), data: int = 0, version: int = 3,
              alignment: int = 32, counts: tuple[int, int] | None = None) -> bytes:
    n_tensors, n_entries = counts or (len(tensors), len(entries))
    head = struct.pack("<4sIQQ", b"GGUF", version, n_tensors, n_entries) + b"".join(entries) + b"".join(tensors)
    return head + bytes(-len(head) % alignment) + bytes(data)


SMALL = container(
    [entry("general.architecture", 8, text("llama")), entry("a.u8", 0, b"\x07"), entry("a.f32", 6, b"\0\0\x80\x3f"),
     entry("a.bool", 7, b"\x01"), entry("a.ints", 9, array(5, [struct.pack("<i", i) for i in (-1, 0, 70000)])),
     entry("t.words", 9, array(8, [text("a"), text(""), text("é b"), text("\0\0\0\0\0\0\0\0x")])),
     entry("t.nested", 9, array(9, [array(8, [text("in")]), array(7, [b"\0", b"\1"])]))],
    [tensor("w", (32, 2), 8, 0), tensor("b", (3,), 0, 96)], data=96 + 12)


# The type table.

def test_type_table_is_that_of_the_gguf_package():
    theirs = {kind.name: (kind.value, *gguf.GGML_QUANT_SIZES[kind]) for kind in gguf.GGMLQuantizationType}
    ours = {kind.name: (kind.number, kind.block, kind.nbytes) for kind in GGML_TYPES.values()}
    # The package counts Q8_1's two scales as f32; in ggml (block_q8_1) they are f16. It is never stored in files.
    assert theirs.pop("Q8_1") == (9, 32, 40) and ours.pop("Q8_1") == (9, 32, 36)
    assert {name: ours[name] for name in theirs if name in ours} == {n: t for n, t in theirs.items() if n in ours}
    assert set(ours) >= {"F32", "F16", "BF16", "F64", "I8", "I16", "I32", "I64", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0",
                         "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q8_K", "TQ1_0", "TQ2_0", "MXFP4", "IQ1_M", "IQ4_XS"}
    assert len(GGML_TYPES_BY_NUMBER) == len(GGML_TYPES)


# Agreement with the gguf package.

def assert_same_as_gguf_package(path: Path) -> None:
    reader = gguf.GGUFReader(path)
    with GGUFFile(path) as file:
        theirs = {name: field for name, field in reader.fields.items() if not name.startswith("GGUF.")}
        assert list(file.metadata) == list(theirs)
        for key, field in theirs.items():
            ours, wanted = file.metadata[key], field.contents()
            if isinstance(ours, (np.ndarray, StringArray)):
                ours = ours.tolist()
            assert ours == wanted and type(ours) is type(wanted), key
        assert list(file.tensors) == [tensor.name for tensor in reader.tensors]
        for wanted in reader.tensors:
            info = file.tensors[wanted.name]
            assert info.ggml_type.number == wanted.tensor_type.value
            assert list(info.shape) == list(reversed(wanted.shape.tolist()))
            assert (info.offset, info.nbytes, info.size) == (wanted.data_offset, wanted.n_bytes, wanted.n_elements)
            view = file.tensor_bytes(wanted.name)
            assert not view.flags.writeable and not view.flags.owndata
            assert np.array_equal(view, wanted.data.reshape(-1).view(np.uint8))
            del view
        assert file.version == reader.fields["GGUF.version"].contents() and file.alignment == reader.alignment


@pytest.mark.parametrize("alignment", [32, 8, 4096])
def test_agrees_with_gguf_package_on_every_value_type(tmp_path, alignment):
    path = tmp_path / "all.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(alignment)
    for kind, value in {"uint8": 255, "int8": -128, "uint16": 65535, "int16": -5, "uint32": 2**32 - 1,
                        "int32": -(2**31), "uint64": 2**64 - 1, "int64": -(2**63), "float32": 0.5, "float64": 1e300,
                        "bool": True, "string": "zwölf 𝛑"}.items():
        getattr(writer, f"add_{kind}")(f"x.{kind}", value)
    for name, values in {"ints": [1, -2, 3], "floats": [0.5, -1.25], "bools": [True, False, True],
                         "words": ["a", "", "né", "x" * 1000, "\0", "Ġthe"] * 40}.items():
        writer.add_array(f"y.{name}", values)
    writer.add_token_list([f"tok{i}" for i in range(70_000)])
    rng = np.random.default_rng(1)
    values = rng.standard_normal((6, 256), np.float32)
    for dtype in (np.float16, np.float32, np.float64, np.int8, np.int16, np.int32, np.int64):
        writer.add_tensor(f"plain.{np.dtype(dtype).name}", values.astype(dtype))
    writer.add_tensor("rank4", rng.standard_normal((2, 3, 1, 5), np.float32))
    for kind in ("BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0", "MXFP4"):
        quantised = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
        writer.add_tensor(f"packed.{kind}", quantised, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert_same_as_gguf_package(path)


def test_hand_made_file_reads_back(tmp_path):
    path = tmp_path / "small.gguf"
    path.write_bytes(SMALL)
    with GGUFFile(path) as file:
        meta = file.metadata
        assert (meta["a.u8"], meta["a.f32"], meta["a.bool"]) == (7, 1.0, True)
        assert meta["a.ints"].tolist() == [-1, 0, 70000] and meta["t.words"] == ["a", "", "é b", "\0" * 8 + "x"]
        assert meta["t.words"][-1] == "\0" * 8 + "x" and meta["t.words"][1:3] == ["", "é b"]
        nested = meta["t.nested"]
        assert nested[0].tolist() == ["in"] and nested[1].tolist() == [False, True]
        assert file.tensors["w"].shape == (2, 32) and file.tensors["w"].nbytes == 68
        with pytest.raises(IndexError, match="t.words"):
            meta["t.words"][4]
        with pytest.raises(KeyError):
            meta["no such key"]
        assert file.value("a.u8", int) == 7 and file.value("a.u8", float) == 7.0 and file.value("none", int, 3) == 3
        for key, kind in (("a.u8", str), ("a.bool", int), ("none", int), ("t.words", int)):
            with pytest.raises(ModelFileError, match=key):
                file.value(key, kind)
        with pytest.raises(ModelFileError, match="nearest names are w"):
            file.tensor("ww")


def test_version_2_file_reads(tmp_path):
    path = tmp_path / "v2.gguf"
    path.write_bytes(container([entry("k", 4, struct.pack("<I", 9))], version=2))
    assert GGUFFile(path).metadata["k"] == 9


def test_smollm2_agrees_with_gguf_package_and_opens_fast():
    path = smollm2_path()
    if path is None:
        pytest.skip("SmolLM2 is not on this machine (m3jit model get smollm2, or set M3JIT_TEST_SMOLLM2)")
    times = []
    for _ in range(10):
        start = time.process_time()
        GGUFFile(path)
        times.append(time.process_time() - start)
    assert min(times) < 0.030, f"opening takes {min(times) * 1e3:.1f} ms; 4 ms were measured on an idle machine"
    assert_same_as_gguf_package(path)


def test_opening_materialises_nothing(tmp_path):
    words = 200_000
    path = tmp_path / "vocab.gguf"
    path.write_bytes(container([entry("v", 9, array(8, [text(f"word number {i}") for i in range(words)]))]))
    GGUFFile(path)  # imports done
    tracemalloc.start()
    try:
        file = GGUFFile(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # The offsets (8 bytes a string) and the scan's window, not the strings (70 bytes each as Python objects).
    assert peak < 8 * words + 6 * 2**20
    assert file.metadata["v"][words - 1] == f"word number {words - 1}"


def test_views_outlive_the_file_object(tmp_path):
    path = tmp_path / "small.gguf"
    path.write_bytes(SMALL[:-12] + struct.pack("<3f", 1, 2, 3))
    with GGUFFile(path) as file:
        view = file.tensor_bytes("b")
    del file
    assert view.view(np.float32).tolist() == [1, 2, 3]
    base = view
    while not isinstance(base, (mmap.mmap, memoryview)):
        base = base.base
    assert isinstance(base.obj if isinstance(base, memoryview) else base, mmap.mmap)


# Hashes.

def test_hashes_see_what_they_promise(tmp_path):
    path, twin = tmp_path / "a.gguf", tmp_path / "b.gguf"
    big = container([entry("tokenizer.x", 8, text("abc")), entry("other", 8, text("abc"))],
                    [tensor("w", (300_000,), 0, 0)], data=1_200_000)
    path.write_bytes(big)
    twin.write_bytes(big)
    os.utime(path, ns=(10, 10))
    os.utime(twin, ns=(10, 10))
    first, second = GGUFFile(path), GGUFFile(twin)
    assert first.content_hash == second.content_hash and first.full_hash() == second.full_hash()
    os.utime(twin, ns=(10, 11))
    assert GGUFFile(twin).content_hash != first.content_hash and GGUFFile(twin).full_hash() == first.full_hash()
    assert GGUFFile(twin).metadata_hash("tokenizer.") == first.metadata_hash("tokenizer.")
    changed = bytearray(big)
    changed[big.index(b"abc", big.index(b"other"))] ^= 1
    twin.write_bytes(changed)
    os.utime(twin, ns=(10, 10))
    other = GGUFFile(twin)
    assert other.content_hash != first.content_hash and other.full_hash() != first.full_hash()
    assert other.metadata_hash("tokenizer.") == first.metadata_hash("tokenizer.") != other.metadata_hash("")
    retrained = big[:first.data_start] + np.random.default_rng(0).bytes(1_200_000)
    twin.write_bytes(retrained)
    os.utime(twin, ns=(10, 10))
    assert GGUFFile(twin).content_hash != first.content_hash  # same header, size and time


# Damage.

def test_truncation_at_every_byte(tmp_path):
    path = tmp_path / "cut.gguf"
    for length in range(len(SMALL)):
        error = refused(path, SMALL[:length])
        assert str(path) in str(error) and error.remedy
    path.write_bytes(SMALL)
    touch(path)


def test_every_single_bit_flip(tmp_path):
    path = tmp_path / "flip.gguf"
    outcomes = {"read": 0, "refused": 0}
    path.write_bytes(SMALL)
    with open(path, "r+b", buffering=0) as file:  # in place: truncating a file anew costs milliseconds
        for bit in range(8 * len(SMALL)):
            os.pwrite(file.fileno(), bytes([SMALL[bit // 8] ^ 1 << bit % 8]), bit // 8)
            try:
                touch(path)
                outcomes["read"] += 1
            except ModelFileError:
                outcomes["refused"] += 1
            os.pwrite(file.fileno(), SMALL[bit // 8:bit // 8 + 1], bit // 8)
    assert min(outcomes.values()) > 500, outcomes


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(edits=st.lists(st.tuples(st.integers(0, len(SMALL) - 1),
                                st.sampled_from([b"\0", b"\xff", b"\xff" * 8, b"\0" * 8, b"\x7f" + b"\xff" * 7,
                                                 struct.pack("<Q", 2**63), struct.pack("<Q", 13)])), max_size=6),
       cut=st.integers(0, len(SMALL)), tail=st.binary(max_size=40))
def test_random_damage(tmp_path, edits, cut, tail):
    damaged = bytearray(SMALL)
    for at, patch in edits:
        damaged[at:at + len(patch)] = patch
    path = tmp_path / "fuzz.gguf"
    path.write_bytes(bytes(damaged[:cut]) + tail)
    try:
        touch(path)
    except ModelFileError:
        pass


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(words=st.lists(st.one_of(st.text(max_size=300), st.sampled_from(["", "\0", "\0" * 8, "\x01" + "\0" * 7 + "ab",
                                                                       "x" * 256, "y" * 70000])), max_size=200),
       repeat=st.integers(1, 30))
def test_any_strings_read_back(tmp_path, words, repeat):
    words = (words * repeat)[:2000]
    path = tmp_path / "words.gguf"
    path.write_bytes(container([entry("w", 9, array(8, [text(word.encode()) for word in words]))]))
    with GGUFFile(path) as file:
        found = file.metadata["w"]
        assert found.tolist() == words and [found[i] for i in range(len(found))] == words


U64 = 2**64 - 1
HOSTILE = {
    "not gguf": (b"GGML" + SMALL[4:], "does not start"),
    "empty": (b"", "0 bytes"),
    "version 1": (container([], version=1), "version 1"),
    "version 4": (container([], version=4), "version 2 or 3"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "huge tensor count": (container([], counts=(U64, 0)), "tensor count"),
    "huge metadata count": (container([], counts=(0, U64)), "metadata count"),
    "counts beyond the limit": (container([], data=20 * 2**20, counts=(0, 2**20)), "at most 65536"),
    "huge key": (container([struct.pack("<Q", U64) + b"k"]), "metadata key 0"),
    "empty key": (container([entry("", 0, b"\0")]), "is empty"),
    "key not UTF-8": (container([text(b"\xff") + struct.pack("<I", 0) + b"\0"]), "UTF-8"),
    "duplicate key": (container([entry("k", 0, b"\0")] * 2), "'k': appears twice"),
    "unknown value type": (container([entry("k", 13, b"\0" * 8)]), "unknown type 13"),
    "unknown item type": (container([entry("k", 9, array(99, [], 1))], data=64), "unknown type 99"),
    "huge string": (container([entry("k", 8, struct.pack("<Q", 2**62))]), "4611686018427387904"),
    "string not UTF-8": (container([entry("k", 8, text(b"\xc3("))]), "UTF-8"),
    "array item not UTF-8": (container([entry("k", 9, array(8, [text("a"), text(b"\xc3(")]))]), r"k\[1\]"),
    "huge array": (container([entry("k", 9, array(6, [], U64))]), "k: needs"),
    "huge string array": (container([entry("k", 9, array(8, [text("a")], 2**61))]), "k: needs"),
    "more strings than fit": (container([entry("k", 9, array(8, [text("a"), b"\x09" * 16], 3))]), r"k\[1\] of 3"),
    "huge nested array": (container([entry("k", 9, array(9, [], 2**60))]), "k: needs"),
    "many nested arrays": (container([entry("k", 9, array(9, [array(0, [])] * 70_000))]), "arrays in it"),
    "deep nesting": (container([entry("k", 9, array(9, [array(9, [array(9, [array(9, [array(9, [])])])])]))]),
                     "deeply"),
    "bool 2": (container([entry("k", 7, b"\2")]), "as a bool"),
    "bool 2 in an array": (container([entry("k", 9, array(7, [b"\1", b"\2"]))]), "as a bool"),
    "alignment 0": (container([entry("general.alignment", 4, struct.pack("<I", 0))]), "power of two"),
    "alignment 24": (container([entry("general.alignment", 4, struct.pack("<I", 24))]), "power of two"),
    "alignment 2^31": (container([entry("general.alignment", 4, struct.pack("<I", 2**31))]), "power of two"),
    "alignment as text": (container([entry("general.alignment", 8, text("32"))]), "power of two"),
    "alignment as list": (container([entry("general.alignment", 9, array(4, [bytes(4)]))]), "power of two"),
    "duplicate tensor": (container([], [tensor("w", (1,), 0, 0), tensor("w", (1,), 0, 32)], 36), "'w': appears twice"),
    "long tensor name": (container([], [tensor("w" * 300, (1,), 0, 0)], 4), "at most 256"),
    "rank 5": (container([], [tensor("w", (1,) * 5, 0, 0)], 4), "rank 5"),
    "huge rank": (container([], [tensor("w", (1,), 0, 0, rank=2**32 - 1)], 4), "rank 4294967295"),
    "zero dimension": (container([], [tensor("w", (4, 0), 0, 0)], 4), "dimension of 0"),
    "unknown type": (container([], [tensor("w", (1,), 42, 0)], 4),
                     f"unknown ggml type 42; expected {ONE_OF_THE_TYPES}"),
    "withdrawn type": (container([], [tensor("w", (32,), 31, 0)], 4),
                       f"unknown ggml type 31; expected {ONE_OF_THE_TYPES}"),
    "broken block": (container([], [tensor("w", (33, 2), 8, 0)], 99), "multiple of 32"),
    "overflowing size": (container([], [tensor("w", (2**63, 2**63, 2**63, 4), 0, 0)], 4), "beyond the end"),
    "size wrapping to 0": (container([], [tensor("w", (2**32, 2**32), 0, 0)], 4), "beyond the end"),
    "offset outside": (container([], [tensor("w", (1,), 0, 2**40)], 4), "beyond the end"),
    "offset wrapping": (container([], [tensor("w", (1,), 0, 2**64 - 32)], 4), "beyond the end"),
    "misaligned": (container([], [tensor("w", (1,), 0, 4)], 16), "multiple of 32"),
    "overlapping": (container([], [tensor("v", (16,), 0, 0), tensor("w", (16,), 0, 32)], 96), "overlaps tensor 'v'"),
    "same place": (container([], [tensor("v", (1,), 0, 0), tensor("w", (1,), 0, 0)], 4), "overlaps"),
    "no data": (container([], [tensor("w", (1,), 0, 0)]), "beyond the end"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_file_is_refused_quickly_and_cheaply(tmp_path, name):
    data, message = HOSTILE[name]
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    tracemalloc.start()
    try:
        start = time.process_time()
        with pytest.raises(ModelFileError, match=message) as caught:
            touch(path)
        assert time.process_time() - start < 2
        assert tracemalloc.get_traced_memory()[1] < 4 * len(data) + 4 * 2**20
    finally:
        tracemalloc.stop()
    assert caught.value.path == str(path) and str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("pattern", [[""], ["a"] * 64 + [""], ["x" * 255, ""], ["\0" * 16], ["ab", "\1" + "\0" * 9]])
def test_strings_hard_on_the_fast_path_do_not_hang(pattern):
    count = 400_000
    words = [word.encode() for word in pattern]
    block = b"".join(map(text, words))
    data = np.frombuffer(block * (count // len(words)), np.uint8)
    count -= count % len(words)
    start = time.process_time()
    starts, end = index_strings("f", "k", data, 0, count)
    assert time.process_time() - start < 10
    assert end == len(data) and np.all(np.diff(starts) >= 8)
    assert all(data[s:s + len(w)].tobytes() == w for s, w in zip(starts[-len(words):], words))


def test_what_is_no_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "secret").write_bytes(SMALL)
    for path, message in ((tmp_path, "not a regular file"), (tmp_path / "pipe", "not a regular file"),
                          (tmp_path / "missing", "No such file"), ("bad\0name", "cannot be opened")):
        with pytest.raises(ModelFileError, match=message):
            GGUFFile(path)
