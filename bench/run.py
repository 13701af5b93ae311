"""One run of the measurements: cases are checked, timed, and kept as rows of a record."""

from __future__ import annotations

import textwrap
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from cuattn import _arrays, _jit

from . import cases, checks, inputs, prefill_record, record, roofline, tiles, timing
from .progress import Progress
from .sampling import FULL, QUICK, Timing, sample

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

    from .cases import DecodeCase
    from .checks import Expected
    from .inputs import DecodeInputs
    from .sampling import Sampling
    from .tiles import Tile

# Of the memory that is free at the start; the rest is for outputs, workspaces and the check.
_MEMORY_FRACTION = 0.85
# What may go wrong with one case and leave the others: CuPy's errors are of the first kind, those of its memory pool of
# the second, and a plan that does not fit the GPU is of the third.
FAILURES = (RuntimeError, MemoryError, ValueError)
# Calls of a sample of the host's time, some 40 ms.
_HOST_CALLS = 2000


class Case(Protocol):
    """Anything with a name."""

    @property
    def name(self) -> str:
        """For filters."""


AnyCase = TypeVar("AnyCase", bound=Case)


@dataclass(frozen=True, slots=True)
class Variant:
    """How a case is run: options of `decode`, and tile; None for what it chooses."""

    num_splits: int | None = None
    split_size: int | None = None
    balance: bool = False
    tile: Tile | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Those of `decode`."""
        return {"num_splits": self.num_splits, "split_size": self.split_size, "balance": self.balance}

    @property
    def notes(self) -> tuple[str, ...]:
        """What a row says of a call that is another one than the default, and not only another plan."""
        size = () if self.split_size is None else (f"split_size {self.split_size}",)
        return (*size, *(("balance",) if self.balance else ()))

    def __str__(self) -> str:
        splits = () if self.num_splits is None else (f"{self.num_splits} splits",)
        tile = () if self.tile is None else (f"tile {self.tile}",)
        return ", ".join((*splits, *self.notes, *tile)) or "default"


class Beside(Protocol):
    """Times what goes beside the default variant of a case."""

    def __call__(
        self, arrays: DecodeInputs, expected: Expected, ours: record.Row, sampling: Sampling
    ) -> Sequence[record.Row]:
        """Return our row, perhaps with more notes, and those of others."""


class Run:
    """One run of a command: its rows, kept on disk from the first one on, and what failed.

    Parameters
    ----------
    options : argparse.Namespace
        Of the command line.
    topic : str
        Of the record.
    """

    def __init__(self, options: argparse.Namespace, topic: str) -> None:
        self.start = time.perf_counter()
        self.options = options
        self.sampling = QUICK if options.quick else FULL
        self.progress = Progress()
        self.rows: list[record.Row] = []
        self.failures: list[str] = []
        self.cupy = cupy = _arrays.import_cupy()
        # Processes that measure their first call come before this one occupies the GPU.
        if options.command == "decode":
            self.first_use()
        self.env = record.environment(options.commit)
        self.path = record.path_for(self.env, topic, options.out)
        self.env["copy_tb_s"] = round(roofline.copy_bandwidth(self.sampling) / 1e12, 3)
        self.reader = roofline.Reader()
        self._scratch = cupy.zeros(2**28, cupy.uint8)
        self._small_checks: set[DecodeCase] = set()
        self._roofs: dict[tuple[int, int, bool], Timing] = {}
        self.read_clocks("clocks_before")

    def selected(self, op: str, all_cases: Sequence[AnyCase]) -> list[AnyCase]:
        """Return the cases whose name, with the operation in front, holds the text asked for."""
        return [case for case in all_cases if self.options.cases in f"{op}-{case.name}"]

    def add(self, *rows: record.Row) -> None:
        """Keep rows."""
        self.rows += rows
        for line in rows:
            self.progress.say(" ".join(self.table([line]).splitlines()[1].split()))

    def table(self, rows: Sequence[record.Row]) -> str:
        """Return rows as text, with the columns of the topic."""
        return prefill_record.table(rows) if self.options.command == "prefill" else record.table(rows)

    def save(self) -> None:
        """Write what there is; a run that is cut short leaves the rows before."""
        if self.rows:
            record.write(self.path, self.env, self.rows)

    def case_done(self) -> None:
        """Keep what a case has found, and count it."""
        self.save()
        self.progress.done()

    def fail(self, what: str, error: Exception) -> None:
        """Note a failure."""
        text = f"{what}: {type(error).__name__}: {error}"
        self.progress.say(text)
        # A compiler's log is long, and has just been shown.
        self.failures.append(textwrap.shorten(text, 300))
        # After an illegal access every call fails, this one too, and ends the run.
        self.cupy.cuda.Device().synchronize()

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
                found = Timing(median, low, high, repeats, noisy=False)
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
        """Time the host's part of a call; the roof is a bare launch. The caller expects these cases."""
        # A sample of so many calls lasts long already.
        sampling = replace(self.sampling, at_most=2 * self.sampling.at_least)
        for case in self.selected("launch", cases.tiny_cases(self.options.dtype)):
            arrays = inputs.DecodeInputs(case, 1)
            bare = sample(timing.HostLoop(self.reader.call(self._scratch[:4096])).measure, sampling)
            for splits in (1, 2):
                loop = timing.HostLoop(arrays.calls(num_splits=splits)[0], _HOST_CALLS)
                found = sample(loop.measure, sampling)
                # The GPU ends soon after the host unless it was behind.
                behind = ("the GPU was slower",) if loop.queued > 0.1 else ()  # noqa: PLR2004
                notes = ("wall time in Python", *behind)
                self.add(record.row(case, found, op="launch", roof_us=bare.us, splits=splits, notes=notes))
            self.case_done()

    def available(self) -> int:
        """Return the bytes that inputs may take."""
        self.cupy.get_default_memory_pool().free_all_blocks()
        return int(_MEMORY_FRACTION * self.cupy.cuda.Device().mem_info[0])

    def sets(self, set_bytes: int) -> tuple[int, tuple[str, ...]]:
        """Return how many sets of inputs rotate, and a note if memory does not hold enough."""
        l2_bytes = self.env["l2_bytes"]
        sets = timing.num_sets(set_bytes, l2_bytes, self.available())
        return sets, () if timing.L2_FACTOR * l2_bytes < sets * set_bytes else ("partly in L2",)

    def decode(
        self,
        selected: Sequence[DecodeCase],
        variants_of: Callable[[DecodeCase], Sequence[Variant]],
        *,
        sampling: Sampling | None = None,
        beside: Beside | None = None,
    ) -> None:
        """Time decode cases in each of their variants, reading the same bytes, and what goes beside.

        The caller has told `progress` to expect these cases.

        Parameters
        ----------
        selected : sequence of DecodeCase
        variants_of : callable
        sampling : Sampling, optional
            Default: that of the run.
        beside : Beside, optional
        """
        for case in selected:
            sets, notes = self.sets(case.cache_bytes)
            if case.warm:
                sets, notes = 1, ()
            if sets == 0:
                self.progress.say(f"{case.name}: skipped, its caches of {case.cache_bytes / 1e9:.1f} GB do not fit")
            elif variants := variants_of(case):
                try:
                    self.check_small(case)
                    self.decode_case(case, sets, variants, notes, sampling=sampling or self.sampling, beside=beside)
                except FAILURES as error:
                    self.fail(case.name, error)
            self.case_done()

    def check_small(self, case: DecodeCase) -> None:
        """Check a case that is small enough for the reference, once for a kind of caches; the others do it anyway."""
        small = replace(case, batch=2, kv_len=1000)
        if case.formats != "raw16" and small not in self._small_checks:
            arrays = inputs.DecodeInputs(small, 1)
            arrays.check(arrays.by_reference())
            self._small_checks.add(small)

    def decode_case(
        self,
        case: DecodeCase,
        sets: int,
        variants: Sequence[Variant],
        notes: Sequence[str],
        *,
        sampling: Sampling,
        beside: Beside | None = None,
    ) -> None:
        """Time one case."""
        arrays = inputs.DecodeInputs(case, sets)
        # Without the ends of pages that no token is in.
        nbytes = min(case.cache_bytes, case.traffic[0])
        # Shapes and batches of a topic have the same few sizes, and random bytes are random bytes.
        key = (sets, nbytes, case.warm)
        if key not in self._roofs:
            self._roofs[key], shape = self.reader.roof([cache[:nbytes] for cache in arrays.caches], sampling)
            self.add(
                record.row(case, self._roofs[key], impl="read", roof_us=self._roofs[key].us, notes=(shape, *notes))
            )
        roof = self._roofs[key]
        expected = arrays.expected()
        plan = arrays.plan()
        for variant in variants:
            try:
                with tiles.substituted_tile(plan.config, variant.tile, plan.device):
                    found = self.decode_variant(arrays, variant, expected, sampling)
            except FAILURES as error:
                self.fail(f"{case.name}, {variant}", error)
                continue
            ours = replace(found, roof_us=roof.us, notes=(*found.notes, *notes))
            if beside is None or variant != Variant():
                self.add(ours)
            else:
                self.add(*beside(arrays, expected, ours, sampling))

    def decode_variant(
        self, arrays: DecodeInputs, variant: Variant, expected: Expected, sampling: Sampling
    ) -> record.Row:
        """Check and time one case in one variant."""
        plan = arrays.plan(**variant.options)
        config = plan.config
        tile = tiles.Tile.of(config)
        notes = [*variant.notes, f"tile {tile}"]
        if config.table_stride:
            notes.append(f"table stride {config.table_stride}")
        if variant.tile is not None:
            if tile != variant.tile:
                msg = f"the plan does not follow the tile table: {config}"
                raise RuntimeError(msg)
            report = _jit.build(config, plan.device.arch).report
            notes.append(f"{report.registers} registers, {report.spill_bytes} bytes spilled")
        before = arrays.check(expected, **variant.options)
        found = timing.replayed(arrays.calls(**variant.options), sampling)
        if arrays.out_bits() != before:
            msg = "the replayed graph gives other bits than the call"
            raise checks.WrongResultError(msg)
        return record.row(arrays.case, found, splits=plan.num_splits, notes=notes)

    def finish(self) -> int:
        """Read the clocks again, write the record, print the table and return the exit status."""
        self.read_clocks("clocks_after")
        self.env["seconds"] = round(time.perf_counter() - self.start, 1)
        if record.clocks_fell(self.env["clocks_before"], self.env["clocks_after"]):
            self.rows = [replace(line, notes=(*line.notes, "clocks fell")) for line in self.rows]
        self.save()
        prefill = self.options.command == "prefill"
        print(record.heading(self.env, prefill_record.ROOF) if prefill else record.heading(self.env))
        print(self.table([line for line in self.rows if line.impl not in ("read", "copy")]))
        if self.failures:
            print("failed:", *self.failures, sep="\n  ")
        print(self.path if self.rows else "no case was measured")
        # A sweep over tiles is expected to meet some that do not work.
        return int(not self.rows or (bool(self.failures) and self.options.command != "tiles"))
