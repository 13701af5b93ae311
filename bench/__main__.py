"""``python -m bench``: times cuattn on the current GPU and writes a record of it."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import cuattn
from cuattn import _arrays, _jit

from . import cases, record, roofline, timing

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cuattn._arrays import Array

    from .cases import DecodeCase, DecodeInputs, Tile

# Of the memory that is free at the start; the rest is for outputs, workspaces and the check.
_MEMORY_FRACTION = 0.85


@dataclass(frozen=True, slots=True)
class Variant:
    """How a case is run: number of splits and tile, None for what `decode` chooses."""

    num_splits: int | None = None
    tile: Tile | None = None

    def __str__(self) -> str:
        parts = [
            "" if self.num_splits is None else f"{self.num_splits} splits",
            "" if self.tile is None else f"tile {self.tile}",
        ]
        return ", ".join(filter(None, parts)) or "default"


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Run:
    """One run of a command: its rows, kept on disk from the first one on, and what failed.

    Parameters
    ----------
    options : argparse.Namespace
        As returned by `parse`.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.sampling = timing.QUICK if options.quick else timing.FULL
        self.rows: list[record.Row] = []
        self.failures: list[str] = []
        self.cupy = cupy = _arrays.import_cupy()
        # Processes that measure their first call come before this one occupies the GPU.
        if options.command == "decode":
            self.first_use()
        self.env = record.environment(options.commit)
        self.path = record.path_for(self.env, topic(options), options.out)
        self.env["copy_tb_s"] = round(roofline.copy_bandwidth(self.sampling) / 1e12, 3)
        self.reader = roofline.Reader()
        self._scratch = cupy.zeros(2**28, cupy.uint8)
        self.read_clocks("clocks_before")

    def selected(self, op: str, all_cases: Sequence[DecodeCase]) -> list[DecodeCase]:
        """Return the cases whose name, with the operation in front, holds the text asked for."""
        return [case for case in all_cases if self.options.cases in f"{op}-{case.name}"]

    def add(self, *rows: record.Row) -> None:
        """Keep rows."""
        self.rows += rows
        for line in rows:
            _progress(" ".join(record.table([line]).splitlines()[1].split()))

    def save(self) -> None:
        """Write what there is; a run that is cut short leaves the rows before."""
        if self.rows:
            record.write(self.path, self.env, self.rows)

    def fail(self, what: str, error: Exception) -> None:
        """Note a failure."""
        text = f"{what}: {type(error).__name__}: {error}"
        _progress(text)
        # A compiler's log is long, and has just been shown.
        self.failures.append(textwrap.shorten(text, 300))

    def read_clocks(self, key: str) -> None:
        """Read the clocks under load."""
        device = self.cupy.cuda.Device()
        read = self.reader.call(self._scratch)

        def keep_busy() -> None:
            for _ in range(16):
                read()
            device.synchronize()

        driver, self.env[key] = record.read_clocks(device.pci_bus_id, keep_busy)
        self.env["driver"] = driver or self.env["driver"]

    def first_use(self) -> None:
        """Time the first call of a new process: kernel compiled, and kernel loaded from the cache."""
        repeats = 1 if self.options.quick else 3
        for case in self.selected("first-use", cases.tiny_cases(self.options.dtype)):
            arguments = ["--cases", case.name, "--dtype", case.dtype]
            try:
                calls = list(timing.first_calls(arguments, repeats))
            except RuntimeError as error:
                self.fail(f"first-use-{case.name}", error)
                continue
            for op, part in (("compile", calls[:repeats]), ("load", calls[repeats:])):
                times = [1e3 * call.call_ms for call in part]
                low, median, high = (float(x) for x in np.percentile(times, (5, 50, 95)))
                found = timing.Timing(median, low, high, repeats, noisy=False)
                middle = sorted(part, key=lambda call: call.call_ms)[repeats // 2]
                parts = ", ".join(f"{name} {ms:.1f} ms" for name, ms in middle.parts_ms.items())
                notes = (
                    f"of it {parts}",
                    f"before it import cupy {middle.import_ms:.0f} ms, context {middle.context_ms:.0f} ms",
                    f"next call {middle.again_ms:.2f} ms",
                    f"{repeats} processes",
                )
                self.add(record.row(case, found, op=op, splits=1, notes=notes))

    def launch(self) -> None:
        """Time the host's part of a call; the roof is a bare launch."""
        # A sample of 2000 calls lasts long already.
        sampling = replace(self.sampling, at_most=2 * self.sampling.at_least)
        for case in self.selected("launch", cases.tiny_cases(self.options.dtype)):
            inputs = cases.DecodeInputs(case, cases.normal(case.cache_elements, cases.DTYPES[case.dtype]), 1)
            bare = timing.sample(timing.HostLoop(self.reader.call(self._scratch[:4096])).measure, sampling)
            for splits in (1, 2):
                loop = timing.HostLoop(inputs.calls(splits)[0])
                found = timing.sample(loop.measure, sampling)
                # The GPU ends soon after the host unless it was behind.
                behind = ("the GPU was slower",) if loop.queued > 0.1 else ()  # noqa: PLR2004
                notes = ("wall time in Python", *behind)
                self.add(record.row(case, found, op="launch", roof_us=bare.us, splits=splits, notes=notes))
        self.save()

    def decode(self, variants_of: Callable[[DecodeCase], Sequence[Variant]]) -> None:
        """Time every selected decode case in each of its variants, and reading the same bytes."""
        options = self.options
        selected = self.selected("decode", cases.decode_cases(options.dtype, options.page_size))
        selected = [case for case in selected if variants_of(case)]
        if not selected:
            return
        l2_bytes = self.env["l2_bytes"]
        self.cupy.get_default_memory_pool().free_all_blocks()
        available = int(_MEMORY_FRACTION * self.cupy.cuda.Device().mem_info[0])
        sets = {case: timing.num_sets(case.cache_bytes, l2_bytes, available) for case in selected}
        for case in selected:
            if sets[case] == 0:
                _progress(f"{case.name}: skipped, its caches of {case.cache_bytes / 1e9:.1f} GB do not fit")
        largest = max(sets[case] * case.cache_elements for case in selected)
        buffer = cases.normal(largest, cases.DTYPES[options.dtype])
        for case in selected:
            if sets[case]:
                self.decode_case(case, buffer, sets[case], variants_of(case))
                self.save()
                self.cupy.get_default_memory_pool().free_all_blocks()

    def decode_case(self, case: DecodeCase, buffer: Array, sets: int, variants: Sequence[Variant]) -> None:
        """Time one case."""
        inputs = cases.DecodeInputs(case, buffer, sets)
        roof, shape = self.reader.roof(inputs.caches, self.sampling)
        note = () if timing.L2_FACTOR * self.env["l2_bytes"] < sets * case.cache_bytes else ("partly in L2",)
        self.add(record.row(case, roof, impl="read", roof_us=roof.us, notes=(shape, *note)))
        expected = inputs.expected()
        plan = inputs.plan()
        for variant in variants:
            try:
                with cases.substituted_tile(plan.config, variant.tile, plan.device):
                    found = self.decode_variant(inputs, variant, expected)
            # CuPy's errors are of the first kind, those of its memory pool of the second.
            except (RuntimeError, MemoryError) as error:
                self.fail(f"{case.name}, {variant}", error)
                # After an illegal access every call fails, this one too, and ends the run.
                self.cupy.cuda.Device().synchronize()
            else:
                self.add(replace(found, roof_us=roof.us, notes=(*found.notes, *note)))

    def decode_variant(self, inputs: DecodeInputs, variant: Variant, expected: cases.DecodeExpected) -> record.Row:
        """Check and time one case in one variant."""
        plan = inputs.plan(variant.num_splits)
        config = plan.config
        notes = []
        if variant.tile is not None:
            if cases.Tile(config.tile_kv, config.num_stages, config.num_warps) != variant.tile:
                msg = f"the plan does not follow the tile table: {config}"
                raise RuntimeError(msg)
            if config.smem_bytes > plan.device.smem_per_block:
                msg = f"{config.smem_bytes} bytes of shared memory, the GPU has {plan.device.smem_per_block}"
                raise RuntimeError(msg)
            report = _jit.build(config, plan.device.arch).report
            notes.append(f"tile {variant.tile}, {report.registers} registers, {report.spill_bytes} bytes spilled")
        before = inputs.check(expected, variant.num_splits)
        found = timing.replayed(inputs.calls(variant.num_splits), self.sampling)
        if inputs.out_bits() != before:
            msg = "the replayed graph gives other bits than the call"
            raise cases.WrongResultError(msg)
        return record.row(inputs.case, found, splits=plan.num_splits, notes=notes)

    def finish(self) -> int:
        """Read the clocks again, write the record, print the table and return the exit status."""
        self.read_clocks("clocks_after")
        if record.clocks_fell(self.env["clocks_before"], self.env["clocks_after"]):
            self.rows = [replace(line, notes=(*line.notes, "clocks fell")) for line in self.rows]
        self.save()
        print(record.heading(self.env))
        print(record.table([line for line in self.rows if line.impl != "read"]))
        if self.failures:
            print("failed:", *self.failures, sep="\n  ")
        print(self.path if self.rows else "no case was measured")
        # A sweep over tiles is expected to meet some that do not work.
        return int(not self.rows or (bool(self.failures) and self.options.command != "tiles"))


def topic(options: argparse.Namespace) -> str:
    """Return the topic of a record: the command, and what it was told beyond the default."""
    parts = [options.command]
    if options.dtype != "bfloat16":
        parts.append(record.SHORT_DTYPES[options.dtype])
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
    tiles: dict[int, tuple[Tile, ...]] = {}
    for part in text.split(","):
        head_dim, _, sizes = part.partition(":")
        tile_kv, num_stages, num_warps = (_positive(size) for size in sizes.split("x"))
        tiles[int(head_dim)] = (*tiles.get(int(head_dim), ()), cases.Tile(tile_kv, num_stages, num_warps))
    return tiles


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument(
        "command", nargs="?", default="decode", choices=("decode", "splits", "tiles", "first-use"),
        help="decode: everything (default); splits: decode for several numbers of splits; tiles: decode with other"
        " tiles; first-use: the first call of this process, as JSON (decode runs it)",
    )  # fmt: skip
    parser.add_argument("--dtype", default="bfloat16", choices=tuple(cases.DTYPES))
    parser.add_argument("--page-size", type=_positive, metavar="N", help="paged caches, pages shuffled")
    parser.add_argument(
        "--cases", default="", metavar="TEXT", help="only cases whose name holds it: decode-d128-b1-kv8192"
    )
    parser.add_argument("--quick", action="store_true", help="few samples: to see that it runs, not to quote")
    parser.add_argument("--out", type=Path, default=record.RESULTS, metavar="FOLDER", help="default: bench/results")
    parser.add_argument("--commit", metavar="HASH", help="of a tree without .git; ends in -dirty if it was changed")
    parser.add_argument("--splits", type=_splits, default=cases.DEFAULT_SPLITS, metavar="auto,8,...", help="for splits")
    parser.add_argument(
        "--tiles", type=_tiles, default=cases.DEFAULT_TILES, metavar="128:32x3x4,...",
        help="for tiles: head_dim:keys x stages x warps",
    )  # fmt: skip
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status."""
    options = parse(arguments)
    if options.command == "first-use":
        return first_use_child(options)
    run = Run(options)
    try:
        if options.command == "decode":
            run.launch()
            run.decode(lambda _: [Variant()])
        elif options.command == "splits":
            run.decode(lambda _: [Variant(num_splits=splits) for splits in options.splits])
        else:
            run.decode(lambda case: [Variant(tile=tile) for tile in (None, *options.tiles.get(case.head_dim, ()))])
    finally:
        run.save()
    return run.finish()


if __name__ == "__main__":
    sys.exit(main())
