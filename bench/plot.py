"""``python -m bench plot``: pictures of the newest records and of the KV formats' errors, as PNG and SVG."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from . import kv_error, plot_data
from .rows import PEERS
from .timing import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from .plot_data import Picture

FIGURES = ROOT / "docs" / "figures"
# Okabe and Ito's palette, which color-blind readers tell apart.
_BLACK, _ORANGE, _GREEN, _BLUE, _RED, _PINK, _GRAY = (
    "#000000", "#E69F00", "#009E73", "#0072B2", "#D55E00", "#CC79A7", "#6B6B6B"
)  # fmt: skip
# Inches and dots: README shows about 800 pixels, and screens with twice as many are common.
_WIDTH, _DPI = 8.0, 150
_STYLE: dict[str, Any] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib, so that the machine does not matter
    "font.size": 10, "axes.titlesize": 10.5, "axes.labelsize": 10, "xtick.labelsize": 9, "ytick.labelsize": 9,
    "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": _GRAY, "axes.grid": True,
    "grid.color": "#E3E3E3", "grid.linewidth": 0.6, "axes.axisbelow": True, "lines.linewidth": 1.8,
    "svg.fonttype": "none",  # text stays text, and the files small
    "svg.hashsalt": "cuattn",  # otherwise ids are random, and every file is another one
}  # fmt: skip
_DECODE_NAMES = {
    "separate": ("dequantize,\nthen decode", _PINK, "D"), "16 bits": ("16 bits", _BLUE, "o"),
    "fp8": ("fp8", _GREEN, "s"), "tbq4": ("TBQ4", _RED, "^"),
}  # fmt: skip
_IMPLS = {
    "cuattn": (_BLUE, "o"), "fa3": (_ORANGE, "s"), "cudnn": (_GREEN, "^"), "fa2": (_PINK, "D"),
    "flashinfer": (_RED, "v"),
}  # fmt: skip


@contextmanager
def _matplotlib() -> Iterator[Any]:
    """Give matplotlib's pyplot, in the style of the pictures and without a display."""
    try:
        import matplotlib as mpl
    except ImportError as error:
        msg = "python -m bench plot needs matplotlib: pip install 'cuattn[bench]'"
        raise ImportError(msg) from error
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    with mpl.rc_context({**mpl.rcParamsDefault, **_STYLE, "backend": "Agg"}):
        yield plt
        plt.close("all")


def _contexts(axis: Any, values: list[int]) -> None:  # noqa: ANN401  matplotlib has no types here
    """Label a logarithmic axis with numbers of tokens, if there are any."""
    if not values:
        return
    axis.set_xscale("log", base=2)
    ticks = [2**power for power in range(min(values).bit_length() - 1, max(values).bit_length())]
    axis.set_xticks(ticks, [f"{value // 1024}k" for value in ticks])
    axis.minorticks_off()


def _decode(plt: Any, picture: Picture) -> Any:  # noqa: ANN401
    figure, axis = plt.subplots(figsize=(_WIDTH, 4.6))
    rate = picture.data["read_tb_s"]
    contexts = sorted({x for line in picture.data["series"].values() for x, _ in line["points"]})
    ends = np.array([contexts[0], contexts[-1]])
    for name, line in picture.data["series"].items():
        label, color, marker = _DECODE_NAMES[name]
        x, y = zip(*line["points"], strict=True)
        axis.plot(ends, ends * line["bytes_per_key"] / rate / 1e6, color=color, linewidth=1, linestyle=(0, (4, 3)))
        axis.plot(x, y, color=color, marker=marker, markersize=6)
        axis.annotate(
            f"{label}: {y[-1]:.4g} us", (x[-1], y[-1]), (10, 0), color=color, textcoords="offset points", ha="left",
            va="center", fontweight="bold", annotation_clip=False,
        )  # fmt: skip
    axis.set_yscale("log")
    axis.set_yticks([2, 5, 10, 20, 50, 100, 200, 500, 1000])
    axis.yaxis.set_major_formatter("{x:,.0f}")
    axis.set_ylim(top=1300)
    _contexts(axis, contexts)
    axis.margins(x=0.03)
    axis.set(xlabel="keys in the cache, one sequence", ylabel="us, one layer")
    axis.set_title(
        f"Decode of one token, {picture.data['heads']} heads of {picture.data['head_dim']}; "
        f"dashed: its bytes at {rate:.2f} TB/s, the fastest measured read", loc="left",
    )  # fmt: skip
    return figure


def _prefill(plt: Any, picture: Picture) -> Any:  # noqa: ANN401
    panels = picture.data["panels"]
    columns = len(plot_data.PREFILL_SHAPES)
    figure, axes = plt.subplots(len(panels) // columns, columns, figsize=(_WIDTH, 5.4), sharey=True)
    for axis, panel in zip(axes.flat, panels, strict=True):
        if panel["roof"]:
            axis.axhline(panel["roof"], color=_GRAY, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
        for impl, points in panel["series"].items():
            color, marker = _IMPLS[impl]
            label = PEERS.get(impl, impl)
            x, y = zip(*points, strict=True)
            axis.plot(x, y, color=color, marker=marker, markersize=5, label=label, zorder=3 if impl == "cuattn" else 2)
        _contexts(axis, sorted({x for points in panel["series"].values() for x, _ in points}))
        axis.set_title(f"{panel['heads']} heads of {panel['head_dim']}, {panel['mask']}", loc="left")
        top = max(y for other in panels for points in other["series"].values() for _, y in points)
        axis.set_ylim(0, 1.1 * top)
    for axis in axes[:, 0]:
        axis.set_ylabel("TFLOP/s")
    for axis in axes[-1]:
        axis.set_xlabel("tokens of a prompt")
    handles, labels = axes.flat[0].get_legend_handles_labels()
    handles.append(plt.Line2D([], [], color=_GRAY, linewidth=1, linestyle=(0, (4, 3))))
    labels.append("cuBLAS product")
    figure.legend(handles, labels, loc="outside upper center", ncols=5, frameon=False, handlelength=2.2)
    return figure


def _roofline(plt: Any, picture: Picture) -> Any:  # noqa: ANN401
    figure, axis = plt.subplots(figsize=(_WIDTH, 4.8))
    read, product = picture.data.get("read_tb_s"), picture.data.get("product_tflops")
    looks = {
        "decode 16 bits": ("decode, 16 bits", _BLUE, "o"), "decode fp8": ("decode, fp8", _GREEN, "o"),
        "decode tbq4": ("decode, TBQ4", _RED, "o"), "prefill 16 bits": ("prefill, 16 bits", _BLUE, "s"),
        "prefill fp8": ("prefill, fp8", _GREEN, "s"), "prefill tbq4": ("prefill on a TBQ4 cache", _RED, "s"),
    }  # fmt: skip
    limits = (1, 100_000)
    ridge = product / read if read and product else None
    if read:
        x = np.array([limits[0], ridge or limits[1]])
        axis.plot(x, x * read, color=_BLACK, linewidth=1.4)
        axis.annotate(f"read at {read:.2f} TB/s", (40, 40 * read), (-6, 6), textcoords="offset points", ha="right")
    if product:
        axis.plot([ridge or limits[0], limits[1]], [product] * 2, color=_BLACK, linewidth=1.4)
        axis.annotate(
            f"cuBLAS product at {product:.0f} TFLOP/s", (limits[1], product), (-2, 11), textcoords="offset points",
            ha="right",
        )  # fmt: skip
    for name, points in picture.data["series"].items():
        label, color, marker = looks[name]
        x, y = np.array(points).T
        axis.scatter(x, y, s=26, marker=marker, color=color, edgecolor="white", linewidth=0.5, zorder=3, label=label)
    axis.set(xscale="log", yscale="log", xlim=limits, ylim=(5, 1500))
    axis.legend(loc="lower right", labelcolor="linecolor", frameon=False, fontsize=11, handletextpad=0.2)
    for ticks in (axis.xaxis, axis.yaxis):
        ticks.set_major_formatter("{x:,.0f}")
    axis.set(xlabel="FLOPs a byte", ylabel="TFLOP/s")
    axis.set_title("Decode and prefill in bfloat16; lines: the fastest measured read and cuBLAS product", loc="left")
    return figure


def _error(plt: Any, picture: Picture) -> Any:  # noqa: ANN401
    figure, axes = plt.subplots(1, len(kv_error.LAYERS), figsize=(_WIDTH, 3.6), sharey=True)
    looks = {
        "bf16": ("bf16", _BLUE, "o"), "fp8": ("fp8 e4m3", _GREEN, "s"), "tbq4": ("TBQ4", _RED, "^"),
        "tbq4, mean": ("TBQ4, mean of K removed", _ORANGE, "v"),
        "tbq4, mean, sink": ("TBQ4, mean of K removed, token 0 in 16 bits", _BLACK, "D"),
    }  # fmt: skip
    for index, (axis, layer) in enumerate(zip(axes, kv_error.LAYERS, strict=True)):
        for name, (label, color, marker) in looks.items():
            bits, error = next((b, e) for number, b, e in picture.data["formats"][name] if number == layer)
            axis.plot(
                bits,
                100 * error,
                marker=marker,
                color=color,
                markersize=8,
                linestyle="",
                label=label,
                fillstyle="none",
                markeredgewidth=1.6,
            )
        axis.set_title(f"SmolLM2-135M, layer {layer}", loc="left")
        axis.set(xscale="log", yscale="log", xlim=(3.4, 20), ylim=(0.05, 30), xlabel="bits a value")
        axis.set_xticks([4, 8, 16], ["4", "8", "16"])
        axis.set_yticks([0.1, 0.3, 1, 3, 10, 30], ["0.1", "0.3", "1", "3", "10", "30"])
        axis.minorticks_off()
        if index == 0:
            axis.set_ylabel("error of the output, %")
    axes[0].text(3.6, 0.06, "fp16: 0, as the\ndata are float16", color=_GRAY, fontsize=9, va="bottom")
    figure.legend(
        *axes[0].get_legend_handles_labels(), loc="outside upper left", ncols=3, frameon=False, handletextpad=0.2
    )
    return figure


_DRAW: dict[str, Callable[[Any, Picture], Any]] = {
    "decode": _decode, "prefill": _prefill, "roofline": _roofline, "error": _error
}  # fmt: skip


def _save(figure: Any, picture: Picture, stem: Path) -> list[Path]:  # noqa: ANN401
    """Write both files, which name their source and carry the digest of what they show."""
    source = picture.source or "cuattn/examples/smollm2_qkv.npz"
    figure.text(0.995, 0.006, source, ha="right", va="bottom", fontsize=7.5, color=_GRAY)
    lowest = 0.14 * (source.count("\n") + 1) / figure.get_figheight()
    figure.set_layout_engine("constrained", rect=(0, lowest, 1, 1 - lowest))
    png, svg = stem.with_suffix(".png"), stem.with_suffix(".svg")
    # Without dates and versions, so that a file changes only with what it shows.
    figure.savefig(
        png, dpi=_DPI, metadata={"Software": None, "Description": picture.digest}, pil_kwargs={"optimize": True}
    )
    figure.savefig(svg, metadata={"Date": None, "Creator": None, "Description": picture.digest})
    return [png, svg]


def write(results: Path, folder: Path) -> list[str]:
    """Draw all pictures that the records allow.

    Parameters
    ----------
    results : Path
        Folder of records.
    folder : Path
        Of the pictures; made if it is missing.

    Returns
    -------
    list of str
        What was written, and which series are left out because no record has them.

    Raises
    ------
    ImportError
        Without matplotlib; the message says how to get it.
    """
    said = []
    with _matplotlib() as plt:
        folder.mkdir(parents=True, exist_ok=True)
        for picture in plot_data.pictures(results):
            missing = [f"{picture.name}: no record has {name}, left out" for name in picture.missing]
            if picture.is_empty:
                said += [*missing, f"{picture.name}: nothing to draw"]
                continue
            written = _save(_DRAW[picture.name](plt, picture), picture, folder / picture.name)
            said += [*map(str, written), *missing]
    return said
