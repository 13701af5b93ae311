"""prefill_sm90.cu, the very file that a Hopper GPU runs, on the CPU harness, against the reference."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import strategies
from hypothesis import assume, given
from hypothesis import strategies as st
from simt import harness, product
from simt.prefill_cases import assert_same_bits
from strategies import PrefillProblem, prefill_problems
from tolerance import assert_prefill, assert_prefill_call

from cuattn import _plan

KERNEL, ITEMS, SOFTMAX = "prefill_sm90.cu", "common/prefill_items.cuh", "common/softmax.cuh"


def config(consumers: int, tile_kv: int, num_stages: int, **choices: bool) -> dict[str, int]:
    return {"consumers": consumers, "tile_kv": tile_kv, "num_stages": num_stages, **choices}


# By dtype and head_dim, of which each is one build.
SMALL = {
    ("float16", 64): config(2, 16, 2, weigh_first=True),
    ("bfloat16", 64): config(3, 32, 3),
    ("float16", 128): config(1, 64, 2, weigh_first=False),
    ("bfloat16", 256): config(2, 32, 1, take_turns=False),
}
CONFIGS = [c for c in _plan.tiled_prefill_configs(product.H200) if not c.uses_tbq4]
ROWS = st.sampled_from((1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 191, 193, 260)) | st.integers(1, 300)
KEYS = strategies.lengths(16) | strategies.lengths(32)
WINDOWS = st.sampled_from((None, None, None, (None, 0), (None, 5), (None, 40)))
BASE = PrefillProblem(((150, 210), (150, 210)), num_kv_heads=2, group=2, q_layout="dense", kv_layout="dense")


def run(problem: PrefillProblem, arrays: tuple[Any, ...] | None = None, **choices: Any) -> tuple[np.ndarray, ...]:
    options = {"changes": SMALL.get((problem.dtype, problem.head_dim)), **problem.options(), **choices}
    return product.tiled_prefill_arrays(*(arrays or problem.arrays()), **options)


def has_keys_and_queries(problem: PrefillProblem) -> bool:
    """Other calls are for the other kernel."""
    return problem.seqlens[0][0] > 0 and (problem.kv_layout != "dense" or problem.seqlens[0][1] > 0)


def check(problem: PrefillProblem, **choices: Any) -> None:
    assert_prefill(problem, *run(problem, **choices))


@given(
    problem=prefill_problems(
        rows=ROWS, lengths=KEYS, q_layouts=("dense",), kv_layouts=("dense", "padded", "paged"), page_sizes=(64, 192),
        windows=WINDOWS, softcaps=(None,), sinks=(False,), groups=(1, 2, 3),
        choices=tuple(("raw16", "raw16", *of, None) for of in SMALL),
    ),
    seed=st.integers(0, 5),
    num_ctas=st.sampled_from((1, 2, 3, 100)),
)  # fmt: skip
def test_any_problem_obeys_the_error_law_under_any_schedule(problem: PrefillProblem, seed: int, num_ctas: int) -> None:
    assume(has_keys_and_queries(problem))
    check(problem, seed=seed, num_ctas=num_ctas)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.describe())
def test_the_tiles_of_every_kernel_obey_the_error_law(config: _plan.TiledPrefillConfig, *, causal: bool) -> None:
    problem = replace(BASE, seqlens=((200, 333),), num_kv_heads=1, dtype=config.dtype.value, head_dim=config.head_dim,
                      causal=causal, kv_layout="paged" if config.paged else "dense", page_size=128)  # fmt: skip
    check(problem, changes={}, seed=2)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("values", ["normal", "late_max", "early_max", "rising", "falling", "huge", "equal"])
def test_unusual_scores_obey_the_error_law(values: str, *, causal: bool) -> None:
    for dtype, head_dim in SMALL:
        check(replace(BASE, values=values, causal=causal, dtype=dtype, head_dim=head_dim, seqlens=((70, 150),)), seed=1)


@pytest.mark.parametrize("kv_layout", ["padded", "paged"])
@pytest.mark.parametrize(("dtype", "head_dim"), list(SMALL))
def test_keys_past_a_length_do_not_matter(dtype: str, head_dim: int, kv_layout: str) -> None:
    """They are NaN; lengths are on and beside the edges of tiles of keys, of which a sequence may have none."""
    for causal in (False, True):
        for lengths in ((128, 0, 1, 15, 16), (17, 63, 64, 65, 200)):
            check(replace(BASE, seqlens=tuple((130, n) for n in lengths), num_kv_heads=1, group=1, dtype=dtype,
                          head_dim=head_dim, kv_layout=kv_layout, page_size=64, causal=causal))  # fmt: skip


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
    got = run(problem, arrays, **options, device_kv_len=np.array([2**31 - 1, -(2**31)], np.int32))
    assert_same_bits(got, run(problem, arrays, **options))


def test_lengths_and_pages_may_be_any_views() -> None:
    problem = replace(BASE, kv_layout="paged", page_size=64, seqlens=((70, 150), (70, 64)), causal=True)
    options = problem.options()
    expected = run(problem)
    wide = np.full((3 * options["page_table"].shape[1], 4), -1, np.int32)
    view = wide[::3, ::2].T
    view[...] = options["page_table"]
    lengths = np.full(4, -1, np.int32)[::2]
    lengths[...] = options["kv_len"]
    got = run(problem, page_table=view, device_kv_len=lengths)
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
@pytest.mark.parametrize(("dtype", "head_dim"), list(SMALL))
def test_a_value_that_is_not_finite_shows_in_the_rows_that_see_it_and_in_no_other(
    dtype: str, head_dim: int, bad: float
) -> None:
    problem = replace(BASE, seqlens=((80, 100), (80, 100)), dtype=dtype, head_dim=head_dim, causal=True)
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
    assert "3 problems of prefill_sm90" in run.stdout


# ---- planted faults ----------------------------------------------------------------------------------------------

CAUSAL = replace(BASE, causal=True, values="late_max")
# Scores that grow as the kernel goes, from the last key to the first.
RISING = replace(BASE, values="falling")
NORMAL = replace(CAUSAL, values="normal")
RISING_OF_32 = replace(RISING, dtype="bfloat16")
CAUSAL_OF_32 = replace(CAUSAL, dtype="bfloat16")
WIDE = replace(CAUSAL, head_dim=128)
PADDED = replace(CAUSAL, kv_layout="padded", seqlens=((150, 210), (150, 90)))
PAGED = replace(PADDED, kv_layout="paged", page_size=64)
# name: (problem, file, text, what takes its place)
FAULTS = {
    "rows of V beyond kv_len are left": (
        PADDED,
        KERNEL,
        "        clear_rows(sm.v[first.stage], w.kv_len - tile * cfg::TILE_KV, at);\n",
        "",
    ),
    "the first row of V beyond kv_len is left": (
        PADDED,
        KERNEL,
        "int i = count * VECTORS",
        "int i = (count + 1) * VECTORS",
    ),
    "the last row of V is cleared": (PADDED, KERNEL, "int i = count * VECTORS", "int i = (count - 1) * VECTORS"),
    "V is cleared before it is there": (
        PADDED,
        KERNEL,
        "        ptx::mbarrier_wait(&sm.v_full[first.stage], first.phase);\n",
        "",
    ),
    "the length of another sequence": (PADDED, ITEMS, "w.batch * p.kv_len_stride", "0 * p.kv_len_stride"),
    "queries aligned to the end of the array": (
        PADDED,
        ITEMS,
        "p.num_tokens, kv_len, -1",
        "p.num_tokens, p.capacity, -1",
    ),
    "the page of another tile": (PAGED, KERNEL, "w.place(p, (tile - 1) * cfg::TILE_KV)", "w.place(p, 0)"),
    "V from the page of other keys": (
        PAGED,
        KERNEL,
        "load_values(before, at, tile + 1);",
        "load_values(at, at, tile + 1);",
    ),
    "the pages of another sequence": (
        PAGED,
        ITEMS,
        "batch * p.page_table_stride_batch",
        "0 * p.page_table_stride_batch",
    ),
    "values that are not finite in another page": (
        replace(PAGED, values="normal", seqlens=((150, 210), (150, 210))),
        ITEMS,
        "p.v + at.page * p.v_stride_page",
        "p.v + 0 * p.v_stride_page",
    ),
    "K is read before it is there": (
        CAUSAL,
        KERNEL,
        "        turns.begin();\n        ptx::mbarrier_wait(&sm.k_full[keys.stage], keys.phase);\n",
        "        turns.begin();\n",
    ),
    "V is read before it is there": (
        CAUSAL,
        KERNEL,
        "        if (!V::EXPANDED) ptx::mbarrier_wait(&sm.v_full[values.stage], values.phase);\n",
        "",
    ),
    "Q is read before it is there": (CAUSAL, KERNEL, "      ptx::mbarrier_wait(&sm.q_full[at.group], q_phase);\n", ""),
    "K takes the place of a tile that is read": (
        CAUSAL,
        KERNEL,
        "      if (K::EXPANDED || asks) ptx::mbarrier_wait(&sm.k_empty[keys.stage], keys.phase ^ 1);\n",
        "",
    ),
    "V takes the place of a tile that is read": (
        CAUSAL,
        KERNEL,
        "      if (V::EXPANDED || asks) ptx::mbarrier_wait(&sm.v_empty[values.stage], values.phase ^ 1);\n",
        "",
    ),
    "Q takes the place of one that is read": (
        CAUSAL,
        KERNEL,
        "      ptx::mbarrier_wait(&sm.q_empty[group], q_phase ^ 1);\n",
        "",
    ),
    "Q is released a tile early": (
        CAUSAL,
        KERNEL,
        "        if (!K::EXPANDED && tile == 0) release(&sm.q_empty[at.group], at);",
        "        if (!K::EXPANDED && tile == 1) release(&sm.q_empty[at.group], at);",
    ),
    "V is released with K": (
        CAUSAL,
        KERNEL,
        "        ptx::wgmma_wait<1>();\n        ptx::read_behind(s);\n",
        "        ptx::wgmma_wait<1>();\n        release(&sm.v_empty[values.stage], at);\n",
    ),
    "K is released before its products end": (
        CAUSAL,
        KERNEL,
        "        ptx::wgmma_wait<1>();\n        ptx::read_behind(s);\n        scale_scores(keys.stage);\n",
        "        release(&sm.k_empty[keys.stage], at);\n        ptx::wgmma_wait<1>();\n",
    ),
    "scores are read before they are there": (CAUSAL, KERNEL, "ptx::wgmma_wait<1>();", "ptx::wgmma_wait<2>();"),
    "a parity that does not change": (CAUSAL, KERNEL, "    phase ^= 1;\n", ""),
    "the parity of Q does not change": (CAUSAL, KERNEL, "        q_phase ^= 1;\n", ""),
    "fewer arrivals than consumers": (
        CAUSAL,
        KERNEL,
        "ptx::mbarrier_init(&sm.k_empty[i], CONSUMER_WARPS);",
        "ptx::mbarrier_init(&sm.k_empty[i], 1);",
    ),
    "outputs are not scaled": (RISING, KERNEL, "if (grew) scale(o, by);", "if (grew) by[0] = 1.f;"),
    "outputs are not scaled for weights without a maximum": (
        RISING_OF_32,
        KERNEL,
        "if (absorb(weights, s, state, factors, false, by)) scale(o, by);",
        "absorb(weights, s, state, factors, false, by);",
    ),
    "outputs are scaled while values are added": (
        RISING,
        KERNEL,
        "          const bool grew = weigh(s, state, factors, by);\n",
        "          if (weigh(s, state, factors, by)) scale(o, by);\n          constexpr bool grew = false;\n",
    ),
    # Weights in bfloat16 have the range of floats.
    "a maximum that grew is not noticed": (
        replace(RISING, head_dim=128),
        SOFTMAX,
        "fits &= sum[r][c] <= static_cast<float>(",
        "fits &= sum[r][c] <= 1e30f * static_cast<float>(",
    ),
    "the sum of weights above a maximum stays": (
        RISING_OF_32,
        SOFTMAX,
        "w[e] : sum[r][e / 2] + w[e];",
        "l[r][e / 2] + w[e] : sum[r][e / 2] + w[e];",
    ),
    "rows with other factors": (RISING, KERNEL, "o[i] *= by[i / 2 % 2]", "o[i] *= by[i % 2]"),
    "a key too many": (CAUSAL, KERNEL, "if (n * 8 + j >= hi)", "if (n * 8 + j > hi)"),
    "a tile with a mask taken for a whole one": (
        CAUSAL,
        ITEMS,
        "w.full_tiles = w.end_of_keys(p, 0) / cfg::TILE_KV;",
        "w.full_tiles = w.end_of_keys(p, 0) / cfg::TILE_KV + 1;",
    ),
    "the last key tile is left out": (
        CAUSAL,
        ITEMS,
        "w.key_tiles = (w.end_of_keys(p, cfg::TILE_Q) + cfg::TILE_KV - 1) / cfg::TILE_KV;",
        "w.key_tiles = w.end_of_keys(p, cfg::TILE_Q) / cfg::TILE_KV;",
    ),
    "heads of the group exchanged": (CAUSAL, ITEMS, "+ in_turn % heads % p.group", "+ 0 * (in_turn % heads)"),
    "the wrong KV head": (CAUSAL, ITEMS, "w.kv_head = stream % p.num_kv_heads;", "w.kv_head = 0;"),
    "rounds that do not turn back leave items out": (CAUSAL, ITEMS, "ctas - 1 - cta", "ctas - cta"),
    "the second warpgroup has the rows of the first": (
        CAUSAL,
        KERNEL,
        "ptx::smem_desc<128>(sm.q[at.group][0]",
        "ptx::smem_desc<128>(sm.q[0 * at.group][0]",
    ),
    "another swizzle": (
        CAUSAL,
        KERNEL,
        "return ptx::smem_desc<128>(sm.k[stage][0]",
        "return ptx::smem_desc<64>(sm.k[stage][0]",
    ),
    "V in chunks of another tile": (
        WIDE,
        KERNEL,
        "cfg::TILE_KV * ROW_BYTES, EIGHT_ROWS",
        "cfg::TILE_KV / 2 * ROW_BYTES, EIGHT_ROWS",
    ),
    "the next keys of V too early": (
        CAUSAL_OF_32,
        KERNEL,
        "v + step * STEP * ROW_BYTES / 16",
        "v + step * 8 * ROW_BYTES / 16",
    ),
    "chunks of K too early": (
        WIDE,
        KERNEL,
        "k + (chunk * K_CHUNK + within) / 16",
        "k + (chunk * K_CHUNK / 2 + within) / 16",
    ),
    "lanes exchange with others": (
        CAUSAL,
        KERNEL,
        "upper ? x[i] : x[i | bit], bit)",
        "upper ? x[i] : x[i | bit], 3 - bit)",
    ),
    "values that are not finite are left": (NORMAL, KERNEL, "is_bad(o) && has_bad_values(p, w, at)", "false"),
    "the last key is left out beside a value that is not finite": (
        NORMAL,
        KERNEL,
        "key < end; ++key",
        "key < end - 1; ++key",
    ),
}
SEEDS = 6


def spoiled(problem: PrefillProblem, name: str) -> tuple[Any, ...]:
    """The arrays of a problem; with a value of the last token that is not finite for faults about these."""
    q, k, v = problem.arrays()
    if "finite" in name:
        v = v.copy()
        last = problem.seqlens[0][1] - 1
        if problem.kv_layout == "paged":
            page = problem.options()["page_table"][0, last // problem.page_size]
            v[page, last % problem.page_size, 1, 7] = np.inf
        else:
            v[0, last, 1, 7] = np.inf
    return q, k, v


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_caught(name: str) -> None:
    """Right without the fault; wrong, or stopped by the harness, with it under one of a few schedules."""
    problem, *patch = FAULTS[name]
    arrays = spoiled(problem, name)
    for seed in range(SEEDS):
        assert_prefill_call(arrays, problem.options(), run(problem, arrays, seed=seed))
        try:
            assert_prefill_call(arrays, problem.options(), run(problem, arrays, seed=seed, patches=(tuple(patch),)))
        except (harness.KernelError, AssertionError) as error:
            if "does not compile" in str(error):
                raise
            return
    pytest.fail("no schedule shows the fault")
