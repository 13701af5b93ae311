"""The scripts of ``examples``, on NumPy arrays; tests/gpu runs them on a GPU."""

import runpy
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import cuattn
from cuattn import _arrays

FOLDER = Path(__file__).parents[2] / "examples"
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "array_module")


@pytest.fixture
def run(monkeypatch):
    """Run a script as a program, without a GPU and without the libraries that another producer would need."""
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in ("cupy", "jax", "torch"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "array_module", raising=False)
    return lambda script: runpy.run_path(str(FOLDER / f"{script}.py"), run_name="__main__")


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("quick_start", ["on the CPU", "out (2, 8, 64) float16, lse (2, 8) float32", "decode on NVIDIA H200"]),
        ("serving_loop", ["on the CPU", "lengths now [49, 17, 59]; all agree with a dense cache"]),
        ("shared_prefix", ["5 users read 261 keys a KV head, not 1061"]),
        ("tbq4_from_dlpack", ["arrays of NumPy (neither JAX nor PyTorch is installed)", "79,200 bytes", "307,200"]),
    ],
)
def test_an_example_runs_and_says_what_it_found(script, told, run, capsys):
    run(script)
    printed = capsys.readouterr().out
    for text in told:
        assert text in printed


class Stream:
    """A stream whose capture notes calls of `append` and `decode` without making them, as a real one does."""

    def __init__(self, monkeypatch):
        self.notes, self.launches = None, 0
        for name in ("append", "decode"):
            monkeypatch.setattr(cuattn, name, partial(self.call, getattr(cuattn, name)))

    def call(self, function, *args, **options):
        if self.notes is None:
            return function(*args, **options)
        self.notes.append(partial(function, *args, **options))
        return None

    def begin_capture(self):
        self.notes = []

    def end_capture(self):
        notes, self.notes = self.notes, None

        def launch(stream):
            assert stream is self
            self.launches += 1
            for note in notes:
                note()

        return SimpleNamespace(launch=launch)

    def synchronize(self):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


def test_the_serving_loop_is_right_when_every_step_is_one_replay(run, monkeypatch, capsys):
    stream = Stream(monkeypatch)
    cuda = SimpleNamespace(
        Stream=lambda **_: stream, Device=lambda: stream, using_allocator=nullcontext,
        MemoryPool=lambda: SimpleNamespace(malloc=None),
    )  # fmt: skip
    xp = SimpleNamespace(zeros=np.zeros, array=np.array, asarray=np.asarray, cuda=cuda)
    module = SimpleNamespace(xp=xp, WHERE="GPU", to_host=np.asarray)
    monkeypatch.setitem(sys.modules, "array_module", module)

    run("serving_loop")

    assert "on the GPU: 12 steps" in capsys.readouterr().out
    assert stream.launches == 12


# The function of cuattn that gives something else than it should, by example.
FAULTS = {"quick_start": "prefill", "serving_loop": "append", "shared_prefix": "merge", "tbq4_from_dlpack": "quantize"}


@pytest.mark.parametrize("script", SCRIPTS)
def test_an_example_notices_a_wrong_result(script, run, monkeypatch):
    right = getattr(cuattn, FAULTS[script])

    def of_other_values(first, *rest, **options):
        return right(2 * _arrays.as_array("first", first), *rest, **options)

    monkeypatch.setattr(cuattn, FAULTS[script], of_other_values)
    with pytest.raises(AssertionError):
        run(script)


def test_readme_names_every_example():
    text = (FOLDER.parent / "README.md").read_text()
    assert [script for script in SCRIPTS if f"`examples/{script}.py`" not in text] == []
