"""Checks of the arguments of `merge`."""

from __future__ import annotations

from cuattn._arrays import Array, as_array, dtype_name, is_gpu
from cuattn._check.arguments import (
    CPU_DTYPES,
    GPU_DTYPES,
    KERNEL_DTYPES,
    require_dtype,
    require_head_dim,
    require_one_place,
    require_out,
    require_rank,
    require_rows,
    require_shape,
    require_words,
)

_MERGE_RANKS = (3, 4, 5)


def merge(out_partial: Array, lse_partial: Array, out: Array | None) -> tuple[Array, Array, Array | None]:
    """Check the arguments of `merge` and return them as arrays; parameters and errors are documented there."""
    out_partial, lse_partial = as_array("out_partial", out_partial), as_array("lse_partial", lse_partial)
    out = None if out is None else as_array("out", out)
    require_one_place({"out_partial": out_partial, "lse_partial": lse_partial, "out": out})
    shape = "(num_parts, [batch, [seqlen_q,]] num_qo_heads, head_dim)"
    require_rank("out_partial", out_partial, _MERGE_RANKS, shape)
    gpu = is_gpu(out_partial)
    require_dtype("out_partial", out_partial, KERNEL_DTYPES if gpu else CPU_DTYPES)
    if out_partial.shape[0] == 0:
        msg = f"out_partial must have at least one part, got shape {out_partial.shape}"
        raise ValueError(msg)
    require_head_dim("out_partial", out_partial.shape[-1])
    require_rows("out_partial", out_partial)
    require_shape("lse_partial", lse_partial, out_partial.shape[:-1], "the shape of out_partial without head_dim")
    require_dtype("lse_partial", lse_partial, ("float32",) if gpu else ("float32", "float64"))
    require_words("lse_partial", lse_partial)
    if out is not None:
        dtype = dtype_name(out_partial)
        accepted = (dtype, *GPU_DTYPES) if dtype == "float32" else (dtype,)
        require_out(out, out_partial.shape[1:], accepted, "one part of out_partial")
    return out_partial, lse_partial, out
