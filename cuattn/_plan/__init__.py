"""Every tile, stage, split and shared-memory size, as pure functions of a problem and a device.

Three words: a *config* holds the compile-time constants of one kernel (one cubin each), a *plan* is one launch, and the
parameter structs (`_params`) are the kernel's arguments. Nothing here imports CuPy, so a plan for any GPU can be made
and tested anywhere. The CUDA sources assert what is computed here.
"""

from __future__ import annotations

from itertools import product

from cuattn import _tbq4
from cuattn._device import DEVICES, Device, arch_of
from cuattn._kinds import Dtype, KvFormat, Parts, decode_formats_of, formats_of
from cuattn._plan.append import MAX_APPEND_ROWS, AppendConfig, append_configs
from cuattn._plan.base import (
    HEAD_DIMS,
    MAX_GRID_YZ,
    MAX_GROUP,
    MAX_KV_LEN,
    MAX_SEQLEN_Q,
    MAX_SPLITS,
    REGISTERS_PER_SM,
    SPLIT_UNIT,
    WARP,
    align,
    ceil_div,
)
from cuattn._plan.codec import QuantizeConfig, codec_config
from cuattn._plan.decode import DecodePlan, choose_splits, decode_plan
from cuattn._plan.decode_config import DecodeConfig, config_of, decode_config
from cuattn._plan.merge import MergeConfig, merge_config, merge_configs
from cuattn._plan.prefill import (
    PREFILL_DIMS,
    PrefillConfig,
    PrefillPlan,
    prefill_config,
    prefill_configs,
    prefill_plan,
)
from cuattn._plan.prefill_sm90 import (
    TiledPrefillConfig,
    TiledPrefillPlan,
    choose_prefill,
    tiled_config_of,
    tiled_prefill_config,
    tiled_prefill_configs,
)
from cuattn._plan.tiles import DecodeTile, decode_tiles, heads_tiles
from cuattn._problem import DecodeProblem, PrefillProblem

__all__ = [
    "DEVICES", "HEAD_DIMS", "MAX_APPEND_ROWS", "MAX_GRID_YZ", "MAX_GROUP", "MAX_KV_LEN", "MAX_SEQLEN_Q", "MAX_SPLITS",
    "PREFILL_DIMS", "REGISTERS_PER_SM", "SPLIT_UNIT", "WARP", "AppendConfig", "Config", "DecodeConfig", "DecodePlan",
    "DecodeProblem", "DecodeTile", "Device", "Dtype", "KvFormat", "MergeConfig", "Parts", "PrefillConfig",
    "PrefillPlan", "PrefillProblem", "QuantizeConfig", "TiledPrefillConfig", "TiledPrefillPlan", "align",
    "append_configs", "arch_of", "ceil_div", "choose_prefill", "choose_splits", "codec_config", "config_of",
    "decode_config", "decode_formats_of", "decode_plan", "decode_tiles", "formats_of", "heads_tiles", "merge_config",
    "prefill_config", "prefill_configs", "prefill_plan", "shipped_configs", "tiled_config_of",
    "tiled_prefill_config", "tiled_prefill_configs",
]  # fmt: skip

Config = AppendConfig | DecodeConfig | MergeConfig | PrefillConfig | QuantizeConfig | TiledPrefillConfig


def shipped_configs(device: Device) -> list[Config]:
    """Every config that `decode`, `prefill` and `merge` can ask for on a device, and the common ones of the others."""
    configs: list[Config] = []
    for dtype in Dtype:
        for formats in product(decode_formats_of(dtype), decode_formats_of(dtype)):
            configs += [config_of(dtype, *formats, *tile, device) for tile in decode_tiles(device, *formats)]
            configs += [
                config_of(dtype, *formats, head_dim, 1, device, tile_heads=heads)
                for head_dim, heads in heads_tiles(device, *formats)
            ]
    configs += [c for head_dim in HEAD_DIMS for dtype in Dtype for c in merge_configs(head_dim, dtype)]
    for dtype, head_dim, encode, with_mean in product(Dtype, _tbq4.HEAD_DIMS, (True, False), (False, True)):
        # Heads count for the encoder with a mean: the two smallest tables of means, and a large one.
        configs += dict.fromkeys(
            codec_config(dtype, head_dim, device, encode=encode, with_mean=with_mean, num_heads=num_heads)
            for num_heads in (1, 3, 64)
        )
    return configs + append_configs() + prefill_configs(device) + tiled_prefill_configs(device)
