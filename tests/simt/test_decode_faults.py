"""Faults planted in decode.cu and what it includes: each must be seen by the error law or stopped by the harness."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from simt import harness, product
from simt.faults import selected
from strategies import Problem
from tolerance import assert_call, assert_decode

from cuattn import Fp8Array, Tbq4Array

Arrays = tuple[Any, ...]
TBQ4 = {"k_format": "tbq4", "v_format": "tbq4"}
RAW = Problem(kv_len=(301, 420), seqlen_q=2, group=3, page_size=16, values="late_max")
DENSE = replace(RAW, seqlen_q=1, page_size=None)
PAGED = replace(RAW, page_size=5)
# Two pieces of 16 bytes for each thread that copies Q.
LONG_ROWS = replace(RAW, head_dim=256, group=8)
SINGLE = replace(RAW, dtype="float32", k_format="raw32", v_format="raw32", values="normal")
CODES = replace(RAW, **TBQ4, means=True, sinks=True)
# A block a row, whose norms are late, and a ring of four slots. Two blocks a row.
ONE_BLOCK = replace(CODES, head_dim=128, kv_len=(900, 1300))
BLOCKS = replace(CODES, head_dim=256)
# Whole tiles, for whose copies no lane waits for another.
DENSE_BLOCKS = replace(BLOCKS, page_size=None)
# Two KV heads side by side in a tile, each with three of its eight columns and one that is padding; four with two.
HEADS = replace(CODES, head_dim=128, num_kv_heads=4, seqlen_q=1, group=3, page_size=None)
FOUR_HEADS = replace(HEADS, head_dim=64, num_kv_heads=8, group=2)
# The last sequences have numbers that are no pages: their rows that are not there have addresses outside of the cache.
MORE_SEQUENCES = replace(BLOCKS, kv_len=(20, *(0,) * 8, 20))
# Values of norms from 5e-6 to 6e4, in every sequence of another kind.
NORMS = replace(CODES, values="tiny_v", kv_len=(900, 901, 902), dtype="bfloat16")
# A sink has some weight.
SINKS = replace(CODES, values="normal", kv_len=(20, 1000))
FP8 = replace(RAW, k_format="fp8", v_format="fp8", values="normal")
# Steps inside of whole pages, of which nothing is hidden, and others.
LONG = replace(CODES, kv_len=(2000,), page_size=None, seqlen_q=1, values="normal")
KEPT = replace(CODES, num_sink=3, num_recent=7, page_size=None, seqlen_q=1)


@dataclass(frozen=True)
class Fault:
    """A replacement in a source, or several, and the call in which it must show.

    Attributes
    ----------
    problem : Problem
    patches : tuple of (file, old, new)
    spoil : callable, optional
        Changes the arrays of the problem.
    changes : mapping
        Of fields of the config.
    num_splits : int
    """

    problem: Problem
    patches: tuple[tuple[str, str, str], ...]
    spoil: Callable[[Arrays], Arrays] = lambda arrays: arrays
    changes: Mapping[str, Any] = field(default_factory=dict)
    num_splits: int = 1


def in_decode(problem: Problem, old: str, new: str, **more: Any) -> Fault:
    return Fault(problem, (("decode.cu", old, new),), **more)


def in_common(file: str, problem: Problem, old: str, new: str, **more: Any) -> Fault:
    return Fault(problem, ((f"common/{file}.cuh", old, new),), **more)


def in_format(file: str, problem: Problem, old: str, new: str, **more: Any) -> Fault:
    return Fault(problem, ((f"kv/{file}.cuh", old, new),), **more)


def infinite_norm_of_the_newest_value(arrays: Arrays) -> Arrays:
    """Only the last of several query tokens sees it."""
    q, k, v, kv_len = arrays
    norms = v.norms.copy()
    norms[np.arange(len(kv_len)), kv_len - 1] = np.inf
    return q, k, Tbq4Array(v.codes, norms, v.mean), kv_len


def infinite_norm_of_a_key(arrays: Arrays) -> Arrays:
    """Times a sum of either sign, one for each query head: minus infinity would hide the key."""
    q, k, v, kv_len = arrays
    norms = k.norms.copy()
    norms[:, 10] = np.inf
    return q, Tbq4Array(k.codes, norms, k.mean), v, kv_len


def nan_of_the_newest_value(arrays: Arrays) -> Arrays:
    """Only the last of several query tokens sees it."""
    q, k, v, kv_len = arrays
    codes = v.codes.copy()
    codes[np.arange(len(kv_len)), kv_len - 1, :, 5] = 0x7F
    return q, k, Fp8Array(codes, v.scale), kv_len


def in_the_next_group(stream: str, problem: Problem) -> Fault:
    """Norms of whole tiles of a stream, "k" or "v", are copied once the group of their rows is closed."""
    end = {
        "k": "}\n  template <bool PLAIN = false>\n  __device__ __forceinline__ void load_v",
        "v": "key0 += cfg::KEYS_PER_STEP;",
    }[stream]
    old, commit = "load_norms(slot, norms_at, true, lane);", "ptx::cp_async_commit();"
    space = {"k": "\n  ", "v": "\n    "}[stream]
    late = f"if (whole) {stream}.load_norms(ring + slot, {stream}.norms_at, true, lane);"
    patches = (
        ("common/kv_ring.cuh", old, f"if constexpr (IS_K != {'true' if stream == 'k' else 'false'}) {old}"),
        ("common/kv_ring.cuh", f"{commit}{space}{end}", f"{commit} {late}{space}{end}"),
    )
    return Fault(problem, patches)


WAIT = "ptx::cp_async_wait<cfg::NUM_STAGES - 2>();\n    "
V_VISIBLE = "loader.template store_norms<false>(slot, lane);\n    __syncwarp();  // V of this step"
K_VISIBLE = "loader.template store_norms<true>(slot, lane);\n    __syncwarp();  // K of this step"
K_BARRIER, V_BARRIER = (f"__syncwarp();  // {x} of this step" for x in "KV")
NORMS_OF_HEAD = "lane % 4 * cfg::TILE_HEADS / 4 * 2 * OF_ROW"
# A ring of two slots passes for one that late norms may have, and nothing but norms is wrong in it.
TOO_SHORT = (
    ("decode.cu", "cfg::NUM_STAGES >= 4 || !NORMS_ARE_LATE<K, V>", "true"),
    ("decode.cu", "NORMS_ARE_LATE<K, V> ? 2 : cfg::NUM_STAGES - 1", "cfg::NUM_STAGES - 1"),
    ("common/kv_ring.cuh", "!NORMS_ARE_LATE<K, V> || (cfg::NUM_STAGES >= 4 && cfg::NUM_STAGES % 2 == 0)", "true"),
)
FAULTS = {
    # Floats
    "two products for three": in_common("tf32", SINGLE, "ptx::mma_m16n8k8_tf32(small, a.lo, b.hi);", ""),
    "the other two for three": in_common("tf32", SINGLE, "ptx::mma_m16n8k8_tf32(small, a.hi, b.lo);", ""),
    "one product for a score": in_common("tf32", SINGLE, "  add_small(products, a, b);\n", ""),
    "one product with a value": in_common("decode_floats", SINGLE, "tf32::add_small(sums[0][n], a, b);", ""),
    "weights of another key": in_common("decode_floats", SINGLE, "Kv::operand_row(t, upper) * 4", "t * 4"),
    # Barriers and copies
    "Q is read before it is written": in_decode(RAW, "__syncthreads();  // q, the table and the tree", "//"),
    "the table is read before it is written": in_decode(
        CODES, "__syncthreads();  // q, the table and the tree", "//"
    ),
    "one warp's sums take the memory of another warp's ring": in_decode(
        CODES, "__syncthreads();  // all warps are done with the ring, whose memory sm.o takes over", ""
    ),
    "the states of the warps are read before they are written": in_decode(
        RAW, "__syncthreads();  // every warp's o, m, l are in shared memory", ""
    ),
    "the sums of the warps are read before they are written": in_decode(
        CODES, "__syncthreads();  // every warp's o, m, l are in shared memory", ""
    ),
    "V is read before it has arrived": in_decode(RAW, WAIT + V_VISIBLE, V_VISIBLE),
    "K is read before it has arrived": in_decode(RAW, WAIT + K_VISIBLE, K_VISIBLE),
    "V in codes is read before it has arrived": in_decode(CODES, WAIT + V_VISIBLE, V_VISIBLE),
    "K in codes is read before it has arrived": in_decode(CODES, WAIT + K_VISIBLE, K_VISIBLE),
    "K in codes and its norms are read before all lanes have waited": in_decode(DENSE_BLOCKS, K_BARRIER, "//"),
    "V in codes and its norms are read before all lanes have waited": in_decode(DENSE_BLOCKS, V_BARRIER, "//"),
    "norms of K are in the group of the next tile": in_the_next_group("k", DENSE_BLOCKS),
    "norms of V are in the group of the next tile": in_the_next_group("v", DENSE_BLOCKS),
    "norms of K of several heads are in the group of the next tile": in_the_next_group("k", HEADS),
    "norms of V of several heads are in the group of the next tile": in_the_next_group("v", FOUR_HEADS),
    "norms reach shared memory in the step that reads them": Fault(
        replace(CODES, page_size=None), TOO_SHORT, changes={"num_stages": 2}
    ),
    "rows past the end of the sequence are copied": in_common(
        "kv_ring", DENSE, "&& position + cfg::TILE_KV <= end &&", "&&"
    ),
    "norms past the end of the sequence are loaded": in_common(
        "kv_ring", replace(MORE_SEQUENCES, head_dim=64), "if (valid) waiting", "waiting"
    ),
    "norms past the end of the sequence are copied": in_common(
        "kv_ring", MORE_SEQUENCES, "slot + norms_place, address, valid)", "slot + norms_place, address, true)"
    ),
    "norms in the slot of another tile": in_common(
        "kv_ring", ONE_BLOCK, "u32 waiting = next_slot<AFTER_K>(slot);", "u32 waiting = slot;"
    ),
    "norms in the slot of another tile, of three steps": in_common(
        "kv_ring", replace(CODES, kv_len=(1150, 1600)), "(RING_BYTES<K, V> - STEP) : next - STEP;", "0 : next;"
    ),
    "a dense cache that steps over a tile": in_common(
        "kv_ring", DENSE, "k.step();", "k.step(); k.step();"
    ),
    "norms that do not step": in_common(
        "kv_ring", replace(SINKS, page_size=None), "norms_at += IS_K ? p.k_norms_stride_step : p.v_norms_stride_step;",
        "norms_at += 0;",
    ),
    # Softmax and masks
    "the accumulators keep the old maximum": in_common("softmax", RAW, "rescale(n, c, factor);", "rescale(n, c, 1.f);"),
    "the sum keeps the old maximum": in_common("softmax", RAW, "l[n][c] *= factor;", ""),
    "a mask one key too wide": in_common("mask", RAW, "position + right + 1", "position + right + 2"),
    # Norms
    "norms are not applied to scores": in_decode(CODES, "sum[i][n][e] * norms[e / 2]", "sum[i][n][e] + 0 * norms[0]"),
    "norms are not applied to P": in_decode(
        CODES, "scale.factor[n][e % 2] * norms[e / 2]", "scale.factor[n][e % 2] + 0 * norms[0]"
    ),
    "scores take the norm of the row eight further": in_decode(
        CODES, "sum[i][n][e] * norms[e / 2]", "sum[i][n][e] * norms[1 - e / 2]"
    ),
    "P takes the norm of the row eight further": in_decode(
        CODES, "scale.factor[n][e % 2] * norms[e / 2]", "scale.factor[n][e % 2] * norms[1 - e / 2]"
    ),
    "every block has the norm of the first": in_common(
        "kv_ring", BLOCKS, "16 * ((first + part) % 2)", "16 * (first % 2)"
    ),
    "an infinite norm stays as it is on its way through a register": in_common(
        "kv_ring", replace(CODES, page_size=None), "static_cast<u16>(ptx::nan_if_infinite(norm))",
        "static_cast<u16>(norm)", spoil=infinite_norm_of_a_key,
    ),
    "an infinite norm stays as it is in a slot": in_common(
        "kv_ring", DENSE_BLOCKS, "ptx::nan_if_infinite(v.words[j])", "v.words[j]", spoil=infinite_norm_of_a_key
    ),
    "an infinite norm stays as it is beside those of other heads": in_common(
        "kv_ring", HEADS, "words[i] = ptx::nan_if_infinite(", "words[i] = (", spoil=infinite_norm_of_a_key
    ),
    "norms in the order of rows": in_common(
        "kv_ring", CODES, "(row % 8 * ROWS + row / 8) * 2 * Kv::NORMS", "row * 2 * Kv::NORMS"
    ),
    # The first one stays where a load of 16 bytes begins.
    "norms of two blocks in another order of rows": in_common(
        "kv_ring", BLOCKS, "(row % 8 * ROWS + row / 8) * 2 * Kv::NORMS",
        "(row % 8 * ROWS + row / 8 * 3 % ROWS) * 2 * Kv::NORMS",
    ),
    "norms of several heads in the order of rows": in_common(
        "kv_ring", HEADS, "(row % 8 * ROWS + row / 8) * 2 * Kv::NORMS", "row * 2 * Kv::NORMS"
    ),
    "a step of which rows see other keys is plain": in_decode(
        replace(LONG, seqlen_q=4, values="late_max"), "(!masked || same_for_all)", "(same_for_all || true)"
    ),
    "hidden keys of a plain step are seen": in_decode(
        replace(LONG, kv_len=(300,), window=(12, 0)), "return key < held_full.lo ||", "return"
    ),
    "keys past the end of a plain step are seen": in_decode(
        LONG, "return key < held_full.lo || key >= held_full.hi;", "return key < held_full.lo;"
    ),
    "the last tile comes first and no other follows": in_decode(LONG, "i == 1 && order.turned", "false"),
    "the last tile comes first and last": in_decode(LONG, "end = turned ? last : w.end;", "end = w.end;"),
    "a step with capped scores is plain": in_decode(
        replace(LONG, softcap=2.0), "p.softcap_log2 == 0.f && loader", "loader"
    ),
    "a step that loads a tile of two pages is plain": in_decode(
        replace(LONG, page_size=40), "loader.next_are_plain()", "true"
    ),
    "the weight of a hidden row is not zeroed": in_decode(
        replace(CODES, page_size=None), "weights[part][i][n][e] = 0.f;", "weights[part][i][n][e] *= 1.f;",
        spoil=infinite_norm_of_the_newest_value,
    ),
    "the factor of the weights is not undone": in_decode(
        NORMS, "multiply_o(n, c, 1.f / scale.factor[n][c]);", "multiply_o(n, c, 1.f);"
    ),
    "weights take no factor": in_common("softmax", NORMS, "MAX_EXPONENT - held)", "MAX_EXPONENT - held) * 0"),
    "a new factor leaves the accumulators as they are": in_common(
        "softmax", NORMS, "rescale_accumulators(n, c, power);", ""
    ),
    # Rotation and means
    "the scale of a rotated query is not undone": in_decode(CODES, "sm.q_scale[row] * factor_of_all", "factor_of_all"),
    "the mean of K is not in the scores": in_decode(CODES, "bias[n][c]) : x", "0.f) : x"),
    "the mean of K is that of the first head": in_decode(
        replace(CODES, num_kv_heads=2), "p.k_mean + w.kv_head_of(row) * cfg::HEAD_DIM", "p.k_mean"
    ),
    "the mean of V is not in the output": in_common(
        "decode_result", CODES, "x[i][j] += keys *", "x[i][j] += 0.f * keys *"
    ),
    "the mean of V has the weight of the sink too": in_common(
        "decode_result", SINKS, "x[i][j] += keys *", "x[i][j] += (keys > 0.f ? 1.f : 0.f) *"
    ),
    "the mean of V is that of the first head": in_common(
        "decode_result", replace(CODES, num_kv_heads=2), "p.v_mean + w.kv_head_of(row) * cfg::HEAD_DIM", "p.v_mean"
    ),
    "O stays in the rotated domain": in_format(
        "tbq4_rotation", CODES, "const Signs<ROTATING> signs(cfg::SIGNS2, cfg::SIGNS1, lane % ROTATING);",
        "const Signs<ROTATING> signs(cfg::SIGNS1, cfg::SIGNS2, lane % ROTATING);",
    ),
    # Orders that two policies must share
    "another order of rows in K of 16 bits": in_format("raw", RAW, "row(tile_row(lane % 16))", "row(lane % 16)"),
    "another order of rows in V of 16 bits": in_format(
        "raw16", RAW, "row(tile_row(lane % 8 + lane / 16 * 8))", "row(lane % 8 + lane / 16 * 8)"
    ),
    "another order of rows in K of codes": in_format(
        "tbq4", replace(CODES, v_format="raw16"), "offset_of_byte(tile_row(lane / 4)", "offset_of_byte(lane / 4"
    ),
    "another order of rows in V of codes": in_format(
        "tbq4", replace(CODES, k_format="raw16"), "offset_of_byte(tile_row(2 * t)", "offset_of_byte(2 * t"
    ),
    "another order of the second rows in V of codes": in_format(
        "tbq4", CODES, "offset_of_byte(tile_row(2 * t + 1)", "offset_of_byte(2 * t + 1"
    ),
    "another order of norms": in_common(
        "kv_ring", CODES, "place_of_row(tile_row(lane / 4))", "place_of_row(lane / 4)"
    ),
    "codes of a byte exchanged": in_format(
        "tbq4", CODES, "level | cfg::LEVELS_HALF[upper] << 16", "level << 16 | cfg::LEVELS_HALF[upper]"
    ),
    # Several KV heads a tile
    "columns of all heads take part": in_decode(
        HEADS, "cfg::TILE_HEADS == 1 || lane / 4 / HEAD_ROWS == head ? x : 0", "x"
    ),
    "columns of another head take part": in_decode(
        HEADS, "lane / 4 / HEAD_ROWS == head ? x : 0", "lane / 4 / HEAD_ROWS != head ? x : 0"
    ),
    "all columns take the norms of the first head": in_common("kv_ring", HEADS, NORMS_OF_HEAD, "0"),
    "norms of the heads of a tile exchanged": in_common(
        "kv_ring", HEADS, NORMS_OF_HEAD, "(3 - lane % 4) * cfg::TILE_HEADS / 4 * 2 * OF_ROW"
    ),
    "norms of the third and fourth head are those of the first two": in_common(
        "kv_ring", FOUR_HEADS, NORMS_OF_HEAD, "lane % 2 * cfg::TILE_HEADS / 4 * 2 * OF_ROW"
    ),
    "norms of the row after in another head": in_common(
        "kv_ring", HEADS, "first + 2 * Kv::NORMS * i", "first + 2 * OF_ROW * i"
    ),
    "codes of the first head for all": in_decode(HEADS, "head * KHead::PARTS + part, key_lane", "part, key_lane"),
    "values of the first head for all": in_decode(HEADS, "head * VHead::PARTS + part, value_lane", "part, value_lane"),
    "means of the first head of the tile": in_decode(
        HEADS, "p.k_mean + w.kv_head_of(row) * cfg::HEAD_DIM", "p.k_mean + w.kv_head * cfg::HEAD_DIM"
    ),
    "tiles of other heads": in_common("decode_work", HEADS, "blockIdx.x * cfg::TILE_HEADS;", "blockIdx.x;"),
    # fp8
    "the scale of keys is not in the scores": in_format(
        "fp8", FP8, "no_mean, factor_of, rows", "no_mean, [](int) { return 1.f; }, rows"
    ),
    "the scale of keys is that of the first head": in_decode(
        replace(FP8, num_kv_heads=2), "p.k_scale, w.kv_head_of(row)", "p.k_scale, 0"
    ),
    "the scale of values is not in the output": in_common("decode_result", FP8, "VHead::HAS_SCALE ?", "false ?"),
    "the scale of values is that of the first head": in_common(
        "decode_result", replace(FP8, num_kv_heads=2), "p.v_scale, w.kv_head_of(row)", "p.v_scale, 0"
    ),
    "queries of fp8 in the order of head_dim": in_format(
        "fp8", FP8, "in_chunk / 4 * 2 + in_chunk / 2 % 2 * 8", "in_chunk / 2 * 2"
    ),
    "rows of an operand of fp8 exchanged": in_format(
        "fp8", FP8, "a[0] = lower[0], a[1] = upper[0]", "a[1] = lower[0], a[0] = upper[0]"
    ),
    "tokens of fp8 that are not paired": in_format("fp8", FP8, "0x3120", "0x3210"),
    "elements of O in the order of 16 bits": in_format(
        "fp8", FP8, "mb * 16 + 2 * g + upper", "mb * 16 + g + 8 * upper"
    ),
    "chunks of fp8 exchanged": in_format("fp8", FP8, "codes[kb % 2 * 2]", "codes[2 - kb % 2 * 2]"),
    "another order of rows in V of fp8": in_format(
        "fp8", replace(FP8, k_format="raw16"), "Tile::offset(this->row, mb", "Tile::offset(this->row ^ 1, mb"
    ),
    "a NaN that is hidden from some rows of a step": in_format(
        "fp8", replace(FP8, page_size=None), "(found & 0x80808080u) == 0", "true", spoil=nan_of_the_newest_value
    ),
    # First and newest tokens
    "first tokens are read from the cache too": in_common(
        "decode_work", KEPT, "max(p.first_key, kv_len - p.last_keys)", "0"
    ),
    "newest tokens are read from the cache too": in_common(
        "decode_work", KEPT, "min(p.end_key, kv_len - p.skip_last)", "p.end_key"
    ),
    "a ring that does not go round": in_common(
        "paging", KEPT, "return static_cast<int>(rest);\n  }\n};\n\n// The same",
        "return position;\n  }\n};\n\n// The same"
    ),
    "a page of another number of tokens": in_common(
        "paging", PAGED, "divide.divide(static_cast<u32>(position), rest)));",
        "divide.divide(static_cast<u32>(position) + 1, rest)));"
    ),
    "more keys are asked for than there are": in_common(
        "decode_ahead", DENSE, "min(w.end, w.begin + KEYS)", "w.end + KEYS"
    ),
    "the second piece of Q is the first": in_format(
        "raw", LONG_ROWS, "fetch_piece(threadIdx.x + i * cfg::NUM_WARPS * WARP, rows, source)",
        "fetch_piece(threadIdx.x, rows, source)"
    ),
    "a sink in every split": in_common(
        "decode_result", SINKS, "if (p.sinks != nullptr && w.split == 0)", "if (p.sinks != nullptr)", num_splits=3
    ),
}  # fmt: skip


# Two orders, and some at random.
SEEDS = 8


def check_law(problem: Problem, arrays: Arrays, **choices: Any) -> None:
    options = problem.options()
    out, lse = product.decode_arrays(*arrays, **choices, **options)
    assert_call(arrays, options, (out[:, 0], lse[:, 0]) if problem.seqlen_q == 1 else (out, lse))


@functools.cache
def check_without_fault(problem: Problem, spoil: Callable[[Arrays], Arrays], num_splits: int, seed: int) -> None:
    check_law(problem, spoil(problem.arrays()), num_splits=num_splits, seed=seed)


@pytest.mark.parametrize("fault", selected(FAULTS).values(), ids=selected(FAULTS).keys())
def test_a_planted_fault_is_caught(fault: Fault) -> None:
    """Right without the fault; wrong, or stopped by the harness, with it under one of a few schedules."""
    problem, num_splits = fault.problem, fault.num_splits
    arrays = fault.spoil(problem.arrays())
    for seed in range(SEEDS):
        check_without_fault(problem, fault.spoil, num_splits, seed)
        try:
            check_law(problem, arrays, num_splits=num_splits, seed=seed, patches=fault.patches, changes=fault.changes)
        except (harness.KernelError, AssertionError) as error:
            if "does not compile" in str(error):
                raise
            return
    pytest.fail("no schedule shows the fault")


def test_a_ring_too_short_for_norms_that_come_late_does_not_compile() -> None:
    with pytest.raises(harness.KernelError, match="norms reach shared memory one tile of their kind late"):
        product.decode(CODES, changes={"num_stages": 2})


@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("problem", [BLOCKS, DENSE_BLOCKS, HEADS], ids=["paged", "dense", "heads"])
def test_norms_that_come_with_their_rows_need_no_longer_ring(problem: Problem, num_stages: int) -> None:
    for seed in range(4):
        assert_decode(problem, *product.decode(problem, seed=seed, changes={"num_stages": num_stages}))
