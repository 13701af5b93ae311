"""README's tables of decode and prefill, from the newest record of each topic."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from cuattn import _records

from .rows import PEERS, decodes, is_paged, is_warm, kept, of_problem, peers_of, problem, terabytes, tflops, value_dim

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from cuattn._records import Record, Row

TOPICS = ("decode", "tbq4", "fp8", "prefill")
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
    "| query/KV heads | head_dim | dtype | mask | prompts | us | TFLOP/s | of cuBLAS |",
    "|---|---|---|---|---|---|---|---|",
)
_CHUNK_HEADER = (
    "| query/KV heads | head_dim | new | keys | 16 bits: us | TFLOP/s | dense | TBQ4: us | TFLOP/s | dense | speed |",
    "|---|---|---|---|---|---|---|---|---|---|---|",
)
_DECODE_HEADER = (
    "| query/KV heads | head_dim | batch | keys | us | TB/s of K, V | of the read roof |",
    "|---|---|---|---|---|---|---|",
)
# In the place of a peer that has no time: the note of our row says why, if it was asked for one.
_NONE = "-"
_SHORT = {"fa3": "FA3", "cudnn": "cuDNN", "fa2": "FA2", "flashinfer": "FlashInfer"}
_SLOWER = "SMs slow down under some of these loads: rows of the record say so."
_DECODE_INTRO = (
    "Decode of one query token, {dtype}, merge included; the read roof is a kernel that reads the same bytes and does "
    "nothing else, in the same run."
)
_DECODE_PEERS = (
    "So are the peers, on the same caches: FlashAttention-3, and cuDNN (without lse) and FlashAttention-2 as PyTorch "
    "has them, each as it is called fastest.{flashinfer}\n" + _SLOWER
)
_DECODE_FLASHINFER = " FlashInfer, too, on the caches seen as pages and without lse."
_COLD = "Inputs rotate past L2, CUDA-graph replay, medians."
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
    "FlashAttention-3,\nand cuDNN (without lse) and FlashAttention-2 as PyTorch has them{flashinfer}. "
    "window:L,R: a token sees so many keys before and after its own.\n" + _SLOWER
)
_CHUNK_INTRO = (
    "Chunks of a prompt, or new turns of a conversation: one sequence whose new tokens attend to a cache of all, "
    'causal.\nPages are shuffled; "dense" are us without pages; speed is 16-bit time by TBQ4 time, both paged.'
)
_INTRO = (
    "One query token, bfloat16, K and V in {name}, merge included. Bytes are those of a token and KV head, K and V; the"
    "\nread roof is for as many bytes as that cache has; ratio is 16-bit time by its time.\n" + _SLOWER
)


def _with_peers(header: Sequence[str], impls: Sequence[str], unit: str = "") -> list[str]:
    """Return the two lines of a table's head with a column for each peer behind the others."""
    names, rule = header
    return [names + "".join(f" {_SHORT[impl]}{unit} |" for impl in impls), rule + "---|" * len(impls)]


def _key(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("q_heads", "kv_heads", "head_dim", "batch", "kv_len", "dtype"))


def _percent(row: Row) -> str:
    return f"{100 * row['roof_us'] / row['us']:.0f}%"


def _table(rows: list[Row], kv: str) -> Iterator[str]:
    wide = {_key(row): row for row in decodes(rows) if row["kv"] == row["dtype"]}
    yield from _HEADER
    for row in decodes(rows):
        other = wide.get(_key(row))
        if row["kv"] != kv or kept(row) or other is None:
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
    yield from ("### Decode on a 4-bit cache", "", _INTRO.format(name="TBQ4"), "", *_table(rows, "tbq4"))
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


def _fp8(rows: list[Row]) -> Iterator[str]:
    yield from ("### Decode on an fp8 cache", "", _INTRO.format(name="fp8"), "", *_table(rows, "fp8"), "")
    for row in decodes(rows):
        if "/" in row["kv"]:
            yield (
                f"- {row['q_heads']}/{row['kv_heads']} heads of {row['head_dim']}, {row['kv_len']:,} keys, K/V "
                f"{row['kv']}: {row['us']:.1f} us, {_percent(row)} of the read roof."
            )


def _rate(row: Row | None) -> str:
    return "" if row is None else f"{tflops(row):.0f}"


def whole_microseconds(row: Row | None) -> str:
    """Return a time without decimals; nothing without a row."""
    return "" if row is None else f"{row['us']:.0f}"


def _prompts(rows: list[Row]) -> Iterator[str]:
    """Yield whole prompts, each beside its peers."""
    impls = peers_of(rows)
    yield from _with_peers(_PROMPT_HEADER, impls)
    names = ("dtype", "q_heads", "kv_heads", "head_dim", "batch", "seqlen_q", "kv_len", "mask")
    peers = {(row["impl"], *(row[name] for name in names)): row for row in rows if row["impl"] in PEERS}
    for row in rows:
        if row["impl"] != "cuattn" or row["seqlen_q"] != row["kv_len"]:
            continue
        dims = f"{row['head_dim']}" + ("" if value_dim(row) == row["head_dim"] else f"/{value_dim(row)}")
        others = (peers.get((impl, *(row[name] for name in names))) for impl in impls)
        yield (
            f"| {row['q_heads']}/{row['kv_heads']} | {dims} | {row['dtype']} | {row['mask']} "
            f"| {row['batch']} x {row['seqlen_q']:,} | {whole_microseconds(row)} | {_rate(row)} "
            f"| {_percent(row) if row['roof_us'] else ''} | {' | '.join(_rate(other) or _NONE for other in others)} |"
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
        us = [
            whole_microseconds(row) for row in (wide, variants.get((False, False)), tbq4, variants.get((True, False)))
        ]
        cells = (us[0], _rate(wide), us[1], us[2], _rate(tbq4), us[3], speed)
        yield f"| {q_heads}/{kv_heads} | {head_dim} | {seqlen_q:,} | {kv_len:,} | {' | '.join(cells)} |"


def _prefill(rows: list[Row]) -> Iterator[str]:
    yield from (
        "### Prefill",
        "",
        _PROMPT_INTRO.format(flashinfer=", and FlashInfer (without lse)" if "flashinfer" in peers_of(rows) else ""),
        "",
        *_prompts(rows),
    )
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


def microseconds(row: Row | None) -> str:
    """Return a time with one decimal; nothing without a row."""
    return "" if row is None else f"{row['us']:.1f}"


def _decode(rows: list[Row]) -> Iterator[str]:
    found, impls = decodes(rows), peers_of(rows)
    peers = {(row["impl"], *problem(row)): row for row in rows if row["impl"] in PEERS}
    if found:
        dtype = {"bf16": "bfloat16", "fp16": "float16"}[found[0]["dtype"]]
        yield _DECODE_INTRO.format(dtype=dtype)
        if peers:
            yield _DECODE_PEERS.format(flashinfer=_DECODE_FLASHINFER if "flashinfer" in impls else "")
        yield from ("", *_with_peers(_DECODE_HEADER, impls, " us"))
    for row in found:
        if row["seqlen_q"] > 1 or not _records.is_plain(row):
            continue
        others = (microseconds(peers.get((impl, *problem(row)))) or _NONE for impl in impls)
        yield (
            f"| {row['q_heads']}/{row['kv_heads']} | {row['head_dim']} | {row['batch']} | {row['kv_len']:,} "
            f"| {row['us']:.1f} | {terabytes(row):.2f} | {_percent(row)} | {' | '.join(others)} |"
        )
    if lines := [*_drafts(found), *_options(found), *_warm(found)]:
        yield from ("", *lines)
    yield from (
        "",
        "All other inputs rotate past L2, CUDA-graph replay, medians." if any(map(is_warm, found)) else _COLD,
        *_host(rows),
    )


def _drafts(found: list[Row]) -> Iterator[str]:
    """Yield what several query tokens take, beside one."""
    several: dict[tuple[Any, ...], list[Row]] = {}
    for row in found:
        if row["seqlen_q"] > 1:
            several.setdefault(_key(row), []).append(row)
    one = {_key(row): row for row in found if row["seqlen_q"] == 1 and _records.is_plain(row)}
    for key, rows in several.items():
        if key in one:
            tokens = ", ".join(str(row["seqlen_q"]) for row in rows)
            times = ", ".join(f"{row['us'] / one[key]['us']:.2f}" for row in rows)
            yield f"- {_sizes(rows[0])}: {tokens} query tokens take {times} times as long as one."


def _options(found: list[Row]) -> Iterator[str]:
    """Yield unequal lengths and splits of a fixed size, each beside the default."""
    calls: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in found:
        if row["seqlen_q"] == 1:
            option = next((part for part in of_problem(row) if part.startswith(_records.OPTIONS)), "")
            rest = (part for part in of_problem(row) if part != option)
            calls.setdefault((_key(row), *rest), {})[option] = row
    for by_option in calls.values():
        default = by_option.pop("", None)
        if default is None or not by_option:
            continue
        lengths = [part for part in of_problem(default) if part.startswith("lengths ")]
        times = [f"`{_argument(name)}` {row['us']:.1f}" for name, row in by_option.items()]
        roof = [f"the read roof {default['roof_us']:.1f}"] if lengths else []
        where = ", ".join((_sizes(default), *lengths))
        yield f"- {where}: {', '.join((microseconds(default) + ' us', *times, *roof))}."


def _warm(found: list[Row]) -> Iterator[str]:
    """Yield what calls take whose keys are in L2."""
    by_heads: dict[tuple[int, ...], list[Row]] = {}
    for row in found:
        if is_warm(row):
            by_heads.setdefault((row["q_heads"], row["kv_heads"], row["head_dim"]), []).append(row)
    for (q_heads, kv_heads, head_dim), rows in by_heads.items():
        times = ", ".join(
            f"{row['kv_len']:,} keys{'' if row['kv'] == row['dtype'] else ' in ' + row['kv']} {microseconds(row)}"
            for row in rows
        )
        yield f"- {q_heads}/{kv_heads} heads of {head_dim}, one sequence, K and V in L2: {times} us."


def _argument(option: str) -> str:
    """Return a part of a note as it stands in a call."""
    name, _, value = option.partition(" ")
    return f"{name}={value or True}"


def _sizes(row: Row) -> str:
    heads = f"{row['q_heads']}/{row['kv_heads']} heads of {row['head_dim']}"
    return f"{heads}, {row['batch']} x {row['kv_len']:,} keys"


_TABLES: dict[str, Callable[[list[Row]], Iterator[str]]] = {
    "decode": _decode, "tbq4": _tbq4, "fp8": _fp8, "prefill": _prefill,
}  # fmt: skip


def source(record: Record) -> str:
    """Return where figures come from."""
    peers = f"; peers: {record.env['peers']}" if "peers" in record.env else ""
    return f"{record.source}, `bench/results/{record.path.name}`{peers}; written by `python -m bench readme`."


def block(record: Record) -> str:
    """Return what stands in README between the marks of a record's topic."""
    topic = _topic(record.path)
    head, *rest = _TABLES[topic](record.rows)
    lines = [head, *rest, "", source(record)]
    if topic in _PICTURES:
        caption = f"{_CAPTIONS[topic]} The picture names its records."
        lines[1:1] = ["", _PICTURES[topic], "", caption]
    if topic == "tbq4":
        lines += ["", _ERROR]
    return "\n".join(lines) + "\n"


def _topic(path: Path) -> str:
    topic = _records.topic_of(path)
    if topic not in TOPICS:
        raise ValueError(f"a record must be named *-DATE-{' or *-DATE-'.join(TOPICS)}.json, got {path.name}")
    return topic


def replaced(text: str, mark: str, new: str) -> str:
    """Return a text with something else between the marks of a name."""
    marks = re.compile(rf"(<!-- bench:{mark} -->\n).*?(<!-- /bench -->)", re.DOTALL)
    result, count = marks.subn(lambda match: match[1] + new + match[2], text)
    if count != 1:
        raise ValueError(f"the text must have one block that matches {marks.pattern!r}, got {count}")
    return result


def updated(text: str, path: Path) -> str:
    """Return README's text with the tables of a record, between the marks of its topic."""
    return replaced(text, _topic(path), block(_records.load(path)))


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
