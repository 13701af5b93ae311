"""prefill on a GPU, with 16-bit rows and rows in TBQ4, against the reference, and what must not change its result."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib import resources
from itertools import cycle, pairwise, product
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
    call_prefill,
    check_prefill,
    is_tiled,
    launch_prefill,
    nans,
    occupy,
    on_device,
    planes,
    poison,
    prefill,
    to_device,
    viewed,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import DTYPES, PrefillProblem, Problem, with_unused
from tolerance import assert_call, assert_decode, assert_prefill, assert_prefill_call

import cuattn
from cuattn import Tbq4Array

DTYPE_NAMES = ("float16", "bfloat16")
DIMS = ((64, 64), (96, 96), (128, 128), (192, 192), (192, 128), (256, 256), (512, 512))
TBQ4_DIMS = (64, 128, 256, 512)
RAW, FLOATS = ("raw16", "raw16"), ("raw32", "raw32")
FORMATS = (("tbq4", "tbq4"), ("tbq4", "raw16"), ("raw16", "tbq4"))
GROUPS = (*range(1, 9), 12, 16, 33, 64)
PAGE_SIZES = (1, 2, 3, 16, 64, 100, 256)
GIB = 1 << 30
KERNELS = (
    *product(DTYPE_NAMES, (RAW,), DIMS),
    *product(("float32",), (FLOATS,), DIMS),
    *product(DTYPE_NAMES, FORMATS, ((dim, dim) for dim in TBQ4_DIMS)),
)
every_kernel = pytest.mark.parametrize(("dtype", "formats", "dims"), KERNELS, ids=str)
# Many query tokens to few, more queries than keys, and sequences without either.
MIXED = ((150, 500), (0, 9), (7, 0), (130, 131), (70, 33))
# For what does not depend on the kernel: ragged queries to pages, a dense prompt, and keys and values in TBQ4.
PAGED = PrefillProblem(MIXED, 2, 6, 128, dtype="bfloat16", kv_layout="paged", causal=True, seed=11)
DENSE = PrefillProblem(((200, 260),) * 3, 2, 4, q_layout="dense", kv_layout="dense", causal=True, seed=12)
CODES = replace(PAGED, group=3, k_format="tbq4", v_format="tbq4", means=True, sinks=True, seed=13)
all_layouts = pytest.mark.parametrize("problem", [PAGED, DENSE, CODES], ids=["paged", "dense", "tbq4"])


def of(dtype: str, formats: tuple[str, str], dims: tuple[int, int], **fields: Any) -> PrefillProblem:
    return PrefillProblem(
        dtype=dtype, k_format=formats[0], v_format=formats[1], head_dim=dims[0], value_dim=dims[1],
        means="tbq4" in formats, **{"num_kv_heads": 2, "group": 3, **fields},
    )  # fmt: skip


def changed(cache: Tbq4Array, **parts: Any) -> Tbq4Array:
    return Tbq4Array(**{name: getattr(cache, name) for name in ("codes", "norms", "mean")} | parts)


# --- Against the reference ------------------------------------------------------------------------------------------


@every_kernel
def test_every_kernel_obeys_the_error_law(dtype: str, formats: tuple[str, str], dims: tuple[int, int]) -> None:
    check_prefill(of(dtype, formats, dims, seqlens=MIXED, causal=True, sinks=True))
    check_prefill(of(dtype, formats, dims, seqlens=((40, 300), (90, 64)), group=4, kv_layout="paged", page_size=5))


@every_kernel
@settings(settings.get_profile("gpu"))
@given(data=st.data())
def test_any_problem_obeys_the_error_law(
    dtype: str, formats: tuple[str, str], dims: tuple[int, int], data: st.DataObject
) -> None:
    problem = data.draw(
        strategies.prefill_problems(
            choices=((*formats, dtype, *dims),),
            rows=strategies.lengths(64) | st.sampled_from((127, 128, 129, 255, 256, 257)),
            lengths=strategies.lengths(16) | strategies.lengths(64),
        )
    )
    check_prefill(problem)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("dtype", "formats", "head_dim"), [
    ("float16", RAW, 64), ("bfloat16", RAW, 128), ("bfloat16", FORMATS[0], 64), ("float16", FORMATS[1], 128),
    ("float32", FLOATS, 64), ("float32", FLOATS, 128),
], ids=str)  # fmt: skip
def test_lengths_beside_the_edges_of_tiles_obey_the_error_law(
    dtype: str, formats: tuple[str, str], head_dim: int, *, causal: bool
) -> None:
    """All together: a ragged sequence begins anywhere."""
    edges = tuple(product((0, 1, 63, 64, 65, 127, 128, 129, 257), (0, 1, 31, 33, 63, 64, 65, 129, 257)))
    shape = {"seqlens": edges, "num_kv_heads": 1, "group": 1, "causal": causal}
    check_prefill(of(dtype, formats, (head_dim, head_dim), **shape))


@pytest.mark.parametrize(
    ("formats", "group", "page_size"),
    [(*case, page) for case, page in zip(product((RAW, FLOATS, *FORMATS), GROUPS), cycle(PAGE_SIZES), strict=False)],
    ids=str,
)
def test_every_group_and_page_size_obeys_the_error_law(formats: tuple[str, str], group: int, page_size: int) -> None:
    heads = 2 if group < 16 else 1
    shape = {"seqlens": ((33, 100), (0, 1), (3, 2), (1, 70)), "num_kv_heads": heads, "group": group, "causal": True}
    dtype = "float32" if formats is FLOATS else "float16"
    check_prefill(of(dtype, formats, (64, 64), **shape, kv_layout="paged", page_size=page_size, seed=group))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("left", [None, -1, 0, 1, 16, 64, 200, 2**31 - 1])
@pytest.mark.parametrize("right", [None, 0, 1, 64, 200, 2**31 - 1])
def test_windows_obey_the_error_law(left: int | None, right: int | None, *, causal: bool) -> None:
    shape = {"seqlens": ((100, 300), (64, 64), (70, 33), (5, 0)), "num_kv_heads": 1, "group": 2}
    for dtype, formats in (("float16", RAW), ("float32", FLOATS), ("bfloat16", FORMATS[0])):
        check_prefill(of(dtype, formats, (64, 64), **shape, causal=causal, window=(left, right), sinks=left == 1))


@pytest.mark.parametrize("softcap", [None, 0.5, 50.0, 1e6])
@pytest.mark.parametrize("values", ["normal", "late_max", "rising", "huge", "equal", "tiny_v"])
@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_unusual_values_obey_the_error_law(dtype: str, values: str, softcap: float | None) -> None:
    for formats in (RAW, *FORMATS):
        shape = {"seqlens": ((100, 300), (70, 70), (9, 41)), "num_kv_heads": 1, "values": values, "softcap": softcap}
        check_prefill(of(dtype, formats, (128, 128), **shape, causal=True))
        check_prefill(of(dtype, formats, (64, 64), **shape, window=(30, 9), sinks=True))


@pytest.mark.parametrize("softmax_scale", [0.0, 1.0, -0.3, 1e-6, 3.0])
@all_layouts
def test_scales_obey_the_error_law(problem: PrefillProblem, softmax_scale: float) -> None:
    arrays, options = problem.arrays(), {**problem.options(), "softmax_scale": softmax_scale}
    assert_prefill_call(arrays, options, call_prefill(arrays, options))


@all_layouts
def test_the_default_scale_is_that_of_head_dim(problem: PrefillProblem) -> None:
    assert_same_bits(prefill(problem, softmax_scale=problem.head_dim**-0.5), prefill(problem))


@all_layouts
def test_a_sink_far_above_the_scores_takes_all_the_weight(problem: PrefillProblem) -> None:
    arrays = problem.arrays()
    for sink in (-1e30, -200.0, 200.0, 1e30):
        options = {**problem.options(), "sinks": np.full(problem.num_qo_heads, sink, np.float32)}
        got = call_prefill(arrays, options)
        assert_prefill_call(arrays, options, got)
        assert got[0].any() == (sink < 0)


@pytest.mark.parametrize(
    ("formats", "head_dim", "seqlens", "window"),
    [
        (RAW, 64, ((2049, 2049),), None),
        (RAW, 128, ((300, 4000), (1, 2500)), None),
        (FORMATS[0], 64, ((1500, 3000),), None),
        (FORMATS[0], 128, ((256, 4097),), None),
        (RAW, 128, ((8000, 8000),), (300, None)),
        (FORMATS[2], 256, ((700, 1500),), None),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_long_sequences_obey_the_error_law(
    dtype: str, formats: tuple[str, str], head_dim: int, seqlens: Any, window: Any
) -> None:
    shape = {"seqlens": seqlens, "num_kv_heads": 1, "group": 1, "window": window, "causal": True}
    check_prefill(of(dtype, formats, (head_dim, head_dim), **shape, kv_layout="paged", page_size=64))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_long_sequences_of_floats_obey_the_error_law(head_dim: int) -> None:
    """Also without scores, where the law knows no error but that of sums."""
    shape = {"seqlens": ((16, 30000), (300, 4000)), "num_kv_heads": 1, "group": 1}
    problem = of("float32", FLOATS, (head_dim, head_dim), **shape)
    check_prefill(problem)
    q, k, v = problem.arrays()
    v = np.abs(v)
    options = problem.options() | {"softmax_scale": 0.0}
    assert_prefill_call((q, k, v), options, call_prefill((q, k, v), options))


@pytest.mark.parametrize(("which", "size"), [(0, np.inf), (1, np.inf), (1, -np.inf), (1, 3.4028e38), (2, 3.4028e38)])
def test_floats_that_are_no_sum_of_two_parts_have_their_products(which: int, size: float) -> None:
    """Infinities, and floats that round to one where 11 bits are kept."""
    arrays = [np.random.default_rng(which).random((1, n, 1, 64), np.float32) * 1e-3 for n in (9, 300, 300)]
    arrays[which][0, 5, 0, 3] = size
    options = {"causal": True, "softcap": 5.0 if which == 1 else None}
    got, want = call_prefill(tuple(arrays), options), cuattn.reference.prefill(*arrays, **options, return_lse=True)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5)


def test_more_sequences_than_a_warp_has_lanes_obey_the_error_law() -> None:
    """A tile of ragged queries belongs to any of them: most have none, a few have many."""
    for seed in range(3):
        rng = np.random.default_rng(seed)
        tokens = np.where(rng.random(300) < 0.5, 0, rng.geometric(0.1, 300)) + 300 * (rng.random(300) < 0.01)
        seqlens = tuple((int(n), int(n + rng.integers(0, 40))) for n in tokens)
        check_prefill(of("bfloat16", RAW, (64, 64), seqlens=seqlens, num_kv_heads=2, group=2, causal=True, seed=seed))


@pytest.mark.parametrize("layer", ["l00", "l15", "l29"])
@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_a_language_models_own_prompt_obeys_the_error_law(layer: str, dtype: str) -> None:
    with resources.files("cuattn.examples").joinpath("smollm2_qkv.npz").open("rb") as file, np.load(file) as data:
        q, k, v = (data[f"{layer}_{name}"].astype(DTYPES[dtype])[None] for name in "qkv")
    arrays, options = (q, k, v), {"softmax_scale": 1 / 8, "causal": True}
    assert_prefill_call(arrays, options, call_prefill(arrays, options))
    mean = cuattn.channel_mean(k.astype(np.float32))
    codes = [cuattn.quantize(k.astype(np.float32), mean=mean), cuattn.quantize(v.astype(np.float32))]
    arrays = (q, *(Tbq4Array(x.codes, x.norms, x.mean) for x in codes))
    assert_prefill_call(arrays, options, call_prefill(arrays, options))


# --- Laws between results -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("formats", [RAW, *FORMATS], ids="-".join)
@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_few_tokens_are_a_decode(dtype: str, formats: tuple[str, str]) -> None:
    for seqlen_q in (1, 5, 16):
        problem = Problem(
            (700, 0, 33, 1), seqlen_q=seqlen_q, num_kv_heads=2, group=3, head_dim=128, page_size=16, dtype=dtype,
            sinks=True, window=(500, None), k_format=formats[0], v_format=formats[1], means=formats != RAW,
        )  # fmt: skip
        q, k, v, kv_len = problem.arrays()
        tokens = q if seqlen_q > 1 else q[:, None]
        out, lse = call_prefill((tokens, k, v), {**problem.options(), "kv_len": kv_len})
        assert_decode(problem, *((out, lse) if seqlen_q > 1 else (out[:, 0], lse[:, 0])))


@pytest.mark.parametrize("chunk", [1, 64, 100, 512])
@pytest.mark.parametrize("formats", [RAW, *FORMATS], ids="-".join)
def test_chunks_against_a_cache_are_a_prompt_at_once(formats: tuple[str, str], chunk: int) -> None:
    length = 40 if chunk == 1 else 700
    shape = {"seqlens": ((length, length),) * 2, "num_kv_heads": 1, "causal": True, "q_layout": "dense"}
    problem = of("bfloat16", formats, (128, 128), **shape, kv_layout="paged", sinks=True)
    q, *caches = map(to_device, problem.arrays())
    options = on_device(problem.options())
    parts = []
    for a, b in pairwise((*range(0, length, chunk), length)):
        options["kv_len"] = cupy.full(2, b, np.int32)
        parts.append(call_prefill((q[:, a:b], *caches), options))
    assert_prefill(problem, *(np.concatenate(x, axis=1) for x in zip(*parts, strict=True)))


def test_what_append_writes_chunk_by_chunk_is_attended_to() -> None:
    """The keys and values of a prompt come into a cache in TBQ4 before each chunk's queries attend to them."""
    problem = replace(CODES, seqlens=((300, 300),) * 2, q_layout="dense", kv_layout="dense", k_format="raw16",
                      v_format="raw16", group=2)  # fmt: skip
    q, *rows = map(to_device, problem.arrays())
    caches = [
        Tbq4Array(cupy.full((2, 300, 2, 64), 0xFF, np.uint8), nans((2, 300, 2, 1), np.float16), None,
                  cupy.zeros(1, np.int32))
        for _ in rows
    ]  # fmt: skip
    options = {"causal": True}
    parts = []
    for a, b in pairwise((0, 128, 200, 300)):
        kv_len = cupy.full(2, b, np.int32)
        cuattn.append(*(cupy.ascontiguousarray(x[:, a:b]) for x in rows), *caches, kv_len)
        parts.append(call_prefill((q[:, a:b], *caches), {**options, "kv_len": kv_len}))
    host = [Tbq4Array(x.codes.get(), x.norms.get()) for x in caches]
    got = tuple(np.concatenate(x, axis=1) for x in zip(*parts, strict=True))
    assert_prefill_call((cupy.asnumpy(q), *host), options, got)


@pytest.mark.parametrize("formats", [RAW, *FORMATS], ids="-".join)
def test_the_layout_does_not_change_a_bit(formats: tuple[str, str]) -> None:
    problem = of("float16", formats, (128, 128), seqlens=((150, 260),) * 3, causal=True)
    want = prefill(problem)
    assert_prefill(problem, *want)
    layouts = (("ragged", 1), ("dense", 1), ("padded", 1), *(("paged", size) for size in PAGE_SIZES))
    for q_layout, (kv_layout, size) in product(("ragged", "dense"), layouts):
        other = replace(problem, q_layout=q_layout, kv_layout=kv_layout, page_size=size)
        got = prefill(other)
        if is_tiled(tuple(map(to_device, other.arrays())), other.options()):
            assert_prefill(other, *got)
            continue
        got = tuple(x.reshape(y.shape) for x, y in zip(got, want, strict=True))
        assert_same_bits(got, want, (q_layout, kv_layout, size))


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


def test_sequences_may_share_pages() -> None:
    """Many continuations of one prefix."""
    problem = replace(PAGED, seqlens=tuple((20, 320 + n) for n in range(8)))
    arrays, options = problem.arrays(), problem.options()
    options["page_table"][1:, :20] = options["page_table"][0, :20]
    assert_prefill_call(arrays, options, call_prefill(arrays, options))


@pytest.mark.parametrize("problem", [PAGED, DENSE], ids=["paged", "dense"])
def test_scaling_v_scales_out_and_lse_does_not_see_v(problem: PrefillProblem) -> None:
    """A power of two scales bfloat16 without rounding."""
    problem = replace(problem, dtype="bfloat16")
    q, k, v = problem.arrays()
    out, lse = call_prefill((q, k, v), problem.options())
    scaled = (v.astype(np.float32) * -4).astype(v.dtype)
    got = call_prefill((q, k, scaled), problem.options())
    # Without the sign of zeros.
    np.testing.assert_array_equal(got[0].astype(np.float32), -4 * out.astype(np.float32))
    assert got[1].tobytes() == lse.tobytes()


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_a_constant_score_gives_the_mean_of_v_and_the_log_of_the_length(dtype: str) -> None:
    problem = PrefillProblem(((300, 301), (5, 2000)), 2, 3, 96, dtype=dtype, causal=True, seed=2)
    arrays, options = problem.arrays(), {**problem.options(), "softmax_scale": 0.0}
    arrays[2][...] = 3
    out, lse = call_prefill(arrays, options)
    assert (out == 3).all()
    assert_prefill_call(arrays, options, (out, lse))


# --- What must not matter -------------------------------------------------------------------------------------------


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


# --- What is not finite ---------------------------------------------------------------------------------------------

# 100 tokens at positions 100 to 199 of the second of two sequences; what is spoiled is in its second KV head.
SEEN = PrefillProblem(((100, 200),) * 2, 2, 3, 128, q_layout="dense", kv_layout="dense", causal=True, seed=4)


@pytest.mark.parametrize("window", [None, (30, None)])
@pytest.mark.parametrize("token", [0, 80, 103, 127, 128, 199])
@pytest.mark.parametrize("dtype", [*DTYPE_NAMES, "float32"])
def test_what_is_not_finite_in_a_token_is_seen_by_exactly_the_rows_that_see_it(
    dtype: str, token: int, window: tuple[int, None] | None
) -> None:
    problem = replace(SEEN, dtype=dtype, window=window)
    first = max(0, token - 100)
    tokens = slice(first, None if window is None else max(0, token + 31 - 100))
    clean = prefill(problem)
    for which, value in (("k", np.nan), ("v", np.nan), ("v", np.inf), ("v", -np.inf)):
        arrays = problem.arrays()
        arrays[1 + "kv".index(which)][1, token, 1, 77] = value
        out, lse = call_prefill(arrays, problem.options())
        sees = np.zeros(out.shape, bool)
        sees[1, tokens, 3:, 77 if which == "v" else slice(None)] = True
        np.testing.assert_array_equal(~np.isfinite(out.astype(np.float32)), sees)
        np.testing.assert_array_equal(np.isnan(lse), sees.all(axis=-1))
        assert_prefill_call(arrays, problem.options(), (out, lse))
        # Bits may differ where a tile was summed in another order: in the same head of the same sequence only.
        others = np.ones(lse.shape, bool)
        others[1, :, 3:] = False
        assert_same_bits((out[others], lse[others]), (clean[0][others], clean[1][others]))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("token", [0, 103, 128, 199])
@pytest.mark.parametrize("which", "kv")
@pytest.mark.parametrize("head_dim", TBQ4_DIMS)
def test_a_norm_that_is_not_finite_is_seen_by_the_rows_that_see_its_token(
    head_dim: int, which: str, token: int, value: float
) -> None:
    """In K by all of a row, in V by its block."""
    problem = replace(SEEN, head_dim=head_dim, k_format="tbq4", v_format="tbq4", means=True)
    q, k, v = problem.arrays()
    norms = (k if which == "k" else v).norms.copy()
    norms[1, token, 1, -1] = value
    arrays = (q, changed(k, norms=norms), v) if which == "k" else (q, k, changed(v, norms=norms))
    out, lse = call_prefill(arrays, problem.options())
    sees = np.zeros(out.shape, bool)
    sees[1, max(0, token - 100) :, 3:, 0 if which == "k" else head_dim - head_dim // k.norms.shape[-1] :] = True
    np.testing.assert_array_equal(~np.isfinite(out), sees)
    np.testing.assert_array_equal(np.isnan(lse), sees[..., 0] & (which == "k"))
    assert_prefill_call(arrays, problem.options(), (out, lse))


@pytest.mark.parametrize("problem", [SEEN, replace(SEEN, k_format="tbq4", v_format="tbq4")], ids=["raw16", "tbq4"])
def test_nan_in_a_query_is_seen_by_its_row_alone(problem: PrefillProblem) -> None:
    arrays = problem.arrays()
    clean = call_prefill(arrays, problem.options())
    arrays[0][1, 50, 4, 5] = np.nan
    out, lse = call_prefill(arrays, problem.options())
    sees = np.zeros(lse.shape, bool)
    sees[1, 50, 4] = True
    np.testing.assert_array_equal(np.isnan(lse), sees)
    assert np.isnan(out[1, 50, 4]).all()
    assert_same_bits((out[~sees], lse[~sees]), (clean[0][~sees], clean[1][~sees]))


# --- Repeats, streams, threads, devices, graphs, memory ---------------------------------------------------------------


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
    # The pool sees what is taken through CuPy; the plan says that the kernel takes nothing else.
    assert cuattn.plan_prefill(q, k, v).workspace_bytes == 0
    # The first token sees one key.
    if formats == RAW:
        np.testing.assert_array_equal(cupy.asnumpy(out[0, 0]), cupy.asnumpy(v[0, 0]))


# --- Views ----------------------------------------------------------------------------------------------------------


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


# --- Offsets beyond 32 bits -----------------------------------------------------------------------------------------


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


# --- Bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argument", "change", "words"),
    [
        ("q", lambda x: x.astype(np.float32), ("q", "float32", "float16", "bfloat16")),
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


def test_a_decode_of_the_last_token_is_the_last_row_of_a_causal_prefill() -> None:
    """By the law of decode, over the cache that the prompt filled."""
    problem = replace(DENSE, seqlens=((260, 260),) * 3)
    q, k, v = problem.arrays()
    out, lse = call_prefill((q, k, v), problem.options())
    assert_call((q[:, -1], k, v, np.full(3, 260, np.int32)), {}, (out[:, -1], lse[:, -1]))
