"""append on a GPU against its definition."""

from dataclasses import replace
from typing import Any

import cupy
import numpy as np
import pytest
from gpu.helpers import busy_gpu, occupy
from hypothesis import given
from strategies import APPEND_CHOICES, AppendProblem, append_problems
from tolerance import assert_append

import cuattn

PROBLEM = AppendProblem(
    kv_len=(40, 3, 19), seqlen_new=21, num_kv_heads=2, head_dim=128, k_format="raw16", v_format="tbq4",
    in_dtype="bfloat16", dtype="bfloat16", page_size=5, capacity=33, means=True, num_sink=4, num_recent=6, views=True,
)  # fmt: skip
every_choice = pytest.mark.parametrize("choice", APPEND_CHOICES, ids=str)


def of(choice: tuple[Any, ...], problem: AppendProblem = PROBLEM) -> AppendProblem:
    names = ("k_format", "v_format", "in_dtype", "dtype", "head_dim")
    return replace(problem, **dict(zip(names, choice, strict=True)))


def to_device(bases: dict[str, np.ndarray]) -> dict[str, cupy.ndarray]:
    return {name: cupy.asarray(x) for name, x in bases.items()}


def to_host(bases: dict[str, cupy.ndarray]) -> dict[str, np.ndarray]:
    return {name: cupy.asnumpy(x) for name, x in bases.items()}


def launch(problem: AppendProblem, bases: dict[str, cupy.ndarray], kv_len: Any = None) -> None:
    (*arrays, lengths), options = problem.arguments(bases)
    assert cuattn.append(*arrays, lengths if kv_len is None else kv_len, **options) is None


def run(problem: AppendProblem, kv_len: Any = None) -> dict[str, np.ndarray]:
    bases = to_device(problem.bases())
    launch(problem, bases, kv_len)
    return to_host(bases)


@given(problem=append_problems())
def test_tokens_go_where_the_reference_puts_them_and_nothing_else_changes(problem: AppendProblem) -> None:
    assert_append(problem, run(problem))


@given(problem=append_problems(on_host=True))
def test_lengths_on_the_host_are_copied(problem: AppendProblem) -> None:
    assert_append(problem, run(problem, list(problem.kv_len)))


@every_choice
def test_many_rows_of_every_choice(choice: tuple[Any, ...]) -> None:
    """More than the GPU holds at once."""
    problem = AppendProblem(kv_len=(3000, 2999, 1, 0), seqlen_new=1500, num_kv_heads=4, page_size=64, capacity=3000,
                            num_sink=16, num_recent=100, means=True)  # fmt: skip
    problem = of(choice, problem)
    assert_append(problem, run(problem))


def test_a_prompt_of_any_length_fills_a_dense_cache() -> None:
    problem = of(("tbq4", "raw16", "float16", "float16", 64), AppendProblem(
        kv_len=(20_000,), seqlen_new=20_000, num_kv_heads=1, capacity=20_000, num_recent=128, num_sink=4
    ))  # fmt: skip
    assert_append(problem, run(problem))


def test_bits_of_the_same_dtype_are_copied() -> None:
    """All 65,536 of them, NaN with payloads included."""
    bits = cupy.arange(2**16, dtype=np.uint16).reshape(1, 32, 4, 512)
    new = bits.view(np.float16)
    caches = [cupy.zeros_like(new) for _ in "kv"]
    cuattn.append(new, new, *caches, cupy.array([32], np.int32))
    assert all((x.view(np.uint16) == bits).all() for x in caches)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_values_are_rounded_to_nearest_even(dtype: str) -> None:
    values = np.array([1 + 2.0**-11, 1 + 3 * 2.0**-11, 1 + 2.0**-8, 1 + 3 * 2.0**-8, 65504, 65519.9, 65520, 3e38, 1e-7,
                       2.0**-25, 3 * 2.0**-26, -0.0, np.inf, -np.inf], np.float32)  # fmt: skip
    problem = AppendProblem(kv_len=(1,), in_dtype="float32", dtype=dtype, num_sink=1, num_recent=1)
    bases = problem.bases()
    bases["k_new"][...] = np.resize(values, 64)
    with np.errstate(over="ignore"):
        want = np.resize(values, 64).astype(bases["k_cache"].dtype).tobytes()
    device = to_device(bases)
    launch(problem, device)
    got = to_host(device)
    assert all(got[name][0, 0, 0].tobytes() == want for name in ("k_cache", "k_sink", "k_recent"))


@every_choice
def test_it_runs_in_order_in_the_current_stream(choice: tuple[Any, ...]) -> None:
    """The new rows are there late in the stream, and nothing but the stream says when."""
    problem = of(choice)
    want = run(problem)
    ready, late = to_device(problem.bases()), to_device(problem.bases())
    late["k_new"].view(cupy.uint8).fill(0xFF)
    late["kv_len"].fill(0)
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        occupy(rounds=300)
        for name in ("k_new", "kv_len"):
            late[name].view(cupy.uint8)[...] = ready[name].view(cupy.uint8)
        launch(problem, late)
        copies = {name: x.copy() for name, x in late.items()}
    stream.synchronize()
    for name, x in to_host(copies).items():
        assert x.tobytes() == want[name].tobytes(), name


def test_20_calls_on_a_busy_gpu_write_the_same_bytes() -> None:
    problem = of(("tbq4", "tbq4", "bfloat16", "bfloat16", 256))
    want = run(problem)
    with busy_gpu():
        results = [to_device(problem.bases()) for _ in range(20)]
        for bases in results:
            launch(problem, bases)
    for bases in results:
        assert {name: x.tobytes() for name, x in to_host(bases).items()} == {n: x.tobytes() for n, x in want.items()}


@every_choice
def test_a_replayed_graph_follows_lengths_that_grow_on_the_device(choice: tuple[Any, ...]) -> None:
    """One token a replay, in pages; then the caches are those of one call with all tokens."""
    steps = 23
    problem = of(choice, replace(PROBLEM, kv_len=(30, 9, 23), seqlen_new=steps, views=False, scale=1.0))
    bases = to_device(problem.bases())
    (k_new, v_new, *caches, kv_len), options = problem.arguments(bases)
    k_token, v_token = (cupy.empty((len(x), *x.shape[2:]), x.dtype) for x in (k_new, v_new))
    kv_len -= steps
    final = kv_len.copy()
    cuattn.append(k_token, v_token, *caches, cupy.zeros_like(kv_len), **options)  # compiles, and writes nothing
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        cuattn.append(k_token, v_token, *caches, kv_len, **options)
        graph = stream.end_capture()
        for i in range(steps):
            kv_len += 1
            for token, new in ((k_token, k_new), (v_token, v_new)):
                token.view(cupy.uint8)[...] = new.view(cupy.uint8)[:, i]
            graph.launch(stream)
    stream.synchronize()
    assert (kv_len == final + steps).all()
    assert_append(problem, to_host(bases))


def test_what_is_appended_is_what_decode_sees() -> None:
    rng = np.random.default_rng(0)
    q = cupy.asarray(rng.standard_normal((2, 8, 128)).astype(np.float16))
    k_new, v_new = (cupy.asarray(rng.standard_normal((2, 70, 2, 128)).astype(np.float16)) for _ in "kv")
    k_cache, v_cache = (cupy.full((12, 16, 2, 128), np.nan, np.float16) for _ in "kv")
    table = cupy.asarray(rng.permutation(12)[:10].reshape(2, 5).astype(np.int32))
    kv_len = cupy.array([70, 70], np.int32)
    cuattn.append(k_new, v_new, k_cache, v_cache, kv_len, page_table=table)
    got = cuattn.decode(q, k_cache, v_cache, kv_len, page_table=table, num_splits=1)
    assert (got == cuattn.decode(q, k_new, v_new, kv_len, num_splits=1)).all()


def test_clamped_norms_are_counted_where_the_counter_is_on_the_device() -> None:
    new = cupy.full((3, 1, 128), 6000, np.float16)
    for counter in (cupy.array([2], np.int32), np.zeros(1, np.int32), 0):
        caches = [replace(cuattn.quantize(cupy.zeros((3, 2, 1, 128), np.float16)), clamped=counter) for _ in "kv"]
        cuattn.append(new, new, *caches, 1)
        if isinstance(counter, cupy.ndarray):
            assert int(counter[0]) == 2 + 6
        else:
            assert int(np.max(counter)) == 0


def test_arrays_that_the_kernel_cannot_address_are_refused() -> None:
    new = cupy.ones((1, 1, 64), np.float16)
    raw = cupy.zeros((1, 4, 1, 64), np.float16)
    norms = cupy.zeros((1, 4, 1, 1), np.float16)
    codes = cupy.zeros(4 * 32 + 8, np.uint8)[8:].reshape(1, 4, 1, 32)
    with pytest.raises(ValueError, match=r"k_cache\.codes must have rows that start at multiples of 16 bytes"):
        cuattn.append(new, new, cuattn.Tbq4Array(codes, norms), raw, 1)
    with pytest.raises(ValueError, match="v_cache is on cpu, k_new on cuda:0"):
        cuattn.append(new, new, raw, raw.get(), 1)
    with pytest.raises(TypeError, match="k_new must be float16 or bfloat16 or float32, got float64"):
        cuattn.append(new.astype(float), new.astype(float), raw, raw.copy(), 1)
    with pytest.raises(ValueError, match="kv_len is on cuda:0, k_new on cpu"):
        cuattn.append(new.get(), new.get(), raw.get(), raw.get(), cupy.ones(1, np.int32))
