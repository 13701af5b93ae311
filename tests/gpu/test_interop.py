"""Arrays of other libraries, by DLPack or by the CUDA array interface."""

from typing import Any

import cupy
import numpy as np
import pytest
from gpu.helpers import assert_same_bits, decode, occupy, to_device
from strategies import DTYPES, Problem
from tolerance import assert_decode

import cuattn

PROBLEM = Problem(kv_len=(0, 1, 40, 333), num_kv_heads=2, group=3, head_dim=128, page_size=16, sinks=True, seed=1)
BFLOAT16 = Problem(kv_len=(5, 0, 300), seqlen_q=3, num_kv_heads=2, group=4, dtype="bfloat16", seed=2)


class CudaArrayInterface:
    """An array that offers nothing but the CUDA array interface."""

    def __init__(self, array: cupy.ndarray) -> None:
        self.array = array

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return self.array.__cuda_array_interface__


class Dlpack:
    """An array that offers nothing but DLPack."""

    def __init__(self, array: cupy.ndarray) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()


def on_gpu(array: cupy.ndarray) -> bool:
    return type(array) is cupy.ndarray


def torch_on_gpu() -> Any:
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    if not torch.cuda.is_available():
        pytest.skip(reason="needs PyTorch with CUDA")
    return torch


def to_torch(x: Any) -> Any:
    """Copy a NumPy array to a PyTorch tensor on the GPU, bfloat16 through its bits."""
    torch = torch_on_gpu()
    if not isinstance(x, np.ndarray):
        return x
    if x.dtype == DTYPES["bfloat16"]:
        return torch.from_numpy(x.view(np.int16)).cuda().view(torch.bfloat16)
    return torch.from_numpy(x).cuda()


def of_torch(x: Any) -> np.ndarray:
    torch = torch_on_gpu()
    x = x.cpu()
    return x.view(torch.int16).numpy().view(DTYPES["bfloat16"]) if x.dtype == torch.bfloat16 else x.numpy()


def to_jax(x: Any) -> Any:
    jax = pytest.importorskip("jax", reason="needs JAX")
    try:
        device = jax.devices("gpu")[0]
    except RuntimeError:
        pytest.skip(reason="needs JAX with CUDA")
    return jax.device_put(x, device) if isinstance(x, np.ndarray) else x


def to_numba(x: Any) -> Any:
    cuda = pytest.importorskip("numba.cuda", reason="needs numba-cuda")
    if not cuda.is_available():
        pytest.skip(reason="needs numba-cuda with a CUDA device")
    return cuda.to_device(x) if isinstance(x, np.ndarray) else x


def wrap(kind: type) -> Any:
    return lambda x: kind(to_device(x)) if isinstance(x, np.ndarray) else x


PRODUCERS = {
    "an object with the CUDA array interface": wrap(CudaArrayInterface),
    "an object with DLPack": wrap(Dlpack),
    "PyTorch": to_torch,
    "JAX": to_jax,
    "Numba": to_numba,
}


@pytest.mark.parametrize("producer", PRODUCERS)
def test_gpu_arrays_of_others_are_decoded_and_come_back_as_cupy_arrays(producer: str) -> None:
    """All of them: q, the caches, lengths, the table of pages and the sinks."""
    convert = PRODUCERS[producer]
    arrays = [convert(x) for x in PROBLEM.arrays()]
    options = {name: convert(x) for name, x in PROBLEM.options().items()}
    out, lse = cuattn.decode(*arrays, **options, return_lse=True)
    assert on_gpu(out)
    assert on_gpu(lse)
    got = cupy.asnumpy(out), cupy.asnumpy(lse)
    assert_decode(PROBLEM, *got)
    assert_same_bits(got, decode(PROBLEM))


@pytest.mark.parametrize("producer", ["an object with DLPack", "PyTorch", "JAX"])
def test_bfloat16_comes_through_dlpack(producer: str) -> None:
    convert = PRODUCERS[producer]
    out, lse = cuattn.decode(*map(convert, BFLOAT16.arrays()), return_lse=True)
    assert on_gpu(out)
    assert out.dtype == DTYPES["bfloat16"]
    assert_same_bits((cupy.asnumpy(out), cupy.asnumpy(lse)), decode(BFLOAT16))


@pytest.mark.parametrize("producer", PRODUCERS)
def test_parts_of_others_are_merged(producer: str) -> None:
    rng = np.random.default_rng(0)
    parts = rng.standard_normal((4, 2, 3, 64)).astype(np.float32), rng.standard_normal((4, 2, 3)).astype(np.float32)
    want = tuple(map(cupy.asnumpy, cuattn.merge(*map(to_device, parts))))
    got = cuattn.merge(*map(PRODUCERS[producer], parts))
    assert all(map(on_gpu, got))
    assert_same_bits(tuple(map(cupy.asnumpy, got)), want)


@pytest.mark.parametrize("kind", [CudaArrayInterface, Dlpack])
def test_an_out_of_others_is_filled_in_place(kind: type) -> None:
    out = to_device(np.full(PROBLEM.arrays()[0].shape, np.nan, np.float16))
    arrays, options = PROBLEM.arrays(), PROBLEM.options()
    options = {name: to_device(x) for name, x in options.items()}
    got, lse = cuattn.decode(*map(to_device, arrays), **options, return_lse=True, out=kind(out))
    want = decode(PROBLEM)
    assert_same_bits((cupy.asnumpy(out), cupy.asnumpy(lse)), want)
    result = got if on_gpu(got) else got.array
    assert result.data.ptr == out.data.ptr


def test_producers_may_be_mixed() -> None:
    q, k_cache, v_cache, kv_len = map(to_device, PROBLEM.arrays())
    options = {name: to_device(x) for name, x in PROBLEM.options().items()}
    arrays = (Dlpack(q), CudaArrayInterface(k_cache), v_cache, Dlpack(kv_len))
    out, lse = cuattn.decode(*arrays, **options, return_lse=True)
    assert_same_bits((cupy.asnumpy(out), cupy.asnumpy(lse)), decode(PROBLEM))


@pytest.mark.parametrize("problem", [PROBLEM, BFLOAT16], ids=["float16", "bfloat16"])
def test_a_tensor_of_pytorch_is_filled_in_place(problem: Problem) -> None:
    torch = torch_on_gpu()
    arrays = [to_torch(x) for x in problem.arrays()]
    options = {name: to_torch(x) for name, x in problem.options().items()}
    out = torch.full_like(arrays[0], torch.nan)
    cuattn.decode(*arrays, **options, out=out)
    torch.cuda.synchronize()
    assert_decode(problem, of_torch(out))


def test_views_of_pytorch_are_read_in_place() -> None:
    torch = torch_on_gpu()
    q, k_cache, v_cache, kv_len = (to_torch(x) for x in BFLOAT16.arrays())
    fused = torch.cat([q, torch.full_like(q, torch.nan)], dim=2)
    kv = torch.stack([k_cache, v_cache], dim=3).transpose(0, 1).contiguous().transpose(0, 1)
    heads = q.shape[2]
    out, lse = cuattn.decode(fused[:, :, :heads], kv[:, :, :, 0], kv[:, :, :, 1], kv_len, return_lse=True)
    assert_same_bits((cupy.asnumpy(out), cupy.asnumpy(lse)), decode(BFLOAT16))


def test_work_of_pytorch_in_a_stream_of_its_own_comes_first() -> None:
    """DLPack makes CuPy's current stream wait for PyTorch's, without the host."""
    torch = torch_on_gpu()
    want = decode(BFLOAT16)
    ready = [to_torch(x) for x in BFLOAT16.arrays()]
    late = [torch.full_like(x, torch.nan) if x.is_floating_point() else torch.zeros_like(x) for x in ready]
    torch.cuda.synchronize()
    theirs = torch.cuda.Stream()
    with torch.cuda.stream(theirs), cupy.cuda.Stream(non_blocking=True) as ours:
        with cupy.cuda.Stream.from_external(theirs):
            occupy(rounds=300)
        for x, y in zip(late, ready, strict=True):
            x.copy_(y)
        out, lse = cuattn.decode(*late, return_lse=True)
        ours.synchronize()
        got = cupy.asnumpy(out), cupy.asnumpy(lse)
    assert_same_bits(got, want)


def test_a_tensor_of_pytorch_on_the_host_runs_there() -> None:
    torch = torch_on_gpu()
    arrays = PROBLEM.arrays()
    out = cuattn.decode(*map(torch.from_numpy, arrays), page_table=torch.from_numpy(PROBLEM.options()["page_table"]))
    want = cuattn.decode(*arrays, page_table=PROBLEM.options()["page_table"])
    assert type(out) is np.ndarray
    assert out.tobytes() == want.tobytes()


@pytest.mark.parametrize("kind", [CudaArrayInterface, Dlpack])
def test_what_is_wrong_with_an_array_of_others_is_named(kind: type) -> None:
    q, k_cache, v_cache, kv_len = map(to_device, PROBLEM.arrays())
    options = {name: to_device(x) for name, x in PROBLEM.options().items()}
    wrong = kind(cupy.zeros(k_cache.shape, np.float32))
    with pytest.raises(TypeError, match=r"k_cache.*float16.*float32"):
        cuattn.decode(q, wrong, v_cache, kv_len, **options)
    with pytest.raises(ValueError, match=r"out.*\(4, 6, 128\).*\(4, 6, 64\)"):
        cuattn.decode(q, k_cache, v_cache, kv_len, **options, out=kind(cupy.zeros((4, 6, 64), np.float16)))


@pytest.mark.parametrize("wrap", [CudaArrayInterface, Dlpack])
def test_arrays_of_others_on_a_device_that_is_not_current_are_used_where_they_lie(wrap: Any) -> None:
    """Nothing is copied to the current device, and `out` is filled in place."""
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip(reason="needs two GPUs")
    with cupy.cuda.Device(1):
        q, k_cache, v_cache, kv_len = map(cupy.asarray, PROBLEM.arrays())
        options = {n: cupy.asarray(x) if isinstance(x, np.ndarray) else x for n, x in PROBLEM.options().items()}
        out = cupy.full(q.shape, cupy.nan, q.dtype)
        cupy.cuda.Device(1).synchronize()
    wrapped = {n: wrap(x) if isinstance(x, cupy.ndarray) else x for n, x in options.items()}
    got, lse = cuattn.decode(*map(wrap, (q, k_cache, v_cache, kv_len)), **wrapped, out=wrap(out), return_lse=True)
    assert got.device.id == 1
    assert got.data.ptr == out.data.ptr
    with cupy.cuda.Device(1):
        assert_decode(PROBLEM, cupy.asnumpy(out), cupy.asnumpy(lse))
