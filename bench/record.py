"""The record of a run: environment and rows as JSON, and the same rows as a table."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import cuattn
from cuattn import _arrays, _nvrtc

from .cases import SHORT_DTYPES
from .timing import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from .cases import AppendCase, CodecCase, DecodeCase
    from .sampling import Timing

RESULTS = ROOT / "bench" / "results"
# A clock lower than before by more than this fraction has fallen.
CLOCK_TOLERANCE = 0.03
# Columns of nvidia-smi, and the names that they get; the driver's version comes first.
_CLOCKS = {
    "clocks.sm": "sm_mhz",
    "clocks.max.sm": "sm_max_mhz",
    "clocks.mem": "mem_mhz",
    "power.draw": "power_w",
    "power.limit": "power_limit_w",
    "temperature.gpu": "temperature_c",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of a record.

    Attributes
    ----------
    op : {"decode", "prefill", "launch", "compile", "load", "quantize", "dequantize", "append"}
    impl : {"cuattn", "read", "copy", "separate", "cublas", "fa3", "fa2", "cudnn"}
    dtype, kv, head_dim, q_heads, kv_heads, batch, seqlen_q, kv_len, mask
        The problem.
    us, us_p5, us_p95 : float
        Median and percentiles of one call.
    bytes, flops : int
        Of the problem; zero where they say nothing about the time. Of quantize, dequantize and append, bytes read and
        written.
    roof_us : float
        Roof measured in the same run, zero if there is none.
    splits : int, optional
        In the record it is a part of the note.
    notes : tuple of str
    """

    op: str
    impl: str
    dtype: str
    kv: str
    head_dim: int
    q_heads: int
    kv_heads: int
    batch: int
    seqlen_q: int
    kv_len: int
    mask: str
    us: float
    us_p5: float
    us_p95: float
    bytes: int
    flops: int
    roof_us: float
    splits: int | None = None
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the row of the JSON file."""
        fields = asdict(self)
        splits, notes = fields.pop("splits"), fields.pop("notes")
        for name in ("us", "us_p5", "us_p95", "roof_us"):
            # Four decimals are a tenth of a nanosecond.
            fields[name] = round(fields[name], 4)
        return {**fields, "note": "; ".join((*([] if splits is None else [f"splits {splits}"]), *notes))}


def row(
    case: DecodeCase,
    timing: Timing,
    *,
    op: str = "decode",
    impl: str = "cuattn",
    roof_us: float = 0.0,
    splits: int | None = None,
    notes: Sequence[str] = (),
) -> Row:
    """Put a row together.

    Parameters
    ----------
    case : DecodeCase
    timing : Timing
    op, impl, roof_us, splits, notes
        As in `Row`.

    Returns
    -------
    Row
    """
    dtype = SHORT_DTYPES[case.dtype]
    traffic = case.traffic if op == "decode" else (0, 0)
    paged = [] if case.page_size is None else [f"page {case.page_size}"]
    if case.kv != dtype:
        paged.append(f"{case.token_bytes:g} bytes a token and KV head")
    if case.lengths:
        paged.append(f"lengths {min(case.lengths)} to {max(case.lengths)}, {sum(case.lengths)} in all")
    if case.warm:
        paged.append("warm, K and V in L2")
    if case.has_kept:
        paged.append(f"{case.num_sink} first and {case.num_recent} newest tokens kept in 16 bits")
    return Row(
        op=op,
        impl=impl,
        dtype=dtype,
        kv=case.kv,
        head_dim=case.head_dim,
        q_heads=case.num_qo_heads,
        kv_heads=case.num_kv_heads,
        batch=case.batch,
        seqlen_q=case.seqlen_q,
        kv_len=case.kv_len,
        mask="full" if case.seqlen_q == 1 else "causal",
        us=timing.us,
        us_p5=timing.us_p5,
        us_p95=timing.us_p95,
        bytes=traffic[0],
        flops=traffic[1],
        roof_us=roof_us,
        splits=splits,
        notes=(*paged, *notes, *timing.notes),
    )


def _without_queries(op: str, timing: Timing, notes: Sequence[str], **fields: Any) -> Row:  # noqa: ANN401  as in Row
    values: dict[str, Any] = {"op": op, "q_heads": 0, "mask": "full", "flops": 0, **fields}
    values |= {"us": timing.us, "us_p5": timing.us_p5, "us_p95": timing.us_p95}
    return Row(**values, notes=(*notes, *timing.notes))


def codec_row(
    case: CodecCase, timing: Timing, *, impl: str = "cuattn", roof_us: float = 0.0, notes: Sequence[str] = ()
) -> Row:
    """Put a row of quantize or dequantize together; its tokens are in kv_len."""
    return _without_queries(
        case.op, timing, (*(("with mean",) if case.has_mean else ()), *notes), impl=impl, roof_us=roof_us,
        dtype=SHORT_DTYPES[case.dtype], kv="tbq4", head_dim=case.head_dim, kv_heads=case.num_kv_heads, batch=1,
        seqlen_q=0, kv_len=case.tokens, bytes=case.bytes,
    )  # fmt: skip


def append_row(
    case: AppendCase,
    timing: Timing,
    *,
    capacity: int,
    impl: str = "cuattn",
    roof_us: float = 0.0,
    notes: Sequence[str] = (),
) -> Row:
    """Put a row of append together; its new tokens are in seqlen_q, what a cache holds in kv_len."""
    dtype = SHORT_DTYPES[case.dtype]
    return _without_queries(
        "append", timing, notes, impl=impl, roof_us=roof_us, dtype=dtype,
        kv=dtype if case.formats == "raw16" else case.formats, head_dim=case.head_dim, kv_heads=case.num_kv_heads,
        batch=case.batch, seqlen_q=case.seqlen_new, kv_len=capacity, bytes=case.bytes,
    )  # fmt: skip


_HEADINGS = (
    "op",
    "impl",
    "heads",
    "dim",
    "batch",
    "new",
    "kv_len",
    "us",
    "[p5 p95]",
    "MB",
    "TB/s",
    "% roof",
    "splits",
    "note",
)


def _cells(line: Row) -> tuple[str, ...]:
    bandwidth = f"{line.bytes / line.us / 1e6:.2f}" if line.bytes else ""
    roof = f"{100 * line.roof_us / line.us:.1f}" if line.roof_us else ""
    return (
        line.op,
        line.impl,
        f"{line.q_heads}/{line.kv_heads}",
        str(line.head_dim),
        str(line.batch),
        str(line.seqlen_q or ""),
        str(line.kv_len),
        f"{line.us:.1f}",
        f"[{line.us_p5:.1f} {line.us_p95:.1f}]",
        f"{line.bytes / 1e6:.1f}" if line.bytes else "",
        bandwidth,
        roof,
        "" if line.splits is None else str(line.splits),
        "; ".join((line.dtype, *(() if line.kv == line.dtype else (f"kv {line.kv}",)), *line.notes)),
    )


def table(rows: Sequence[Row]) -> str:
    """Return the rows as text, one line each below a heading."""
    return aligned([_HEADINGS, *(_cells(line) for line in rows)], ("op", "impl", "heads", "note"))


def aligned(lines: Sequence[tuple[str, ...]], flush_left: Sequence[str]) -> str:
    """Return cells as columns, of which those with these headings are flush left, the others flush right."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    left = {lines[0].index(name) for name in flush_left}
    return "\n".join(
        "  ".join(c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True)))
        .rstrip()
        for line in lines
    )  # fmt: skip


def _git(*arguments: str) -> str | None:
    program = shutil.which("git")
    # A checkout, and not a copy that happens to lie inside of another repository.
    if program is None or not (ROOT / ".git").exists():
        return None
    result = subprocess.run([program, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)  # noqa: S603  fixed arguments
    return None if result.returncode else result.stdout.strip()


def commit(given: str | None = None) -> tuple[str, bool]:
    """Return the commit of this tree and whether the tree is clean.

    Parameters
    ----------
    given : str, optional
        Said by the caller, for a copy without ``.git``; a tree that is not clean ends in ``-dirty``, as in
        ``git describe --dirty``.

    Returns
    -------
    commit : str
        "unknown" if nobody knows.
    clean : bool
        Records in bench/results do not count as changes.
    """
    if given is not None:
        return given, not given.endswith("-dirty")
    head, status = _git("rev-parse", "HEAD"), _git("status", "--porcelain", "--", ".", ":!bench/results")
    if head is None or status is None:
        return "unknown", False
    return head, status == ""


def read_clocks(pci_bus_id: str, keep_busy: Callable[[], object]) -> tuple[str | None, dict[str, float] | None]:
    """Read the driver's version, clocks, power and temperature while the GPU works; an idle GPU lowers its clocks.

    Parameters
    ----------
    pci_bus_id : str
    keep_busy : callable
        Gives the GPU some milliseconds of work; called until nvidia-smi has answered.

    Returns
    -------
    driver : str or None
    clocks : dict or None
        None if nvidia-smi does not say.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        return None, None
    query = f"--query-gpu=driver_version,{','.join(_CLOCKS)}"
    command = [program, f"--id={pci_bus_id}", query, "--format=csv,noheader,nounits"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:  # noqa: S603  fixed arguments
        # The answer is a line, less than a pipe holds, so that the process does not wait to be read.
        while process.poll() is None:
            keep_busy()
        answer, _ = process.communicate()
    return parse_clocks(answer) if process.returncode == 0 else (None, None)


def parse_clocks(answer: str) -> tuple[str | None, dict[str, float] | None]:
    """Return driver and clocks of nvidia-smi's line; what it does not know (``[N/A]``) is left out."""
    driver, *values = (value.strip() for value in answer.strip().split(","))
    clocks = {
        name: float(value)
        for name, value in zip(_CLOCKS.values(), values, strict=False)
        if re.fullmatch(r"\d+(\.\d+)?", value)
    }
    return driver or None, clocks or None


def clocks_fell(before: dict[str, float] | None, after: dict[str, float] | None) -> bool:
    """Whether the SM or memory clock is lower than before."""
    return any(
        after[name] < (1 - CLOCK_TOLERANCE) * before[name]
        for name in ("sm_mhz", "mem_mhz")
        if before and after and name in before and name in after
    )


def environment(given_commit: str | None) -> dict[str, Any]:
    """Return what a record says of machine and software; the current device is asked."""
    cupy = _arrays.import_cupy()
    device = cupy.cuda.Device()
    properties = cupy.cuda.runtime.getDeviceProperties(device.id)
    name, clean = commit(given_commit)

    def version(number: int) -> str:
        return f"{number // 1000}.{number % 1000 // 10}"

    return {
        "gpu": properties["name"].decode(),
        # nvidia-smi gives the driver's own version in its place.
        "driver": f"CUDA {version(cupy.cuda.runtime.driverGetVersion())}",
        "cuda": version(cupy.cuda.runtime.runtimeGetVersion()),
        "cupy": cupy.__version__,
        "nvrtc": ".".join(map(str, _nvrtc.version())),
        "cuattn": cuattn.__version__,
        "commit": name,
        "clean": clean,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "num_sms": properties["multiProcessorCount"],
        "l2_bytes": properties["l2CacheSize"],
        "copy_tb_s": None,
        "clocks_before": None,
        "clocks_after": None,
    }


def heading(env: dict[str, Any], roof: str = "as many bytes read or copied in the same run") -> str:
    """Return the lines above a table, whose roof is explained."""
    clocks = env["clocks_after"] or env["clocks_before"] or {}
    clock = f"{clocks['sm_mhz']:.0f} MHz" if "sm_mhz" in clocks else "clock unknown"
    copy = f", device copy {env['copy_tb_s']:.2f} TB/s" if env["copy_tb_s"] else ""
    clean = "clean" if env["clean"] else "not clean"
    peers = f"peers: {env['peers']}\n" if "peers" in env else ""
    return (
        f"cuattn {env['cuattn']} ({env['commit'][:12]}, {clean})  {env['gpu']}, {env['num_sms']} SMs, {clock}{copy}\n"
        f"driver {env['driver']}  CUDA {env['cuda']}  NVRTC {env['nvrtc']}  CuPy {env['cupy']}  {env['date']}\n{peers}"
        f"median [p5 p95]; inputs rotate past L2, CUDA-graph replay; roof: {roof}"
    )


def path_for(env: dict[str, Any], topic: str, folder: Path) -> Path:
    """Return a name that no record has: ``<gpu>-<date>-<topic>.json``, numbered if that exists."""
    gpu = re.sub(r"[^a-z0-9]+", "-", env["gpu"].lower().removeprefix("nvidia")).strip("-")
    stem = f"{gpu}-{env['date'][:10]}-{topic}"
    path, number = folder / f"{stem}.json", 1
    while path.exists():
        number += 1
        path = folder / f"{stem}-{number}.json"
    return path


def write(path: Path, env: dict[str, Any], rows: Sequence[Row]) -> None:
    """Write a record, one line a row."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n  ".join(json.dumps(line.as_dict()) for line in rows)
    path.write_text(f'{{"env": {json.dumps(env, indent=1)},\n "rows": [\n  {lines}\n ]}}\n')
