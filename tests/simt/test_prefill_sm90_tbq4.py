"""prefill_sm90.cu with keys and values in TBQ4, on the CPU harness, against the reference."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import strategies
from hypothesis import assume, given
from hypothesis import strategies as st
from simt import product
from simt.faults import every, selected
from simt.prefill_cases import assert_same_bits, changed
from simt.test_prefill_sm90 import KEYS, ROWS, WINDOWS, has_keys_and_queries
from simt.tiled_cases import assert_caught, config
from strategies import PrefillProblem, prefill_problems
from tolerance import assert_prefill, assert_prefill_call

from cuattn import Tbq4Array, _plan

KERNEL, PRODUCER = "prefill_sm90.cu", "common/tiled_producer.cuh"
TILES = "kv/tiles_sm90_tbq4.cuh"
LEVELS, QUADS = "kv/tbq4_levels.cuh", "kv/tbq4_quads.cuh"
TBQ4, KEYS_ONLY, VALUES_ONLY = ("tbq4", "tbq4"), ("tbq4", "raw16"), ("raw16", "tbq4")
# By formats of K and V, dtype and head_dim, of which each is one build. Lanes have two words of a chunk or four.
SMALL = {
    (*TBQ4, "float16", 64): config(2, 32, 2, weigh_first=True),
    (*TBQ4, "bfloat16", 64): config(3, 32, 1, weigh_first=False),
    (*TBQ4, "bfloat16", 128): config(2, 96, 2, weigh_first=False),
    (*TBQ4, "bfloat16", 256): config(1, 32, 3, weigh_first=True),
    (*KEYS_ONLY, "bfloat16", 64): config(3, 64, 2, weigh_first=False),
    (*VALUES_ONLY, "float16", 128): config(1, 64, 3, take_turns=False),
}
LENGTHS = KEYS | strategies.lengths(64) | strategies.lengths(96)
BASE = PrefillProblem(
    ((150, 210), (150, 210)), num_kv_heads=2, group=2, q_layout="dense", kv_layout="dense", k_format="tbq4",
    v_format="tbq4",
)  # fmt: skip
PADDED = replace(BASE, kv_layout="padded", seqlens=((150, 210), (150, 33), (150, 0)))
PAGED = replace(PADDED, kv_layout="paged", page_size=64)


def small(problem: PrefillProblem) -> dict[str, int] | None:
    return SMALL.get((problem.k_format, problem.v_format, problem.dtype, problem.head_dim))


def of(choice: tuple[str, str, str, int], problem: PrefillProblem = BASE, **fields: Any) -> PrefillProblem:
    """The problem in formats, a dtype and a head_dim."""
    k_format, v_format, dtype, head_dim = choice
    return replace(problem, k_format=k_format, v_format=v_format, dtype=dtype, head_dim=head_dim, **fields)


def run(problem: PrefillProblem, arrays: tuple[Any, ...] | None = None, **choices: Any) -> tuple[np.ndarray, ...]:
    options = {"changes": small(problem), **problem.options(), **choices}
    return product.tiled_prefill_arrays(*(arrays or problem.arrays()), **options)


def check(problem: PrefillProblem, **choices: Any) -> None:
    assert_prefill(problem, *run(problem, **choices))


every_choice = pytest.mark.parametrize("choice", SMALL, ids=lambda c: "-".join(map(str, c)))


@given(
    problem=prefill_problems(
        rows=ROWS, lengths=LENGTHS,
        page_sizes=(64, 160, 192), windows=WINDOWS, softcaps=(None,), groups=(1, 2, 3),
        choices=tuple((*choice, None) for choice in SMALL),
    ),
    seed=st.integers(0, 5),
    num_ctas=st.sampled_from((1, 2, 3, 100)),
)  # fmt: skip
def test_any_problem_obeys_the_error_law_under_any_schedule(problem: PrefillProblem, seed: int, num_ctas: int) -> None:
    problem = replace(problem, means=False)
    assume(has_keys_and_queries(problem))
    assume(problem.kv_layout != "paged" or problem.page_size % small(problem)["tile_kv"] == 0)
    check(problem, seed=seed, num_ctas=num_ctas)


CONFIGS = [
    c for c in _plan.tiled_prefill_configs(product.H200)
    if c.uses_tbq4 and (c.dtype is _plan.Dtype.FP16) == (c.head_dim == 128)
]  # fmt: skip


@pytest.mark.parametrize("config", every(CONFIGS, 2), ids=lambda c: c.describe())
def test_the_tiles_of_every_kernel_obey_the_error_law(config: _plan.TiledPrefillConfig) -> None:
    choice = (config.k_format.value, config.v_format.value, config.dtype.value, config.head_dim)
    layout = {"kv_layout": "paged", "page_size": 64} if config.paged else {}
    for causal in (False, True):
        check(of(choice, seqlens=((200, 333),), num_kv_heads=1, causal=causal, **layout), changes={}, seed=2)


@every_choice
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "values", every(["late_max", "normal", "huge", "early_max", "tiny_v", "rising", "equal", "falling"], 2)
)
def test_unusual_scores_and_norms_obey_the_error_law(
    choice: tuple[str, str, str, int], values: str, *, causal: bool
) -> None:
    """Three seeds, as few norms of "tiny_v" are large in one, some in another, and all small in the third."""
    for seed in range(3 if values == "tiny_v" else 1):
        check(of(choice, values=values, causal=causal, seqlens=((70, 150),), seed=seed), seed=seed)


@every_choice
def test_rows_that_see_no_key_are_zero(choice: tuple[str, str, str, int]) -> None:
    problem = of(choice, seqlens=((200, 33),), causal=True)
    out, lse = run(problem)
    assert_prefill(problem, out, lse)
    assert (out[:, :167] == 0).all()
    assert np.isneginf(lse[:, :167]).all()


@pytest.mark.parametrize("base", [PADDED, PAGED], ids=["padded", "paged"])
@pytest.mark.parametrize("choice", [c for c in SMALL if 64 % SMALL[c]["tile_kv"] == 0], ids=str)
def test_what_lies_past_the_keys_does_not_matter(choice: tuple[str, str, str, int], base: PrefillProblem) -> None:
    """Codes and norms there, and pages that are not used, whatever their bits."""
    problem = of(choice, base)
    q, *caches = problem.arrays()
    expected = run(problem)
    assert_prefill(problem, *expected)
    for code, norm in ((0x00, 0x7BFF), (0xA7, 0x0001), (0xFF, 0xFE00)):
        others = tuple(strategies.with_unused(cache, code, norm) for cache in caches)
        assert_same_bits(run(problem, (q, *others)), expected, (code, norm))


@pytest.mark.parametrize("num_ctas", [1, 3, 1000])
def test_the_number_of_ctas_does_not_change_a_bit(num_ctas: int) -> None:
    problem = replace(BASE, causal=True)
    assert_same_bits(run(problem, num_ctas=num_ctas), run(problem, num_ctas=2))


def with_norm(cache: Tbq4Array, where: tuple[int, ...], norm: float) -> Tbq4Array:
    norms = cache.norms.copy()
    norms[where] = norm
    return changed(cache, norms=norms)


@every_choice
@pytest.mark.parametrize("bad", every([np.nan, np.inf], 2))
def test_a_norm_that_is_not_finite_shows_in_the_rows_that_see_it_and_in_no_other(
    choice: tuple[str, str, str, int], bad: float
) -> None:
    """All values of its block become NaN."""
    problem = of(choice, seqlens=((80, 100), (80, 100)), causal=True)
    q, k, v = problem.arrays()
    block = min(problem.head_dim, 128)
    for key in (0, 55, 99):  # of the first sequence; its tokens stand at 20 to 99
        seen = slice(max(0, key - 20), None)
        if problem.v_format == "tbq4":
            arrays = (q, k, with_norm(v, (0, key, 1, 0), bad))
            out, lse = run(problem, arrays)
            assert_prefill_call(arrays, problem.options(), (out, lse))
            expected = np.zeros(out.shape, bool)
            expected[0, seen, 2:, :block] = True
            np.testing.assert_array_equal(np.isnan(out.astype(np.float32)), expected)
        if problem.k_format == "tbq4":
            arrays = (q, with_norm(k, (0, key, 1, 0), bad), v)
            out, lse = run(problem, arrays)
            assert_prefill_call(arrays, problem.options(), (out, lse))
            expected = np.zeros(lse.shape, bool)
            expected[0, seen, 2:] = True
            np.testing.assert_array_equal(np.isnan(lse), expected)


# ---- planted faults ----------------------------------------------------------------------------------------------

CAUSAL = replace(BASE, causal=True, values="late_max")
NORMAL = replace(CAUSAL, values="normal")
GROWING = replace(BASE, values="rising")  # norms of keys from one tile to the next, so that their scales differ
NORMS = replace(BASE, values="tiny_v", causal=True, seed=1)  # the last are large
WIDE = replace(NORMAL, head_dim=256, dtype="bfloat16")
PAGED_NORMAL = replace(PAGED, values="normal")
# name: (problem, file, text, what takes its place)
FAULTS = {
    "a tile without a proxy fence": (
        NORMAL,
        PRODUCER,
        "  ptx::fence_proxy_async();\n  __syncwarp();\n",
        "  __syncwarp();\n",
    ),
    "one warp says that a tile is there": (
        NORMAL,
        KERNEL,
        "ptx::mbarrier_init(&sm.v_full[i], V::EXPANDED ? GROUP_WARPS : 1);",
        "ptx::mbarrier_init(&sm.v_full[i], 1);",
    ),
    "K takes the place of a tile that is read": (
        NORMAL,
        PRODUCER,
        "      if (K::EXPANDED || asks) ptx::mbarrier_wait(&sm.k_empty[keys.stage], keys.phase ^ 1);\n",
        "",
    ),
    "V takes the place of a tile that is read": (
        NORMAL,
        PRODUCER,
        "      if (V::EXPANDED || asks) ptx::mbarrier_wait(&sm.v_empty[values.stage], values.phase ^ 1);\n",
        "",
    ),
    "the norm of another key": (NORMAL, TILES, "row % WARP + norm_lane)", "row % WARP + (norm_lane ^ 1))"),
    "the norm of another block": (WIDE, TILES, "block == 0 ? 0x1010u", "block >= 0 ? 0x1010u"),
    "norms of other rows": (
        NORMAL,
        TILES,
        "from.norms.behind(norm_row0, 0)",
        "from.norms.behind(norm_row0 ^ 1, 0)",
    ),
    "norms behind those of a tile": (
        replace(GROWING, dtype="bfloat16", head_dim=64, v_format="raw16"),
        TILES,
        "(norm_row0 & WARP) == 0 ? 1 : -1",
        "1",
    ),
    "norms of keys that are not finite count for the power of a tile": (
        NORMAL,
        TILES,
        "raw_norms[i] = ptx::nan_if_infinite(raw_norms[i]);",
        "",
    ),
    "the scale of another tile of K": (GROWING, KERNEL, "        scale_scores(keys.stage);\n", ""),
    "accumulators do not follow the scale of V": (
        NORMS,
        KERNEL,
        "          scale_outputs(keys);\n          if (grew)",
        "          if (grew)",
    ),
    "accumulators follow in the other direction": (
        NORMS,
        KERNEL,
        "ptx::exp2(log2_scale - now)",
        "ptx::exp2(now - log2_scale)",
    ),
    "V is read before it is there": (
        replace(NORMS, dtype="bfloat16"),
        KERNEL,
        "        ptx::mbarrier_wait(&sm.v_full[tile.stage], tile.phase);\n",
        "",
    ),
    "outputs in the unit of the last tile": (NORMAL, KERNEL, "V::EXPANDED ? ptx::exp2(log2_scale) : 1.f", "1.f"),
    "codes past the end": (
        NORMAL,
        TILES,
        "step * ROWS_AT_ONCE + row0 < count;",
        "step * ROWS_AT_ONCE + row0 < count + 1000;",
    ),
    "values of a tile too many": (
        PADDED,
        PRODUCER,
        "value_codes.template fetch_norms<false>(at, count);",
        "value_codes.template fetch_norms<true>(at);",
    ),
    "halves of a word exchanged": (
        NORMAL,
        LEVELS,
        "half == 0 ? index : index >> 16",
        "half == 1 ? index : index >> 16",
    ),
    "signs of neighbors exchanged": (NORMAL, LEVELS, "ptx::prmt(even, word, ", "ptx::prmt(word, even, "),
    "codes by themselves for Gray codes": (NORMAL, LEVELS, "(word ^ word >> 1) & 0x77777777u", "word & 0x77777777u"),
    "a row of other codes": (NORMAL, TILES, "behind(row0, word0 * 4)", "behind(row0 ^ 1, word0 * 4)"),
    "the other chunk of a row": (
        replace(NORMAL, head_dim=128, dtype="bfloat16"),
        TILES,
        "chunk * Tile::PIECES * 4",
        "(chunk ^ 1) * Tile::PIECES * 4",
    ),
    "words of a row exchanged": (
        NORMAL,
        TILES,
        "levels_of(codes[step][chunk][i], products)",
        "levels_of(codes[step][chunk][i ^ 1], products)",
    ),
    "words that are not swizzled": (
        NORMAL,
        TILES,
        "(first ^ static_cast<u32>(i) << 4)",
        "(first + (static_cast<u32>(i) << 4))",
    ),
    "norms past the end": (
        PADDED,
        TILES,
        "if (!WHOLE && row >= count) continue;",
        "if (!WHOLE && row > count) continue;",
    ),
    "the page of another tile of K": (
        PAGED_NORMAL,
        PRODUCER,
        "key_codes.template fetch_codes<true>(key_slot(tile), places.at)",
        "key_codes.template fetch_codes<true>(key_slot(tile), at)",
    ),
    "the page of another tile of V": (
        PAGED_NORMAL,
        PRODUCER,
        "value_codes.template fetch_norms<true>(next)",
        "value_codes.template fetch_norms<true>(at)",
    ),
    "a tile of K is published before the fence": (
        NORMAL,
        PRODUCER,
        "        if (!TOGETHER) publish(&sm.k_full[keys.stage]);\n",
        "        if (threadIdx.x % WARP == 0) ptx::mbarrier_arrive(&sm.k_full[keys.stage]);\n",
    ),
    "tiles of K wait for values of one stage": (
        replace(NORMAL, dtype="bfloat16"),
        PRODUCER,
        "cfg::NUM_STAGES > 1;",
        "cfg::NUM_STAGES > 0;",
    ),
    "Q of an item without keys beside codes of V does not count": (
        replace(PADDED, k_format="raw16", head_dim=128, seqlens=((150, 0), (150, 210))),
        PRODUCER,
        "      if (EXPANDS && !K::EXPANDED) load_queries(p, sm, place, w);\n",
        "",
    ),
    "codes are taken before they land": (NORMAL, PRODUCER, "cp_async_wait<1>", "cp_async_wait<2>"),
    "codes of the tile that is next are overwritten": (
        NORMAL,
        PRODUCER,
        "(key_slot(tile), places.at)",
        "(key_slot(tile - 1), places.at)",
    ),
    "norms of a tile that has them no more": (
        PAGED_NORMAL,
        PRODUCER,
        "        if (has_next) take(tile - 1);\n",
        "        if (has_next && tile < last) take(tile - 1);\n",
    ),
    "Q without a proxy fence": (
        NORMAL,
        KERNEL,
        "  ptx::fence_proxy_async();\n  ptx::bar_sync(FIRST_QUERIES",
        "  ptx::bar_sync(FIRST_QUERIES",
    ),
    "Q is not rotated": (NORMAL, TILES, "blocks[b].rotate(t);", "(void)t;"),
    "the scale of another row of Q": (
        GROWING,
        KERNEL,
        "scale[r] *= p.softmax_scale_log2;",
        "scale[r] = scale[0] * (r == 0 ? p.softmax_scale_log2 : 1.f);",
    ),
    "O is not rotated back": (NORMAL, KERNEL, "      if constexpr (V::EXPANDED) V::restore(o, at.t);\n", ""),
    "O is rotated as Q is": (NORMAL, QUADS, "turn(cfg::SIGNS2, cfg::SIGNS1, t)", "turn(cfg::SIGNS1, cfg::SIGNS2, t)"),
    "a butterfly left out": (
        NORMAL,
        QUADS,
        "for (int h = 1; h < VALUES; h *= 2)",
        "for (int h = 2; h < VALUES; h *= 2)",
    ),
    "norms that are not finite are left": (
        NORMAL,
        TILES,
        "return largest >= ElemTraits<Half>::EXPONENT;",
        "return false;",
    ),
    "levels without a norm beside one that is not finite": (
        NORMAL,
        TILES,
        "restore_row(x, lane);",
        "x[0][0] *= 2.f;\n    restore_row(x, lane);",
    ),
}


def spoiled(problem: PrefillProblem, name: str) -> tuple[Any, ...]:
    """The arrays of a problem; with a norm of the last token that is not finite for faults about these."""
    q, k, v = problem.arrays()
    where = (0, -1, 1, 0)
    if "norms of keys that are not finite" in name:
        k = with_norm(k, where, np.inf)
    elif "finite" in name:
        v = with_norm(v, where, np.inf)
    return q, k, v


@pytest.mark.parametrize("name", selected(FAULTS))
def test_a_planted_fault_is_caught(name: str) -> None:
    problem, *patch = FAULTS[name]
    assert_caught(problem, spoiled(problem, name), tuple(patch), run)
