"""The sum of products that a tensor core makes, and the products of attention that are made of it."""

import numpy as np
import numpy.typing as npt

from cuattn import _tbq4
from cuattn.reference.fp8 import E4M3
from cuattn.reference.sequences import Array, Fp8Rows, Rows, Tbq4Rows
from cuattn.reference.tbq4 import levels, rotate, unrotate

# Products that one tensor-core instruction adds for 16-bit inputs, and for floats.
MMA_DEPTH = 16
FLOAT_DEPTH = 8
# Of the 24 bits of a float32 a tensor core does not look at so many.
_HIDDEN_BITS = 13
_FLOAT32_BITS = 23
_GUARD_BITS = 2
# Of zero: below all products, above what would underflow a float64.
_NO_EXPONENT = -500
# Bounds memory, changes no result: rows of a product that are taken at once.
_ROWS_AT_ONCE = 16
# Rotated queries are scaled so that the largest value of a row lies below 2^15, and weights times norms so that it
# lies below 1: sums of both keep clear of the ends of float16.
_QUERY_EXPONENT = 15
_WEIGHT_EXPONENT = 0
_NORM_EXPONENT = 16


def truncate_to_float32(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    """Round toward zero, as the accumulators of Hopper's tensor cores do."""
    nearest = x.astype(np.float32)
    # Sign and magnitude: one less in the bits is one step toward zero.
    return (nearest.view(np.uint32) - (np.abs(nearest) > np.abs(x))).view(np.float32)


def _exponent(x: npt.NDArray[np.float64]) -> npt.NDArray[np.int16]:
    """Return floor(log2 |x|), and a very small number for zero."""
    return np.where(x == 0, _NO_EXPONENT, np.frexp(x)[1] - 1).astype(np.int16)


def tensor_core(a: Array, b: Array) -> npt.NDArray[np.float32]:
    """Multiply ``[rows, depth]`` by ``[depth, columns]`` of 16-bit values as ``mma.sync.m16n8k16`` does on an H200.

    An instruction adds 16 products and its float32 accumulator: all 17 are shifted to the largest exponent among them
    (a product counts with the sum of its factors' exponents), cut off 2 bits below a float32's last one, added, and the
    sum is cut off to float32. Found by comparison with the chip, whose results it gives bit for bit
    (``tests/gpu/test_tensor_core.py``); the truncation to one direction is what makes it matter.

    Parameters
    ----------
    a, b : ndarray, float16 or bfloat16

    Returns
    -------
    ndarray, float32
    """
    a, b = a.astype(np.float64), b.astype(np.float64)
    a_exponent, b_exponent = _exponent(a), _exponent(b)
    total = np.zeros((a.shape[0], b.shape[1]), np.float32)
    for row in range(0, a.shape[0], _ROWS_AT_ONCE):
        rows = slice(row, row + _ROWS_AT_ONCE)
        for start in range(0, a.shape[1], MMA_DEPTH):
            depth = slice(start, start + MMA_DEPTH)
            exponents = a_exponent[rows, depth, None] + b_exponent[None, depth]
            accumulator = total[rows].astype(np.float64)
            exponent = np.maximum(exponents.max(axis=1), _exponent(accumulator))
            unit = np.ldexp(1.0, np.maximum(exponent, _NO_EXPONENT) - (_FLOAT32_BITS + _GUARD_BITS))
            products = a[rows, depth, None] * b[None, depth]
            products /= unit[:, None]
            np.trunc(products, out=products)
            total[rows] = truncate_to_float32((products.sum(axis=1) + np.trunc(accumulator / unit)) * unit)
    return total


def tf32_parts(x: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Split into what a tensor core is given of a float: rounded to its 11 bits, and the rest, cut off there."""
    mask = np.uint32(0x100000000 - (1 << _HIDDEN_BITS))
    high = ((x.view(np.uint32) + np.uint32(1 << (_HIDDEN_BITS - 1))) & mask).view(np.float32)
    low = np.where(np.isfinite(high), x - high, np.float32(0))
    return high.astype(np.float64), (low.view(np.uint32) & mask).view(np.float32).astype(np.float64)


def products_of_floats(a: npt.NDArray[np.float32], b: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Multiply ``[rows, depth]`` by ``[depth, columns]`` to float32 accuracy, as kernels do on tensor cores.

    The two parts of each factor, see `tf32_parts`, are multiplied but for the smaller ones with each other. Sums of
    eight products are cut off to float32, and added in float32.

    Parameters
    ----------
    a, b : ndarray, float32

    Returns
    -------
    ndarray, float32
    """
    (a_high, a_low), (b_high, b_low) = tf32_parts(np.ascontiguousarray(a)), tf32_parts(np.ascontiguousarray(b))
    total = np.zeros((a.shape[0], b.shape[1]), np.float32)
    for start in range(0, a.shape[1], FLOAT_DEPTH):
        depth = slice(start, start + FLOAT_DEPTH)
        small = a_low[:, depth] @ b_high[depth] + a_high[:, depth] @ b_low[depth]
        total += truncate_to_float32(a_high[:, depth] @ b_high[depth] + small)
    return total


def _factor(x: Array, exponent: int) -> npt.NDArray[np.float64]:
    """Return the power of two that takes the largest finite value of each row to 2^(exponent - 1) .. 2^exponent."""
    axes = tuple(range(1, x.ndim))
    largest = np.abs(x).max(axis=axes, initial=0.0, where=np.isfinite(x), keepdims=True).astype(np.float64)
    return np.where(largest == 0, 1.0, np.ldexp(1.0, exponent - np.frexp(largest)[1]))


@np.errstate(invalid="ignore")
def _norms(rows: Tbq4Rows) -> npt.NDArray[np.float32]:
    """Return the norms, NaN for infinities: so is infinity times levels of both signs, but not times their sum."""
    norms: npt.NDArray[np.float32] = rows.norms.astype(np.float32)
    return norms + 0 * norms


def _as_float16(rows: Tbq4Rows) -> tuple[Array, float]:
    """Return rotated rows as float16, as prefill has them in shared memory, and the power of two that they carry.

    It brings the largest norm to float16's upper range.
    """
    norms = _norms(rows)
    factor = float(_factor(norms.reshape(1, -1), _NORM_EXPONENT)[0, 0])
    blocks = levels(rows.codes).astype(np.float16) * (norms * factor).astype(np.float16)[..., None]
    return blocks.reshape(len(rows), 2 * rows.codes.shape[-1]), factor


def _codes_as_float16(rows: Fp8Rows) -> Array:
    """Return the rows of one head as operands: codes, which are exact as float16, without their scale."""
    codes: Array = rows.codes[:, 0].view(E4M3)
    return codes.astype(np.float16)


def scores(q: Array, k: Rows, *, expanded: bool = False) -> npt.NDArray[np.float32]:
    """Return the dot products of queries and keys of one head.

    For keys in TBQ4 the queries are rotated, brought to a common size and rounded to float16; the levels of a block are
    float16; its sum is multiplied with its norm, and the product of query and mean is added last. With `expanded`, see
    `Options`, keys are float16 instead.

    For keys in fp8 the queries are brought to a common size and rounded to float16 likewise, which changes them only if
    they are bfloat16 of very different sizes; the sum of products with codes is multiplied with the scale.

    Parameters
    ----------
    q : ndarray, shape (rows, head_dim), float16, bfloat16 or float32
    k : ndarray, Tbq4Rows or Fp8Rows, shape (keys, head_dim)

    Returns
    -------
    ndarray, shape (rows, keys), float32
    """
    if isinstance(k, Fp8Rows):
        exact = q.astype(np.float64)
        of_rows = _factor(exact, _QUERY_EXPONENT)
        total = tensor_core((exact * of_rows).astype(np.float16), _codes_as_float16(k).T)
        return (total / of_rows * k.scale).astype(np.float32)
    if not isinstance(k, Tbq4Rows):
        return products_of_floats(q, k.T) if q.dtype == np.float32 else tensor_core(q, k.T)
    block = _tbq4.block_of(q.shape[-1])
    rotated = rotate(q, dtype=np.float32).astype(np.float64)
    factor = _factor(rotated, _QUERY_EXPONENT)
    q16 = (rotated * factor).astype(np.float16).reshape(len(q), -1, block)
    levels16 = levels(k.codes).astype(np.float16)
    norms = _norms(k)
    if expanded:
        k16, k_factor = _as_float16(k)
        total = (tensor_core(q16.reshape(len(q), q.shape[-1]), k16.T) / (factor * k_factor)).astype(np.float32)
    else:
        total = np.zeros((len(q), len(k)), np.float32)
        for b in range(q16.shape[1]):
            total += tensor_core(q16[:, b], levels16[:, b].T) * norms[:, b]
        total = (total / factor).astype(np.float32)
    if k.mean is not None:
        total += (q.astype(np.float64) @ k.mean.astype(np.float64)).astype(np.float32)[:, None]
    return total


def weighted_sums(
    weights: npt.NDArray[np.float32], v: Rows, dtype: npt.DTypeLike, *, expanded: bool = False
) -> npt.NDArray[np.float32]:
    """Return the sums of the values of one head times their weights.

    For values in TBQ4 a weight takes the norm of a block in and the products of a row are brought to a common size
    before they are rounded to float16; the sums are rotated back, and the mean joins with the sum of the weights.
    For values in fp8 weights are rounded to float16, and the sum of products with codes is multiplied with the scale.

    Parameters
    ----------
    weights : ndarray, shape (rows, keys), float32
    v : ndarray, Tbq4Rows or Fp8Rows, shape (keys, value_dim)
    dtype : dtype
        Of values in 16 bits, to which weights are rounded.

    Returns
    -------
    ndarray, shape (rows, value_dim), float32
    """
    if isinstance(v, Fp8Rows):
        return (tensor_core(weights.astype(np.float16), _codes_as_float16(v)) * v.scale).astype(np.float32)
    if not isinstance(v, Tbq4Rows):
        return products_of_floats(weights, v) if v.dtype == np.float32 else tensor_core(weights.astype(dtype), v)
    if expanded:
        v16, v_factor = _as_float16(v)
        rotated = (tensor_core(weights.astype(np.float16), v16) / v_factor).astype(np.float32)
    else:
        w = weights[:, :, None] * _norms(v)
        factor = _factor(w, _WEIGHT_EXPONENT)
        w16, levels16 = (w * factor).astype(np.float16), levels(v.codes).astype(np.float16)
        blocks = [tensor_core(w16[:, :, b], levels16[:, b]) for b in range(w.shape[2])]
        rotated = (np.concatenate(blocks, axis=1) / factor[:, 0]).astype(np.float32)
    total: npt.NDArray[np.float32] = unrotate(rotated, dtype=np.float32)
    if v.mean is not None:
        total += weights.sum(axis=1, dtype=np.float32)[:, None] * v.mean
    return total
