"""``python -m bench compare A.json B.json``: whether B is the same, faster or slower, case by case."""

from __future__ import annotations

import math
from collections import Counter
from itertools import product
from typing import TYPE_CHECKING, Any

from .record import CLOCK_TOLERANCE, aligned
from .rows import cases, parts
from .sampling import FULL

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cuattn._records import Record, Row

VERDICTS = ("same", "faster", "slower", "unclear")
# Twice the standard error of the difference of two medians, each known as well as sampling demands.
TOLERANCE = 2 * math.sqrt(2) * FULL.relative_error
RULE = (
    f"same: medians within {100 * TOLERANCE:.1f} %, and neither is noisy; faster, slower: medians farther apart, and "
    "[p5 p95] of the two have\nno time in common; unclear: anything else, or a row without p5 and p95"
)
_HEADINGS = ("op", "impl", "heads", "dim", "mask", "batch", "new", "keys", "us of A", "[p5 p95]", "us of B", "[p5 p95]",
             "B / A", "verdict", "case; notes of A | B")  # fmt: skip
_LEFT = ("op", "impl", "heads", "mask", "verdict", _HEADINGS[-1])
# What of the environment explains a difference.
_MACHINE = ("gpu", "driver", "cuda", "nvrtc", "cupy", "peers")


def _noisy(row: Row) -> bool:
    return "noisy" in parts(row)


def verdict(a: Row, b: Row) -> str:
    """Say what B is beside A; see `RULE`.

    Parameters
    ----------
    a, b : dict
        Rows of one case.

    Returns
    -------
    {"same", "faster", "slower", "unclear"}
    """
    if any(row[name] is None for row in (a, b) for name in ("us_p5", "us_p95")):
        return "unclear"
    if abs(b["us"] / a["us"] - 1) <= TOLERANCE:
        return "unclear" if _noisy(a) or _noisy(b) else "same"
    if b["us_p95"] < a["us_p5"]:
        return "faster"
    return "slower" if b["us_p5"] > a["us_p95"] else "unclear"


def _clocks(a: Record, b: Record) -> Iterator[str]:
    """Yield clocks and power limits that differ, or that only one of two records knows."""
    for when, name in product(("clocks_before", "clocks_after"), ("sm_mhz", "mem_mhz", "power_limit_w")):
        first, second = ((record.env.get(when) or {}).get(name) for record in (a, b))
        if first is None and second is None:
            continue
        if first is None or second is None:
            yield f"{when} {name} is unknown of {'A' if first is None else 'B'}"
        elif abs(second - first) > CLOCK_TOLERANCE * first:
            yield f"{when} {name} differs: A {first:g}, B {second:g}"


def warnings(a: Record, b: Record) -> Iterator[str]:
    """Yield what makes a comparison of two records one of other things than the code."""
    for name in _MACHINE:
        first, second = a.env.get(name), b.env.get(name)
        if first != second:
            yield f"{name} differs: A {first or 'unknown'}, B {second or 'unknown'}"
    yield from _clocks(a, b)
    for letter, record in (("A", a), ("B", b)):
        if not record.env["clean"]:
            yield f"{letter} was measured on a tree with changes"
        if record.left_out:
            yield f"{record.left_out} rows of {letter} are of another kind, or without a time, and left out"


def _spread(row: Row) -> str:
    return "" if row["us_p5"] is None or row["us_p95"] is None else f"[{row['us_p5']:.1f} {row['us_p95']:.1f}]"


def _problem(row: Row) -> tuple[str, ...]:
    heads = f"{row['q_heads']}/{row['kv_heads']}" if row["kv_heads"] else ""
    sizes = (str(row[name] or "") for name in ("batch", "seqlen_q", "kv_len"))
    return (row["op"], row["impl"], heads, str(row["head_dim"] or ""), row["mask"], *sizes)


def _formats(row: Row) -> str:
    return row["dtype"] if row["kv"] == row["dtype"] else f"{row['dtype']}, kv {row['kv']}"


def _notes(a: Row, b: Row) -> str:
    """Return formats, what both notes say, and what only one of them does."""
    first, second = parts(a), parts(b)
    both = [part for part in first if part in second]
    apart = ["; ".join(part for part in mine if part not in both) for mine in (first, second)]
    return "; ".join((_formats(a), *both, *([" | ".join(x or "-" for x in apart)] if any(apart) else [])))


def _cells(a: Row, b: Row) -> tuple[str, ...]:
    times = (f"{a['us']:.1f}", _spread(a), f"{b['us']:.1f}", _spread(b))
    return (*_problem(a), *times, f"{b['us'] / a['us']:.3f}", verdict(a, b), _notes(a, b))


def _only(letter: str, rows: list[Row]) -> Iterator[str]:
    if rows:
        yield ""
        yield f"only in {letter}:"
        headings = (*_HEADINGS[:8], "us", "[p5 p95]", "note")
        lines = [
            (*_problem(row), f"{row['us']:.1f}", _spread(row), "; ".join((_formats(row), *parts(row)))) for row in rows
        ]
        yield aligned([headings, *lines], ("op", "impl", "heads", "mask", "note"))


def _about(letter: str, record: Record) -> str:
    return f"{letter}: {record.path}  {record.source}"


def report(a: Record, b: Record) -> str:
    """Compare two records.

    Parameters
    ----------
    a, b : Record
        Before and after.

    Returns
    -------
    str
        A table of all cases that both have, those that one has, and how many are what.
    """
    first, second = cases(a.rows, b.rows)
    shared = [(row, second[case]) for case, row in first.items() if case in second]
    lines = [_about("A", a), _about("B", b), RULE, *(f"warning: {text}" for text in warnings(a, b)), ""]
    if shared:
        lines.append(aligned([_HEADINGS, *(_cells(*pair) for pair in shared)], _LEFT))
    only: dict[str, list[Any]] = {
        "A": [row for case, row in first.items() if case not in second],
        "B": [row for case, row in second.items() if case not in first],
    }
    for letter, rows in only.items():
        lines += _only(letter, rows)
    counts = Counter(verdict(*pair) for pair in shared)
    verdicts = ", ".join(f"{counts[name]} {name}" for name in VERDICTS)
    lines += ["", f"B beside A: {verdicts}; {len(only['A'])} only in A, {len(only['B'])} only in B"]
    return "\n".join(lines)
