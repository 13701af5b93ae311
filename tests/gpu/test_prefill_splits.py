"""prefill on a GPU where few query tokens see many keys, which are cut into splits and merged."""

from typing import Any

import cupy
import numpy as np
import pytest
from gpu.helpers import (
    assert_same_bits,
    busy_gpu,
    call_prefill,
    launch_prefill,
    nans,
    on_device,
    poison,
    to_device,
)
from gpu.prefill_cases import FLOATS, FORMATS, RAW, changed, of
from strategies import PrefillProblem
from tolerance import assert_prefill, assert_prefill_call

import cuattn

POOL_UNIT = 512  # bytes of which CuPy's pool makes every allocation
KINDS = (("float16", RAW), ("bfloat16", RAW), ("float32", FLOATS), ("bfloat16", FORMATS[0]), ("float16", FORMATS[1]))
every_kind = pytest.mark.parametrize(("dtype", "formats"), KINDS, ids=str)


def chunk(dtype: str, formats: tuple[str, str], seqlens: Any, **fields: Any) -> PrefillProblem:
    shape = {"seqlens": seqlens, "num_kv_heads": 1, "group": 2, "q_layout": "dense", "causal": True}
    return of(dtype, formats, (128, 128), **{**shape, "kv_layout": "padded", "sinks": True, **fields})


def plan_of(arrays: tuple[Any, ...], options: dict[str, Any]) -> cuattn.PrefillPlan | cuattn.TiledPrefillPlan:
    """Return the plan of a call."""
    return cuattn.plan_prefill(*arrays, **options)


@pytest.mark.parametrize("kv_layout", ["dense", "padded", "paged"])
@pytest.mark.parametrize(("tokens", "keys"), [(1, 32768), (40, 16384), (512, 8192)])
@every_kind
def test_chunks_against_many_keys_obey_the_error_law_and_repeat(
    dtype: str, formats: tuple[str, str], tokens: int, keys: int, kv_layout: str
) -> None:
    """Beside the long sequence one that leaves some of its splits empty, if lengths may differ."""
    seqlens = ((tokens, keys),) if kv_layout == "dense" else ((tokens, keys), (tokens, keys // 5))
    group = 1 if tokens == 512 else 4
    problem = chunk(dtype, formats, seqlens, kv_layout=kv_layout, page_size=64, group=group)
    arrays, options = tuple(map(to_device, problem.arrays())), on_device(problem.options())
    assert plan_of(arrays, options).num_splits > 1
    first = call_prefill(arrays, options)
    assert_prefill(problem, *first)
    with busy_gpu():
        results = [launch_prefill(arrays, options) for _ in range(5)]
    for i, result in enumerate(results):
        assert_same_bits(tuple(map(cupy.asnumpy, result)), first, f"repeat {i} of {problem}")


@pytest.mark.parametrize("fields", [{"window": (3000, None)}, {"softcap": 5.0, "causal": False}, {"values": "rising"}],
                         ids=str)  # fmt: skip
@every_kind
def test_masks_and_scores_of_splits_obey_the_error_law(
    dtype: str, formats: tuple[str, str], fields: dict[str, Any]
) -> None:
    """More query tokens than keys, no key, and more keys."""
    problem = chunk(dtype, formats, ((100, 70), (100, 0), (100, 5000)), **fields)
    arrays, options = tuple(map(to_device, problem.arrays())), on_device(problem.options())
    assert plan_of(arrays, options).num_splits > 1
    assert_prefill(problem, *call_prefill(arrays, options))


@pytest.mark.parametrize("dims", [(64, 64), (192, 128), (256, 256), (512, 512)], ids=str)
@pytest.mark.parametrize("formats", [RAW, FLOATS], ids="-".join)
def test_splits_of_every_row_length_obey_the_error_law(formats: tuple[str, str], dims: tuple[int, int]) -> None:
    dtype = "float32" if formats is FLOATS else "bfloat16"
    problem = of(dtype, formats, dims, seqlens=((70, 4000), (70, 1100)), q_layout="dense", kv_layout="paged")
    arrays, options = tuple(map(to_device, problem.arrays())), on_device(problem.options())
    assert plan_of(arrays, options).num_splits > 1
    assert_prefill(problem, *call_prefill(arrays, options))


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_value_that_is_not_finite_is_seen_by_exactly_the_rows_that_see_it(dtype: str, value: float) -> None:
    """Whichever split its key is of: the last 200 are the tokens' own."""
    problem = chunk(dtype, FLOATS if dtype == "float32" else RAW, ((200, 5000),), group=3, num_kv_heads=2)
    q, k, v = problem.arrays()
    for key in (0, 2600, 4800, 4850, 4999):
        spoiled = v.copy()
        spoiled[0, key, 1, 77] = value
        arrays = tuple(map(to_device, (q, k, spoiled)))
        assert plan_of(arrays, on_device(problem.options())).num_splits > 1
        out, lse = call_prefill(arrays, problem.options())
        sees = np.zeros(out.shape, bool)
        sees[0, max(0, key - 4800) :, 3:, 77] = True
        np.testing.assert_array_equal(~np.isfinite(out.astype(np.float32)), sees)
        assert np.isfinite(lse).all()
        assert_prefill_call((q, k, spoiled), problem.options(), (out, lse))


def test_a_norm_that_is_not_finite_is_seen_by_the_rows_that_see_its_token() -> None:
    problem = chunk("bfloat16", FORMATS[0], ((200, 5000),))
    q, k, v = problem.arrays()
    for key in (0, 2600, 4850):
        norms = v.norms.copy()
        norms[0, key] = np.nan
        arrays = q, k, changed(v, norms=norms)
        out, lse = call_prefill(arrays, problem.options())
        sees = np.zeros(out.shape, bool)
        sees[0, max(0, key - 4800) :] = True
        np.testing.assert_array_equal(np.isnan(out.astype(np.float32)), sees)
        assert_prefill_call(arrays, problem.options(), (out, lse))


@pytest.mark.parametrize("kv_layout", ["dense", "paged"])
@every_kind
def test_a_captured_graph_follows_lengths_that_grow(dtype: str, formats: tuple[str, str], kv_layout: str) -> None:
    """As a cache fills: splits are those of its capacity, and most of them are empty at first."""
    problem = chunk(dtype, formats, ((40, 8192),) * 2, kv_layout=kv_layout, page_size=64)
    host, options = problem.arrays(), problem.options()
    options["kv_len"] = np.full(2, 8192, np.int32)
    arrays, device = tuple(map(to_device, host)), on_device(options)
    assert plan_of(arrays, device).num_splits > 1
    launch_prefill(arrays, device)  # compiles and loads the kernels, which a capture must not do
    out = nans(host[0].shape, host[0].dtype)
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    pool = cupy.cuda.MemoryPool()  # of the graph's own, and of its parts
    with stream, cupy.cuda.using_allocator(pool.malloc):
        stream.begin_capture()
        _, lse = cuattn.prefill(*arrays, **device, return_lse=True, out=out)
        graph = stream.end_capture()
    for kv_len in ((0, 1), (40, 700), (1100, 1064), (2500, 8191), (8192, 5000), (17, 8192)):
        lengths = {"kv_len": np.array(kv_len, np.int32)}
        with stream:
            poison(out, lse)
            device["kv_len"].set(lengths["kv_len"])
            graph.launch(stream)
        stream.synchronize()
        got = cupy.asnumpy(out), cupy.asnumpy(lse)
        assert_same_bits(got, call_prefill(host, options | lengths), lengths)
        assert_prefill_call(host, options | lengths, got)


@pytest.mark.parametrize("tokens", [1, 40, 512])
@every_kind
def test_splits_take_as_much_memory_as_the_plan_says(dtype: str, formats: tuple[str, str], tokens: int) -> None:
    problem = chunk(dtype, formats, ((tokens, 8192),), kv_layout="dense", group=3, sinks=False)
    arrays, options = tuple(map(to_device, problem.arrays())), on_device(problem.options())
    plan = plan_of(arrays, options)
    assert plan.num_splits > 1
    out, _ = launch_prefill(arrays, options)  # what is loaded once
    pool = cupy.cuda.MemoryPool()
    with cupy.cuda.using_allocator(pool.malloc):
        cuattn.prefill(*arrays, **options, out=out)
        peak = pool.total_bytes()
    parts = 4 * int(np.prod(plan.out_partial_shape))
    states = parts // problem.dims[1] * 2
    assert plan.workspace_bytes == parts + states
    assert peak == sum(-(-n // POOL_UNIT) * POOL_UNIT for n in (parts, states))
