"""Where rivals win, as bench/README.md says, from the newest record of each topic that has rivals."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cuattn import _records

from .compare import verdict
from .readme import microseconds, replaced, source, whole_microseconds
from .rows import PEERS, cases, is_warm, problem

if TYPE_CHECKING:
    from pathlib import Path

    from cuattn._records import Record, Row

TOPICS = ("decode", "prefill")


def rivals(rows: list[Row]) -> list[str]:
    """Return a line for each case in which a rival's median is below ours, with what `compare` says of the two."""
    lines = []
    ours = cases([row for row in rows if row["impl"] == "cuattn"])[0].values()
    for row in ours:
        for impl, name in PEERS.items():
            same = (other for other in rows if other["impl"] == impl)
            other = next((other for other in same if problem(other) == problem(row)), None)
            if other is not None and other["us"] < row["us"]:
                tokens = row["kv_len"] if row["op"] == "decode" else row["seqlen_q"]
                where = " in L2" if is_warm(row) else ""
                us = microseconds if row["op"] == "decode" else whole_microseconds
                lines.append(
                    f"| {row['op']} | {row['q_heads']}/{row['kv_heads']} | {row['head_dim']} | {row['dtype']} "
                    f"| {row['mask']} | {row['batch']} x {tokens:,}{where} | {name} | {us(other)} "
                    f"| {us(row)} | {verdict(row, other)} |"
                )
    return lines


def block(*records: Record) -> str:
    """Return what bench/README.md says of rivals, between its marks; nothing of a record without any."""
    with_rivals = (record for record in records if any(row["impl"] in PEERS for row in record.rows))
    return "\n".join(map(_rivals_of, with_rivals))


def _rivals_of(record: Record) -> str:
    peers = [row for row in record.rows if row["impl"] in PEERS]
    ours = {problem(row) for row in record.rows if row["impl"] == "cuattn"}
    compared = sum(problem(row) in ours for row in peers)
    lines = rivals(record.rows)
    table = (
        "| op | query/KV heads | head_dim | dtype | mask | prompts or keys | rival | us | cuattn us | the rival is |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *lines,
    )
    op = next(row["op"] for row in peers)
    said = f"Of {compared} pairs of a case of {op} and a rival, the rival's median is the lower one in {len(lines)}"
    return "\n".join((f"{said}{':' if lines else '.'}", *(("", *table) if lines else ()), "", source(record))) + "\n"


def updated(text: str, results: Path) -> str:
    """Return the text of bench/README.md with where rivals win in the newest records that have any."""
    paths = (_records.newest(results, topic) for topic in TOPICS)
    return replaced(text, "rivals", block(*(_records.load(path) for path in paths if path is not None)))


def write(page: Path, results: Path) -> None:
    """Bring bench/README.md up to date."""
    page.write_text(updated(page.read_text(), results))
