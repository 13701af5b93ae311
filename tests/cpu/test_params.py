"""The NumPy mirrors of the parameter structs, and the prelude."""

import re

import numpy as np
import pytest

from cuattn import _jit, _params, _plan

HEADER = (_jit.CUDA_SRC / "common/params.cuh").read_text()
CPP_TYPES = {"i64": np.dtype(np.int64), "int": np.dtype(np.int32), "float": np.dtype(np.float32)}
CPP_TYPES |= {"u32": np.dtype(np.uint32), "AppendSide": _params.APPEND_SIDE, "TensorMap": np.dtype("V128")}


@pytest.mark.parametrize(
    ("struct", "mirror"),
    [
        ("DecodeParams", _params.DECODE),
        ("MergeParams", _params.MERGE),
        ("PrefillParams", _params.PREFILL),
        ("TiledPrefillParams", _params.TILED_PREFILL),
        ("QuantizeParams", _params.QUANTIZE),
        ("DequantizeParams", _params.DEQUANTIZE),
        ("AppendSide", _params.APPEND_SIDE),
        ("AppendParams", _params.APPEND),
    ],
)
def test_the_mirror_has_the_fields_of_the_struct_in_order(struct, mirror):
    body = re.search(rf"struct {struct} {{(.*?)\n}};", HEADER, re.DOTALL)[1]
    fields = re.findall(r"^  (?:const )?(\w+)(\*?) (\w+)(?:\[(\d+)\])?;", body, re.MULTILINE)
    expected = [
        (name, np.dtype(np.uint64) if pointer else np.dtype((CPP_TYPES[kind], int(size))) if size else CPP_TYPES[kind])
        for kind, pointer, name, size in fields
    ]
    assert [(name, mirror[name]) for name in mirror.names] == expected
    assert len(expected) == len(re.findall(r";(?= *(?://.*)?$)", re.sub(r"//.*", "", body), re.MULTILINE))


@pytest.mark.parametrize(
    "mirror",
    [
        _params.DECODE,
        _params.MERGE,
        _params.PREFILL,
        _params.TILED_PREFILL,
        _params.QUANTIZE,
        _params.DEQUANTIZE,
        _params.APPEND_SIDE,
        _params.APPEND,
    ],
)
def test_the_mirror_has_no_padding(mirror):
    assert sum(mirror[name].itemsize for name in mirror.names) == mirror.itemsize


def test_the_prelude_is_stable():
    config = _plan.MergeConfig(_plan.Dtype.FP32, _plan.Dtype.BF16, 128)
    assert _jit.source(config) == "\n".join(
        (
            f"// {config!r}",
            "#define CUATTN_TBQ4 0",
            '#include "common/types.cuh"',
            "namespace cfg {",
            "constexpr Dtype IN_DTYPE = Dtype::FP32;",
            "constexpr Dtype OUT_DTYPE = Dtype::BF16;",
            "constexpr Parts PARTS = Parts::LSE;",
            "constexpr int HEAD_DIM = 128;",
            "constexpr int NUM_WARPS = 4;",
            "constexpr int PARTS_AT_ONCE = 4;",
            "constexpr int CTAS_PER_SM = 4;",
            "constexpr int SMEM_BYTES = 2080;",
            f"constexpr int PARAMS_BYTES = {_params.MERGE.itemsize};",
            "}  // namespace cfg",
            '#include "merge.cu"',
            "",
        )
    )


@pytest.mark.parametrize("enum", [_plan.Dtype, _plan.KvFormat, _plan.Parts])
def test_enums_of_the_prelude_exist_in_the_sources(enum):
    types = (_jit.CUDA_SRC / "common/types.cuh").read_text()
    names = re.search(rf"enum class {enum.__name__} {{(.*?)}};", types)[1]
    assert [n.strip() for n in names.split(",")] == [member.name for member in enum]


def test_every_kernel_waits_for_the_grids_before_it():
    """They are launched to overlap with those; the other order is seen on a GPU only."""
    kernels = [path for path in _jit.CUDA_SRC.glob("*.cu") if "__global__" in path.read_text()]
    assert len(kernels) == 7
    assert [path.name for path in kernels if path.read_text().count("ptx::griddepcontrol_wait();") != 1] == []


def test_asm_stands_only_in_the_ptx_headers():
    offenders = [
        path.name
        for path in _jit.CUDA_SRC.rglob("*.cu*")
        if re.search(r"\basm\b *(volatile)? *\(", path.read_text()) and not path.name.startswith("ptx")
    ]
    assert offenders == []
