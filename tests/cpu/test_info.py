"""The command line, with simulated GPUs."""

from types import SimpleNamespace

from cuattn import _arrays, _info, _plan
from cuattn.__main__ import main


def simulate(monkeypatch, devices):
    def describe(ordinal):
        if isinstance(devices[ordinal], str):
            raise RuntimeError(devices[ordinal])  # noqa: TRY004  as the real one
        return devices[ordinal]

    runtime = SimpleNamespace(getDeviceCount=lambda: len(devices))
    cuda = SimpleNamespace(is_available=lambda: True, runtime=runtime)
    monkeypatch.setattr(_arrays, "import_cupy", lambda: SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(_arrays, "device", describe)


def test_an_old_gpu_keeps_its_number_and_its_reason(monkeypatch, capsys):
    old = "GTX has compute capability 6.1; cuattn needs 8.0 (Ampere) or newer"
    simulate(monkeypatch, [old, _plan.DEVICES["sm_90a"]])
    assert _info.devices() == ([(1, _plan.DEVICES["sm_90a"])], old)
    assert main(["info"]) == 0
    printed = capsys.readouterr().out
    assert "cuda:1  NVIDIA H200 (sm_90a)" in printed
    assert "cuda:0" not in printed
    assert old in printed


def test_info_and_demo_say_plainly_that_there_is_no_gpu(monkeypatch, capsys):
    monkeypatch.setattr(_info, "devices", lambda: ([], "CuPy sees no CUDA device"))
    assert main(["info"]) == 0
    assert "no GPU: CuPy sees no CUDA device" in capsys.readouterr().out
    assert main(["demo"]) == 0
    printed = capsys.readouterr().out
    assert "device: CPU (CuPy sees no CUDA device)" in printed
    assert "all results agree with the reference" in printed


def test_demo_fails_when_a_result_is_wrong(monkeypatch, capsys):
    from cuattn import _demo

    monkeypatch.setattr(_info, "devices", lambda: ([], "none"))
    monkeypatch.setattr(_demo, "merge", lambda parts, lse: (parts[0], lse[0]))
    assert main(["demo"]) == 1
    assert "WRONG" in capsys.readouterr().out
