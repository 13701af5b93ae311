"""Times of ways to cut the keys of `decode`, for trials: ``python -m bench.split_trials [--rounds 3] [--format tbq4]``.

Equal and unequal batches in pages of 64 tokens, bfloat16 queries: splits as the plan has them, parts that follow the
lengths (`balance`), splits of a fixed size (`split_size`), and several query tokens. Of each way one warm-up and
`rounds` batches of calls, all in turn; TB/s are bytes of the keys and values that are there by time. Results are
compared with those of the plan's splits before any time.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import cupy
import ml_dtypes
import numpy as np

import cuattn
from cuattn import _plan

from .cases import FORMATS
from .sm90_trials import milliseconds_in_turn

_BATCH_MS, _PAGE_SIZE, _HEADS, _KV_HEADS, _HEAD_DIM = 50.0, 64, 32, 8, 128
# By name: lengths of the sequences.
_BATCHES = {
    "16 x 32,768": (32768,) * 16,
    "64 x 4,096": (4096,) * 64,
    "64 x 8,192": (8192,) * 64,
    "one of 131,072 among 15 of 1,024": (131072, *(1024,) * 15),
    "16 from 16 to 131,072": tuple(np.geomspace(16, 131072, 16).astype(int).tolist()),
    "64 from 16 to 131,072": tuple(np.geomspace(16, 131072, 64).astype(int).tolist()),
}
_SPLIT_SIZES, _TOKENS = (512, 1024, 2048, 4096), (1, 2, 4, 8, 16)
# Roundings of results, in units of the largest value: other splits, and a part more or less in bfloat16.
_AGREE = 2.0**-7


def _cache(kv_format: str, num_pages: int) -> Any:  # noqa: ANN401  an array or a cache of codes
    shape = (num_pages, _PAGE_SIZE, _KV_HEADS, _HEAD_DIM)
    rng = cupy.random.default_rng(0)
    if kv_format == "raw16":
        return cupy.concatenate([
            rng.standard_normal((1, *shape[1:]), np.float32).astype(ml_dtypes.bfloat16) for _ in range(num_pages)
        ])  # fmt: skip
    rows = cupy.empty(shape, np.float16)
    for page in rows:
        page[...] = rng.standard_normal(shape[1:], np.float32)
    return cuattn.quantize(rows) if kv_format == "tbq4" else cuattn.quantize_fp8(rows)


def _ways(kv_format: str, lengths: tuple[int, ...]) -> tuple[dict[str, Callable[[], Any]], int]:
    """Return calls by name, the plan's own first, and the bytes of keys and values."""
    pages = [-(-n // _PAGE_SIZE) for n in lengths]
    order = iter(np.random.default_rng(0).permutation(sum(pages)))
    table = np.full((len(lengths), max(pages)), -1, np.int32)
    for row, count in zip(table, pages, strict=True):
        row[:count] = [next(order) for _ in range(count)]
    k, v = (_cache(kv_format, sum(pages)) for _ in "kv")
    kv_len, page_table = cupy.asarray(np.array(lengths, np.int32)), cupy.asarray(table)

    def call(tokens: int = 1, **options: Any) -> Callable[[], Any]:  # noqa: ANN401
        q = cupy.random.standard_normal((len(lengths), tokens, _HEADS, _HEAD_DIM), dtype=np.float32)
        q = q.astype(ml_dtypes.bfloat16)
        return partial(
            cuattn.decode, q, k, v, kv_len, page_table=page_table, out=cupy.empty_like(q), **options
        )  # fmt: skip

    cupy.random.seed(0)
    plain = call()
    ways = {"the plan's splits": plain, "balance": partial(plain, balance=True)}
    most = max(lengths)
    ways |= {f"split_size {n}": partial(plain, split_size=n) for n in _SPLIT_SIZES if most <= n * _plan.MAX_SPLITS}
    ways |= {f"{n} tokens": call(n) for n in _TOKENS[1:]}
    ways |= {f"{n} tokens, balance": call(n, balance=True) for n in _TOKENS[1:]}
    all_keys = _plan.DecodeProblem(
        _plan.Dtype.BF16, *FORMATS[kv_format], 1, 1, _HEADS, _KV_HEADS, _HEAD_DIM, sum(lengths)
    )  # fmt: skip
    return ways, all_keys.kv_bytes


def main() -> None:
    """Print a line for each batch and way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--format", action="append", choices=("raw16", "tbq4", "fp8"))
    options = parser.parse_args()
    for kv_format in options.format or ("raw16", "tbq4"):
        for batch, lengths in _BATCHES.items():
            ways, size = _ways(kv_format, lengths)
            want = cupy.asnumpy(ways["the plan's splits"]()).astype(np.float32)
            errors = {}
            for name, way in ways.items():
                got = cupy.asnumpy(way()).astype(np.float32)
                errors[name] = 0.0 if "tokens" in name else float(np.abs(got - want).max() / np.abs(want).max())
                if errors[name] > _AGREE:
                    raise AssertionError(f"{kv_format}, {batch}, {name}: error {errors[name]:.1e}")
            for name, ms in milliseconds_in_turn(ways, options.rounds, _BATCH_MS).items():
                line = f"{kv_format} {batch}: {1e3 * ms:8.1f} us {size / ms / 1e9:5.2f} TB/s"
                print(f"{line}  {name}, difference {errors[name]:.1e}", flush=True)
            cupy.get_default_memory_pool().free_all_blocks()


if __name__ == "__main__":
    main()
