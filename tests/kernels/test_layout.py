"""R16 layouts: exact sizes, invertible, documented positions."""
import hashlib

import numpy as np
import pytest

from m3jit.ir.eager_blocks import q6_integers, scales_iq4, scales_k4, scales_q3
from m3jit.ir.eager_encode import pack_trits
from m3jit.isa.types import DTYPES, F32
from m3jit.kernels import layout


@pytest.mark.parametrize("rows, cols", ((1, 256), (16, 512), (50, 768), (0, 256)))
@pytest.mark.parametrize("dtype", layout.PACKED, ids=lambda d: d.name)
def test_unpack_inverts_repack(dtype, rows, cols):
    rng = np.random.default_rng(rows)
    raw = rng.integers(0, 256, (rows, dtype.row_bytes(cols)), dtype=np.uint8)
    if dtype.name == "TQ1_0":                            # bytes that five digits are written as
        digits = rng.integers(0, 3, (rows, cols // 256, 256), dtype=np.uint8)
        raw = np.concatenate([pack_trits(digits), raw.reshape(*digits.shape[:2], 54)[..., 52:]], -1).reshape(raw.shape)
    packed = layout.repack(dtype, raw, rows, cols)
    recoded = {"Q3_K": 114, "IQ4_XS": 138, "TQ1_0": 66}.get(dtype.name, dtype.nbytes)
    assert packed.size == layout.packed_bytes(dtype, rows, cols) == -(-rows // 16) * 16 * cols // dtype.block * recoded
    assert np.array_equal(layout.unpack(dtype, packed, rows, cols), raw)


def test_documented_positions_of_q8_0():
    """Tile 1, block 2, vector 3, row 5, byte 1 is element 13 of block 2 of row 21, biased; scales come first."""
    d = DTYPES["Q8_0"]
    raw = np.random.default_rng(0).integers(0, 256, (32, 4, 34), dtype=np.uint8)
    tile = layout.repack(d, raw, 32, 128).reshape(2, 4, 544)[1, 2]
    assert tile[32 + 3 * 64 + 4 * 5 + 1] == raw[21, 2, 2 + 13] ^ 0x80
    assert (tile[2 * 5:2 * 5 + 2] == raw[21, 2, :2]).all()


# -- types of 256 elements, against what the table of `layout` says, element by element -------------------------------

class Tile:
    """The second block of the second tile of a random matrix: `raw` [16 rows, bytes of a file block] and its bytes in
    the layout."""

    def __init__(self, name: str):
        dtype = DTYPES[name]
        raw = np.random.default_rng(1).integers(0, 256, (32, 2, dtype.nbytes), dtype=np.uint8)
        self.raw, self.packed = raw[16:, 1], layout.repack(dtype, raw, 32, 512).reshape(2, 2, -1)[1, 1]

    def vector(self, at: int) -> np.ndarray:
        """[16 rows, 4 bytes]."""
        return self.packed[at:at + 64].reshape(16, 4)

    def rows(self, at: int) -> np.ndarray:
        """A byte of each row."""
        return self.packed[at:at + 16]

    def has(self, at: int, field: np.ndarray) -> bool:
        """Whether the layout has the rows' bytes [16, n] there, row after row."""
        return self.packed[at:at + field.size].tobytes() == field.tobytes()


PIECES = [(2 * h + s, h, s) for h in range(2) for s in range(2)]


@pytest.mark.parametrize("name, codes, size", (("Q4_K", 16, 576), ("Q5_K", 48, 704)))
def test_positions_of_q4_k_and_q5_k(name, codes, size):
    t = Tile(name)
    scales, mins = scales_k4(t.raw[:, 4:16])
    for c in range(4):
        of_rows = np.concatenate([mins[:, 2 * c:2 * c + 2], scales[:, 2 * c:2 * c + 2]], axis=-1)
        assert (t.vector(c * size) & 63 == of_rows).all()
        for v in range(8):
            assert (t.vector(c * size + size - 512 + 64 * v) == t.raw[:, codes + 32 * c + 4 * v:][:, :4]).all()
        for w, q, h, i in np.ndindex(2, 4, 2, 4) if name == "Q5_K" else ():
            element = 64 * c + 32 * h + 16 * w + 4 * q + i
            bit = t.vector(c * size + 64 + 64 * w)[:, i] >> 2 * q + h & 1
            assert (bit == t.raw[:, 16 + element % 32] >> element // 32 & 1).all()
    floats = sum((t.packed[c * size:c * size + 64] >> 6) << 2 * c for c in range(4)).astype(np.uint8)
    assert floats.tobytes() == t.raw[:, 0:2].tobytes() + t.raw[:, 2:4].tobytes()


def test_positions_of_q6_k():
    t = Tile("Q6_K")
    codes = q6_integers(t.raw)
    assert t.has(0, t.raw[:, 208:210])
    for g, h, s in PIECES:
        at = 32 + 832 * g
        for p in range(4):
            assert (t.rows(at + 16 * p) == t.raw[:, 192 + 8 * h + s + 2 * p]).all()
        for v in range(4):
            a, b, c = (t.vector(at + 64 + 64 * (3 * v + k)) for k in range(3))
            parts = [(a & 15) | (c & 3) << 4, (b & 15) | (c >> 2 & 3) << 4, (a >> 4) | (c >> 4 & 3) << 4,
                     (b >> 4) | (c >> 6) << 4]
            for p, part in enumerate(parts):
                assert (part == codes[:, 128 * h + 16 * s + 4 * v + 32 * p:][:, :4]).all()


def test_positions_of_q2_k():
    t = Tile("Q2_K")
    assert t.has(0, t.raw[:, 80:82]) and t.has(32, t.raw[:, 82:84])
    for g, h, s in PIECES:
        for k in range(4):
            assert (t.rows(64 + 320 * g + 16 * k) == t.raw[:, 8 * h + s + 2 * k]).all()
            assert (t.vector(128 + 320 * g + 64 * k) == t.raw[:, 16 + 32 * h + 16 * s + 4 * k:][:, :4]).all()


def test_positions_of_q3_k():
    t = Tile("Q3_K")
    scales = scales_q3(t.raw[:, 96:108]).view(np.uint8)
    assert t.has(0, t.raw[:, 108:110])
    for g, h, s in PIECES:
        at = 32 + 448 * g
        for k in range(4):
            assert (t.rows(at + 16 * k) == scales[:, 8 * h + s + 2 * k]).all()
            assert (t.vector(at + 192 + 64 * k) == t.raw[:, 32 + 32 * h + 16 * s + 4 * k:][:, :4]).all()
        for w, u, p, i in np.ndindex(2, 2, 4, 4):
            element = 128 * h + 32 * p + 16 * s + 8 * w + 4 * u + i
            bit = t.vector(at + 64 + 64 * w)[:, i] >> 4 * u + p & 1
            assert (bit == t.raw[:, element % 32] >> element // 32 & 1).all()


def test_positions_of_iq4_xs():
    t = Tile("IQ4_XS")
    scales = scales_iq4(t.raw).view(np.uint8)
    assert t.has(0, t.raw[:, 0:2])
    for j in range(8):
        assert (t.rows(32 + 272 * j) == scales[:, j]).all()
        for v in range(4):
            assert (t.vector(48 + 272 * j + 64 * v) == t.raw[:, 8 + 16 * j + 4 * v:][:, :4]).all()


# What files of packed weights are known by: whoever changes a byte of a layout raises VERSION.
BYTES = {3: {
    "Q8_0": "4471d81f068ab8ba", "Q4_0": "97de81fd520c31c7", "Q4_1": "bd2cc5a479ff1166",
    "Q5_0": "7733e60212d204e0", "Q5_1": "785d5567b5e62b18", "IQ4_NL": "97de81fd520c31c7",
    "MXFP4": "bcd60f3da883d2be", "Q2_K": "2a3c95d67efd0351", "Q3_K": "f0a59699fd17c911",
    "Q4_K": "8e4555eab28e6e8e", "Q5_K": "a0d6df97f62f5de5", "Q6_K": "ca23c414a0ba0257",
    "IQ4_XS": "0f632d560239833e", "TQ1_0": "3f83ef5a2a40d2ff", "TQ2_0": "54aa955501205ae0"}}


@pytest.mark.parametrize("dtype", layout.PACKED, ids=lambda d: d.name)
def test_a_layout_changes_with_its_version_alone(dtype):
    raw = np.random.default_rng(5).integers(0, 256, (17, dtype.row_bytes(512)), dtype=np.uint8)
    found = hashlib.blake2b(layout.repack(dtype, raw, 17, 512).tobytes(), digest_size=8).hexdigest()
    assert BYTES.get(layout.VERSION, {}).get(dtype.name) == found


def test_wrong_shapes_are_refused():
    with pytest.raises(layout.LayoutError, match="multiple of 32, got 4 x 40"):
        layout.packed_bytes(DTYPES["Q8_0"], 4, 40)
    with pytest.raises(layout.LayoutError, match="F32 has no R16 layout"):
        layout.packed_bytes(F32, 4, 40)
    with pytest.raises(layout.LayoutError, match="needs 136 bytes, got 10"):
        layout.repack(DTYPES["Q8_0"], np.zeros(10, np.uint8), 4, 32)
