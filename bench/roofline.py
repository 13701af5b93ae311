"""Bytes and FLOPs of a problem, and roofs measured on the spot: reading only, and a device copy."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from cuattn import _arrays, _plan

from . import kernels, timing
from .sampling import QUICK

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cuattn import _nvrtc
    from cuattn._arrays import Array

    from .sampling import Sampling, Timing

# Loads of 16 bytes that a thread has in flight: with four a thread needs 32 registers or fewer, so that an SM holds
# 2048 of them and has 128 KB in flight, several times what it needs.
_UNROLL = 4
# Threads of a block and blocks on an SM; None is one pass, with as many blocks as the bytes need. Which of them reads
# fastest depends on the bytes, so each is tried.
SHAPES: tuple[tuple[int, int | None], ...] = ((1024, 1), (1024, 2), (512, 4), (256, 8), (128, 16), (256, None))


def decode_traffic(problem: _plan.DecodeProblem) -> tuple[int, int]:
    """Return bytes of K and V, which a decode must read, and its FLOPs; q, out and tables are left out.

    Both are those that a plan prints, and do not depend on the device.
    """
    return problem.kv_bytes, problem.flops


def compile_roof(name: str, arch: str) -> _nvrtc.Compiled:
    """Compile read.cu or copy.cu for an architecture."""
    return kernels.compiled(name, arch, f"constexpr int UNROLL = {_UNROLL};\n")


class _Roof:
    """A kernel of this folder on the current device, in any of the launch shapes."""

    name: str

    def __init__(self) -> None:
        cupy = _arrays.import_cupy()
        self._device = _arrays.device(cupy.cuda.Device().id)
        self._function = kernels.loaded(self.name, compile_roof(self.name, self._device.arch).cubin)
        self.registers = self._function.num_regs

    def _grid(self, nbytes: int, threads: int, blocks_per_sm: int | None) -> tuple[int]:
        if blocks_per_sm is None:
            return (max(1, _plan.ceil_div(nbytes, threads * _UNROLL * 16)),)
        return (blocks_per_sm * self._device.num_sms,)

    @staticmethod
    def _fastest(calls: Callable[..., Sequence[Callable[[], None]]], sampling: Sampling) -> tuple[Timing, str]:
        """Time calls in the launch shape that is fastest for them."""

        def time(shape: tuple[int, int | None], sampling: Sampling) -> Timing:
            return timing.replayed(calls(*shape), sampling)

        threads, blocks = fastest = min(SHAPES, key=lambda shape: time(shape, QUICK).us)
        found = time(fastest, sampling)
        return found, f"{threads} threads, {'one pass' if blocks is None else f'{blocks} blocks an SM'}"


class Reader(_Roof):
    """The kernel of read.cu."""

    name = "read"

    def __init__(self) -> None:
        super().__init__()
        self._sink = _arrays.import_cupy().zeros(1, np.uint32)

    def call(self, array: Array, threads: int = 256, blocks_per_sm: int | None = None) -> Callable[[], None]:
        """Return a read of an array on the then current stream.

        Parameters
        ----------
        array : cupy.ndarray
            Contiguous, a multiple of 16 bytes; the call does not keep it alive.
        threads : int, default 256
            Of a block, at most 1024.
        blocks_per_sm : int, optional
            Default: as many blocks as make one pass.

        Returns
        -------
        callable
            With its arguments made already, so that its time on the host is that of a bare launch.
        """
        words = np.uint64(array.nbytes // 16)
        args = (np.uint64(array.data.ptr), words, np.uint32(0x9E3779B9), np.uint64(self._sink.data.ptr))
        return partial(self._function, self._grid(array.nbytes, threads, blocks_per_sm), (threads,), args)

    def roof(self, arrays: Sequence[Array], sampling: Sampling) -> tuple[Timing, str]:
        """Time the fastest read of arrays in rotation.

        Parameters
        ----------
        arrays : sequence of array
            Contiguous; one is read by one call.
        sampling : Sampling

        Returns
        -------
        Timing
        note : str
            Launch shape.
        """
        return self._fastest(lambda *shape: [self.call(array, *shape) for array in arrays], sampling)


class Copier(_Roof):
    """The kernel of copy.cu."""

    name = "copy"

    def call(
        self, source: Array, target: Array, threads: int = 256, blocks_per_sm: int | None = None
    ) -> Callable[[], None]:
        """Return a copy on the then current stream, of arrays as `Reader.call` takes them."""
        args = (np.uint64(source.data.ptr), np.uint64(source.nbytes // 16), np.uint64(target.data.ptr))
        return partial(self._function, self._grid(source.nbytes, threads, blocks_per_sm), (threads,), args)

    def roof(self, sources: Sequence[Array], targets: Sequence[Array], sampling: Sampling) -> tuple[Timing, str]:
        """Time the fastest copy of `sources` to `targets` in rotation; see `Reader.roof`."""
        pairs = list(zip(sources, targets, strict=True))
        return self._fastest(lambda *shape: [self.call(*pair, *shape) for pair in pairs], sampling)


def copy_bandwidth(sampling: Sampling) -> float:
    """Return bytes per second, read and written, of an elementwise kernel over up to 1 GiB."""
    cupy = _arrays.import_cupy()
    nbytes = min(2**30, cupy.cuda.Device().mem_info[0] // 4)
    source, target = (cupy.zeros(nbytes // 8, cupy.int64) for _ in range(2))
    # A memory copy inside of a graph runs on a copy engine, which is slower than the SMs.
    return float(2 * nbytes / (timing.replayed([lambda: cupy.negative(source, out=target)], sampling).us * 1e-6))
