"""The topic fp8: decode on caches in fp8, and in 16 bits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import cases, decode
from .run import Variant

if TYPE_CHECKING:
    from .run import Run


def measure(run: Run) -> None:
    """Measure everything of the topic that is selected."""
    selected = run.selected("decode", cases.fp8_cases(run.options.dtype, run.options.page_size))
    run.progress.expect(len(selected))
    decode.build_kernels(selected)
    run.decode(selected, lambda _: [Variant()])
