"""Argument checks of `quantize`, `dequantize` and `Tbq4Array`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from cuattn import _plan, _tbq4
from cuattn._arrays import Array, as_array, is_gpu, place
from cuattn._check.arguments import integer, require_dtype, require_rank, require_rows

_RANKS = (2, 3, 4)
# The kernels count blocks in 32 bits, with room for a step past the end.
_MAX_BLOCKS = 2**31
_DTYPES = {True: ("float16", "bfloat16", "float32"), False: ("float16", "bfloat16", "float32", "float64")}


def _mean(mean: Array | None, x: Array, head_dim: int, name: str = "mean", of: str = "x") -> Array | None:
    if mean is None:
        return None
    mean = as_array(name, mean)
    if place(mean) != place(x):
        raise ValueError(f"{name} is on {place(mean)}, {of} on {place(x)}; all arrays must be on one device")
    wanted = (x.shape[-2], head_dim)
    if mean.shape != wanted:
        raise ValueError(f"{name} must have shape {wanted} (one vector per KV head), got {mean.shape}")
    require_dtype(name, mean, ("float32",))
    return mean


def _count(name: str, shape: tuple[int, ...], head_dim: int) -> None:
    block = _tbq4.block_of(head_dim)
    if math.prod(shape[:-1]) * (head_dim // block) > _MAX_BLOCKS:
        raise ValueError(f"{name} must have at most {_MAX_BLOCKS} blocks of {block} values, got shape {shape}")


def quantize(x: Array, mean: Array | None) -> tuple[Array, Array | None]:
    """Check the arguments of `quantize` and return them as arrays."""
    x = as_array("x", x)
    require_rank("x", x, _RANKS, "([batch, [tokens,]] num_kv_heads, head_dim)")
    require_dtype("x", x, _DTYPES[is_gpu(x)])
    if x.shape[-1] not in _tbq4.HEAD_DIMS:
        supported = ", ".join(map(str, _tbq4.HEAD_DIMS))
        raise ValueError(f"x has head_dim {x.shape[-1]}; supported for TBQ4: {supported}")
    require_rows("x", x)
    _count("x", x.shape, x.shape[-1])
    return x, _mean(mean, x, x.shape[-1])


def channel_mean(x: Array, skip: object) -> tuple[Array, int]:
    """Check the arguments of `channel_mean` and return them."""
    x = as_array("x", x)
    require_rank("x", x, (3, 4), "([batch,] tokens, num_kv_heads, head_dim)")
    require_dtype("x", x, _DTYPES[is_gpu(x)])
    left_out = integer("skip", skip, 0, _plan.MAX_KV_LEN)
    if x.size == 0 or x.shape[-3] <= left_out:
        raise ValueError(f"x must have tokens after the first {left_out}, got shape {x.shape}")
    return x, left_out


def planes(codes: Array, norms: Array, mean: Array | None, prefix: str = "") -> tuple[Array, Array, Array | None]:
    """Check the parts of a `Tbq4Array` and return them as arrays; `prefix` goes before their names in messages."""
    of_codes, of_norms = f"{prefix}codes", f"{prefix}norms"
    codes, norms = as_array(of_codes, codes), as_array(of_norms, norms)
    require_rank(of_codes, codes, _RANKS, "([batch, [tokens,]] num_kv_heads, head_dim / 2)")
    require_dtype(of_codes, codes, ("uint8",))
    require_dtype(of_norms, norms, ("float16",))
    head_dim = 2 * codes.shape[-1]
    if head_dim not in _tbq4.HEAD_DIMS:
        supported = ", ".join(str(d // 2) for d in _tbq4.HEAD_DIMS)
        raise ValueError(f"{of_codes} must have {supported} bytes in the last axis, half a head_dim, got {codes.shape}")
    wanted = (*codes.shape[:-1], head_dim // _tbq4.block_of(head_dim))
    if norms.shape != wanted:
        raise ValueError(f"{of_norms} must have shape {wanted} for codes of shape {codes.shape}, got {norms.shape}")
    if place(norms) != place(codes):
        raise ValueError(
            f"{of_norms} are on {place(norms)}, {of_codes} on {place(codes)}; all arrays must be on one device"
        )
    # The kernels read eight codes, or one norm, at a time.
    for name, array, unit in ((of_codes, codes, 4), (of_norms, norms, 2)):
        if array.size and array.shape[-1] > 1 and array.strides[-1] != array.itemsize:
            raise ValueError(f"{name} must be contiguous along the last axis, got strides {array.strides}")
        if is_gpu(array) and any(n % unit for n in (array.data.ptr, *array.strides[:-1])):
            raise ValueError(f"{name} must lie at multiples of {unit} bytes, got strides {array.strides}")
    _count(of_codes, codes.shape, head_dim)
    return codes, norms, _mean(mean, codes, head_dim, f"{prefix}mean", of_codes)


def result_dtype(dtype: npt.DTypeLike, codes: Array) -> np.dtype[Any]:
    """Return the `dtype` argument of `dequantize`."""
    try:
        wanted = np.dtype(dtype)
    except TypeError:
        raise TypeError(f"dtype must be a dtype, got {dtype!r}") from None
    accepted = _DTYPES[is_gpu(codes)]
    if wanted.name not in accepted:
        raise TypeError(f"dtype must be {' or '.join(accepted)}, got {wanted.name}")
    return wanted
