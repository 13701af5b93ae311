"""The topic tbq4: decode on caches in TBQ4 and in 16 bits, dequantize and decode, quantize, dequantize, append."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from cuattn import _arrays

from . import cases, checks, codec, decode, inputs, record, roofline, timing
from .run import FAILURES, Run, Variant

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .cases import AppendCase, CodecCase, DecodeCase
    from .sampling import Timing

# What one word of the roofs' kernels holds.
_WORD = 16
Job = tuple[str, Any, "Callable[[Run, roofline.Copier, Any], None]"]


def measure(run: Run) -> None:
    """Measure everything of the topic that is selected."""
    dtype, page_size = run.options.dtype, run.options.page_size
    selected = run.selected("decode", cases.tbq4_cases(dtype, page_size))
    others = [(op, case, function) for op, case, function in jobs(dtype, page_size) if run.selected(op, [case])]
    run.progress.expect(len(selected) + len(others))
    decode.build_kernels(selected)
    run.decode(selected, lambda _: [Variant()])
    copier = roofline.Copier()
    for op, case, function in others:
        run.available()
        try:
            function(run, copier, case)
        except FAILURES as error:
            run.fail(f"{op}-{case.name}", error)
        run.case_done()


def jobs(dtype: str = "bfloat16", page_size: int | None = None) -> Iterator[Job]:
    """Yield operation, case and function of everything but decode."""
    yield "separate", cases.DecodeCase(*cases.HEADLINE, dtype, page_size, formats="tbq4"), _separate
    for case in cases.codec_cases():
        yield case.op, case, _codec
    for new in cases.append_cases(dtype):
        yield "append", new, _append


def _copy_roof(run: Run, copier: roofline.Copier, nbytes: int, sets: int) -> tuple[Timing, str]:
    """Time a copy that reads and writes so many bytes together."""
    size = nbytes // 2 // _WORD * _WORD
    shape = (sets, size // 2)
    sources = inputs.normal(sets * size // 2, np.dtype(np.float16)).reshape(shape)
    return copier.roof(list(sources), list(_arrays.import_cupy().empty(shape, np.float16)), run.sampling)


def _separate(run: Run, copier: roofline.Copier, case: DecodeCase) -> None:
    """Dequantize K and V to 16 bits and decode these, both in one graph."""
    copied, read = cases.separate_traffic(case)
    copy_roof, _ = _copy_roof(run, copier, copied, 1)
    wide = inputs.random_caches(replace(case, formats="raw16"), 1)
    read_roof, _ = run.reader.roof(wide, run.sampling)
    del wide
    arrays = inputs.DecodeInputs(case, run.sets(case.cache_bytes)[0])
    calls = arrays.separate_calls()
    expected = arrays.expected()
    before = arrays.check(expected, call=calls[0])
    found = timing.replayed(calls, run.sampling)
    if arrays.out_bits() != before:
        msg = "the replayed graph gives other bits than the calls"
        raise checks.WrongResultError(msg)
    notes = ("dequantize of K, of V, decode of the results", "roof: a copy for the one, reading for the other")
    row = record.row(case, found, impl="separate", roof_us=copy_roof.us + read_roof.us, notes=notes)
    run.add(replace(row, bytes=copied + read))


def _codec(run: Run, copier: roofline.Copier, case: CodecCase) -> None:
    """Quantize or dequantize."""
    roof, shape = _copy_roof(run, copier, case.bytes, 1)
    run.add(record.codec_row(case, roof, impl="copy", roof_us=roof.us, notes=(shape,)))
    run.available()
    arrays = codec.CodecInputs(case)
    arrays.check()
    run.add(record.codec_row(case, timing.replayed([arrays.call], run.sampling), roof_us=roof.us))


def _append(run: Run, copier: roofline.Copier, case: AppendCase) -> None:
    """Append to K and V."""
    sets, notes = run.sets(case.bytes)
    roof, shape = _copy_roof(run, copier, case.bytes, sets)
    run.available()
    arrays = codec.AppendInputs(case, sets)
    capacity = arrays.capacity
    run.add(record.append_row(case, roof, capacity=capacity, impl="copy", roof_us=roof.us, notes=(shape, *notes)))
    arrays.check()
    found = timing.replayed(arrays.calls(), run.sampling)
    run.add(record.append_row(case, found, capacity=capacity, roof_us=roof.us, notes=notes))
