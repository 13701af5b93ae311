"""Bad arguments of `prefill`: the whole message, and `out` is left alone."""

import math
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided
from zeros import half, index, read_only, single

import cuattn

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
HEAD_DIMS = "64, 96, 128, 192, 256, 512"
TBQ4_DIMS = "64, 128, 256, 512"
ARRAY = "a NumPy array, a CuPy array or a GPU array that speaks DLPack"
CPU_DTYPES = "float16 or bfloat16 or float32 or float64"
K_AXES = "(batch, seqlen_k, num_kv_heads, head_dim), or (total_k, num_kv_heads, head_dim) with cu_seqlens_k"
V_AXES = K_AXES.replace("head_dim", "value_dim")
Q_AXES = "(batch, seqlen_q, num_qo_heads, head_dim), or (total_q, num_qo_heads, head_dim) with cu_seqlens_q"


class Bad(NamedTuple):
    """A call with some arguments changed, and what is said of it."""

    name: str
    changes: dict[str, Any]
    error: type[Exception]
    message: str


def keys(*shape: int, dtype: Any = np.float16) -> dict[str, np.ndarray]:
    return {"k": np.zeros(shape, dtype), "v": np.zeros(shape, dtype)}


def tbq4(*shape: int, codes_gap: int = 0, norms_gap: int = 0) -> cuattn.Tbq4Array:
    """Rows of zeros in TBQ4, with gaps of so many elements between them."""
    widths = (shape[-1] // 2, codes_gap, np.uint8), (max(1, shape[-1] // 128), norms_gap, np.float16)
    return cuattn.Tbq4Array(*(np.zeros((*shape[:-1], n + gap), dtype)[..., :n] for n, gap, dtype in widths))


def apart(stride: int, *shape: int, dtype: Any = np.float16) -> np.ndarray:
    """Tokens so many bytes apart, of the memory of one row: the others are not there."""
    row = np.zeros(shape[-2:], dtype)
    strides = (0,) * (len(shape) - 3) + (stride, *row.strides)
    return as_strided(row, shape, strides)


def dense() -> dict[str, Any]:
    """Two sequences of 5 tokens and 10 keys, 4 query heads on 2 KV heads."""
    return {"q": half(2, 5, 4, 64), **keys(2, 10, 2, 64)}


def ragged() -> dict[str, Any]:
    """Two sequences of 3 and 7 tokens, and of 4 and 8 keys."""
    lengths = {"cu_seqlens_q": index(0, 3, 10), "cu_seqlens_k": index(0, 4, 12)}
    return {"q": half(10, 4, 64), **keys(12, 2, 64), **lengths}


def paged() -> dict[str, Any]:
    """The tokens of `dense`, and keys in 5 pages of 4; the entries 99 are past the used ones."""
    table = index([0, 99, 99], [1, 2, 3])
    return {**dense(), **keys(5, 4, 2, 64), "page_table": table, "kv_len": index(3, 10)}


FAR, FAR_BACK = 2**31, -(2**31) - 16
APART = "must have tokens that are -2147483648 to 2147483647 bytes apart, got"
# What can be told from shapes, dtypes and strides: prefill and plan_prefill refuse it alike.
DENSE_FORM = [
    Bad("q is None", {"q": None}, TypeError, f"q must be {ARRAY}, got NoneType"),
    Bad("k is a list", {"k": [1.0]}, TypeError, f"k must be {ARRAY}, or a Tbq4Array, got list"),
    Bad("v is None", {"v": None}, TypeError, f"v must be {ARRAY}, or a Tbq4Array, got NoneType"),
    Bad("q is ragged", {"q": half(10, 4, 64)}, ValueError, f"q must have shape {Q_AXES}, got 3 axes: (10, 4, 64)"),
    Bad("q has 2 axes", {"q": half(2, 4)}, ValueError, f"q must have shape {Q_AXES}, got 2 axes: (2, 4)"),
    Bad("head_dim 80", {"q": half(2, 5, 4, 80)}, ValueError, f"q has head_dim 80; supported: {HEAD_DIMS}"),
    Bad("rows of q have gaps", {"q": half(2, 5, 4, 128)[..., ::2]}, ValueError,
        "q must be contiguous along its last axis (stride 2 bytes), got 4; the other axes may have any stride"),
    Bad("rows of q are not aligned", {"q": half(2, 5, 4, 65)[..., 1:]}, ValueError,
        "q must have rows that start at multiples of 16 bytes, got strides (2600, 520, 130, 2)"),
    Bad("q has too many rows", {"q": np.broadcast_to(half(64), (2, 2**27 + 1, 4, 64))}, ValueError,
        "q must have at most 1073741824 rows (tokens times heads), got shape (2, 134217729, 4, 64)"),
    Bad("k is ragged", keys(20, 2, 64), ValueError,
        f"k must have shape {K_AXES}, got 3 axes: (20, 2, 64)"),
    Bad("v is ragged", {"v": half(20, 2, 64)}, ValueError,
        f"v must have shape {V_AXES}, got 3 axes: (20, 2, 64)"),
    Bad("k is bfloat16", {"k": half(2, 10, 2, 64).astype(BFLOAT16)}, TypeError,
        "k must be float16 (the dtype of q), got bfloat16"),
    Bad("v is float32", {"v": single(2, 10, 2, 64)}, TypeError, "v must be float16 (the dtype of q), got float32"),
    Bad("head_dim of k", {"k": half(2, 10, 2, 128)}, ValueError,
        "k must have head_dim 64 as q, got 128 in shape (2, 10, 2, 128)"),
    Bad("value_dim of v", {"v": half(2, 10, 2, 128)}, ValueError,
        "v must have value_dim 64, for head_dim 64 of q, got 128 in shape (2, 10, 2, 128)"),
    Bad("value_dim for head_dim 192", {"q": half(2, 5, 4, 192), "k": half(2, 10, 2, 192)}, ValueError,
        "v must have value_dim 192 or 128, for head_dim 192 of q, got 64 in shape (2, 10, 2, 64)"),
    Bad("v holds more tokens", {"v": half(2, 11, 2, 64)}, ValueError,
        "v must have shape (2, 10, 2, 64) (tokens and heads of k), got (2, 11, 2, 64)"),
    Bad("v of 128 has fewer heads", {"q": half(2, 5, 4, 192), "k": half(2, 10, 2, 192), "v": half(2, 10, 1, 128)},
        ValueError, "v must have shape (2, 10, 2, 128) (tokens and heads of k), got (2, 10, 1, 128)"),
    Bad("v is transposed", {"v": half(2, 10, 64, 2).swapaxes(2, 3)}, ValueError,
        "v must be contiguous along its last axis (stride 2 bytes), got 4; the other axes may have any stride"),
    *(
        Bad(
            f"{num_qo_heads} query heads on {num_kv_heads}",
            {"q": half(2, 5, num_qo_heads, 64), **keys(2, 10, num_kv_heads, 64)},
            ValueError,
            "q must have one or more query heads per KV head, a whole number, "
            f"got {num_qo_heads} query heads and {num_kv_heads} KV heads of k",
        )
        for num_qo_heads, num_kv_heads in ((3, 2), (1, 2), (0, 2), (4, 0), (0, 0))
    ),
    Bad("keys of 3 sequences", keys(3, 10, 2, 64), ValueError,
        "k must have batch 2 as q (it is dense: page_table is None), got shape (3, 10, 2, 64)"),
    Bad("too many keys", {name: np.broadcast_to(half(64), (2, 2**30 + 1, 2, 64)) for name in "kv"}, ValueError,
        "k must hold at most 1073741824 tokens a sequence, got 1073741825"),
    *(
        Bad(f"tokens of {name} are {stride} bytes apart", {name: apart(stride, 2, 10, 2, 64)}, ValueError,
            f"{name} {APART} {stride} in strides (0, {stride}, 128, 2)")
        for name, stride in (("k", FAR), ("v", FAR), ("k", FAR_BACK), ("v", 2**32))
    ),
    Bad("kv_len is a float", {"kv_len": 3.5}, TypeError,
        "kv_len must be an int, a sequence of int or an integer array, got 3.5 (float)"),
    Bad("kv_len holds floats", {"kv_len": [3.0, 1]}, TypeError, "kv_len must be of an integer dtype, got float64"),
    Bad("kv_len has three lengths", {"kv_len": [1, 2, 3]}, ValueError,
        "kv_len must have shape (2,) (one length a sequence), got (3,)"),
    Bad("kv_len has sequences of two lengths", {"kv_len": [[1], [2, 3]]}, ValueError,
        "kv_len must be an int, a sequence of int or an integer array, got [[1], [2, 3]]"),
    Bad("cu_seqlens_q with dense q", {"cu_seqlens_q": index(0, 5, 10)}, ValueError,
        "q must have shape (total_q, num_qo_heads, head_dim) with cu_seqlens_q, got 4 axes: (2, 5, 4, 64)"),
    Bad("cu_seqlens_k with dense k", {"cu_seqlens_k": index(0, 10, 20)}, ValueError,
        "k must have shape (total_k, num_kv_heads, head_dim) with cu_seqlens_k, got 4 axes: (2, 10, 2, 64)"),
    Bad("page_table without kv_len", {"page_table": index([0], [1])}, ValueError,
        "kv_len must be given with page_table, got None"),
]  # fmt: skip
TBQ4_FORM = [
    *(
        Bad(f"{name} in TBQ4 for head_dim {head_dim}",
            {"q": half(2, 5, 4, head_dim), **keys(2, 10, 2, head_dim), name: tbq4(2, 10, 2, 128)}, ValueError,
            f"q has head_dim {head_dim}; supported with {name} in TBQ4: {TBQ4_DIMS}")
        for name in "kv"
        for head_dim in (96, 192)
    ),
    Bad("codes of tokens are too far apart",
        {"k": cuattn.Tbq4Array(apart(FAR, 2, 10, 2, 32, dtype=np.uint8), half(2, 10, 2, 1))}, ValueError,
        f"k.codes {APART} 2147483648 in strides (0, 2147483648, 32, 1)"),
    Bad("norms of tokens are too far apart",
        {"v": cuattn.Tbq4Array(np.zeros((2, 10, 2, 32), np.uint8), apart(FAR_BACK, 2, 10, 2, 1))}, ValueError,
        f"v.norms {APART} -2147483664 in strides (0, -2147483664, 2, 2)"),
    Bad("k in TBQ4 has another head_dim", {"k": tbq4(2, 10, 2, 128)}, ValueError,
        "k must have head_dim 64 as q, got 128 in shape (2, 10, 2, 128)"),
    Bad("v in TBQ4 has fewer heads", {"v": tbq4(2, 10, 1, 64)}, ValueError,
        "v must have shape (2, 10, 2, 64) (tokens and heads of k), got (2, 10, 1, 64)"),
    Bad("k in TBQ4 is ragged", {"k": tbq4(20, 2, 64)}, ValueError,
        f"k must have shape {K_AXES}, got 3 axes: (20, 2, 64)"),
    Bad("rows of codes are not aligned", {"k": tbq4(2, 10, 2, 64, codes_gap=8)}, ValueError,
        "k.codes must have rows that start at multiples of 16 bytes, got strides (800, 80, 40, 1)"),
    Bad("norms are not aligned",
        {"q": half(2, 5, 4, 256), **keys(2, 10, 2, 256), "v": tbq4(2, 10, 2, 256, norms_gap=1)}, ValueError,
        "v.norms must have rows that start at multiples of 4 bytes, got strides (120, 12, 6, 2)"),
    Bad("k is what the reference encodes", {"k": cuattn.reference.quantize(single(2, 10, 2, 64))}, TypeError,
        f"k must be {ARRAY}, or a Tbq4Array, got Quantized"),
]  # fmt: skip
RAGGED_FORM = [
    Bad("tokens of v are too far apart", {"v": apart(FAR, 12, 2, 64)}, ValueError,
        f"v {APART} {FAR} in strides ({FAR}, 128, 2)"),
    Bad("q is dense", {"q": half(2, 5, 4, 64)}, ValueError,
        "q must have shape (total_q, num_qo_heads, head_dim) with cu_seqlens_q, got 4 axes: (2, 5, 4, 64)"),
    Bad("q has too many rows", {"q": np.broadcast_to(half(64), (2**28 + 1, 4, 64))}, ValueError,
        "q must have at most 1073741824 rows (tokens times heads), got shape (268435457, 4, 64)"),
    Bad("k is dense", {"k": half(2, 10, 2, 64)}, ValueError,
        "k must have shape (total_k, num_kv_heads, head_dim) with cu_seqlens_k, got 4 axes: (2, 10, 2, 64)"),
    Bad("k has 2 axes, and q says where sequences begin", {"k": half(12, 64), "cu_seqlens_k": None}, ValueError,
        "k must have shape (total_k, num_kv_heads, head_dim) or (batch, seqlen_k, num_kv_heads, head_dim), "
        "got 2 axes: (12, 64)"),
    Bad("v is dense, and q says where sequences begin", {"v": half(2, 12, 2, 64), "cu_seqlens_k": None}, ValueError,
        "v must have shape (12, 2, 64) (tokens and heads of k), got (2, 12, 2, 64)"),
    Bad("dense keys of 3 sequences", {**keys(3, 10, 2, 64), "cu_seqlens_k": None}, ValueError,
        "k must have batch 2 as cu_seqlens_q (it is dense: page_table is None), got shape (3, 10, 2, 64)"),
    Bad("more keys than tokens where one array is for both", {"cu_seqlens_k": None}, ValueError,
        "k must have 10 tokens as q (cu_seqlens_k is None, so that cu_seqlens_q is for both), got shape (12, 2, 64)"),
    Bad("too many keys", {name: np.broadcast_to(half(64), (2**30 + 1, 2, 64)) for name in "kv"}, ValueError,
        "k must hold at most 1073741824 tokens, got 1073741825"),
    Bad("kv_len with cu_seqlens_k", {"kv_len": [4, 8]}, ValueError,
        "kv_len must be None with ragged k (cu_seqlens_k has its lengths), got list"),
    Bad("kv_len with cu_seqlens_q for both", {**keys(10, 2, 64), "cu_seqlens_k": None, "kv_len": 3}, ValueError,
        "kv_len must be None with ragged k (cu_seqlens_q has its lengths), got int"),
    *(
        bad
        for name in ("cu_seqlens_q", "cu_seqlens_k")
        for bad in (
            Bad(f"{name} is an int", {name: 10}, TypeError,
                f"{name} must be a sequence of int or an integer array, got 10 (int)"),
            Bad(f"{name} is a string", {name: "0"}, TypeError,
                f"{name} must be a sequence of int or an integer array, got '0' (str)"),
            Bad(f"{name} is a set", {name: {0, 10}}, TypeError, f"{name} must be {ARRAY}, got set"),
            Bad(f"{name} holds floats", {name: np.array([0.0, 3, 10])}, TypeError,
                f"{name} must be of an integer dtype, got float64"),
            Bad(f"{name} holds bools", {name: [False, True, True]}, TypeError,
                f"{name} must be of an integer dtype, got bool"),
            Bad(f"{name} has sequences of two lengths", {name: [[0], [3, 10]]}, ValueError,
                f"{name} must be a sequence of int or an integer array, got [[0], [3, 10]]"),
        )
    ),
    Bad("cu_seqlens_q has no entry", {"cu_seqlens_q": []}, ValueError,
        "cu_seqlens_q must have shape (batch + 1,), got (0,)"),
    Bad("cu_seqlens_q has two axes", {"cu_seqlens_q": index([0, 3, 10])}, ValueError,
        "cu_seqlens_q must have shape (batch + 1,), got (1, 3)"),
    Bad("cu_seqlens_k has an entry too few", {"cu_seqlens_k": [0, 12]}, ValueError,
        "cu_seqlens_k must have shape (3,) (one entry more than the batch), got (2,)"),
    Bad("cu_seqlens_k for dense q has an entry too many",
        {"q": half(2, 5, 4, 64), "cu_seqlens_q": None, "cu_seqlens_k": [0, 4, 8, 12]}, ValueError,
        "cu_seqlens_k must have shape (3,) (one entry more than the batch), got (4,)"),
]  # fmt: skip
PAGED_FORM = [
    Bad("tokens of a page of k are too far apart", {"k": apart(FAR_BACK, 5, 4, 2, 64)}, ValueError,
        f"k {APART} {FAR_BACK} in strides (0, {FAR_BACK}, 128, 2)"),
    Bad("k is ragged", {"k": half(20, 2, 64)}, ValueError,
        "k must have shape (num_pages, page_size, num_kv_heads, head_dim) with page_table, got 3 axes: (20, 2, 64)"),
    Bad("v is ragged", {"v": half(20, 2, 64)}, ValueError,
        "v must have shape (num_pages, page_size, num_kv_heads, value_dim) with page_table, got 3 axes: (20, 2, 64)"),
    Bad("kv_len is None", {"kv_len": None}, ValueError, "kv_len must be given with page_table, got None"),
    Bad("cu_seqlens_k is given", {"cu_seqlens_k": [0, 3, 13]}, ValueError,
        "cu_seqlens_k must be None with page_table (kv_len counts the keys in pages), got list"),
    *(
        Bad(f"page_table has {np.ndim(table)} axes", {"page_table": table}, ValueError,
            f"page_table must have shape (batch, max_pages), got {np.ndim(table)} axes: {np.shape(table)}")
        for table in (np.array(0, np.int32), index(0, 0, 0))
    ),
    Bad("page_table has 3 rows", {"page_table": index(*[[0] * 3] * 3)}, ValueError,
        "page_table must have shape (2, max_pages), batch as in q, got (3, 3)"),
    Bad("page_table has a row too few for ragged q",
        {"q": half(10, 4, 64), "cu_seqlens_q": [0, 1, 2, 10], "kv_len": 3}, ValueError,
        "page_table must have shape (3, max_pages), batch as in cu_seqlens_q, got (2, 3)"),
    Bad("page_table is int64", {"page_table": np.zeros((2, 3), int)}, TypeError,
        "page_table must be int32, got int64"),
    Bad("page_table is a list", {"page_table": [[0] * 3] * 2}, TypeError, f"page_table must be {ARRAY}, got list"),
    Bad("too many keys", {"page_table": np.broadcast_to(np.int32(0), (2, 2**28 + 1))}, ValueError,
        "k must hold at most 1073741824 tokens a sequence, got 1073741828"),
]  # fmt: skip
# What stands in the arrays, which plan_prefill does not read.
DENSE_CONTENTS = [
    Bad("a length exceeds seqlen_k", {"kv_len": index(3, 11)}, ValueError,
        "kv_len[1] must be 0 to 10, what k holds of a sequence, got 11"),
    Bad("a length is negative", {"kv_len": [-1, 3]}, ValueError,
        "kv_len[0] must be 0 to 10, what k holds of a sequence, got -1"),
    Bad("one length for all exceeds it", {"kv_len": 11}, ValueError, "kv_len must be 0 to 10, got 11"),
    Bad("a length would wrap to 1", {"kv_len": [2**32 + 1, 3]}, ValueError,
        "kv_len[0] must be 0 to 10, what k holds of a sequence, got 4294967297"),
]  # fmt: skip
RAGGED_CONTENTS = [
    bad
    for name, of, total in (("cu_seqlens_q", "q", 10), ("cu_seqlens_k", "k", 12))
    for bad in (
        Bad(f"{name} begins late", {name: [1, 3, total]}, ValueError,
            f"{name}[0] must be 0, where the first sequence begins, got 1"),
        Bad(f"{name} decreases", {name: index(0, total, 4)}, ValueError,
            f"{name}[2] must be at least {total}, the entry before it, got 4"),
        Bad(f"unsigned {name} decreases", {name: np.array([0, 5, 4], np.uint8)}, ValueError,
            f"{name}[2] must be at least 5, the entry before it, got 4"),
        Bad(f"{name} ends early", {name: (0, 3, 9)}, ValueError,
            f"{name}[2], the last entry, must be {total}, the tokens of {of}, got 9"),
        Bad(f"{name} passes the end", {name: [0, 13, total]}, ValueError,
            f"{name}[1] must be 0 to {total}, the tokens of {of}, got 13"),
        Bad(f"{name} is negative", {name: [0, -1, total]}, ValueError,
            f"{name}[1] must be 0 to {total}, the tokens of {of}, got -1"),
        Bad(f"{name} would wrap", {name: np.array([0, 2**32 + 3, total])}, ValueError,
            f"{name}[1] must be 0 to {total}, the tokens of {of}, got 4294967299"),
    )
]  # fmt: skip
PAGED_CONTENTS = [
    Bad("a used page is past the last", {"page_table": index([0, 99, 99], [1, 2, 5])}, ValueError,
        "page_table[1, 2] must be 0 to 4, the pages of k, got 5"),
    Bad("a used page is negative", {"page_table": index([-1, 99, 99], [1, 2, 3])}, ValueError,
        "page_table[0, 0] must be 0 to 4, the pages of k, got -1"),
    Bad("the table is too short", {"page_table": index([0, 1], [1, 2])}, ValueError,
        "kv_len[1] must be 0 to 8, what k holds of a sequence, got 10"),
]  # fmt: skip
# Arguments of prefill alone.
RANGE = "must be 0 or have a size of 1e-18 to 1e+18"
OPTIONS = [
    Bad("q is int32", {"q": np.zeros((2, 5, 4, 64), np.int32)}, TypeError, f"q must be {CPU_DTYPES}, got int32"),
    *(
        Bad(f"softcap is {x!r}", {"softcap": x}, error, f"softcap must be a positive finite number or None, got {x!r}")
        for x, error in ((0, ValueError), (-1.0, ValueError), (math.nan, ValueError), ("5", TypeError))
    ),
    Bad("softcap is tiny", {"softcap": 1e-46}, ValueError, f"softcap {RANGE}, got 1e-46"),
    *(
        Bad(f"scale is {x!r}", {"softmax_scale": x}, error, f"softmax_scale must be a finite number or None, got {x!r}")
        for x, error in ((math.inf, ValueError), ([1.0], TypeError), (True, TypeError))
    ),
    Bad("softmax_scale is huge", {"softmax_scale": -1e39}, ValueError, f"softmax_scale {RANGE}, got -1e+39"),
    *(
        Bad(f"window is {x!r}", {"window": x}, TypeError, f"window must be None or (left, right), got {x!r}")
        for x in (5, (1,), "ab")
    ),
    Bad("window holds a float", {"window": (1.5, 0)}, TypeError, "window left must be an integer, got 1.5"),
    Bad("window is below -1", {"window": (0, -5)}, ValueError,
        "window right must be -1 to 9223372036854775807, got -5"),
    Bad("sinks are too few", {"sinks": single(3)}, ValueError,
        "sinks must have shape (4,) (one per query head), got (3,)"),
    Bad("sinks are int32", {"sinks": index(0, 0, 0, 0)}, TypeError, "sinks must be float32 or float16, got int32"),
    Bad("sinks are a list", {"sinks": [0.0] * 4}, TypeError, f"sinks must be {ARRAY}, got list"),
    Bad("causal is a string", {"causal": "yes"}, TypeError, "causal must be True or False, got 'yes'"),
    Bad("return_lse is a string", {"return_lse": "no"}, TypeError, "return_lse must be True or False, got 'no'"),
]  # fmt: skip
DENSE_OUT = [
    Bad("out has another shape", {"out": half(2, 5, 4, 128)}, ValueError,
        "out must have shape (2, 5, 4, 64) (the shape of q), got (2, 5, 4, 128)"),
    Bad("out has the head_dim of q",
        {"q": half(2, 5, 4, 192), "k": half(2, 10, 2, 192), "v": half(2, 10, 2, 128), "out": half(2, 5, 4, 192)},
        ValueError,
        "out must have shape (2, 5, 4, 128) (with value_dim of v, else the shape of q), got (2, 5, 4, 192)"),
    Bad("out is float32", {"out": single(2, 5, 4, 64)}, TypeError,
        "out must be float16 (the dtype of q), got float32"),
    Bad("out is read-only", {"out": read_only(2, 5, 4, 64)}, ValueError,
        "out must be writeable, got a read-only array"),
    Bad("out is a list", {"out": [0.0]}, TypeError, f"out must be {ARRAY}, got list"),
    Bad("out has gaps in its rows", {"out": half(2, 5, 4, 128)[..., ::2]}, ValueError,
        "out must be contiguous along its last axis (stride 2 bytes), got 4; the other axes may have any stride"),
    Bad("out repeats a sequence", {"out": as_strided(half(5, 4, 64), (2, 5, 4, 64), (0, 512, 128, 2))}, ValueError,
        "out must not have elements that share memory, got strides (0, 512, 128, 2) for shape (2, 5, 4, 64)"),
]  # fmt: skip
RAGGED_OUT = [
    Bad("out is dense", {"out": half(1, 10, 4, 64)}, ValueError,
        "out must have shape (10, 4, 64) (the shape of q), got (1, 10, 4, 64)"),
]  # fmt: skip


def cases(*tables: tuple[Any, list[Bad]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        ("call", "bad"),
        [pytest.param(base(), row, id=f"{base.__name__}: {row.name}") for base, table in tables for row in table],
    )


def assert_refused(function: Any, call: dict[str, Any], bad: Bad) -> None:
    """Call with the changes; the message must be that of the row."""
    call = {**call, **bad.changes}
    out = call.get("out")
    before = out.tobytes() if isinstance(out, np.ndarray) else b""
    with pytest.raises(bad.error) as caught:
        function(**call)
    assert str(caught.value) == bad.message
    if isinstance(out, np.ndarray):
        assert out.tobytes() == before


FORM = [(dense, DENSE_FORM), (dense, TBQ4_FORM), (ragged, RAGGED_FORM), (paged, PAGED_FORM)]
CONTENTS = [(dense, DENSE_CONTENTS), (ragged, RAGGED_CONTENTS), (paged, PAGED_CONTENTS)]


@cases(*FORM, *CONTENTS, (dense, OPTIONS))
def test_prefill_says_what_it_refuses_and_writes_nothing(call: dict[str, Any], bad: Bad) -> None:
    assert_refused(cuattn.prefill, {**call, "out": np.full(call["q"].shape, 77, np.float16)}, bad)


@cases((dense, DENSE_OUT), (ragged, RAGGED_OUT))
def test_prefill_says_why_it_refuses_out(call: dict[str, Any], bad: Bad) -> None:
    assert_refused(cuattn.prefill, call, bad)


@cases(*FORM)
def test_plan_prefill_refuses_what_prefill_refuses(call: dict[str, Any], bad: Bad) -> None:
    assert_refused(cuattn.plan_prefill, call, bad)


@cases(*CONTENTS)
def test_plan_prefill_does_not_read_contents(call: dict[str, Any], bad: Bad) -> None:
    assert cuattn.plan_prefill(**{**call, **bad.changes}).grid[0] >= 1


def test_plan_prefill_plans_only_dtypes_that_have_a_kernel() -> None:
    changes = {name: x.astype(np.float64) for name, x in dense().items()}
    message = "q must be float16 or bfloat16 or float32, got float64"
    assert_refused(cuattn.plan_prefill, dense(), Bad("", changes, TypeError, message))
    for name in "kv":
        changes = {n: x.astype(np.float32) for n, x in dense().items()} | {name: tbq4(2, 10, 2, 64)}
        message = f"q must be float16 or bfloat16 with {name} in TBQ4, got float32"
        assert_refused(cuattn.plan_prefill, dense(), Bad("", changes, TypeError, message))


@pytest.mark.parametrize("device", ["sm_70", "H200", 90])
def test_plan_prefill_names_the_devices_it_knows(device: Any) -> None:
    known = "sm_80, sm_86, sm_89, sm_90a, sm_100a, sm_120a"
    message = f"device must be a Device, None or one of {known}, got {device!r}"
    assert_refused(cuattn.plan_prefill, dense(), Bad("", {"device": device}, ValueError, message))


@pytest.mark.parametrize("function", [cuattn.prefill, cuattn.plan_prefill], ids=lambda f: f.__name__)
def test_an_unknown_keyword_is_refused(function: Any) -> None:
    with pytest.raises(TypeError, match="num_splits"):
        function(*dense().values(), num_splits=2)


@pytest.mark.parametrize("stride", [2**31 - 16, -(2**31)])
def test_tokens_may_be_as_far_apart_as_32_bits_say(stride: int) -> None:
    """Only where there is more than one; the axes before may have any stride."""
    x = apart(stride, 2, 10, 2, 64)
    codes = cuattn.Tbq4Array(apart(stride, 2, 10, 2, 32, dtype=np.uint8), apart(stride, 2, 10, 2, 1))
    for cache in (x, codes):
        assert cuattn.plan_prefill(half(2, 5, 4, 64), cache, cache).problem.max_kv_len == 10
    far = as_strided(half(64), (2, 1, 2, 64), (2**40, 2**40, 0, 2))
    assert cuattn.plan_prefill(half(2, 5, 4, 64), far, far).problem.max_kv_len == 1


def test_the_unchanged_calls_are_right() -> None:
    """Otherwise the tables above would prove nothing."""
    for call in (dense(), ragged(), paged()):
        out = np.full(call["q"].shape, 77, np.float16)
        assert cuattn.prefill(**call, out=out) is out
        assert not out.any()
        assert cuattn.plan_prefill(**call).grid[0] >= 1
    for k, v in ((tbq4(2, 10, 2, 64), half(2, 10, 2, 64)), (tbq4(2, 10, 2, 64, codes_gap=16, norms_gap=1),) * 2):
        assert not cuattn.prefill(half(2, 5, 4, 64), k, v).any()
