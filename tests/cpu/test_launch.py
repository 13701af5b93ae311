"""The launch that lets kernels overlap, without a GPU: what the driver is asked for."""

import ctypes
import sys
import threading
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from cuda.bindings import driver

from cuattn import _dispatch, _jit, _merge, _plan

CONFIG = _plan.merge_config(_plan.Dtype.FP16, _plan.Dtype.FP16, 128, _plan.Parts.LSE, 2)


@pytest.fixture
def launches(monkeypatch):
    """What cuLaunchKernelEx got; it fails for the function 0."""
    seen = []
    streams = threading.local()

    def launch(config, function, params, extra):
        if int(function) == 0:
            return (driver.CUresult.CUDA_ERROR_INVALID_VALUE,)
        (attribute,) = config.attrs
        address = ctypes.cast(params, ctypes.POINTER(ctypes.c_void_p))[0]
        seen.append({
            "function": int(function),
            "grid": (config.gridDimX, config.gridDimY, config.gridDimZ),
            "block": (config.blockDimX, config.blockDimY, config.blockDimZ),
            "smem": config.sharedMemBytes,
            "stream": int(config.hStream),
            "attributes": config.numAttrs,
            "id": attribute.id,
            "allowed": attribute.value.programmaticStreamSerializationAllowed,
            "params": ctypes.string_at(address, 24),
            "extra": extra,
        })  # fmt: skip
        return (driver.CUresult.CUDA_SUCCESS,)

    cuda = ModuleType("cupy.cuda")
    cuda.get_current_stream = lambda: SimpleNamespace(ptr=getattr(streams, "ptr", 77))
    contexts = []
    cuda.runtime = SimpleNamespace(getDevice=lambda: 5, setDevice=contexts.append)
    monkeypatch.setitem(sys.modules, "cupy", ModuleType("cupy"))
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    monkeypatch.setattr(driver, "cuLaunchKernelEx", launch)
    monkeypatch.setattr(_jit, "_thread", threading.local())
    return SimpleNamespace(seen=seen, streams=streams, contexts=contexts)


def test_the_driver_gets_grid_block_stream_memory_and_parameters(launches):
    params = np.arange(3, dtype=np.int64)
    _jit._OverlappingLaunch(1234, CONFIG, (5, 6, 7), (128, 1, 1), params)()
    launches.streams.ptr = 78
    _jit._OverlappingLaunch(1234, CONFIG, (1, 1, 1), (64, 2, 1), params + 1)()
    first, second = launches.seen
    assert first == {
        "function": 1234,
        "grid": (5, 6, 7),
        "block": (128, 1, 1),
        "smem": CONFIG.smem_bytes,
        "stream": 77,
        "attributes": 1,
        "id": driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
        "allowed": 1,
        "params": params.tobytes(),
        "extra": 0,
    }
    changed = {"grid": (1, 1, 1), "block": (64, 2, 1), "stream": 78, "params": (params + 1).tobytes()}
    assert second == first | changed


def test_a_bound_launch_passes_what_its_parameters_are_then_on_the_stream_of_then(launches):
    params = np.arange(3, dtype=np.int64)
    launch = _jit._OverlappingLaunch(1234, CONFIG, (1, 1, 1), (32, 1, 1), params)
    want = []
    for stream, first in ((77, 0), (77, 5), (78, 6), (77, 7)):
        launches.streams.ptr, params[0] = stream, first
        want.append((stream, params.tobytes()))
        launch()
    assert [(x["stream"], x["params"]) for x in launches.seen] == want


def test_threads_that_share_a_form_do_not_mix_their_launches(launches):
    """Each has its own arrays and stream, and the parameters are of the form."""
    made = _dispatch.StandIns(("out_partial", "lse_partial", "out", "lse"), 0)
    parts = made.contiguous("out_partial", (2, 1, 3, 128), np.float16)
    lse_parts, out = made.contiguous("lse_partial", (2, 1, 3), np.float32), made.contiguous("out", (1, 3, 128), "f2")
    params = _merge.params_of(parts, lse_parts, out, None)
    kernel = SimpleNamespace(bind=lambda *args: _jit._OverlappingLaunch(1234, CONFIG, *args))
    shared = _dispatch.Launches(made, [_dispatch.Launch(kernel, (1, 1, 1), (32, 1, 1), params)])

    def work(number):
        launches.streams.ptr = number
        for _ in range(200):
            shared.run([0, number, number + 1, number + 2, 0])

    threads = [threading.Thread(target=work, args=(number,)) for number in (10, 20, 30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(launches.seen) == 600
    # Each thread made the context of its device its own, once.
    assert launches.contexts == [5, 5, 5]
    for x in launches.seen:
        number = x["stream"]
        assert x["params"] == np.array([number, number + 1, number + 2], np.uint64).tobytes()


@pytest.mark.usefixtures("launches")
def test_a_launch_that_fails_says_what_failed():
    launch = _jit._OverlappingLaunch(0, CONFIG, (1, 2, 3), (32, 1, 1), np.zeros(3, np.int64))
    with pytest.raises(RuntimeError, match=r"cannot launch merge\.cu .*grid \(1, 2, 3\).*CUDA_ERROR_INVALID_VALUE"):
        launch()


@pytest.mark.parametrize(("arch", "number"), [("sm_80", 80), ("sm_90a", 90), ("sm_100f", 100), ("sm_120", 120)])
def test_the_number_of_an_architecture(arch, number):
    assert _jit._number_of(arch) == number
