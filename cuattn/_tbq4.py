"""The numbers of TBQ4, the 4-bit format of a KV cache, and its two layouts. ``docs/tbq4.md`` is the specification.

Nothing here computes attention; the encoder and decoder that define the format are in `cuattn.reference`.
"""

from __future__ import annotations

import sys
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

# A NumPy or a CuPy array.
Array: TypeAlias = Any


def _module(array: Array) -> Any:  # noqa: ANN401  CuPy has no types
    """Return the module of an array; CuPy is imported where one of its arrays is."""
    return np if isinstance(array, np.ndarray) else sys.modules["cupy"]


BLOCK = 128
"""Values that share a norm; head_dim 64 has one block of 64."""

_HALF_BLOCK = 64
HEAD_DIMS = (64, 128, 256, 512)
NORM_BYTES = 2
MAX_NORM = 65504.0
"""The largest finite float16: norms above it are clamped to it."""
MIN_NORM = 1e-10
"""A row of at most this norm is stored as zero."""

# Lloyd-Max levels of a standard normal value, divided by sqrt(128), and the boundaries between them: data, to six
# decimals as they are in circulation. The boundaries must not be computed from the levels, which gives other ones.
_LEVELS = (0.011353, 0.034311, 0.058069, 0.083317, 0.111065, 0.143047, 0.182907, 0.241556)
_BOUNDARIES = (0.022832, 0.046190, 0.070693, 0.097191, 0.127056, 0.162977, 0.212232)
CODEBOOK = np.array([-x for x in _LEVELS[::-1]] + list(_LEVELS), np.float32)
MIDPOINTS = np.array([-x for x in _BOUNDARIES[::-1]] + [0.0, *_BOUNDARIES], np.float32)

# Bit j, little-endian, is set where sign j is -1.
_SIGNS1_MASK = bytes.fromhex("59036ae44959f842bb3bc6a4a950f249")
_SIGNS2_MASK = bytes.fromhex("90eeac16dc8f623f7a35a5b76265a5be")


def _signs(mask: bytes) -> npt.NDArray[np.float32]:
    bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
    return np.where(bits, np.float32(-1), np.float32(1))


SIGNS1 = _signs(_SIGNS1_MASK)
SIGNS2 = _signs(_SIGNS2_MASK)


def sign_words(signs: npt.NDArray[np.float32]) -> tuple[int, ...]:
    """Return a sign table as four 32-bit words; bit j of word w is set where sign 32 w + j is -1."""
    return tuple(int(word) for word in np.packbits(signs < 0, bitorder="little").view("<u4"))


def block_of(head_dim: int) -> int:
    """Return how many values of a row of `head_dim` share a norm.

    Raises
    ------
    ValueError
        If the format has no such head_dim.
    """
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"head_dim must be one of {', '.join(map(str, HEAD_DIMS))} for TBQ4, got {head_dim}")
    return min(head_dim, BLOCK)


def _scale(block: int) -> np.float32:
    """Ratio of the deviation of a rotated unit vector of `block` values to that of one of 128."""
    return np.float32((BLOCK / block) ** 0.5)


def codebook(block: int) -> npt.NDArray[np.float32]:
    """Return the 16 levels of a block of 128 or 64 values, ascending."""
    return CODEBOOK * _scale(block)


def midpoints(block: int) -> npt.NDArray[np.float32]:
    """Return the 15 boundaries between the levels, ascending."""
    return MIDPOINTS * _scale(block)


def rotation_constants(block: int) -> dict[str, object]:
    """Return what kernels need to rotate blocks of 64 or 128 values, by the names of ``kv/tbq4_rotation.cuh``."""
    return {
        "BLOCK": block,
        "ROOT": float(np.float32(block**-0.5)),
        "SIGNS1": sign_words(SIGNS1),
        "SIGNS2": sign_words(SIGNS2),
    }


def attention_constants(block: int) -> dict[str, object]:
    """Return what attention kernels need: the levels as bits of float16, and what rotates."""
    levels = codebook(block).astype(np.float16).view(np.uint16)
    return {"LEVELS_HALF": tuple(map(int, levels)), **rotation_constants(block)}


NUM_CELLS = 128
# Of a block of 128: the closest boundaries are .94 cells apart, and no boundary is within .24 of the edge of a cell.
_CELLS_PER_UNIT = 41.375


def cells_per_unit(block: int) -> np.float32:
    """Return how many cells of the encoder's search table there are in a unit; cell NUM_CELLS / 2 has 0 in its middle.

    The cells reach from -1.5 to 1.5 and farther, so that every value of a unit vector has one.
    """
    return np.float32(_CELLS_PER_UNIT / _scale(block))


def cells(block: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.uint32]]:
    """Return the search table of the encoder.

    Returns
    -------
    offsets : array of float32, shape (NUM_CELLS,)
        Minus the boundary inside of each cell: a value is below it where the sum is negative. Never -0, so that the sum
        of a value on the boundary is +0. 2 where there is no boundary, which no value is below.
    codes : array of uint32
        The code of a value that is not below.
    """
    boundaries = midpoints(block)
    places = np.floor(boundaries * np.float64(cells_per_unit(block)) + 0.5).astype(int) + NUM_CELLS // 2
    codes = np.searchsorted(places, np.arange(NUM_CELLS), side="right")
    offsets = np.full(NUM_CELLS, 2, np.float32)
    offsets[places] = 0 - boundaries
    return offsets, codes.astype(np.uint32)


def min_square() -> float:
    """Return the largest float32 whose square root is at most MIN_NORM: blocks of that sum of squares are zero."""
    square = np.float32(np.float32(MIN_NORM) ** 2)
    while np.sqrt(np.nextafter(square, np.float32(1))) <= np.float32(MIN_NORM):
        square = np.nextafter(square, np.float32(1))
    while np.sqrt(square) > np.float32(MIN_NORM):
        square = np.nextafter(square, np.float32(0))
    return float(square)


SQUARE_BITS = 30


def square_terms(block: int) -> tuple[int, ...]:
    """Return the squares of the 8 magnitudes of levels, largest first, as a polynomial in the bits of their index.

    Term m is the coefficient of the product of the bits set in m, in units of 2^-30 and modulo 2^32; the square of
    index i is the sum of the terms whose bits are all set in i.
    """
    squares = np.rint(np.square(codebook(block)[:8].astype(np.float64)) * 2**SQUARE_BITS).astype(np.int64)
    signs = [[(-1) ** (m ^ i).bit_count() * ((m & i) == i) for i in range(8)] for m in range(8)]
    return tuple(int(term) % 2**32 for term in np.array(signs) @ squares)


def block_bytes(block: int) -> int:
    """Return the bytes of an interchange block: the norm, then two codes a byte."""
    return NORM_BYTES + block // 2


def to_blocks(codes: Array, norms: Array) -> Array:
    """Put codes and norms together as interchange blocks; nothing is lost.

    Parameters
    ----------
    codes : array, shape (..., head_dim / 2), uint8
        Element 2 i in the low nibble of byte i.
    norms : array, shape (..., head_dim / block), float16

    Returns
    -------
    array, shape (..., head_dim / block * block_bytes), uint8
        Per block the float16 norm, little-endian, and the codes: 66 bytes for 128 values, 34 for head_dim 64.

    Raises
    ------
    ValueError, TypeError
        If shapes or dtypes do not fit.
    """
    if codes.dtype != np.uint8 or norms.dtype != np.float16:
        raise TypeError(f"codes must be uint8 and norms float16, got {codes.dtype} and {norms.dtype}")
    head_dim = 2 * codes.shape[-1]
    block = block_of(head_dim)
    lead, count = codes.shape[:-1], head_dim // block
    if norms.shape != (*lead, count):
        raise ValueError(f"norms must have shape {(*lead, count)} for codes of shape {codes.shape}, got {norms.shape}")
    xp = _module(codes)
    out = xp.empty((*lead, count, block_bytes(block)), np.uint8)
    bits = xp.ascontiguousarray(norms).view(np.uint16).astype("<u2")
    out[..., :NORM_BYTES] = bits.view(np.uint8).reshape(*lead, count, NORM_BYTES)
    out[..., NORM_BYTES:] = codes.reshape(*lead, count, block // 2)
    return out.reshape(*lead, count * block_bytes(block))


def from_blocks(blocks: Array, head_dim: int) -> tuple[Array, Array]:
    """Take interchange blocks apart into codes and norms; nothing is lost.

    Parameters
    ----------
    blocks : array, shape (..., head_dim / block * block_bytes), uint8
        As `to_blocks` returns them.
    head_dim : int
        64, 128, 256 or 512.

    Returns
    -------
    codes : array, shape (..., head_dim / 2), uint8
    norms : array, shape (..., head_dim / block), float16

    Raises
    ------
    ValueError, TypeError
        If head_dim, shape or dtype do not fit.
    """
    block = block_of(head_dim)
    count = head_dim // block
    if blocks.dtype != np.uint8:
        raise TypeError(f"blocks must be uint8, got {blocks.dtype}")
    if blocks.ndim == 0 or blocks.shape[-1] != count * block_bytes(block):
        wanted = count * block_bytes(block)
        raise ValueError(
            f"blocks must have {wanted} bytes in the last axis for head_dim {head_dim}, got {blocks.shape}"
        )
    lead = blocks.shape[:-1]
    parts = blocks.reshape(*lead, count, block_bytes(block))
    xp = _module(blocks)
    bits = xp.ascontiguousarray(parts[..., :NORM_BYTES]).view("<u2")[..., 0].astype(np.uint16)
    codes = xp.ascontiguousarray(parts[..., NORM_BYTES:]).reshape(*lead, head_dim // 2)
    return codes, bits.view(np.float16)
