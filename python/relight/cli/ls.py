"""Lists the checkpoints of a root, oldest first: what would be resumed from is the last one.

Directories that relight did not commit (torch.save, DeepSpeed, Nebula) are listed as foreign; checkpoints that a
process still holds only in memory are listed with its number; what is not whole is named on stderr with the reason.
"""

import argparse

from relight.cli.output import Output, size
from relight.cli.source import Json, checkpoints, opened, problems, staged_for

HELP = "list the checkpoints of a root"


def arguments(parser: argparse.ArgumentParser) -> None:
    """ROOT."""
    parser.add_argument("root", metavar="ROOT", help="the directory that holds the tags")


def run(args: argparse.Namespace, out: Output) -> int:
    """Prints the list; 0."""
    with opened(args.root) as root:
        known, bad, staged, latest = checkpoints(root), problems(root), staged_for(root), root.latest()
        where = root.path
    on_disk = {one["tag"] for one in known if "persistent" in one["tiers"]}
    waiting = [one for one in staged if one["tag"] not in on_disk and one["state"] != "incomplete"]
    if out.as_json:
        out.document({"root": where, "latest": latest, "checkpoints": known, "in_memory": staged, "problems": bad})
        return 0
    rows = [
        [
            one["tag"],
            one["step"],
            None if one["foreign"] else one["run"],
            "foreign" if one["foreign"] else "+".join(one["tiers"]),
            len(one["files"]),
            size(one["bytes"]),
            (one["committed_at"] or "")[:16].replace("T", " "),
            notes(one, latest),
        ]
        for one in known
    ]
    rows += [
        [one["tag"], one["step"], None, "memory", len(one["files"]), size(one["bytes"]), "", _owner(one)]
        for one in waiting
    ]
    out.table(["tag", "step", "run", "tier", "files", "bytes", "committed (UTC)", ""], rows)
    if not rows:
        out.line(f"no checkpoints in {where}")
    for one in bad:
        out.warning(f"{one['tag']} is not a whole checkpoint: {one['reason']}")
    return 0


def notes(one: Json, latest: str | None) -> str:
    """What is special about a checkpoint."""
    marks = (("latest", one["tag"] == latest), ("best", one["best"]), ("left behind", one["left_behind"]))
    return ", ".join(word for word, holds in marks if holds)


def _owner(one: Json) -> str:
    if one["alive"]:
        doing = "could not be persisted" if one["state"] == "failed" else "is being persisted"
        return f"{doing} by process {one['pid']}"
    return f"left by process {one['pid']}, which is dead: `relight drain` persists it"
