"""The kernels under AddressSanitizer and UBSan; run by test_decode.py in a process of its own.

With the argument ``overrun`` a read past the end of the page table is planted, which must end the process. With
``prefill``, as test_prefill.py runs it, or ``prefill_sm90`` that kernel is the one.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parents[1])]

from simt import product  # noqa: E402  after the path
from strategies import DTYPES, EXACT_APPENDS, PrefillProblem, Problem  # noqa: E402
from tolerance import assert_append, assert_blocks, assert_decode, assert_prefill, assert_prefill_call  # noqa: E402

from cuattn import Fp8Array, Tbq4Array  # noqa: E402

TBQ4 = {"k_format": "tbq4", "v_format": "tbq4"}
PROBLEMS = (
    Problem(kv_len=(0, 1, 33), num_kv_heads=2, group=3, page_size=16, sinks=True),
    Problem(kv_len=(129,), group=8, page_size=16, values="late_max", window=(40, 3)),
    Problem(kv_len=(31, 64), seqlen_q=4, group=3, softcap=5.0),
    Problem(kv_len=(130,), group=1, head_dim=128, page_size=16),
    Problem(kv_len=(40,), seqlen_q=16, group=8, head_dim=128, values="huge"),
    Problem(kv_len=(65,), seqlen_q=2, group=2, head_dim=128, causal=False, values="equal"),
    Problem(kv_len=(0, 1, 33), num_kv_heads=2, group=3, page_size=16, **TBQ4, means=True, sinks=True),
    Problem(kv_len=(131,), seqlen_q=3, group=4, head_dim=256, **TBQ4, dtype="bfloat16", values="tiny_v"),
    Problem(kv_len=(50, 7), group=2, head_dim=128, k_format="tbq4", page_size=5, num_sink=3, num_recent=10),
    Problem(kv_len=(40, 2), group=3, head_dim=128, v_format="tbq4", num_sink=1, num_recent=4, means=True),
    Problem(kv_len=(50, 0, 33), num_kv_heads=2, group=3, head_dim=96, k_format="fp8", v_format="fp8"),
)
# Tiles of 32 query rows and 16 keys, for two warps: so few kernels that their builds take no longer than all others.
PREFILLS = (
    PrefillProblem(((40, 70), (0, 5), (33, 33), (3, 0)), 2, 3, causal=True, sinks=True),
    PrefillProblem(((40, 70), (5, 1)), group=3, kv_layout="paged", page_size=5, window=(20, 3), softcap=5.0),
    PrefillProblem(((33, 40), (2, 17)), group=3, **TBQ4, kv_layout="paged", page_size=16, causal=True, means=True),
    PrefillProblem(((20, 37),), group=3, **TBQ4, values="rising"),
    PrefillProblem(((20, 70), (20, 0), (20, 5)), group=3, q_layout="dense", kv_layout="padded", sinks=True),
    PrefillProblem(((20, 37), (5, 1)), group=3, dtype="float32", k_format="raw32", v_format="raw32", causal=True),
)
TILED_PREFILLS = (
    PrefillProblem(((70, 100),) * 2, 2, 2, q_layout="dense", kv_layout="dense"),
    PrefillProblem(((130, 140),), group=2, q_layout="dense", kv_layout="dense", causal=True),
    PrefillProblem(((140, 37),), q_layout="dense", kv_layout="dense", causal=True, values="rising"),
    PrefillProblem(((40, 70), (0, 5), (33, 33), (3, 0)), 2, 3, causal=True, sinks=True),
    PrefillProblem(((40, 150), (5, 1)), group=2, kv_layout="paged", page_size=64, window=(20, 3), softcap=5.0),
    PrefillProblem(((20, 70), (20, 0), (20, 5)), group=2, q_layout="dense", kv_layout="padded", window=(9, None)),
)
TILED_SMALL = {"consumers": 2, "tile_kv": 32, "num_stages": 2}
SMALL = {"tile_q": 32, "tile_kv": 16, "num_stages": 2, "num_warps": 2}


def exact_capacity(problem: Problem) -> tuple[Any, ...]:
    """Arrays without spare rows, so that the end of the allocation is the end of the last sequence."""
    q, k_cache, v_cache, kv_len = problem.arrays()
    if problem.page_size is None:
        k_cache, v_cache = (first_tokens(x, max(problem.kv_len)) for x in (k_cache, v_cache))
    return q, k_cache, v_cache, kv_len


def first_tokens(cache: Any, count: int) -> Any:
    if isinstance(cache, Tbq4Array):
        return Tbq4Array(*(x[:, :count].copy() for x in (cache.codes, cache.norms)), cache.mean)
    if isinstance(cache, Fp8Array):
        return Fp8Array(cache.codes[:, :count].copy(), cache.scale)
    return cache[:, :count].copy()


def prefills() -> None:
    """Run problems of prefill, dense ones in splits; ragged arrays and pages end where the last token or page does."""
    for seed, problem in enumerate(PREFILLS):
        options = problem.options()
        if "page_table" in options:
            used = -(-max(kv_len for _, kv_len in problem.seqlens) // problem.page_size)
            options["page_table"] = options["page_table"][:, :used].copy()
        num_splits = 3 if problem.q_layout == "dense" else 1
        got = product.prefill_arrays(*problem.arrays(), **options, seed=seed, changes=SMALL, num_splits=num_splits)
        assert_prefill(problem, *got)
    sys.stdout.write(f"{len(PREFILLS)} problems of prefill\n")


def tiled_prefills() -> None:
    """Run problems of prefill_sm90.cu, one with a value that is not finite and hidden from some rows."""
    for seed, problem in enumerate(TILED_PREFILLS):
        q, k, v = problem.arrays()
        if seed == 1:
            v[0, -1, 0, 3] = np.inf
        options = problem.options()
        if "page_table" in options:
            used = -(-max(kv_len for _, kv_len in problem.seqlens) // problem.page_size)
            options["page_table"] = options["page_table"][:, :used].copy()
        got = product.tiled_prefill_arrays(q, k, v, **options, changes=TILED_SMALL, seed=seed)
        assert_prefill_call((q, k, v), options, got)
    sys.stdout.write(f"{len(TILED_PREFILLS)} problems of prefill_sm90\n")


def main() -> None:
    """Run every problem with one split and with three."""
    overrun = "overrun" in sys.argv
    # Reads the entries of pages after the last one.
    guarded = "next_page = position >= first && position < end ? pages.page(position) : pages.dense_page;"
    fault = [("common/kv_ring.cuh", guarded, "next_page = pages.page(position);")]
    for problem in PROBLEMS:
        options = problem.options()
        if "page_table" in options:
            used = -(-max(problem.kv_len) // problem.page_size)
            options["page_table"] = options["page_table"][:, :used].copy()
        for num_splits in (1, 3):
            out, lse = product.decode_arrays(
                *exact_capacity(problem), num_splits=num_splits, seed=num_splits,
                patches=fault if overrun else (), **options,
            )  # fmt: skip
            if problem.seqlen_q == 1:
                out, lse = out[:, 0], lse[:, 0]
            assert_decode(problem, out, lse)
    for head_dim, dtype in ((64, "float32"), (256, "bfloat16")):
        encode_and_decode(head_dim, dtype)
    for seed, problem in enumerate(EXACT_APPENDS):
        assert_append(problem, product.append(problem, seed))
    sys.stdout.write(f"{len(PROBLEMS)} problems and {len(EXACT_APPENDS)} of append\n")


def encode_and_decode(head_dim: int, dtype: str) -> None:
    """Run quantize.cu and dequantize.cu on rows that fill their allocations to the last byte."""
    x = np.random.default_rng(head_dim).standard_normal((5, 3, head_dim)).astype(DTYPES[dtype])
    mean = np.zeros((3, head_dim), np.float32)
    codes, norms, clamped = product.quantize(x, mean)
    assert_blocks(x, codes, norms, clamped)
    assert np.isfinite(product.dequantize(codes, norms, x.dtype, mean).astype(np.float32)).all()


if __name__ == "__main__":
    runs = {"prefill": prefills, "prefill_sm90": tiled_prefills}
    next((run for name, run in runs.items() if name in sys.argv), main)()
