"""``python -m bench``: times cuattn on the current GPU and writes a record of it."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import cuattn
from cuattn import _records

from . import cases, compare, decode, fp8, plot, prefill, readme, record, rivals, tbq4, tiles, timing
from .run import Run, Variant

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .cases import DecodeCase
    from .tiles import Tile


_WITHOUT_GPU = ("readme", "plot", "compare")


def topic(options: argparse.Namespace) -> str:
    """Return the topic of a record: the command, and what it was told beyond the default."""
    parts = [options.command]
    if options.dtype != "bfloat16":
        parts.append(cases.SHORT_DTYPES[options.dtype])
    if options.kv != "raw16":
        parts.append(options.kv.replace("/", "-"))
    if options.page_size is not None:
        parts.append(f"page{options.page_size}")
    return "-".join(parts)


def first_use_child(options: argparse.Namespace) -> int:
    """Print the times of this process's first call as JSON."""
    case = next(c for c in cases.tiny_cases(options.dtype) if c.name == options.cases)

    def prepare(cupy: Any) -> Callable[[], Any]:  # noqa: ANN401  CuPy has no types
        dtype = cases.DTYPES[case.dtype]
        q, out = (cupy.zeros(case.q_shape, dtype) for _ in range(2))
        k, v = (cupy.zeros(case.cache_shape, dtype) for _ in range(2))
        kv_len = cupy.asarray(np.full(case.batch, case.kv_len, np.int32))
        # One split: the decode kernel alone, without a merge.
        return partial(cuattn.decode, q, k, v, kv_len, num_splits=1, out=out)

    print(json.dumps(asdict(timing.first_call(prepare))))
    return 0


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise ValueError
    return number


def _splits(text: str) -> tuple[int | None, ...]:
    return tuple(None if part in ("auto", "None") else _positive(part) for part in text.split(","))


def _tiles(text: str) -> dict[int, tuple[Tile, ...]]:
    found: dict[int, tuple[Tile, ...]] = {}
    for part in text.split(","):
        head_dim, _, sizes = part.partition(":")
        tile_kv, num_stages, num_warps = (_positive(size) for size in sizes.split("x"))
        found[int(head_dim)] = (*found.get(int(head_dim), ()), tiles.Tile(tile_kv, num_stages, num_warps))
    return found


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument(
        "command", nargs="?", default="decode",
        choices=("full", *readme.TOPICS, "splits", "tiles", "first-use", "readme", "plot", "compare"),
        help="full: the topics decode, tbq4, fp8 and prefill, one after the other; decode:"
        " everything in 16 bits, beside FlashAttention-3, FlashInfer and PyTorch's attention if they are there"
        " (default); tbq4: everything in TBQ4, and its equal in 16 bits; fp8: decode"
        " on caches in fp8, and its equal in 16 bits; prefill:"
        " prompts and chunks, beside the same; splits: decode for several numbers of splits;"
        " tiles: decode with other tiles; first-use: the first call of this process, as JSON (decode runs it); readme:"
        " write README's tables from the newest records, without GPU; plot: draw pictures from them, without GPU;"
        " compare: say of each case of two records whether the second is the same, faster or slower, without GPU",
    )  # fmt: skip
    parser.add_argument("files", nargs="*", type=Path, metavar="A.json B.json", help="for compare: before and after")
    parser.add_argument("--dtype", default="bfloat16", choices=tuple(cases.DTYPES))
    parser.add_argument(
        "--kv", default="raw16", choices=tuple(cases.FORMATS), help="for splits and tiles: caches, K/V if they differ"
    )
    parser.add_argument("--page-size", type=_positive, metavar="N", help="paged caches, pages shuffled")
    parser.add_argument(
        "--cases", default="", metavar="TEXT", help="only cases whose name holds it: decode-d128-b1-kv8192"
    )
    parser.add_argument(
        "--all", action="store_true",
        help="for decode: also 16 sequences of 262144 keys and 64 of 131072 and 262144, 17 to 69 GB of K and V,"
        " beyond the two minutes that the others take",
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="few samples: to see that it runs, not to quote")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="default: bench/results, for plot docs/figures")
    parser.add_argument(
        "--results", type=Path, default=record.RESULTS, metavar="FOLDER",
        help="of records for readme and plot; default: bench/results",
    )  # fmt: skip
    parser.add_argument("--commit", metavar="HASH", help="of a tree without .git; ends in -dirty if it was changed")
    parser.add_argument("--splits", type=_splits, default=tiles.DEFAULT_SPLITS, metavar="auto,8,...", help="for splits")
    parser.add_argument(
        "--tiles", type=_tiles, metavar="128:32x3x4,...",
        help="for tiles: head_dim:keys x stages x warps",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    if options.tiles is None:
        options.tiles = tiles.DEFAULT_TILES[next((name for name in ("tbq4", "fp8") if name in options.kv), "raw16")]
    if options.kv != "raw16" and options.command not in ("splits", "tiles"):
        parser.error(f"--kv is for splits and tiles, not for {options.command}")
    if options.all and options.command not in ("decode", "full"):
        parser.error(f"--all is for decode, not for {options.command}")
    wanted = 2 if options.command == "compare" else 0
    if len(options.files) != wanted:
        parser.error(f"{options.command} takes {wanted or 'no'} files, got {len(options.files)}")
    if options.out is None:
        options.out = plot.FIGURES if options.command == "plot" else record.RESULTS
    return options


def without_gpu(options: argparse.Namespace) -> list[str]:
    """Do a command that reads records, and return what it says."""
    if options.command == "compare":
        return [compare.report(*map(_records.load, options.files))]
    if options.command == "plot":
        return plot.write(options.results, options.out)
    shown = readme.write(timing.ROOT / "README.md", options.results)
    rivals.write(timing.ROOT / "bench" / "README.md", options.results)
    return list(map(str, shown))


def sweep_cases(options: argparse.Namespace) -> list[DecodeCase]:
    """Return the cases of `splits` and `tiles`: some of `decode`, or those of `tbq4` or `fp8` with other caches."""
    if options.kv == "raw16":
        return cases.sweep_cases(options.dtype, options.page_size)
    of_topic = cases.tbq4_cases if "tbq4" in options.kv else cases.fp8_cases
    plain = [case for case in of_topic(options.dtype, options.page_size) if case.formats == "raw16"]
    return [replace(case, formats=options.kv) for case in plain]


def sweep(run: Run, variants_of: Callable[[DecodeCase], list[Variant]]) -> None:
    """Measure the cases of `splits` or `tiles`."""
    selected = run.selected("decode", sweep_cases(run.options))
    run.progress.expect(len(selected))
    run.decode(selected, variants_of)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status."""
    options = parse(arguments)
    if options.command == "first-use":
        return first_use_child(options)
    if options.command in _WITHOUT_GPU:
        try:
            print(*without_gpu(options), sep="\n")
        except (FileNotFoundError, ImportError, ValueError) as error:
            print(error, file=sys.stderr)
            return 1
        return 0
    if options.command == "full":
        return full(options)
    return measured(options)


def full(options: argparse.Namespace) -> int:
    """Measure all topics that README shows, say how long that took, and return the exit status."""
    start = time.perf_counter()
    failed = [measured(argparse.Namespace(**{**vars(options), "command": name})) for name in readme.TOPICS]
    print(f"everything took {time.perf_counter() - start:.0f} s")
    return max(failed)


def measured(options: argparse.Namespace) -> int:
    """Measure what one command says, write its record, and return the exit status."""
    run = Run(options, topic(options))
    try:
        if options.command == "tbq4":
            tbq4.measure(run)
        elif options.command == "fp8":
            fp8.measure(run)
        elif options.command == "prefill":
            prefill.measure(run)
        elif options.command == "decode":
            decode.measure(run)
        elif options.command == "splits":
            sweep(run, lambda _: [Variant(num_splits=splits) for splits in options.splits])
        else:
            sweep(run, lambda case: [Variant(tile=tile) for tile in (None, *options.tiles.get(case.head_dim, ()))])
    finally:
        run.save()
        run.progress.close()
    return run.finish()


if __name__ == "__main__":
    sys.exit(main())
