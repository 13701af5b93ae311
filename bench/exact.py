"""Attention in float64 on the GPU, for checks of what takes NumPy too long."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cuattn import _arrays

if TYPE_CHECKING:
    from cuattn._arrays import Array


def as_float64(x: Array) -> Array:
    """Widen a 16-bit or float32 array; bfloat16 through float32, whose upper half it is."""
    if x.dtype.name == "bfloat16":
        x = (x.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return x.astype(np.float64)


def attend(q: Array, k: Array, v: Array, scale: float) -> tuple[Array, Array]:
    """Attend from queries to all keys.

    Parameters
    ----------
    q : array, shape (rows, head_dim), float64
    k : array, shape (keys, head_dim), float64
    v : array, shape (keys, value_dim), float64
    scale : float

    Returns
    -------
    out : array, shape (rows, value_dim)
    lse : array, shape (rows,)
    """
    cupy = _arrays.import_cupy()
    out = cupy.empty((len(q), v.shape[1]), np.float64)
    lse = cupy.empty(len(q), np.float64)
    # Products of every pair and their sum, rather than a product of matrices, for which CuPy needs cuBLAS; row by row,
    # as the products of one row and 262,144 keys are half a gigabyte.
    for i, row in enumerate(q):
        scores = (row * k).sum(axis=-1) * scale
        largest = scores.max()
        weights = cupy.exp(scores - largest)
        total = weights.sum()
        out[i] = (weights[:, None] * v).sum(axis=0) / total
        lse[i] = largest + cupy.log(total)
    return out, lse
