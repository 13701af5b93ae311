"""Tensor maps: what TMA needs to know of an array to copy tiles of it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from . import _arrays
from ._arrays import Array
from ._plan.prefill_sm90 import CHUNK

_MAX_STRIDE = 2**40
# Maps are functions of what they are made of, an address among it: those of arrays that are gone do no harm.
_MAX_MAPS = 1024
# In the place of a tensor map.
NO_MAP = np.void(bytes(128))


@dataclass(frozen=True, slots=True)
class TensorTiles:
    """An array of 16-bit rows, and boxes of it.

    Attributes
    ----------
    pointer : int
    dtype : str
    shape : tuple of int
        (batch or pages, tokens, heads, head_dim).
    strides : tuple of int
        Bytes, of all axes but the last.
    tokens : int
        Of a box, which has one head and `CHUNK` elements of each row.
    """

    pointer: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    tokens: int

    @property
    def box(self) -> tuple[int, ...]:
        """Elements of a box, innermost first."""
        return (CHUNK, 1, self.tokens, 1)


def why_not(name: str, array: Array) -> str:
    """Say why TMA cannot copy tiles of an array of rows at multiples of 16 bytes; empty if it can."""
    if array.size == 0:
        return f"{name} is empty"
    for size, stride in zip(array.shape[:-1], array.strides[:-1], strict=True):
        if size > 1 and not 0 < stride < _MAX_STRIDE:
            return f"{name} has a stride of {stride} bytes"
    return ""


def tiles_of(array: Array, tokens: int) -> TensorTiles:
    """Describe boxes of `tokens` tokens of an array (batch or pages, tokens, heads, head_dim)."""
    row = array.shape[-1] * array.itemsize
    # An axis of one element may have any stride, of which TMA accepts some only.
    strides = (s if n > 1 else row for n, s in zip(array.shape[:-1], array.strides[:-1], strict=True))
    return TensorTiles(_arrays.pointer(array), _arrays.dtype_name(array), tuple(array.shape), tuple(strides), tokens)


@lru_cache(maxsize=_MAX_MAPS)
def tensor_map(tiles: TensorTiles) -> np.void:
    """Encode the 128 bytes of a tensor map.

    Raises
    ------
    RuntimeError
        If the driver refuses.
    """
    from cuda.bindings import driver
    from cupy.cuda import runtime

    # The driver's calls, unlike the runtime's, do not give a thread the context of its device.
    runtime.setDevice(runtime.getDevice())
    types, rank = driver.CUtensorMapDataType, len(tiles.shape)
    kind = {
        "float16": types.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        "bfloat16": types.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
    }[tiles.dtype]
    status, encoded = driver.cuTensorMapEncodeTiled(
        kind,
        rank,
        tiles.pointer,
        [driver.cuuint64_t(n) for n in reversed(tiles.shape)],
        [driver.cuuint64_t(n) for n in reversed(tiles.strides)],
        [driver.cuuint32_t(n) for n in tiles.box],
        [driver.cuuint32_t(1)] * rank,
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"cannot make a tensor map of {tiles}: {status.name}")
    return _bytes_of(encoded)


def _bytes_of(encoded: Any) -> np.void:  # noqa: ANN401  cuda-bindings has no types
    words = np.array([int(word) for word in encoded.opaque], np.uint64)
    return np.void(words.tobytes())
