"""The safetensors reader: files written by hand, then damage of every kind, which must end in ModelFileError."""

import json
import os
import struct
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from m3jit.models.model_error import ModelFileError
from m3jit.models.safetensors_file import DTYPE_BITS, INDEX_NAME, SINGLE_NAME, SafetensorsFile, SafetensorsSet


def container(header: Any, data: bytes = b"", length: int | None = None, pad: int = 8) -> bytes:
    """A file: the header (an object or its text) and the data."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    raw += b" " * (-len(raw) % pad)
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


VALUES = np.arange(6, dtype=np.float32).reshape(2, 3)
SMALL = container({"__metadata__": {"format": "pt"}, "w": entry("F32", [2, 3], 0, 24),
                   "half": entry("F16", [2], 24, 28), "ids": entry("I64", [1], 28, 36),
                   "one": entry("BF16", [], 36, 38), "none": entry("F32", [0, 4], 38, 38)},
                  VALUES.tobytes() + np.array([1, 2], np.float16).tobytes() + struct.pack("<q", 7) + b"\x80\x3f")


def touch(path: Path) -> None:
    """Open a file and read everything in it."""
    with SafetensorsFile(path) as file:
        for name, place in file.tensors.items():
            assert file.tensor_bytes(name).nbytes == place.nbytes
            file.tensor_bytes(name).sum()


def test_a_file_reads_back(tmp_path):
    path = tmp_path / "a.safetensors"
    path.write_bytes(SMALL)
    with SafetensorsFile(path) as file:
        assert list(file.tensors) == ["w", "half", "ids", "one", "none"] and file.metadata == {"format": "pt"}
        raw = file.tensor_bytes("w")
        assert np.array_equal(raw.view(np.float32).reshape(2, 3), VALUES)
        assert not raw.flags.writeable and not raw.flags.owndata
        assert file.tensors["one"].shape == () and file.tensors["none"].nbytes == 0
        with pytest.raises(KeyError):
            file.tensor_bytes("W")
    assert np.array_equal(raw.view(np.float32).reshape(2, 3), VALUES)  # the view outlives the file object


@pytest.mark.parametrize("pad", [8, 1])
def test_elements_come_aligned(tmp_path, pad):
    """Old writers did not pad the header; elements that lie at odd places are copied, others are not."""
    path = tmp_path / "a.safetensors"
    header = {"x" * (1 if pad == 8 else 2): entry("F32", [2], 0, 8)}
    path.write_bytes(container(header, np.array([1, 2], np.float32).tobytes(), pad=pad))
    with SafetensorsFile(path) as file:
        values = file.tensor_bytes(next(iter(header))).view(np.float32)
        assert values.flags.aligned and values.tolist() == [1, 2] and not values.flags.writeable
        assert (file.data_start % 4 == 0) == (pad == 8)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40),
                       st.tuples(st.sampled_from(sorted(DTYPE_BITS)), st.lists(st.integers(0, 4), max_size=4)),
                       max_size=12), st.randoms(use_true_random=False))
def test_any_header_reads_back(tmp_path, wanted, random):
    wanted.pop("__metadata__", None)
    wanted = {name: (dtype, shape) for name, (dtype, shape) in wanted.items()
              if int(np.prod(shape)) * DTYPE_BITS[dtype] % 8 == 0}
    names = list(wanted)
    random.shuffle(names)
    header, data = {}, b""
    for name in names:
        dtype, shape = wanted[name]
        raw = random.randbytes(int(np.prod(shape)) * DTYPE_BITS[dtype] // 8)
        header[name] = entry(dtype, shape, len(data), len(data) + len(raw))
        data += raw
    path = tmp_path / "any.safetensors"
    path.write_bytes(container(header, data))
    with SafetensorsFile(path) as file:
        assert {name: (t.dtype, list(t.shape)) for name, t in file.tensors.items()} == wanted
        for name, (begin, end) in ((name, header[name]["data_offsets"]) for name in names):
            assert file.tensor_bytes(name).tobytes() == data[begin:end]


# Damage.

def test_truncation_at_every_byte(tmp_path):
    path = tmp_path / "cut.safetensors"
    for length in range(len(SMALL)):
        path.write_bytes(SMALL[:length])
        with pytest.raises(ModelFileError) as caught:
            touch(path)
        assert str(path) in str(caught.value) and caught.value.remedy
    path.write_bytes(SMALL)
    touch(path)


def test_every_single_bit_flip(tmp_path):
    path = tmp_path / "flip.safetensors"
    outcomes = {"read": 0, "refused": 0}
    path.write_bytes(SMALL)
    with open(path, "r+b", buffering=0) as file:
        for bit in range(8 * len(SMALL)):
            os.pwrite(file.fileno(), bytes([SMALL[bit // 8] ^ 1 << bit % 8]), bit // 8)
            try:
                touch(path)
                outcomes["read"] += 1
            except ModelFileError:
                outcomes["refused"] += 1
            os.pwrite(file.fileno(), SMALL[bit // 8:bit // 8 + 1], bit // 8)
    assert min(outcomes.values()) > 300, outcomes


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(edits=st.lists(st.tuples(st.integers(0, len(SMALL) - 1),
                                st.sampled_from([b"\0", b"\xff", b'"', b"{", b"}", b"[[", b"-1", b"9" * 30, b"1e9",
                                                 b"null", b"\xff" * 8])), max_size=6),
       cut=st.integers(0, len(SMALL)), tail=st.binary(max_size=40))
def test_random_damage(tmp_path, edits, cut, tail):
    damaged = bytearray(SMALL)
    for at, patch in edits:
        damaged[at:at + len(patch)] = patch
    path = tmp_path / "fuzz.safetensors"
    path.write_bytes(bytes(damaged[:cut]) + tail)
    try:
        touch(path)
    except ModelFileError:
        pass


W = entry("F32", [1], 0, 4)
JSON = st.recursive(st.none() | st.booleans() | st.integers(-2**70, 2**70) | st.floats() | st.text(max_size=8)
                    | st.sampled_from(["F32", "BF16"]),
                    lambda inner: st.lists(inner, max_size=3)
                    | st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets", "w", "__metadata__"]), inner,
                                      max_size=4), max_leaves=12)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(JSON)
def test_any_json_is_read_or_refused(tmp_path, header):
    path = tmp_path / "json.safetensors"
    path.write_bytes(container(header, bytes(64)))
    try:
        touch(path)
    except ModelFileError:
        pass


HOSTILE = {
    "empty": (b"", "0 bytes"),
    "GGUF": (b"GGUF" + bytes(60), "header: .*is"),
    "huge header": (container({}, length=2**64 - 1), "18446744073709551615 bytes long"),
    "header beyond the file": (container({}, length=100), "header: is 100 bytes long; expected at most"),
    "header beyond the limit": (struct.pack("<Q", 2**24 + 1) + b"{}" + b" " * 2**24, "at most 16777216"),
    "a list": (container(b"[1]", bytes(8)), "expected a JSON object"),
    "not JSON": (container(b'{"w": }', bytes(8)), "not valid JSON"),
    "not UTF-8": (container(b'{"\xff": 1}', bytes(8)), "not valid UTF-8"),
    "deep": (container(b'{"w":' + b"[" * 200_000, bytes(8)), "nested too deeply|not valid JSON"),
    "many lists": (container(b'{"w":[' + b"[]," * 1_000_000 + b"[]]}"), "too many objects"),
    "endless number": (container(b'{"w":' + b"9" * 100_000 + b"}"), "not valid JSON"),
    "duplicate tensor": (container(b'{"w":%b,"w":%b}' % ((json.dumps(W).encode(),) * 2), bytes(4)),
                         "'w': appears twice"),
    "duplicate field": (container(b'{"w":{"dtype":"F32","dtype":"F16","shape":[1],"data_offsets":[0,4]}}', bytes(4)),
                        "'dtype': appears twice"),
    "not a description": (container({"w": 3}), "'w': is not described"),
    "missing field": (container({"w": {"dtype": "F32", "shape": [1]}}), "keys dtype, shape and data_offsets"),
    "another field": (container({"w": W | {"x": 1}}, bytes(4)), "keys dtype, shape and data_offsets"),
    "unknown dtype": (container({"w": entry("F33", [1], 0, 4)}, bytes(4)), "'w': has unknown dtype 'F33'"),
    "dtype a number": (container({"w": W | {"dtype": 1}}, bytes(4)), "unknown dtype '1'"),
    "negative dimension": (container({"w": entry("F32", [-1], 0, 4)}, bytes(4)), r"'w': has shape \[-1\]"),
    "dimension a bool": (container({"w": entry("F32", [True], 0, 4)}, bytes(4)), r"has shape \[True\]"),
    "dimension a float": (container({"w": W | {"shape": [1.0]}}, bytes(4)), r"has shape \[1.0\]"),
    "high rank": (container({"w": entry("F32", [1] * 9, 0, 4)}, bytes(4)), "at most 8"),
    "offsets reversed": (container({"w": entry("F32", [1], 4, 0)}, bytes(8)), r"data_offsets \[4, 0\]"),
    "one offset": (container({"w": W | {"data_offsets": [4]}}, bytes(8)), r"data_offsets \[4\]"),
    "wrong size": (container({"w": entry("F32", [2], 0, 4)}, bytes(4)), r"has 4 bytes of data; expected 8 for F32"),
    "overflowing size": (container({"w": entry("F32", [2**62, 4], 0, 0)}, bytes(4)), "has 0 bytes of data"),
    "beyond the end": (container({"w": entry("F32", [4], 0, 16)}, bytes(8)), "beyond the end of the file"),
    "overlap": (container({"v": entry("F32", [2], 0, 8), "w": entry("F32", [1], 4, 8)}, bytes(8)),
                "tensor 'w': overlaps tensor 'v'"),
    "same place": (container({"v": W, "w": W}, bytes(4)), "overlaps"),
    "empty name": (container({"": W}, bytes(4)), "name of wrong length"),
    "long name": (container({"n" * 513: W}, bytes(4)), "name of wrong length"),
    "metadata": (container({"__metadata__": {"a": 1}}), "__metadata__': is not an object of texts"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_file_is_refused_quickly_and_cheaply(tmp_path, name):
    data, message = HOSTILE[name]
    path = tmp_path / "bad.safetensors"
    path.write_bytes(data)
    tracemalloc.start()
    try:
        start = time.process_time()
        with pytest.raises(ModelFileError, match=message) as caught:
            touch(path)
        assert time.process_time() - start < 5
        assert tracemalloc.get_traced_memory()[1] < 8 * len(data) + 4 * 2**20
    finally:
        tracemalloc.stop()
    assert caught.value.path == str(path) and str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_what_is_no_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path, message in ((tmp_path, "not a regular file"), (tmp_path / "pipe", "not a regular file"),
                          (tmp_path / "missing", "No such file"), ("bad\0name", "cannot be opened")):
        with pytest.raises(ModelFileError, match=message):
            SafetensorsFile(path)


# Several files.

def shards(folder: Path, weight_map: Any) -> None:
    for i in (1, 2):
        (folder / f"part{i}.safetensors").write_bytes(
            container({f"w{i}": W, "both": entry("F32", [1], 4, 8)}, struct.pack("<2f", i, 10 * i)))
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {"total_size": 16}, "weight_map": weight_map}))


def test_an_index_joins_files(tmp_path):
    shards(tmp_path, {"w1": "part1.safetensors", "w2": "part2.safetensors", "both": "part2.safetensors"})
    found = SafetensorsSet(tmp_path)
    assert {name: found.tensor_bytes(name).view(np.float32).tolist() for name in found.tensors} == \
        {"w1": [1.0], "w2": [2.0], "both": [20.0]}


def test_a_single_file_needs_no_index(tmp_path):
    (tmp_path / SINGLE_NAME).write_bytes(SMALL)
    assert list(SafetensorsSet(tmp_path).tensors) == ["w", "half", "ids", "one", "none"]


@pytest.mark.parametrize("weight_map, message", [
    ({"w1": "../part1.safetensors"}, "names of files in the same folder"),
    ({"w1": "/etc/passwd"}, "names of files in the same folder"),
    ({"w1": ".."}, "names of files in the same folder"),
    ({"w1": "part3.safetensors"}, "part3.safetensors: cannot be opened .No such file"),
    ({"w1": "part2.safetensors"}, "part2.safetensors: tensor 'w1': is missing"),
    ({"w1": 1}, "weight_map"), ([], "weight_map"), ({}, "weight_map"), (None, "weight_map"),
    ({f"w{i}": f"{i}.safetensors" for i in range(4097)}, "at most 4096")])
def test_a_wrong_index_is_refused(tmp_path, weight_map, message):
    shards(tmp_path, weight_map)
    with pytest.raises(ModelFileError, match=message):
        SafetensorsSet(tmp_path)


def test_a_folder_without_weights_is_refused(tmp_path):
    with pytest.raises(ModelFileError, match=r"holds no weights; expected model.safetensors or .*not read"):
        SafetensorsSet(tmp_path)
