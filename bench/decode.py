"""The topic decode: one query token and several, equal lengths and others, beside others where they can be called."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cuattn import _arrays, _plan

from . import decode_cases, kernels, peers, record
from .cases import DTYPES, tiny_cases
from .inputs import to_host
from .run import Run, Variant
from .sampling import FULL, QUICK

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .cases import DecodeCase
    from .checks import Expected
    from .inputs import DecodeInputs
    from .sampling import Sampling

# The pauses of peers that draw much power are short, so that everything takes two minutes.
SAMPLING = replace(FULL, pause_s=0.03, patience_s=0.1)
# Calls of 0.2 to 4 ms and, with --all, of up to 29, which are most of the time that all take.
LONG_SAMPLING = replace(SAMPLING, at_least=10, at_most=30)
LONG_BYTES = 2**29


def measure(run: Run) -> None:
    """Measure everything of the topic that is selected."""
    options = run.options
    cases = decode_cases.decode_cases(options.dtype, options.page_size, include_large=options.all)
    selected = run.selected("decode", cases)
    run.progress.expect(len(selected) + len(run.selected("launch", tiny_cases(options.dtype))))
    run.launch()
    build_kernels(selected)
    torch = None
    if any(case.has_peers for case in selected):
        torch, run.env["peers"] = peers.find()
        run.progress.say(f"peers: {run.env['peers']}")

    def beside(arrays: DecodeInputs, expected: Expected, ours: record.Row, sampling: Sampling) -> list[record.Row]:
        return with_peers(torch, arrays, expected, ours, sampling)

    for case in selected:
        run.decode([case], variants_of, sampling=sampling_of(case, quick=options.quick), beside=beside)


def variants_of(case: DecodeCase) -> list[Variant]:
    """Return the ways to run a case, the default first."""
    if case.lengths:
        return [Variant(), Variant(balance=True)]
    fixed = case.seqlen_q == 1 and (case.batch, case.kv_len) in decode_cases.INVARIANT_SIZES
    return [Variant(), *(Variant(split_size=size) for size in decode_cases.SPLIT_SIZES if fixed)]


def sampling_of(case: DecodeCase, *, quick: bool) -> Sampling:
    """Return how often a case is timed."""
    if quick:
        return QUICK
    return LONG_SAMPLING if case.traffic[0] > LONG_BYTES else SAMPLING


def build_kernels(selected: Sequence[DecodeCase]) -> None:
    """Compile what cases need and the disk cache lacks; what does not fit is left to its case to say."""
    device = _arrays.device(_arrays.import_cupy().cuda.Device().id)
    configs: dict[_plan.DecodeConfig, None] = {}
    for case in selected:
        for variant in variants_of(case):
            with suppress(ValueError):
                configs[_plan.decode_plan(case.problem, device, **variant.options).config] = None
    kernels.build_missing(configs, device.arch)


def with_peers(
    torch: peers.Torch | None, arrays: DecodeInputs, expected: Expected, ours: record.Row, sampling: Sampling
) -> list[record.Row]:
    """Time peers that are there and right, on the same caches.

    Parameters
    ----------
    torch : Torch, optional
    arrays : DecodeInputs
    expected : Expected
    ours : Row
    sampling : Sampling

    Returns
    -------
    list of Row
        Ours, with a note of each peer that is left out, and theirs.
    """
    case = arrays.case
    if torch is None or not case.has_peers:
        return [ours]

    def forms_of(impl: str) -> peers.Forms:
        calls = [torch.decode(impl, *arguments) for arguments in arrays.arguments()]
        return {form: [each[form] for each in calls] for form in calls[0]}

    def check(found: Any) -> None:  # noqa: ANN401  a tensor
        expected.check(to_host(torch.result(found, case.q_shape, DTYPES[case.dtype])))

    others, missing = peers.timed(torch, forms_of, check, sampling)
    partly = tuple(note for note in ours.notes if note == "partly in L2")
    return [
        replace(ours, notes=(*ours.notes, *missing)),
        *(
            record.row(case, other.timing, impl=impl, roof_us=ours.roof_us, notes=(*other.notes, *partly))
            for impl, other in others.items()
        ),
    ]
