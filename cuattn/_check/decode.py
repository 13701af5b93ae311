"""Checks of the arguments of `decode`."""

from __future__ import annotations

from dataclasses import dataclass

from cuattn import _plan
from cuattn._arrays import Array, as_array, dtype_name, is_gpu
from cuattn._cache import Cache
from cuattn._check import cache as check_cache
from cuattn._check.arguments import (
    flag,
    integer,
    require_dtype,
    require_head_dim,
    require_one_place,
    require_out,
    require_rank,
    require_rows,
    require_shape,
    require_sinks,
    require_writable,
    scale_and_cap,
    window_of,
)
from cuattn._check.lengths import lengths_of


@dataclass(frozen=True, slots=True)
class DecodeCall:
    """Checked arguments of `decode`. Arrays are NumPy arrays or CuPy arrays, all in one place but `kv_len`.

    Attributes
    ----------
    q, out : array, shape (batch, seqlen_q, num_qo_heads, head_dim)
        `out` is None if it must be allocated.
    k_cache, v_cache : Cache
        Of one shape; the formats are independent.
    kv_len : array, shape (batch,), int32
        A NumPy array also where the others are on a GPU, if the caller had the lengths on the host.
    page_table : array, shape (batch, max_pages), int32, or None
        None: page b is all of sequence b.
    sinks : array, shape (num_qo_heads,), float, or None
    window : tuple of int
        Left and right, -1 for unbounded; not yet narrowed by `causal`.
    tree_mask : array, shape (batch, seqlen_q, seqlen_q), uint8 or bool, or None
    causal, softcap, softmax_scale, num_splits, split_size, balance
        As in `decode`; `softcap` 0 means none.
    one_token : bool
        Whether the caller's q has no axis of query tokens.
    workspace : array, shape (num_bytes,), uint8, or None
        None: it must be allocated.
    sink, recent : tuple of array, shape (batch, num_sink or num_recent, num_kv_heads, head_dim), or None
        Keys and values of the first tokens, and rings of the newest, that are read instead of the caches; at least one
        row a sequence.
    """

    q: Array
    k_cache: Cache
    v_cache: Cache
    kv_len: Array
    page_table: Array | None
    causal: bool
    window: tuple[int, int]
    softcap: float
    sinks: Array | None
    softmax_scale: float
    num_splits: int | None
    out: Array | None
    one_token: bool
    sink: tuple[Array, Array] | None = None
    recent: tuple[Array, Array] | None = None
    split_size: int | None = None
    balance: bool = False
    tree_mask: Array | None = None
    workspace: Array | None = None

    @property
    def problem(self) -> _plan.DecodeProblem:
        """Sizes for the plan; dtypes of the kernel only."""
        batch, seqlen_q, num_qo_heads, head_dim = self.q.shape
        return _plan.DecodeProblem(
            dtype=_plan.Dtype(dtype_name(self.q)),
            k_format=self.k_cache.kv_format,
            v_format=self.v_cache.kv_format,
            batch=batch,
            seqlen_q=seqlen_q,
            num_qo_heads=num_qo_heads,
            num_kv_heads=self.k_cache.num_kv_heads,
            head_dim=head_dim,
            max_kv_len=self.max_pages * self.k_cache.page_size,
            adjacent_heads=min(self.k_cache.adjacent_heads, self.v_cache.adjacent_heads),
        )

    @property
    def max_pages(self) -> int:
        """Pages of a sequence."""
        return 1 if self.page_table is None else int(self.page_table.shape[1])


def _queries(q: Array, keys: Cache, values: Cache, *, for_kernel: bool) -> None:
    require_rank("q", q, (3, 4), "(batch, num_qo_heads, head_dim) or (batch, seqlen_q, num_qo_heads, head_dim)")
    check_cache.dtype_of_queries(q, {"k_cache": keys, "v_cache": values}, for_kernel=for_kernel)
    require_head_dim("q", q.shape[-1])
    require_rows("q", q)
    if q.ndim == 4:  # noqa: PLR2004  with the axis of query tokens
        integer("seqlen_q, the second axis of q,", q.shape[1], 1, _plan.MAX_SEQLEN_Q)


def _split_size(split_size: object, num_splits: int | None) -> int:
    size = integer("split_size", split_size, _plan.SPLIT_UNIT, _plan.MAX_KV_LEN)
    if size % _plan.SPLIT_UNIT:
        msg = f"split_size must be a multiple of {_plan.SPLIT_UNIT}, got {size}"
        raise ValueError(msg)
    if num_splits is not None:
        msg = f"split_size must be None where num_splits is given, got {size} with num_splits {num_splits}"
        raise ValueError(msg)
    return size


def workspace_of(workspace: Array | None, num_bytes: int) -> None:
    """Refuse memory that is too little for the parts of a call."""
    if workspace is not None and workspace.size < num_bytes:
        msg = f"workspace must have at least {num_bytes} bytes for this call, got {workspace.size}"
        raise ValueError(msg)


def _balance(balance: object, others: dict[str, object]) -> bool:
    found = flag("balance", balance)
    if found and (given := next((name for name, x in others.items() if x is not None), "")):
        msg = f"balance must be False where {given} is given, got True"
        raise ValueError(msg)
    return found


def decode(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    kv_len: object,
    *,
    page_table: Array | None = None,
    causal: object = True,
    window: object = None,
    tree_mask: Array | None = None,
    softcap: object = None,
    sinks: Array | None = None,
    softmax_scale: object = None,
    num_splits: object = None,
    split_size: object = None,
    balance: object = False,
    k_sink: Array | None = None,
    v_sink: Array | None = None,
    k_recent: Array | None = None,
    v_recent: Array | None = None,
    out: Array | None = None,
    workspace: Array | None = None,
    contents: bool = True,
) -> DecodeCall:
    """Check the arguments of `decode`; parameters and errors are documented there.

    Without `contents`, as for a plan, lengths and page-table entries may have any value, and `q` must have a dtype of
    the kernel wherever it is.
    """
    keys, values = check_cache.taken("k_cache", k_cache), check_cache.taken("v_cache", v_cache)
    given = {
        "page_table": page_table, "sinks": sinks, "out": out, "k_sink": k_sink, "v_sink": v_sink,
        "k_recent": k_recent, "v_recent": v_recent, "tree_mask": tree_mask, "workspace": workspace,
    }  # fmt: skip
    arrays: dict[str, Array | None] = {
        "q": as_array("q", q),
        **check_cache.arrays_of("k_cache", keys),
        **check_cache.arrays_of("v_cache", values),
        **{name: None if x is None else as_array(name, x) for name, x in given.items()},
    }
    require_one_place(arrays)
    q, out, page_table, sinks, tree_mask = (arrays[name] for name in ("q", "out", "page_table", "sinks", "tree_mask"))
    _queries(q, keys, values, for_kernel=is_gpu(q) or not contents)
    batch, num_qo_heads, head_dim = q.shape[0], q.shape[-2], q.shape[-1]
    check_cache.caches(keys, values, q, paged=page_table is not None)
    sink, recent = (
        check_cache.kept(name, arrays[f"k_{name}"], arrays[f"v_{name}"], q, keys.num_kv_heads)
        for name in ("sink", "recent")
    )
    capacity = keys.page_size * (1 if page_table is None else page_table.shape[-1])
    if capacity > _plan.MAX_KV_LEN:
        msg = f"k_cache must hold at most {_plan.MAX_KV_LEN} tokens a sequence, got {capacity}"
        raise ValueError(msg)
    lengths = lengths_of(kv_len, batch, capacity, gpu=is_gpu(q), of="q", contents=contents)
    require_one_place({"q": q, "kv_len": lengths if is_gpu(lengths) else q})
    if page_table is not None:
        check_cache.page_table(page_table, lengths, keys, sink=sink, recent=recent, contents=contents)
    if sinks is not None:
        require_sinks(sinks, num_qo_heads, dtype_name(q))
    if tree_mask is not None:
        seqlen_q = 1 if q.ndim == 3 else q.shape[1]  # noqa: PLR2004
        require_shape("tree_mask", tree_mask, (batch, seqlen_q, seqlen_q), "batch and query tokens, twice, as in q")
        require_dtype("tree_mask", tree_mask, ("bool", "uint8"))
    workspace = arrays["workspace"]
    if workspace is not None:
        require_rank("workspace", workspace, (1,), "(num_bytes,)")
        require_dtype("workspace", workspace, ("uint8",))
        require_rows("workspace", workspace)
        require_writable("workspace", workspace)
    if out is not None:
        require_out(out, q.shape, (dtype_name(q),), "the shape of q")
    scale, cap = scale_and_cap(softmax_scale, softcap, head_dim)
    if num_splits is not None:
        num_splits = integer("num_splits", num_splits, 1, _plan.MAX_SPLITS)
    if split_size is not None:
        split_size = _split_size(split_size, num_splits)
    balance = _balance(
        balance, {"num_splits": num_splits, "split_size": split_size, "k_sink": sink, "k_recent": recent}
    )

    def with_tokens(x: Array | None) -> Array | None:
        return x if x is None or x.ndim == 4 else x[:, None]  # noqa: PLR2004

    return DecodeCall(
        q=with_tokens(q),
        k_cache=keys,
        v_cache=values,
        kv_len=lengths,
        page_table=page_table,
        causal=flag("causal", causal),
        window=window_of(window),
        softcap=cap,
        sinks=sinks,
        softmax_scale=scale,
        num_splits=num_splits,
        out=with_tokens(out),
        one_token=q.ndim == 3,  # noqa: PLR2004
        sink=sink,
        recent=recent,
        split_size=split_size,
        balance=balance,
        tree_mask=tree_mask,
        workspace=workspace,
    )
