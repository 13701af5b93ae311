"""README's table of decode on a 4-bit cache, from the newest record of the topic tbq4."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_BLOCK = re.compile(r"(<!-- bench:tbq4 -->\n).*?(<!-- /bench -->)", re.DOTALL)
_NAME = re.compile(r".+-(\d{4}-\d{2}-\d{2})-tbq4(?:-(\d+))?\.json")
# docs/tbq4.md, "Sinks and recent tokens".
_ERROR = (
    "Error of the attention output, K and V in TBQ4, on queries, keys and values of SmolLM2 (layers 0, 15, 29): 5.7 %, "
    "13.9 % and 13.3 %\nas they are; 5.0 %, 8.3 % and 8.1 % with the mean of K removed and token 0 in 16 bits "
    "([docs/tbq4.md](docs/tbq4.md))."
)
_HEADER = (
    "| query/KV heads | head_dim | batch | keys | bytes a token | us | of the read roof | 16-bit us | ratio |",
    "|---|---|---|---|---|---|---|---|---|",
)
_INTRO = (
    "One query token, bfloat16, K and V in TBQ4, merge included. Bytes are those of a token and KV head, K and V; the "
    "read roof is for\nas many bytes as the 4-bit cache has; ratio is 16-bit time by 4-bit time."
)
Row = dict[str, Any]


def newest(folder: Path) -> Path | None:
    """Return the newest record of the topic, None if there is none."""
    found = [(match, path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    return max(found, key=lambda item: (item[0][1], int(item[0][2] or 1)), default=(None, None))[1]


def _decodes(rows: list[Row]) -> list[Row]:
    return [row for row in rows if (row["op"], row["impl"]) == ("decode", "cuattn")]


def _kept(row: Row) -> str:
    """Return what the note says of tokens that are kept in 16 bits."""
    return next((part for part in row["note"].split("; ") if "kept in 16 bits" in part), "")


def _key(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("q_heads", "kv_heads", "head_dim", "batch", "kv_len", "dtype"))


def _percent(row: Row) -> str:
    return f"{100 * row['roof_us'] / row['us']:.0f}%"


def _table(rows: list[Row]) -> Iterator[str]:
    wide = {_key(row): row for row in _decodes(rows) if row["kv"] == row["dtype"]}
    yield from _HEADER
    for row in _decodes(rows):
        other = wide.get(_key(row))
        if row["kv"] != "tbq4" or _kept(row) or other is None:
            continue
        per_token = row["bytes"] / (row["batch"] * row["kv_len"] * row["kv_heads"])
        yield (
            f"| {row['q_heads']}/{row['kv_heads']} | {row['head_dim']} | {row['batch']} | {row['kv_len']:,} "
            f"| {per_token:.0f} | {row['us']:.1f} | {_percent(row)} | {other['us']:.1f} "
            f"| {other['us'] / row['us']:.2f} |"
        )


def _variants(rows: list[Row]) -> Iterator[str]:
    """Yield what else was measured of the problem of a separate row, which is the headline."""
    separate = next((row for row in rows if row["impl"] == "separate"), None)
    if separate is None:
        return
    same = [row for row in _decodes(rows) if _key(row)[:-1] == _key(separate)[:-1]]
    for row in same:
        if row["kv"] != row["dtype"]:
            name = f"{'K and V' if '/' not in row['kv'] else 'K/V'} {row['kv']}, q {row['dtype']}"
            yield f"{', '.join(filter(None, (name, _kept(row))))}: {row['us']:.1f}"
        elif row["dtype"] == separate["dtype"]:
            yield f"K and V {row['kv']}: {row['us']:.1f}"
    yield f"`dequantize` of K and V to 16 bits, then `decode` of these: {separate['us']:.1f}"


def _codec(rows: list[Row]) -> Iterator[str]:
    for row in rows:
        if row["op"] in ("quantize", "dequantize", "append") and row["impl"] == "cuattn":
            new = f", {row['batch']} x {row['seqlen_q']} tokens" if row["op"] == "append" else ""
            mean = ", with mean" if "with mean" in row["note"] else ""
            yield (
                f"| {row['op']}{new}{mean} | {row['dtype']} | {row['kv']} | {row['head_dim']} | {row['us']:.1f} "
                f"| {row['bytes'] / row['us'] / 1e6:.2f} | {_percent(row)} |"
            )


def block(record: dict[str, Any], name: str) -> str:
    """Return what stands between the marks for a record.

    Parameters
    ----------
    record : dict
        With ``env`` and ``rows``.
    name : str
        Of its file.

    Returns
    -------
    str
    """
    env, rows = record["env"], record["rows"]
    lines = ["### Decode on a 4-bit cache", "", _INTRO, ""]
    lines += _table(rows)
    if variants := list(_variants(rows)):
        head = next(row for row in rows if row["impl"] == "separate")
        lines += [
            "",
            f"{head['q_heads']}/{head['kv_heads']} heads, head_dim {head['head_dim']}, {head['kv_len']:,} keys, us:",
            "",
            *(f"- {variant}" for variant in variants),
        ]
    if codec := list(_codec(rows)):
        heading = "| | rows | cache | head_dim | us | TB/s read and written | of the copy roof |"
        lines += ["", heading, "|---|---|---|---|---|---|---|", *codec]
    clean = "" if env["clean"] else " (changed)"
    source = f"{env['gpu']}, {env['date'][:10]}, commit {env['commit'][:7]}{clean}, `bench/results/{name}`"
    lines += ["", f"{source}; written by `python -m bench readme`.", "", _ERROR]
    return "\n".join(lines) + "\n"


def updated(text: str, path: Path) -> str:
    """Return README's text with the table of a record."""
    new = block(json.loads(path.read_text()), path.name)
    result, count = _BLOCK.subn(lambda match: match[1] + new + match[2], text)
    if count != 1:
        msg = f"README.md must have one block that matches {_BLOCK.pattern!r}, got {count}"
        raise ValueError(msg)
    return result


def write(readme: Path, results: Path) -> Path:
    """Bring README up to date and return the record that it shows.

    Raises
    ------
    FileNotFoundError
        If there is no record.
    """
    path = newest(results)
    if path is None:
        msg = f"no record *-tbq4.json in {results}: run python -m bench tbq4 first"
        raise FileNotFoundError(msg)
    text = readme.read_text()
    readme.write_text(updated(text, path))
    return path
