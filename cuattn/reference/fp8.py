"""fp8 e4m3 in NumPy, through the type of ml_dtypes: the definition of the format."""

from typing import Any, NamedTuple, TypeAlias

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
NAN = 0x7F
# There are no infinities: the code below NaN is the largest number.
LARGEST = float(np.uint8(NAN - 1).view(E4M3))
_SMALLEST_SCALE = float(np.finfo(np.float32).tiny)


class QuantizedFp8(NamedTuple):
    """Rows in fp8.

    Attributes
    ----------
    codes : array, shape (..., num_kv_heads, head_dim), uint8
        Bits of OCP e4m3: 0x7f and 0xff are NaN, and there are no infinities.
    scale : array, shape (num_kv_heads,), float32
        What the values of a head are multiplied by.
    """

    codes: npt.NDArray[np.uint8]
    scale: npt.NDArray[np.float32]


def scale_of(largest: Any, module: Any = np) -> Any:  # noqa: ANN401  arrays of a module like NumPy
    """Return the scale of each head that takes its largest size to the largest code; 1 where that is zero."""
    scale = module.maximum(largest.astype(np.float64) / LARGEST, _SMALLEST_SCALE)
    return module.where(largest == 0, 1.0, scale).astype(np.float32)


def _largest(rows: npt.NDArray[np.float32]) -> Array:
    sizes = np.where(np.isfinite(rows), np.abs(rows), 0)
    largest: Array = sizes.max(axis=(*range(rows.ndim - 2), -1), initial=0)
    return largest


# Values that are not finite pass through: infinities to the largest code, NaN to a NaN.
@np.errstate(invalid="ignore", over="ignore")
def quantize_fp8(x: Array, *, scale: npt.ArrayLike | None = None) -> QuantizedFp8:
    """Encode rows as fp8: x / scale in float32, to the nearest number, of two the even one.

    Parameters
    ----------
    x : array, shape (..., num_kv_heads, head_dim)
        What is too large, or infinite, becomes the largest number of its sign; NaN stays NaN.
    scale : float or array, shape (num_kv_heads,), optional
        Default: of each head, its largest finite size over 448, or 1 if that is zero.

    Returns
    -------
    QuantizedFp8
    """
    rows = np.asarray(x, np.float32)
    of_heads = scale_of(_largest(rows)) if scale is None else np.asarray(scale, np.float32)
    of_heads = np.broadcast_to(of_heads, rows.shape[-2:-1])
    codes = np.clip(rows / of_heads[:, None], -LARGEST, LARGEST).astype(E4M3).view(np.uint8)
    return QuantizedFp8(np.where(np.isnan(rows), np.uint8(NAN), codes), of_heads)


def dequantize_fp8(codes: Array, scale: npt.ArrayLike, *, dtype: npt.DTypeLike = np.float64) -> Array:
    """Decode rows of fp8: the number of each code times the scale of its head.

    Parameters
    ----------
    codes : array, shape (..., num_kv_heads, head_dim), uint8
    scale : float or array, shape (num_kv_heads,)
    dtype : dtype, default float64

    Returns
    -------
    array, shape of `codes`
    """
    of_heads = np.broadcast_to(np.asarray(scale, np.float64), codes.shape[-2:-1])
    values: Array = codes.view(E4M3).astype(np.float64) * of_heads[:, None]
    return values.astype(dtype)
