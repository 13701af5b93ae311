"""The kernels of the CPU harness on a GPU: the same cases, so that what the harness calls right is right."""

import ctypes
from functools import cache

import cupy
import numpy as np
import pytest
from simt import cases, harness, numpy_cases

from cuattn import _nvrtc

CU_TENSOR_MAP_DATA_TYPE_UINT16 = 1
CU_TENSOR_MAP_SWIZZLE = {0: 0, 32: 1, 64: 2, 128: 3}


class Gpu:
    """The backend of the current device."""

    def __init__(self, module):
        self.module = module

    def upload(self, array):
        return cupy.asarray(array.view(np.uint16) if array.dtype == cases.BF16 else array)

    def address(self, array):
        return array.data.ptr

    def tensor_map(self, array, box, swizzle):
        """Encode a map of 2-byte elements; the driver wants it at a multiple of 128 bytes."""
        rank = array.ndim
        raw = ctypes.create_string_buffer(256)
        address = ctypes.addressof(raw) + 127 & ~127
        error = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled(
            ctypes.c_void_p(address),
            ctypes.c_int(CU_TENSOR_MAP_DATA_TYPE_UINT16),
            ctypes.c_uint32(rank),
            ctypes.c_void_p(array.data.ptr),
            (ctypes.c_uint64 * rank)(*array.shape[::-1]),
            (ctypes.c_uint64 * rank)(*array.strides[-2::-1]),
            (ctypes.c_uint32 * rank)(*box),
            (ctypes.c_uint32 * rank)(*[1] * rank),
            *(ctypes.c_int(x) for x in (0, CU_TENSOR_MAP_SWIZZLE[swizzle], 0, 0)),  # interleave, L2, fill with zeros
        )
        assert error == 0, f"cuTensorMapEncodeTiled: error {error} for box {box}, swizzle {swizzle}"
        return ctypes.string_at(address, 128)

    def launch(self, case, args):
        function = self.module.get_function(case.kernel)
        if case.smem > 48 * 1024:
            function.max_dynamic_shared_size_bytes = case.smem
        args = tuple(np.frombuffer(a, np.dtype((np.void, len(a)))) if isinstance(a, bytes) else a for a in args)
        function((case.grid,), (case.block,), args, shared_mem=case.smem)
        cupy.cuda.Device().synchronize()

    def download(self, array):
        return array.get()


@pytest.fixture(scope="module")
def gpu(tmp_path_factory):
    capability = cupy.cuda.Device().compute_capability
    folder = tmp_path_factory.mktemp("cubins")

    @cache
    def load(source):
        s = cases.SOURCES[source]
        if s.arch == "sm_90a" and capability != "90":
            pytest.skip(reason=f"TMA and wgmma need compute capability 9.0, the device has {capability}")
        arch = "sm_90a" if capability == "90" else f"sm_{capability}"
        path = folder / f"{source}.cubin"
        path.write_bytes(_nvrtc.compile_cubin(s.text, name=s.file, arch=arch, include=harness.CUDA_SRC).cubin)
        return Gpu(cupy.RawModule(path=str(path)))

    return load


@pytest.mark.parametrize("source", cases.SOURCES)
def test_a_gpu_gives_what_the_harness_gives(gpu, source):
    backend = gpu(source)
    for case in numpy_cases.all_cases():
        if case.source == source:
            cases.check(case, cases.run(case, backend))
