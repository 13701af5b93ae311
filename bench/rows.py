"""What a recorded row says: its case, and rates."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Any

from cuattn import _records

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from cuattn._records import Row

PROBLEM = ("op", "dtype", "kv", "head_dim", "q_heads", "kv_heads", "batch", "seqlen_q", "kv_len", "mask")
PEERS = {"fa3": "FlashAttention-3", "cudnn": "cuDNN", "fa2": "FlashAttention-2", "flashinfer": "FlashInfer"}
"""Implementations beside ours, in the order of columns and legends."""
_RARE = ("flashinfer",)
# Parts of a note that belong to the problem, and those that tell trials of one problem apart.
_OF_PROBLEM = re.compile(rf"page \d+|value_dim \d+|with mean|({'|'.join(_records.SPECIAL)}).*|.*kept in 16 bits")
_OF_TRIAL = re.compile(r"splits \d+|(tile|table stride) .+")
Case = tuple[Any, ...]


def parts(row: Row) -> list[str]:
    """Return the parts of a row's note."""
    return row["note"].split("; ") if row["note"] else []


def kept(row: Row) -> str:
    """Return what the note says of tokens that are kept in 16 bits."""
    return next((part for part in parts(row) if "kept in 16 bits" in part), "")


def value_dim(row: Row) -> int:
    """Return head_dim of the values."""
    found = re.search(r"value_dim (\d+)", row["note"])
    return int(found[1]) if found else row["head_dim"]


def is_paged(row: Row) -> bool:
    """Whether keys are in pages."""
    return any(part.startswith("page ") for part in parts(row))


def is_warm(row: Row) -> bool:
    """Whether L2 has K and V before each call."""
    return any(part.startswith("warm,") for part in parts(row))


def of_problem(row: Row) -> tuple[str, ...]:
    """Return the parts of the note that belong to the problem."""
    return tuple(part for part in parts(row) if _OF_PROBLEM.fullmatch(part))


def problem(row: Row) -> Case:
    """Return what was computed, whoever did it."""
    return (*(row[name] for name in PROBLEM), *of_problem(row))


def tflops(row: Row) -> float:
    """Return TFLOP/s."""
    return float(row["flops"] / row["us"] / 1e6)


def terabytes(row: Row) -> float:
    """Return TB/s."""
    return float(row["bytes"] / row["us"] / 1e6)


def peers_of(rows: Iterable[Row]) -> list[str]:
    """Return the implementations beside ours for which there is a place: those of every run, and what has rows."""
    there = {row["impl"] for row in rows}
    return [impl for impl in PEERS if impl in there or impl not in _RARE]


def decodes(rows: Iterable[Row], impl: str = "cuattn") -> list[Row]:
    """Return the rows of decode of an implementation."""
    return [row for row in rows if (row["op"], row["impl"]) == ("decode", impl)]


def cases(*records: Sequence[Row]) -> list[dict[Case, Row]]:
    """Give each row of records a case, so that rows of one case compare.

    A case is the problem: operation, implementation, formats, sizes, mask, pages. Where a record has several rows of a
    problem, as sweeps have, splits and tile are part of it, in all of the records; rows that still share a case are
    numbered in their order.

    Parameters
    ----------
    records : sequences of dict

    Returns
    -------
    list of dict
        Of each record the rows by case, in their order.
    """

    def by(row: Row) -> Case:
        return (row["impl"], *problem(row))

    repeated = {case for rows in records for case, count in Counter(map(by, rows)).items() if count > 1}
    found: list[dict[Case, Row]] = []
    for rows in records:
        by_case: dict[Case, Row] = {}
        seen: Counter[Case] = Counter()
        for row in rows:
            case = by(row)
            if case in repeated:
                case = (*case, *(part for part in parts(row) if _OF_TRIAL.fullmatch(part)))
                seen[case] += 1
                case = (*case, seen[case])
            by_case[case] = row
        found.append(by_case)
    return found
