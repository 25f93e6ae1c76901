"""Q4_K and Q6_K packing, one number at a time, after the formulas of `m3jit/ir/eager_encode_k.py`'s heading."""
from __future__ import annotations

import numpy as np

F = np.float32


def fold(terms: list) -> np.float32:
    total = terms[0]
    for t in terms[1:]:
        total = F(total + t)
    return total


def rounded(v: np.float32, low: int, high: int) -> int:
    return min(max(int(np.rint(v)), low), high)


def weighted_error(x, w, codes, scale, low) -> np.float32:
    apart = [F(F(F(scale * F(c)) + low) - v) for c, v in zip(codes, x)]
    return fold([F(u * F(a * a)) for u, a in zip(w, apart)])


def scale_and_min(x: np.ndarray) -> tuple[np.float32, np.float32]:
    """Of a Q4_K sub-block: (scale, min)."""
    spread = np.sqrt(F(fold([F(v * v) for v in x]) / F(32)))
    w = [F(abs(v) + spread) for v in x]
    low, high = min(F(0), x.min()), x.max()
    if not high > low:
        return F(0), low
    scale, best = F(F(high - low) / F(15)), None
    for top in (15, *(14 + 0.1 * step for step in range(21))):
        inverse = F(F(top) / F(high - low))
        codes = [rounded(F(inverse * F(v - low)), 0, 15) for v in x]
        if best is None:                                 # what the search starts from
            best = weighted_error(x, w, codes, scale, low)
            continue
        wl = [F(u * F(c)) for u, c in zip(w, codes)]
        sl, sl2, sxl = fold(wl), fold([F(u * F(c)) for u, c in zip(wl, codes)]), fold([F(u * v) for u, v in zip(wl, x)])
        sw, sx = fold(w), fold([F(u * v) for u, v in zip(w, x)])
        det = F(F(sw * sl2) - F(sl * sl))
        if det <= 0:
            continue
        s, m = F(F(F(sw * sxl) - F(sx * sl)) / det), F(F(F(sl2 * sx) - F(sl * sxl)) / det)
        if m > 0:
            s, m = F(sxl / sl2), F(0)
        found = weighted_error(x, w, codes, s, m)
        if found < best:
            best, scale, low = found, s, m
    return scale, low


def q4_k(x: np.ndarray) -> np.ndarray:
    """The 144 bytes of a block."""
    found = [scale_and_min(x[at:at + 32]) for at in range(0, 256, 32)]
    sixes, units = [], []
    for values in ([s for s, _ in found], [max(F(-m), F(0)) for _, m in found]):
        top = max(values)
        inverse = F(F(63) / top) if top else F(0)
        sixes.append([min(63, int(np.rint(F(inverse * v)))) for v in values])
        units.append(np.float16(F(top / F(63))))
    out = np.zeros(144, np.uint8)
    out[0:4] = np.array(units, np.float16).view(np.uint8)
    for j, (s, m) in enumerate(zip(*sixes)):
        if j < 4:
            out[4 + j] |= s
            out[8 + j] |= m
        else:
            out[12 + j - 4] = (s & 15) | (m & 15) << 4
            out[4 + j - 4] |= s >> 4 << 6
            out[8 + j - 4] |= m >> 4 << 6
        step, low = F(F(units[0]) * F(s)), F(F(units[1]) * F(m))
        for i in range(32):
            code = rounded(F(F(x[32 * j + i] + low) / step), 0, 15) if step else 0
            out[16 + 32 * (j // 2) + i] |= code << 4 * (j % 2)
    return out


def signed_scale(x: np.ndarray) -> np.float32:
    """Of a Q6_K sub-block."""
    peak = x[np.argmax(np.abs(x))]
    if peak == 0:
        return F(0)
    scale = best = F(0)
    for step in (0, *range(-9, 0), *range(1, 10)):
        inverse = F(F(-(32 + 0.1 * step)) / peak)
        codes = [F(rounded(F(inverse * v), -32, 31)) for v in x]
        wl = [F(F(v * v) * c) for v, c in zip(x, codes)]
        sxl, sl2 = fold([F(u * v) for u, v in zip(wl, x)]), fold([F(u * c) for u, c in zip(wl, codes)])
        if sl2 > 0 and (step == 0 or F(sxl * sxl) > F(best * sl2)):
            scale = F(sxl / sl2)
            best = F(scale * sxl)
    return scale


def q6_k(x: np.ndarray) -> np.ndarray:
    """The 210 bytes of a block."""
    scales = [signed_scale(x[at:at + 16]) for at in range(0, 256, 16)]
    top = scales[int(np.argmax(np.abs(scales)))]
    inverse = F(F(-128) / top) if abs(top) >= F(1e-15) else F(0)
    d = np.float16(F(F(1) / inverse)) if inverse else np.float16(0)
    out = np.zeros(210, np.uint8)
    out[208:] = np.array([d]).view(np.uint8)
    for j, s in enumerate(scales):
        code = rounded(F(inverse * s), -128, 127)
        out[192 + j] = code & 255
        step = F(F(d) * F(code))
        for i in range(16 * j, 16 * j + 16):
            q = (rounded(F(x[i] / step), -32, 31) if step else 0) + 32
            half, quarter, l = i // 128, i % 128 // 32, i % 32
            out[64 * half + 32 * (quarter % 2) + l] |= (q & 15) << 4 * (quarter // 2)
            out[128 + 32 * half + l] |= q >> 4 << 2 * quarter
    return out
