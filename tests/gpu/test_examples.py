"""The scripts of ``examples`` on a GPU; each checks its own results."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("script", ["quick_start", "serving_loop", "shared_prefix", "tbq4_from_dlpack"])
def test_an_example_runs(script: str) -> None:
    command = [sys.executable, str(ROOT / "examples" / f"{script}.py")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    # The one that takes the arrays of whichever library there is does not say where they are.
    assert ("on the GPU" in result.stdout) == (script != "tbq4_from_dlpack")
