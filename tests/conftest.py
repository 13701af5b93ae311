"""Hypothesis profiles, and the rule for tests that need a GPU."""

import os
from functools import cache
from pathlib import Path

import pytest
from hypothesis import settings

GPU_TESTS = Path(__file__).parent / "gpu"

# JAX would take three quarters of the memory of a GPU that other processes of tests use as well.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

settings.register_profile("dev", max_examples=50, deadline=None)
# The same ones each time, so few do; runs by hand draw new ones.
settings.register_profile("ci", max_examples=15, deadline=None, derandomize=True)
settings.register_profile("gpu", max_examples=30, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))


@cache
def gpu_is_missing() -> str:
    """Return why tests that need a GPU cannot run; empty if they can."""
    try:
        from cupy import cuda
    except ImportError:
        return "needs a CUDA device: CuPy is not installed"
    return "" if cuda.is_available() else "needs a CUDA device: CuPy sees none"


class SkippedModule(pytest.Module):
    """A test module that is not even imported, as it may import CuPy."""

    def collect(self) -> list[pytest.Item]:
        """Skip the module with the reason."""
        pytest.skip(reason=gpu_is_missing(), allow_module_level=True)


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker."""
    config.addinivalue_line("markers", "gpu: needs a CUDA device; implied by the folder tests/gpu")


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Leave out the modules of tests/gpu where they cannot run."""
    if GPU_TESTS in module_path.parents and gpu_is_missing():
        return SkippedModule.from_parent(parent, path=module_path)
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of tests/gpu, and skip marked tests elsewhere where they cannot run."""
    for item in items:
        if GPU_TESTS in item.path.parents:
            item.add_marker(pytest.mark.gpu)
        elif item.get_closest_marker("gpu") and gpu_is_missing():
            item.add_marker(pytest.mark.skip(reason=gpu_is_missing()))


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Give the memory of a GPU test back: several processes of tests share a GPU, and pools keep what was freed."""
    if item.get_closest_marker("gpu") and not gpu_is_missing():
        from cupy import get_default_memory_pool

        get_default_memory_pool().free_all_blocks()
