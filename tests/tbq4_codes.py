"""Caches in TBQ4 that hold every code for every lane that may look it up, and queries that tell them apart."""

import numpy as np

from cuattn import _tbq4, reference

TOKENS = 16


def levels_of(codes: np.ndarray) -> np.ndarray:
    """Return the float16 levels of bytes ``[..., n]``: ``[..., 2 n]``, the low nibble first."""
    book = _tbq4.codebook(_tbq4.block_of(2 * codes.shape[-1])).astype(np.float16)
    return book[np.stack([codes & 15, codes >> 4], axis=-1)].reshape(*codes.shape[:-1], -1)


def powers(*shape: int) -> np.ndarray:
    """Return norms that multiply without rounding."""
    return (2.0 ** (np.arange(np.prod(shape)) % 7 - 3)).reshape(shape).astype(np.float16)


def rotated_one_hots(head_dim: int) -> np.ndarray:
    """Return ``[head_dim, head_dim]`` rows of +-1 in one block, whose rotation has one value that is not zero."""
    block = _tbq4.block_of(head_dim)
    rows = np.rint(reference.unrotate(np.eye(head_dim)) * block**0.5)
    np.testing.assert_array_equal(np.abs(rows).sum(axis=1), block)
    return rows.astype(np.float16)


def codes_of_all_bytes(head_dim: int) -> np.ndarray:
    """Return ``[sequences, TOKENS, 1, bytes]``: every 16 neighboring bytes of a row take all 256 values in 16 rows.

    So each lane, which looks up a quarter of a block's bytes of a row or more, meets all of them. What a byte's place
    in its word has to do with its value depends on the row.
    """
    sequence, row, byte = np.ogrid[:16, :TOKENS, : head_dim // 2]
    return ((16 * sequence + byte % 16 + 5 * row) % 256).astype(np.uint8)[:, :, None]


def pairs_of_tokens() -> list[tuple[int, int]]:
    """Return the tokens of each 16 that one operand of V pairs; see tile_row in cuda_src/common/tile16.cuh."""
    return [(8 * half + t, 8 * half + 4 + (t ^ 1)) for half in (0, 1) for t in range(4)]


def codes_of_all_pairs(head_dim: int) -> np.ndarray:
    """Return ``[sequences, TOKENS, 1, bytes]`` in which two tokens that are decoded together hold all 65,536 pairs."""
    num_bytes, pairs = head_dim // 2, pairs_of_tokens()
    shape = (65536 // (len(pairs) * num_bytes), len(pairs), num_bytes)
    drawn = np.random.default_rng(0).permutation(65536).reshape(shape)
    codes = np.empty((shape[0], TOKENS, 1, num_bytes), np.uint8)
    for i, (a, b) in enumerate(pairs):
        codes[:, a, 0], codes[:, b, 0] = drawn[:, i] >> 8, drawn[:, i] & 255
    return codes
