"""How a time is taken: CUDA-graph replay, wall clock of the host, first use in a process; `sampling` says how often."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from cuattn import _arrays

from . import clock as sm_clock
from .sampling import sample

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import TracebackType

    from .sampling import Sampling, Timing

# Makes a graph of a CuPy stream and of what works on it; ``graph.launch(stream)`` replays it.
Capture = Callable[[Any, Callable[[], object]], Any]
ROOT = Path(__file__).resolve().parent.parent
# Inputs that rotate are to exceed the L2 cache by this factor, so that no call finds its own there.
L2_FACTOR = 3


def num_sets(set_bytes: int, l2_bytes: int, available_bytes: int) -> int:
    """Return how many sets of inputs rotate: more than `L2_FACTOR` times L2 together, as far as memory goes.

    Parameters
    ----------
    set_bytes : int
        Bytes that one call reads.
    l2_bytes, available_bytes : int
        Of the GPU.

    Returns
    -------
    int
        Zero if memory does not hold a single set.
    """
    return min(L2_FACTOR * l2_bytes // set_bytes + 1, available_bytes // set_bytes)


def graph_of(stream: Any, work: Callable[[], object]) -> Any:  # noqa: ANN401  CuPy has no types
    """Capture what work launches on a CuPy stream, the current one, as a CUDA graph."""
    stream.begin_capture()
    try:
        work()
    except BaseException:
        # Otherwise the stream stays in capture, and the device refuses to synchronize.
        with suppress(RuntimeError):
            stream.end_capture()
        raise
    return stream.end_capture()


class Replay:
    """Calls in a CUDA graph, back to back, timed by events: what the GPU takes, without the time of Python.

    The workspaces of the calls come from a memory pool of the replay's own. A pool hands the same block to one captured
    call after the other, which is right as they run in this order; but no one else may get these blocks while the graph
    can be replayed.

    Parameters
    ----------
    calls : sequence of callable
        One per set of inputs, without arguments; they write to arrays that exist, and do not synchronize.
    sample_us : float
        See `Sampling`; the sequence of calls is repeated to last so long.
    capture : callable
        See `Capture`.
    """

    def __init__(
        self,
        calls: Sequence[Callable[[], object]],
        sample_us: float,
        capture: Capture = graph_of,
    ) -> None:
        cupy = _arrays.import_cupy()
        self._cupy = cupy
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._pool = cupy.cuda.MemoryPool()
        self._events = cupy.cuda.Event(), cupy.cuda.Event()
        self._around = cupy.cuda.Event(), cupy.cuda.Event()
        self.clock = sm_clock.of_device(cupy.cuda.Device().id)
        # The inputs were written on another stream, and a non-blocking stream waits for none.
        cupy.cuda.Device().synchronize()
        with cupy.cuda.using_allocator(self._pool.malloc), self._stream:
            # Compiles and loads the kernels and fills the pool, none of which belongs in a capture.
            for call in calls:
                call()
            self._stream.synchronize()
            once = self._elapsed_us(lambda: [call() for call in calls], self._events)
        repeats = self._capture(capture, calls, sample_us / max(once, 1.0))
        # Short calls were behind Python then, and took its time; in a graph they take theirs.
        wanted = sample_us / (self.measure() * len(calls))
        if wanted > 2 * repeats:
            self._capture(capture, calls, wanted)
        for _ in range(2):
            self.measure()

    def _capture(self, capture: Capture, calls: Sequence[Callable[[], object]], repeats: float) -> int:
        """Make the graph, and return how often all calls are in it."""
        times = max(1, math.ceil(repeats))

        def work() -> None:
            for _ in range(times):
                for call in calls:
                    call()

        # The graph before, if there is one, is done, and gives back its memory.
        self._graph: Any = None
        with self._cupy.cuda.using_allocator(self._pool.malloc), self._stream:
            self._graph = capture(self._stream, work)
        self.num_calls = times * len(calls)
        return times

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stream.synchronize()
        self._graph = None
        self._pool.free_all_blocks()

    def _elapsed_us(self, work: Callable[[], object], events: tuple[Any, Any]) -> float:
        start, stop = events
        start.record(self._stream)
        work()
        stop.record(self._stream)
        stop.synchronize()
        return float(1e3 * self._cupy.cuda.get_elapsed_time(start, stop))

    def measure(self) -> float:
        """Replay the graph once, read the clock, and return the microseconds of one call."""
        found = []

        def between_marks() -> None:
            self.clock.mark(0)
            found.append(self._elapsed_us(lambda: self._graph.launch(self._stream), self._events))
            self.clock.mark(1)

        with self._stream:
            # Around the marks, so that what the host waits for counts in cycles and in microseconds.
            self.clock.read(self._elapsed_us(between_marks, self._around))
        return found[0] / self.num_calls


def replayed(
    calls: Sequence[Callable[[], object]],
    sampling: Sampling,
    capture: Capture = graph_of,
) -> Timing:
    """Time calls in a CUDA graph; see `Replay`."""
    with Replay(calls, sampling.sample_us, capture) as replay:
        return sample(replay.measure, sampling, replay.clock)


class HostLoop:
    """Wall time of asynchronous calls: what Python takes to launch.

    Attributes
    ----------
    queued : float
        Largest share of the calls, by time, that the GPU had not done when the last was launched. A GPU that keeps up
        has a share near 0; with a large one the host waited for the GPU, and the time is not that of Python.
    """

    def __init__(self, call: Callable[[], object], num_calls: int = 2000) -> None:
        self._call, self._num_calls = call, num_calls
        self._device = _arrays.import_cupy().cuda.Device()
        self.queued = 0.0
        call()
        self._device.synchronize()

    def measure(self) -> float:
        """Return the microseconds of one call."""
        call = self._call
        start = time.perf_counter()
        for _ in range(self._num_calls):
            call()
        launched = time.perf_counter()
        self._device.synchronize()
        self.queued = max(self.queued, (time.perf_counter() - launched) / (launched - start))
        return (launched - start) / self._num_calls * 1e6


@dataclass(frozen=True, slots=True)
class FirstCall:
    """Milliseconds of a new process up to its second call.

    Attributes
    ----------
    import_ms : float
        ``import cupy``.
    context_ms : float
        First use of the device, and arrays.
    call_ms : float
        First call, synchronized: everything that cuattn does once.
    again_ms : float
        Second call, synchronized.
    parts_ms : dict
        What took its time within the first call; not all of it.
    """

    import_ms: float
    context_ms: float
    call_ms: float
    again_ms: float
    parts_ms: dict[str, float]

    @property
    def compiled(self) -> bool:
        """Whether NVRTC ran, rather than the kernel coming from the cache."""
        return "compile" in self.parts_ms


def first_call(prepare: Callable[[Any], Callable[[], object]]) -> FirstCall:
    """Time the first call of this process, which must not have touched the GPU.

    Parameters
    ----------
    prepare : callable
        Takes the cupy module, makes the arrays without launching a kernel, and returns the call.

    Returns
    -------
    FirstCall
    """
    from cuattn import _jit, _nvrtc

    parts: dict[str, float] = {}

    def timed(label: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: object, **kwargs: object) -> Any:  # noqa: ANN401  what the function returns
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                parts[label] = parts.get(label, 0.0) + (time.perf_counter() - start) * 1e3

        return wrapper

    for module, name, label in (
        (_nvrtc, "version", "NVRTC start"),
        (_nvrtc, "compile_cubin", "compile"),
        (_jit, "fingerprint", "hash of the sources"),
        (_jit, "Kernel", "module load"),
    ):
        setattr(module, name, timed(label, getattr(module, name)))

    marks = [time.perf_counter()]

    def mark() -> None:
        marks.append(time.perf_counter())

    import cupy

    mark()
    device = cupy.cuda.Device()
    call = prepare(cupy)
    device.synchronize()
    mark()
    for _ in range(2):
        call()
        device.synchronize()
        mark()
    imported, context, first, again = (1e3 * (stop - start) for start, stop in pairwise(marks))
    return FirstCall(imported, context, first, again, parts)


def first_calls(arguments: Sequence[str], repeats: int) -> Iterator[FirstCall]:
    """Yield first calls of new processes: `repeats` that compile, each with an empty cache, then as many that load.

    Parameters
    ----------
    arguments : sequence of str
        What ``python -m bench first-use`` takes to run the wanted case; it prints one `FirstCall` as JSON.
    repeats : int

    Yields
    ------
    FirstCall

    Raises
    ------
    RuntimeError
        If a process fails, or compiles where it should load or the reverse.
    """
    command = [sys.executable, "-m", "bench", "first-use", *arguments]
    with tempfile.TemporaryDirectory() as folder:
        for index in range(2 * repeats):
            compiles = index < repeats
            # The last of the caches filled here is the one that the second half loads from.
            cache = Path(folder) / str(min(index, repeats - 1))
            environment = {k: v for k, v in os.environ.items() if k != "CUATTN_DUMP"}
            environment["CUATTN_CACHE_DIR"] = str(cache)
            result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)  # noqa: S603  this program
            if result.returncode:
                # The last line says what a traceback is about; the head of a long message is what is shown.
                reason = (result.stderr.strip() or "no message").splitlines()[-1]
                msg = f"{' '.join(command[2:])} failed: {reason}\n{result.stderr}"
                raise RuntimeError(msg)
            found = FirstCall(**json.loads(result.stdout.splitlines()[-1]))
            if found.compiled != compiles:
                msg = f"{' '.join(command)} should {'compile' if compiles else 'load'}, and did not: {found}"
                raise RuntimeError(msg)
            yield found
