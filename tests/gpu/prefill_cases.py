"""Problems of prefill on a GPU, of all of its kernels."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from strategies import PrefillProblem

from cuattn import Tbq4Array

DTYPE_NAMES = ("float16", "bfloat16")
DIMS = ((64, 64), (96, 96), (128, 128), (192, 192), (192, 128), (256, 256), (512, 512))
TBQ4_DIMS = (64, 128, 256, 512)
RAW, FLOATS = ("raw16", "raw16"), ("raw32", "raw32")
FORMATS = (("tbq4", "tbq4"), ("tbq4", "raw16"), ("raw16", "tbq4"))
GROUPS = (*range(1, 9), 12, 16, 33, 64)
PAGE_SIZES = (1, 2, 3, 16, 64, 100, 256)
GIB = 1 << 30
KERNELS = (
    *product(DTYPE_NAMES, (RAW,), DIMS),
    *product(("float32",), (FLOATS,), DIMS),
    *product(DTYPE_NAMES, FORMATS, ((dim, dim) for dim in TBQ4_DIMS)),
)
every_kernel = pytest.mark.parametrize(("dtype", "formats", "dims"), KERNELS, ids=str)
# Many query tokens to few, more queries than keys, and sequences without either.
MIXED = ((150, 500), (0, 9), (7, 0), (130, 131), (70, 33))
# For what does not depend on the kernel: ragged queries to pages, a dense prompt, and keys and values in TBQ4.
PAGED = PrefillProblem(MIXED, 2, 6, 128, dtype="bfloat16", kv_layout="paged", causal=True, seed=11)
DENSE = PrefillProblem(((200, 260),) * 3, 2, 4, q_layout="dense", kv_layout="dense", causal=True, seed=12)
CODES = replace(PAGED, group=3, k_format="tbq4", v_format="tbq4", means=True, sinks=True, seed=13)
all_layouts = pytest.mark.parametrize("problem", [PAGED, DENSE, CODES], ids=["paged", "dense", "tbq4"])


def of(dtype: str, formats: tuple[str, str], dims: tuple[int, int], **fields: Any) -> PrefillProblem:
    return PrefillProblem(
        dtype=dtype, k_format=formats[0], v_format=formats[1], head_dim=dims[0], value_dim=dims[1],
        means="tbq4" in formats, **{"num_kv_heads": 2, "group": 3, **fields},
    )  # fmt: skip


def changed(cache: Tbq4Array, **parts: Any) -> Tbq4Array:
    return Tbq4Array(**{name: getattr(cache, name) for name in ("codes", "norms", "mean")} | parts)
