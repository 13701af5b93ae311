"""Calls of prefill on a GPU: repeats, streams, threads, devices, graphs, memory, and bad input."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier
from typing import Any

import cupy
import ml_dtypes
import numpy as np
import pytest
from gpu.helpers import (
    assert_same_bits,
    busy_gpu,
    call_prefill,
    launch_prefill,
    nans,
    occupy,
    on_device,
    planes,
    poison,
    prefill,
    to_device,
)
from gpu.prefill_cases import (
    CODES,
    DENSE,
    FORMATS,
    MIXED,
    PAGED,
    RAW,
    all_layouts,
    of,
)
from strategies import PrefillProblem
from tolerance import assert_prefill, assert_prefill_call

import cuattn


@pytest.mark.parametrize(
    ("formats", "dims", "group"),
    [(RAW, (64, 64), 8), (RAW, (128, 128), 12), (RAW, (512, 512), 3), (FORMATS[0], (128, 128), 6),
     (FORMATS[1], (64, 64), 1), (FORMATS[2], (256, 256), 4)],
    ids=str,
)  # fmt: skip
def test_20_calls_on_a_busy_gpu_give_the_same_bits(formats: tuple[str, str], dims: tuple[int, int], group: int) -> None:
    problem = of("bfloat16", formats, dims, seqlens=MIXED, group=group, causal=True, kv_layout="paged")
    arrays, options = tuple(map(to_device, problem.arrays())), on_device(problem.options())
    first = call_prefill(arrays, options)
    assert_prefill(problem, *first)
    with busy_gpu():
        results = [launch_prefill(arrays, options) for _ in range(20)]
    for i, result in enumerate(results):
        assert_same_bits(tuple(map(cupy.asnumpy, result)), first, f"repeat {i} of {problem}")


@all_layouts
def test_prefill_runs_in_order_in_the_current_stream(problem: PrefillProblem) -> None:
    """The inputs are unusable until late in the stream, and nothing but the stream says when they are there."""
    host, options = problem.arrays(), problem.options()
    want = call_prefill(host, options)
    options = on_device(options)
    ready, late = (tuple(map(to_device, host)) for _ in range(2))
    for x in planes(late):
        x.view(cupy.uint8).fill(0xFF)
    lengths = {name: options[name] for name in ("kv_len", "cu_seqlens_q") if name in options}
    late_lengths = {name: cupy.zeros_like(x) for name, x in lengths.items()}
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        out = cupy.empty(want[0].shape, want[0].dtype)
        poison(out)
        occupy(rounds=300)
        for x, y in zip(planes(late), planes(ready), strict=True):
            x.view(cupy.uint8)[...] = y.view(cupy.uint8)
        for name, x in lengths.items():
            late_lengths[name][...] = x
        got, lse = cuattn.prefill(*late, **options | late_lengths, return_lse=True, out=out)
        copies = got.copy(), lse.copy()
        for x in planes(late):
            x.view(cupy.uint8).fill(0xFF)
        poison(got)
    stream.synchronize()
    assert_same_bits(tuple(map(cupy.asnumpy, copies)), want)


def test_threads_with_streams_of_their_own_do_not_disturb_each_other() -> None:
    problems = (PAGED, DENSE, CODES, replace(DENSE, seed=99, seqlens=((33, 300),)))
    wants = [prefill(problem) for problem in problems]
    barrier = Barrier(len(problems))

    def work(problem: PrefillProblem) -> list[tuple[np.ndarray, ...]]:
        with cupy.cuda.Stream(non_blocking=True):
            barrier.wait()
            return [prefill(problem) for _ in range(10)]

    with ThreadPoolExecutor(len(problems)) as pool:
        for results, want in zip(pool.map(work, problems), wants, strict=True):
            for result in results:
                assert_same_bits(result, want)


@all_layouts
def test_prefill_runs_on_the_device_of_its_arrays(problem: PrefillProblem) -> None:
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip(reason="needs two GPUs")
    with cupy.cuda.Device(1):
        arrays, options = tuple(map(to_device, problem.arrays())), on_device(problem.options())
    assert cupy.cuda.Device().id == 0
    out, lse = cuattn.prefill(*arrays, **options, return_lse=True)
    assert out.device.id == lse.device.id == 1
    assert cupy.cuda.Device().id == 0
    with cupy.cuda.Device(1):
        got = cupy.asnumpy(out), cupy.asnumpy(lse)
    assert_prefill(problem, *got)


@pytest.mark.parametrize("formats", [RAW, FORMATS[0]], ids="-".join)
def test_a_captured_graph_follows_the_lengths_on_the_device(formats: tuple[str, str]) -> None:
    """Every row of every page is a token, so that any length may come."""
    shape = {"seqlens": ((200, 512),) * 3, "group": 4, "kv_layout": "paged", "page_size": 64}
    problem = of("bfloat16", formats, (128, 128), **shape, causal=True, sinks=True)
    host, options = problem.arrays(), problem.options()
    arrays, device = tuple(map(to_device, host)), on_device(options)
    launch_prefill(arrays, device)  # compiles and loads the kernel, which a capture must not do
    out = nans(host[0].shape, host[0].dtype)
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    pool = cupy.cuda.MemoryPool()  # of the graph's own
    with stream, cupy.cuda.using_allocator(pool.malloc):
        stream.begin_capture()
        _, lse = cuattn.prefill(*arrays, **device, return_lse=True, out=out)
        graph = stream.end_capture()
    for kv_len, cu_seqlens_q in (
        ((512, 512, 512), (0, 200, 400, 600)),
        ((0, 1, 300), (0, 0, 600, 600)),
        ((511, 64, 3), (0, 599, 599, 600)),
        ((65, 500, 200), (0, 1, 129, 600)),
    ):
        lengths = {"kv_len": np.array(kv_len, np.int32), "cu_seqlens_q": np.array(cu_seqlens_q, np.int32)}
        with stream:
            poison(out, lse)
            for name, x in lengths.items():
                device[name].set(x)
            graph.launch(stream)
        stream.synchronize()
        got = cupy.asnumpy(out), cupy.asnumpy(lse)
        assert_same_bits(got, call_prefill(host, options | lengths), lengths)
        assert_prefill_call(host, options | lengths, got)


@pytest.mark.parametrize("formats", [RAW, FORMATS[0]], ids="-".join)
def test_32768_tokens_take_less_than_a_hundredth_of_the_memory_of_their_scores(formats: tuple[str, str]) -> None:
    n = 32768
    rows = [cupy.random.standard_normal((1, n, 1, 64), np.float32) for _ in "qkv"]
    q, k, v = (x.astype(np.float16) for x in rows)
    if formats != RAW:
        k, v = map(cuattn.quantize, rows[1:])
    cuattn.prefill(q[:, :1], k, v)  # what is loaded once
    pool = cupy.cuda.MemoryPool()
    with cupy.cuda.using_allocator(pool.malloc):
        out, lse = cuattn.prefill(q, k, v, causal=True, return_lse=True)
        peak = pool.total_bytes()
    assert peak >= out.nbytes + lse.nbytes
    assert peak < n * n * 4 / 100
    # The pool sees what is taken through CuPy; the plan says that the kernel takes nothing else but a counter.
    assert cuattn.plan_prefill(q, k, v).workspace_bytes <= np.dtype(np.int32).itemsize
    # The first token sees one key.
    if formats == RAW:
        np.testing.assert_array_equal(cupy.asnumpy(out[0, 0]), cupy.asnumpy(v[0, 0]))


@pytest.mark.parametrize(
    ("argument", "change", "words"),
    [
        ("q", lambda x: x.astype(np.float32), ("k", "float32", "float16")),
        ("k", lambda x: x.astype(ml_dtypes.bfloat16), ("k", "bfloat16", "float16")),
        ("v", lambda x: x[:, :, :1], ("v", "(2, 20, 2, 64)", "(2, 20, 1, 64)")),
        ("q", lambda _: cupy.zeros((2, 9, 4, 65), np.float16)[..., 1:], ("q", "16 bytes")),
        ("k", lambda _: cupy.zeros((2, 20, 2, 128), np.float16)[..., ::2], ("k", "contiguous")),
        ("v", cupy.asnumpy, ("v", "cpu", "cuda:0")),
        ("kv_len", lambda _: [3, 21], ("kv_len[1]", "21", "20")),
        ("cu_seqlens_k", lambda _: [0, 1], ("k", "cu_seqlens_k")),
        ("page_table", lambda _: cupy.zeros((3, 3), np.int32), ("page_table",)),
        ("sinks", lambda _: cupy.zeros(3, np.float32), ("sinks", "(3,)", "(4,)")),
        ("out", lambda x: x[:, :, :, :32], ("out", "(2, 9, 4, 32)", "(2, 9, 4, 64)")),
        ("out", lambda x: cupy.broadcast_to(x[:1], x.shape), ("out",)),
    ],
)
def test_wrong_gpu_arrays_are_named_and_nothing_is_written(
    argument: str, change: Callable[[Any], Any], words: tuple[str, ...]
) -> None:
    arguments: dict[str, Any] = {
        "q": cupy.zeros((2, 9, 4, 64), np.float16),
        "k": cupy.zeros((2, 20, 2, 64), np.float16),
        "v": cupy.zeros((2, 20, 2, 64), np.float16),
        "kv_len": cupy.asarray(np.array([3, 20], np.int32)),
        "out": cupy.full((2, 9, 4, 64), 77, np.float16),
    }
    out = arguments["out"]
    arguments[argument] = change(arguments.get(argument))
    arrays = [arguments.pop(name) for name in "qkv"]
    with pytest.raises((TypeError, ValueError)) as caught:
        cuattn.prefill(*arrays, **arguments)
    assert not [word for word in words if word not in str(caught.value)], str(caught.value)
    assert (out == 77).all()
