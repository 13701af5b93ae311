"""`quantize`, `dequantize`, `channel_mean` and `Tbq4Array`: rows in the 4-bit format of ``docs/tbq4.md``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from . import _arrays, _check, _fp8, _jit, _params, _plan, _tbq4, reference
from ._arrays import Array
from ._fp8 import Fp8Array


@dataclass(frozen=True, slots=True, eq=False)
class Tbq4Array:
    """Rows in TBQ4: 4-bit codes and a float16 norm per 128 values, in planes of their own.

    Attributes
    ----------
    codes : array, shape (..., num_kv_heads, head_dim / 2), uint8
        Element 2 i in the low nibble of byte i.
    norms : array, shape (..., num_kv_heads, head_dim / block), float16
        block is 128, and 64 for head_dim 64.
    mean : array, shape (num_kv_heads, head_dim), float32, or None
        What was subtracted from the rows before encoding; `dequantize` adds it.
    clamped : int or array of one int32, default 0
        Norms that float16 could not hold and that are 65504; on a GPU a device array, so that nothing waits for it.
        `append` adds to an array.

    Raises
    ------
    ValueError, TypeError
        If the parts do not fit together.
    """

    codes: Array
    norms: Array
    mean: Array | None = None
    clamped: Any = 0

    def __post_init__(self) -> None:
        codes, norms, mean = _check.planes(self.codes, self.norms, self.mean)
        for name, value in (("codes", codes), ("norms", norms), ("mean", mean)):
            object.__setattr__(self, name, value)

    @property
    def head_dim(self) -> int:
        """Values of a row."""
        return 2 * int(self.codes.shape[-1])

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the rows that these are."""
        return (*self.codes.shape[:-1], self.head_dim)

    @property
    def nbytes(self) -> int:
        """Bytes of codes and norms."""
        return int(self.codes.nbytes + self.norms.nbytes)

    def to_blocks(self) -> Array:
        """Return the rows as interchange blocks, norm first: 66 bytes for 128 values. Nothing is lost but `mean`.

        Returns
        -------
        array, shape (..., num_kv_heads, head_dim / block * 66 or 34), uint8
        """
        return _tbq4.to_blocks(self.codes, self.norms)

    @classmethod
    def from_blocks(cls, blocks: Array, head_dim: int, *, mean: Array | None = None) -> Tbq4Array:
        """Take interchange blocks over.

        Parameters
        ----------
        blocks : array, shape (..., num_kv_heads, head_dim / block * 66 or 34), uint8
        head_dim : int
            64, 128, 256 or 512.
        mean : array, shape (num_kv_heads, head_dim), float32, optional

        Returns
        -------
        Tbq4Array
        """
        return cls(*_tbq4.from_blocks(_arrays.as_array("blocks", blocks), head_dim), mean)


def quantize(x: Array, *, mean: Array | None = None, strict: bool = False) -> Tbq4Array:
    """Encode rows as TBQ4.

    Parameters
    ----------
    x : array, shape (..., num_kv_heads, head_dim), float16, bfloat16 or float32
        Two to four axes; head_dim 64, 128, 256 or 512. Rows (the last axis) are contiguous and start at multiples of 16
        bytes; other axes may have any stride.
    mean : array, shape (num_kv_heads, head_dim), float32, optional
        Subtracted before encoding, and kept with the result. For keys it removes what a constant offset of a channel
        costs; `channel_mean` estimates it.
    strict : bool, default False
        Whether a norm that float16 cannot hold is an error, for which a GPU is waited for; otherwise it becomes 65504
        and is counted in `Tbq4Array.clamped`.

    Returns
    -------
    Tbq4Array

    Raises
    ------
    ValueError, TypeError
        If an argument does not fit; the message names it, its value and what would be accepted. With `strict` also for
        a norm above 65504.

    See Also
    --------
    dequantize : the way back.
    cuattn.reference.quantize : the definition.

    Notes
    -----
    NumPy arrays run the reference on the CPU, GPU arrays the kernel on their device and its current CuPy stream. The
    two differ where float32 sums in another order move a value over a boundary between two levels.
    """
    x, mean = _check.quantize(x, mean)
    if not _arrays.is_gpu(x):
        return Tbq4Array(*_with_mean(reference.quantize(x, mean=mean, strict=strict), mean))
    cupy = _arrays.import_cupy()
    with cupy.cuda.Device(x.device.id):
        block = _tbq4.block_of(x.shape[-1])
        codes = cupy.empty((*x.shape[:-1], x.shape[-1] // 2), np.uint8)
        norms = cupy.empty((*x.shape[:-1], x.shape[-1] // block), np.float16)
        clamped = cupy.zeros(1, np.int32)
        mean = None if mean is None else _for_loads(mean)
        _launch(x, quantize_params(x, codes, norms, clamped, mean), encode=True, with_mean=mean is not None)
        if strict and int(clamped[0]):
            raise ValueError(
                f"x must have norms of at most {_tbq4.MAX_NORM:.0f} per block, {int(clamped[0])} are larger"
            )
    return Tbq4Array(codes, norms, mean, clamped)


def dequantize(t: Tbq4Array | Fp8Array, *, dtype: npt.DTypeLike = np.float32) -> Array:
    """Decode rows of TBQ4 or fp8.

    Parameters
    ----------
    t : Tbq4Array or Fp8Array
    dtype : dtype, default float32
        float16, bfloat16 or float32.

    Returns
    -------
    array, shape (..., num_kv_heads, head_dim), `dtype`

    Raises
    ------
    TypeError
        If `t` is neither, or for another dtype.

    See Also
    --------
    quantize, quantize_fp8
    cuattn.reference.dequantize, cuattn.reference.dequantize_fp8 : the definitions.
    """
    if not isinstance(t, (Tbq4Array, Fp8Array)):
        raise TypeError(f"t must be a Tbq4Array or an Fp8Array, got {type(t).__name__}")
    wanted = _check.result_dtype(dtype, t.codes)
    if isinstance(t, Fp8Array):
        return _fp8.dequantize(t, wanted)
    if not _arrays.is_gpu(t.codes):
        with np.errstate(over="ignore"):  # a value too large for the dtype is infinite, as on the GPU
            return np.asarray(reference.dequantize(t.codes, t.norms, mean=t.mean)).astype(wanted)
    cupy = _arrays.import_cupy()
    with cupy.cuda.Device(t.codes.device.id):
        out = cupy.empty(t.shape, wanted)
        mean = None if t.mean is None else _for_loads(t.mean)
        _launch(out, dequantize_params(t.codes, t.norms, out, mean), encode=False, with_mean=mean is not None)
    return out


def channel_mean(x: Array, *, skip: int = 0) -> Array:
    """Average keys or values over their tokens, as a `mean` for `quantize`.

    Keys of many models have channels with a large offset that all tokens share. It says nothing about one key rather
    than another, but makes the norms that TBQ4 stores, and so its error, larger. Attention to what `quantize` stores
    with a mean is exact in the mean, whatever it is: the first tokens of a sequence are enough to estimate it, once for
    a cache, as all rows of a cache share it.

    Parameters
    ----------
    x : array, shape (tokens, num_kv_heads, head_dim) or (batch, tokens, num_kv_heads, head_dim), float16, bfloat16 or \
float32
        Any strides.
    skip : int, default 0
        First tokens of each sequence to leave out. The very first is often unlike all others, small and with much of
        the weight, and is better kept in 16 bits too: see `k_sink` of `decode`.

    Returns
    -------
    array, shape (num_kv_heads, head_dim), float32
        Of float64 sums. A NaN or an infinity makes its channel not finite.

    Raises
    ------
    ValueError, TypeError
        If an argument does not fit, or if there is no token to average.

    See Also
    --------
    quantize

    Notes
    -----
    A mean helps keys more than values, whose offsets are smaller. ``docs/tbq4.md``, "Means", has numbers.

    Examples
    --------
    >>> k_mean = cuattn.channel_mean(prompt_keys, skip=1)
    >>> k_cache = cuattn.quantize(keys, mean=k_mean)
    """
    x, skip = _check.channel_mean(x, skip)
    x = x[..., skip:, :, :]
    axes = tuple(range(x.ndim - 2))
    if not _arrays.is_gpu(x):
        with np.errstate(over="ignore", invalid="ignore"):
            return x.mean(axis=axes, dtype=np.float64).astype(np.float32)
    cupy = _arrays.import_cupy()
    with cupy.cuda.Device(x.device.id):
        return _arrays.as_float32(x).mean(axis=axes, dtype=np.float64).astype(np.float32)


def _with_mean(encoded: reference.Quantized, mean: Array | None) -> tuple[Array, Array, Array | None, int]:
    return encoded.codes, encoded.norms, mean, encoded.clamped


def _for_loads(mean: Array) -> Array:
    """Return `mean` as the kernels want it: contiguous, at a multiple of 16 bytes."""
    mean = _arrays.import_cupy().ascontiguousarray(mean)
    return mean.copy() if mean.data.ptr % 16 else mean


def _launch(rows: Array, params: np.ndarray[Any, Any], *, encode: bool, with_mean: bool) -> None:
    if rows.size == 0:
        return
    ordinal = rows.device.id
    device = _arrays.device(ordinal)
    config = config_of(rows, device, encode=encode, with_mean=with_mean)
    grid = config.grid(rows.size // config.block, device)
    _jit.kernel(config, ordinal, device.arch).launch(grid, (config.num_warps * _plan.WARP, 1, 1), params)


def config_of(rows: Array, device: _plan.Device, *, encode: bool, with_mean: bool) -> _plan.QuantizeConfig:
    """Config of quantize.cu for `rows`, or of dequantize.cu for a result like `rows`."""
    dtype = _plan.Dtype(_arrays.dtype_name(rows))
    heads, head_dim = rows.shape[-2:]
    return _plan.codec_config(dtype, head_dim, device, encode=encode, with_mean=with_mean, num_heads=heads)


def _strides(name: str, array: Array) -> dict[str, int]:
    """Strides of the axes before the last: missing leading ones are 0."""
    strides = (0,) * (4 - array.ndim) + array.strides[:-1]
    return {f"{name}_stride_{axis}": s for axis, s in zip(("dim0", "dim1", "head"), strides, strict=True)}


def _rows(array: Array) -> dict[str, int]:
    """Sizes of (dim0, dim1, heads) as the kernels want them."""
    _, dim1, heads = (1,) * (4 - array.ndim) + array.shape[:-1]
    return {"num_rows": array.size // array.shape[-1], "dim1": dim1, "heads": heads}


def quantize_params(x: Array, codes: Array, norms: Array, clamped: Array, mean: Array | None) -> np.ndarray[Any, Any]:
    """Fill the parameters of quantize.cu from arrays in one place; all but `x` are contiguous."""
    arrays = {"x": x, "mean": mean, "codes": codes, "norms": norms, "clamped": clamped}
    pointers = {name: _arrays.pointer(array) for name, array in arrays.items()}
    return _params.fill(_params.QUANTIZE, {**pointers, **_strides("x", x), **_rows(x)})


def dequantize_params(codes: Array, norms: Array, out: Array, mean: Array | None) -> np.ndarray[Any, Any]:
    """Fill the parameters of dequantize.cu from arrays in one place; `out` and `mean` are contiguous."""
    arrays = {"codes": codes, "norms": norms, "mean": mean, "out": out}
    pointers = {name: _arrays.pointer(array) for name, array in arrays.items()}
    strides = {**_strides("codes", codes), **_strides("norms", norms)}
    return _params.fill(_params.DEQUANTIZE, {**pointers, **strides, **_rows(out)})
