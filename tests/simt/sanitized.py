"""The kernels under AddressSanitizer and UBSan; run by test_decode.py in a process of its own.

With the argument ``overrun`` a read past the end of the page table is planted, which must end the process.
"""

import sys
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parents[1])]

from simt import product  # noqa: E402  after the path
from strategies import DTYPES, EXACT_APPENDS, Problem  # noqa: E402
from tolerance import assert_append, assert_blocks, assert_decode  # noqa: E402

PROBLEMS = (
    Problem(kv_len=(0, 1, 33), num_kv_heads=2, group=3, page_size=16, sinks=True),
    Problem(kv_len=(129,), group=8, page_size=16, values="late_max", window=(40, 3)),
    Problem(kv_len=(31, 64), seqlen_q=4, group=3, softcap=5.0, dtype="bfloat16"),
    Problem(kv_len=(130,), group=1, head_dim=128, page_size=16),
    Problem(kv_len=(40,), seqlen_q=16, group=8, head_dim=128, values="huge"),
    Problem(kv_len=(65,), seqlen_q=2, group=2, head_dim=128, causal=False, values="equal"),
)


def exact_capacity(problem: Problem) -> tuple[np.ndarray, ...]:
    """Arrays without spare rows, so that the end of the allocation is the end of the last sequence."""
    q, k_cache, v_cache, kv_len = problem.arrays()
    if problem.page_size is None:
        longest = max(problem.kv_len)
        k_cache, v_cache = k_cache[:, :longest].copy(), v_cache[:, :longest].copy()
    return q, k_cache, v_cache, kv_len


def main() -> None:
    """Run every problem with one split and with three."""
    overrun = "overrun" in sys.argv
    # Reads the entry of the page after the last one.
    guarded, blind = "position < end ? pages.page(position) : 0", "pages.page(position)"
    after = ";\n    v_offset"
    fault = [("decode.cu", f"next_page = {guarded}{after}", f"next_page = {blind}{after}")]
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
    for head_dim, dtype in ((64, "float32"), (128, "float16"), (256, "bfloat16")):
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
    main()
