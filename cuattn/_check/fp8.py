"""Argument checks of `quantize_fp8` and `Fp8Array`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cuattn import _plan
from cuattn._arrays import Array, as_array, dtype_name, is_gpu, place
from cuattn._check.arguments import (
    CPU_DTYPES,
    KERNEL_DTYPES,
    listed,
    require_dtype,
    require_head_dim,
    require_rank,
    require_rows,
    require_shape,
)

_LARGEST = float(np.finfo(np.float32).max)
_RANKS = (2, 3, 4)
_AXES = "([batch, [tokens,]] num_kv_heads, head_dim)"
_ACCEPTED = "a positive finite number, or a float32 array of one for each KV head"


def _scale(name: str, scale: Any, rows: Array, of: str) -> Array | float:  # noqa: ANN401  whatever came
    """Return a scale as a float, or as an array (num_kv_heads,)."""
    if isinstance(scale, (int, float, np.integer, np.floating)) and not isinstance(scale, bool):
        # Python compares an integer of any size with a float.
        size: Any = abs(scale)
        held = float(np.float32(scale)) if size <= _LARGEST else math.inf
        if not (math.isfinite(held) and held > 0):
            raise ValueError(f"{name} must be {_ACCEPTED}, got {scale!r}")
        return held
    if scale is None or isinstance(scale, (bool, str, bytes, list, tuple)):
        raise TypeError(f"{name} must be {_ACCEPTED}, got {scale!r}")
    array = as_array(name, scale)
    if place(array) != place(rows):
        raise ValueError(f"{name} is on {place(array)}, {of} on {place(rows)}; all arrays must be on one device")
    require_shape(name, array, rows.shape[-2:-1], "one for each KV head")
    require_dtype(name, array, ("float32",))
    if not is_gpu(array) and not (np.isfinite(array) & (array > 0)).all():
        raise ValueError(f"{name} must be {_ACCEPTED}, got {array}")
    return array


def fp8_parts(codes: Array, scale: object, prefix: str = "") -> tuple[Array, Array | float]:
    """Check the parts of an `Fp8Array` and return them; `prefix` goes before their names in messages."""
    of_codes = f"{prefix}codes"
    codes = as_array(of_codes, codes)
    if dtype_name(codes) == "float8_e4m3fn":
        codes = codes.view(np.uint8)
    require_rank(of_codes, codes, _RANKS, _AXES)
    require_dtype(of_codes, codes, ("uint8", "float8_e4m3fn"))
    if codes.shape[-1] not in _plan.HEAD_DIMS:
        raise ValueError(
            f"{of_codes} must have {listed(_plan.HEAD_DIMS)} bytes in the last axis, a head_dim, got {codes.shape}"
        )
    if codes.size and codes.strides[-1] != 1:
        raise ValueError(f"{of_codes} must be contiguous along the last axis, got strides {codes.strides}")
    return codes, _scale(f"{prefix}scale", scale, codes, of_codes)


def quantize_fp8(x: Array, scale: object) -> tuple[Array, Array | float | None]:
    """Check the arguments of `quantize_fp8` and return them."""
    x = as_array("x", x)
    require_rank("x", x, _RANKS, _AXES)
    require_dtype("x", x, KERNEL_DTYPES if is_gpu(x) else CPU_DTYPES)
    require_head_dim("x", x.shape[-1])
    require_rows("x", x)
    if math.prod(x.shape[:-1]) > _plan.MAX_APPEND_ROWS:
        raise ValueError(f"x must have at most {_plan.MAX_APPEND_ROWS} rows, got shape {x.shape}")
    return x, None if scale is None else _scale("scale", scale, x, "x")
