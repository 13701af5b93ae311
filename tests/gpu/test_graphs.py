"""CUDA graphs of whole decode steps: `append` of the newest tokens of every sequence, then `decode` over all tokens."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from itertools import chain, product
from typing import Any

import cupy
import numpy as np
import pytest
from gpu.helpers import assert_same_bits, nans, occupy, planes, poison
from strategies import DTYPES, UNUSED_ENTRIES, AppendProblem
from tolerance import assert_append, assert_call, assert_rows, sizes_of

import cuattn
from cuattn import reference

FORMATS = ("raw16", "tbq4", "fp8")
GROUP = 4
CAPACITY = 2048
# The first is empty; the others have edges before them: of a page and of a tile, of one and of several steps of all
# warps, which are edges of parts, and of all parts at their smallest.
STARTS = (0, 14, 29, 125, 253, 1021)
NOBODY, EVERYBODY = (), tuple(range(len(STARTS)))
STEPS = 8
GROWING = (NOBODY,) * STEPS
LEAVING = (NOBODY, (1, 5), (0, 1, 5), EVERYBODY, (2,), NOBODY, (5,), NOBODY)
# Room for a long conversation, and lengths from one token to all of it.
LONG = 144_128
LENGTHS = (1, 2, 31, 32, 33, 1000, 4095, 4096, 4097, 65_537, LONG - 1, LONG)
# From here on the law of many keys holds, and the same-precision result would take long.
MANY_KEYS = 4000
# Bytes after a workspace.
GUARD = 256
every_step = pytest.mark.parametrize(("kv_format", "tokens"), list(product(FORMATS, (1, 4))))
balanced_or_not = pytest.mark.parametrize("balance", [False, True], ids=["even", "balanced"])
# Without more combinations, each of which takes seconds of the reference.
both_kinds = pytest.mark.parametrize(
    ("balance", "given"), [(False, False), (True, True)], ids=["even-pool", "balanced-workspace"]
)
given_or_not = pytest.mark.parametrize("given", [False, True], ids=["pool", "workspace"])


def of(kv_format: str, tokens: int, schedule: Sequence[tuple[int, ...]] = GROWING, **fields: Any) -> AppendProblem:
    """Return the tokens of sequences that have some at first, and new ones in each step in which they are not away."""
    steps = (sum(b not in away for away in schedule) for b in range(len(STARTS)))
    kv_len = tuple(start + tokens * n for start, n in zip(STARTS, steps, strict=True))
    fields = {
        "kv_len": kv_len, "num_kv_heads": 2, "head_dim": 128, "page_size": 16, "capacity": CAPACITY, "means": True,
        "in_dtype": "bfloat16", "dtype": "bfloat16", **fields,
    }  # fmt: skip
    return AppendProblem(**fields, seqlen_new=max(fields["kv_len"]), k_format=kv_format, v_format=kv_format)


def as_bytes(x: cupy.ndarray) -> cupy.ndarray:
    """Return a view in which NaN and elements of any dtype are copied and compared as they are."""
    return x.view(cupy.uint8)


class Step:
    """One step of a batch, captured, and all that it reads and writes.

    The caches hold noise where no token was appended, NaN among it, so that a read of anything else shows.

    Parameters
    ----------
    problem : AppendProblem
        All tokens there will be.
    tokens : int
        New ones of a step, each with a query.
    num_queries : int
        Steps with queries of their own.
    given : bool
        Whether the step has a workspace of its caller's, of exactly the bytes that the plan says.
    balance : bool
    with_lse : bool
        The lse is allocated in the call.
    """

    def __init__(
        self,
        problem: AppendProblem,
        tokens: int,
        num_queries: int = STEPS,
        *,
        given: bool = False,
        balance: bool = False,
        with_lse: bool = True,
    ) -> None:
        self.problem, self.tokens, self.with_lse = problem, tokens, with_lse
        self.bases = {name: cupy.asarray(x) for name, x in problem.bases().items()}
        (self.k_new, self.v_new, *self.caches, self.kv_len), self.paging = problem.arguments(self.bases)
        self.table = problem.page_table()
        batch, dtype = len(problem.kv_len), DTYPES[problem.dtype]
        shape = (batch, tokens, problem.num_kv_heads, problem.head_dim)
        self.k_token, self.v_token = (nans(shape, dtype) for _ in "kv")
        shape = (batch, tokens, problem.num_kv_heads * GROUP, problem.head_dim)
        rng = np.random.default_rng([problem.seed, tokens])
        self.host_queries = rng.standard_normal((num_queries, *shape)).astype(dtype)
        self.queries = cupy.asarray(self.host_queries)
        self.q, self.out = (nans(shape, dtype) for _ in "qo")
        self.options: dict[str, Any] = {"balance": balance}
        plan = cuattn.plan_decode(self.q, *self.caches, self.kv_len, **self.paging, **self.options)
        assert plan.workspace_bytes > 0
        self.guarded, self.num_bytes = cupy.full(plan.workspace_bytes + GUARD, 0xFF, np.uint8), plan.workspace_bytes
        self.workspace = {"workspace": self.guarded[: self.num_bytes]} if given else {}
        self.stream = cupy.cuda.Stream(non_blocking=True)
        # What is allocated in a capture must stay allocated as long as the graph is launched: it has a pool of its own.
        self.pool = cupy.cuda.MemoryPool()
        self.lse: Any = None

    def fill(self, lengths: Sequence[int]) -> None:
        """Append the first tokens of each sequence."""
        for b, (length, final) in enumerate(zip(lengths, self.problem.kv_len, strict=True)):
            one, end = slice(b, b + 1), self.problem.seqlen_new - final + length
            if length > 0:
                table = self.paging["page_table"][one]
                cuattn.append(self.k_new[one, :end], self.v_new[one, :end], *self.caches, length, page_table=table)

    def call(self) -> Any:
        """Append and decode."""
        cuattn.append(self.k_token, self.v_token, *self.caches, self.kv_len, **self.paging)
        return cuattn.decode(
            self.q, *self.caches, self.kv_len, **self.paging, **self.options, **self.workspace,
            return_lse=self.with_lse, out=self.out,
        )  # fmt: skip

    def capture(self, allocator: AbstractContextManager[None] | None = None, mode: int | None = None) -> None:
        """Capture the call; by default what it allocates is from a pool of the graph's own."""
        self.kv_len.fill(0)
        self.call()  # compiles and loads the kernels, which a capture must not do, and appends nothing
        cupy.cuda.Device().synchronize()
        with self.stream, allocator or cupy.cuda.using_allocator(self.pool.malloc):
            self.stream.begin_capture(mode)
            result = self.call()
            self.graph = self.stream.end_capture()
        if self.with_lse:
            _, self.lse = result

    def results(self) -> list[cupy.ndarray]:
        """Return what a replay writes beside the caches."""
        return [self.out] if self.lse is None else [self.out, self.lse]

    def launch(self, i: int, lengths: Sequence[int]) -> None:
        """Replay with the queries of a step, for lengths that include the new tokens.

        A sequence of length zero has no page either, and NaN for its tokens and queries.
        """
        with self.stream:
            poison(*self.results(), self.q, self.k_token, self.v_token)
            is_empty = np.array(lengths)[:, None] == 0
            self.paging["page_table"].set(np.where(is_empty, np.int32(UNUSED_ENTRIES[0]), self.table))
            self.kv_len.set(np.array(lengths, np.int32))
            for b, (length, final) in enumerate(zip(lengths, self.problem.kv_len, strict=True)):
                if length > 0:
                    as_bytes(self.q)[b] = as_bytes(self.queries)[i, b]
                    end, count = self.problem.seqlen_new - final + length, min(length, self.tokens)
                    for token, new in ((self.k_token, self.k_new), (self.v_token, self.v_new)):
                        as_bytes(token)[b, self.tokens - count :] = as_bytes(new)[b, end - count : end]
            self.graph.launch(self.stream)
        self.stream.synchronize()

    def result(self) -> tuple[np.ndarray, np.ndarray]:
        """Return out and lse of a replay, after asserting that they have the bits of the same call by itself."""
        want = nans(self.out.shape, self.out.dtype)
        _, lse = cuattn.decode(
            self.q, *self.caches, self.kv_len, **self.paging, **self.options, return_lse=True, out=want
        )
        want, lse = cupy.asnumpy(want), cupy.asnumpy(lse)
        got = cupy.asnumpy(self.out), lse if self.lse is None else cupy.asnumpy(self.lse)
        assert_same_bits(got, (want, lse), f"lengths {self.kv_len}, {self.options} of {self.problem}")
        assert (self.guarded[self.num_bytes :] == 0xFF).all()
        return got

    def check(self, i: int, lengths: Sequence[int]) -> None:
        """Assert the error law of what `launch` gave."""
        got = self.result()
        (_, _, *caches, _), paging = self.problem.arguments(self.to_host())
        assert_call((self.host_queries[i], *caches, np.array(lengths, np.int32)), paging, got)

    def to_host(self) -> dict[str, np.ndarray]:
        """Return copies of the caches and what belongs to them."""
        return {name: cupy.asnumpy(x) for name, x in self.bases.items()}

    def move_pages(self, order: np.ndarray) -> None:
        """Put page p where page ``order[p]`` was, in the caches and in the table."""
        with self.stream:
            from_where = cupy.asarray(np.argsort(order))
            for plane in planes(self.caches):
                as_bytes(plane)[...] = as_bytes(plane)[from_where]
        is_page = (self.table >= 0) & (self.table < len(order))
        self.table = np.where(is_page, order[np.where(is_page, self.table, 0)], self.table).astype(np.int32)


def replay(step: Step, schedule: Sequence[tuple[int, ...]], before: Callable[[], None] = lambda: None) -> None:
    """Launch and check every step of a schedule; `before` each, something may happen."""
    step.fill(STARTS)
    step.capture()
    held = list(STARTS)
    for i, away in enumerate(schedule):
        before()
        lengths = [0 if b in away else n + step.tokens for b, n in enumerate(held)]
        step.launch(i, lengths)
        step.check(i, lengths)
        held = [length or n for length, n in zip(lengths, held, strict=True)]


@every_step
@balanced_or_not
@given_or_not
def test_a_replayed_step_follows_lengths_that_grow(kv_format: str, tokens: int, *, balance: bool, given: bool) -> None:
    """Over edges of pages, tiles and parts; then the caches are those of one call with all tokens."""
    problem = of(kv_format, tokens)
    step = Step(problem, tokens, balance=balance, given=given)
    replay(step, GROWING)
    assert_append(problem, step.to_host())


@every_step
@both_kinds
def test_a_replayed_step_follows_pages_that_move(kv_format: str, tokens: int, *, balance: bool, given: bool) -> None:
    problem = of(kv_format, tokens, seed=1)
    step = Step(problem, tokens, balance=balance, given=given)
    rng, num_pages = np.random.default_rng(2), len(planes(step.caches)[0])
    places = [np.arange(num_pages)]  # where every page is now

    def move() -> None:
        order = rng.permutation(num_pages)
        step.move_pages(order)
        places.append(order[places[-1]])

    replay(step, GROWING, before=move)
    got = step.to_host()
    np.testing.assert_array_equal(got["page_table"], step.table)
    back = {name: x[places[-1]] for name, x in got.items() if name.endswith(("cache", "codes", "norms"))}
    assert_append(problem, got | back | {"page_table": problem.page_table()})


@every_step
@both_kinds
def test_sequences_of_a_replayed_step_leave_and_come_back(
    kv_format: str, tokens: int, *, balance: bool, given: bool
) -> None:
    """One or several, or all of them for one step; meanwhile they have no pages in the table."""
    problem = of(kv_format, tokens, LEAVING, seed=2)
    step = Step(problem, tokens, balance=balance, given=given)
    replay(step, LEAVING)
    assert_append(problem, step.to_host())


def numbers_of(cache: Any, page_table: np.ndarray) -> np.ndarray:
    """Return the only sequence of a cache, in 16 bits or in TBQ4, as the numbers that its rows are, one by one."""
    if isinstance(cache, cuattn.Tbq4Array):
        cache = reference.dequantize(cache.codes, cache.norms, mean=cache.mean)
    return cache.astype(np.float64)[page_table[0]].reshape(1, -1, *cache.shape[2:])


def assert_law_of_many_keys(
    arrays: tuple[Any, ...], options: dict[str, Any], numbers: Sequence[np.ndarray], got: tuple[Any, ...]
) -> None:
    """Assert a stricter law than that of errors in less time, as its terms hardly count with thousands of keys.

    Rows in TBQ4 have no further terms; and 16-bit ones not that of the same-precision result.
    """
    q, *_, kv_len = arrays
    exact = q, *numbers, kv_len
    ref = same = reference.decode(*exact, return_lse=True)
    if isinstance(arrays[1], cuattn.Tbq4Array):
        same = reference.decode_same_precision(*arrays, **options, return_lse=True)
    (sizes,) = sizes_of(exact, {})
    assert_rows(got, same, ref, dtype=q.dtype, **asdict(sizes), context=f"{kv_len} keys, q {q.shape}")


@pytest.mark.parametrize(("kv_format", "tokens"), list(product(("raw16", "tbq4"), (1, 4))))
def test_a_graph_of_a_long_cache_is_right_at_every_length(kv_format: str, tokens: int) -> None:
    """Its parts are as many as all keys want, and most of them empty for most lengths."""
    problem = of(kv_format, tokens, kv_len=(LONG,), num_kv_heads=1, page_size=64, capacity=LONG, seed=3,
                 in_dtype="float16", dtype="float16")  # fmt: skip
    step = Step(problem, tokens, num_queries=len(LENGTHS))
    step.fill((LONG,))
    (_, _, *caches, _), paging = problem.arguments(step.to_host())
    numbers = [numbers_of(x, step.table) for x in caches]
    before = [x.copy() for x in planes(step.caches)]
    step.capture()
    for i, length in enumerate(LENGTHS):
        # Without an append the newest tokens would be NaN.
        for position in range(max(0, length - tokens), length):
            for plane in planes(step.caches):
                as_bytes(plane)[int(step.table[0, position // 64]), position % 64].fill(0xFF)
        cupy.cuda.Device().synchronize()
        step.launch(i, (length,))
        arrays, got = (step.host_queries[i], *caches, np.array([length], np.int32)), step.result()
        if length < MANY_KEYS:
            assert_call(arrays, paging, got)
        else:
            assert_law_of_many_keys(arrays, paging, numbers, got)
        assert all((as_bytes(x) == as_bytes(y)).all() for x, y in zip(planes(step.caches), before, strict=True))


@every_step
@balanced_or_not
def test_a_captured_step_neither_allocates_nor_waits_nor_copies(kv_format: str, tokens: int, *, balance: bool) -> None:
    """With memory for all that it gives; CUDA itself refuses to capture a call that would wait for the GPU."""
    step = Step(of(kv_format, tokens), tokens, balance=balance, given=True, with_lse=False)
    step.fill(STARTS)
    none = cupy.cuda.using_allocator(lambda _: pytest.fail("an allocation in a capture"))
    step.capture(none, cupy.cuda.runtime.streamCaptureModeGlobal)
    assert "MEMCPY" not in step.graph.debug_dot_str().upper()
    lengths = [n + tokens for n in STARTS]
    step.launch(0, lengths)
    step.check(0, lengths)


class Repeats:
    """All steps of a growing batch, enqueued at once, as often as one likes.

    Parameters
    ----------
    step : Step
        Is captured.
    """

    def __init__(self, step: Step) -> None:
        self.step = step
        step.fill(STARTS)
        step.capture()
        self.caches = [x.copy() for x in planes(step.caches)]
        self.results = [[x.copy() for x in step.results()] for _ in range(STEPS)]

    def restore(self) -> None:
        """Make everything as it was before the first step, and all results NaN."""
        poison(*self.step.results(), *(x for results in self.results for x in results))
        self.step.kv_len.set(np.array(STARTS, np.int32))
        for plane, was in zip(planes(self.step.caches), self.caches, strict=True):
            as_bytes(plane)[...] = as_bytes(was)

    def enqueue(self, i: int) -> None:
        """Enqueue one step and copies of its results, without a word from the host."""
        step = self.step
        end = step.problem.seqlen_new - step.tokens * (STEPS - 1 - i)
        with step.stream:
            step.kv_len += step.tokens
            as_bytes(step.q)[...] = as_bytes(step.queries)[i]
            for token, new in ((step.k_token, step.k_new), (step.v_token, step.v_new)):
                as_bytes(token)[...] = as_bytes(new)[:, end - step.tokens : end]
            step.graph.launch(step.stream)
            for copy, x in zip(self.results[i], step.results(), strict=True):
                as_bytes(copy)[...] = as_bytes(x)

    def written(self) -> list[bytes]:
        """Return the results of all steps, and the caches."""
        return [cupy.asnumpy(x).tobytes() for x in (*chain(*self.results), *planes(self.step.caches))]


def run(*repeats: Repeats) -> list[list[bytes]]:
    """Return what is written by all steps of all batches, enqueued in turn before the first of them may start."""
    for batch in repeats:
        batch.restore()
    cupy.cuda.Device().synchronize()
    blocker, gate = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Event()
    with blocker:
        occupy(rounds=200)
        gate.record(blocker)
    for batch in repeats:
        batch.step.stream.wait_event(gate)
    for i, batch in product(range(STEPS), repeats):
        batch.enqueue(i)
    cupy.cuda.Device().synchronize()
    return [batch.written() for batch in repeats]


@every_step
@both_kinds
def test_two_graphs_at_once_give_what_each_gives_alone(
    kv_format: str, tokens: int, *, balance: bool, given: bool
) -> None:
    pair = [Repeats(Step(of(kv_format, tokens, seed=seed), tokens, balance=balance, given=given)) for seed in (4, 5)]
    alone = [run(repeats)[0] for repeats in pair]
    for repeats in pair:
        repeats.step.check(STEPS - 1, [n + tokens * STEPS for n in STARTS])
    assert alone[0] != alone[1]
    for _ in range(5):
        assert run(*pair) == alone
