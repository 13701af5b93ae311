"""``python -m cuattn ceiling``: bytes and tokens per second of a decode step at most, by format of the KV cache."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path

from . import _info, _plan, _records, _tbq4
from ._records import Record, Row

_GIGA, _TERA = 1e9, 1e12


def _whole(text: str) -> int:
    """Parse a number of things."""
    try:
        number = int(text.replace("_", ""))
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 on, got {text!r}")
    return number


def _number(text: str, *, zero: bool = False) -> float:
    """Parse a finite number above 0, or from 0 on."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (0 < number < math.inf or (zero and number == 0)):
        raise argparse.ArgumentTypeError(f"must be a number {'from 0 on' if zero else 'above 0'}, got {text!r}")
    return number


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One decode step of a model: every sequence gets one token.

    Attributes
    ----------
    layers : int
        With attention and a KV cache of their own.
    q_heads, kv_heads, head_dim : int
    context : int
        Keys of a sequence.
    batch : int
        Sequences; the weights are read once for all of them.
    weights_gb : float
        Of 10^9 bytes, read in each step.
    bandwidth : float
        TB/s, of 10^12 bytes.

    Raises
    ------
    ValueError
        If the sizes do not go together; the message names the option, its value and what would be accepted.
    """

    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    context: int
    weights_gb: float
    bandwidth: float
    batch: int = 1

    def __post_init__(self) -> None:
        if self.head_dim not in _plan.HEAD_DIMS:
            raise ValueError(f"--head-dim must be one of {', '.join(map(str, _plan.HEAD_DIMS))}, got {self.head_dim}")
        if self.q_heads % self.kv_heads or self.q_heads // self.kv_heads > _plan.MAX_GROUP:
            accepted = f"1 to {_plan.MAX_GROUP} times --kv-heads {self.kv_heads}"
            raise ValueError(f"--q-heads must be {accepted}, got {self.q_heads}")
        if self.context > _plan.MAX_KV_LEN:
            raise ValueError(f"--context must be at most {_plan.MAX_KV_LEN:,} keys, got {self.context:,}")

    def cache_bytes(self, kv_format: _plan.KvFormat) -> int:
        """Return bytes of K and V of one layer."""
        return _plan.DecodeProblem(
            dtype=_plan.Dtype.FP16, k_format=kv_format, v_format=kv_format, batch=self.batch, seqlen_q=1,
            num_qo_heads=self.q_heads, num_kv_heads=self.kv_heads, head_dim=self.head_dim, max_kv_len=self.context,
        ).kv_bytes  # fmt: skip

    @property
    def sizes(self) -> str:
        """What a measurement must have been of."""
        return f"{self.q_heads}/{self.kv_heads} heads of {self.head_dim}, batch {self.batch}, {self.context:,} keys"

    @property
    def values(self) -> int:
        """Values of K and V of one layer."""
        return self.cache_bytes(_plan.KvFormat.RAW16) // _plan.Dtype.FP16.itemsize


@dataclass(frozen=True, slots=True)
class Line:
    """What a format asks for; bytes are those of one layer.

    Attributes
    ----------
    name : str
    formats : tuple of str
        As records name them.
    impl : str
        As records name it.
    cache : int
        Bytes that are kept.
    moved : int
        Bytes that attention reads and writes in a step.
    """

    name: str
    formats: tuple[str, ...]
    impl: str
    cache: int
    moved: int

    def total(self, step: Step) -> float:
        """Return bytes of a step, of all layers and the weights."""
        return step.weights_gb * _GIGA + step.layers * self.moved

    def share(self, step: Step) -> float:
        """Return the part of the bytes that is attention's."""
        return step.layers * self.moved / self.total(step)

    def seconds(self, step: Step) -> float:
        """Return the least time of attention of one layer."""
        return self.moved / (step.bandwidth * _TERA)

    def tokens(self, step: Step, layer_seconds: float | None = None) -> float:
        """Return tokens per second of all sequences, at most or with a measured time of one layer's attention."""
        attention = step.layers * (self.seconds(step) if layer_seconds is None else layer_seconds)
        return step.batch / (step.weights_gb * _GIGA / (step.bandwidth * _TERA) + attention)


def lines(step: Step) -> list[Line]:
    """Return the formats that go with a step's head_dim."""
    wide, fp8 = step.cache_bytes(_plan.KvFormat.RAW16), step.cache_bytes(_plan.KvFormat.FP8)
    found = [
        Line("fp16", ("fp16", "bf16"), "cuattn", wide, wide),
        Line("fp8", ("fp8",), "cuattn", fp8, fp8),
    ]
    if step.head_dim in _tbq4.HEAD_DIMS:
        tbq4 = step.cache_bytes(_plan.KvFormat.TBQ4)
        # The separate pass reads codes, writes 16 bits, and attention reads these.
        found += [
            Line("TBQ4", ("tbq4",), "cuattn", tbq4, tbq4),
            Line("TBQ4, separate", ("tbq4",), "separate", tbq4, tbq4 + 2 * wide),
        ]
    return found


def measured(step: Step, line: Line, records: Sequence[Record]) -> tuple[Row, Record] | None:
    """Return the measured row of a format and a step's sizes, from the first record with one."""
    sizes = {
        "op": "decode", "impl": line.impl, "q_heads": step.q_heads, "kv_heads": step.kv_heads,
        "head_dim": step.head_dim, "batch": step.batch, "seqlen_q": 1, "kv_len": step.context,
    }  # fmt: skip
    for record in records:
        for row in record.rows:
            same = all(row[key] == value for key, value in sizes.items()) and row["kv"] in line.formats
            if same and _records.is_plain(row):
                return row, record
    return None


def _aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield rows as columns, the first flush left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        rest = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
        yield "  ".join((row[0].ljust(widths[0]), *rest)).rstrip()


def _measured_table(step: Step, records: Sequence[Record]) -> Iterator[str]:
    found = [(line, hit) for line in lines(step) if (hit := measured(step, line, records)) is not None]
    if not found:
        names = ", ".join(record.path.name for record in records)
        yield f"measured: no row of decode with {step.sizes}, in {names}"
        return
    rows: list[tuple[str, ...]] = [("one layer", "limit us", "measured us", "share of limit", "tokens/s with it")]
    for line, (row, _) in found:
        limit = 1e6 * line.seconds(step)
        rows.append((
            line.name, f"{limit:.1f}", f"{row['us']:.1f}", f"{100 * limit / row['us']:.0f} %",
            f"{line.tokens(step, row['us'] / 1e6):.0f}",
        ))  # fmt: skip
    yield from _aligned(rows)
    for record in {id(record): record for _, (_, record) in found}.values():
        yield f"measured: {record.source}, {record.path.name}"


def report(step: Step, records: Sequence[Record] = ()) -> str:
    """Return the tables as text.

    Parameters
    ----------
    step : Step
    records : sequence of Record
        Of the GPU, where measured times are looked for.

    Returns
    -------
    str
    """
    rows: list[tuple[str, ...]] = [
        ("KV cache", "bits a value", "cache GB", "moved GB", "with weights GB", "attention", "tokens/s at most")
    ]
    rows += [
        (
            line.name, f"{8 * line.cache / step.values:.3f}", f"{step.layers * line.cache / _GIGA:.2f}",
            f"{step.layers * line.moved / _GIGA:.2f}", f"{line.total(step) / _GIGA:.2f}",
            f"{100 * line.share(step):.1f} %", f"{line.tokens(step):.0f}",
        )
        for line in lines(step)
    ]  # fmt: skip
    about = (
        f"a step of {step.layers} layers of attention, {step.sizes}: {step.weights_gb:g} GB of weights at "
        f"{step.bandwidth:g} TB/s\neach byte moves once and nothing else takes time; separate: TBQ4 is dequantized to "
        "16 bits, which attention reads; fp8 without its scales"
    )
    text = [about, "", *_aligned(rows)]
    if step.head_dim not in _tbq4.HEAD_DIMS:
        text.append(f"TBQ4 has head_dim {', '.join(map(str, _tbq4.HEAD_DIMS))}, not {step.head_dim}")
    if records:
        text += ["", *_measured_table(step, records)]
    return "\n".join(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    for name, what in (
        ("layers", "layers with attention and a KV cache of their own"), ("q-heads", "query heads"),
        ("kv-heads", "KV heads"), ("head-dim", "values of a row of K or V"), ("context", "keys of a sequence"),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=_whole, required=True, metavar="N", help=what)
    parser.add_argument("--batch", type=_whole, default=1, metavar="N", help="sequences; default 1")
    parser.add_argument(
        "--weights-gb", type=partial(_number, zero=True), required=True, metavar="GB",
        help="weights that a step reads, of 10^9 bytes",
    )  # fmt: skip
    parser.add_argument("--bandwidth", type=_number, metavar="TB/S", help="of 10^12 bytes; default: that of the GPU")
    parser.add_argument(
        "--gpu", metavar="NAME", help="whose records and bandwidth count, such as H200; default: the first GPU here"
    )
    parser.add_argument(
        "--results", type=Path, nargs="+", metavar="FILE",
        help="records of measurements; default: the newest of the GPU in a checkout's bench/results",
    )  # fmt: skip


def _device(name: str | None) -> tuple[str | None, float]:
    """Return name and bandwidth in TB/s of a GPU, the first one here if it is not named; 0 if unknown."""
    here = [device for _, device in _info.devices()[0]]
    if name is None:
        return (here[0].name, here[0].bandwidth / _TERA) if here else (None, 0.0)
    known = [*here, *_plan.DEVICES.values()]
    return next(
        ((device.name, device.bandwidth / _TERA) for device in known if _records.same_gpu(device.name, name)),
        (name, 0.0),
    )


def run(options: argparse.Namespace) -> int:
    """Print the tables and return the exit status.

    Raises
    ------
    ValueError
        If an option does not fit; the message names it, its value and what would be accepted.
    """
    gpu, bandwidth = _device(options.gpu)
    chosen = {field.name: getattr(options, field.name) for field in fields(Step)}
    if chosen["bandwidth"] is None:
        if not bandwidth:
            known = ", ".join(device.name for device in _plan.DEVICES.values())
            why = f"--gpu {options.gpu} is none of {known}" if options.gpu else "there is no GPU here and no --gpu"
            raise ValueError(f"--bandwidth must be given in TB/s, as {why}")
        chosen["bandwidth"] = bandwidth
    step = Step(**chosen)
    write = sys.stdout.write
    if options.results:
        write(report(step, [_records.load(path) for path in options.results]) + "\n")
        return 0
    records = [] if gpu is None else _records.of_gpu(gpu)
    write(report(step, records) + "\n")
    if not records:
        why = "no GPU here: --gpu NAME or --results FILE adds them" if gpu is None else f"no record of {gpu} here"
        write(f"\nmeasured: {why}\n")
    return 0
