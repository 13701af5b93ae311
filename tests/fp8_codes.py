"""Caches in fp8 that hold every code in every place of a word, queries that tell them apart, and values to encode."""

import numpy as np

from cuattn import reference
from cuattn.reference.fp8 import E4M3

TOKENS = 16
# What stands for NaN where nothing but numbers is wanted.
ZERO = 0
NANS = (0x7F, 0xFF)
NUMBERS = np.arange(256, dtype=np.uint8).view(E4M3).astype(np.float32)


def without_nan(codes: np.ndarray) -> np.ndarray:
    return np.where(np.isin(codes, NANS), np.uint8(ZERO), codes)


def all_codes(head_dim: int) -> np.ndarray:
    """Return ``[16, TOKENS, 1, head_dim]``: every 16 neighboring codes of a row take all 256 values in 256 rows.

    What a code's place in its word has to do with its value depends on the row.
    """
    sequence, row, dim = np.ogrid[:16, :TOKENS, :head_dim]
    return ((16 * sequence + dim % 16 + 5 * row) % 256).astype(np.uint8)[:, :, None]


def all_pairs(head_dim: int) -> np.ndarray:
    """Return ``[sequences, TOKENS, 1, head_dim]`` in which tokens decoded together hold all 65,536 pairs.

    One operand of V pairs two tokens of each 16; see tile_row in cuda_src/common/tile16.cuh.
    """
    pairs = [(8 * half + t, 8 * half + 4 + (t ^ 1)) for half in (0, 1) for t in range(4)]
    shape = (65536 // (len(pairs) * head_dim), len(pairs), head_dim)
    drawn = np.random.default_rng(0).permutation(65536).reshape(shape)
    codes = np.empty((shape[0], TOKENS, 1, head_dim), np.uint8)
    for i, (a, b) in enumerate(pairs):
        codes[:, a, 0], codes[:, b, 0] = drawn[:, i] >> 8, drawn[:, i] & 255
    return codes


def values_to_encode() -> np.ndarray:
    """Return every number, the ties between neighbors, the float32 beside each of these, and what is out of range."""
    sizes = np.unique(np.abs(NUMBERS[np.isfinite(NUMBERS)]))
    ends = np.array([464, 480, 496, 1e30, np.inf, 2.0**-11, 2.0**-126, 1e-45], np.float32)
    x = np.concatenate([sizes, (sizes[1:] + sizes[:-1]) / 2, ends]).astype(np.float32)
    x = np.concatenate([x, np.nextafter(x, np.float32(np.inf)), np.nextafter(x, np.float32(0))])
    return np.concatenate([x, -x, np.float32([np.nan])])


def assert_codes(got: np.ndarray, x: np.ndarray, scale: float = 1.0) -> None:
    """Assert that codes are the reference's, where NaN may have either of two."""
    want = reference.quantize_fp8(x[..., None, :], scale=scale).codes[..., 0, :]
    is_nan = np.isnan(x)
    np.testing.assert_array_equal(np.isin(got, NANS), is_nan)
    np.testing.assert_array_equal(got[~is_nan], want[~is_nan])
