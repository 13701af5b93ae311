"""README's tables of decode on a 4-bit cache and of prefill, from the newest records of the topics tbq4 and prefill."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TOPICS = ("tbq4", "prefill")
_NAME = re.compile(r".+-(\d{4}-\d{2}-\d{2})-(" + "|".join(TOPICS) + r")(?:-(\d+))?\.json")
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
_PROMPT_HEADER = (
    "| query/KV heads | head_dim | dtype | mask | prompts | us | TFLOP/s | of cuBLAS | FA3 | cuDNN | FA2 |",
    "|---|---|---|---|---|---|---|---|---|---|---|",
)
_CHUNK_HEADER = (
    "| query/KV heads | head_dim | new | keys | 16 bits: us | TFLOP/s | dense | TBQ4: us | TFLOP/s | dense | speed |",
    "|---|---|---|---|---|---|---|---|---|---|---|",
)
# In the order of the columns.
_PEERS = ("fa3", "cudnn", "fa2")
_PROMPT_INTRO = (
    "Whole prompts, lse included. TFLOP/s count the products of visible keys only, here and for peers in the same run: "
    "FlashAttention-3,\nand cuDNN (without lse) and FlashAttention-2 as PyTorch has them. window:L,R: a token sees so "
    "many keys before and after its own."
)
_CHUNK_INTRO = (
    "Chunks of a prompt, or new turns of a conversation: one sequence whose new tokens attend to a cache of all, "
    'causal.\nPages are shuffled; "dense" are us without pages; speed is 16-bit time by TBQ4 time, both paged.'
)
_INTRO = (
    "One query token, bfloat16, K and V in TBQ4, merge included. Bytes are those of a token and KV head, K and V; the "
    "read roof is for\nas many bytes as the 4-bit cache has; ratio is 16-bit time by 4-bit time."
)
Row = dict[str, Any]


def newest(folder: Path, topic: str = "tbq4") -> Path | None:
    """Return the newest record of a topic, None if there is none."""
    found = [(match, path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name)) and match[2] == topic]
    return max(found, key=lambda item: (item[0][1], int(item[0][3] or 1)), default=(None, None))[1]


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


def _tbq4(rows: list[Row]) -> Iterator[str]:
    yield from ("### Decode on a 4-bit cache", "", _INTRO, "", *_table(rows))
    if variants := list(_variants(rows)):
        head = next(row for row in rows if row["impl"] == "separate")
        yield from (
            "",
            f"{head['q_heads']}/{head['kv_heads']} heads, head_dim {head['head_dim']}, {head['kv_len']:,} keys, us:",
            "",
            *(f"- {variant}" for variant in variants),
        )
    if codec := list(_codec(rows)):
        heading = "| | rows | cache | head_dim | us | TB/s read and written | of the copy roof |"
        yield from ("", heading, "|---|---|---|---|---|---|---|", *codec)


def _tflops(row: Row | None) -> str:
    return "" if row is None else f"{row['flops'] / row['us'] / 1e6:.0f}"


def _us(row: Row | None) -> str:
    return "" if row is None else f"{row['us']:.0f}"


def _prompts(rows: list[Row]) -> Iterator[str]:
    """Yield whole prompts, each beside its peers."""
    yield from _PROMPT_HEADER
    names = ("dtype", "q_heads", "kv_heads", "head_dim", "batch", "seqlen_q", "kv_len", "mask")
    peers = {(row["impl"], *(row[name] for name in names)): row for row in rows if row["impl"] in _PEERS}
    for row in rows:
        if row["impl"] != "cuattn" or row["seqlen_q"] != row["kv_len"]:
            continue
        value_dim = re.search(r"value_dim (\d+)", row["note"])
        dims = f"{row['head_dim']}" + (f"/{value_dim[1]}" if value_dim else "")
        others = (peers.get((impl, *(row[name] for name in names))) for impl in _PEERS)
        yield (
            f"| {row['q_heads']}/{row['kv_heads']} | {dims} | {row['dtype']} | {row['mask']} "
            f"| {row['batch']} x {row['seqlen_q']:,} | {_us(row)} | {_tflops(row)} "
            f"| {_percent(row) if row['roof_us'] else ''} | {' | '.join(map(_tflops, others))} |"
        )


def _chunks(rows: list[Row]) -> Iterator[str]:
    """Yield chunks against a cache, of both formats and in both layouts side by side."""
    found: dict[tuple[Any, ...], dict[tuple[bool, bool], Row]] = {}
    for row in rows:
        if row["impl"] == "cuattn" and row["seqlen_q"] < row["kv_len"]:
            key = tuple(row[name] for name in ("q_heads", "kv_heads", "head_dim", "seqlen_q", "kv_len", "dtype"))
            variant = (row["kv"] == "tbq4", "page " in row["note"])
            found.setdefault(key, {})[variant] = row
    for (q_heads, kv_heads, head_dim, seqlen_q, kv_len, _), variants in found.items():
        wide, tbq4 = variants.get((False, True)), variants.get((True, True))
        speed = f"{wide['us'] / tbq4['us']:.2f}" if wide and tbq4 else ""
        cells = (_us(wide), _tflops(wide), _us(variants.get((False, False))), _us(tbq4), _tflops(tbq4),
                 _us(variants.get((True, False))), speed)  # fmt: skip
        yield f"| {q_heads}/{kv_heads} | {head_dim} | {seqlen_q:,} | {kv_len:,} | {' | '.join(cells)} |"


def _prefill(rows: list[Row]) -> Iterator[str]:
    yield from ("### Prefill", "", _PROMPT_INTRO, "", *_prompts(rows))
    if product := next((row for row in rows if row["impl"] == "cublas"), None):
        text = f"cuBLAS, {product['note'].split(';')[0]}, {product['dtype']}: {_tflops(product)} TFLOP/s."
        if any(row["dtype"] == "fp32" for row in rows):
            text += " Of float32 the roof is a sixth of that."
        yield from ("", text)
    if chunks := list(_chunks(rows)):
        yield from ("", _CHUNK_INTRO, "", *_CHUNK_HEADER, *chunks)


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
    env = record["env"]
    tbq4 = _topic(name) == "tbq4"
    clean = "" if env["clean"] else " (changed)"
    peers = f", {env['peers']}" if "peers" in env else ""
    source = f"{env['gpu']}{peers}, {env['date'][:10]}, commit {env['commit'][:7]}{clean}, `bench/results/{name}`"
    lines = [*(_tbq4 if tbq4 else _prefill)(record["rows"]), "", f"{source}; written by `python -m bench readme`."]
    if tbq4:
        lines += ["", _ERROR]
    return "\n".join(lines) + "\n"


def _topic(name: str) -> str:
    match = _NAME.fullmatch(name)
    if match is None:
        msg = f"a record must be named *-DATE-{' or *-DATE-'.join(TOPICS)}.json, got {name}"
        raise ValueError(msg)
    return match[2]


def updated(text: str, path: Path) -> str:
    """Return README's text with the tables of a record, between the marks of its topic."""
    marks = re.compile(rf"(<!-- bench:{_topic(path.name)} -->\n).*?(<!-- /bench -->)", re.DOTALL)
    new = block(json.loads(path.read_text()), path.name)
    result, count = marks.subn(lambda match: match[1] + new + match[2], text)
    if count != 1:
        msg = f"README.md must have one block that matches {marks.pattern!r}, got {count}"
        raise ValueError(msg)
    return result


def write(readme: Path, results: Path) -> list[Path]:
    """Bring README up to date and return the records that it shows.

    Raises
    ------
    FileNotFoundError
        If there is no record.
    ValueError
        If README has no place for one.
    """
    paths = [path for topic in TOPICS if (path := newest(results, topic)) is not None]
    if not paths:
        names, commands = (" or ".join(text + topic for topic in TOPICS) for text in ("*-", "python -m bench "))
        msg = f"no record {names} in {results}: run {commands} first"
        raise FileNotFoundError(msg)
    text = readme.read_text()
    for path in paths:
        text = updated(text, path)
    readme.write_text(text)
    return paths
