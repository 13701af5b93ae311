"""Checks of single arguments and their messages."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence

import numpy as np

from cuattn import _arrays, _plan
from cuattn._arrays import Array, dtype_name, is_gpu, place

GPU_DTYPES = ("float16", "bfloat16")
# Of attention to rows of elements, and of merges.
KERNEL_DTYPES = (*GPU_DTYPES, "float32")
# The reference's.
CPU_DTYPES = (*KERNEL_DTYPES, "float64")
# A row of K, V, q or out is moved in pieces of 16 bytes.
_ROW_ALIGNMENT = 16
_UNBOUNDED = -1
# Sizes of softmax_scale and softcap: their products and quotients stay in the range of float32.
_SMALLEST, _LARGEST = 1e-18, 1e18
_PAIR = 2


def listed(values: Sequence[object]) -> str:
    return ", ".join(map(str, values))


def require_rank(name: str, x: Array, ranks: tuple[int, ...], shape: str) -> None:
    """Refuse an array of another number of axes."""
    if x.ndim not in ranks:
        msg = f"{name} must have shape {shape}, got {x.ndim} axes: {x.shape}"
        raise ValueError(msg)


def require_shape(name: str, x: Array, shape: tuple[int, ...], of: str) -> None:
    if x.shape != shape:
        msg = f"{name} must have shape {shape} ({of}), got {x.shape}"
        raise ValueError(msg)


def require_dtype(name: str, x: Array, accepted: Sequence[str], why: str = "") -> None:
    """Refuse an array of another dtype."""
    if dtype_name(x) not in accepted:
        msg = f"{name} must be {' or '.join(accepted)}{why}, got {dtype_name(x)}"
        raise TypeError(msg)


def require_one_place(arrays: dict[str, Array | None]) -> None:
    given = [(name, x) for name, x in arrays.items() if x is not None]
    first, reference = given[0]
    if not any(is_gpu(x) for _, x in given):
        return
    for name, x in given[1:]:
        if place(x) != place(reference):
            msg = f"{name} is on {place(x)}, {first} on {place(reference)}; all arrays must be on one device"
            raise ValueError(msg)


def require_rows(name: str, x: Array, alignment: int = _ROW_ALIGNMENT) -> None:
    """Refuse rows that are not contiguous or, in dtypes that a GPU takes, do not start at multiples of `alignment`."""
    if x.size == 0:
        return
    if x.shape[-1] > 1 and x.strides[-1] != x.itemsize:
        msg = (
            f"{name} must be contiguous along its last axis (stride {x.itemsize} bytes), got {x.strides[-1]}; "
            "the other axes may have any stride"
        )
        raise ValueError(msg)
    if dtype_name(x) == "float64":  # for the reference alone
        return
    offsets = [s for s, n in zip(x.strides[:-1], x.shape[:-1], strict=True) if n > 1]
    if is_gpu(x):
        offsets.append(x.data.ptr)
    if any(o % alignment for o in offsets):
        msg = f"{name} must have rows that start at multiples of {alignment} bytes, got strides {x.strides}" + (
            f" from address {x.data.ptr:#x}" if is_gpu(x) else ""
        )
        raise ValueError(msg)


def require_out(out: Array, shape: tuple[int, ...], dtypes: Sequence[str], of: str) -> None:
    require_shape("out", out, shape, of)
    require_dtype("out", out, dtypes, f" (the dtype of {of.rsplit(' of ', maxsplit=1)[-1]})")
    require_rows("out", out)
    require_writable("out", out)


def require_writable(name: str, x: Array) -> None:
    """Refuse an array that cannot be written, or of which a write to one element changes another."""
    if not is_gpu(x) and not x.flags.writeable:
        msg = f"{name} must be writeable, got a read-only array"
        raise ValueError(msg)
    extent = x.itemsize
    for stride, n in sorted((abs(s), n) for s, n in zip(x.strides, x.shape, strict=True) if n > 1):
        if stride < extent and x.size:
            msg = f"{name} must not have elements that share memory, got strides {x.strides} for shape {x.shape}"
            raise ValueError(msg)
        extent += stride * (n - 1)


def require_head_dim(name: str, head_dim: int) -> None:
    if head_dim not in _plan.HEAD_DIMS:
        msg = f"{name} has head_dim {head_dim}; supported: {listed(_plan.HEAD_DIMS)}"
        raise ValueError(msg)


def require_words(name: str, x: Array) -> None:
    """Elements that a kernel reads one by one lie at multiples of their size."""
    if is_gpu(x) and any(o % x.itemsize for o in (x.data.ptr, *x.strides)):
        msg = f"{name} must lie at multiples of {x.itemsize} bytes, got strides {x.strides} from {x.data.ptr:#x}"
        raise ValueError(msg)


def integer(name: str, value: object, low: int, high: int) -> int:
    try:
        number = operator.index(value)  # type: ignore[arg-type]  # the point of the test
    except TypeError:
        msg = f"{name} must be an integer, got {value!r}"
        raise TypeError(msg) from None
    if isinstance(value, bool) or not low <= number <= high:
        msg = f"{name} must be {low} to {high}, got {value!r}"
        raise ValueError(msg)
    return number


def number_of(name: str, value: object, accepted: str, *, positive: bool) -> float:
    if not isinstance(value, (int, float, np.integer, np.floating)) or isinstance(value, bool):
        msg = f"{name} must be {accepted}, got {value!r}"
        raise TypeError(msg)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or (positive and number <= 0):
        msg = f"{name} must be {accepted}, got {value!r}"
        raise ValueError(msg)
    return number


def require_float32(scale: float, cap: float) -> None:
    """Kernels hold both in float32, times log2(e), and their quotient."""
    for name, value in (("softmax_scale", scale), ("softcap", cap)):
        if abs(value) > _LARGEST or 0 < abs(value) < _SMALLEST:
            msg = f"{name} must be 0 or have a size of {_SMALLEST:.0e} to {_LARGEST:.0e}, got {value!r}"
            raise ValueError(msg)


def scale_and_cap(softmax_scale: object, softcap: object, head_dim: int) -> tuple[float, float]:
    """Return both as numbers: the default scale for None, and 0 for no cap."""
    scale = head_dim**-0.5
    if softmax_scale is not None:
        scale = number_of("softmax_scale", softmax_scale, "a finite number or None", positive=False)
    cap = 0.0 if softcap is None else number_of("softcap", softcap, "a positive finite number or None", positive=True)
    require_float32(scale, cap)
    return scale, cap


def require_sinks(sinks: Array, num_qo_heads: int, q_dtype: str) -> None:
    require_shape("sinks", sinks, (num_qo_heads,), "one per query head")
    require_dtype("sinks", sinks, tuple(dict.fromkeys(("float32", q_dtype))))


def flag(name: str, value: object) -> bool:
    """Return a boolean argument."""
    if not isinstance(value, (bool, np.bool_)):
        msg = f"{name} must be True or False, got {value!r}"
        raise TypeError(msg)
    return bool(value)


def device(device: object, array: Array) -> _plan.Device:
    """Return the `device` argument of a plan for `array`."""
    if isinstance(device, _plan.Device):
        return device
    if device is None:
        return _arrays.device(array.device.id) if is_gpu(array) else _plan.DEVICES["sm_90a"]
    if not isinstance(device, str) or device not in _plan.DEVICES:
        msg = f"device must be a Device, None or one of {listed(tuple(_plan.DEVICES))}, got {device!r}"
        raise ValueError(msg)
    return _plan.DEVICES[device]


def window_of(window: object) -> tuple[int, int]:
    """Return (left, right) of a `window` argument, -1 where it is unbounded."""
    if window is None:
        return _UNBOUNDED, _UNBOUNDED
    if not isinstance(window, Sequence) or isinstance(window, str) or len(window) != _PAIR:
        msg = f"window must be None or (left, right), got {window!r}"
        raise TypeError(msg)
    left, right = (
        _UNBOUNDED if side is None else integer(f"window {name}", side, _UNBOUNDED, 2**63 - 1)
        for name, side in zip(("left", "right"), window, strict=True)
    )
    # Wider than any cache is unbounded; position + window stays an int32.
    return tuple(_UNBOUNDED if side >= _plan.MAX_KV_LEN else side for side in (left, right))  # type: ignore[return-value]
