"""`quantize_fp8` and `Fp8Array`: rows of OCP e4m3 codes with a scale for each KV head."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from . import _arrays, _check, reference
from ._arrays import Array
from .reference.fp8 import scale_of


@dataclass(frozen=True, slots=True, eq=False)
class Fp8Array:
    """Rows in fp8: a byte a value, OCP e4m3 as in ``ml_dtypes.float8_e4m3fn``, and a scale.

    A value is the number of its code times the scale of its KV head. Codes 0x7f and 0xff are NaN; there are no
    infinities.

    Attributes
    ----------
    codes : array, shape (..., num_kv_heads, head_dim), uint8
        An array of ``float8_e4m3fn`` is taken over as its bytes. head_dim is 64, 96, 128, 192, 256 or 512.
    scale : float or array, shape (num_kv_heads,), float32
        Of all heads, or of each; positive and finite. Contents of a GPU array are not checked.

    Raises
    ------
    ValueError, TypeError
        If the parts do not fit together.
    """

    codes: Array
    scale: Array | float = 1.0

    def __post_init__(self) -> None:
        codes, scale = _check.fp8_parts(self.codes, self.scale)
        object.__setattr__(self, "codes", codes)
        object.__setattr__(self, "scale", scale)

    @property
    def head_dim(self) -> int:
        """Values of a row."""
        return int(self.codes.shape[-1])

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the rows that these are."""
        return tuple(self.codes.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of codes."""
        return int(self.codes.nbytes)


def quantize_fp8(x: Array, *, scale: Array | float | None = None) -> Fp8Array:
    """Encode rows as fp8.

    A code is that of the number nearest to ``x / scale``, of two the even one, which is computed in float32. What is
    too large, or infinite, becomes 448 of its sign times the scale; NaN stays NaN.

    Parameters
    ----------
    x : array, shape (..., num_kv_heads, head_dim), float16, bfloat16 or float32
        Two to four axes; head_dim 64, 96, 128, 192, 256 or 512. Rows (the last axis) are contiguous and start at
        multiples of 16 bytes; other axes may have any stride.
    scale : float or array, shape (num_kv_heads,), float32, optional
        Positive and finite. Default: of each head its largest finite size over 448, or 1 where that is zero.

    Returns
    -------
    Fp8Array
        With the scale as it was given, or an array.

    Raises
    ------
    ValueError, TypeError
        If an argument does not fit; the message names it, its value and what would be accepted.

    See Also
    --------
    dequantize : the way back.
    append : encodes new rows of a cache.
    cuattn.reference.quantize_fp8 : the definition.

    Notes
    -----
    NumPy arrays (float64 too) run the reference on the CPU. GPU arrays run the kernel of `append` on their device and
    its current CuPy stream, and CuPy's own maximum if there is no `scale`.

    Examples
    --------
    >>> k_cache = cuattn.quantize_fp8(keys)
    """
    x, scale = _check.quantize_fp8(x, scale)
    if not _arrays.is_gpu(x):
        encoded = reference.quantize_fp8(x, scale=scale)
        return Fp8Array(encoded.codes, encoded.scale if scale is None else scale)
    from . import _append  # which takes caches of this kind

    cupy = _arrays.import_cupy()
    with cupy.cuda.Device(x.device.id):
        if scale is None:
            scale = scale_of(_largest_sizes(x), cupy)
        result = Fp8Array(cupy.empty(x.shape, np.uint8), scale)
        _append.encode(x, result)
    return result


def dequantize(t: Fp8Array, dtype: npt.DTypeLike) -> Array:
    """Decode rows of fp8; `cuattn.dequantize` documents it."""
    if not _arrays.is_gpu(t.codes):
        with np.errstate(over="ignore"):  # a value too large for the dtype is infinite, as on the GPU
            return np.asarray(reference.dequantize_fp8(t.codes, t.scale)).astype(dtype)
    cupy = _arrays.import_cupy()
    with cupy.cuda.Device(t.codes.device.id):
        numbers = cupy.asarray(reference.dequantize_fp8(np.arange(256, dtype=np.uint8)[None], 1.0, dtype=np.float32)[0])
        scale = cupy.float32(t.scale) if isinstance(t.scale, float) else t.scale[:, None]
        return (numbers.take(t.codes) * scale).astype(dtype)


def _largest_sizes(x: Array) -> Array:
    """Return the largest finite size of each head, float32."""
    cupy = _arrays.import_cupy()
    sizes = cupy.abs(_arrays.as_float32(x))
    sizes = cupy.where(cupy.isfinite(sizes), sizes, cupy.float32(0))
    axes = (*range(x.ndim - 2), x.ndim - 1)
    return sizes.max(axis=axes) if x.size else cupy.zeros(x.shape[-2], cupy.float32)
