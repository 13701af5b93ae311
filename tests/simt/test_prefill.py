"""prefill_mma.cu, the very file that a GPU runs, on the CPU harness, against the reference."""

import os
from dataclasses import replace
from itertools import pairwise
from itertools import product as combinations
from pathlib import Path

import numpy as np
import pytest
import strategies
from hypothesis import given
from hypothesis import strategies as st
from simt import harness, product
from simt.faults import every
from simt.prefill_cases import (
    BASE,
    FLOATS,
    RAW,
    SMALL,
    SMALL_TBQ4,
    TBQ4,
    check,
    every_format,
    run,
    small,
)
from strategies import PrefillProblem, Problem, prefill_problems
from tolerance import LSE_OF_A_WHOLE_SUM, assert_decode, assert_prefill, assert_prefill_call

from cuattn import _plan

SEEDS = st.integers(0, 5)
SPLITS = st.sampled_from((1, 2, 3, 8))
KEYS = strategies.lengths(16) | strategies.lengths(32)


def check_splits(problem: PrefillProblem, seed: int, num_splits: int) -> None:
    check(problem, seed=seed, num_splits=num_splits if problem.q_layout == "dense" else 1)


@given(problem=prefill_problems(choices=tuple(SMALL), lengths=KEYS), seed=SEEDS, num_splits=SPLITS)
def test_any_problem_obeys_the_error_law_under_any_schedule(
    problem: PrefillProblem, seed: int, num_splits: int
) -> None:
    check_splits(problem, seed, num_splits)


@given(problem=prefill_problems(choices=tuple(SMALL_TBQ4), lengths=KEYS), seed=SEEDS, num_splits=SPLITS)
def test_any_problem_in_tbq4_obeys_the_error_law_under_any_schedule(
    problem: PrefillProblem, seed: int, num_splits: int
) -> None:
    check_splits(problem, seed, num_splits)


@pytest.mark.parametrize(
    ("dtype", "formats", "dims", "arch"),
    [
        *((("float16", "bfloat16")[i % 2], RAW, dims, "sm_90a") for i, dims in enumerate(_plan.PREFILL_DIMS)),
        *((("bfloat16", "float16")[i % 2], TBQ4, (dim, dim), "sm_90a") for i, dim in enumerate((64, 128, 256, 512))),
        ("float16", ("tbq4", "raw16"), (256, 256), "sm_90a"),
        ("bfloat16", ("raw16", "tbq4"), (128, 128), "sm_90a"),
        ("float32", FLOATS, (96, 96), "sm_80"),
        ("float32", FLOATS, (128, 128), "sm_90a"),
        ("float32", FLOATS, (192, 128), "sm_90a"),
        ("float32", FLOATS, (512, 512), "sm_86"),
    ],
    ids=str,
)
def test_the_tiles_of_every_kernel_obey_the_error_law(
    dtype: str, formats: tuple[str, str], dims: tuple[int, int], arch: str
) -> None:
    problem = PrefillProblem(
        ((100, 140), (0, 9), (7, 0), (45, 45)), group=3, head_dim=dims[0], value_dim=dims[1], dtype=dtype, causal=True,
        kv_layout="paged", page_size=5, k_format=formats[0], v_format=formats[1], means="tbq4" in formats, sinks=True,
    )  # fmt: skip
    assert_prefill(problem, *product.prefill(problem, seed=2, device=_plan.DEVICES[arch]))


@pytest.mark.parametrize("causal", [False, True])
@every_format
def test_lengths_beside_the_edges_of_tiles_obey_the_error_law(base: PrefillProblem, *, causal: bool) -> None:
    """All together: a ragged sequence begins anywhere."""
    edges = tuple(combinations((0, 1, 31, 32, 33, 65), (0, 1, 15, 16, 17, 33)))
    check(replace(base, seqlens=edges, num_kv_heads=1, group=1, causal=causal))


@pytest.mark.parametrize("group", [1, 2, 4, 5, 6, 7, 8, 12, 33, 64])
def test_every_group_obeys_the_error_law(group: int) -> None:
    """Also heads of one token in several tiles."""
    check(replace(BASE, group=group, seqlens=((7, 20), (0, 1), (1, 3)), causal=True, sinks=True), seed=group % 6)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_windows_obey_the_error_law(dtype: str, *, causal: bool) -> None:
    for left, right in combinations((None, -1, 0, 5, 40, 2**31 - 1), (None, 0, 7, 2**31 - 1)):
        check(replace(BASE, num_kv_heads=1, causal=causal, window=(left, right), sinks=left == 5, dtype=dtype))


@pytest.mark.parametrize("softcap", [None, 0.5, 20.0])
@pytest.mark.parametrize("values", every(["late_max", "normal", "huge", "early_max", "equal", "rising", "falling"], 2))
@every_format
def test_unusual_scores_obey_the_error_law(base: PrefillProblem, values: str, softcap: float | None) -> None:
    """Maxima that grow by less than a softmax need follow, and by more, in tiles that some rows see in part."""
    problem = replace(base, num_kv_heads=1, values=values, softcap=softcap, sinks=True)
    check(problem)
    check(replace(problem, causal=True, window=(30, None), seqlens=((20, 150), (70, 70))))


@pytest.mark.parametrize("softmax_scale", [0.0, -0.3, 1.0, 1e-6])
@every_format
def test_scales_obey_the_error_law(base: PrefillProblem, softmax_scale: float) -> None:
    arrays = base.arrays()
    for more in ({}, {"causal": True, "softcap": 3.0}):
        options = {**base.options(), **more, "softmax_scale": softmax_scale}
        assert_prefill_call(arrays, options, run(base, arrays, **options))


def test_a_scale_of_zero_gives_the_mean_of_the_values() -> None:
    problem = replace(BASE, causal=True, seqlens=((40, 41),))
    arrays = problem.arrays()
    arrays[2][...] = 3
    out, lse = run(problem, arrays, softmax_scale=0.0)
    assert (out == 3).all()
    np.testing.assert_allclose(lse, np.log(np.arange(2, 42))[:, None].repeat(6, axis=1), rtol=LSE_OF_A_WHOLE_SUM)


@pytest.mark.parametrize("values", ["normal", "rising"])
@every_format
def test_one_token_is_a_decode(base: PrefillProblem, values: str) -> None:
    decode = Problem((70, 0, 33, 1), num_kv_heads=2, group=3, sinks=True, values=values, window=(50, None),
                     k_format=base.k_format, v_format=base.v_format, means=base.means, page_size=16)  # fmt: skip
    q, k, v, kv_len = decode.arrays()
    out, lse = product.prefill_arrays(q[:, None], k, v, kv_len=kv_len, **decode.options(), changes=small(base))
    assert_decode(decode, out[:, 0], lse[:, 0])


@pytest.mark.parametrize("edges", [(0, 100), (0, 1, 37, 64, 100), (0, 32, 64, 96, 100)])
@every_format
def test_chunks_against_a_cache_are_a_prompt_at_once(base: PrefillProblem, edges: tuple[int, ...]) -> None:
    problem = replace(base, seqlens=((100, 100),), causal=True, q_layout="dense", kv_layout="paged", sinks=True)
    q, k, v = problem.arrays()
    parts = [run(problem, (q[:, a:b], k, v), kv_len=[b]) for a, b in pairwise(edges)]
    assert_prefill(problem, *(np.concatenate(x, axis=1) for x in zip(*parts, strict=True)))


@pytest.mark.skipif(bool(os.environ.get("CUATTN_SIMT_SANITIZE")), reason="this is the sanitizer run itself")
def test_the_kernel_is_clean_under_address_and_undefined_behavior_sanitizers() -> None:
    run = harness.run_with_sanitizers([str(Path(__file__).with_name("sanitized.py")), "prefill"])
    assert run.returncode == 0, run.stdout + run.stderr
    assert "6 problems of prefill" in run.stdout
