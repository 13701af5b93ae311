"""Small calls of every kernel for compute-sanitizer; results are checked too.

compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 1 python tests/gpu/sanitize.py
compute-sanitizer --tool racecheck --error-exitcode 1 python tests/gpu/sanitize.py
compute-sanitizer --tool synccheck --error-exitcode 1 python tests/gpu/sanitize.py tiled

With `tiled` it is the kernel of Hopper alone.
(cuda-bindings asks the driver for functions that it does not have, which memcheck would count as errors. racecheck does
not follow an order that goes through __syncwarp and one lane's arrival at an mbarrier: it reports hazards between
copies and reads of K in prefill_mma.cu, and none in the same calls if every lane arrives.)
"""

import sys
from itertools import product
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parents[1])]

import cupy  # noqa: E402  after the path
import numpy as np  # noqa: E402
from gpu.helpers import to_device  # noqa: E402
from strategies import EXACT_APPENDS, PrefillProblem, Problem  # noqa: E402
from tolerance import assert_append, assert_blocks, assert_decode, assert_prefill  # noqa: E402

import cuattn  # noqa: E402

TBQ4 = {"k_format": "tbq4", "v_format": "tbq4"}
FP8 = {"k_format": "fp8", "v_format": "fp8"}
FLOATS = {"dtype": "float32", "k_format": "raw32", "v_format": "raw32"}
PROBLEMS = (
    Problem(kv_len=(0, 1, 33, 300), num_kv_heads=2, group=3, page_size=16, sinks=True),
    Problem(kv_len=(129, 500), group=8, head_dim=128, page_size=5, values="late_max", window=(40, 3)),
    Problem(kv_len=(31, 64), seqlen_q=16, group=8, head_dim=128, softcap=5.0, dtype="bfloat16"),
    Problem(kv_len=(77,), seqlen_q=4, group=5, head_dim=96, dtype="bfloat16"),
    Problem(kv_len=(260,), seqlen_q=2, group=6, head_dim=192, causal=False),
    Problem(kv_len=(130, 300), num_kv_heads=2, group=6, head_dim=256, page_size=16, values="huge"),
    Problem(kv_len=(100,), group=2, head_dim=512, dtype="bfloat16"),
    Problem(kv_len=(0, 1, 33, 300), num_kv_heads=2, group=3, page_size=16, **FLOATS, sinks=True),
    Problem(kv_len=(130, 300), seqlen_q=3, group=4, head_dim=256, page_size=5, **FLOATS),
    Problem(kv_len=(0, 1, 33, 600), num_kv_heads=2, group=3, page_size=16, **TBQ4, means=True, sinks=True),
    Problem(kv_len=(2500, 1000), group=6, head_dim=256, page_size=64, **TBQ4, values="normal"),
    Problem(kv_len=(70, 300), num_kv_heads=4, group=3, head_dim=128, **TBQ4, means=True),
    Problem(kv_len=(300, 2), num_kv_heads=8, group=2, page_size=16, **TBQ4),
    Problem(kv_len=(300, 31), seqlen_q=4, group=8, head_dim=128, **TBQ4, dtype="bfloat16", window=(40, 3)),
    Problem(kv_len=(260,), seqlen_q=3, group=4, head_dim=256, **TBQ4, values="tiny_v", dtype="bfloat16"),
    Problem(kv_len=(100,), group=2, head_dim=512, page_size=5, **TBQ4),
    Problem(kv_len=(300, 7), group=2, head_dim=128, k_format="tbq4", page_size=5, num_sink=3, num_recent=40),
    Problem(kv_len=(300, 2), group=3, head_dim=64, v_format="tbq4", num_sink=1, num_recent=4, means=True),
    Problem(kv_len=(0, 1, 33, 300), num_kv_heads=2, group=3, page_size=16, **FP8, sinks=True),
    Problem(kv_len=(130, 300), seqlen_q=3, group=4, head_dim=256, **FP8, dtype="bfloat16", window=(40, 3)),
    Problem(kv_len=(100,), group=2, head_dim=96, page_size=5, k_format="fp8", num_sink=3, num_recent=7),
    Problem(kv_len=(300, 7), group=2, head_dim=128, k_format="tbq4", v_format="fp8"),
)
# Few tokens against keys for two splits.
CHUNK = ((9, 2100),)
# Several tiles of rows and of keys, sequences without either, and more queries than keys.
MIXED = ((100, 150), (0, 9), (7, 0), (70, 45))
PREFILLS = (
    PrefillProblem(MIXED, 2, 3, causal=True, sinks=True),
    PrefillProblem(MIXED, group=2, head_dim=96, dtype="bfloat16", kv_layout="paged", page_size=16),
    PrefillProblem(MIXED, group=6, head_dim=128, kv_layout="paged", page_size=5, causal=True, window=(40, None)),
    PrefillProblem(
        ((130, 70), (130, 200)), 2, 12, head_dim=128, dtype="bfloat16", q_layout="dense", kv_layout="padded"
    ),
    PrefillProblem(MIXED, group=2, head_dim=192, causal=True, softcap=5.0),
    PrefillProblem(MIXED, group=2, head_dim=192, value_dim=128, dtype="bfloat16", causal=True),
    PrefillProblem(((70, 70),), group=2, head_dim=256, q_layout="dense", kv_layout="dense", values="rising"),
    PrefillProblem(MIXED, group=2, head_dim=512, dtype="bfloat16", values="late_max", window=(30, 30)),
    PrefillProblem(MIXED, 2, 3, **FLOATS, causal=True, kv_layout="paged", page_size=16, sinks=True),
    PrefillProblem(MIXED, group=3, head_dim=128, **FLOATS, window=(40, 3), values="late_max"),
    PrefillProblem(
        CHUNK, group=2, head_dim=128, q_layout="dense", kv_layout="paged", page_size=16, causal=True, sinks=True
    ),
    PrefillProblem(CHUNK, group=2, **TBQ4, means=True, q_layout="dense", kv_layout="padded", causal=True),
    PrefillProblem(MIXED, 2, 3, **TBQ4, means=True, causal=True, kv_layout="paged", page_size=16),
    PrefillProblem(MIXED, group=3, head_dim=128, **TBQ4, dtype="bfloat16", values="tiny_v"),
    PrefillProblem(MIXED, group=3, head_dim=256, **TBQ4, kv_layout="padded", causal=True, sinks=True),
    PrefillProblem(MIXED, group=2, head_dim=512, **TBQ4, dtype="bfloat16", means=True),
    PrefillProblem(MIXED, group=3, head_dim=128, k_format="tbq4", kv_layout="paged", page_size=5, means=True),
    PrefillProblem(MIXED, group=3, head_dim=64, v_format="tbq4", dtype="bfloat16", causal=True, means=True),
)
# For prefill_sm90.cu on a GPU that has it: tiles with and without a mask, several items a CTA, rows without keys.
TILED = (
    *(
        PrefillProblem(
            ((seqlen_q, 260),) * 2,
            2,
            40,
            q_layout="dense",
            kv_layout="dense",
            dtype=dtype,
            head_dim=head_dim,
            causal=causal,
        )
        for (dtype, head_dim), (seqlen_q, causal) in product(
            (("float16", 64), ("bfloat16", 128), ("float16", 256)), ((200, False), (300, True))
        )
    ),
    PrefillProblem(((300, 260), (0, 20), (170, 90)), 2, 40, head_dim=96, causal=True),
    PrefillProblem(((300, 700),) * 2, 2, 40, head_dim=192, value_dim=128, dtype="bfloat16", window=(90, 10)),
    PrefillProblem(((300, 700), (300, 90)), 2, 40, head_dim=192, kv_layout="paged", page_size=64, q_layout="dense"),
    PrefillProblem(((300, 700), (300, 90)), 2, 40, **TBQ4, kv_layout="padded", q_layout="dense", causal=True),
    PrefillProblem(
        ((300, 700), (300, 90)), 2, 40, head_dim=128, **TBQ4, kv_layout="paged", page_size=64, q_layout="dense"
    ),
)


def prefill(problems: tuple[PrefillProblem, ...]) -> None:
    """Run and check problems of prefill."""
    for problem in problems:
        options = {name: to_device(x) for name, x in problem.options().items()}
        got = cuattn.prefill(*map(to_device, problem.arrays()), **options, return_lse=True)
        assert_prefill(problem, *(x.get() for x in got))


def main() -> None:
    """Run every problem of decode with one split and with three, and all others, from exact allocations."""
    # Every array has an allocation of its own, so that a step past its end is seen.
    cupy.cuda.set_allocator(None)
    prefill(TILED)
    if "tiled" in sys.argv:
        sys.stdout.write(f"{len(TILED)} problems of prefill in tiles\n")
        return
    for problem in PROBLEMS:
        q, k_cache, v_cache, kv_len = map(to_device, problem.arrays())
        options = {name: to_device(x) for name, x in problem.options().items()}
        for num_splits in (1, 3):
            out, lse = cuattn.decode(q, k_cache, v_cache, kv_len, num_splits=num_splits, return_lse=True, **options)
            assert_decode(problem, out.get(), lse.get())
        if problem.seqlen_q == 1:
            cuattn.merge(cupy.stack([out, out]), cupy.stack([lse, lse]))
    prefill(PREFILLS)
    for problem in EXACT_APPENDS:
        bases = {name: cupy.asarray(x) for name, x in problem.bases().items()}
        arguments, options = problem.arguments(bases)
        cuattn.append(*arguments, **options)
        assert_append(problem, {name: x.get() for name, x in bases.items()})
    for dtype, head_dim, with_mean in product(("float16", "float32"), (64, 256), (False, True)):
        rng = np.random.default_rng(head_dim)
        x = (100 * rng.standard_normal((7, 3, head_dim))).astype(dtype)
        mean = rng.standard_normal((3, head_dim)).astype(np.float32) * np.float32([[0], [1], [1e4]])
        mean = mean if with_mean else None
        t = cuattn.quantize(cupy.asarray(x), mean=None if mean is None else cupy.asarray(mean))
        assert_blocks(x, t.codes.get(), t.norms.get(), int(t.clamped[0]), mean=mean)
        cuattn.dequantize(t, dtype=dtype)
    cupy.cuda.Device().synchronize()
    counts = f"{len(PROBLEMS)} problems, {len(PREFILLS)} of prefill and {len(EXACT_APPENDS)} of append"
    sys.stdout.write(f"{counts}\n")


if __name__ == "__main__":
    main()
