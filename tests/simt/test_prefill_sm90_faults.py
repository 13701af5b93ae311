"""Planted faults that the tests of prefill_sm90.cu must catch."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from simt.faults import selected
from simt.tiled_cases import BASE, assert_caught, run
from strategies import PrefillProblem

KERNEL, PRODUCER = "prefill_sm90.cu", "common/tiled_producer.cuh"
ITEMS, SOFTMAX = "common/prefill_items.cuh", "common/softmax.cuh"
CAUSAL = replace(BASE, causal=True, values="late_max")
# Scores that grow as the kernel goes, from the last key to the first.
RISING = replace(BASE, values="falling")
NORMAL = replace(CAUSAL, values="normal")
RISING_OF_32 = replace(RISING, dtype="bfloat16")
CAUSAL_OF_32 = replace(CAUSAL, dtype="bfloat16")
WIDE = replace(CAUSAL, head_dim=128)
PADDED = replace(CAUSAL, kv_layout="padded", seqlens=((150, 210), (150, 90)))
RAGGED = replace(CAUSAL, q_layout="ragged", kv_layout="ragged", seqlens=((150, 210), (0, 20), (70, 90)), num_kv_heads=1)
WINDOW = replace(CAUSAL, window=(40, None), seqlens=((150, 210), (150, 210)))
CAPPED = replace(CAUSAL, softcap=2.0, values="normal")
# All of an item's tiles may be on their way before any of those before it is read.
FEW_KEYS = replace(BASE, kv_layout="padded", seqlens=((150, 30), (150, 210)))
SINKS = replace(CAUSAL, sinks=True, values="normal")
PAGED = replace(PADDED, kv_layout="paged", page_size=64)
# name: (problem, file, text, what takes its place)
FAULTS = {
    "rows of V beyond kv_len are left": (
        PADDED,
        KERNEL,
        "        clear_rows<cfg::TILE_KV>(sm.v[first.stage], w.kv_len - tile * cfg::TILE_KV, at);\n",
        "",
    ),
    "the first row of V beyond kv_len is left": (
        PADDED,
        KERNEL,
        "max(0, count) * VECTORS",
        "max(0, count + 1) * VECTORS",
    ),
    "the last row of V is cleared": (PADDED, KERNEL, "max(0, count) * VECTORS", "max(0, count - 1) * VECTORS"),
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
        "seqlen_q, kv_len, p.window_left",
        "seqlen_q, p.capacity, p.window_left",
    ),
    "the page of another tile": (
        PAGED,
        ITEMS,
        "    entry -= p.page_table_stride_page;\n",
        "",
    ),
    "no end of a page": (PAGED, ITEMS, "if (!cfg::PAGED || at.token >= 0) return;", "return;"),
    "V from the page of other keys": (
        PAGED,
        PRODUCER,
        "if (BEHIND == 1 && tile < last) load_values(before, values_ring);",
        "if (BEHIND == 1 && tile < last) load_values(at, values_ring);",
    ),
    "the pages of another sequence": (
        PAGED,
        ITEMS,
        "batch * p.page_table_stride_batch",
        "0 * p.page_table_stride_batch",
    ),
    "the first ragged sequence for all": (
        RAGGED,
        "common/ragged.cuh",
        "found.batch = b0 + source;",
        "found.batch = b0;",
    ),
    "ragged queries begin at 0": (RAGGED, ITEMS, "w.q0 = uniform(found.first);", "w.q0 = 0;"),
    "ragged keys begin at 0": (RAGGED, ITEMS, "w.k0 = uniform(w.k0);", "w.k0 = 0;"),
    "a key too few at the left end of a window": (WINDOW, KERNEL, "if (n * 8 + j < lo)", "if (n * 8 + j <= lo)"),
    "the first tile of a window is left out": (
        WINDOW,
        ITEMS,
        "const int lo = keys(p, first).lo / cfg::TILE_KV;",
        "const int lo = keys(p, first).lo / cfg::TILE_KV + 1;",
    ),
    "a tile that a window begins in taken for a whole one": (
        WINDOW,
        ITEMS,
        "(keys(p, last).lo + cfg::TILE_KV - 1) / cfg::TILE_KV",
        "keys(p, last).lo / cfg::TILE_KV",
    ),
    "values that are not finite before a window are left": (
        replace(WINDOW, values="normal"),
        KERNEL,
        "const int begin = w.tiles.lo * cfg::TILE_KV",
        "const int begin = w.keys(p, at.row0 + 15).lo",
    ),
    "keys before a window beside a value that is not finite": (
        replace(WINDOW, values="normal"),
        KERNEL,
        "int key = keys.lo;",
        "int key = 0;",
    ),
    "scores are not capped": (
        CAPPED,
        KERNEL,
        "s[i] = softmax::softcap(s[i] * p.scale_over_softcap, p.softcap_log2)",
        "",
    ),
    "scores are capped after the mask": (
        CAPPED,
        KERNEL,
        "        cap(s, p);\n        if constexpr (decltype(masked)::value) hide(s, p, w, full, tile, at);\n",
        "        if constexpr (decltype(masked)::value) hide(s, p, w, full, tile, at);\n        cap(s, p);\n",
    ),
    "scores are not capped beside a value that is not finite": (
        CAPPED,
        KERNEL,
        "cfg::SOFTCAP ? softmax",
        "false ? softmax",
    ),
    "sinks are left out": (SINKS, KERNEL, "if (p.sinks == nullptr)", "if (true)"),
    "outputs stay as they are beside a sink": (
        SINKS,
        KERNEL,
        "softmax::weight(keys_m, m)",
        "softmax::weight(keys_m, keys_m)",
    ),
    "the sink of another head": (SINKS, KERNEL, "p.sinks + w.head", "p.sinks + w.kv_head"),
    "values of the next ragged sequence": (
        RAGGED,
        KERNEL,
        "if (!V::EXPANDED && w.k0 + w.kv_len < p.capacity",
        "if (w.kv_len < 0",
    ),
    "values that are not finite in another page": (
        replace(PAGED, values="normal", seqlens=((150, 210), (150, 210))),
        ITEMS,
        "p.v_stride_head, p.v_stride_page,",
        "p.v_stride_head, 0 * p.v_stride_page,",
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
    "Q is read before it is there": (
        CAUSAL,
        KERNEL,
        "      ptx::mbarrier_wait(&sm.q_full[at.group], place.parity());\n",
        "",
    ),
    "K takes the place of a tile that is read": (
        CAUSAL,
        PRODUCER,
        "      if (K::EXPANDED || asks) ptx::mbarrier_wait(&sm.k_empty[keys.stage], keys.phase ^ 1);\n",
        "",
    ),
    "V takes the place of a tile that is read": (
        CAUSAL,
        PRODUCER,
        "      if (V::EXPANDED || asks) ptx::mbarrier_wait(&sm.v_empty[values.stage], values.phase ^ 1);\n",
        "",
    ),
    "Q takes the place of one that is read": (
        CAUSAL,
        PRODUCER,
        "    ptx::mbarrier_wait(&sm.q_empty[group], place.parity() ^ 1);\n",
        "",
    ),
    "Q is released a tile early": (
        CAUSAL,
        KERNEL,
        "        if (!K::EXPANDED && tile == own.lo) release(&sm.q_empty[at.group], at);",
        "        if (!K::EXPANDED && tile == own.lo + 1) release(&sm.q_empty[at.group], at);",
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
    "a parity that does not change": (CAUSAL, PRODUCER, "    phase ^= wraps ? 1 : 0;\n", ""),
    "the parity of Q does not change": (CAUSAL, ITEMS, "static_cast<u32>(number % 2);", "0;"),
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
        "fits &= !(sum[r][c] > static_cast<float>(",
        "fits &= !(sum[r][c] > 1e30f * static_cast<float>(",
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
        "keys(p, first).hi / cfg::TILE_KV}",
        "keys(p, first).hi / cfg::TILE_KV + 1}",
    ),
    "the last key tile is left out": (
        CAUSAL,
        ITEMS,
        "(keys(p, last).hi + cfg::TILE_KV - 1) / cfg::TILE_KV",
        "keys(p, last).hi / cfg::TILE_KV",
    ),
    "a warpgroup leaves out what its last rows see": (
        CAUSAL,
        ITEMS,
        "own = w.tiles_of(p, first, last)",
        "own = w.tiles_of(p, first, first)",
    ),
    "a warpgroup leaves out what its first rows see": (
        WINDOW,
        ITEMS,
        "own = w.tiles_of(p, first, last)",
        "own = w.tiles_of(p, last, last)",
    ),
    "a tile that is not looked at is released before it is there": (
        CAUSAL,
        KERNEL,
        "        ptx::mbarrier_wait(&sm.v_full[unseen.stage], unseen.phase);\n",
        "",
    ),
    "no turn for a tile that is not looked at": (CAUSAL, KERNEL, "        turns.begin();\n        turns.end();\n", ""),
    "tiles before a window are not left out": (WINDOW, KERNEL, "    leave_out(uniform(w.tiles.lo), own.lo);\n", ""),
    "Q of a warpgroup that sees no key stays": (
        replace(CAUSAL, seqlens=((300, 100), (300, 100))),
        KERNEL,
        "      if (own.lo == own.hi) release(&sm.q_empty[at.group], at);\n",
        "",
    ),
    "heads of the group exchanged": (CAUSAL, ITEMS, "+ in_turn % heads % p.group", "+ 0 * (in_turn % heads)"),
    "the wrong KV head": (CAUSAL, ITEMS, "w.kv_head = stream % p.num_kv_heads;", "w.kv_head = 0;"),
    "phases of the queue do not change": (CAUSAL, ITEMS, "static_cast<u32>(number / ItemQueue::SLOTS % 2);", "0;"),
    "an item is done with before the producer's warps are": (
        FEW_KEYS,
        KERNEL,
        "sm.queue.init(CONSUMER_WARPS + PRODUCER_WARPS);",
        "sm.queue.init(CONSUMER_WARPS);",
    ),
    "an item is left out": (CAUSAL, ITEMS, "atomicAdd(p.items_claimed, 1)", "1 + atomicAdd(p.items_claimed, 1)"),
    "an item is read before it is there": (
        CAUSAL,
        ITEMS,
        "    ptx::mbarrier_wait(&queue.full[slot()], phase());\n",
        "",
    ),
    "an item takes the place of one that is worked on": (
        FEW_KEYS,
        ITEMS,
        "    ptx::mbarrier_wait(&queue.empty[slot()], phase() ^ 1);\n",
        "",
    ),
    "items without keys do not count for Q": (
        replace(CAUSAL, seqlens=((150, 0), (150, 210)), kv_layout="padded"),
        PRODUCER,
        "      ptx::mbarrier_arrive(&sm.q_full[group]);\n",
        "",
    ),
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
        "key < keys.hi; ++key",
        "key < keys.hi - 1; ++key",
    ),
}


def spoiled(problem: PrefillProblem, name: str) -> tuple[Any, ...]:
    """The arrays of a problem; for faults about values that are not finite with one, of the last token or the next."""
    q, k, v = problem.arrays()
    if "before a window" in name:
        v = v.copy()
        v[0, 20 if "are left" in name else 62, 1, 7] = np.inf
    elif "next ragged" in name:
        v = v.copy()
        v[problem.seqlens[0][1], 0, 7] = np.inf
    elif "finite" in name:
        v = v.copy()
        last = problem.seqlens[0][1] - 1
        if problem.kv_layout == "paged":
            page = problem.options()["page_table"][0, last // problem.page_size]
            v[page, last % problem.page_size, 1, 7] = np.inf
        else:
            v[0, last, 1, 7] = np.inf
    return q, k, v


@pytest.mark.parametrize("name", selected(FAULTS))
def test_a_planted_fault_is_caught(name: str) -> None:
    problem, *patch = FAULTS[name]
    assert_caught(problem, spoiled(problem, name), tuple(patch), run)
