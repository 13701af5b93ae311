"""The topic prefill: prompts, long prompts with a window and chunks against caches, beside others and a product."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from cuattn import _arrays, _plan

from . import kernels, peers, prefill_record, timing
from .cases import DTYPES
from .checks import WrongResultError
from .inputs import normal
from .prefill_cases import prefill_cases
from .prefill_inputs import PrefillInputs
from .run import FAILURES, Run
from .sampling import QUICK, Sampling, Timing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .prefill_cases import PrefillCase
    from .prefill_inputs import Expected

# FLOPs of 16 bits in the time of one of float32.
_FLOAT_COST = 6
# Calls of up to 40 ms, about a hundred of them, that keep all SMs busy: few samples of each, and short pauses for the
# clock, so that everything takes less than two minutes.
SAMPLING = Sampling(at_least=10, at_most=15, sample_us=5000.0, pause_s=0.03, patience_s=0.1)


def measure(run: Run) -> None:
    """Measure everything of the topic that is selected."""
    selected = run.selected("prefill", prefill_cases(run.options.dtype, run.options.page_size))
    build_kernels(selected)
    torch, run.env["peers"] = peers.find()
    run.progress.say(f"peers: {run.env['peers']}")
    topic = _Topic(run, torch)
    run.progress.expect(len(selected))
    for case in selected:
        try:
            topic.case(case)
        except FAILURES as error:
            run.fail(f"prefill-{case.name}", error)
        run.case_done()


def build_kernels(selected: Sequence[PrefillCase]) -> None:
    """Compile what cases need and the disk cache lacks; what does not fit is left to its case to say."""
    device = _arrays.device(_arrays.import_cupy().cuda.Device().id)
    configs: dict[_plan.PrefillConfig | _plan.TiledPrefillConfig, None] = {}
    for case in selected:
        with suppress(ValueError):
            configs[_plan.choose_prefill(case.problem, device).config] = None
    kernels.build_missing(configs, device.arch)


class _Topic:
    """What the cases of a run share: PyTorch if there is one, and the roof of each dtype."""

    def __init__(self, run: Run, torch: peers.Torch | None) -> None:
        self._run, self._torch = run, torch
        self._sampling = QUICK if run.options.quick else SAMPLING
        self._flop_us: dict[str, float] = {}

    def case(self, case: PrefillCase) -> None:
        """Check and time one case, and its peers."""
        run = self._run
        roof_us = case.flops * self._roof(case.dtype)
        sets, notes = run.sets(case.read_bytes)
        if sets == 0:
            run.progress.say(f"{case.name}: skipped, its arrays of {case.read_bytes / 1e9:.1f} GB do not fit")
            return
        arrays = PrefillInputs(case, sets)
        expected = arrays.expected()
        found = self._cuattn(arrays, expected)
        config = arrays.plan().config
        tile = f"tile {config.tile_q}x{config.tile_kv} of {config.kernel}"
        others, missing = self._peers(arrays, expected) if case.has_peers else ({}, ())
        run.add(
            prefill_record.row(case, found, roof_us=roof_us, notes=(tile, *notes, *missing)),
            *(
                prefill_record.row(case, other.timing, impl=impl, roof_us=roof_us, notes=(*other.notes, *notes))
                for impl, other in others.items()
            ),
        )

    def _roof(self, dtype: str) -> float:
        """Return the microseconds of a FLOP in a cuBLAS product; zero if there is no cuBLAS.

        One of float32 to its accuracy on tensor cores is derived: three of TF32, each at half the rate of 16 bits.
        """
        if dtype == "float32":
            return _FLOAT_COST * self._roof("bfloat16")
        if dtype not in self._flop_us:
            self._flop_us[dtype] = 0.0
            try:
                found = self._product(dtype)
            # CuPy imports cuBLAS when it is first needed.
            except (*FAILURES, ImportError, TypeError) as error:
                self._run.progress.say(f"no roof in {dtype}: {type(error).__name__}: {error}")
            else:
                line = prefill_record.product_row(dtype, found)
                self._run.add(line)
                self._flop_us[dtype] = line.us / line.flops
        return self._flop_us[dtype]

    def _product(self, dtype: str) -> Timing:
        self._run.available()
        shape = (prefill_record.PRODUCT_SIZE,) * 2
        size = shape[0] * shape[1]
        a, b = (normal(size, DTYPES[dtype], seed).reshape(shape) for seed in (0, size))
        call, capture = peers.product(self._torch, a, b, _arrays.import_cupy().empty(shape, DTYPES[dtype]))
        return timing.replayed([call], self._sampling, capture)

    def _cuattn(self, arrays: PrefillInputs, expected: list[Expected]) -> Timing:
        calls = arrays.calls()
        arrays.poison()
        arrays.check(expected, *calls[0]())
        before = arrays.out()
        arrays.poison()
        found = timing.replayed(calls, self._sampling)
        if not arrays.is_out(before):
            msg = "the replayed graph gives other bits than the call"
            raise WrongResultError(msg)
        return found

    def _peers(self, arrays: PrefillInputs, expected: list[Expected]) -> tuple[dict[str, peers.Found], tuple[str, ...]]:
        """Time peers that are there and right; notes say why one is left out."""
        torch, case = self._torch, arrays.case
        if torch is None:
            return {}, ()

        def forms_of(impl: str) -> peers.Forms:
            return {"": [torch.attention(impl, *rows, causal=case.causal) for rows in arrays.rows]}

        def check(found: object) -> None:
            arrays.check(expected, torch.result(found, (*case.q_shape[:-1], case.value_dim), DTYPES[case.dtype]))

        return peers.timed(torch, forms_of, check, self._sampling)
