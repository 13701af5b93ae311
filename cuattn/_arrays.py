"""Where arrays live, and views of foreign arrays. CuPy is imported only when a GPU array turns up."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any, TypeAlias

import numpy as np

from . import _plan

# A NumPy array, a CuPy array, or any object that speaks DLPack or __cuda_array_interface__.
Array: TypeAlias = Any

# What messages call one.
ACCEPTED = "a NumPy array, a CuPy array or a GPU array that speaks DLPack"

# Device types of the DLPack specification: CPU and pinned host memory; CUDA and CUDA managed memory.
_DLPACK_CPU = (1, 3)
_DLPACK_CUDA = (2, 13)


def import_cupy() -> Any:  # noqa: ANN401  CuPy has no types
    """Return the `cupy` module, or say how to get it."""
    try:
        import cupy
    except ImportError as error:
        msg = "arrays on a GPU need CuPy: pip install 'cuattn[cuda13]' (or 'cuattn[cuda12]' for a CUDA 12 driver)"
        raise ImportError(msg) from error
    return cupy


@cache
def _name(dtype: Any) -> str:  # noqa: ANN401  a dtype of NumPy or ml_dtypes
    return str(dtype.name)


def dtype_name(array: Array) -> str:
    """Return the name of an array's dtype; NumPy composes it anew at every look."""
    return _name(array.dtype)


def is_gpu(array: Array) -> bool:
    """Whether an array returned by `as_array` lies on a GPU."""
    return not isinstance(array, np.ndarray)


def contiguous(x: Array) -> Array:
    """Return `x`, or a copy on its device in C order if it is not in that order."""
    if x.flags.c_contiguous:
        return x
    if not is_gpu(x):
        return np.ascontiguousarray(x)
    cupy = import_cupy()
    with cupy.cuda.Device(x.device.id):
        return cupy.ascontiguousarray(x)


def as_float32(x: Array) -> Array:
    """Return an array of a GPU as float32, for whichever dtype of 16 bits or more."""
    cupy = import_cupy()
    if dtype_name(x) == "bfloat16":  # the upper half of a float32
        return (x.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return x.astype(cupy.float32, copy=False)


def as_array(name: str, x: Array, also: str = "") -> Array:
    """View `x` as a NumPy array, or as a CuPy array if it lies on a GPU; nothing is copied.

    DLPack is preferred to ``__cuda_array_interface__``: it orders the streams without a host synchronization and knows
    bfloat16.

    Parameters
    ----------
    name : str
        Argument, for the message.
    x : array
    also : str, optional
        What else the argument may be, for the message.

    Returns
    -------
    numpy.ndarray or cupy.ndarray

    Raises
    ------
    TypeError
        If `x` is not an array.
    """
    if isinstance(x, np.ndarray):
        return x
    if isinstance(x, getattr(sys.modules.get("cupy"), "ndarray", ())):
        return x
    if hasattr(x, "__dlpack_device__"):
        kind = int(x.__dlpack_device__()[0])
        if kind in (*_DLPACK_CUDA, *_DLPACK_CPU):
            module = import_cupy() if kind in _DLPACK_CUDA else np
            try:
                return module.from_dlpack(x)
            except (BufferError, RuntimeError, TypeError, ValueError) as error:
                msg = f"{name} cannot be taken over by {module.__name__}.from_dlpack: {error}"
                raise TypeError(msg) from error
        msg = f"{name} lies on a device of DLPack type {kind}; accepted: CPU and CUDA memory"
        raise TypeError(msg)
    if hasattr(x, "__cuda_array_interface__"):
        cupy = import_cupy()
        address = x.__cuda_array_interface__["data"][0]
        # CuPy would copy an array of another device to the current one.
        ordinal = cupy.cuda.runtime.pointerGetAttributes(address).device if address else cupy.cuda.Device().id
        with cupy.cuda.Device(ordinal):
            return cupy.asarray(x)
    msg = f"{name} must be {ACCEPTED}{also}, got {type(x).__name__}"
    raise TypeError(msg)


def given(out: Array | None, result: Array) -> Array:
    """Return the caller's own `out` if it is an array of the result's kind, else `result`."""
    return out if isinstance(out, type(result)) else result


def place(array: Array) -> str:
    """Return where an array lies: ``"cpu"`` or ``"cuda:0"``."""
    return f"cuda:{array.device.id}" if is_gpu(array) else "cpu"


def pointer(array: Array | None) -> int:
    """Address of an array's first element, 0 for None; of a NumPy array for kernels that run on the CPU harness."""
    if array is None:
        return 0
    return int(array.data.ptr) if is_gpu(array) else int(array.ctypes.data)


@cache
def device(ordinal: int) -> _plan.Device:
    """Describe a CUDA device for the plans.

    Parameters
    ----------
    ordinal : int

    Returns
    -------
    Device

    Raises
    ------
    RuntimeError
        If its compute capability is below 8.0.
    """
    cupy = import_cupy()
    properties = cupy.cuda.runtime.getDeviceProperties(ordinal)
    major, minor = properties["major"], properties["minor"]
    name = properties["name"].decode()
    if major < 8:  # noqa: PLR2004  the kernels use cp.async and m16n8k16 of sm_80
        msg = f"{name} has compute capability {major}.{minor}; cuattn needs 8.0 (Ampere) or newer"
        raise RuntimeError(msg)
    # Double data rate: two transfers a clock. The clock is in kHz, the bus in bits.
    bandwidth = 2.0 * 1e3 * properties.get("memoryClockRate", 0) * properties.get("memoryBusWidth", 0) / 8
    return _plan.Device(
        name=name,
        arch=_plan.arch_of(major, minor),
        num_sms=properties["multiProcessorCount"],
        smem_per_block=properties["sharedMemPerBlockOptin"],
        smem_per_sm=properties["sharedMemPerMultiprocessor"],
        bandwidth=bandwidth,
        l2_bytes=properties.get("l2CacheSize", 0),
    )
