"""Rows of the topic prefill, and the same rows as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .cases import SHORT_DTYPES
from .record import Row, aligned

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .prefill_cases import PrefillCase
    from .sampling import Timing

ROOF = "the FLOPs that the mask leaves, at the rate of a cuBLAS product in the same run"
# Rows and columns of the two factors of the product that is the roof: large enough to run at cuBLAS's best rate.
PRODUCT_SIZE = 8192
_HEADINGS = ("impl", "heads", "dim", "mask", "batch", "new", "keys", "us", "[p5 p95]", "TFLOP/s", "% roof", "note")
_LEFT = ("impl", "heads", "mask", "note")


def row(
    case: PrefillCase, timing: Timing, *, impl: str = "cuattn", roof_us: float = 0.0, notes: Sequence[str] = ()
) -> Row:
    """Put a row together.

    Parameters
    ----------
    case : PrefillCase
    timing : Timing
    impl : {"cuattn", "fa3", "fa2", "cudnn"}
    roof_us, notes
        As in `Row`.
    """
    layout = [] if case.value_dim == case.head_dim else [f"value_dim {case.value_dim}"]
    if case.page_size is not None:
        layout.append(f"page {case.page_size}")
    return Row(
        op="prefill",
        impl=impl,
        dtype=SHORT_DTYPES[case.dtype],
        kv=case.kv,
        head_dim=case.head_dim,
        q_heads=case.num_qo_heads,
        kv_heads=case.num_kv_heads,
        batch=case.batch,
        seqlen_q=case.seqlen_q,
        kv_len=case.kv_len,
        mask=case.mask,
        us=timing.us,
        us_p5=timing.us_p5,
        us_p95=timing.us_p95,
        bytes=case.bytes,
        flops=case.flops,
        roof_us=roof_us,
        notes=(*layout, *notes, *timing.notes),
    )


def product_row(dtype: str, timing: Timing, *, notes: Sequence[str] = ()) -> Row:
    """Put the row of the roof itself together."""
    size, short = PRODUCT_SIZE, SHORT_DTYPES[dtype]
    return Row(
        op="prefill", impl="cublas", dtype=short, kv=short, head_dim=0, q_heads=0, kv_heads=0, batch=1, seqlen_q=0,
        kv_len=0, mask="full", us=timing.us, us_p5=timing.us_p5, us_p95=timing.us_p95, bytes=3 * size**2 * 2,
        flops=2 * size**3, roof_us=timing.us, notes=(f"product of {size} x {size} matrices", *notes, *timing.notes),
    )  # fmt: skip


def _cells(line: Row) -> tuple[str, ...]:
    problem = (f"{line.q_heads}/{line.kv_heads}", str(line.head_dim), line.mask, str(line.batch), str(line.seqlen_q),
               str(line.kv_len))  # fmt: skip
    return (
        line.impl,
        *(problem if line.q_heads else ("",) * len(problem)),
        f"{line.us:.1f}",
        f"[{line.us_p5:.1f} {line.us_p95:.1f}]",
        f"{line.flops / line.us / 1e6:.0f}",
        f"{100 * line.roof_us / line.us:.1f}" if line.roof_us else "",
        "; ".join((line.dtype, *(() if line.kv == line.dtype else (f"kv {line.kv}",)), *line.notes)),
    )


def table(rows: Sequence[Row]) -> str:
    """Return the rows as text, one line each below a heading."""
    return aligned([_HEADINGS, *(_cells(line) for line in rows)], _LEFT)
