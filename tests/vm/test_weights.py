"""Packed weights: what the cache file holds is the layout of the whole matrix, however many pieces it was written in."""
from __future__ import annotations

import numpy as np
import pytest

from m3jit.isa.types import DTYPES, Tensor
from m3jit.kernels import layout
from m3jit.vm import weights
from m3jit.vm.weights import HEADER, WeightStore


@pytest.mark.parametrize("name", ["Q8_0", "Q4_1", "Q3_K", "Q6_K"])
@pytest.mark.parametrize("rows", [1, 16, 33, 100])
def test_pieces_make_the_whole(tmp_path, monkeypatch, name, rows):
    dtype, cols = DTYPES[name], 512
    raw = np.random.default_rng(rows).integers(0, 60, (rows, dtype.row_bytes(cols)), np.uint8)    # scales stay finite
    whole = layout.repack(dtype, raw, rows, cols)
    monkeypatch.setattr(weights, "PIECE_BYTES", 20 * dtype.row_bytes(cols))     # 16 rows a piece
    store = WeightStore(tmp_path)
    packed = store.array(Tensor.blocks(dtype, (rows, cols), raw), "R16")
    assert packed.tobytes() == whole.tobytes() and store.mapped == len(whole) and store.in_memory == 0
    file, = (p for p in tmp_path.rglob("*.bin"))
    assert file.read_bytes()[HEADER:] == whole.tobytes()


@pytest.mark.parametrize("nbytes", [0, 63, 64, 65, 1000, 64 * 7])
def test_a_file_is_written_at_multiples_of_a_piece(monkeypatch, nbytes):
    monkeypatch.setattr(weights, "PIECE_BYTES", 64)
    data, written = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8), []

    class File:
        def write(self, piece) -> None:
            written.append(bytes(piece))
    pieces = weights._Pieces(File())
    pieces.write(b"head")
    for at in range(0, nbytes, 100):
        pieces.write(data[at:at + 100])
    pieces.flush()
    assert b"".join(written) == b"head" + data.tobytes()
    assert [len(w) for w in written[:-1]] == [64] * (len(written) - 1)
