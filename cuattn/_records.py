"""Records of measurements, ``bench/results/<gpu>-<date>-<topic>.json``: found and read. `bench` writes them."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

Row: TypeAlias = dict[str, Any]
FOLDER = Path(__file__).resolve().parent.parent / "bench" / "results"
"""Where a checkout has its records; the folder is missing beside an installed package."""
DECODE_TOPICS = ("tbq4", "fp8", "decode")
"""Topics with decode, in the order in which a format is looked for: one run that has several formats comes first."""
# What makes a row a measurement of a known problem; bench/record.py has all of a row.
_ROW_KEYS = (
    "op", "impl", "dtype", "kv", "head_dim", "q_heads", "kv_heads", "batch", "seqlen_q", "kv_len", "mask", "us",
    "us_p5", "us_p95", "bytes", "flops", "roof_us", "note",
)  # fmt: skip
OPTIONS = ("split_size ", "balance")
"""How parts of a note begin that are options of a call of decode."""
SPECIAL = ("lengths ", "warm", *OPTIONS)
"""And all that make a time another one than its columns say, beside rows kept in 16 bits."""
_NAME = re.compile(r".+-(?P<date>\d{4}-\d{2}-\d{2})-(?P<topic>.+?)(?:-(?P<number>\d+))?\.json")


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """A record that was read.

    Attributes
    ----------
    path : Path
    env : dict
        Machine and software.
    rows : list of dict
        Those with every key of a row and a time.
    left_out : int
        How many are not: trials may have rows of another kind.
    """

    path: Path
    env: dict[str, Any]
    rows: list[Row]
    left_out: int = 0

    @property
    def source(self) -> str:
        """GPU, date and commit, as they stand beside every figure that comes from here."""
        changed = "" if self.env["clean"] else " (changed)"
        return f"{self.env['gpu']}, {self.env['date'][:10]}, commit {self.env['commit'][:7]}{changed}"


def _is_row(row: object) -> bool:
    if not isinstance(row, dict) or not all(key in row for key in _ROW_KEYS):
        return False
    return isinstance(row["us"], int | float) and row["us"] > 0


def load(path: Path) -> Record:
    """Read a record.

    Parameters
    ----------
    path : Path

    Returns
    -------
    Record

    Raises
    ------
    ValueError
        If the file cannot be read or is no record; the message names it and what is wrong.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path} must be JSON, as python -m bench writes it: {error}") from error
    env, rows = (content.get(key) if isinstance(content, dict) else None for key in ("env", "rows"))
    if not isinstance(env, dict) or not isinstance(rows, list):
        raise ValueError(f'{path} must be a record, {{"env": {{...}}, "rows": [...]}}, as python -m bench writes it')  # noqa: TRY004  a file
    for key, kind in (("gpu", str), ("date", str), ("commit", str), ("clean", bool)):
        if not isinstance(env.get(key), kind):
            raise ValueError(f"{path} must name {key} in env as {kind.__name__}, got {env.get(key)!r}")  # noqa: TRY004
    whole = [row for row in rows if _is_row(row)]
    return Record(path, env, whole, len(rows) - len(whole))


def topic_of(path: Path) -> str | None:
    """Return the topic that a file's name says, None if it is not named as a record."""
    match = _NAME.fullmatch(path.name)
    return None if match is None else match["topic"]


def same_gpu(a: str, b: str) -> bool:
    """Whether two names are those of one GPU, with or without the maker's."""
    first, second = (name.lower().removeprefix("nvidia").strip() for name in (a, b))
    return first == second


def newest(folder: Path, topic: str, gpu: str | None = None) -> Path | None:
    """Return the newest record of a topic, None if there is none; of one day the one with the highest number.

    Parameters
    ----------
    folder : Path
    topic : str
    gpu : str, optional
        Only records of this one, for which they are read.
    """
    found = [(match, path) for path in folder.glob("*.json") if (match := _NAME.fullmatch(path.name))]
    dated = [(match["date"], int(match["number"] or 1), path) for match, path in found if match["topic"] == topic]
    for *_, path in sorted(dated, reverse=True):
        if gpu is None or same_gpu(load(path).env["gpu"], gpu):
            return path
    return None


def is_plain(row: Row) -> bool:
    """Whether the columns of a row say all: equal lengths, no rows kept in 16 bits, default splits, cold inputs."""
    parts = row["note"].split("; ")
    return not any(part.startswith(SPECIAL) or part.endswith("kept in 16 bits") for part in parts)


def of_gpu(gpu: str, folder: Path = FOLDER) -> list[Record]:
    """Return the newest records of decode of a GPU, in the order of `DECODE_TOPICS`."""
    paths = (newest(folder, topic, gpu) for topic in DECODE_TOPICS)
    return [load(path) for path in paths if path is not None]
