"""What the kernels of `kernels/` compute, in NumPy."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
from fp8_codes import values_to_encode
from simt.cases import BF16, F16, WGMMA, WGMMA_KERNELS, Case, Map, Out, Struct

SWIZZLES = (0, 32, 64, 128)
NUM_WORDS = 64  # of a thread in warp_ops
OPERAND_FIELDS = ("start", "lbo", "sbo", "step")
INT4 = np.dtype([(name, np.int32) for name in "xyzw"])
WGMMA_PARAMS = np.dtype(
    [(name, np.uint64) for name in ("image", "a_regs", "out")]
    + [(name, np.int32) for name in ("image_bytes", "steps")]
    + [(f"{o}_{name}", np.int32) for o in "ab" for name in OPERAND_FIELDS]
    + [("swizzle", np.int32)],
    align=True,
)
ATTENTION_PARAMS = np.dtype(
    {
        "names": ["q", "k", "v", "out", "num_keys", "scale_log2"],
        "formats": ["V128", "V128", "V128", np.uint64, np.int32, np.float32],
        "offsets": [0, 128, 256, 384, 392, 396],
        "itemsize": 512,  # a tensor map aligns to 128 bytes
    }
)


def words(shape: tuple[int, ...], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**32, shape, dtype=np.uint32)


def small_integers(shape: tuple[int, ...], seed: int, dtype: np.dtype) -> np.ndarray:
    """Integers of which sums of products are exact in float32."""
    return np.random.default_rng(seed).integers(-4, 5, shape).astype(dtype)


# ---- warp_ops.cu -------------------------------------------------------------------------------------------------


def fragment(matrix: np.ndarray) -> np.ndarray:
    """The words that 32 lanes hold of 8x8 matrices of 16-bit values: lane 4 g + t has row g, columns 2 t, 2 t + 1."""
    return np.ascontiguousarray(matrix).view(np.uint32).reshape(*matrix.shape[:-2], 32)


def transposed(matrix: np.ndarray) -> np.ndarray:
    return np.swapaxes(matrix, -1, -2)


def prmt(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    source = np.stack([a, b], -1).view(np.uint8)
    s = selector[..., None] >> np.arange(0, 16, 4, dtype=np.uint32) & np.uint32(15)
    byte = np.take_along_axis(source, s & 7, -1)
    return np.where(s & 8, np.where(byte & 0x80, 0xFF, 0), byte).astype(np.uint8).view(np.uint32)[..., 0]


def mma(a: np.ndarray, b: np.ndarray, d: np.ndarray) -> np.ndarray:
    """d + a b of one warp; a [32, 4, n], b [32, 2, n] elements, n a word, and d [32, 4] in fragment order."""
    n = a.shape[-1]
    lane = np.arange(32)
    g, t = lane // 4, lane % 4
    full_a, full_b = np.zeros((16, 8 * n)), np.zeros((8 * n, 8))
    for i, e in product(range(4), range(n)):
        full_a[g + i % 2 * 8, (t + i // 2 * 4) * n + e] = a[:, i, e]
    for i, e in product(range(2), range(n)):
        full_b[(t + i * 4) * n + e, g] = b[:, i, e]
    c = full_a @ full_b
    return d + np.stack([c[g + i // 2 * 8, 2 * t + i % 2] for i in range(4)], 1)


def wide_sum(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """The two words of a * b + c * 2^16 in one."""
    address = a.astype(np.uint64) * b + (c.astype(np.uint64) << np.uint64(16))
    return (address >> np.uint64(32)).astype(np.uint32) ^ address.astype(np.uint32) * np.uint32(3)


def warp_expected(r: np.ndarray, h: np.ndarray, b: np.ndarray, rows: np.ndarray, image: np.ndarray) -> np.ndarray:
    """The output `exact` of warp_ops, column by column; the operands are grouped by warp: [4, 32, ...]."""
    lane, u32 = np.arange(32), np.uint32
    copied = np.where(np.arange(256)[:, None] % 7 == 3, 0, image).astype(np.uint16)
    matrices = copied[rows].reshape(4, 4, 8, 8)
    w = [r[:, :, i] for i in range(16)]
    columns = [fragment(matrices[:, i]) for i in (0, 1, 0, 1, 2, 3)]
    columns += [fragment(transposed(matrices[:, i])) for i in range(4)]
    columns.append(fragment(transposed(w[0].copy().view(np.uint16).reshape(4, 8, 8))))
    wide = image[:128].copy().view(u32).reshape(4, 32, 4)
    columns.append(np.bitwise_xor.reduce(wide * u32([1, 3, 5, 7]), 2))
    columns.append(rows * 16)

    columns.append(prmt(w[0], w[1], w[2]))
    columns.append(prmt(w[0], w[1], w[3] & u32(0x7777)))
    length = np.frexp((w[1] >> lane.astype(u32)).astype(float))[1]  # of the number in bits
    shifted = (w[2].astype(np.int64) << lane).astype(u32)
    lowest = np.frexp((shifted & (~shifted + u32(1))).astype(float))[1]
    columns.append(np.bitwise_count(w[0]) + 100 * (32 - length) + 10000 * lowest)
    pair, shift = (lambda lo, hi: hi.astype(np.uint64) << np.uint64(32) | lo), np.uint64(31)
    left = pair(w[0], w[1]) << (w[2] & shift) >> np.uint64(32)
    columns.append(left.astype(u32) ^ (pair(w[3], w[4]) >> (w[5] & shift)).astype(u32))
    columns.append((w[0].astype(np.uint64) * w[1]) >> np.uint64(32))

    def from_lane(x: np.ndarray, source: np.ndarray) -> np.ndarray:
        return np.take_along_axis(x, np.broadcast_to(source, x.shape), 1)

    columns.append(from_lane(w[0], w[1] % 32))
    columns.append(from_lane(w[0], lane & ~7 | lane * 5 + 3 & 7))
    columns += [from_lane(w[0], lane ^ 9), from_lane(w[0], lane ^ 3)]
    columns += [from_lane(w[0], np.where(lane % width + d < width, lane + d, lane)) for d, width in ((5, 32), (3, 8))]
    columns += [from_lane(w[0], np.where(lane % width >= d, lane - d, lane)) for d, width in ((5, 32), (3, 8))]
    columns.append(np.where(lane < 16, from_lane(w[1], lane ^ 1), from_lane(w[1], lane ^ 2) * u32(3)))
    columns.append(np.sum((w[0] & u32(1)) << lane.astype(u32), 1, keepdims=True))
    columns.append(1 + 4)
    columns.append(np.sum(w[3], 1, dtype=u32, keepdims=True))
    columns.append(np.min(w[4].view(np.int32), 1, keepdims=True).view(u32))
    columns.append(np.max(w[5], 1, keepdims=True))
    columns.append(np.bitwise_and.reduce(w[6] | w[7], 1, keepdims=True))
    columns.append(np.bitwise_or.reduce(w[6] & w[7] & w[8], 1, keepdims=True))
    columns.append(np.bitwise_xor.reduce(w[9], 1, keepdims=True))

    d = r[:, :, :4] % 64 - 32.0
    for x in (h, b):
        d = np.stack([mma(x[i, :, :4], x[i, :, 4:6], d[i]) for i in range(4)])
        columns += list(np.moveaxis(d.astype(np.float32).view(u32), 2, 0))
    d = r[:, :, :4] % 64 - 32.0
    floats = b[..., 0].astype(np.float64)[..., None]
    d = np.stack([mma(floats[i, :, :4], floats[i, :, 4:6], d[i]) for i in range(4)])
    columns += list(np.moveaxis(d.astype(np.float32).view(u32), 2, 0))
    row = copied[rows].view(u32)
    columns += [row[..., 1], row[..., 2] ^ row[..., 3] * u32(3), w[2] & w[0] | ~w[2] & w[1]]
    pairs = image.view(u32).reshape(-1, 2)[:128].reshape(4, 32, 2)
    thread, single = np.arange(128).reshape(4, 32), image.view(u32).reshape(-1)[:128].reshape(4, 32)
    columns += [pairs[..., 0] ^ pairs[..., 1] * u32(3), image.reshape(-1)[:128].reshape(4, 32), lane]
    columns += [np.where(thread % 5 == 2, 0, columns[-3]), copied.view(u32)[:128, 2].reshape(4, 32),
                np.where(thread % 3 == 1, 0, single), np.concatenate([np.zeros((2, 32), u32), w[12][:2]]),
                wide_sum(*w[:3])]  # fmt: skip
    columns += [0] * (NUM_WORDS - len(columns))
    return np.stack([np.broadcast_to(c, (4, 32)).astype(u32).ravel() for c in columns], 1)


def warp_cases() -> Iterator[Case]:
    r, rows = words((128, 16), 1), np.random.default_rng(2).integers(0, 256, 128, dtype=np.int32)
    h, b = (small_integers((128, 16), seed, dtype) for seed, dtype in ((3, F16), (4, BF16)))
    image = words((256, 4), 5).view(np.uint16)
    by_warp = [x.reshape(4, 32, *x.shape[1:]) for x in (r, h.reshape(128, 8, 2), b.reshape(128, 8, 2), rows)]
    exact = warp_expected(*by_warp, image)
    x = r[:, 10].view(np.int32) * 2.0**-30
    y = x + 3
    approximate = np.stack([2**x, np.log2(y), np.exp(x), np.log(y), y**-0.5, 1 / y, y**0.5, y**-0.5], 1)
    # The approximate instructions are good to 2 or 3 ulp, and __expf multiplies its argument by log2(e) before.
    outs = (Out(exact), Out(approximate.astype(np.float32), bound=2**-20))
    yield Case("warp_ops", "warp_ops", (r, h.view(np.uint32), b.view(np.uint32), rows, image, *outs), smem=4096)

    abs_ = words((3, 1 << 16), 6)
    yield Case("warp_ops", "permute", (abs_, Out(prmt(*abs_)), np.int32(abs_.shape[1])), grid=2)

    low = np.arange(1 << 16, dtype=np.uint16)
    halves = np.stack([low, low[::-1]], 1)
    poisoned = np.where((halves & 0x7FFF) >= 0x7C00, np.uint16(0x7FFF), halves)
    yield Case("warp_ops", "infinities", (Out(poisoned.copy().view(np.uint32)[:, 0]),), grid=2)

    a, b = (words((1 << 16,), seed).view(F16) for seed in (7, 8))
    with np.errstate(over="ignore", invalid="ignore"):
        r = a * b
    r = np.where(np.isnan(r), np.uint16(0x7FFF), r.view(np.uint16)).copy()
    pairs = (a.view(np.uint32), b.view(np.uint32), Out(r.view(np.uint32)))
    yield Case("warp_ops", "multiply_halves", (*pairs, np.int32(a.size // 2)), grid=2)

    larger = np.fmax(np.abs(a), np.abs(b))  # the number of a NaN and a number
    larger = np.where(np.isnan(larger), np.uint16(0x7FFF), larger.view(np.uint16)).copy()
    pairs = (a.view(np.uint32), b.view(np.uint32), Out(larger.view(np.uint32)))
    yield Case("warp_ops", "larger_halves", (*pairs, np.int32(a.size // 2)), grid=2)

    x = rounding_edges()
    with np.errstate(over="ignore", invalid="ignore"):
        half, bfloat = (np.stack([-x, x], 1).astype(dtype) for dtype in (F16, BF16))
    bits = [np.where(np.isnan(x)[:, None], np.uint16(0x7FFF), y.view(np.uint16)).copy() for y in (half, bfloat)]
    back = [y[:, 1].astype(np.float32) for y in (half, bfloat)]
    outs = tuple(Out(y) for y in (*(y.view(np.uint32)[:, 0] for y in bits), *back))
    yield Case("warp_ops", "convert", (x, *outs, np.int32(x.size)), grid=2)


def rounding_edges() -> np.ndarray:
    """Every float16 and bfloat16, the ties between neighbors, and the float32 beside each of these."""
    values = [np.arange(1 << 16, dtype=np.uint16).view(dtype).astype(np.float32) for dtype in (F16, BF16)]
    # Half an ulp further in each format, by bits, so that subnormals and the step to infinity come out right.
    ties = [(values[0].view(np.uint32) + np.uint32(1 << 12)).view(np.float32)]
    ties += [(values[1].view(np.uint32) + np.uint32(1 << 15)).view(np.float32)]
    subnormal = np.arange(1 << 11, dtype=np.float32) * np.float32(2.0**-25)
    x = np.concatenate([*values, *ties, subnormal])
    with np.errstate(invalid="ignore"):  # some are signaling NaNs
        return np.concatenate([x, np.nextafter(x, np.float32(np.inf)), np.nextafter(x, np.float32(-np.inf))])


# ---- e4m3_ops.cu -------------------------------------------------------------------------------------------------


def e4m3_cases() -> Iterator[Case]:
    """All pairs of codes, in either half of a word; and all numbers, their ties, and what is beside these."""
    low = np.arange(1 << 16, dtype=np.uint16)
    codes = np.stack([low, low[::-1]], 1)
    halves = codes.view(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(F16)
    halves = np.where(np.isnan(halves), np.uint16(0x7FFF), halves.view(np.uint16)).copy().view(np.uint32)
    outs = (Out(halves), Out(halves))
    yield Case("e4m3_ops", "widen", (codes.view(np.uint32)[:, 0].copy(), *outs, np.int32(len(codes))), grid=2)

    x = np.concatenate([values_to_encode(), rounding_edges()])
    with np.errstate(invalid="ignore"):
        two = np.stack([-x, x], 1)
        narrow = np.clip(two, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    words = np.where(np.isnan(two), np.uint8(0x7F), narrow).astype(np.uint32) << np.uint32([0, 8])
    outs = (Out(words.sum(1, dtype=np.uint32)), Out(words.sum(1, dtype=np.uint32)))
    yield Case("e4m3_ops", "narrow", (x, *outs, np.int32(x.size)), grid=2)


# ---- stream_mma.cu -----------------------------------------------------------------------------------------------


def stream_case(num_tiles: int = 7) -> Case:
    a, b = small_integers((64, 64), 7, F16), small_integers((8 * num_tiles, 64), 8, F16)
    c = a.astype(np.float32) @ b.astype(np.float32).T
    return Case("stream_mma", "stream_mma", (a, b, Out(c), np.int32(num_tiles)), smem=2048)


# ---- sm90_ops.cu: copies -----------------------------------------------------------------------------------------


def swizzled(address: np.ndarray | int, span: int) -> Any:
    return address ^ (address >> 3 & {0: 0, 32: 0x10, 64: 0x30, 128: 0x70}[span])


def tma_image(m: Map, at: int, corner: tuple[int, ...], size: int) -> np.ndarray:
    """Shared memory of 0xa5 bytes after one box has come to offset `at`."""
    box = m.box[::-1]
    index = np.meshgrid(*[c + np.arange(n) for c, n in zip(corner[::-1], box, strict=True)], indexing="ij")
    inside = np.logical_and.reduce([(i >= 0) & (i < n) for i, n in zip(index, m.array.shape, strict=True)])
    picked = np.zeros(box, m.array.dtype)
    picked[inside] = m.array[tuple(i[inside] for i in index)]
    image = np.full(size, 0xA5, np.uint8)
    data = picked.reshape(-1).view(np.uint8)
    image[swizzled(at + np.arange(data.size), m.swizzle)] = data
    return image


def copy_cases() -> Iterator[Case]:
    g2, g3 = words((50, 100), 9).view(np.uint16), words((3, 40, 64), 10).view(np.uint16)
    g4 = words((2, 3, 24, 32), 11).view(np.uint16)
    for span in SWIZZLES:
        inner = (span or 128) // 2
        for array, rows, corner in (
            (g2, (24,), (0, 0)),
            (g2, (24,), (16, 7)),
            (g2, (32,), (200 - inner // 2, 30)),  # over the right and the lower edge
            (g2, (16,), (-8, -5)),
            (g2, (16,), (304, 0)),  # outside
            (g3, (16, 1), (0, 32, 1)),
            (g3, (8, 2), (8, 3, 2)),
            (g4, (8, 2, 1), (0, 20, 1, 1)),
            (g4, (4, 3, 2), (8, 2, 0, 0)),
        ):
            m, at = Map(array, (inner, *rows), span), 1024
            box_bytes = 2 * int(np.prod(m.box))
            size = at + -(-box_bytes // 1024) * 1024
            coordinates = np.zeros(1, INT4)
            for name, c in zip("xyzw", corner, strict=False):
                coordinates[name] = c
            out = Out(tma_image(m, at, corner, size))
            args = (m, out, np.int32(size), np.int32(at), np.int32(box_bytes), coordinates)
            name = f"swizzle {span}, box {m.box} at {corner}"
            yield Case("sm90_ops", f"tma_{array.ndim}d", args, name, smem=size + 8)
    data, phases = words((3, 1024), 12), 3
    args = (data, Out(data), np.int32(data.nbytes // phases), np.int32(phases))
    yield Case("sm90_ops", "bulk", args, smem=data.nbytes // phases + 8)


# ---- sm90_ops.cu: wgmma on single tiles --------------------------------------------------------------------------


@dataclass(frozen=True)
class Operand:
    """Where an operand lies, in bytes: `steps` times 16 of k."""

    start: int
    lbo: int
    sbo: int
    step: int
    steps: int


def operand_layouts(rows: int, span: int, start: int, *, mn_major: bool) -> list[Operand]:
    if not span:
        return [Operand(start, 128, 256, 0, 1), Operand(start, rows * 16, 128, 0, 1)]
    if not mn_major:
        return [Operand(start, 16, 8 * span, 32, span // 32)]
    dense, in_a_tile_of_64_k = (16 * span, 0, 1), (64 * span, 16 * span, 4)
    return [Operand(start, lbo, 8 * span, *steps) for lbo, *steps in (dense, in_a_tile_of_64_k)]


def read_operand(image: np.ndarray, rows: int, span: int, x: Operand, *, mn_major: bool) -> np.ndarray:
    """The [steps, rows, 16] elements."""
    mn, k = np.arange(rows)[:, None], np.arange(16)[None, :]
    if span and mn_major:
        a = mn // (span // 2) * x.lbo + k // 8 * x.sbo + k % 8 * span + mn % (span // 2) * 2
    elif span:
        a = mn // 8 * x.sbo + mn % 8 * span + k * 2
    else:
        a = mn // 8 * x.sbo + k // 8 * x.lbo + (k % 8 * 16 + mn % 8 * 2 if mn_major else mn % 8 * 16 + k % 8 * 2)
    steps = np.arange(x.steps)[:, None, None] * x.step
    return image[swizzled(x.start + steps + a, span) // 2].astype(np.float32)


def a_registers(a: np.ndarray) -> np.ndarray:
    """[steps, 64, 16] elements as the 128 threads hold them: [steps, 128, 4] words."""
    thread = np.arange(128)
    row, col = thread // 32 * 16 + thread % 32 // 4, thread % 4 * 2
    pairs = [a[:, row + i % 2 * 8, col + i // 2 * 8 + e] for i in range(4) for e in range(2)]
    return np.ascontiguousarray(np.stack(pairs, 2)).view(np.uint32)


def wgmma_cases() -> Iterator[Case]:
    b_start, size = 8192, 8192 + 40960
    for (kernel, (dtype_name, n, mode)), span in product(zip(WGMMA_KERNELS, WGMMA, strict=True), SWIZZLES):
        dtype, rs = F16 if dtype_name == "f16" else BF16, mode.startswith("rs")
        trans_a, trans_b = mode[3:] == "mm", mode[-1] == "m"
        image = small_integers((size // 2,), n, dtype)
        a_layouts = operand_layouts(64, span, 0, mn_major=trans_a)
        for i, b in enumerate(operand_layouts(n, span, b_start, mn_major=trans_b)):
            a = a_layouts[min(i, len(a_layouts) - 1)]
            steps = b.steps if rs else min(a.steps, b.steps)
            in_registers = small_integers((steps, 64, 16), 13, dtype)
            x = in_registers.astype(np.float32) if rs else read_operand(image, 64, span, a, mn_major=trans_a)[:steps]
            y = read_operand(image, n, span, b, mn_major=trans_b)[:steps]
            out = np.einsum("smk,snk->mn", x, y)
            fields = {"image": image, "a_regs": a_registers(in_registers), "out": Out(out), "image_bytes": size}
            fields |= {f"{o}_{f}": getattr(x, f) for o, x in (("a", a), ("b", b)) for f in OPERAND_FIELDS}
            params = Struct(WGMMA_PARAMS, fields | {"steps": steps, "swizzle": span})
            yield Case("sm90_ops", kernel, (params,), f"swizzle {span}, layout {i}, {steps} steps", smem=size)


# ---- attention_sm90.cu -------------------------------------------------------------------------------------------


def attention_case(source: str, num_heads: int, num_keys: int) -> Case:
    dtype, head_dim, tile_kv = {"attention_f16": (F16, 64, 64), "attention_bf16": (BF16, 128, 176)}[source]
    rng = np.random.default_rng(num_keys)
    q, k, v = (rng.standard_normal((num_heads, n, head_dim)).astype(dtype) for n in (64, num_keys, num_keys))
    ref, same = (attention(q, k, v, precision) for precision in (np.float64, np.float32))
    # The law of tests/tolerance.py.
    bound = 2 * np.abs(same - ref).max() + np.spacing(np.float32(np.abs(ref).max()))
    maps = {name: Map(x, (64, rows, 1), 128) for name, x, rows in (("q", q, 64), ("k", k, tile_kv), ("v", v, tile_kv))}
    rest = {"out": Out(ref.astype(np.float32), bound=bound), "num_keys": num_keys}
    params = Struct(ATTENTION_PARAMS, maps | rest | {"scale_log2": np.log2(np.e) / np.sqrt(head_dim)})
    smem = 2 * head_dim * (64 + 2 * 2 * tile_kv) + 5 * 8
    name = f"{num_heads} heads, {num_keys} keys"
    return Case(source, "attention_sm90", (params,), name, grid=num_heads, block=256, smem=smem)


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, precision: type) -> np.ndarray:
    """In float64, or in float32 with the probabilities rounded to the inputs' 16 bits."""
    x, y, z = (a.astype(precision) for a in (q, k, v))
    s = x @ transposed(y) * precision(q.shape[-1] ** -0.5)
    p = np.exp(s - s.max(-1, keepdims=True))
    rounded = p.astype(q.dtype).astype(precision) if precision is np.float32 else p
    return rounded @ z / p.sum(-1, keepdims=True)


def all_cases() -> Iterator[Case]:
    yield from warp_cases()
    yield from e4m3_cases()
    yield stream_case()
    yield from copy_cases()
    yield from wgmma_cases()
    for source in ("attention_f16", "attention_bf16"):
        for num_heads, num_keys in ((2, 200), (1, 500), (1, 17)):
            yield attention_case(source, num_heads, num_keys)
