"""Faults planted in prefill_mma.cu and what it includes: the error law must see them, or the harness stop them."""

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from simt import harness, product
from simt.faults import selected
from strategies import PrefillProblem
from tolerance import assert_prefill

KERNEL, WORK, LOADER = "prefill_mma.cu", "common/prefill_work.cuh", "common/tile_loader.cuh"
EPILOGUE = "common/prefill_epilogue.cuh"
SOFTMAX, TILE, TBQ4 = "common/softmax.cuh", "common/tile16.cuh", "kv/tiles_tbq4.cuh"
LEVELS = "kv/tbq4_levels.cuh"
TF32, FLOATS = "common/tf32.cuh", "common/products32.cuh"
# Two row tiles a warp, several tiles of keys and of rows, and a mask that begins and ends inside of tiles.
RAW = PrefillProblem(((70, 150), (40, 40)), num_kv_heads=2, group=3, causal=True, values="late_max")
WINDOW = replace(RAW, window=(37, None), values="normal")
SINKS = replace(RAW, sinks=True, values="normal")
PAGED = replace(RAW, kv_layout="paged", page_size=16)
RISING = replace(RAW, values="rising")
CODES = replace(RAW, k_format="tbq4", v_format="tbq4", means=True)
BLOCKS = replace(CODES, head_dim=256)
LONG = replace(CODES, seqlens=((40, 400),), values="normal")
NORMS = replace(CODES, values="tiny_v", dtype="bfloat16")
CAPPED = replace(CODES, softcap=5.0)
SINGLE = replace(RAW, dtype="float32", k_format="raw32", v_format="raw32", values="normal")
# Three splits (see `NUM_SPLITS`), of which the last has fewer tiles, and keys that none or some rows see.
SPLITS = replace(
    RAW, seqlens=((70, 230), (70, 40), (70, 0)), q_layout="dense", kv_layout="padded", sinks=True, values="normal"
)
# Whole tiles in every split.
WHOLE = replace(SPLITS, seqlens=((20, 300),), causal=False)
SMALL = {"tile_q": 64, "tile_kv": 32, "num_stages": 2, "num_warps": 2, "dim_splits": 1}
FOUR = SMALL | {"num_warps": 4}

# name: (problem, file, text, what takes its place), or several such patches, and the changes of the config if they are
# others
FAULTS = {
    # Masks and order
    "a key too many": (RAW, KERNEL, "n * 8 + j >= hi", "n * 8 + j > hi"),
    "a key before the window": (WINDOW, KERNEL, "n * 8 + j < lo", "n * 8 + j + 1 < lo"),
    "tiles with a mask taken for whole ones": (RAW, KERNEL, "i < w.full.lo || i >= w.full.hi", "i < w.full.lo"),
    "whole tiles end a tile late": (
        RAW,
        WORK,
        "max(0, first.hi - w.begin) / cfg::TILE_KV",
        "max(0, first.hi - w.begin) / cfg::TILE_KV + 1",
    ),
    "the last key tile is left out": (
        RAW,
        KERNEL,
        "bool has(int i) const { return key(i) < keys.hi; }",
        "bool has(int i) const { return key(i + 1) < keys.hi + 1; }",
    ),
    "rows of the first tile twice": (RAW, WORK, "tiles_of(p, w.seqlen_q) - 1 - from_end", "max(0, 1 - from_end)"),
    "heads of the group exchanged": (
        RAW,
        WORK,
        "return kv_head * p.group + index(row) % p.group",
        "return kv_head * p.group",
    ),
    "the first ragged sequence for all": (RAW, "common/ragged.cuh", "found.batch = b0 + source;", "found.batch = b0;"),
    "ragged keys begin at 0": (RAW, WORK, "return plane + k0 * stride_token", "return plane + 0 * k0 * stride_token"),
    "pages in order": (
        PAGED,
        "common/paging.cuh",
        "return __ldg(reinterpret_cast<const int*>(table + stride * page));",
        "return static_cast<int>(page);",
    ),
    "a page is as long as a tile": (PAGED, LOADER, "slot + cfg::TILE_KV <= pages.size()", "true"),
    "rows looked up by other lanes": (PAGED, LOADER, "step * WARP_ROWS + lane / Rows::PERIOD", "lane / Rows::PERIOD"),
    "rows that no one sees are read": (
        RAW,
        LOADER,
        "return key >= keys.lo && key < keys.hi ? plane.offset_of(pages, key) : NOWHERE;",
        "return plane.offset_of(pages, key);",
    ),
    # Softmax
    "accumulators are not rescaled": (RISING, KERNEL, "o[r][d][2 * c] *= by;", ""),
    "the sum is not rescaled": (
        RISING,
        SOFTMAX,
        "        m[r][c] = m_new;\n        l[r][c] *= by;\n        rescale",
        "        m[r][c] = m_new;\n        rescale",
    ),
    "maxima of two lanes only": (
        RISING,
        SOFTMAX,
        "m_new = fmaxf(m_new, __shfl_xor_sync(FULL_MASK, m_new, 2));\n        const float by",
        "const float by",
    ),
    "a sink is not in the scale": (
        SINKS,
        EPILOGUE,
        "(is_part ? 1.f : softmax::inverse_sum(l)) * softmax::weight(keys_m, m)",
        "softmax::inverse_sum(keys_l)",
    ),
    # Splits
    "the sink counts in every split": (SPLITS, EPILOGUE, "p.sinks != nullptr && blockIdx.y == 0", "p.sinks != nullptr"),
    "a part is not scaled by its sink": (
        SPLITS,
        EPILOGUE,
        "(is_part ? 1.f : softmax::inverse_sum(l)) * softmax::weight(keys_m, m)",
        "(is_part ? 1.f : softmax::inverse_sum(l) * softmax::weight(keys_m, m))",
    ),
    "the last tiles are in no split": (SPLITS, WORK, "(tiles + splits - 1) / splits", "max(1, tiles / splits)"),
    "a split has tiles of the next": (
        WHOLE,
        WORK,
        "hi = max(lo, min(hi, begin + of_part * cfg::TILE_KV));",
        "hi = max(lo, hi);",
    ),
    "whole tiles are not cut": (WHOLE, WORK, "max(0, min(full.hi - first, of_part))", "max(0, full.hi)"),
    "whole tiles of the next split": (WHOLE, WORK, "max(0, min(full.hi - first, of_part))", "max(0, full.hi - first)"),
    "all splits have the place of the first": (
        SPLITS,
        WORK,
        "static_cast<i64>(blockIdx.y) * p.batch",
        "i64{0} * p.batch",
    ),
    # Shared memory
    "a swizzle of chunks and one of steps": (RAW, TILE, "2 * step % PERIOD * 16", "2 * step % PERIOD * 32"),
    "keys are not waited for": (RAW, KERNEL, "ptx::mbarrier_wait(&sm.keys_turn, i & 1);\n", "\n"),
    "values are not waited for": (RAW, KERNEL, "if (!ANY) ptx::mbarrier_wait(&sm.values_turn, i & 1);", ""),
    "values of a mask are not waited for": (
        RAW,
        KERNEL,
        "      ptx::mbarrier_wait(&sm.values_turn, i & 1);\n      if constexpr",
        "      if constexpr",
    ),
    "an arrival before the copies": (
        RAW,
        (KERNEL, "if (BY > 1) arrive();", "arrive();"),
        (KERNEL, "if (BY == 1) arrive();", ""),
    ),
    "keys are copied while they are read": (
        RAW,
        (KERNEL, "THREADS + cfg::NUM_WARPS", "THREADS"),
        (KERNEL, "if (at.lane == 0) ptx::mbarrier_arrive(turn);", ""),
    ),
    "o before all have read q": (
        replace(RAW, head_dim=128),
        KERNEL,
        "ptx::mbarrier_wait(&sm.keys_turn, i & 1);  // all",
        "// all",
        FOUR | {"dim_splits": 2},
    ),
    "o while q is on its way": (
        replace(RAW, seqlens=((150, 20),), values="normal"),
        KERNEL,
        "ptx::mbarrier_wait(&sm.keys_turn, i & 1);  // all",
        "// all",
    ),
    "rows of o before all have read them": (
        RAW,
        EPILOGUE,
        "__syncwarp();  // all have read them",
        "// all have read them",
    ),
    # TBQ4
    "codes by themselves for Gray codes": (CODES, LEVELS, "(word ^ word >> 1) & 0x77777777u", "word & 0x77777777u"),
    "signs of odd and even codes exchanged": (CODES, LEVELS, "ptx::prmt(even, word,", "ptx::prmt(word, even,"),
    "norms of the tile before": (CODES, KERNEL, "norms.store(sm, i + 2, at);", "norms.store(sm, i + 1, at);"),
    "norms are not scaled": (NORMS, LEVELS, "(static_cast<u32>(2 * BIAS + TOP) << MANTISSA) - power", "127u << 23"),
    "weights do not follow the scale of values": (
        NORMS,
        KERNEL,
        "if (now != log2_scale) state.shift(now - log2_scale);",
        "",
    ),
    "the sum does not follow the scale of values": (
        NORMS,
        SOFTMAX,
        "m[r][c] -= by, l[r][c] *= factor;",
        "m[r][c] -= by, l[r][c] *= factor / factor;",
    ),
    "the last scale stays": (NORMS, KERNEL, "if (V::NORMS > 0) state.shift(-log2_scale);", ""),
    "scores do not follow the scale of keys": (
        CODES,
        KERNEL,
        "return Kv::NORMS > 0 ? ptx::exp2(b.log2_scale(i)) : 1.f;",
        "return 1.f;",
    ),
    "the scale of a query is left out": (
        CODES,
        KERNEL,
        "const float of_row = K::IN_ROTATED_DOMAIN ? sm.q_scale[at.row(r, c)] : 1.f;",
        "const float of_row = 1.f;",
    ),
    "the mean of K is not in the lse": (
        CODES,
        EPILOGUE,
        "return fmaf(sm.q_bias[row], p.softmax_scale_log2, m);",
        "return m;",
    ),
    "the mean of K is not in the softcap": (
        CAPPED,
        KERNEL,
        "fmaf(x, sm.q_scale[row] * scale, sm.q_bias[row])",
        "x * (sm.q_scale[row] * scale)",
    ),
    "the mean of V counts with a sink": (
        replace(CODES, sinks=True, values="normal"),
        EPILOGUE,
        "const float own_keys = keys_l * scale;",
        "const float own_keys = 1.f;",
    ),
    "O stays in the rotated domain": (
        CODES,
        EPILOGUE,
        "TilesOf<cfg::V_FORMAT, Elem, DIMS>::type::restore(x, at.lane);",
        "Raw16Tiles<Elem, DIMS>::restore(x, at.lane);",
    ),
    "the second block has the norm of the first": (
        BLOCKS,
        TBQ4,
        "norms_of(i, column * 8 / cfg::BLOCK)",
        "norms_of(i, 0)",
    ),
    "norms past the end are read": (CODES, KERNEL, "key < s.keys.lo || key >= s.keys.hi)", "key < s.keys.lo)"),
    "norms take the place of others that are read": (LONG, TBQ4, "in_ring<cfg::NORM_TILES>(i)", "in_ring<2>(i)"),
    # Floats
    "two products for three": (SINGLE, TF32, "ptx::mma_m16n8k8_tf32(small, a.lo, b.hi);", ""),
    "the other two for three": (SINGLE, TF32, "ptx::mma_m16n8k8_tf32(small, a.hi, b.lo);", ""),
    "one product for a score": (SINGLE, TF32, "  add_small(products, a, b);\n", ""),
    "one product with a value": (SINGLE, FLOATS, "tf32::add_small(small[r], a, b);", ""),
    "weights in the order of an accumulator": (SINGLE, FLOATS, "{0, 2, 1, 3}", "{0, 1, 2, 3}"),
    "rows of V swizzled alike": (SINGLE, FLOATS, "(place ^ 16)", "place"),
    "codes are expanded before they are there": (
        CODES,
        KERNEL,
        "__syncthreads();  // codes of the first tile are there, and rotated queries",
        "",
    ),
}


# Two orders, and some at random.
SEEDS = 8
# Of dense problems.
NUM_SPLITS = 3


def prefill(problem: PrefillProblem, **choices: Any) -> tuple[np.ndarray, np.ndarray]:
    return product.prefill(problem, num_splits=NUM_SPLITS if problem.q_layout == "dense" else 1, **choices)


@functools.cache
def check_without_fault(problem: PrefillProblem, changes: tuple[tuple[str, int], ...], seed: int) -> None:
    assert_prefill(problem, *prefill(problem, seed=seed, changes=dict(changes)))


@pytest.mark.parametrize("fault", selected(FAULTS).values(), ids=selected(FAULTS).keys())
def test_a_planted_fault_is_caught(fault: tuple[Any, ...]) -> None:
    """Right without the fault; wrong, or stopped by the harness, with it under one of a few schedules."""
    problem, *rest = fault
    changes = rest.pop() if isinstance(rest[-1], dict) else FOUR if problem.k_format == "tbq4" else SMALL
    patches = (tuple(rest),) if isinstance(rest[0], str) else tuple(rest)
    for seed in range(SEEDS):
        check_without_fault(problem, tuple(changes.items()), seed)
        try:
            assert_prefill(problem, *prefill(problem, seed=seed, changes=changes, patches=patches))
        except (harness.KernelError, AssertionError) as error:
            if "does not compile" in str(error):
                raise
            return
    pytest.fail("no schedule shows the fault")


def test_a_value_that_is_not_finite_is_taken_out_of_tiles_with_a_mask() -> None:
    """Without that, zero times it reaches the rows that do not see it."""
    problem = replace(RAW, seqlens=((70, 150),), q_layout="dense", kv_layout="dense", values="normal")
    q, k, v = problem.arrays()
    v = v.copy()
    v[0, 149] = np.nan  # of the last token only
    kept = product.prefill_arrays(q, k, v, changes=SMALL, **problem.options())[0]
    assert np.isfinite(kept[0, :-1].astype(np.float32)).all()
    patch = (KERNEL, "    V::clear(tile, row, at.lane);\n", "")
    lost = product.prefill_arrays(q, k, v, changes=SMALL, patches=(patch,), **problem.options())[0]
    assert np.isnan(lost[0, :-1].astype(np.float32)).any()
