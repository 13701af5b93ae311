"""CuPy and a GPU, played by NumPy and the CPU harness: calls with GPU arrays run whole, checks, plans and launches."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from simt import product

from cuattn import Fp8Array, Tbq4Array, _arrays, _jit, _plan, _tiled

# Bytes of arrays and of memory that nobody has written.
_POISON = 0xFF
_BOUNDARY = 512
# So few SMs that CTAs take several tiles.
GPU = replace(product.H200, num_sms=2)


def _on_a_boundary(shape: tuple[int, ...], dtype: np.dtype, strides: tuple[int, ...] | None = None) -> np.ndarray:
    """Return a poisoned array where CuPy's memory begins, at a multiple of 512 bytes."""
    spread = sum((n - 1) * abs(s) for n, s in zip(shape, strides or (), strict=bool(strides)) if n)
    size = spread + dtype.itemsize if strides else int(np.prod(shape)) * dtype.itemsize
    memory = np.full(size + _BOUNDARY, _POISON, np.uint8)
    begin = -memory.ctypes.data % _BOUNDARY
    below = sum((n - 1) * -s for n, s in zip(shape, strides or (), strict=bool(strides)) if n and s < 0)
    return np.ndarray(shape, dtype, memory[begin : begin + size], below, strides)


class GpuArray:
    """Plays `cupy.ndarray`, in the memory of a NumPy array.

    Parameters
    ----------
    shape : tuple of int, or numpy.ndarray
        Of an array that is poisoned, or what it is a view of.
    dtype : dtype, optional
    ordinal : int, optional
        Of its device. Default: the current one.
    """

    def __init__(self, shape: tuple[int, ...] | np.ndarray, dtype: Any = None, ordinal: int | None = None) -> None:
        self.host = shape if isinstance(shape, np.ndarray) else _on_a_boundary(shape, np.dtype(dtype))
        self.ordinal = _Cuda.current if ordinal is None else ordinal

    def __getattr__(self, name: str) -> Any:
        if name in {"shape", "strides", "dtype", "itemsize", "size", "ndim", "nbytes", "flags"}:
            return getattr(self.host, name)
        raise AttributeError(name)

    def __getitem__(self, key: Any) -> "GpuArray":
        return GpuArray(self.host[key], ordinal=self.ordinal)

    @property
    def data(self) -> SimpleNamespace:
        return SimpleNamespace(ptr=self.host.ctypes.data, device_id=self.ordinal)

    @property
    def device(self) -> SimpleNamespace:
        return SimpleNamespace(id=self.ordinal)


class _Cuda:
    """Plays `cupy.cuda`."""

    current = 0
    runtime = SimpleNamespace(getDevice=lambda: _Cuda.current)

    @staticmethod
    @contextmanager
    def Device(ordinal: int) -> Iterator[None]:  # noqa: N802  CuPy's name
        before, _Cuda.current = _Cuda.current, ordinal
        try:
            yield
        finally:
            _Cuda.current = before

    @staticmethod
    def alloc(size: int) -> SimpleNamespace:
        memory = _on_a_boundary((size,), np.dtype(np.uint8))
        return SimpleNamespace(ptr=memory.ctypes.data, memory=memory)


class _Kernel:
    """Plays a kernel that is loaded on a device."""

    def __init__(self, config: _plan.Config, ordinal: int, log: list[tuple[_plan.Config, int]]) -> None:
        self._config, self._ordinal, self._log = config, ordinal, log

    def bind(self, grid: Sequence[int], block: Sequence[int], params: np.ndarray) -> Callable[[], None]:
        def start() -> None:
            assert _Cuda.current == self._ordinal
            self._log.append((self._config, self._ordinal))
            name, smem = f"{self._config.kernel}_kernel", self._config.smem_bytes
            product.build(self._config).launch(name, grid, block, (params,), smem=smem)

        return start

    def launch(self, grid: Sequence[int], block: Sequence[int], params: np.ndarray) -> None:
        self.bind(grid, block, params)()


def on_gpu(x: Any, ordinal: int = 0) -> Any:
    """Return copies of NumPy arrays, also those of caches of codes, with their strides; anything else as it is."""
    if isinstance(x, np.ndarray):
        copy = _on_a_boundary(x.shape, x.dtype, x.strides)
        copy[...] = x
        return GpuArray(copy, ordinal=ordinal)
    if isinstance(x, Tbq4Array):
        return Tbq4Array(*(on_gpu(part, ordinal) for part in (x.codes, x.norms, x.mean, x.clamped)))
    if isinstance(x, Fp8Array):
        return Fp8Array(*(on_gpu(part, ordinal) for part in (x.codes, x.scale)))
    return x


def download(target: Any, source: Any) -> None:
    """Copy what lies on the GPU to what `on_gpu` copied there."""
    if isinstance(target, np.ndarray):
        target[...] = source.host
    elif isinstance(target, Tbq4Array):
        for name in ("codes", "norms", "mean", "clamped"):
            download(getattr(target, name), getattr(source, name))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[_plan.Config, int]]]:
    """Two GPUs in CuPy's hands, and the list of the kernels that are launched, with the device of each."""
    log: list[tuple[_plan.Config, int]] = []
    kernels: dict[tuple[_plan.Config, int], _Kernel] = {}
    cupy = ModuleType("cupy")
    cupy.ndarray, cupy.cuda, cupy.float32, cupy.int32 = GpuArray, _Cuda, np.float32, np.int32
    cupy.empty = GpuArray
    cupy.zeros = lambda shape, dtype: on_gpu(np.zeros(shape, dtype), _Cuda.current)
    cupy.asarray = lambda x: x if isinstance(x, GpuArray) else on_gpu(np.array(x), _Cuda.current)

    def ascontiguousarray(x: GpuArray, dtype: Any = None) -> GpuArray:
        host = np.ascontiguousarray(x.host, dtype)
        return x if host is x.host else on_gpu(host, _Cuda.current)

    cupy.ascontiguousarray = ascontiguousarray
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(_arrays, "device", lambda _: GPU)
    monkeypatch.setattr(_tiled, "tensor_map", product.tensor_map)
    monkeypatch.setattr(
        _jit, "kernel", lambda config, ordinal, _: kernels.setdefault((config, ordinal), _Kernel(config, ordinal, log))
    )
    _Cuda.current = 0
    yield log
    assert _Cuda.current == 0
