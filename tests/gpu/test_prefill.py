"""prefill on a GPU against the reference, and laws between its results."""

from dataclasses import replace
from importlib import resources
from itertools import cycle, pairwise, product
from typing import Any

import cupy
import numpy as np
import pytest
import strategies
from gpu.helpers import (
    call_prefill,
    check_prefill,
    nans,
    on_device,
    to_device,
)
from gpu.prefill_cases import (
    CODES,
    DENSE,
    DTYPE_NAMES,
    FLOATS,
    FORMATS,
    GROUPS,
    MIXED,
    PAGE_SIZES,
    PAGED,
    RAW,
    every_kernel,
    of,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import DTYPES, PrefillProblem, Problem
from tolerance import assert_call, assert_decode, assert_prefill, assert_prefill_call

import cuattn
from cuattn import Tbq4Array

# Against the reference


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


# Laws between results


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


def test_a_decode_of_the_last_token_is_the_last_row_of_a_causal_prefill() -> None:
    """By the law of decode, over the cache that the prompt filled."""
    problem = replace(DENSE, seqlens=((260, 260),) * 3)
    q, k, v = problem.arrays()
    out, lse = call_prefill((q, k, v), problem.options())
    assert_call((q[:, -1], k, v, np.full(3, 260, np.int32)), {}, (out[:, -1], lse[:, -1]))
