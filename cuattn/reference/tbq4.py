"""TBQ4 in NumPy, with SciPy's Hadamard matrix: the definition of the format that ``docs/tbq4.md`` says in words."""

from functools import cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from cuattn import _tbq4

Array: TypeAlias = npt.NDArray[Any]


class Quantized(NamedTuple):
    """Rows in TBQ4.

    Attributes
    ----------
    codes : array, shape (..., head_dim / 2), uint8
        Element 2 i in the low nibble of byte i, element 2 i + 1 in the high one.
    norms : array, shape (..., head_dim / block), float16
        Of each block of 128 values (64 for head_dim 64).
    clamped : int
        Norms that were too large for float16 and are 65504.
    """

    codes: npt.NDArray[np.uint8]
    norms: npt.NDArray[np.float16]
    clamped: int


@cache
def _matrix(block: int) -> npt.NDArray[np.float64]:
    """Return R with rotated = R x: signs, Hadamard matrix in Sylvester's order, signs."""
    from scipy.linalg import hadamard  # takes longer to import than all of cuattn

    signs1, signs2 = _tbq4.SIGNS1[:block].astype(np.float64), _tbq4.SIGNS2[:block].astype(np.float64)
    matrix: npt.NDArray[np.float64] = signs2[:, None] * hadamard(block) * signs1[None, :] / np.sqrt(block)
    return matrix


def _by_blocks(x: Array, matrix: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    block = matrix.shape[0]
    # A block of zeros times infinity is NaN, as it should be: the whole block is.
    with np.errstate(invalid="ignore", over="ignore"):
        blocks = x.reshape(*x.shape[:-1], x.shape[-1] // block, block)
        return (blocks.astype(np.float64) @ matrix.T).reshape(x.shape)


def rotate(x: Array, *, dtype: npt.DTypeLike = np.float64) -> Array:
    """Rotate rows into the domain in which TBQ4 stores them.

    Parameters
    ----------
    x : array, shape (..., head_dim)
        head_dim 64, 128, 256 or 512; longer rows than 128 are rotated in blocks of 128.
    dtype : dtype, default float64

    Returns
    -------
    array, shape and order of `x`
        Norms and dot products are those of `x`.
    """
    return _by_blocks(x, _matrix(_tbq4.block_of(x.shape[-1]))).astype(dtype)


def unrotate(y: Array, *, dtype: npt.DTypeLike = np.float64) -> Array:
    """Undo `rotate`; the transpose, which is `rotate` with the two sign tables exchanged.

    Parameters
    ----------
    y : array, shape (..., head_dim)
    dtype : dtype, default float64

    Returns
    -------
    array, shape of `y`
    """
    return _by_blocks(y, _matrix(_tbq4.block_of(y.shape[-1])).T).astype(dtype)


# Values that are not finite pass through to the norm; that is the format's rule for them.
@np.errstate(invalid="ignore", over="ignore", divide="ignore")
def quantize(x: Array, *, mean: npt.ArrayLike | None = None, strict: bool = False) -> Quantized:
    """Encode rows as TBQ4.

    Float32 values; sums are exact and rounded once, so that the result does not depend on an order of summation.

    Parameters
    ----------
    x : array, shape (..., head_dim)
        head_dim 64, 128, 256 or 512.
    mean : array, shape (..., head_dim), optional
        Subtracted first; it broadcasts against `x`.
    strict : bool, default False
        Whether a norm that float16 cannot hold is an error; otherwise it becomes 65504 and is counted.

    Returns
    -------
    Quantized

    Raises
    ------
    ValueError
        If head_dim does not fit, or with `strict` for a norm above 65504.
    """
    block = _tbq4.block_of(x.shape[-1])
    codebook, midpoints = _tbq4.codebook(block), _tbq4.midpoints(block)
    rows = np.asarray(x, np.float32)
    if mean is not None:
        rows = rows - np.asarray(mean, np.float32)
    rows = rows.reshape(*rows.shape[:-1], rows.shape[-1] // block, block)
    norm = np.sqrt((rows.astype(np.float64) ** 2).sum(axis=-1).astype(np.float32))
    inverse = np.where(norm > np.float32(_tbq4.MIN_NORM), np.float32(1) / norm, np.float32(0))
    unit = rotate(rows * inverse[..., None], dtype=np.float32)
    # The number of boundaries that a value is not below: a tie goes up, NaN is below none.
    index = np.zeros(unit.shape, np.uint8)
    for boundary in midpoints:
        index += ~(unit < boundary)
    length = np.sqrt((codebook[index].astype(np.float64) ** 2).sum(axis=-1)).astype(np.float32)
    stored = norm / length  # so that the decoded block has the norm of the row
    norms = stored.astype(np.float16)
    too_large = np.isfinite(stored) & np.isinf(norms)
    if strict and too_large.any():
        where = tuple(int(i) for i in np.argwhere(too_large)[0])
        raise ValueError(f"x must have norms of at most {_tbq4.MAX_NORM:.0f} per block, got {stored[where]} at {where}")
    norms[too_large] = _tbq4.MAX_NORM
    codes = (index[..., 0::2] | index[..., 1::2] << 4).astype(np.uint8)
    return Quantized(codes.reshape(*x.shape[:-1], x.shape[-1] // 2), norms, int(too_large.sum()))


def levels(codes: Array) -> npt.NDArray[np.float32]:
    """Return the levels of code bytes ``[..., head_dim / 2]`` as ``[..., blocks, block]``."""
    head_dim = 2 * codes.shape[-1]
    block = _tbq4.block_of(head_dim)
    index = np.stack((codes & 15, codes >> 4), axis=-1).reshape(*codes.shape[:-1], head_dim // block, block)
    return _tbq4.codebook(block)[index]


def dequantize(
    codes: Array,
    norms: Array,
    *,
    mean: npt.ArrayLike | None = None,
    rotated: bool = False,
    dtype: npt.DTypeLike = np.float64,
) -> Array:
    """Decode rows of TBQ4.

    Parameters
    ----------
    codes : array, shape (..., head_dim / 2), uint8
    norms : array, shape (..., head_dim / block), float16
    mean : array, shape (..., head_dim), optional
        Added at the end: what `quantize` subtracted.
    rotated : bool, default False
        Whether to leave the values in the domain in which they are stored; `mean` must then be None.
    dtype : dtype, default float64

    Returns
    -------
    array, shape (..., head_dim)

    Raises
    ------
    ValueError
        If head_dim does not fit, or for a mean of rotated values.
    """
    if rotated and mean is not None:
        raise ValueError("mean must be None for rotated values: it belongs to the original domain")
    with np.errstate(invalid="ignore"):
        values = levels(codes).astype(np.float64) * norms[..., None].astype(np.float64)
    values = values.reshape(*codes.shape[:-1], 2 * codes.shape[-1])
    if not rotated:
        values = unrotate(values)
    if mean is not None:
        values = values + np.asarray(mean)
    return values.astype(dtype)
