"""The decode kernel against the reference, and what must not change its result."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib import resources
from itertools import cycle, product
from threading import Barrier
from typing import Any

import cupy
import ml_dtypes
import numpy as np
import pytest
import strategies
from gpu.helpers import (
    NAN16,
    VIEWS,
    assert_same_bits,
    busy_gpu,
    call,
    check,
    decode,
    launch,
    nans,
    occupy,
    poison,
    to_device,
    viewed,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import DTYPES, Problem, only
from tolerance import assert_call, assert_decode, assert_rows, expected

import cuattn

DTYPE_NAMES = ("float16", "bfloat16", "float32")
HEAD_DIMS = (64, 96, 128, 192, 256, 512)
GROUPS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 32, 64)
PAGE_SIZES = (None, 1, 2, 3, 16, 64, 100, 256)
SPLITS = (1, 2, 3, 5, 16, 128, 512, None)
# Beside and at powers of two: what a CTA of the merge takes at a time, once and several times.
PARTS = (1, 2, 3, 7, 8, 16, 17, 33, 64, 128, None)
GIB = 1 << 30
every_kernel = pytest.mark.parametrize(("dtype", "head_dim"), list(product(DTYPE_NAMES, HEAD_DIMS)))
# Two shapes for what does not depend on the kernel: few rows with pages, many rows without.
PAGED = Problem(kv_len=(0, 1, 40, 700), num_kv_heads=2, group=6, page_size=16, dtype="bfloat16", head_dim=128, seed=11)
DENSE = Problem(kv_len=(3, 0, 515, 64), seqlen_q=4, num_kv_heads=3, group=4, seed=12)
both_layouts = pytest.mark.parametrize("problem", [PAGED, DENSE], ids=["paged", "dense"])


def edges(*powers: int) -> tuple[int, ...]:
    """Return 2^n - 1, 2^n and 2^n + 1."""
    return tuple(sorted({2**n + step for n in powers for step in (-1, 0, 1)}))


# --- Against the reference ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "head_dim", "group", "page_size"),
    [
        (*case, page)
        for case, page in zip(product(DTYPE_NAMES, HEAD_DIMS, GROUPS), cycle((*PAGE_SIZES, 5)), strict=False)
    ],
)
def test_every_dtype_head_dim_and_group_obeys_the_error_law(
    dtype: str, head_dim: int, group: int, page_size: int | None
) -> None:
    problem = Problem(
        kv_len=(0, 1, 37, 200),
        num_kv_heads=2 if group < 16 else 1,
        group=group,
        head_dim=head_dim,
        page_size=page_size,
        dtype=dtype,
        seed=group,
    )
    check(problem)


@every_kernel
@pytest.mark.parametrize("page_size", [None, 64])
def test_lengths_beside_every_power_of_two_obey_the_error_law(dtype: str, head_dim: int, page_size: int | None) -> None:
    """All of them in one batch, the empty sequence included."""
    check(Problem(kv_len=edges(*range(11)), group=3, head_dim=head_dim, page_size=page_size, dtype=dtype, seed=1))


@pytest.mark.parametrize("power", range(11, 16))
@pytest.mark.parametrize(("dtype", "head_dim", "page_size"), [("float16", 128, None), ("bfloat16", 64, 16)])
def test_long_lengths_beside_a_power_of_two_obey_the_error_law(
    dtype: str, head_dim: int, page_size: int | None, power: int
) -> None:
    check(Problem(kv_len=edges(power), group=4, head_dim=head_dim, page_size=page_size, dtype=dtype, seed=power))


@pytest.mark.parametrize("page_size", [1, 2, 3, 7, 16, 17, 64, 100, 256, 1000])
@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_every_page_size_obeys_the_error_law(dtype: str, page_size: int) -> None:
    lengths = (0, 1, page_size - 1, page_size, page_size + 1, 3 * page_size + 1, 517)
    check(Problem(kv_len=lengths, num_kv_heads=2, group=2, head_dim=128, page_size=page_size, dtype=dtype, seed=2))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("seqlen_q", range(1, 17))
@pytest.mark.parametrize(("dtype", "head_dim"), [("float16", 128), ("bfloat16", 64)])
def test_up_to_16_query_tokens_obey_the_error_law(dtype: str, head_dim: int, seqlen_q: int, *, causal: bool) -> None:
    """Also where a sequence is shorter than its queries, so that its first tokens see nothing."""
    problem = Problem(
        kv_len=(0, 1, seqlen_q - 1, seqlen_q, seqlen_q + 1, 40, 300),
        seqlen_q=seqlen_q,
        num_kv_heads=2,
        group=3,
        head_dim=head_dim,
        page_size=16 if causal else None,
        dtype=dtype,
        causal=causal,
        seed=seqlen_q,
    )
    check(problem)


@every_kernel
def test_the_most_rows_of_a_kv_head_obey_the_error_law(dtype: str, head_dim: int) -> None:
    check(Problem(kv_len=(5, 0, 70), seqlen_q=16, group=64, head_dim=head_dim, page_size=3, dtype=dtype, seed=3))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("left", [None, -1, 0, 1, 16, 33, 200])
@pytest.mark.parametrize("right", [None, 0, 1, 16, 200])
def test_windows_obey_the_error_law(left: int | None, right: int | None, *, causal: bool) -> None:
    for seqlen_q, dtype in ((1, "float16"), (5, "bfloat16")):
        problem = Problem(
            kv_len=(0, 1, 4, 5, 64, 300),
            seqlen_q=seqlen_q,
            group=2,
            page_size=16,
            dtype=dtype,
            causal=causal,
            window=(left, right),
            seed=4,
        )
        check(problem, num_splits=None if causal else 4)


@pytest.mark.parametrize("beyond", [700, 2**30, 2**31 - 1])
@both_layouts
def test_a_window_wider_than_the_sequence_hides_nothing(problem: Problem, beyond: int) -> None:
    want = decode(problem)
    for window in ((beyond, beyond), (beyond, None), (-1, beyond), (None, None), (-1, -1)):
        assert_same_bits(decode(replace(problem, window=window)), want, window)


@pytest.mark.parametrize("softcap", [0.5, 5.0, 50.0, 1e6])
@pytest.mark.parametrize("values", ["normal", "huge"])
@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_softcaps_obey_the_error_law(dtype: str, values: str, softcap: float) -> None:
    for seqlen_q in (1, 3):
        problem = Problem(kv_len=(0, 3, 90), seqlen_q=seqlen_q, group=4, head_dim=128, dtype=dtype, seed=5)
        check(replace(problem, softcap=softcap, values=values), num_splits=3)


@every_kernel
@pytest.mark.parametrize("num_splits", [1, 4])
def test_sinks_obey_the_error_law(dtype: str, head_dim: int, num_splits: int) -> None:
    """Rows without keys have only the sink; that of the last head is -inf, which is none."""
    problem = Problem(kv_len=(0, 1, 200), num_kv_heads=2, group=3, head_dim=head_dim, dtype=dtype, sinks=True, seed=6)
    out, lse = decode(problem, num_splits=num_splits)
    assert_decode(problem, out, lse)
    assert not out[0].any()
    np.testing.assert_array_equal(lse[0, -1], -np.inf)
    assert np.isfinite(lse[0, :-1]).all()
    check(replace(problem, seqlen_q=5, window=(2, 0), page_size=3), num_splits=num_splits)


@both_layouts
def test_a_sink_far_above_the_scores_takes_all_the_weight(problem: Problem) -> None:
    arrays = problem.arrays()
    for sink in (-1e30, -200.0, 200.0, 1e30):
        options = {**problem.options(), "sinks": np.full(problem.num_qo_heads, sink, np.float32)}
        got = call(arrays, options)
        assert_call(arrays, options, got)
        assert got[0].any() == (sink < 0)


@both_layouts
def test_sinks_of_the_dtype_of_q_are_the_same_numbers(problem: Problem) -> None:
    sinks = np.linspace(-2, 2, problem.num_qo_heads).astype(DTYPES[problem.dtype])
    sinks[1] = -np.inf
    want = decode(problem, sinks=sinks.astype(np.float32))
    assert_same_bits(decode(problem, sinks=sinks), want)
    assert want[1][0].max() != -np.inf


@every_kernel
@pytest.mark.parametrize("values", ["late_max", "huge", "equal"])
def test_unusual_scores_obey_the_error_law(dtype: str, head_dim: int, values: str) -> None:
    problem = Problem(kv_len=(0, 1, 9, 300, 1500), group=2, head_dim=head_dim, dtype=dtype, values=values, seed=7)
    for num_splits in (1, 5, None):
        check(problem, num_splits=num_splits)
    check(replace(problem, kv_len=(2, 20, 300), seqlen_q=3, page_size=16))


@pytest.mark.parametrize("softmax_scale", [0.0, 1.0, -0.3, 1e-6, 3.0])
@both_layouts
def test_scales_obey_the_error_law(problem: Problem, softmax_scale: float) -> None:
    arrays, options = problem.arrays(), {**problem.options(), "softmax_scale": softmax_scale}
    assert_call(arrays, options, call(arrays, options))


@both_layouts
def test_the_default_scale_is_that_of_head_dim(problem: Problem) -> None:
    assert_same_bits(decode(problem, softmax_scale=problem.head_dim**-0.5), decode(problem))


@pytest.mark.parametrize("num_splits", SPLITS)
@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_every_number_of_splits_obeys_the_error_law(dtype: str, num_splits: int | None) -> None:
    """Also where most of the splits are empty, and where a window leaves keys to few of them."""
    problem = Problem(kv_len=(0, 1, 33, 4100), group=5, head_dim=128, page_size=16, dtype=dtype, sinks=True, seed=8)
    check(problem, num_splits=num_splits)
    check(replace(problem, window=(100, 0)), num_splits=num_splits)
    check(replace(problem, kv_len=(0, 2, 300), seqlen_q=7, head_dim=64, page_size=None), num_splits=num_splits)


@pytest.mark.parametrize("num_splits", PARTS)
@pytest.mark.parametrize("seqlen_q", [1, 4])
@pytest.mark.parametrize("group", [4, 6])
@pytest.mark.parametrize("formats", [{}, {"k_format": "tbq4", "v_format": "tbq4"}], ids=["16", "4"])
@pytest.mark.parametrize("kv_len", [5000, 100])
def test_every_number_of_parts_of_one_sequence_obeys_the_error_law(
    kv_len: int, formats: dict[str, Any], group: int, seqlen_q: int, num_splits: int | None
) -> None:
    """With few keys most parts are empty."""
    problem = Problem(kv_len=(kv_len,), seqlen_q=seqlen_q, num_kv_heads=2, group=group, head_dim=128, page_size=16,
                      dtype="bfloat16", seed=group, **formats)  # fmt: skip
    check(problem, num_splits=num_splits)


@every_kernel
@pytest.mark.parametrize("num_splits", [2, 37])
def test_every_kernel_may_be_split(dtype: str, head_dim: int, num_splits: int) -> None:
    problem = Problem(kv_len=(0, 1, 1030), num_kv_heads=2, group=9, head_dim=head_dim, dtype=dtype, seed=9)
    check(problem, num_splits=num_splits)


@every_kernel
@settings(settings.get_profile("gpu"))
@given(data=st.data())
def test_any_problem_obeys_the_error_law(dtype: str, head_dim: int, data: st.DataObject) -> None:
    problem = data.draw(
        strategies.problems(
            lengths=strategies.lengths(16) | strategies.lengths(128),
            seqlens_q=(1, 2, 5, 16),
            groups=(1, 2, 3, 8, 20),
            head_dims=(head_dim,),
            page_sizes=(None, 1, 3, 16, 64, 100),
            dtypes=(dtype,),
        )
    )
    check(problem, num_splits=data.draw(st.sampled_from((None, 1, 2, 3, 7))))


@pytest.mark.parametrize("layer", ["l00", "l15", "l29"])
@pytest.mark.parametrize("num_tokens", [1, 5])
@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_a_language_models_own_tokens_obey_the_error_law(layer: str, num_tokens: int, dtype: str) -> None:
    with resources.files("cuattn.examples").joinpath("smollm2_qkv.npz").open("rb") as file, np.load(file) as data:
        q, k, v = (data[f"{layer}_{name}"].astype(DTYPES[dtype])[None] for name in "qkv")
    q = q[:, -1] if num_tokens == 1 else q[:, -num_tokens:]
    arrays = (q, k, v, np.array([k.shape[1]], np.int32))
    for num_splits in (None, 1, 4):
        options = {"softmax_scale": 1 / 8, "num_splits": num_splits}
        assert_call(arrays, options, call(arrays, options))


# --- Laws between results -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_several_tokens_equal_token_by_token_within_the_law(dtype: str) -> None:
    problem = Problem(kv_len=(0, 2, 5, 40, 300), seqlen_q=5, num_kv_heads=2, group=3, dtype=dtype, sinks=True, seed=1)
    q, k_cache, v_cache, kv_len = problem.arrays()
    want, options = expected(problem), problem.options()
    for i in range(problem.seqlen_q):
        lengths = np.maximum(kv_len - (problem.seqlen_q - 1 - i), 0).astype(np.int32)
        out, lse = call((np.ascontiguousarray(q[:, i]), k_cache, v_cache, lengths), options)
        for b, magnitude in enumerate(want.magnitudes):
            same, ref = ((x[0][b, i], x[1][b, i]) for x in (want.same, want.ref))
            assert_rows((out[b], lse[b]), same, ref, dtype=q.dtype, magnitude=magnitude, context=(problem, b, i))


@both_layouts
def test_one_token_may_have_an_axis_of_its_own(problem: Problem) -> None:
    q, *others = replace(problem, seqlen_q=1).arrays()
    out, lse = call((q, *others), problem.options())
    assert_same_bits(call((q[:, None], *others), problem.options()), (out[:, None], lse[:, None]))


@both_layouts
def test_permuting_the_batch_permutes_the_result(problem: Problem) -> None:
    order = [2, 3, 1, 0]
    q, k_cache, v_cache, kv_len = problem.arrays()
    options = problem.options()
    want = tuple(x[order] for x in call((q, k_cache, v_cache, kv_len), options))
    if problem.page_size is None:
        k_cache, v_cache = k_cache[order], v_cache[order]
    else:
        options["page_table"] = options["page_table"][order]
    assert_same_bits(call((q[order], k_cache, v_cache, kv_len[order]), options), want)


@both_layouts
def test_a_sequence_does_not_depend_on_the_others_of_its_batch(problem: Problem) -> None:
    """With the number of splits fixed, for the plan depends on the batch."""
    q, k_cache, v_cache, kv_len = problem.arrays()
    options = {**problem.options(), "num_splits": 3}
    want = call((q, k_cache, v_cache, kv_len), options)
    for b in range(len(q)):
        one = slice(b, b + 1)
        if problem.page_size is None:
            got = call((q[one], k_cache[one], v_cache[one], kv_len[one]), options)
        else:
            got = call((q[one], k_cache, v_cache, kv_len[one]), {**options, "page_table": options["page_table"][one]})
        assert_same_bits(got, tuple(x[one] for x in want))


@both_layouts
def test_scaling_v_scales_out_and_lse_does_not_see_v(problem: Problem) -> None:
    """A power of two scales bfloat16 without rounding."""
    problem = replace(problem, dtype="bfloat16")
    q, k_cache, v_cache, kv_len = problem.arrays()
    out, lse = call((q, k_cache, v_cache, kv_len), problem.options())
    scaled = (v_cache.astype(np.float32) * -4).astype(v_cache.dtype)
    got = call((q, k_cache, scaled, kv_len), problem.options())
    # Without the sign of zeros.
    np.testing.assert_array_equal(got[0].astype(np.float32), -4 * out.astype(np.float32))
    assert got[1].tobytes() == lse.tobytes()


@both_layouts
def test_the_layout_of_the_cache_does_not_matter(problem: Problem) -> None:
    """A table of pages in any order is the dense cache."""
    for page_size in (1, 3, 64, None):
        check(replace(problem, page_size=page_size), num_splits=2)


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_a_constant_score_gives_the_mean_of_v_and_the_log_of_the_length(dtype: str) -> None:
    problem = Problem(kv_len=(1, 7, 64, 4096), group=3, head_dim=96, dtype=dtype, seed=2)
    arrays = problem.arrays()
    arrays[2][:, :4096] = 3
    out, lse = call(arrays, {"softmax_scale": 0.0})
    assert (out == 3).all()
    assert_call(arrays, {"softmax_scale": 0.0}, (out, lse))


# --- What must not matter -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [0x0000, 0xFFFF, 0x7FFF, 0x7C00, 0x7F80, 0xFF80, 0x7BFF], ids=hex)
@pytest.mark.parametrize("num_splits", [None, 3])
@both_layouts
def test_unused_bytes_of_the_caches_do_not_matter(problem: Problem, num_splits: int | None, bits: int) -> None:
    """NaN, infinities of both dtypes, and the largest float16."""
    want = decode(problem, num_splits=num_splits)
    q, k_cache, v_cache, kv_len = problem.arrays()
    for cache in (k_cache, v_cache):
        cache.view(np.uint16)[np.isnan(cache)] = bits
    assert_same_bits(call((q, k_cache, v_cache, kv_len), {**problem.options(), "num_splits": num_splits}), want)


@pytest.mark.parametrize("entry", [0, 1, -1, 10**6, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("num_splits", [None, 3])
def test_unused_entries_of_the_page_table_do_not_matter(num_splits: int | None, entry: int) -> None:
    want = decode(PAGED, num_splits=num_splits)
    table = PAGED.options()["page_table"]
    used = np.arange(table.shape[1]) < -(-np.array(PAGED.kv_len) // PAGED.page_size)[:, None]
    got = decode(PAGED, page_table=np.where(used, table, np.int32(entry)), num_splits=num_splits)
    assert_same_bits(got, want)


@pytest.mark.parametrize("num_splits", [1, 3])
@both_layouts
def test_the_query_of_an_empty_sequence_does_not_matter(problem: Problem, num_splits: int) -> None:
    arrays = problem.arrays()
    empty = problem.kv_len.index(0)
    want = call(arrays, {**problem.options(), "num_splits": num_splits})
    arrays[0][empty] = np.nan
    out, lse = call(arrays, {**problem.options(), "num_splits": num_splits})
    assert_same_bits((out, lse), want)
    assert not out[empty].any()
    assert np.isneginf(lse[empty]).all()


@both_layouts
def test_decode_changes_none_of_its_arguments(problem: Problem) -> None:
    host = (*problem.arrays(), *(problem.options().get(name) for name in ("page_table",)))
    q, k_cache, v_cache, kv_len, page_table = device = tuple(map(to_device, host))
    options = {**problem.options(), "page_table": page_table}
    launch((q, k_cache, v_cache, kv_len), options)
    for x, before in zip(device, host, strict=True):
        if before is not None:
            assert cupy.asnumpy(x).tobytes() == before.tobytes()


def test_lengths_on_the_device_are_limited_to_the_capacity() -> None:
    """What lies around a dense cache is NaN, so that a read beyond it would show."""
    problem = Problem(kv_len=(64, 0, 64, 0), num_kv_heads=2, group=3, head_dim=128, seed=3)
    q, k_cache, v_cache, kv_len = problem.arrays()
    caches = (k_cache[:, :64], v_cache[:, :64])
    want = call((q, *caches, kv_len), {})
    around = [viewed(x, (6, 64, *x.shape[2:]), lambda base: base[1:-1])[1] for x in caches]
    for lengths in ((65, -1, 2**31 - 1, -(2**31)), (2**30, -7, 10**9, 0)):
        for num_splits in (None, 2):
            options = {"num_splits": num_splits}
            got = call((q, *around, np.array(lengths, np.int32)), options)
            assert_same_bits(got, want if num_splits is None else call((q, *caches, kv_len), options), lengths)


def test_lengths_on_the_device_are_limited_to_the_page_table() -> None:
    """Beyond the table's last column stand the numbers of pages of NaN, and numbers that are no pages."""
    problem = Problem(kv_len=(48, 0, 48, 0), num_kv_heads=2, group=3, head_dim=128, page_size=16, seed=3)
    arrays, table = problem.arrays(), problem.options()["page_table"][:, :3]
    want = call(arrays, {"page_table": np.ascontiguousarray(table)})
    for entry in (-1, 10**6, 0):
        around = viewed(table, (4, 7), lambda base: base[:, 2:5], fill=entry)[1]
        lengths = np.array([49, -1, 2**31 - 1, -(2**31)], np.int32)
        assert_same_bits(call((*arrays[:3], lengths), {"page_table": around}), want, entry)


@pytest.mark.parametrize("form", [list, tuple, np.int64, np.uint16, np.int32], ids=lambda form: form.__name__)
@both_layouts
def test_lengths_of_the_host_equal_lengths_on_the_device(problem: Problem, form: Callable[..., Any]) -> None:
    q, k_cache, v_cache, kv_len = problem.arrays()
    want = decode(problem)
    lengths = form(problem.kv_len) if form in (list, tuple) else kv_len.astype(form)
    options = {name: to_device(x) for name, x in problem.options().items()}
    out, lse = cuattn.decode(*map(to_device, (q, k_cache, v_cache)), lengths, **options, return_lse=True)
    assert_same_bits((cupy.asnumpy(out), cupy.asnumpy(lse)), want)


def test_one_length_of_the_host_is_that_of_every_sequence() -> None:
    problem = replace(PAGED, kv_len=(40,) * 3)
    q, k_cache, v_cache, _ = map(to_device, problem.arrays())
    for length in (40, np.int64(40)):
        options = {name: to_device(x) for name, x in problem.options().items()}
        out, lse = cuattn.decode(q, k_cache, v_cache, length, **options, return_lse=True)
        assert_same_bits((cupy.asnumpy(out), cupy.asnumpy(lse)), decode(problem))


@pytest.mark.parametrize("num_splits", [None, 1, 4])
def test_an_empty_batch_and_an_empty_cache_give_empty_results(num_splits: int | None) -> None:
    q, k_cache, v_cache, kv_len = PAGED.arrays()
    table = PAGED.options()["page_table"]
    options = {"num_splits": num_splits}
    out, lse = call((q[:0], k_cache, v_cache, kv_len[:0]), {**options, "page_table": table[:0]})
    assert (out.shape, lse.shape) == (q[:0].shape, q[:0].shape[:-1])
    out, lse = call((q[:0], k_cache[:0], v_cache[:0], kv_len[:0]), options)
    assert (out.shape, lse.shape) == (q[:0].shape, q[:0].shape[:-1])
    for arrays, more in (
        ((q, k_cache, v_cache, kv_len), {"page_table": table[:, :0]}),
        ((q, k_cache[:0], v_cache[:0], kv_len), {"page_table": table[:, :0]}),
        ((q, k_cache[:4, :0], v_cache[:4, :0], kv_len), {}),
    ):
        out, lse = call(arrays, {**options, **more})
        assert not out.any()
        assert np.isneginf(lse).all()


@pytest.mark.parametrize("shape", [(70000, 1), (1, 70000)], ids=["sequences", "heads"])
def test_more_rows_than_a_grid_has_blocks_along_z_are_decoded_or_refused(shape: tuple[int, int]) -> None:
    """CUDA's limit on the third axis of a grid, that of sequences, is 65535; a message must say so."""
    problem = Problem(kv_len=(0, 1, 2, 2, 1, 2, 0), group=2, seed=1)
    q, k_cache, v_cache, kv_len = (np.resize(x, (70000, *x.shape[1:])) for x in problem.arrays())
    small = decode(problem, num_splits=1)
    want = tuple(np.resize(x, (70000, *x.shape[1:])) for x in small)
    if shape[0] == 1:
        q, k_cache, v_cache = q.reshape(1, -1, 64), k_cache.swapaxes(0, 2), v_cache.swapaxes(0, 2)
        # All heads of a sequence have one length: the NaN past the shorter ones become keys that are seen.
        kv_len = np.array([2], np.int32)
        k_cache, v_cache = (np.ascontiguousarray(np.nan_to_num(x)) for x in (k_cache, v_cache))
        small = call((q[:, :14], k_cache[:, :, :7], v_cache[:, :, :7], kv_len), {"num_splits": 1})
        want = tuple(np.resize(x[0], (140000, *x.shape[2:]))[None] for x in small)
    try:
        got = call((q, k_cache, v_cache, kv_len), {"num_splits": 1})
    except ValueError as error:
        assert "65535" in str(error)  # noqa: PT017  (either outcome is right)
    else:
        assert_same_bits(got, want)


# --- NaN that is visible --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_splits", [1, 3, None])
@pytest.mark.parametrize("token", [0, 15, 16, 300, 511])
@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_nan_in_a_key_is_seen_by_exactly_the_rows_that_see_the_key(dtype: str, token: int, num_splits: int) -> None:
    """One of 128 channels, one of two KV heads, one of three sequences; several tokens see it or not by causality."""
    problem = Problem(kv_len=(512, 512, 7), num_kv_heads=2, group=3, head_dim=128, dtype=dtype, seed=4)
    for seqlen_q in (1, 4):
        arrays = replace(problem, seqlen_q=seqlen_q).arrays()
        options = {"num_splits": num_splits}
        clean = call(arrays, options)
        arrays[1][1, token, 1, 77] = np.nan
        out, lse = call(arrays, options)
        sees = np.zeros(lse.shape, bool)
        # Token i stands at position 512 - seqlen_q + i.
        first = max(0, token - 512 + seqlen_q)
        (sees if seqlen_q > 1 else sees[:, None])[1, first:, 3:] = True
        np.testing.assert_array_equal(np.isnan(lse), sees)
        np.testing.assert_array_equal(np.isnan(out), np.broadcast_to(sees[..., None], out.shape))
        assert_same_bits((out[~sees], lse[~sees]), (clean[0][~sees], clean[1][~sees]))


@pytest.mark.parametrize("num_splits", [1, 3, None])
@pytest.mark.parametrize("token", [0, 15, 16, 300, 511])
@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_nan_in_a_value_is_seen_in_exactly_its_channel(dtype: str, token: int, num_splits: int) -> None:
    problem = Problem(kv_len=(512, 512, 7), num_kv_heads=2, group=3, head_dim=128, dtype=dtype, seed=5)
    arrays, options = problem.arrays(), {"num_splits": num_splits}
    clean = call(arrays, options)
    for value in (np.nan, np.inf):
        arrays[2][1, token, 1, 77] = value
        out, lse = call(arrays, options)
        sees = np.zeros(out.shape, bool)
        sees[1, 3:, 77] = True
        np.testing.assert_array_equal(~np.isfinite(out), sees)
        if dtype == "float32":  # ordinary sums take the place of products of parts
            assert_decode(problem, np.where(sees, clean[0], out), lse)
        else:
            assert_same_bits((out[~sees], lse), (clean[0][~sees], clean[1]))


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("which", ["k_cache", "v_cache"])
@pytest.mark.parametrize("left", [0, 1, 10, 31, 100])
def test_nan_beside_a_window_is_not_seen(left: int, which: str, num_splits: int) -> None:
    """It lies in the same tile as keys that are visible, one token before the window's first."""
    problem = Problem(kv_len=(500, 0, 101), num_kv_heads=2, group=3, window=(left, None), seed=6)
    arrays, options = problem.arrays(), {**problem.options(), "num_splits": num_splits}
    want = call(arrays, options)
    cache = arrays[1 if which == "k_cache" else 2]
    for b, n in enumerate(problem.kv_len):
        cache[b, : max(0, n - 1 - left)] = np.nan
    assert_same_bits(call(arrays, options), want)
    cache[0, 499 - left] = np.nan
    assert np.isnan(call(arrays, options)[0][0]).all()


@pytest.mark.parametrize("split_size", [64, 256, 4096])
@pytest.mark.parametrize(
    "kept", [{}, {"k_format": "tbq4", "v_format": "tbq4", "num_sink": 2, "num_recent": 5}], ids=str
)
@both_layouts
def test_splits_of_a_given_size_make_the_bits_of_a_sequence_its_own(
    problem: Problem, kept: dict[str, Any], split_size: int
) -> None:
    """Alone, with another capacity, and among others; one part or forty."""
    problem = replace(problem, kv_len=(3, 0, 9000, 700), **kept)
    out, lse = decode(problem, split_size=split_size)
    assert_decode(problem, out, lse)
    for sequence, kv_len in enumerate(problem.kv_len):
        for capacity in (kv_len + 1, 20_000):
            arrays, options = only(problem, sequence, capacity)
            got = call(arrays, {**options, "split_size": split_size})
            assert_same_bits(got, (out[sequence : sequence + 1], lse[sequence : sequence + 1]), (sequence, capacity))


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
@pytest.mark.parametrize("seqlen_q", [1, 2, 4, 7, 16])
def test_any_tree_of_tokens_obeys_the_error_law(seqlen_q: int, dtype: str) -> None:
    for kv_len in ((0, seqlen_q - 1, seqlen_q, 700), (128, 131, 4096, 4097)):
        for group in (1, 6):
            problem = Problem(kv_len=kv_len, seqlen_q=seqlen_q, num_kv_heads=2, group=group, dtype=dtype, page_size=16,
                              tree=True, values="late_max", seed=seqlen_q)  # fmt: skip
            check(problem)
            check(problem, num_splits=3)
            if dtype != "float32":
                check(replace(problem, k_format="tbq4", v_format="tbq4", num_recent=5))


@pytest.mark.parametrize("formats", [{}, {"k_format": "tbq4", "v_format": "tbq4"}], ids=["16", "4"])
@both_layouts
def test_parts_that_follow_the_lengths_obey_the_error_law(problem: Problem, formats: dict[str, Any]) -> None:
    for kv_len in ((20_000, 3, 0, 700), (16,) * 40 + (9000,), (0, 0), tuple(range(0, 8000, 97))):
        check(replace(problem, kv_len=kv_len, **formats), balance=True)


@pytest.mark.parametrize("balance", [False, True])
def test_a_graph_may_have_a_workspace_of_its_own(balance: bool) -> None:  # noqa: FBT001  a parameter of the test
    """Then nothing is allocated in the capture; two graphs with one each may run at once."""
    problem = replace(PAGED, kv_len=(3000, 2000, 900))
    q, k_cache, v_cache, kv_len = map(to_device, problem.arrays())
    table = to_device(problem.options()["page_table"])
    plan = cuattn.plan_decode(q, k_cache, v_cache, kv_len, page_table=table, balance=balance)
    assert plan.workspace_bytes > 0
    outs, graphs, streams = [], [], []
    for _ in range(2):
        out, workspace = nans(q.shape, q.dtype), cupy.full(plan.workspace_bytes, 0xFF, np.uint8)
        options = {"page_table": table, "balance": balance, "out": out, "workspace": workspace}
        cuattn.decode(q, k_cache, v_cache, kv_len, **options)
        cupy.cuda.Device().synchronize()
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream, cupy.cuda.using_allocator(lambda _: pytest.fail("an allocation in a capture")):
            stream.begin_capture()
            cuattn.decode(q, k_cache, v_cache, kv_len, **options)
            graphs.append(stream.end_capture())
        outs.append((out, workspace))
        streams.append(stream)
    want = cupy.asnumpy(outs[0][0])
    for _ in range(20):
        poison(*(out for out, _ in outs))
        cupy.cuda.Device().synchronize()
        for graph, stream in zip(graphs, streams, strict=True):
            graph.launch(stream)
        cupy.cuda.Device().synchronize()
        for out, _ in outs:
            assert cupy.asnumpy(out).tobytes() == want.tobytes()


def test_a_graph_gives_parts_to_the_lengths_of_its_replay() -> None:
    """Lengths grow and fall between replays, and some sequences are empty."""
    arrays = replace(PAGED, kv_len=(9000, 9000, 9000)).arrays()
    q, k_cache, v_cache, kv_len = map(to_device, arrays)
    table = to_device(replace(PAGED, kv_len=(9000, 9000, 9000)).options()["page_table"])
    out, lse = cuattn.decode(q, k_cache, v_cache, kv_len, page_table=table, balance=True, return_lse=True)
    stream, pool = cupy.cuda.Stream(non_blocking=True), cupy.cuda.MemoryPool()
    cupy.cuda.Device().synchronize()
    with stream, cupy.cuda.using_allocator(pool.malloc):
        stream.begin_capture()
        _, lse = cuattn.decode(
            q, k_cache, v_cache, kv_len, page_table=table, balance=True, return_lse=True, out=out
        )  # fmt: skip
        graph = stream.end_capture()
    for lengths in ((1, 0, 9000), (9000, 9000, 9000), (0, 0, 0), (513, 8999, 7)):
        kv_len[...] = cupy.asarray(np.array(lengths, np.int32))
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        host = (*arrays[:3], np.array(lengths, np.int32))
        assert_call(host, {"page_table": cupy.asnumpy(table)}, (cupy.asnumpy(out), cupy.asnumpy(lse)))


@pytest.mark.parametrize("problem", [PAGED, replace(PAGED, k_format="tbq4", num_sink=2, num_recent=3)], ids=["16", "4"])
def test_a_form_that_was_met_before_takes_its_arrays_anew(problem: Problem) -> None:
    """Other arrays of the same form, on two streams, and the first ones again."""
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    for seed, stream in zip((11, 12, 13, 11), cycle(streams)):
        other = replace(problem, seed=seed)
        cupy.cuda.Device().synchronize()
        with stream:
            got = decode(other, num_splits=2)
        assert_decode(other, *got)


def test_nan_in_a_query_is_seen_by_its_row_alone() -> None:
    for seqlen_q in (1, 4):
        problem = Problem(kv_len=(40, 600), seqlen_q=seqlen_q, num_kv_heads=2, group=3, dtype="bfloat16", seed=7)
        arrays = problem.arrays()
        clean = call(arrays, {})
        row = (1, 4) if seqlen_q == 1 else (1, 2, 4)
        arrays[0][*row, 5] = np.nan
        out, lse = call(arrays, {})
        sees = np.zeros(lse.shape, bool)
        sees[row] = True
        np.testing.assert_array_equal(np.isnan(lse), sees)
        assert np.isnan(out[row]).all()
        assert_same_bits((out[~sees], lse[~sees]), (clean[0][~sees], clean[1][~sees]))


# --- Repeats, streams, threads, devices, graphs ---------------------------------------------------------------------


@pytest.mark.parametrize("num_splits", [1, 7, None])
@pytest.mark.parametrize(
    ("dtype", "head_dim", "group"), [("float16", 64, 8), ("bfloat16", 128, 20), ("float16", 512, 3)]
)
def test_20_calls_on_a_busy_gpu_give_the_same_bits(
    dtype: str, head_dim: int, group: int, num_splits: int | None
) -> None:
    problem = Problem(
        kv_len=(0, 1, 333, 4000), num_kv_heads=2, group=group, head_dim=head_dim, page_size=16, dtype=dtype, seed=1
    )
    arrays = tuple(map(to_device, problem.arrays()))
    options = {**{name: to_device(x) for name, x in problem.options().items()}, "num_splits": num_splits}
    first = call(arrays, options)
    assert_decode(problem, *first)
    with busy_gpu():
        results = [launch(arrays, options) for _ in range(20)]
    for i, result in enumerate(results):
        assert_same_bits(tuple(map(cupy.asnumpy, result)), first, f"repeat {i} of {problem}")


@pytest.mark.parametrize("num_splits", [1, 5])
@both_layouts
def test_decode_runs_in_order_in_the_current_stream(problem: Problem, num_splits: int) -> None:
    """The inputs are NaN until late in the stream, and nothing but the stream says when they are there."""
    host, options = problem.arrays(), {**problem.options(), "num_splits": num_splits}
    want = call(host, options)
    ready = tuple(map(to_device, host))
    options = {name: to_device(x) for name, x in options.items()}
    late = tuple(map(cupy.empty_like, ready))
    poison(*late[:3])
    late[3].fill(0)
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        out = cupy.empty_like(late[0])
        poison(out)
        occupy(rounds=300)
        for x, y in zip(late, ready, strict=True):
            x.view(cupy.uint8)[...] = y.view(cupy.uint8)
        got, lse = cuattn.decode(*late, **options, return_lse=True, out=out)
        copies = got.copy(), lse.copy()
        poison(*late[:3], got)
    stream.synchronize()
    assert_same_bits(tuple(map(cupy.asnumpy, copies)), want)


def test_threads_with_streams_of_their_own_do_not_disturb_each_other() -> None:
    problems = (PAGED, DENSE, replace(PAGED, seed=99), replace(DENSE, kv_len=(300, 5, 0, 1)))
    wants = [decode(problem, num_splits=3) for problem in problems]
    barrier = Barrier(len(problems))

    def work(problem: Problem) -> list[tuple[np.ndarray, ...]]:
        with cupy.cuda.Stream(non_blocking=True):
            barrier.wait()
            return [decode(problem, num_splits=3) for _ in range(20)]

    with ThreadPoolExecutor(len(problems)) as pool:
        for results, want in zip(pool.map(work, problems), wants, strict=True):
            for result in results:
                assert_same_bits(result, want)


def test_a_thread_may_begin_with_a_launch() -> None:
    """Before any call that gives the thread a context: the kernel is loaded, and nothing is allocated."""
    arrays = tuple(map(to_device, DENSE.arrays()))
    options = {name: to_device(x) for name, x in DENSE.options().items()}
    want = cuattn.decode(*arrays, **options, num_splits=1)
    out = nans(want.shape, want.dtype)
    cupy.cuda.Device().synchronize()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: cuattn.decode(*arrays, **options, num_splits=1, out=out)).result()
    cupy.cuda.Device().synchronize()
    assert_same_bits((cupy.asnumpy(out),) * 2, (cupy.asnumpy(want),) * 2)


def second_device() -> int:
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip(reason="needs two GPUs")
    return 1


@both_layouts
def test_decode_runs_on_the_device_of_its_arrays(problem: Problem) -> None:
    ordinal = second_device()
    with cupy.cuda.Device(ordinal):
        arrays = tuple(map(to_device, problem.arrays()))
        options = {name: to_device(x) for name, x in problem.options().items()}
    assert cupy.cuda.Device().id != ordinal
    out, lse = cuattn.decode(*arrays, **options, return_lse=True)
    assert out.device.id == lse.device.id == ordinal
    assert cupy.cuda.Device().id != ordinal
    with cupy.cuda.Device(ordinal):
        got = cupy.asnumpy(out), cupy.asnumpy(lse)
    assert_decode(problem, *got)


def test_arrays_on_two_devices_are_refused() -> None:
    q, k_cache, v_cache, kv_len = map(to_device, DENSE.arrays())
    with cupy.cuda.Device(second_device()):
        elsewhere = to_device(DENSE.arrays()[2])
    with pytest.raises(ValueError, match=r"v_cache.*cuda:1") as caught:
        cuattn.decode(q, k_cache, elsewhere, kv_len)
    assert "cuda:0" in str(caught.value)
    assert v_cache.device.id == 0


@pytest.mark.parametrize("num_splits", [None, 1, 16])
@pytest.mark.parametrize("seqlen_q", [1, 3])
def test_a_captured_graph_follows_the_lengths_on_the_device(seqlen_q: int, num_splits: int | None) -> None:
    problem = Problem(
        kv_len=(2000, 2000, 2000), seqlen_q=seqlen_q, group=4, head_dim=128, page_size=16, dtype="bfloat16", seed=8
    )
    host, options = problem.arrays(), {**problem.options(), "num_splits": num_splits}
    q, k_cache, v_cache, kv_len = device = tuple(map(to_device, host))
    on_device = {name: to_device(x) for name, x in options.items()}
    # Compiles and loads the kernels, which a capture must not do.
    launch(device, on_device)
    out = nans(q.shape, q.dtype)
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    # What is allocated in a capture must stay allocated as long as the graph is launched: it has a pool of its own.
    pool = cupy.cuda.MemoryPool()
    with stream, cupy.cuda.using_allocator(pool.malloc):
        stream.begin_capture()
        _, lse = cuattn.decode(q, k_cache, v_cache, kv_len, **on_device, return_lse=True, out=out)
        graph = stream.end_capture()
    for lengths in ((0, 1, 2000), (17, 1999, 0), (2000, 64, 3), (5, 700, 1500)):
        with stream:
            poison(out, lse)
            kv_len.set(np.array(lengths, np.int32))
            graph.launch(stream)
        stream.synchronize()
        got = cupy.asnumpy(out), cupy.asnumpy(lse)
        arrays = (*host[:3], np.array(lengths, np.int32))
        assert_same_bits(got, call(arrays, options), lengths)
        assert_call(arrays, options, got)


# --- Views ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("argument", ["q", "k_cache", "v_cache", "out", "all"])
@pytest.mark.parametrize("view", VIEWS)
@both_layouts
def test_strides_are_honored_and_nothing_around_is_touched(problem: Problem, view: str, argument: str) -> None:
    around, select = VIEWS[view]
    arrays, options = problem.arrays(), problem.options()
    want = call(arrays, options)
    host = dict(zip(("q", "k_cache", "v_cache", "out"), (*arrays[:3], np.full_like(arrays[0], np.nan)), strict=True))
    bases, device = {}, {}
    for name, x in host.items():
        bases[name], device[name] = to_device(x), to_device(x)
        if argument in (name, "all"):
            guard = 77 if name == "out" else np.nan
            bases[name], device[name] = viewed(x, around(x.shape), select, guard)
    out = device.pop("out")
    options = {name: to_device(x) for name, x in options.items()}
    got, lse = cuattn.decode(*device.values(), to_device(arrays[3]), **options, return_lse=True, out=out)
    assert got is out
    assert_same_bits((cupy.asnumpy(got), cupy.asnumpy(lse)), want)
    if argument in ("out", "all"):
        base = np.full(bases["out"].shape, 77, host["out"].dtype)
        select(base)[...] = want[0]
        assert cupy.asnumpy(bases["out"]).tobytes() == base.tobytes()


def test_keys_and_values_of_one_interleaved_cache_are_read_in_place() -> None:
    q, k_cache, v_cache, kv_len = PAGED.arrays()
    kv = to_device(np.stack([k_cache, v_cache], axis=2))
    fused = to_device(np.concatenate([np.full_like(q, np.nan)[:, :3], q, np.full_like(q, np.nan)], axis=1))
    heads = slice(3, 3 + PAGED.num_qo_heads)
    assert_same_bits(call((fused[:, heads], kv[:, :, 0], kv[:, :, 1], kv_len), PAGED.options()), decode(PAGED))


@pytest.mark.parametrize("seqlen_q", [1, 3])
def test_a_cache_may_be_shared_by_a_stride_of_zero(seqlen_q: int) -> None:
    problem = Problem(kv_len=(300,), seqlen_q=seqlen_q, num_kv_heads=2, group=3, seed=9)
    _, k_cache, v_cache, _ = problem.arrays()
    q = replace(problem, kv_len=(1,) * 4).arrays()[0]
    kv_len = np.array([300, 0, 17, 299], np.int32)
    want = call((q, np.repeat(k_cache, 4, 0), np.repeat(v_cache, 4, 0), kv_len), {})
    shared = [cupy.broadcast_to(to_device(x), (4, *x.shape[1:])) for x in (k_cache, v_cache)]
    assert_same_bits(call((q, *shared, kv_len), {}), want)
    # And one query for the whole batch, or for all heads.
    for shape in ((1, *q.shape[1:]), (*q.shape[:-2], 1, q.shape[-1])):
        same = np.ascontiguousarray(q[: shape[0], ..., : shape[-2], :])
        want = call((np.broadcast_to(same, q.shape).copy(), k_cache.repeat(4, 0), v_cache.repeat(4, 0), kv_len), {})
        assert_same_bits(call((cupy.broadcast_to(to_device(same), q.shape), *shared, kv_len), {}), want)


@pytest.mark.parametrize("argument", ["kv_len", "page_table", "sinks"])
def test_small_arrays_may_be_views(argument: str) -> None:
    problem = replace(PAGED, sinks=True)
    host = {**problem.options(), "kv_len": problem.arrays()[3]}
    x = host[argument]
    want = decode(problem)
    shape, tail = x.shape, x.ndim - 1
    for around, view in (
        ((3 * shape[0], *shape[1:]), lambda base: base[::3]),
        (shape, lambda base: base[::-1]),
        ((*shape, 2), lambda base: base[..., 1]),
        ((shape[0], *(n + 5 for n in shape[1:])), lambda base: base[(slice(None), *[slice(3, -2)] * tail)]),
        (shape[::-1], lambda base: base.T),
    ):
        strided = viewed(x, around, view, fill=10**6)[1]
        options = {**host, argument: strided}
        kv_len = options.pop("kv_len")
        assert_same_bits(call((*problem.arrays()[:3], kv_len), options), want, around)


# --- Offsets beyond 32 bits -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def large() -> Any:
    """Two pools of 8 GiB, 2^32 elements each, of NaN."""
    free = cupy.cuda.runtime.memGetInfo()[0]
    if free < 20 * GIB:
        pytest.skip(reason=f"needs 20 GiB of free GPU memory, there are {free / GIB:.0f}")
    pools = [cupy.empty(8 * GIB // 2, np.uint16) for _ in range(2)]
    for pool in pools:
        pool.fill(NAN16)
    yield pools
    pools.clear()
    cupy.get_default_memory_pool().free_all_blocks()


def as_bfloat16(x: cupy.ndarray, *shape: int) -> cupy.ndarray:
    return x.reshape(shape).view(DTYPES["bfloat16"])


def test_pages_at_both_ends_of_a_pool_of_8_gib_are_read(large: list[cupy.ndarray]) -> None:
    problem = Problem(
        kv_len=(1000, 0, 333), num_kv_heads=2, group=4, head_dim=128, page_size=16, dtype="bfloat16", seed=1
    )
    q, k_cache, v_cache, kv_len = problem.arrays()
    table = problem.options()["page_table"]
    want = decode(problem)
    assert_decode(problem, *want)
    page = k_cache[0].size
    num_pages = large[0].size // page
    used = np.arange(table.shape[1]) < -(-kv_len // 16)[:, None]
    # The first page and the last, those beside 2^31 and 2^32 bytes, and others in between; used ones first.
    beside = [n // (2 * page) - i for n in (2**31, 2**32) for i in (1, 0)]
    spread = np.linspace(0, num_pages - 1, len(k_cache)).astype(int)
    spread = list(dict.fromkeys((0, num_pages - 1, *beside, *map(int, spread))))[: len(k_cache)]
    where = np.empty(len(k_cache), int)
    where[[*table[used], *np.setdiff1d(np.arange(len(k_cache)), table[used])]] = spread
    table = np.where(used, where[np.where(used, table, 0)], table).astype(np.int32)
    caches = []
    for pool, cache in zip(large, (k_cache, v_cache), strict=True):
        pages = pool.reshape(num_pages, *cache.shape[1:])
        for i, rows in zip(where, cupy.asarray(cache.view(np.uint16)), strict=True):
            pages[i] = rows
        caches.append(as_bfloat16(pool, num_pages, *cache.shape[1:]))
    assert_same_bits(call((q, *caches, kv_len), {"page_table": table}), want)
    for pool in large:
        pool.fill(NAN16)


def test_sequences_and_heads_beyond_4_gib_are_read(large: list[cupy.ndarray]) -> None:
    """The last sequence begins 6 GiB after the first; and with heads first, the last head."""
    problem = Problem(kv_len=(1000, 3, 0, 517), num_kv_heads=4, group=2, head_dim=128, dtype="bfloat16", seed=2)
    q, k_cache, v_cache, kv_len = problem.arrays()
    want = decode(problem)
    capacity, size = k_cache.shape[1], large[0].size
    for view in (
        lambda pool: pool.reshape(4, -1, 4, 128)[:, -capacity:],
        lambda pool: pool.reshape(4, 4, -1, 128).transpose(1, 2, 0, 3)[:, -capacity:],
        lambda pool: pool.reshape(4, -1, 4, 128)[::-1, :capacity],
    ):
        caches = []
        for pool, cache in zip(large, (k_cache, v_cache), strict=True):
            view(pool)[...] = cupy.asarray(cache.view(np.uint16))
            caches.append(view(pool.view(DTYPES["bfloat16"])))
        assert caches[0].shape == k_cache.shape
        assert_same_bits(call((q, *caches, kv_len), {}), want)
        for pool in large:
            pool.fill(NAN16)
    assert size * 2 == 8 * GIB


@pytest.mark.parametrize("num_splits", [None, 512])
def test_the_last_tokens_of_a_sequence_of_8_gib_are_read(large: list[cupy.ndarray], num_splits: int | None) -> None:
    """A window keeps the reference small: 1000 keys at the end of 2^24."""
    problem = Problem(kv_len=(1000,), num_kv_heads=2, group=4, head_dim=128, dtype="bfloat16", seed=3)
    q, k_cache, v_cache, _ = problem.arrays()
    caches = []
    for pool, cache in zip(large, (k_cache, v_cache), strict=True):
        tokens = pool.reshape(1, -1, 2, 128)
        tokens[:, -1000:] = cupy.asarray(cache.view(np.uint16)[:, :1000])
        caches.append(as_bfloat16(pool, *tokens.shape))
    length = np.array([caches[0].shape[1]], np.int32)
    out, lse = call((q, *caches, length), {"window": (999, None), "num_splits": num_splits})
    assert_decode(problem, out, lse)
    for pool in large:
        pool.fill(NAN16)


# --- Bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argument", "change", "words"),
    [
        ("q", lambda x: x.astype(np.float64), ("q", "float64", "float16", "bfloat16")),
        ("q", lambda x: x.astype(np.float32), ("k_cache", "float32", "float16")),
        ("k_cache", lambda x: x.astype(ml_dtypes.bfloat16), ("k_cache", "bfloat16", "float16")),
        ("v_cache", lambda x: x.astype(np.float32), ("v_cache", "float32", "float16")),
        ("q", lambda x: np.pad(x, [(0, 0)] * 2 + [(0, 16)]), ("q", "head_dim", "80", "64", "512")),
        ("v_cache", lambda x: x[:, :, :1], ("v_cache", "(2, 20, 1, 64)", "(2, 20, 2, 64)")),
        ("kv_len", lambda x: x.astype(np.float32), ("kv_len", "float32", "int")),
        ("kv_len", lambda x: x.astype(np.int64), ("kv_len", "int64", "int32")),
        ("kv_len", lambda x: x[:1], ("kv_len", "(1,)", "(2,)")),
        ("page_table", lambda _: np.zeros((2, 3), np.int64), ("page_table", "int64", "int32")),
        ("page_table", lambda _: np.zeros((3, 3), np.int32), ("page_table", "(3, 3)", "2")),
        ("page_table", lambda _: np.zeros(3, np.int32), ("page_table", "(3,)")),
        ("sinks", lambda _: np.zeros(4), ("sinks", "float64", "float32")),
        ("sinks", lambda _: np.zeros(3, np.float32), ("sinks", "(3,)", "(4,)")),
        ("out", lambda _: np.zeros((2, 4, 128), np.float16), ("out", "(2, 4, 128)", "(2, 4, 64)")),
        ("out", lambda _: np.zeros((2, 4, 64), np.float32), ("out", "float32", "float16")),
    ],
)
def test_wrong_gpu_arrays_are_named_and_nothing_is_written(
    argument: str, change: Callable[[Any], Any], words: tuple[str, ...]
) -> None:
    assert_refused({argument: lambda x: to_device(change(None if x is None else cupy.asnumpy(x)))}, words)


@pytest.mark.parametrize(
    ("argument", "change", "words"),
    [
        ("q", lambda _: cupy.zeros((2, 4, 65), np.float16)[..., 1:], ("q", "16 bytes", "(520, 130, 2)")),
        ("k_cache", lambda _: cupy.zeros((2, 20, 2, 72), np.float16)[..., 1:65], ("k_cache", "16 bytes")),
        ("v_cache", lambda _: cupy.zeros((2, 20, 2, 68), np.float16)[..., :64], ("v_cache", "16 bytes")),
        ("q", lambda _: cupy.zeros((2, 4, 128), np.float16)[..., ::2], ("q", "contiguous", "4")),
        ("q", lambda x: x[..., ::-1], ("q", "contiguous", "-2")),
        ("k_cache", lambda _: cupy.zeros((2, 20, 64, 2), np.float16).swapaxes(2, 3), ("k_cache", "contiguous", "4")),
        ("out", lambda _: cupy.zeros((2, 4, 128), np.float16)[..., ::2], ("out", "contiguous", "4")),
        ("out", lambda _: cupy.zeros((2, 4, 72), np.float16)[..., 1:65], ("out", "16 bytes")),
        ("out", lambda x: cupy.broadcast_to(x[:1], (2, 4, 64)), ("out", "(0, 128, 2)")),
    ],
)
def test_rows_that_cannot_be_read_are_named_and_nothing_is_written(
    argument: str, change: Callable[[Any], Any], words: tuple[str, ...]
) -> None:
    assert_refused({argument: change}, words)


@pytest.mark.parametrize("argument", ["q", "k_cache", "v_cache", "page_table", "sinks", "out"])
def test_arrays_of_the_host_beside_those_of_the_gpu_are_named(argument: str) -> None:
    host = {"page_table": np.zeros((2, 3), np.int32), "sinks": np.zeros(4, np.float32)}
    assert_refused({argument: lambda x: host[argument] if x is None else cupy.asnumpy(x)}, (argument, "cpu", "cuda:0"))


@pytest.mark.parametrize(("kv_len", "words"), [([3, 21], ("kv_len[1]", "21", "20")), (-1, ("kv_len", "-1", "20"))])
def test_lengths_of_the_host_are_checked_for_gpu_arrays(kv_len: Any, words: tuple[str, ...]) -> None:
    assert_refused({"kv_len": lambda _: kv_len}, words)


def assert_refused(changes: dict[str, Callable[[Any], Any]], words: tuple[str, ...]) -> None:
    arguments: dict[str, Any] = {
        "q": cupy.zeros((2, 4, 64), np.float16),
        "k_cache": cupy.zeros((2, 20, 2, 64), np.float16),
        "v_cache": cupy.zeros((2, 20, 2, 64), np.float16),
        "kv_len": cupy.asarray(np.array([3, 20], np.int32)),
        "out": cupy.full((2, 4, 64), 77, np.float16),
    }
    out = arguments["out"]
    cuattn.decode(*(x for name, x in arguments.items() if name != "out"))
    for name, change in changes.items():
        arguments[name] = change(arguments.get(name))
    before = cupy.asnumpy(arguments["out"]).tobytes()
    arrays = [arguments.pop(name) for name in ("q", "k_cache", "v_cache", "kv_len")]
    with pytest.raises((TypeError, ValueError)) as caught:
        cuattn.decode(*arrays, **arguments)
    message = str(caught.value)
    assert not [word for word in words if word not in message], message
    assert (out == 77).all()
    assert cupy.asnumpy(arguments["out"]).tobytes() == before
