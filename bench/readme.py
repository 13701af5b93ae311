"""README's tables of decode and prefill, and where rivals win, from the newest record of each topic."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from cuattn import _records

from .compare import verdict
from .rows import PEERS, cases, decodes, is_paged, kept, terabytes, tflops, value_dim

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from cuattn._records import Record, Row

TOPICS = ("decode", "tbq4", "prefill")
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
_DECODE_HEADER = (
    "| query/KV heads | head_dim | batch | keys | us | TB/s of K and V | of the read roof |",
    "|---|---|---|---|---|---|---|",
)
_DECODE_INTRO = (
    "Decode of one query token, {dtype}, merge included; the read roof is a kernel that reads the same bytes and does "
    "nothing else, in the same run."
)
# Above the tables; what is drawn says bench/plot_data.py.
_PICTURES = {
    "tbq4": "![Time of decode against the context, 16 bits, TBQ4 and dequantize, then decode](docs/figures/decode.png)",
    "prefill": "![TFLOP/s of prefill by the length of a prompt, beside peers](docs/figures/prefill.png)",
}
_CAPTIONS = {
    "tbq4": "Time of one layer against its context; the dashed lines are its bytes at the fastest measured read.",
    "prefill": "By the length of a prompt, beside peers in the same run; the dashed line is a cuBLAS product.",
}
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


def _key(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("q_heads", "kv_heads", "head_dim", "batch", "kv_len", "dtype"))


def _percent(row: Row) -> str:
    return f"{100 * row['roof_us'] / row['us']:.0f}%"


def _table(rows: list[Row]) -> Iterator[str]:
    wide = {_key(row): row for row in decodes(rows) if row["kv"] == row["dtype"]}
    yield from _HEADER
    for row in decodes(rows):
        other = wide.get(_key(row))
        if row["kv"] != "tbq4" or kept(row) or other is None:
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
    same = [row for row in decodes(rows) if _key(row)[:-1] == _key(separate)[:-1]]
    for row in same:
        if row["kv"] != row["dtype"]:
            name = f"{'K and V' if '/' not in row['kv'] else 'K/V'} {row['kv']}, q {row['dtype']}"
            yield f"{', '.join(filter(None, (name, kept(row))))}: {row['us']:.1f}"
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
                f"| {terabytes(row):.2f} | {_percent(row)} |"
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


def _rate(row: Row | None) -> str:
    return "" if row is None else f"{tflops(row):.0f}"


def _us(row: Row | None) -> str:
    return "" if row is None else f"{row['us']:.0f}"


def _prompts(rows: list[Row]) -> Iterator[str]:
    """Yield whole prompts, each beside its peers."""
    yield from _PROMPT_HEADER
    names = ("dtype", "q_heads", "kv_heads", "head_dim", "batch", "seqlen_q", "kv_len", "mask")
    peers = {(row["impl"], *(row[name] for name in names)): row for row in rows if row["impl"] in PEERS}
    for row in rows:
        if row["impl"] != "cuattn" or row["seqlen_q"] != row["kv_len"]:
            continue
        dims = f"{row['head_dim']}" + ("" if value_dim(row) == row["head_dim"] else f"/{value_dim(row)}")
        others = (peers.get((impl, *(row[name] for name in names))) for impl in PEERS)
        yield (
            f"| {row['q_heads']}/{row['kv_heads']} | {dims} | {row['dtype']} | {row['mask']} "
            f"| {row['batch']} x {row['seqlen_q']:,} | {_us(row)} | {_rate(row)} "
            f"| {_percent(row) if row['roof_us'] else ''} | {' | '.join(map(_rate, others))} |"
        )


def _chunks(rows: list[Row]) -> Iterator[str]:
    """Yield chunks against a cache, of both formats and in both layouts side by side."""
    found: dict[tuple[Any, ...], dict[tuple[bool, bool], Row]] = {}
    for row in rows:
        if row["impl"] == "cuattn" and row["seqlen_q"] < row["kv_len"]:
            key = tuple(row[name] for name in ("q_heads", "kv_heads", "head_dim", "seqlen_q", "kv_len", "dtype"))
            variant = (row["kv"] == "tbq4", is_paged(row))
            found.setdefault(key, {})[variant] = row
    for (q_heads, kv_heads, head_dim, seqlen_q, kv_len, _), variants in found.items():
        wide, tbq4 = variants.get((False, True)), variants.get((True, True))
        speed = f"{wide['us'] / tbq4['us']:.2f}" if wide and tbq4 else ""
        cells = (_us(wide), _rate(wide), _us(variants.get((False, False))), _us(tbq4), _rate(tbq4),
                 _us(variants.get((True, False))), speed)  # fmt: skip
        yield f"| {q_heads}/{kv_heads} | {head_dim} | {seqlen_q:,} | {kv_len:,} | {' | '.join(cells)} |"


def _prefill(rows: list[Row]) -> Iterator[str]:
    yield from ("### Prefill", "", _PROMPT_INTRO, "", *_prompts(rows))
    if product := next((row for row in rows if row["impl"] == "cublas"), None):
        text = f"cuBLAS, {product['note'].split(';')[0]}, {product['dtype']}: {_rate(product)} TFLOP/s."
        if any(row["dtype"] == "fp32" for row in rows):
            text += " Of float32 the roof is a sixth of that."
        yield from ("", text)
    if chunks := list(_chunks(rows)):
        yield from ("", _CHUNK_INTRO, "", *_CHUNK_HEADER, *chunks)


def _range(rows: list[Row], unit: float, digits: int) -> str:
    """Return the least and the largest time in a unit of microseconds, or the one that both are."""
    ends = dict.fromkeys(f"{us / unit:.{digits}f}" for us in (min(r["us"] for r in rows), max(r["us"] for r in rows)))
    return " to ".join(ends)


def _host(rows: list[Row]) -> Iterator[str]:
    """Yield what the first call and every call take on the host."""
    of = {op: [row for row in rows if row["op"] == op] for op in ("compile", "load", "launch")}
    if of["compile"] and of["load"]:
        yield (
            f"The first call in a process compiles a decode kernel in {_range(of['compile'], 1e6, 1)} s, or loads it "
            f"from the cache in {_range(of['load'], 1e3, 0)} ms."
        )
    alone, merged = ([row for row in of["launch"] if row["note"].startswith("splits 1;") == one] for one in (1, 0))
    if alone and merged:
        yield (
            f"A call takes {_range(alone, 1, 0)} us of Python, {_range(merged, 1, 0)} with a merge, so short calls "
            "want a CUDA graph."
        )


def _decode(rows: list[Row]) -> Iterator[str]:
    found = decodes(rows)
    if found:
        dtype = {"bf16": "bfloat16", "fp16": "float16"}[found[0]["dtype"]]
        yield from (_DECODE_INTRO.format(dtype=dtype), "", *_DECODE_HEADER)
    for row in found:
        yield (
            f"| {row['q_heads']}/{row['kv_heads']} | {row['head_dim']} | {row['batch']} | {row['kv_len']:,} "
            f"| {row['us']:.1f} | {terabytes(row):.2f} | {_percent(row)} |"
        )
    yield from ("", "Inputs rotate past L2, CUDA-graph replay, medians.", *_host(rows))


_TABLES: dict[str, Callable[[list[Row]], Iterator[str]]] = {"decode": _decode, "tbq4": _tbq4, "prefill": _prefill}


def rivals(rows: list[Row]) -> list[str]:
    """Return a line for each case in which a rival's median is below ours, with what `compare` says of the two."""
    lines = []
    ours = cases([row for row in rows if row["impl"] == "cuattn"])[0].values()
    for row in ours:
        for impl, name in PEERS.items():
            same = (other for other in rows if other["impl"] == impl)
            other = next((other for other in same if _problem(other) == _problem(row)), None)
            if other is not None and other["us"] < row["us"]:
                lines.append(
                    f"| {row['op']} | {row['q_heads']}/{row['kv_heads']} | {row['head_dim']} | {row['dtype']} "
                    f"| {row['mask']} | {row['batch']} x {row['seqlen_q']:,} | {name} | {other['us']:.0f} "
                    f"| {row['us']:.0f} | {verdict(row, other)} |"
                )
    return lines


def _problem(row: Row) -> tuple[Any, ...]:
    names = ("op", "dtype", "kv", "q_heads", "kv_heads", "head_dim", "batch", "seqlen_q", "kv_len", "mask")
    return (*(row[name] for name in names), value_dim(row), is_paged(row))


def rivals_block(record: Record) -> str:
    """Return what bench/README.md says of rivals, between its marks."""
    peers = [row for row in record.rows if row["impl"] in PEERS]
    ours = {_problem(row) for row in record.rows if row["impl"] == "cuattn"}
    compared = sum(_problem(row) in ours for row in peers)
    lines = rivals(record.rows)
    table = (
        "| op | query/KV heads | head_dim | dtype | mask | prompts | rival | us | cuattn us | the rival is |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *lines,
    )
    said = (
        f"Of {compared} pairs of a case and a rival in the record, the rival's median is the lower one in {len(lines)}"
    )
    return "\n".join((f"{said}{':' if lines else '.'}", *(("", *table) if lines else ()), "", _source(record))) + "\n"


def _source(record: Record) -> str:
    peers = f"; peers: {record.env['peers']}" if "peers" in record.env else ""
    return f"{record.source}, `bench/results/{record.path.name}`{peers}; written by `python -m bench readme`."


def block(record: Record) -> str:
    """Return what stands in README between the marks of a record's topic."""
    topic = _topic(record.path)
    head, *rest = _TABLES[topic](record.rows)
    lines = [head, *rest, "", _source(record)]
    if topic in _PICTURES:
        caption = f"{_CAPTIONS[topic]} {record.source}."
        lines[1:1] = ["", _PICTURES[topic], "", caption]
    if topic == "tbq4":
        lines += ["", _ERROR]
    return "\n".join(lines) + "\n"


def _topic(path: Path) -> str:
    topic = _records.topic_of(path)
    if topic not in TOPICS:
        raise ValueError(f"a record must be named *-DATE-{' or *-DATE-'.join(TOPICS)}.json, got {path.name}")
    return topic


def _replaced(text: str, mark: str, new: str) -> str:
    """Return a text with something else between the marks of a name."""
    marks = re.compile(rf"(<!-- bench:{mark} -->\n).*?(<!-- /bench -->)", re.DOTALL)
    result, count = marks.subn(lambda match: match[1] + new + match[2], text)
    if count != 1:
        raise ValueError(f"the text must have one block that matches {marks.pattern!r}, got {count}")
    return result


def updated(text: str, path: Path) -> str:
    """Return README's text with the tables of a record, between the marks of its topic."""
    return _replaced(text, _topic(path), block(_records.load(path)))


def updated_rivals(text: str, path: Path) -> str:
    """Return the text of bench/README.md with where rivals win in a record of prefill."""
    return _replaced(text, "rivals", rivals_block(_records.load(path)))


def write(readme: Path, results: Path) -> list[Path]:
    """Bring README up to date and return the records that it shows.

    Raises
    ------
    FileNotFoundError
        If there is no record.
    ValueError
        If README has no place for one.
    """
    paths = [path for topic in TOPICS if (path := _records.newest(results, topic)) is not None]
    if not paths:
        names, commands = (" or ".join(text + topic for topic in TOPICS) for text in ("*-", "python -m bench "))
        raise FileNotFoundError(f"no record {names} in {results}: run {commands} first")
    text = readme.read_text()
    for path in paths:
        text = updated(text, path)
    readme.write_text(text)
    return paths


def write_rivals(page: Path, results: Path) -> None:
    """Bring bench/README.md up to date; nothing without a record of prefill."""
    if (path := _records.newest(results, "prefill")) is not None:
        page.write_text(updated_rivals(page.read_text(), path))
