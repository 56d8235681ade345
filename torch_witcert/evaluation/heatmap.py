"""Picture of the bound by layer and head."""

from __future__ import annotations

from pathlib import Path

import torch

from .statistics import TAU


def write_heat_map(bounds: torch.Tensor, kv_heads: int, path: str | Path, title: str, tau: float = TAU) -> Path:
    """Write a PNG with the median and the largest bound of every (layer, query head).

    Args:
        bounds: [tokens, layers, H] bounds on total variation of the same heads at several steps.
        kv_heads: Hkv; lines part the groups of query heads that share one.
        path: of the PNG; its folder is made.
        title: what was measured, and how.
        tau: limit that the colour bar names, and marks where a bound exceeds it.

    Raises:
        ImportError: matplotlib is missing. ValueError: there is no finite bound.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("the heat map needs matplotlib: pip install matplotlib") from error

    values = bounds.double().cpu()
    if not values.isfinite().any():
        raise ValueError(f"bounds must hold a finite value, got {list(values.shape)} without one")
    panels = {"median": values.median(0).values, "largest": values.amax(0)}
    layers, heads = panels["median"].shape
    top = float(values[values.isfinite()].max())

    figure = Figure(figsize=(2.6 + 0.42 * max(heads, 6) * 2, 1.9 + 0.2 * max(layers, 6)), dpi=150, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.subplots(1, 2, sharey=True)
    for axis, (name, panel) in zip(axes, panels.items(), strict=True):
        image = axis.imshow(
            panel.numpy(), aspect="auto", cmap="viridis", vmin=0, vmax=max(top, tau), interpolation="nearest"
        )
        axis.set_title(f"{name} over {values.shape[0]} tokens", fontsize=10)
        axis.set_xlabel("query head (white lines separate KV heads)")
        axis.set_xticks(range(0, heads, -(-heads // 16)))
        axis.set_yticks(range(0, layers, -(-layers // 16)))
        for edge in range(1, kv_heads):
            axis.axvline(edge * heads / kv_heads - 0.5, color="white", linewidth=1.5)
        axis.tick_params(length=0)
        axis.spines[:].set_visible(False)
    axes[0].set_ylabel("layer")
    bar = figure.colorbar(image, ax=list(axes), fraction=0.05, pad=0.02)
    bar.set_label(f"bound on total variation (limit tau = {tau:g})")
    if tau < top:
        bar.ax.axhline(tau, color="red", linewidth=2)
    bar.outline.set_visible(False)
    figure.suptitle(title, fontsize=11)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    canvas.print_png(path)
    return path
