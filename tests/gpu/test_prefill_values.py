"""prefill on a GPU with scores and values of unusual sizes, and with such as are not finite."""

from dataclasses import replace

import numpy as np
import pytest
from gpu.helpers import (
    assert_same_bits,
    call_prefill,
    check_prefill,
    prefill,
)
from gpu.prefill_cases import DTYPE_NAMES, FORMATS, RAW, TBQ4_DIMS, all_layouts, changed, of
from strategies import PrefillProblem
from tolerance import assert_prefill_call, of_positive_sums

import cuattn


@pytest.mark.parametrize("softcap", [None, 0.5, 50.0, 1e6])
@pytest.mark.parametrize("values", ["normal", "late_max", "early_max", "rising", "falling", "huge", "equal", "tiny_v"])
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


@pytest.mark.parametrize(("which", "size"), [(0, np.inf), (1, np.inf), (1, -np.inf), (1, 3.4028e38), (2, 3.4028e38)])
def test_floats_that_are_no_sum_of_two_parts_have_their_products(which: int, size: float) -> None:
    """Infinities, and floats that round to one where 11 bits are kept."""
    arrays = [np.random.default_rng(which).random((1, n, 1, 64), np.float32) * 1e-3 for n in (9, 300, 300)]
    arrays[which][0, 5, 0, 3] = size
    options = {"causal": True, "softcap": 5.0 if which == 1 else None}
    got, want = call_prefill(tuple(arrays), options), cuattn.reference.prefill(*arrays, **options, return_lse=True)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=of_positive_sums(300))


# What is not finite

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
