"""The table and the plot of one result of run.py."""

from pathlib import Path
from statistics import median, quantiles
from typing import Any

RELIGHT, TORCH, LIMIT = "#0b6e4f", "#c44536", "#8a8a8a"
SAVE, WARM, COLD = "torch.save + fsync", "torch.load + load_state_dict, warm", "torch.load + load_state_dict, cold"
# Way, what it is compared with, how its peak memory is counted.
ROWS = [
    ("Training stands still", None),
    (SAVE, SAVE),
    ("relight: save returns", SAVE),
    ("limit: copy in memory", SAVE),
    ("Until durable", None),
    (SAVE, SAVE),
    ("relight: save durable", SAVE),
    ("relight.save to a file", SAVE),
    ("limit: buffered write + fsync", SAVE),
    ("limit: direct write + fsync", SAVE),
    ("Into the live model and optimizer, page cache warm", None),
    (WARM, WARM),
    ("relight: load + load_state_dict, warm", WARM),
    ("relight: resume from memory", WARM),
    ("The same, page cache cold", None),
    (COLD, COLD),
    ("relight: load + load_state_dict, cold", COLD),
    ("limit: direct read", COLD),
]


def table(result: dict[str, Any]) -> str:
    """Markdown: median, spread, speed, paired ratio to torch, peak memory."""
    seconds, size = result["seconds"], result["bytes"]
    lines = [
        "| | median | IQR | GB/s | vs torch | peak memory |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for name, base in ROWS:
        if base is None:
            lines.append(f"| **{name}** | | | | | |")
            continue
        times = seconds.get(name)
        if not times:
            lines.append(f"| {name} | {result['checks'].get(name, 'not measured')} | | | | |")
            continue
        low, _, high = quantiles(times, n=4)
        ratio = median(b / t for b, t in zip(seconds[base], times, strict=True))
        cells = [
            name,
            _ms(median(times)),
            f"{_ms(low)} to {_ms(high)}",
            f"{size / median(times) / 1e9:.2f}",
            "1x" if name == base else f"{ratio:.1f}x",
            _peak(result, name),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    machine = result["machine"]
    lines += [
        "",
        f"{size / 2**20:.0f} MiB in {result['tensors']} tensors; medians of {result['rounds']} rounds in one run, the "
        "ways in turn; `vs torch` is the median of the ratios within a round. Peak memory is beside the state itself; "
        "for relight the memory tier is in it.",
        "",
        f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gib']} GiB, kernel {machine['kernel']}, "
        f"{machine['file_system']}, Python {machine['python']}, torch {machine['torch']}, relight "
        f"{machine['relight']}; load average before the run {machine['load_average_before']}; {result['date'][:10]}.",
        "",
        *(f"- {name}: {text}" for name, text in sorted(result["checks"].items())),
        "",
    ]
    return "\n".join(lines)


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds >= 0.01 else f"{seconds * 1000:.1f} ms"


def _peak(result: dict[str, Any], name: str) -> str:
    key = "relight: save durable" if name == "relight: save returns" else name
    peak = result["peak_bytes"].get(key)
    if peak is None or name.startswith("limit"):
        return ""
    if name.startswith("relight: save") or name == "relight: resume from memory":
        return f"{peak['whole'] / 2**20:.0f} MiB ({peak['shared'] / 2**20:.0f} shared)"
    return f"{peak['grown'] / 2**20:.0f} MiB"


def plot(result: dict[str, Any], path: Path) -> None:
    """One panel a question, one bar a way, every round as a dot."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels: list[tuple[str, list[str]]] = []
    for name, base in ROWS:
        if base is None:
            panels.append((name, []))
        elif result["seconds"].get(name):
            panels[-1][1].append(name)
    figure, axes = plt.subplots(len(panels), 1, figsize=(9, 8.5), layout="constrained",
                                gridspec_kw={"height_ratios": [len(ways) for _, ways in panels]})  # fmt: skip
    for axis, (title, ways) in zip(axes, panels, strict=True):
        for place, name in enumerate(reversed(ways)):
            times = [1000 * s for s in result["seconds"][name]]
            colour = LIMIT if name.startswith("limit") else RELIGHT if "relight" in name else TORCH
            axis.barh(place, median(times), 0.62, color=colour)
            axis.plot(times, [place] * len(times), "o", color="black", markersize=2.5, alpha=0.5)
            axis.annotate(f" {median(times):.0f} ms", (max(median(times), *times), place), va="center", fontsize=9)
        axis.set_yticks(range(len(ways)), [name.removeprefix("limit: ") for name in reversed(ways)])
        axis.set_title(title, loc="left", fontsize=10, weight="bold")
        axis.margins(x=0.12)
        axis.set_xlim(left=0)
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel(
        f"ms for {result['bytes'] / 2**20:.0f} MiB; bar: median, dots: rounds; grey: what the machine can do"
    )
    figure.savefig(path, dpi=110)
    plt.close(figure)
