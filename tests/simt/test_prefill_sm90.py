"""prefill_sm90.cu, the very file that a Hopper GPU runs, on the CPU harness, against the reference."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import strategies
from hypothesis import assume, given
from hypothesis import strategies as st
from simt import harness, product
from simt.faults import every
from simt.prefill_cases import assert_same_bits
from simt.tiled_cases import BASE, SMALL, check, run
from strategies import PrefillProblem, prefill_problems
from tolerance import assert_prefill, assert_prefill_call

from cuattn import _plan

# In each dtype half of those in 16 bits.
CONFIGS = [
    c
    for c in _plan.tiled_prefill_configs(product.H200)
    if not c.uses_tbq4 and (c.dtype is _plan.Dtype.FP16) == ((c.head_dim // 32 + c.paged + c.softcap) % 2 == 0)
]
ROWS = st.sampled_from((1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 191, 193, 260)) | st.integers(1, 300)
KEYS = strategies.lengths(16) | strategies.lengths(32)
_SIDES = st.sampled_from((None, None, 0, 5, 40, 100))
WINDOWS = st.none() | st.tuples(_SIDES, _SIDES)


def has_keys_and_queries(problem: PrefillProblem) -> bool:
    """Other calls are for the other kernel."""
    tokens, keys = (sum(lengths) for lengths in zip(*problem.seqlens, strict=True))
    return tokens > 0 and (problem.kv_layout in {"padded", "paged"} or keys > 0)


@given(
    problem=prefill_problems(
        rows=ROWS, lengths=KEYS, page_sizes=(64, 192), windows=WINDOWS, softcaps=(None, None, 5.0), groups=(1, 2, 3),
        choices=tuple(("raw16", "raw16", *of) for of in SMALL),
    ),
    seed=st.integers(0, 5),
    num_ctas=st.sampled_from((1, 2, 3, 100)),
)  # fmt: skip
def test_any_problem_obeys_the_error_law_under_any_schedule(problem: PrefillProblem, seed: int, num_ctas: int) -> None:
    assume(has_keys_and_queries(problem))
    check(problem, seed=seed, num_ctas=num_ctas)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("config", every(CONFIGS, 2), ids=lambda c: c.describe())
def test_the_tiles_of_every_kernel_obey_the_error_law(config: _plan.TiledPrefillConfig, *, causal: bool) -> None:
    problem = replace(BASE, seqlens=((200, 333),), num_kv_heads=1, dtype=config.dtype.value, head_dim=config.head_dim,
                      value_dim=config.value_dim, causal=causal, kv_layout="paged" if config.paged else "dense",
                      page_size=128, softcap=5.0 if config.softcap else None, window=(90, None))  # fmt: skip
    check(problem, changes={}, seed=2)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("values", ["normal", "late_max", "early_max", "rising", "falling", "huge", "equal"])
def test_unusual_scores_obey_the_error_law(values: str, *, causal: bool) -> None:
    for dtype, head_dim, value_dim in SMALL:
        choices = {"dtype": dtype, "head_dim": head_dim, "value_dim": value_dim}
        check(replace(BASE, values=values, causal=causal, seqlens=((70, 150),), **choices), seed=1)


@pytest.mark.parametrize("kv_layout", ["padded", "paged", "ragged"])
@pytest.mark.parametrize(("dtype", "head_dim", "value_dim"), list(SMALL))
def test_keys_past_a_length_do_not_matter(dtype: str, head_dim: int, value_dim: int | None, kv_layout: str) -> None:
    """They are NaN, or of another sequence; lengths are on and beside edges of tiles, of which there may be none."""
    for causal in (False, True):
        for lengths in ((128, 0, 1, 15, 16), (17, 63, 64, 65, 200)):
            check(replace(BASE, seqlens=tuple((130, n) for n in lengths), num_kv_heads=1, group=1, dtype=dtype,
                          head_dim=head_dim, value_dim=value_dim, kv_layout=kv_layout, page_size=64,
                          causal=causal))  # fmt: skip


@pytest.mark.parametrize("kv_layout", ["padded", "paged"])
def test_lengths_on_the_device_are_held_to_what_there_is(kv_layout: str) -> None:
    problem = replace(BASE, kv_layout=kv_layout, page_size=64, seqlens=((70, 150), (70, 64)), causal=True)
    arrays = [np.nan_to_num(x) for x in problem.arrays()]
    options = problem.options()
    if kv_layout == "paged":
        options["page_table"] = options["page_table"][:, :3].copy()
        options["page_table"][1] = options["page_table"][0]
    capacity = arrays[1].shape[1] * (3 if kv_layout == "paged" else 1)
    options["kv_len"] = np.array([capacity, 0], np.int32)
    got = run(problem, arrays, **options, device_lengths={"kv_len": np.array([2**31 - 1, -(2**31)], np.int32)})
    assert_same_bits(got, run(problem, arrays, **options))


def test_ragged_lengths_on_the_device_are_held_to_what_there_is() -> None:
    problem = replace(BASE, q_layout="ragged", kv_layout="ragged", seqlens=((70, 100), (0, 50), (130, 64)), causal=True)
    wild = {
        "cu_seqlens_q": np.array([-5, 70, 70, 2**31 - 1], np.int32),
        "cu_seqlens_k": np.array([-(2**31), 100, 150, 10**9], np.int32),
    }
    assert_same_bits(run(problem, device_lengths=wild), run(problem))


@pytest.mark.parametrize("kv_layout", ["ragged", "dense", "padded", "paged"])
def test_a_sequence_gives_the_same_bits_wherever_it_lies(kv_layout: str) -> None:
    """Beside others whose queries are NaN, of which there are more than a warp looks at at once."""
    problem = replace(BASE, kv_layout="padded", seqlens=((97, 210),), causal=True)
    expected = run(problem)
    others = 40 if kv_layout != "dense" else 2
    tokens = [(n % 7, 210 if kv_layout == "dense" else n % 5) for n in range(others)]
    many = replace(problem, q_layout="ragged", kv_layout=kv_layout, page_size=64, seqlens=((97, 210), *tokens))
    q, k, v = many.arrays()
    spoiled = q.copy()
    spoiled[97:] = np.nan
    for arrays in ((q, k, v), (spoiled, k, v)):
        assert_same_bits(tuple(x[None, :97] for x in run(many, arrays)), expected)


@pytest.mark.parametrize("q_layout", ["ragged", "dense"])
@pytest.mark.parametrize("kv_layout", ["ragged", "padded", "paged"])
def test_sequences_may_have_no_queries_or_no_keys(q_layout: str, kv_layout: str) -> None:
    seqlens = ((0, 5), (33, 0), (0, 0), (129, 20), (0, 70), (5, 64))
    if q_layout == "dense":
        seqlens = tuple((33, n) for _, n in seqlens)
    for num_ctas in (1, 50):
        problem = replace(BASE, q_layout=q_layout, kv_layout=kv_layout, seqlens=seqlens, page_size=64, causal=True)
        check(problem, num_ctas=num_ctas)


def test_lengths_and_pages_may_be_any_views() -> None:
    problem = replace(BASE, kv_layout="paged", page_size=64, seqlens=((70, 150), (70, 64)), causal=True)
    options = problem.options()
    expected = run(problem)
    wide = np.full((3 * options["page_table"].shape[1], 4), -1, np.int32)
    view = wide[::3, ::2].T
    view[...] = options["page_table"]
    lengths = np.full(4, -1, np.int32)[::2]
    lengths[...] = options["kv_len"]
    got = run(problem, page_table=view, device_lengths={"kv_len": lengths})
    assert_same_bits(got, expected)


@pytest.mark.parametrize("seqlens", [(100, 33), (200, 1), (130, 129), (300, 170)])
def test_rows_that_see_no_key_are_zero(seqlens: tuple[int, int]) -> None:
    """Whole tiles of rows, and parts of one."""
    problem = replace(BASE, seqlens=(seqlens,), causal=True)
    out, lse = run(problem)
    assert_prefill(problem, out, lse)
    empty = slice(0, seqlens[0] - seqlens[1])
    assert (out[:, empty] == 0).all()
    assert np.isneginf(lse[:, empty]).all()


@pytest.mark.parametrize("softmax_scale", [1.0, 1e-6, 1e-18])
def test_scales_obey_the_error_law(softmax_scale: float) -> None:
    arrays, options = BASE.arrays(), {**BASE.options(), "softmax_scale": softmax_scale}
    assert_prefill_call(arrays, options, run(BASE, arrays, softmax_scale=softmax_scale))


def test_any_order_of_axes_and_rows_apart_give_the_same_bits() -> None:
    problem = replace(BASE, causal=True)
    arrays = problem.arrays()
    expected = run(problem, arrays)

    def apart(x: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
        """A copy whose axes lie in memory in another order, in rows with a gap."""
        shape = [x.shape[i] for i in axes]
        wide = np.full((*shape, x.shape[-1] + 24), np.nan, x.dtype)[..., 8 : 8 + x.shape[-1]]
        view = wide.transpose(*np.argsort(axes), 3)
        view[...] = x
        return view

    for axes in ((0, 2, 1), (1, 0, 2), (2, 1, 0)):
        assert_same_bits(run(problem, tuple(apart(x, axes) for x in arrays)), expected, axes)


@pytest.mark.parametrize("num_ctas", [1, 3, 1000])
def test_the_number_of_ctas_does_not_change_a_bit(num_ctas: int) -> None:
    problem = replace(BASE, causal=True)
    assert_same_bits(run(problem, num_ctas=num_ctas), run(problem, num_ctas=2))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("dtype", "head_dim", "value_dim"), list(SMALL))
def test_a_value_that_is_not_finite_shows_in_the_rows_that_see_it_and_in_no_other(
    dtype: str, head_dim: int, value_dim: int | None, bad: float
) -> None:
    choices = {"dtype": dtype, "head_dim": head_dim, "value_dim": value_dim}
    problem = replace(BASE, seqlens=((80, 100), (80, 100)), causal=True, **choices)
    q, k, v = problem.arrays()
    for key in (0, 20, 55, 99):  # of the first sequence; its tokens stand at 20 to 99
        spoiled = v.copy()
        spoiled[0, key, 1, 5] = bad
        out, lse = run(problem, (q, k, spoiled))
        assert_prefill_call((q, k, spoiled), problem.options(), (out, lse))
        sees = np.zeros(out.shape, bool)
        sees[0, max(0, key - 20) :, 2:, 5] = True
        np.testing.assert_array_equal(~np.isfinite(out.astype(np.float32)), sees)
        spoiled = k.copy()
        spoiled[0, key, 1, 5] = np.nan
        out, lse = run(problem, (q, spoiled, v))
        np.testing.assert_array_equal(np.isnan(lse), sees[..., 5])
        assert_prefill_call((q, spoiled, v), problem.options(), (out, lse))


def test_a_query_that_is_nan_is_seen_in_its_row_alone() -> None:
    problem = replace(BASE, causal=True)
    arrays = problem.arrays()
    arrays[0][0, 30, 1, 5] = np.nan
    out, lse = run(problem, arrays)
    sees = np.zeros(lse.shape, bool)
    sees[0, 30, 1] = True
    np.testing.assert_array_equal(np.isnan(lse), sees)
    np.testing.assert_array_equal(np.isnan(out).any(-1), sees)


@pytest.mark.skipif(bool(os.environ.get("CUATTN_SIMT_SANITIZE")), reason="this is the sanitizer run itself")
def test_the_kernel_is_clean_under_address_and_undefined_behavior_sanitizers() -> None:
    run = harness.run_with_sanitizers([str(Path(__file__).with_name("sanitized.py")), "prefill_sm90"])
    assert run.returncode == 0, run.stdout + run.stderr
    assert "6 problems of prefill_sm90" in run.stdout
