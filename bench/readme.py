"""Puts the table of one result into README.md, so that no number there was copied by hand.

python bench/readme.py bench/results/<date>-<size>.json
"""

import argparse
import json
import re
from pathlib import Path
from statistics import median
from typing import Any

import render

REPOSITORY = Path(__file__).parents[1]
BEGIN, END = "<!-- measured: written by bench/readme.py -->", "<!-- /measured -->"


def section(result: dict[str, Any], stem: Path) -> str:
    """Four questions, torch beside relight, the ratio; then the method and the picture."""
    seconds = result["seconds"]

    def row(question: str, torch_way: str, our_way: str) -> str:
        ratio = median(t / o for t, o in zip(seconds[torch_way], seconds[our_way], strict=True))
        torch_ms, our_ms = (1000 * median(seconds[way]) for way in (torch_way, our_way))
        return f"| {question} | {torch_ms:.0f} ms | {our_ms:.0f} ms | {ratio:.1f}x |"

    size, machine = result["bytes"] / 2**20, result["machine"]
    peak = result["peak_bytes"]["relight: save durable"]["whole"] / 2**20
    return "\n".join(
        [
            BEGIN,
            f"| {size:.0f} MiB of GPT and AdamW state | torch | relight | |",
            "|---|--:|--:|--:|",
            row("a save stops the training for", render.SAVE, "relight: save returns"),
            row("until it is durable and committed", render.SAVE, "relight: save durable"),
            row("load into the live model, page cache warm", render.WARM, "relight: load + load_state_dict, warm"),
            row("the same from the memory tier", render.WARM, "relight: resume from memory"),
            row("the same from a cold disk", render.COLD, "relight: load + load_state_dict, cold"),
            "",
            f"Medians of {result['rounds']} rounds in one run, the ways in turn; the ratio is the median of the ratios "
            "within a round. torch.save with fsync and rename; relight's loads verify every checksum. Peak memory of "
            f"relight beside the state: {peak:.0f} MiB, the memory tier included. {machine['processor']}, "
            f"{machine['cores']} cores, kernel {machine['kernel'].partition('-')[0]}, torch {machine['torch']}, load "
            f"average before the run {machine['load_average_before']}, {result['date'][:10]}. Method: "
            f"[bench](bench/README.md); all rows: [the table]({stem}.md). `make bench` measures yours.",
            "",
            f"![Each way as a bar, each round as a dot, the limits of the machine in grey]({stem}.png)",
            END,
        ]
    )


def main() -> None:
    """Replaces what stands between the marks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("result", type=Path)
    path = parser.parse_args().result.resolve()
    text = section(json.loads(path.read_text()), path.relative_to(REPOSITORY).with_suffix(""))
    readme = REPOSITORY / "README.md"
    before = readme.read_text()
    if BEGIN not in before:
        raise SystemExit(f"README.md lacks the mark {BEGIN}")
    readme.write_text(re.sub(f"{re.escape(BEGIN)}.*{re.escape(END)}", lambda _: text, before, flags=re.DOTALL))


if __name__ == "__main__":
    main()
