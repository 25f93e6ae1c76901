"""R16 layouts: exact sizes, invertible, documented positions."""
import numpy as np
import pytest

from m3jit.ir.eager_blocks import scales_k4
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


@pytest.mark.parametrize("name, size", (("Q4_K", 576), ("Q5_K", 704)))
def test_documented_positions_of_the_heads(name, size):
    """Byte 4r + i of the first vector of a piece: mins, then scales of its two sub-blocks in row r, and two bits of
    byte 4r + i of the d and dmin of all rows."""
    dtype = DTYPES[name]
    raw = np.random.default_rng(1).integers(0, 256, (32, 2, dtype.nbytes), dtype=np.uint8)
    heads = layout.repack(dtype, raw, 32, 512).reshape(2, 2, 4, size)[1, 1, :, :64]
    blocks = raw[16:, 1]
    scales, mins = scales_k4(blocks[:, 4:16])
    for c in range(4):
        of_rows = np.concatenate([mins[:, 2 * c:2 * c + 2], scales[:, 2 * c:2 * c + 2]], axis=-1)
        assert (heads[c].reshape(16, 4) & 63 == of_rows).all()
    floats = sum((heads[c] >> 6) << 2 * c for c in range(4)).astype(np.uint8)
    assert floats.tobytes() == blocks[:, 0:2].tobytes() + blocks[:, 2:4].tobytes()


def test_wrong_shapes_are_refused():
    with pytest.raises(layout.LayoutError, match="multiple of 32, got 4 x 40"):
        layout.packed_bytes(DTYPES["Q8_0"], 4, 40)
    with pytest.raises(layout.LayoutError, match="F32 has no R16 layout"):
        layout.packed_bytes(F32, 4, 40)
    with pytest.raises(layout.LayoutError, match="needs 136 bytes, got 10"):
        layout.repack(DTYPES["Q8_0"], np.zeros(10, np.uint8), 4, 32)
