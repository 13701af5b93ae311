"""What must not change a result of prefill on a GPU: layouts, strides, memory without a token, far addresses."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import cupy
import numpy as np
import pytest
from gpu.helpers import (
    NAN16,
    VIEWS,
    assert_same_bits,
    call_prefill,
    is_tiled,
    launch_prefill,
    nans,
    on_device,
    planes,
    prefill,
    to_device,
    viewed,
)
from gpu.prefill_cases import (
    CODES,
    DENSE,
    FORMATS,
    GIB,
    PAGE_SIZES,
    PAGED,
    RAW,
    all_layouts,
    changed,
    of,
)
from strategies import DTYPES, PrefillProblem, with_unused
from tolerance import assert_prefill

import cuattn


@pytest.mark.parametrize("formats", [RAW, *FORMATS], ids="-".join)
def test_the_layout_does_not_change_a_bit(formats: tuple[str, str]) -> None:
    """Of those that a kernel has, with one tile of keys."""
    problem = of("float16", formats, (128, 128), seqlens=((150, 260),) * 3, causal=True)
    want: dict[Any, tuple[np.ndarray, ...]] = {}
    layouts = (("ragged", 1), ("dense", 1), ("padded", 1), *(("paged", size) for size in PAGE_SIZES))
    for q_layout, (kv_layout, size) in product(("ragged", "dense"), layouts):
        other = replace(problem, q_layout=q_layout, kv_layout=kv_layout, page_size=size)
        config = cuattn.plan_prefill(*map(to_device, other.arrays()), **on_device(other.options())).config
        got = prefill(other)
        if config not in want:
            assert_prefill(other, *got)
        first = want.setdefault(config, got)
        got = tuple(x.reshape(y.shape) for x, y in zip(got, first, strict=True))
        assert_same_bits(got, first, (q_layout, kv_layout, size))


def test_ragged_keys_lie_as_ragged_queries_by_default() -> None:
    problem = replace(PAGED, seqlens=((150, 150), (0, 0), (7, 7)), kv_layout="ragged")
    assert_same_bits(prefill(problem, cu_seqlens_k=None), prefill(problem))


@pytest.mark.parametrize("formats", [RAW, FORMATS[0]], ids="-".join)
def test_a_sequence_does_not_depend_on_the_others_of_its_batch(formats: tuple[str, str]) -> None:
    shape = {"seqlens": tuple((150, n) for n in (300, 0, 33, 151)), "q_layout": "dense", "kv_layout": "paged"}
    problem = of("bfloat16", formats, (128, 128), **shape, causal=True)
    q, k, v = problem.arrays()
    options, want = problem.options(), prefill(problem)
    for order in ([0], [1], [2], [3], [2, 3, 1, 0]):
        lengths = {name: options[name][order] for name in ("kv_len", "page_table")}
        got = call_prefill((q[order], k, v), options | lengths)
        assert_same_bits(got, tuple(x[order] for x in want), order)


# What must not matter


@pytest.mark.parametrize("bits", [0x0000, 0xFFFF, 0x7FFF, 0x7C00, 0x7F80, 0xFF80, 0x7BFF], ids=hex)
@pytest.mark.parametrize("kv_layout", ["padded", "paged"])
def test_unused_bytes_of_the_caches_do_not_matter(kv_layout: str, bits: int) -> None:
    """NaN, infinities of both dtypes, and the largest float16."""
    problem = replace(PAGED, kv_layout=kv_layout)
    arrays = problem.arrays()
    want = call_prefill(arrays, problem.options())
    for cache in arrays[1:]:
        cache.view(np.uint16)[np.isnan(cache)] = bits
    assert_same_bits(call_prefill(arrays, problem.options()), want)


@pytest.mark.parametrize(("code", "norm"), [(0xFF, 0x7C00), (0xFF, 0x7E00), (0xFF, 0xFFFF), (0x80, 0x7BFF)], ids=hex)
@pytest.mark.parametrize("kv_layout", ["padded", "paged"])
@pytest.mark.parametrize("formats", FORMATS, ids="-".join)
def test_codes_and_norms_without_a_token_do_not_matter(
    formats: tuple[str, str], kv_layout: str, code: int, norm: int
) -> None:
    problem = replace(CODES, k_format=formats[0], v_format=formats[1], kv_layout=kv_layout, head_dim=256)
    q, k, v = problem.arrays()
    want, got = (
        call_prefill((q, *(with_unused(x, *unused) for x in (k, v))), problem.options())
        for unused in ((0, 0), (code, norm))
    )
    assert_same_bits(got, want)


@pytest.mark.parametrize("entry", [0, 1, -1, 10**6, 2**31 - 1, -(2**31)])
def test_unused_entries_of_the_page_table_do_not_matter(entry: int) -> None:
    table, kv_len = (PAGED.options()[name] for name in ("page_table", "kv_len"))
    used = np.arange(table.shape[1]) < -(-kv_len // PAGED.page_size)[:, None]
    assert_same_bits(prefill(PAGED, page_table=np.where(used, table, np.int32(entry))), prefill(PAGED))


@all_layouts
def test_prefill_changes_none_of_its_arguments(problem: PrefillProblem) -> None:
    arrays, options = tuple(map(to_device, problem.arrays())), on_device(problem.options())
    everything = [*planes(arrays), *(x for x in options.values() if isinstance(x, cupy.ndarray))]
    before = [cupy.asnumpy(x).tobytes() for x in everything]
    launch_prefill(arrays, options)
    assert [cupy.asnumpy(x).tobytes() for x in everything] == before


@pytest.mark.parametrize("kv_layout", ["dense", "paged"])
@pytest.mark.parametrize("formats", [RAW, FORMATS[0]], ids="-".join)
def test_lengths_on_the_device_are_limited_to_the_capacity(formats: tuple[str, str], kv_layout: str) -> None:
    """What lies beyond is NaN, and pages of NaN, so that a read of it would show."""
    shape = {"seqlens": ((50, 64),) * 4, "q_layout": "dense", "kv_layout": kv_layout, "causal": True}
    problem = of("float16", formats, (128, 128), **shape)
    arrays, options = problem.arrays(), problem.options()
    if kv_layout == "paged":
        options["page_table"] = np.ascontiguousarray(options["page_table"][:, :4])
    want = call_prefill(arrays, options | {"kv_len": np.array((64, 0, 64, 0), np.int32)})
    for lengths in ((65, -1, 2**31 - 1, -(2**31)), (2**30, -7, 10**9, 0)):
        assert_same_bits(call_prefill(arrays, options | {"kv_len": np.array(lengths, np.int32)}), want, lengths)


@pytest.mark.parametrize("form", [list, tuple, np.int64, np.uint16, np.int32], ids=lambda form: form.__name__)
@pytest.mark.parametrize("kv_layout", ["ragged", "padded", "paged"])
def test_lengths_of_the_host_equal_lengths_on_the_device(kv_layout: str, form: Callable[..., Any]) -> None:
    problem = replace(PAGED, kv_layout=kv_layout)
    want, options = prefill(problem), on_device(problem.options())
    for name, x in problem.options().items():
        if name in ("kv_len", "cu_seqlens_q", "cu_seqlens_k"):
            options[name] = form(map(int, x)) if form in (list, tuple) else x.astype(form)
    out, lse = cuattn.prefill(*map(to_device, problem.arrays()), **options, return_lse=True)
    assert_same_bits((cupy.asnumpy(out), cupy.asnumpy(lse)), want)


def test_nothing_to_do_gives_empty_results_and_no_keys_give_zeros() -> None:
    q, k, v = map(to_device, DENSE.arrays())
    for arrays, options in (
        ((q[:0], k[:0], v[:0]), {}),
        ((q[:, :0], k, v), {}),
        ((q[0, :0], k[0], v[0]), {"cu_seqlens_q": [0, 0, 0], "cu_seqlens_k": [0, 3, 260]}),
        ((q[0, :0], k[0, :0], v[0, :0]), {"cu_seqlens_q": [0]}),
    ):
        out, lse = cuattn.prefill(*arrays, **options, return_lse=True)
        assert (out.shape, lse.shape) == (arrays[0].shape, arrays[0].shape[:-1])
    table = cupy.zeros((3, 0), np.int32)
    for arrays, options in (
        ((q, k[:, :0], v[:, :0]), {}),
        ((q, k, v), {"kv_len": 0}),
        ((q, k[:0], v[:0]), {"kv_len": 0, "page_table": table}),
        ((q[0], k[0, :0], v[0, :0]), {"cu_seqlens_q": [0, 100, 200], "cu_seqlens_k": [0, 0, 0]}),
    ):
        out, lse = launch_prefill(arrays, options)
        assert not out.any()
        assert bool(cupy.isneginf(lse).all())


@pytest.mark.parametrize("q_layout", ["dense", "ragged"])
def test_more_sequences_than_a_grid_has_blocks_along_y(q_layout: str) -> None:
    small = replace(DENSE, seqlens=((3, 5),) * 7, num_kv_heads=1, group=2, q_layout="dense")
    arrays = tuple(np.resize(x, (70000, *x.shape[1:])) for x in small.arrays())
    want = tuple(np.resize(x, (70000, *x.shape[1:])) for x in prefill(small))
    options = small.options()
    if q_layout == "ragged":
        arrays = (arrays[0].reshape(-1, 2, 64), *arrays[1:])
        options["cu_seqlens_q"] = np.arange(70001, dtype=np.int32) * 3
    got = call_prefill(arrays, options)
    assert_same_bits(tuple(x.reshape(y.shape) for x, y in zip(got, want, strict=True)), want)


# Views


@pytest.mark.parametrize("argument", ["q", "k", "v", "out", "all"])
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("problem", [replace(PAGED, seqlens=((150, 500), (7, 33))), DENSE], ids=["paged", "dense"])
def test_strides_are_honored_and_nothing_around_is_touched(problem: PrefillProblem, view: str, argument: str) -> None:
    around, select = VIEWS[view]
    host, options = problem.arrays(), problem.options()
    want = call_prefill(host, options)
    named = dict(zip(("q", "k", "v", "out"), (*host, np.full_like(host[0], np.nan)), strict=True))
    bases, device = {}, {}
    for name, x in named.items():
        bases[name], device[name] = to_device(x), to_device(x)
        if argument in (name, "all"):
            guard = 77 if name == "out" else np.nan
            bases[name], device[name] = viewed(x, around(x.shape), select, guard)
    out = device.pop("out")
    got, lse = cuattn.prefill(*device.values(), **on_device(options), return_lse=True, out=out)
    assert got is out
    if is_tiled(tuple(device.values()), options) != is_tiled(tuple(map(to_device, host)), options):
        assert_prefill(problem, cupy.asnumpy(got), cupy.asnumpy(lse))
        want = cupy.asnumpy(got), cupy.asnumpy(lse)
    assert_same_bits((cupy.asnumpy(got), cupy.asnumpy(lse)), want)
    if argument in ("out", "all"):
        base = np.full(bases["out"].shape, 77, named["out"].dtype)
        select(base)[...] = want[0]
        assert cupy.asnumpy(bases["out"]).tobytes() == base.tobytes()


@pytest.mark.parametrize("part", ["codes", "norms", "both"])
@pytest.mark.parametrize("view", VIEWS)
def test_strides_of_planes_are_honored(view: str, part: str) -> None:
    around, select = VIEWS[view]
    q, k, v = CODES.arrays()
    caches = []
    for cache in (k, v):
        views = {
            name: viewed(getattr(cache, name), around(getattr(cache, name).shape), select, fill)[1]
            for name, fill in (("codes", 0xFF), ("norms", np.nan))
            if part in (name, "both")
        }
        caches.append(changed(to_device(cache), **views))
    assert_same_bits(call_prefill((q, *caches), CODES.options()), prefill(CODES))


@pytest.mark.parametrize("q_layout", ["dense", "ragged"])
def test_queries_keys_and_values_of_one_projection_are_read_in_place(q_layout: str) -> None:
    """Of each token first the heads of q, then those of k, then those of v."""
    problem = replace(DENSE, seqlens=((200, 200),) * 3, q_layout=q_layout)
    if q_layout == "ragged":
        problem = replace(problem, kv_layout="ragged")
    arrays = problem.arrays()
    fused = to_device(np.concatenate(arrays, axis=-2))
    slices = fused[..., :8, :], fused[..., 8:10, :], fused[..., 10:, :]
    assert_same_bits(call_prefill(slices, problem.options()), call_prefill(arrays, problem.options()))


@pytest.mark.parametrize("argument", ["kv_len", "page_table", "sinks", "cu_seqlens_q"])
def test_small_arrays_may_be_views(argument: str) -> None:
    problem = replace(PAGED, sinks=True)
    options = problem.options()
    x, want = options[argument], prefill(problem)
    shape, tail = x.shape, x.ndim - 1
    for around, view in (
        ((3 * shape[0], *shape[1:]), lambda base: base[::3]),
        (shape, lambda base: base[::-1]),
        ((*shape, 2), lambda base: base[..., 1]),
        ((shape[0], *(n + 5 for n in shape[1:])), lambda base: base[(slice(None), *[slice(3, -2)] * tail)]),
        (shape[::-1], lambda base: base.T),
    ):
        strided = viewed(x, around, view, fill=10**6)[1]
        assert_same_bits(call_prefill(problem.arrays(), options | {argument: strided}), want, around)


@all_layouts
def test_out_and_lse_are_what_was_asked_for(problem: PrefillProblem) -> None:
    arrays, options = tuple(map(to_device, problem.arrays())), on_device(problem.options())
    want = prefill(problem)
    out = nans(want[0].shape, want[0].dtype)
    assert cuattn.prefill(*arrays, **options, out=out) is out
    alone = cuattn.prefill(*arrays, **options)
    for got in (out, alone):
        assert cupy.asnumpy(got).tobytes() == want[0].tobytes()


# Offsets beyond 32 bits


def test_rows_beyond_4_gib_are_read_and_written() -> None:
    """The last of four sequences begins 6 GiB after the first, in q, k and v and out."""
    free = cupy.cuda.runtime.memGetInfo()[0]
    if free < 40 * GIB:
        pytest.skip(reason=f"needs 40 GiB of free GPU memory, there are {free / GIB:.0f}")
    problem = replace(DENSE, seqlens=((200, 260),) * 4, dtype="bfloat16")
    host, want = problem.arrays(), prefill(problem)
    pools = [cupy.empty(8 * GIB // 2, np.uint16) for _ in range(4)]
    try:
        for heads_first in (False, True):
            arrays = []
            for pool, x in zip(pools, (*host, np.full_like(host[0], np.nan)), strict=True):
                pool.fill(NAN16)
                batch, tokens, heads, dim = x.shape
                if heads_first:
                    view = pool.reshape(heads, batch, -1, dim).transpose(1, 2, 0, 3)[:, -tokens:]
                else:
                    view = pool.reshape(batch, -1, heads, dim)[:, -tokens:]
                view[...] = cupy.asarray(x.view(np.uint16))
                arrays.append(view.view(DTYPES["bfloat16"]))
            *inputs, out = arrays
            _, lse = cuattn.prefill(*inputs, **on_device(problem.options()), out=out, return_lse=True)
            assert_same_bits((cupy.asnumpy(out), cupy.asnumpy(lse)), want)
    finally:
        pools.clear()
        del arrays, inputs, out, view, pool
        cupy.get_default_memory_pool().free_all_blocks()


@pytest.mark.parametrize(("stride", "tokens"), [(2**31 - 16, 3), (2**26 + 16, 70)])
def test_tokens_gibibytes_apart_are_read(stride: int, tokens: int) -> None:
    """Forwards and backwards, in whole tiles and in others."""
    free = cupy.cuda.runtime.memGetInfo()[0]
    if free < 20 * GIB:
        pytest.skip(reason=f"needs 20 GiB of free GPU memory, there are {free / GIB:.0f}")
    problem = PrefillProblem(((3, tokens),), head_dim=128, q_layout="dense", kv_layout="dense", seed=14)
    q, *rows = problem.arrays()
    want = call_prefill((q, *rows), problem.options())
    length = ((tokens - 1) * stride + rows[0][0, 0].nbytes) // 2
    pools = [cupy.full(length, NAN16, np.uint16) for _ in rows]
    far = []
    try:
        for step in (1, -1):
            far = [
                cupy.lib.stride_tricks.as_strided(pool.view(np.float16), x.shape, (0, stride, *x.strides[2:]))[
                    :, ::step
                ]
                for pool, x in zip(pools, rows, strict=True)
            ]
            for pool, view, x in zip(pools, far, rows, strict=True):
                pool.fill(NAN16)
                view[...] = to_device(x)
            assert_same_bits(call_prefill((q, *far), problem.options()), want)
    finally:
        pools.clear()
        far.clear()
        cupy.get_default_memory_pool().free_all_blocks()


@pytest.mark.parametrize("formats", [RAW, FORMATS[0]], ids="-".join)
def test_pages_at_both_ends_of_a_pool_of_6_gib_are_read(formats: tuple[str, str]) -> None:
    free = cupy.cuda.runtime.memGetInfo()[0]
    if free < 20 * GIB:
        pytest.skip(reason=f"needs 20 GiB of free GPU memory, there are {free / GIB:.0f}")
    problem = of("bfloat16", formats, (128, 128), seqlens=((100, 1000), (3, 0), (33, 333)), kv_layout="paged")
    q, k, v = problem.arrays()
    options, want = problem.options(), prefill(problem)
    rows = k.codes if formats != RAW else k
    num_pages = 6 * GIB // rows[0].nbytes
    where = np.linspace(0, num_pages - 1, len(rows)).astype(np.int64)
    used = np.arange(options["page_table"].shape[1]) < -(-options["kv_len"] // problem.page_size)[:, None]
    table = np.where(used, where[np.where(used, options["page_table"], 0)], options["page_table"]).astype(np.int32)

    def spread(x: np.ndarray) -> cupy.ndarray:
        words = np.ascontiguousarray(x).view(f"u{x.itemsize}")
        pool = cupy.full((num_pages, *x.shape[1:]), np.iinfo(words.dtype).max, words.dtype)
        for i, page in enumerate(where):
            pool[page] = cupy.asarray(words[i])
        return pool.view(x.dtype)

    caches = [
        changed(to_device(x), codes=spread(x.codes), norms=spread(x.norms)) if formats != RAW else spread(x)
        for x in (k, v)
    ]
    try:
        assert_same_bits(call_prefill((q, *caches), options | {"page_table": table}), want)
    finally:
        caches.clear()
        cupy.get_default_memory_pool().free_all_blocks()
