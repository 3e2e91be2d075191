"""Shows what happened in a root: each save, load, retry and failure, from its checkpointHistories.csv."""

import argparse
import csv
import os
from collections import deque

from relight.cli.output import Output, size
from relight.exceptions import CheckpointNotFound

HELP = "show what happened: saves, loads, retries, failures"
FILE = "checkpointHistories.csv"


def arguments(parser: argparse.ArgumentParser) -> None:
    """ROOT [--tag] [--last]."""
    parser.add_argument("root", metavar="ROOT", help="the directory that holds the tags")
    parser.add_argument("--tag", metavar="TAG", help="only what concerns this checkpoint")
    parser.add_argument("--last", metavar="N", type=int, help="only the newest N lines")


def run(args: argparse.Namespace, out: Output) -> int:
    """Prints the lines, oldest first; 0."""
    path = os.path.join(args.root, FILE)
    try:
        with open(path, newline="", encoding="utf-8", errors="backslashreplace") as file:
            lines = (line for line in csv.DictReader(file) if args.tag in (None, line.get("tag")))
            rows = list(deque(lines, maxlen=args.last if args.last is None else max(args.last, 0)))
    except FileNotFoundError:
        message = f"there is no history at {path}: nothing was saved here by relight"
        raise CheckpointNotFound(message, path=path) from None
    if out.as_json:
        out.document(rows)
        return 0
    shown = [
        [
            (row.get("time") or "")[:19].replace("T", " "),
            row.get("event"),
            row.get("tag"),
            row.get("file"),
            row.get("tier"),
            size(int(row["bytes"])) if (row.get("bytes") or "").isdecimal() else "",
            row.get("seconds"),
            row.get("mb_per_s"),
            row.get("error"),
        ]
        for row in rows
    ]
    out.table(["time (UTC)", "event", "tag", "file", "tier", "bytes", "seconds", "MB/s", "error"], shown)
    return 0
