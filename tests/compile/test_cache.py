"""The disk cache: its key, its atomicity, and what happens when it is damaged or cannot be written."""

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from cuattn import _jit, _nvrtc, _plan

ROOT = Path(__file__).resolve().parents[2]
CONFIG = _plan.MergeConfig(_plan.Dtype.FP32, _plan.Dtype.FP16, 64)
ARCH = "sm_80"


@pytest.fixture(autouse=True)
def cache_dir(tmp_path, monkeypatch):
    monkeypatch.setenv("CUATTN_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_second_build_finds_the_cubin_and_its_report():
    first, second = _jit.build(CONFIG, ARCH), _jit.build(CONFIG, ARCH)
    assert first.compiled
    assert not second.compiled
    assert first.path == second.path
    assert first.report == second.report
    assert json.loads(first.path.with_suffix(".json").read_text())["config"] == repr(CONFIG)


def test_configs_and_architectures_have_cubins_of_their_own():
    others = (
        (_plan.MergeConfig(_plan.Dtype.FP32, _plan.Dtype.BF16, 64), ARCH),
        (CONFIG, "sm_86"),
    )
    paths = {_jit.cubin_path(CONFIG, ARCH), *(_jit.cubin_path(*other) for other in others)}
    assert len(paths) == 3


@pytest.mark.parametrize("file", ["common/softmax.cuh", "decode.cu", "kv/raw16.cuh"])
def test_an_edit_of_any_source_gives_another_cubin(tmp_path, monkeypatch, file):
    before = _jit.cubin_path(CONFIG, ARCH)
    copy = tmp_path / "cuda_src"
    shutil.copytree(_jit.CUDA_SRC, copy)
    assert _jit.fingerprint(copy) == _jit.fingerprint()
    (copy / file).write_text((copy / file).read_text() + "// edited\n")
    monkeypatch.setattr(_jit, "fingerprint", lambda _fingerprint=_jit.fingerprint: _fingerprint(copy))
    assert _jit.cubin_path(CONFIG, ARCH) != before


def test_another_compiler_version_gives_another_cubin(monkeypatch):
    before = _jit.cubin_path(CONFIG, ARCH)
    monkeypatch.setattr(_nvrtc, "version", lambda: (99, 9))
    assert _jit.cubin_path(CONFIG, ARCH) != before


@pytest.mark.parametrize("damage", ["truncated", "other bytes", "no report", "report is not JSON"])
def test_a_damaged_entry_is_compiled_again(damage):
    whole = _jit.build(CONFIG, ARCH)
    data, report = whole.path.read_bytes(), whole.path.with_suffix(".json")
    if damage == "truncated":
        whole.path.write_bytes(data[: len(data) // 2])
    elif damage == "other bytes":
        whole.path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    elif damage == "no report":
        report.unlink()
    else:
        report.write_text("{")
    again = _jit.build(CONFIG, ARCH)
    assert again.compiled
    assert again.path.read_bytes() == data
    assert not _jit.build(CONFIG, ARCH).compiled


def test_a_cache_that_cannot_be_written_is_replaced_by_a_private_folder(tmp_path, monkeypatch):
    blocker = tmp_path / "file"
    blocker.write_text("")
    monkeypatch.setenv("CUATTN_CACHE_DIR", str(blocker / "cache"))
    built = _jit.build(CONFIG, ARCH)
    assert built.path.read_bytes()[:4] == b"\x7fELF"
    assert blocker not in built.path.parents


@pytest.mark.parametrize("home", ["", "relative"])
def test_without_a_home_the_cache_is_private_and_a_relative_xdg_folder_is_ignored(monkeypatch, home):
    monkeypatch.delenv("CUATTN_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", home)
    monkeypatch.setattr(Path, "home", lambda: Path("/somewhere"))
    assert _jit.cache_dir() == Path("/somewhere/.cache/cuattn")

    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    assert _jit.build(CONFIG, ARCH).path.is_relative_to(_jit._private_dir())


def test_a_cached_cubin_can_be_read_by_other_users():
    built = _jit.build(CONFIG, ARCH)
    assert [path.stat().st_mode & 0o777 for path in (built.path, built.path.with_suffix(".json"))] == [0o644] * 2


def test_threads_and_processes_that_build_at_once_agree(cache_dir):
    config = "_plan.MergeConfig(_plan.Dtype.FP32, _plan.Dtype.FP16, 64)"
    code = f"from cuattn import _jit, _plan; print(_jit.build({config}, {ARCH!r}).path)"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True, env=os.environ.copy()
        )
        for _ in range(2)
    ]
    built = []
    threads = [threading.Thread(target=lambda: built.append(_jit.build(CONFIG, ARCH))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    paths = {str(b.path) for b in built} | {p.communicate(timeout=120)[0].strip() for p in processes}
    assert len(built) == 4
    assert len(paths) == 1
    left_over = [p.name for p in cache_dir.rglob("*") if p.is_file() and p.suffix not in (".cubin", ".json")]
    assert left_over == []


def test_an_empty_log_leaves_the_bytes_of_python_alone(monkeypatch):
    """Without ptxas' report the log is one byte, the terminator, and NVRTC writes it."""
    monkeypatch.setattr(_nvrtc, "_OPTIONS", ("-std=c++17",))
    assert _nvrtc.compile_cubin("", name="nothing", arch=ARCH, include=_jit.CUDA_SRC).log == ""
    assert [bytes([i])[0] for i in range(256)] == list(range(256))


def test_dump_keeps_source_log_and_cubin_also_of_what_is_cached(tmp_path, monkeypatch):
    _jit.build(CONFIG, ARCH)
    monkeypatch.setenv("CUATTN_DUMP", str(tmp_path / "dump"))
    built = _jit.build(CONFIG, ARCH)
    suffixes = {p.suffix for p in (tmp_path / "dump" / ARCH).iterdir()}
    assert suffixes == {".cu", ".log", ".cubin", ".json"}
    assert built.path.with_suffix(".cu").name in {p.name for p in (tmp_path / "dump" / ARCH).iterdir()}


def test_a_compile_error_shows_kernel_config_and_log_and_survives_pickling():
    import pickle

    with pytest.raises(_nvrtc.CompileError) as caught:
        _nvrtc.compile_cubin("int x = nothing;", name="broken.cu", arch=ARCH, include=_jit.CUDA_SRC, config="Config(7)")
    for part in ("broken.cu", "Config(7)", "nothing", "undefined"):
        assert part in str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)  # noqa: S301  our own bytes
