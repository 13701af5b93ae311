"""What append refuses: the error names the argument, what came and what is accepted, and no byte is written."""

import inspect
import re
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

import cuattn

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
HEAD_DIMS = ("64", "96", "128", "192", "256", "512")
BOTH = ("both or neither",)


def half(*shape):
    return np.zeros(shape, np.float16)


def encoded(*shape):
    codes, norms = np.zeros((*shape[:-1], shape[-1] // 2), np.uint8), half(*shape[:-1], max(1, shape[-1] // 128))
    mean = np.ones(shape[-2:], np.float32)
    return cuattn.Tbq4Array(codes, norms, mean, np.zeros(1, np.int32))


def read_only(x):
    x.flags.writeable = False
    return x


def dense():
    """One new token of two sequences, 2 heads, into caches of 10 tokens: K in TBQ4, V in 16 bits."""
    return {
        "k_new": np.ones((2, 2, 64), np.float16),
        "v_new": np.ones((2, 2, 64), np.float16),
        "k_cache": encoded(2, 10, 2, 64),
        "v_cache": half(2, 10, 2, 64),
        "kv_len": np.array([3, 10], np.int32),
        **{name: half(2, 3, 2, 64) for name in ("k_sink", "v_sink")},
        **{name: half(2, 4, 2, 64) for name in ("k_recent", "v_recent")},
    }


def paged():
    """The same in 5 pages of 4 tokens; the entries 99 and -1 are of pages without a new token."""
    pages = {"k_cache": encoded(5, 4, 2, 64), "v_cache": half(5, 4, 2, 64)}
    return {**dense(), **pages, "page_table": np.array([[0, 99, 99], [-1, 99, 3]], np.int32)}


def raw(x=None, **more):
    """Changes for two 16-bit caches, and no copies."""
    x = half(2, 10, 2, 64) if x is None else x
    none = dict.fromkeys(("k_sink", "v_sink", "k_recent", "v_recent"))
    return {"k_cache": x, "v_cache": x.copy(), **none, **more}


def rows(*shape, dtype=np.float16):
    return {"k_new": np.ones(shape, dtype), "v_new": np.ones(shape, dtype)}


TWICE = half(2, 10, 2, 64)
# Name: changes, error, what the message has to say.
DENSE = {
    "k_new has 2 axes": ({"k_new": half(2, 64)}, ValueError, ("k_new", "(2, 64)", "seqlen_new")),
    "k_new is a list": ({"k_new": [1.0]}, TypeError, ("k_new", "list", "array")),
    "v_new is None": ({"v_new": None}, TypeError, ("v_new", "NoneType", "array")),
    "rows are int32": (rows(2, 2, 64, dtype=np.int32), TypeError, ("k_new", "int32", "float16", "bfloat16")),
    "v_new has another dtype": (
        {"v_new": np.ones((2, 2, 64), np.float32)}, TypeError, ("v_new", "float32", "float16", "k_new")),
    "v_new has more tokens": (
        {"v_new": half(2, 1, 2, 64)}, ValueError, ("v_new", "k_new", "(2, 1, 2, 64)", "(2, 2, 64)")),
    "head_dim 80": (rows(2, 2, 80), ValueError, ("k_new", "80", *HEAD_DIMS)),
    "head_dim 96 for TBQ4": (
        {**rows(2, 2, 96), "v_cache": half(2, 10, 2, 96)}, ValueError,
        ("k_new", "96", "TBQ4", "k_cache", "64", "128", "256", "512")),
    "head_dim of k_cache": ({"k_cache": encoded(2, 10, 2, 128)}, ValueError, ("k_cache", "64", "(2, 10, 2, 128)")),
    "head_dim of v_cache": ({"v_cache": half(2, 10, 2, 128)}, ValueError, ("v_cache", "64", "(2, 10, 2, 128)")),
    "heads of k_cache": ({"k_cache": encoded(2, 10, 3, 64)}, ValueError, ("k_cache", "2 KV heads", "(2, 10, 3, 64)")),
    "heads of v_cache": ({"v_cache": half(2, 10, 3, 64)}, ValueError, ("v_cache", "2 KV heads", "(2, 10, 3, 64)")),
    "rows have gaps": ({"k_new": half(2, 2, 128)[..., ::2]}, ValueError, ("k_new", "contiguous", "last axis", "4")),
    "rows are not aligned": ({"v_new": half(2, 2, 65)[..., 1:]}, ValueError, ("v_new", "16 bytes", "(260, 130, 2)")),
    "k_cache is a list": ({"k_cache": [1.0]}, TypeError, ("k_cache", "list", "array")),
    "codes have 3 axes": ({"k_cache": encoded(10, 2, 64)}, ValueError, ("k_cache.codes", "(10, 2, 32)", "capacity")),
    "v_cache has 3 axes": ({"v_cache": half(10, 2, 64)}, ValueError, ("v_cache", "(10, 2, 64)", "capacity")),
    "v_cache is float32": (
        {"v_cache": np.zeros((2, 10, 2, 64), np.float32)}, TypeError, ("v_cache", "float32", "float16", "bfloat16")),
    "v_cache holds more tokens": (
        {"v_cache": half(2, 11, 2, 64)}, ValueError, ("v_cache", "k_cache", "(2, 10, 2, 64)", "(2, 11, 2, 64)")),
    "dense caches of 3 sequences": (
        {"k_cache": encoded(3, 10, 2, 64), "v_cache": half(3, 10, 2, 64)}, ValueError,
        ("k_cache", "2", "k_new", "(3, 10, 2, 64)")),
    "v_cache has gaps": ({"v_cache": half(2, 10, 2, 128)[..., ::2]}, ValueError, ("v_cache", "contiguous", "4")),
    "codes are not aligned": (
        {"k_cache": cuattn.Tbq4Array(np.zeros((2, 10, 2, 40), np.uint8)[..., :32], half(2, 10, 2, 1))}, ValueError,
        ("k_cache.codes", "16 bytes", "(800, 80, 40, 1)")),
    "v_cache is read-only": ({"v_cache": read_only(half(2, 10, 2, 64))}, ValueError, ("v_cache", "read-only")),
    "norms are read-only": (
        {"k_cache": cuattn.Tbq4Array(np.zeros((2, 10, 2, 32), np.uint8), read_only(half(2, 10, 2, 1)))}, ValueError,
        ("k_cache.norms", "read-only", "writeable")),
    "codes repeat a sequence": (
        {"k_cache": cuattn.Tbq4Array(np.broadcast_to(np.zeros(32, np.uint8), (2, 10, 2, 32)).copy(),
                                     as_strided(half(20), (2, 10, 2, 1), (0, 4, 2, 2)))}, ValueError,
        ("k_cache.norms", "share memory", "(0, 4, 2, 2)")),
    "v_cache repeats a sequence": (
        {"v_cache": as_strided(half(10, 2, 64), (2, 10, 2, 64), (0, 256, 128, 2))}, ValueError,
        ("v_cache", "share memory", "(0, 256, 128, 2)")),
    "the counter is read-only": (
        {"k_cache": replace(encoded(2, 10, 2, 64), clamped=read_only(np.zeros(1, np.int32)))}, ValueError,
        ("k_cache.clamped", "read-only")),
    "one cache for K and V": (
        raw(k_cache=TWICE, v_cache=TWICE), ValueError, ("v_cache", "k_cache", hex(TWICE.ctypes.data))),
    "one array for cache and sink": (
        {"v_cache": TWICE, "v_sink": TWICE[:, :3]}, ValueError, ("v_sink", "v_cache", hex(TWICE.ctypes.data))),
    "k_sink alone": ({"v_sink": None}, ValueError, ("v_sink", "k_sink", "None", *BOTH)),
    "v_recent alone": ({"k_recent": None}, ValueError, ("k_recent", "v_recent", "None", *BOTH)),
    "k_sink has 3 axes": ({"k_sink": half(3, 2, 64)}, ValueError, ("k_sink", "(3, 2, 64)", "num_sink")),
    "k_recent of 3 sequences": (
        {"k_recent": half(3, 4, 2, 64)}, ValueError, ("k_recent", "(2, 4, 2, 64)", "(3, 4, 2, 64)", "k_new")),
    "v_sink is longer": (
        {"v_sink": half(2, 4, 2, 64)}, ValueError, ("v_sink", "(2, 3, 2, 64)", "(2, 4, 2, 64)", "k_sink")),
    "k_sink is float32": (
        {"k_sink": np.zeros((2, 3, 2, 64), np.float32)}, TypeError, ("k_sink", "float32", "float16", "bfloat16")),
    "v_recent has gaps": ({"v_recent": half(2, 4, 2, 128)[..., ::2]}, ValueError, ("v_recent", "contiguous", "4")),
    "k_recent is read-only": ({"k_recent": read_only(half(2, 4, 2, 64))}, ValueError, ("k_recent", "read-only")),
    "two dtypes of caches": (
        raw(v_cache=half(2, 10, 2, 64).astype(BFLOAT16)), TypeError, ("v_cache", "bfloat16", "float16", "k_cache")),
    "two dtypes of copies": (
        {"v_recent": half(2, 4, 2, 64).astype(BFLOAT16)}, TypeError, ("v_recent", "bfloat16", "float16", "v_cache")),
    "kv_len is a float": ({"kv_len": 3.5}, TypeError, ("kv_len", "float", "int")),
    "kv_len is None": ({"kv_len": None}, TypeError, ("kv_len", "NoneType", "int")),
    "kv_len has one length": ({"kv_len": [3]}, ValueError, ("kv_len", "(1,)", "(2,)")),
    "kv_len holds floats": ({"kv_len": [3.0, 1]}, TypeError, ("kv_len", "float64", "integer")),
    "a length is negative": ({"kv_len": [3, -1]}, ValueError, ("kv_len[1]", "-1", "0 to 10")),
    "a length exceeds the capacity": ({"kv_len": [11, 3]}, ValueError, ("kv_len[0]", "11", "0 to 10")),
    "a keyword is unknown": ({"scale": 1.0}, TypeError, ("scale",)),
}  # fmt: skip
PAGED = {
    "page_table has 1 axis": (
        {"page_table": np.zeros(3, np.int32)}, ValueError, ("page_table", "(3,)", "max_pages")),
    "page_table has 3 rows": (
        {"page_table": np.zeros((3, 3), np.int32)}, ValueError, ("page_table", "2", "(3, 3)", "k_new")),
    "page_table is int64": ({"page_table": np.zeros((2, 3), int)}, TypeError, ("page_table", "int64", "int32")),
    "page_table is a list": ({"page_table": [[0] * 3] * 2}, TypeError, ("page_table", "list", "array")),
    "a needed page is past the last": (
        {"page_table": np.array([[0, 9, 9], [9, 9, 5]], np.int32)}, ValueError, ("page_table[1, 2]", "5", "0 to 4")),
    "a needed page is negative": (
        {"page_table": np.array([[-1, 9, 9], [9, 9, 3]], np.int32)}, ValueError, ("page_table[0, 0]", "-1", "0 to 4")),
    "an older token's page": (
        {"k_new": np.ones((2, 3, 2, 64), np.float16), "v_new": np.ones((2, 3, 2, 64), np.float16)}, ValueError,
        ("page_table[1, 1]", "99", "0 to 4")),
    "the table is too short": (
        {"page_table": np.array([[0, 1], [1, 2]], np.int32)}, ValueError, ("kv_len[1]", "10", "0 to 8")),
}  # fmt: skip
CASES = [pytest.param(call, *case, id=name) for call, table in ((dense, DENSE), (paged, PAGED))
         for name, case in table.items()]  # fmt: skip


def contents(call):
    """Bytes of everything that may be written."""
    planes = [x for x in call.values() if isinstance(x, cuattn.Tbq4Array)]
    parts = [getattr(x, part) for x in planes for part in ("codes", "norms", "mean", "clamped")]
    return [x.tobytes() for x in (*call.values(), *parts) if isinstance(x, np.ndarray)]


def launch(call):
    parameters = inspect.signature(cuattn.append).parameters.values()
    positional = [call[p.name] for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    names = {p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD}
    return cuattn.append(*positional, **{name: x for name, x in call.items() if name not in names})


@pytest.mark.parametrize(("base", "changes", "error", "words"), CASES)
def test_append_names_what_it_refuses_and_writes_nothing(base, changes, error, words):
    call = {**base(), **changes}
    before = contents(call)
    with pytest.raises(error) as caught:
        launch(call)
    message = str(caught.value)
    missing = [w for w in words if not re.search(rf"(?<![\w.]){re.escape(w)}(?!\w)", message)]
    assert not missing, f"{missing} not in: {message}"
    assert contents(call) == before


def test_the_unchanged_calls_are_right():
    """Otherwise the tables above would prove nothing."""
    for call in (dense(), paged(), {**dense(), **raw()}):
        before = contents(call)
        assert launch(call) is None
        assert contents(call) != before
        assert call["v_cache"].any()
    assert (call["k_new"] == 1).all()


def test_too_many_rows_and_too_large_a_cache_are_refused():
    """Arrays that take no memory."""
    row = np.ones(64, np.float16)
    new = np.broadcast_to(row, (1, 2**28 + 1, 1, 64))
    cache = half(1, 4, 1, 64)
    with pytest.raises(ValueError, match=r"k_new must have at most 268435456 rows, got shape \(1, 268435457, 1, 64\)"):
        cuattn.append(new, new, cache, cache.copy(), 4)
    table = np.broadcast_to(np.int32(0), (1, 2**28 + 1))
    with pytest.raises(ValueError, match="k_cache must hold at most 1073741824 tokens a sequence, got 1073741828"):
        cuattn.append(np.ones((1, 1, 64), np.float16), np.ones((1, 1, 64), np.float16), cache, cache.copy(), 4,
                      page_table=table)  # fmt: skip
