"""The demo's table and picture, from what the runs recorded and what was measured."""

from pathlib import Path
from statistics import median
from typing import Any

from watch import Record

RELIGHT, TORCH, NEBULA, PLAIN = "#0b6e4f", "#c44536", "#5a4fcf", "#8a8a8a"
MS = 1000.0


def rows(measured: dict[str, Any]) -> list[list[str]]:
    """One row a way: stall, time to durable, durable bandwidth, load; medians, and the ratio to torch.save."""
    seconds, size = measured["seconds"], measured["bytes"]

    def one(name: str, stall: str | None, durable: str, load: str | None) -> list[str]:
        cells = [name]
        for key, base in ((stall, "torch durable"), (durable, "torch durable"), (load, "torch load")):
            if key is None:
                cells.append("-")
                continue
            value = median(seconds[key])
            ratio = median(seconds[base]) / value
            cells.append(f"{MS * value:.0f} ms" + ("" if key == base else f" ({ratio:.1f}x)"))
        cells.insert(3, f"{size / median(seconds[durable]) / 1e6:.0f} MB/s")
        return cells

    return [
        one("torch.save + fsync", "torch durable", "torch durable", "torch load"),
        one("relight", "relight stall", "relight durable", "relight load"),
        one("plain write loop + fsync", None, "loop durable", None),
    ]


COLUMNS = ["", "training stands still", "until durable", "durable bandwidth", "load into the model"]


def picture(
    path: Path, plain: Record, before: Record, after: Record, nebula: list[Record], measured: dict[str, Any]
) -> None:
    """Three panels: stall per save, durable bandwidth, loss with the kills marked."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (stalls, speed, losses) = plt.subplots(
        1, 3, figsize=(16, 5), gridspec_kw={"width_ratios": [1.15, 0.85, 1.3]}, layout="constrained"
    )
    mine = {**before.stalls, **after.stalls}
    steps = sorted(plain.stalls)
    width = 0.4 * (steps[1] - steps[0] if len(steps) > 1 else 1)
    stalls.bar(
        [s - width / 2 for s in steps],
        [MS * plain.stalls[s] for s in steps],
        width,
        color=TORCH,
        label="torch.save + fsync",
    )
    stalls.bar(
        [s + width / 2 for s in sorted(mine)],
        [MS * mine[s] for s in sorted(mine)],
        width,
        color=RELIGHT,
        label="relight",
    )
    stalls.axvline((before.killed_at or 0) + width / 2, color="black", linestyle=":", linewidth=1)
    top = stalls.get_ylim()[1]
    stalls.set_ylim(0, top * 1.2)
    stalls.annotate(
        "kill -9", ((before.killed_at or 0) + width / 2, top * 1.12), ha="center", fontsize=9, backgroundcolor="white"
    )
    stalls.set(
        title="How long each save stops the training", xlabel="step of the save", ylabel="stall, ms", xticks=steps
    )
    stalls.legend(loc="upper right", frameon=False, bbox_to_anchor=(1, 0.93))

    size = measured["bytes"]
    ways = [("torch.save\n+ fsync", "torch durable", TORCH), ("relight", "relight durable", RELIGHT),
            ("plain write\n+ fsync", "loop durable", PLAIN)]  # fmt: skip
    for place, (_, key, colour) in enumerate(ways):
        values = [size / s / 1e6 for s in measured["seconds"][key]]
        speed.bar(place, median(values), 0.6, color=colour, alpha=0.85)
        speed.plot([place] * len(values), values, "o", color="black", markersize=3, alpha=0.6)
        speed.annotate(f"{median(values):.0f}", (place, median(values) / 2), ha="center", color="white", weight="bold")
    speed.set_xticks(range(len(ways)), [name for name, _, _ in ways])
    title = f"To the disk: {size / 1e6:.0f} MB, {measured['rounds']} rounds"
    speed.set(title=title, ylabel="durable MB/s, median and each round")

    def curve(record: Record, since: Record | None = None) -> tuple[list[int], list[float]]:
        """Steps and losses; a resumed run is drawn from the last point of the one before it."""
        last = dict(list(since.losses.items())[-1:]) if since else {}
        known = {**last, **record.losses}
        return list(known), [float(loss) for loss in known.values()]

    losses.plot(*curve(plain), color=PLAIN, linewidth=5, alpha=0.45, label="never interrupted (torch.save)")
    losses.plot(*curve(before), color=RELIGHT, linewidth=1.6, label="relight, until the kill")
    losses.plot(
        *curve(after), color=RELIGHT, linewidth=1.6, linestyle=(0, (2, 1)), label="relight, resumed from memory"
    )
    for record, style in zip(nebula, ("-", (0, (2, 1))), strict=True):
        x, y = curve(record, None if record.killed_at else nebula[0])
        label = "Nebula script, until the kill" if record.killed_at else "Nebula script, resumed from memory"
        losses.plot(
            x,
            [value - 0.35 for value in y],
            color=NEBULA,
            linewidth=1.2,
            linestyle=style,
            label=label + " (0.35 lower)",
        )
    low, high = losses.get_ylim()
    losses.set_ylim(low, high + 0.25 * (high - low))
    for record, colour in ((before, RELIGHT), (nebula[0], NEBULA)):
        at = record.killed_at or 0
        losses.axvline(at, ymax=0.72, color=colour, linestyle=":", linewidth=1.2)  # below the legend
        losses.annotate("kill -9", (at, low), xytext=(3, 6), textcoords="offset points", color=colour, fontsize=9)
    losses.set(title="Loss: the runs are the same, bit for bit", xlabel="step", ylabel="loss, nats per byte")
    losses.legend(frameon=False, fontsize=8, loc="upper right")
    for panel in (stalls, speed, losses):
        panel.spines[["top", "right"]].set_visible(False)
        panel.title.set_weight("bold")
    figure.savefig(path, dpi=110)
    plt.close(figure)
