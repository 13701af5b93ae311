"""Bad input: the error names the argument, what came and what is accepted, and `out` is left alone."""

import inspect
import math
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided
from zeros import half, index, read_only, single

import cuattn

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
HEAD_DIMS = ("64", "96", "128", "192", "256", "512")
EITHER = (TypeError, ValueError)


class Bad(NamedTuple):
    """A call with some arguments changed, and what must be said of it."""

    name: str
    changes: dict[str, Any]
    error: type[Exception] | tuple[type[Exception], ...]
    words: tuple[str, ...]


def dense() -> dict[str, Any]:
    """Two sequences in caches of 10 tokens, 4 query heads on 2 KV heads."""
    return {"q": half(2, 4, 64), "k_cache": half(2, 10, 2, 64), "v_cache": half(2, 10, 2, 64), "kv_len": index(3, 10)}


def paged() -> dict[str, Any]:
    """The same in 5 pages of 4 tokens; the entries 99 are past the used ones."""
    pages = {"k_cache": half(5, 4, 2, 64), "v_cache": half(5, 4, 2, 64)}
    return {**dense(), **pages, "page_table": index([0, 99, 99], [1, 2, 3])}


def parts() -> dict[str, Any]:
    """Three parts of two sequences of 4 heads."""
    return {"out_partial": single(3, 2, 4, 64), "lse_partial": single(3, 2, 4)}


def caches(*shape: int, dtype: Any = np.float16) -> dict[str, np.ndarray]:
    return {"k_cache": np.zeros(shape, dtype), "v_cache": np.zeros(shape, dtype)}


def tbq4(*shape: int, mean: np.ndarray | None = None) -> cuattn.Tbq4Array:
    """Rows of zeros in TBQ4."""
    codes = np.full((*shape[:-1], shape[-1] // 2), 0x88, np.uint8)
    return cuattn.Tbq4Array(codes, half(*shape[:-1], max(1, shape[-1] // 128)), mean)


def wide(codes_gap: int, norms_gap: int, head_dim: int) -> cuattn.Tbq4Array:
    """Rows of codes and of norms with gaps of so many elements between them."""
    rows = tbq4(2, 10, 2, head_dim)
    planes = [
        np.zeros((*plane.shape[:-1], plane.shape[-1] + gap), plane.dtype)[..., : plane.shape[-1]]
        for plane, gap in ((rows.codes, codes_gap), (rows.norms, norms_gap))
    ]
    return cuattn.Tbq4Array(*planes)


def planes(**changes: Any) -> SimpleNamespace:
    """What looks like rows in TBQ4, and was not checked."""
    rows = tbq4(2, 10, 2, 64, mean=single(2, 64))
    return SimpleNamespace(**{"codes": rows.codes, "norms": rows.norms, "mean": rows.mean, **changes})


# What can be told from shapes, dtypes and strides: decode and plan_decode refuse it alike.
FORM = [
    Bad("q has 2 axes", {"q": half(2, 4)}, ValueError, ("q", "(2, 4)", "batch", "num_qo_heads", "head_dim")),
    Bad("q has 5 axes", {"q": half(2, 1, 1, 4, 64)}, ValueError, ("q", "(2, 1, 1, 4, 64)", "batch", "seqlen_q")),
    Bad("k_cache has 3 axes", {"k_cache": half(2, 10, 64)}, ValueError, ("k_cache", "(2, 10, 64)", "num_kv_heads")),
    Bad("v_cache has 3 axes", {"v_cache": half(2, 10, 64)}, ValueError, ("v_cache", "(2, 10, 64)", "num_kv_heads")),
    Bad("k_cache has 5 axes", {"k_cache": half(1, 2, 10, 2, 64)}, ValueError, ("k_cache", "(1, 2, 10, 2, 64)")),
    Bad("q is bfloat16", {"q": half(2, 4, 64).astype(BFLOAT16)}, TypeError, ("k_cache", "bfloat16", "float16", "q")),
    Bad("k_cache is float32", {"k_cache": single(2, 10, 2, 64)}, TypeError, ("k_cache", "float32", "float16", "q")),
    Bad(
        "v_cache is bfloat16",
        {"v_cache": half(2, 10, 2, 64).astype(BFLOAT16)},
        TypeError,
        ("v_cache", "bfloat16", "float16"),
    ),
    Bad(
        "everything is int32",
        {"q": np.zeros((2, 4, 64), np.int32), **caches(2, 10, 2, 64, dtype=np.int32)},
        TypeError,
        ("q", "int32", "float16", "bfloat16"),
    ),
    Bad("q is complex", {"q": half(2, 4, 64).astype(complex)}, TypeError, ("q", "complex128", "float16", "bfloat16")),
    Bad("q is of objects", {"q": half(2, 4, 64).astype(object)}, TypeError, ("q", "object", "float16", "bfloat16")),
    Bad("heads do not divide", {"q": half(2, 3, 64)}, ValueError, ("q", "3", "2", "1 to 64")),
    Bad("group of 65", {"q": half(2, 130, 64)}, ValueError, ("q", "130", "2", "1 to 64")),
    Bad("fewer query heads than KV heads", {"q": half(2, 1, 64)}, ValueError, ("q", "1", "2", "1 to 64")),
    Bad("no query heads", {"q": half(2, 0, 64)}, ValueError, ("q", "0", "2", "1 to 64")),
    Bad("no KV heads", caches(2, 10, 0, 64), ValueError, ("4", "0", "1 to 64")),
    Bad("head_dim 80", {"q": half(2, 4, 80), **caches(2, 10, 2, 80)}, ValueError, ("q", "head_dim", "80", *HEAD_DIMS)),
    Bad("head_dim 1024", {"q": half(2, 4, 1024), **caches(2, 10, 2, 1024)}, ValueError, ("q", "1024", *HEAD_DIMS)),
    Bad("head_dim 0", {"q": half(2, 4, 0), **caches(2, 10, 2, 0)}, ValueError, ("q", "head_dim", "0", *HEAD_DIMS)),
    Bad("head_dim of k_cache", {"k_cache": half(2, 10, 2, 128)}, ValueError, ("k_cache", "head_dim", "64", "128")),
    Bad("head_dim of v_cache", {"v_cache": half(2, 10, 2, 128)}, ValueError, ("v_cache", "128", "64")),
    Bad(
        "v_cache holds more tokens",
        {"v_cache": half(2, 11, 2, 64)},
        ValueError,
        ("v_cache", "k_cache", "(2, 10, 2, 64)", "(2, 11, 2, 64)"),
    ),
    Bad(
        "v_cache has fewer heads",
        {"v_cache": half(2, 10, 1, 64)},
        ValueError,
        ("v_cache", "k_cache", "(2, 10, 2, 64)", "(2, 10, 1, 64)"),
    ),
    Bad("dense caches of 3 sequences", caches(3, 10, 2, 64), ValueError, ("k_cache", "2", "(3, 10, 2, 64)", "q")),
    Bad("no query token", {"q": half(2, 0, 4, 64)}, ValueError, ("q", "seqlen_q", "0", "1 to 16")),
    Bad("17 query tokens", {"q": half(2, 17, 4, 64)}, ValueError, ("q", "seqlen_q", "17", "1 to 16")),
    Bad("rows of q have gaps", {"q": half(2, 4, 128)[..., ::2]}, ValueError, ("q", "contiguous", "last axis", "4")),
    Bad(
        "rows of k_cache have gaps",
        {"k_cache": half(2, 10, 2, 128)[..., ::2]},
        ValueError,
        ("k_cache", "contiguous", "last axis", "4"),
    ),
    Bad(
        "v_cache is transposed",
        {"v_cache": half(2, 10, 64, 2).swapaxes(2, 3)},
        ValueError,
        ("v_cache", "contiguous", "last axis", "4"),
    ),
    Bad("rows of q run backwards", {"q": half(2, 4, 64)[..., ::-1]}, ValueError, ("q", "contiguous", "-2")),
    Bad("rows of q are not aligned", {"q": half(2, 4, 65)[..., 1:]}, ValueError, ("q", "16 bytes", "(520, 130, 2)")),
    Bad("kv_len is a float", {"kv_len": 3.5}, TypeError, ("kv_len", "float", "int")),
    Bad("kv_len is a bool", {"kv_len": True}, TypeError, ("kv_len", "bool", "int")),
    Bad("kv_len is a string", {"kv_len": "3"}, TypeError, ("kv_len", "str", "int")),
    Bad("kv_len is None", {"kv_len": None}, TypeError, ("kv_len", "NoneType", "int")),
    Bad("kv_len holds a float", {"kv_len": [3.0, 1]}, TypeError, ("kv_len", "float64", "integer")),
    Bad("kv_len holds floats", {"kv_len": np.array([3.0, 10.0])}, TypeError, ("kv_len", "float64", "integer")),
    Bad("kv_len holds bools", {"kv_len": np.array([True, False])}, TypeError, ("kv_len", "bool", "integer")),
    Bad("kv_len holds strings", {"kv_len": ["3", "4"]}, TypeError, ("kv_len", "integer")),
    Bad("kv_len has one length", {"kv_len": [3]}, ValueError, ("kv_len", "(1,)", "(2,)")),
    Bad("kv_len has three lengths", {"kv_len": index(1, 2, 3)}, ValueError, ("kv_len", "(3,)", "(2,)")),
    Bad("kv_len has two axes", {"kv_len": index([3], [10])}, ValueError, ("kv_len", "(2, 1)", "(2,)")),
    Bad("kv_len is ragged", {"kv_len": [[1], [2, 3]]}, EITHER, ("kv_len",)),
    Bad("q is None", {"q": None}, TypeError, ("q", "NoneType", "array")),
    Bad("q is a list", {"q": [[1.0]]}, TypeError, ("q", "list", "array")),
    Bad("k_cache is None", {"k_cache": None}, TypeError, ("k_cache", "NoneType", "array")),
    Bad("v_cache is a list", {"v_cache": [1.0]}, TypeError, ("v_cache", "list", "array")),
    Bad("no split", {"num_splits": 0}, ValueError, ("num_splits", "0", "1 to 512")),
    Bad("513 splits", {"num_splits": 513}, ValueError, ("num_splits", "513", "1 to 512")),
    Bad("num_splits is negative", {"num_splits": -1}, ValueError, ("num_splits", "-1", "1 to 512")),
    Bad("num_splits is a float", {"num_splits": 1.5}, TypeError, ("num_splits", "1.5", "integer")),
    Bad("num_splits is a string", {"num_splits": "2"}, TypeError, ("num_splits", "'2'", "integer")),
    Bad("num_splits is a bool", {"num_splits": True}, EITHER, ("num_splits", "True")),
    Bad("balance is 1", {"balance": 1}, TypeError, ("balance", "True or False", "1")),
    *(
        Bad(f"balance beside {name}", {"balance": True, name: x}, ValueError, ("balance", name, "False"))
        for name, x in (("num_splits", 2), ("split_size", 64))
    ),
    Bad("split_size is 0", {"split_size": 0}, ValueError, ("split_size", "0", "64 to")),
    Bad("split_size is no multiple", {"split_size": 96}, ValueError, ("split_size", "96", "multiple of 64")),
    Bad("split_size is huge", {"split_size": 2**31}, ValueError, ("split_size", str(2**31), str(2**30))),
    Bad("split_size is a float", {"split_size": 64.0}, TypeError, ("split_size", "64.0", "integer")),
    Bad("split_size is a bool", {"split_size": True}, EITHER, ("split_size", "True")),
    Bad("both ways to split", {"split_size": 64, "num_splits": 2}, ValueError, ("split_size", "num_splits", "64", "2")),
    Bad("a keyword is unknown", {"scale": 1.0}, TypeError, ("scale",)),
]
# The same of caches in TBQ4, whose head_dims are fewer.
TBQ4_FORM = [
    Bad("k_cache in TBQ4 has 3 axes", {"k_cache": tbq4(2, 10, 64)}, ValueError, ("k_cache", "(2, 10, 64)", "head_dim")),
    Bad("v_cache in TBQ4 has 2 axes", {"v_cache": tbq4(10, 64)}, ValueError, ("v_cache", "(10, 64)", "num_kv_heads")),
    Bad(
        "k_cache in TBQ4 has another head_dim",
        {"k_cache": tbq4(2, 10, 2, 128)},
        ValueError,
        ("k_cache", "head_dim", "64", "(2, 10, 2, 128)"),
    ),
    *(
        Bad(
            f"{name} in TBQ4 for head_dim 96",
            {"q": half(2, 4, 96), **caches(2, 10, 2, 96), name: tbq4(2, 10, 2, 64)},
            ValueError,
            ("q", "head_dim", "96", name, "64, 128, 256, 512"),
        )
        for name in ("k_cache", "v_cache")
    ),
    Bad(
        "v_cache in TBQ4 holds more tokens",
        {"v_cache": tbq4(2, 11, 2, 64)},
        ValueError,
        ("v_cache", "k_cache", "(2, 10, 2, 64)", "(2, 11, 2, 64)"),
    ),
    Bad(
        "k_cache in TBQ4 has fewer heads",
        {"k_cache": tbq4(2, 10, 1, 64)},
        ValueError,
        ("v_cache", "k_cache", "(2, 10, 1, 64)", "(2, 10, 2, 64)"),
    ),
    Bad(
        "dense caches in TBQ4 of 3 sequences",
        {"k_cache": tbq4(3, 10, 2, 64), "v_cache": tbq4(3, 10, 2, 64)},
        ValueError,
        ("k_cache", "2", "(3, 10, 2, 64)", "q"),
    ),
    Bad("rows of codes are not aligned", {"k_cache": wide(8, 0, 64)}, ValueError, ("k_cache.codes", "16 bytes")),
    *(
        Bad(
            f"norms of head_dim {head_dim} are not aligned",
            {"q": half(2, 4, head_dim), **caches(2, 10, 2, head_dim), "v_cache": wide(0, gap, head_dim)},
            ValueError,
            ("v_cache.norms", f"{multiple} bytes"),
        )
        for head_dim, gap, multiple in ((256, 1, 4), (512, 2, 8))
    ),
    Bad("codes are int32", {"k_cache": planes(codes=index(0))}, EITHER, ("k_cache.codes",)),
    Bad("norms are float32", {"v_cache": planes(norms=single(2, 10, 2, 1))}, TypeError, ("v_cache.norms", "float32")),
    Bad(
        "norms are too few",
        {"k_cache": planes(norms=half(2, 9, 2, 1))},
        ValueError,
        ("k_cache.norms", "(2, 9, 2, 1)", "(2, 10, 2, 1)"),
    ),
    Bad(
        "the mean is of one head",
        {"k_cache": planes(mean=single(1, 64))},
        ValueError,
        ("k_cache.mean", "(1, 64)", "(2, 64)"),
    ),
    Bad(
        "k_cache is what the reference encodes",
        {"k_cache": cuattn.reference.quantize(single(2, 10, 2, 64))},
        TypeError,
        ("k_cache", "Quantized", "Tbq4Array"),
    ),
]
PAGED_FORM = [
    Bad("page_table has 1 axis", {"page_table": index(0, 0, 0)}, ValueError, ("page_table", "(3,)", "max_pages")),
    Bad("page_table has 3 rows", {"page_table": index(*[[0] * 3] * 3)}, ValueError, ("page_table", "2", "(3, 3)", "q")),
    Bad("page_table is int64", {"page_table": np.zeros((2, 3), int)}, TypeError, ("page_table", "int64", "int32")),
    Bad("page_table is float32", {"page_table": single(2, 3)}, TypeError, ("page_table", "float32", "int32")),
    Bad("page_table is a list", {"page_table": [[0] * 3] * 2}, TypeError, ("page_table", "list", "array")),
]
# What stands in the arrays, which plan_decode does not read.
CONTENTS = [
    Bad("a length is negative", {"kv_len": [3, -1]}, ValueError, ("kv_len[1]", "-1", "0 to 10")),
    Bad("a length exceeds the capacity", {"kv_len": [11, 3]}, ValueError, ("kv_len[0]", "11", "0 to 10")),
    Bad("an array's length exceeds it", {"kv_len": index(3, 11)}, ValueError, ("kv_len[1]", "11", "0 to 10")),
    Bad("one length for all exceeds it", {"kv_len": 11}, ValueError, ("kv_len", "11", "0 to 10")),
    Bad("one length for all is negative", {"kv_len": -2}, ValueError, ("kv_len", "-2", "0 to 10")),
    Bad("a length would wrap to 1", {"kv_len": 2**32 + 1}, ValueError, ("kv_len", "4294967297", "0 to 10")),
    Bad("a length has more than 64 bits", {"kv_len": [2**70, 1]}, EITHER, ("kv_len",)),
]
PAGED_CONTENTS = [
    Bad(
        "a used page is past the last",
        {"page_table": index([0, 99, 99], [1, 2, 5])},
        ValueError,
        ("page_table[1, 2]", "5", "0 to 4"),
    ),
    Bad(
        "a used page is negative",
        {"page_table": index([-1, 99, 99], [1, 2, 3])},
        ValueError,
        ("page_table[0, 0]", "-1", "0 to 4"),
    ),
    Bad("the table is too short", {"page_table": index([0, 1], [1, 2])}, ValueError, ("kv_len[1]", "10", "0 to 8")),
]
# Arguments of decode alone.
OPTIONS = [
    *(
        Bad(f"softcap is {x!r}", {"softcap": x}, ValueError, ("softcap", repr(x), "positive"))
        for x in (0, 0.0, -1, math.nan, math.inf)
    ),
    *(Bad(f"softcap is {x!r}", {"softcap": x}, TypeError, ("softcap", repr(x), "number")) for x in ("5", [5.0], 1j)),
    # Kernels hold them, times log2(e), and their quotient in float32.
    *(
        Bad(f"softcap is {x!r}", {"softcap": x}, ValueError, ("softcap", repr(x), "1e-18 to 1e+18"))
        for x in (1e-46, 1e39)
    ),
    *(
        Bad(f"softmax_scale is {x!r}", {"softmax_scale": x}, ValueError, ("softmax_scale", repr(x), "1e-18 to 1e+18"))
        for x in (1e-46, -1e39)
    ),
    Bad("softmax_scale is 10**400", {"softmax_scale": 10**400}, ValueError, ("softmax_scale", "finite")),
    *(
        Bad(f"softmax_scale is {x!r}", {"softmax_scale": x}, ValueError, ("softmax_scale", repr(x), "finite"))
        for x in (math.nan, math.inf, -math.inf)
    ),
    *(
        Bad(f"softmax_scale is {x!r}", {"softmax_scale": x}, TypeError, ("softmax_scale", repr(x), "number"))
        for x in ("1", [1.0], 1j)
    ),
    *(
        Bad(f"window is {x!r}", {"window": x}, EITHER, ("window", repr(x), "(left, right)", "None"))
        for x in (5, (), (1,), (1, 2, 3), "ab")
    ),
    Bad("window holds a float", {"window": (1.5, 0)}, TypeError, ("window", "1.5", "integer")),
    Bad("window holds a string", {"window": (0, "2")}, TypeError, ("window", "'2'", "integer")),
    Bad("window is below -1 on the left", {"window": (-2, 0)}, ValueError, ("window", "left", "-2", "-1")),
    Bad("window is below -1 on the right", {"window": (0, -5)}, ValueError, ("window", "right", "-5", "-1")),
    Bad("sinks are too few", {"sinks": single(3)}, ValueError, ("sinks", "(3,)", "(4,)")),
    Bad("sinks have two axes", {"sinks": single(1, 4)}, ValueError, ("sinks", "(1, 4)", "(4,)")),
    Bad("sinks are int32", {"sinks": index(0, 0, 0, 0)}, TypeError, ("sinks", "int32", "float32", "float16")),
    Bad("sinks are bfloat16", {"sinks": half(4).astype(BFLOAT16)}, TypeError, ("sinks", "bfloat16", "float32")),
    Bad("sinks are a list", {"sinks": [0.0] * 4}, TypeError, ("sinks", "list", "array")),
    Bad("causal is a string", {"causal": "yes"}, TypeError, ("causal", "'yes'", "True or False")),
    Bad("return_lse is a string", {"return_lse": "no"}, TypeError, ("return_lse", "'no'", "True or False")),
]
KEPT = [
    *(
        Bad(f"{name} comes alone", {name: half(2, 3, 2, 64)}, ValueError, (name, other, "None"))
        for pair in (("k_sink", "v_sink"), ("k_recent", "v_recent"))
        for name, other in (pair, pair[::-1])
    ),
    *(
        bad
        for name in ("sink", "recent")
        for k, v in ((f"k_{name}", f"v_{name}"),)
        for bad in (
            Bad(f"{k} has 3 axes", {k: half(3, 2, 64), v: half(3, 2, 64)}, ValueError, (k, "(3, 2, 64)", "batch")),
            Bad(
                f"{k} has another batch",
                {k: half(1, 3, 2, 64), v: half(1, 3, 2, 64)},
                ValueError,
                (k, "(1, 3, 2, 64)", "(2, 3, 2, 64)"),
            ),
            Bad(
                f"{k} has the heads of q",
                {k: half(2, 3, 4, 64), v: half(2, 3, 4, 64)},
                ValueError,
                (k, "(2, 3, 4, 64)", "(2, 3, 2, 64)"),
            ),
            Bad(
                f"{v} has more tokens",
                {k: half(2, 3, 2, 64), v: half(2, 4, 2, 64)},
                ValueError,
                (v, k, "(2, 4, 2, 64)", "(2, 3, 2, 64)"),
            ),
            Bad(
                f"{v} is bfloat16",
                {k: half(2, 3, 2, 64), v: half(2, 3, 2, 64).astype(BFLOAT16)},
                TypeError,
                (v, "bfloat16", "float16", "q"),
            ),
            Bad(
                f"{k} has gaps in its rows",
                {k: half(2, 3, 2, 128)[..., ::2], v: half(2, 3, 2, 64)},
                ValueError,
                (k, "contiguous", "4"),
            ),
            Bad(f"{k} is in TBQ4", {k: tbq4(2, 3, 2, 64), v: half(2, 3, 2, 64)}, TypeError, (k, "Tbq4Array", "array")),
        )
    ),
    Bad("workspace is float32", {"workspace": np.zeros(9, np.float32)}, TypeError, ("workspace", "uint8", "float32")),
    Bad("workspace has 2 axes", {"workspace": np.zeros((2, 9), np.uint8)}, ValueError, ("workspace", "num_bytes")),
    Bad("workspace has gaps", {"workspace": np.zeros(18, np.uint8)[::2]}, ValueError, ("workspace", "contiguous")),
    Bad(
        "workspace is read-only",
        {"workspace": np.frombuffer(bytes(16), np.uint8)},
        ValueError,
        ("workspace", "read-only"),
    ),
    Bad("tree_mask has another shape", {"tree_mask": np.ones((2, 2, 2), bool)}, ValueError, ("tree_mask", "(2, 1, 1)")),
    Bad("tree_mask is int32", {"tree_mask": np.ones((2, 1, 1), np.int32)}, TypeError, ("tree_mask", "int32", "uint8")),
    Bad("tree_mask is a list", {"tree_mask": [[[1]]]}, TypeError, ("tree_mask", "list", "array")),
]
DECODE_OUT = [
    Bad("out has a longer axis", {"out": half(2, 4, 128)}, ValueError, ("out", "(2, 4, 128)", "(2, 4, 64)", "q")),
    Bad("out lacks an axis", {"out": half(4, 64)}, ValueError, ("out", "(4, 64)", "(2, 4, 64)")),
    Bad("out is float32", {"out": single(2, 4, 64)}, TypeError, ("out", "float32", "float16", "q")),
    Bad("out is bfloat16", {"out": half(2, 4, 64).astype(BFLOAT16)}, TypeError, ("out", "bfloat16", "float16")),
    Bad("out is read-only", {"out": read_only(2, 4, 64)}, ValueError, ("out", "read-only", "writeable")),
    Bad("out is a list", {"out": [0.0]}, TypeError, ("out", "list", "array")),
    Bad("out has gaps in its rows", {"out": half(2, 4, 128)[..., ::2]}, ValueError, ("out", "contiguous", "4")),
    Bad(
        "out repeats a sequence",
        {"out": as_strided(half(4, 64), (2, 4, 64), (0, 128, 2))},
        ValueError,
        ("out", "(0, 128, 2)", "(2, 4, 64)"),
    ),
    Bad(
        "sequences of out overlap",
        {"out": as_strided(half(5, 64), (2, 4, 64), (128, 128, 2))},
        ValueError,
        ("out", "(128, 128, 2)", "(2, 4, 64)"),
    ),
]
PARTS = [
    Bad(
        "out_partial has 2 axes",
        {"out_partial": single(3, 64), "lse_partial": single(3)},
        ValueError,
        ("out_partial", "(3, 64)", "num_parts", "head_dim"),
    ),
    Bad(
        "out_partial has 6 axes",
        {"out_partial": single(3, 1, 1, 2, 4, 64), "lse_partial": single(3, 1, 1, 2, 4)},
        ValueError,
        ("out_partial", "(3, 1, 1, 2, 4, 64)", "num_parts", "head_dim"),
    ),
    Bad("lse_partial has another shape", {"lse_partial": single(3, 2, 5)}, ValueError, ("lse_partial", "(3, 2, 5)")),
    Bad(
        "lse_partial has another rank",
        {"lse_partial": single(3, 2, 4, 1)},
        ValueError,
        ("lse_partial", "(3, 2, 4, 1)", "(3, 2, 4)"),
    ),
    Bad("lse_partial has fewer parts", {"lse_partial": single(2, 2, 4)}, ValueError, ("lse_partial", "(2, 2, 4)")),
    Bad("lse_partial is float16", {"lse_partial": half(3, 2, 4)}, TypeError, ("lse_partial", "float16", "float32")),
    Bad(
        "out_partial is int32",
        {"out_partial": np.zeros((3, 2, 4, 64), np.int32)},
        TypeError,
        ("out_partial", "int32", "float16", "bfloat16", "float32"),
    ),
    Bad(
        "head_dim 80",
        {"out_partial": single(3, 2, 4, 80)},
        ValueError,
        ("out_partial", "head_dim", "80", *HEAD_DIMS),
    ),
    Bad(
        "no part",
        {"out_partial": single(0, 2, 4, 64), "lse_partial": single(0, 2, 4)},
        ValueError,
        ("out_partial", "(0, 2, 4, 64)", "at least one"),
    ),
    Bad(
        "rows of out_partial have gaps",
        {"out_partial": single(3, 2, 4, 128)[..., ::2]},
        ValueError,
        ("out_partial", "contiguous", "8"),
    ),
    Bad("out_partial is None", {"out_partial": None}, TypeError, ("out_partial", "NoneType", "array")),
    Bad("out_partial is a list", {"out_partial": [1.0]}, TypeError, ("out_partial", "list", "array")),
    Bad("lse_partial is a list", {"lse_partial": [1.0]}, TypeError, ("lse_partial", "list", "array")),
    Bad("a keyword is unknown", {"num_splits": 2}, TypeError, ("num_splits",)),
    Bad("out has the axis of parts", {"out": single(3, 2, 4, 64)}, ValueError, ("out", "(3, 2, 4, 64)", "(2, 4, 64)")),
    Bad("out is float64", {"out": np.zeros((2, 4, 64))}, TypeError, ("out", "float64", "float32", "float16")),
    Bad(
        "out is wider than the parts",
        {"out_partial": half(3, 2, 4, 64), "out": single(2, 4, 64)},
        TypeError,
        ("out", "float32", "float16"),
    ),
    Bad("out is read-only", {"out": read_only(2, 4, 64)}, ValueError, ("out", "read-only", "writeable")),
    Bad(
        "out repeats a sequence",
        {"out": as_strided(single(4, 64), (2, 4, 64), (0, 256, 4))},
        ValueError,
        ("out", "(0, 256, 4)", "(2, 4, 64)"),
    ),
]


def assert_refused(function: Callable[..., Any], call: dict[str, Any], bad: Bad) -> None:
    """Call with the changes; the message must hold every word, with nothing joined to it."""
    call = {**call, **bad.changes}
    names = inspect.signature(function).parameters.values()
    arrays = [call.pop(p.name) for p in names if p.kind is p.POSITIONAL_OR_KEYWORD]
    out = call.get("out")
    before = out.tobytes() if isinstance(out, np.ndarray) else b""
    with pytest.raises(bad.error) as caught:
        function(*arrays, **call)
    message = str(caught.value)
    missing = [w for w in bad.words if not re.search(rf"(?<![\w.]){re.escape(w)}(?!\w)", message)]
    assert not missing, f"{missing} not in: {message}"
    if isinstance(out, np.ndarray):
        assert out.tobytes() == before


def named(*tables: list[Bad]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("bad", [pytest.param(row, id=row.name) for table in tables for row in table])


def preset(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Return an `out` in which any write would show."""
    return np.full(shape, 77, dtype)


@named(FORM, TBQ4_FORM, CONTENTS, OPTIONS, KEPT)
def test_decode_names_what_it_refuses_and_writes_nothing(bad: Bad) -> None:
    assert_refused(cuattn.decode, {**dense(), "out": preset((2, 4, 64), np.float16)}, bad)


@named(PAGED_FORM, PAGED_CONTENTS)
def test_decode_of_pages_names_what_it_refuses_and_writes_nothing(bad: Bad) -> None:
    assert_refused(cuattn.decode, {**paged(), "out": preset((2, 4, 64), np.float16)}, bad)


@named(DECODE_OUT)
def test_decode_names_why_it_refuses_out(bad: Bad) -> None:
    assert_refused(cuattn.decode, dense(), bad)


@named(FORM, TBQ4_FORM)
def test_plan_decode_refuses_what_decode_refuses(bad: Bad) -> None:
    assert_refused(cuattn.plan_decode, dense(), bad)


@named(PAGED_FORM)
def test_plan_decode_of_pages_refuses_what_decode_refuses(bad: Bad) -> None:
    assert_refused(cuattn.plan_decode, paged(), bad)


@pytest.mark.parametrize("device", ["sm_70", "H200", 90])
def test_plan_decode_names_the_devices_it_knows(device: Any) -> None:
    words = ("device", repr(device), "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a")
    assert_refused(cuattn.plan_decode, dense(), Bad("", {"device": device}, EITHER, words))


def test_plan_decode_plans_only_dtypes_that_have_a_kernel() -> None:
    changes = {"q": np.zeros((2, 4, 64)), **caches(2, 10, 2, 64, dtype=np.float64)}
    words = ("q", "float64", "float16", "bfloat16", "float32")
    assert_refused(cuattn.plan_decode, dense(), Bad("", changes, TypeError, words))
    for name in ("k_cache", "v_cache"):
        changes = {"q": single(2, 4, 64), **caches(2, 10, 2, 64, dtype=np.float32), name: tbq4(2, 10, 2, 64)}
        words = (f"q must be float16 or bfloat16 with {name} in TBQ4, got float32",)
        assert_refused(cuattn.plan_decode, dense(), Bad("", changes, TypeError, words))


@named(PARTS)
def test_merge_names_what_it_refuses_and_writes_nothing(bad: Bad) -> None:
    out = {} if bad.name == "no part" else {"out": preset((2, 4, 64), np.float32)}
    assert_refused(cuattn.merge, {**parts(), **out}, bad)


@pytest.mark.parametrize("entry", [-1, 5, 99, 2**31 - 1, -(2**31)])
def test_page_table_entries_past_the_used_ones_may_be_anything(entry: int) -> None:
    call = paged()
    arrays = [call[name] for name in ("q", "k_cache", "v_cache")]
    table = index([0, entry, entry], [1, 2, entry])
    cuattn.decode(*arrays, [4, 8], page_table=table)
    cuattn.decode(*arrays, [0, 5], page_table=table)
    cuattn.decode(*arrays, 0, page_table=np.full_like(table, entry))


def test_pages_whose_tokens_are_all_kept_elsewhere_need_no_entry() -> None:
    """But the table must have the others: 10 tokens in pages of 4, of which 4 to 6 are in the caches."""
    call = paged()
    arrays = [call[name] for name in ("q", "k_cache", "v_cache")]
    kept = {f"{x}_{name}": half(2, n, 2, 64) for x in "kv" for name, n in (("sink", 4), ("recent", 3))}
    cuattn.decode(*arrays, [3, 10], page_table=index([99] * 3, [99, 2, 99]), **kept)
    words = ("page_table[1, 1]", "99", "0 to 4")
    changes = {"page_table": index([99] * 3, [1, 99, 3]), **kept}
    assert_refused(cuattn.decode, call, Bad("", changes, ValueError, words))


@named(
    [
        Bad("x has 2 axes", {"x": half(4, 64)}, ValueError, ("x", "(4, 64)", "tokens", "num_kv_heads")),
        Bad("x is int32", {"x": np.zeros((3, 2, 64), np.int32)}, TypeError, ("x", "int32", "float16", "bfloat16")),
        Bad("x is a list", {"x": [1.0]}, TypeError, ("x", "list", "array")),
        Bad("x has no token", {"x": half(0, 2, 64)}, ValueError, ("x", "(0, 2, 64)", "tokens")),
        Bad("x has no sequence", {"x": half(0, 5, 2, 64)}, ValueError, ("x", "(0, 5, 2, 64)", "tokens")),
        Bad("all tokens are left out", {"x": half(2, 3, 2, 64), "skip": 3}, ValueError, ("x", "(2, 3, 2, 64)", "3")),
        Bad("skip is negative", {"skip": -1}, ValueError, ("skip", "-1")),
        Bad("skip is a float", {"skip": 1.0}, TypeError, ("skip", "1.0", "integer")),
    ]
)
def test_channel_mean_names_what_it_refuses(bad: Bad) -> None:
    assert_refused(cuattn.channel_mean, {"x": half(3, 2, 64)}, bad)


def test_the_unchanged_calls_are_right() -> None:
    """Otherwise the tables above would prove nothing."""
    arrays = ("q", "k_cache", "v_cache", "kv_len")
    for call in (dense(), paged()):
        options = {name: call[name] for name in call if name not in arrays}
        out = preset((2, 4, 64), np.float16)
        assert cuattn.decode(*(call[name] for name in arrays), **options, out=out) is out
        assert not out.any()
        assert cuattn.plan_decode(*(call[name] for name in arrays), **options).num_splits >= 1
    for k_cache, v_cache in ((tbq4(2, 10, 2, 64), half(2, 10, 2, 64)), (planes(), wide(16, 1, 64))):
        assert not cuattn.decode(half(2, 4, 64), k_cache, v_cache, 10).any()
    out = preset((2, 4, 64), np.float32)
    assert cuattn.merge(*parts().values(), out=out)[0] is out
    assert not out.any()
