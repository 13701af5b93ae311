"""What the pictures show, taken from records; `plot` draws it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from cuattn import _records

from . import cases, kv_error, prefill_cases, rows

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from cuattn._records import Record, Row

WIDE = ("bf16", "fp16")
FORMATS = {"16 bits": WIDE, "fp8": ("fp8",), "tbq4": ("tbq4",)}
# Query and KV heads of prompts by head_dim: one shape of each, in which the records have all peers.
PREFILL_SHAPES = {head_dim: heads for *heads, head_dim, _ in prefill_cases.PROMPT_SHAPES}
MASKS = ("causal", "full")


@dataclass(slots=True)
class Picture:
    """One picture, without its looks.

    Attributes
    ----------
    name : str
        Of its files.
    data : dict
        What is drawn, ready for JSON.
    records : list of Record
        Where it comes from.
    missing : list of str
        Series that no record has.
    """

    name: str
    data: dict[str, Any] = field(default_factory=dict)
    records: list[Record] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    def uses(self, record: Record) -> None:
        """Name a record among the sources."""
        if all(record.path != other.path for other in self.records):
            self.records.append(record)

    @property
    def is_empty(self) -> bool:
        """Whether no record has anything of it."""
        return not any(self.data.get(key) for key in ("series", "panels", "formats"))

    @property
    def source(self) -> str:
        """GPU, date, commit and file of each record, as they stand below the picture."""
        return "\n".join(f"{record.source}, {record.path.name}" for record in self.records)

    @property
    def digest(self) -> str:
        """Short hash of what is shown: a file that carries another one shows something else."""
        content = json.dumps([self.data, self.source], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:16]


def _rounded(number: float, digits: int = 4) -> float:
    """Round to what the eye cannot tell apart; sums in another order then give the same."""
    return float(f"{number:.{digits}g}")


def load(folder: Path) -> dict[str, Record]:
    """Return the newest record of each topic that pictures need and the folder has, all of the first one's GPU."""
    paths = {topic: _records.newest(folder, topic) for topic in (*_records.DECODE_TOPICS, "prefill")}
    records = {topic: _records.load(path) for topic, path in paths.items() if path is not None}
    gpu = next((record.env["gpu"] for record in records.values()), "")
    return {topic: record for topic, record in records.items() if record.env["gpu"] == gpu}


def _read_rate(picture: Picture) -> float:
    """Return the fastest measured read in TB/s, of the records that the picture uses."""
    reads = [row for record in picture.records for row in rows.decodes(record.rows, "read") if _records.is_plain(row)]
    if not reads:
        msg = f"no row of impl read, the roof, in {', '.join(record.path.name for record in picture.records)}"
        raise ValueError(msg)
    return max(map(rows.terabytes, reads))


def _first(
    records: dict[str, Record], topics: tuple[str, ...], wanted: Callable[[Row], bool]
) -> tuple[Record, list[Row]] | None:
    """Return the rows that are wanted, from the first topic with any; all have queries in bfloat16."""
    for topic in topics:
        if topic in records:
            found = [row for row in records[topic].rows if row["dtype"] == WIDE[0] and wanted(row)]
            if found:
                return records[topic], found
    return None


def _is_curve(row: Row, impl: str, formats: tuple[str, ...]) -> bool:
    """Whether a row has the heads of the headline and one sequence."""
    _, _, *heads = cases.HEADLINE
    names = ("op", "impl", "batch", "seqlen_q", "q_heads", "kv_heads", "head_dim")
    same = [row[name] for name in names] == ["decode", impl, 1, 1, *heads] and row["kv"] in formats
    return same and _records.is_plain(row)


def _is_stored(row: Row, formats: tuple[str, ...]) -> bool:
    """Whether all of the cache is in one of the formats."""
    return row["kv"] in formats and not rows.kept(row)


def decode(records: dict[str, Record]) -> Picture:
    """Time of decode of one query token against the context, of each format, and the bytes' time at the read roof."""
    picture = Picture("decode")
    series: dict[str, Any] = {}
    for name, impl, formats in (("separate", "separate", FORMATS["tbq4"]), *(
        (name, "cuattn", formats) for name, formats in FORMATS.items()
    )):  # fmt: skip
        found = _first(records, _records.DECODE_TOPICS, partial(_is_curve, impl=impl, formats=formats))
        if found is None:
            picture.missing.append(name)
            continue
        record, line = found
        picture.uses(record)
        line.sort(key=lambda row: row["kv_len"])
        last = line[-1]
        series[name] = {
            "points": [[row["kv_len"], _rounded(row["us"])] for row in line],
            "bytes_per_key": last["bytes"] / last["kv_len"],
        }
    _, _, q_heads, kv_heads, head_dim = cases.HEADLINE
    picture.data = {"heads": f"{q_heads}/{kv_heads}", "head_dim": head_dim, "series": series}
    if series:
        picture.data["read_tb_s"] = _rounded(_read_rate(picture))
    return picture


def prefill(records: dict[str, Record]) -> Picture:
    """TFLOP/s of whole prompts in bfloat16 by their length, beside peers, for each head_dim and mask."""
    picture = Picture("prefill")
    record = records.get("prefill")
    if record is None:
        picture.missing.append("prefill")
        return picture
    picture.uses(record)
    panels = []
    for mask in MASKS:
        for head_dim, heads in PREFILL_SHAPES.items():
            whole = [
                row for row in record.rows
                if (row["op"], row["dtype"], row["kv"], row["mask"]) == ("prefill", WIDE[0], WIDE[0], mask)
                and row["seqlen_q"] == row["kv_len"] and rows.value_dim(row) == row["head_dim"] == head_dim
                and [row["q_heads"], row["kv_heads"]] == heads and not rows.is_paged(row)
            ]  # fmt: skip
            series = {}
            for impl in ("cuattn", *rows.peers_of(record.rows)):
                points = sorted((row["seqlen_q"], _rounded(rows.tflops(row))) for row in whole if row["impl"] == impl)
                if points:
                    series[impl] = [list(point) for point in points]
                else:
                    picture.missing.append(f"{impl}, head_dim {head_dim}, {mask}")
            roofs = [row["flops"] / row["roof_us"] / 1e6 for row in whole if row["impl"] == "cuattn" and row["roof_us"]]
            panels.append({
                "mask": mask, "head_dim": head_dim, "heads": "/".join(map(str, heads)), "series": series,
                "roof": _rounded(max(roofs)) if roofs else None,
            })  # fmt: skip
    if any(panel["series"] for panel in panels):
        picture.data = {"panels": panels}
    return picture


def _points(lines: list[Row]) -> list[list[float]]:
    """Return FLOPs a byte and TFLOP/s."""
    return sorted([_rounded(row["flops"] / row["bytes"]), _rounded(rows.tflops(row))] for row in lines)


def roofline(records: dict[str, Record]) -> Picture:
    """FLOPs a byte against TFLOP/s of decode and prefill of each format, below what was read and multiplied at best."""
    picture = Picture("roofline")
    series: dict[str, Any] = {}
    for op, topics in (("decode", _records.DECODE_TOPICS), ("prefill", ("prefill",))):
        for name, formats in FORMATS.items():
            found = _first(
                records, topics,
                lambda row, op=op, formats=formats: (row["op"], row["impl"]) == (op, "cuattn")
                and _is_stored(row, formats),
            )  # fmt: skip
            if found is None:
                picture.missing.append(f"{op} {name}")
                continue
            picture.uses(found[0])
            series[f"{op} {name}"] = _points(found[1])
        if op == "decode" and series:
            picture.data["read_tb_s"] = _rounded(_read_rate(picture))
    products = _first(records, ("prefill",), lambda row: bool(row["impl"] == "cublas"))
    if products is None:
        picture.missing.append("cublas")
    else:
        picture.data["product_tflops"] = _rounded(max(map(rows.tflops, products[1])))
    picture.data["series"] = series
    return picture


def error() -> Picture:
    """Error of each KV format against bits a value, on the queries, keys and values that ship with cuattn."""
    found = kv_error.errors()
    data = {
        name: [[layer, _rounded(bits), _rounded(value, 3)] for layer, bits, value in line]
        for name, line in found.items()
    }
    return Picture("error", {"queries": kv_error.QUERIES, "formats": data})


def pictures(folder: Path) -> list[Picture]:
    """Return all pictures, from the newest records of a folder."""
    records = load(folder)
    return [decode(records), prefill(records), roofline(records), error()]
