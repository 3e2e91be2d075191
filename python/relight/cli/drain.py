"""Finds what processes left in memory (shared memory outlives SIGKILL), and persists it.

relight drain            persist what dead processes had staged, then free their memory
relight drain --list     only say what is there
relight drain --remove   free the memory of dead processes; what is not persisted is kept (--force: lose it)
"""

import argparse
import json
import time

from relight import _core
from relight.cli.output import Output, size
from relight.cli.source import Json, engine, regions

HELP = "persist, list or remove what dead processes left in memory"


def arguments(parser: argparse.ArgumentParser) -> None:
    """[--list | --remove [--force]] [--memory-dir]."""
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--list", action="store_true", help="only say what is there")
    what.add_argument("--remove", action="store_true", help="free the memory of dead processes without persisting")
    parser.add_argument("--force", action="store_true", help="with --remove: also what is not persisted; it is lost")
    where = "where the memory tier is (default: RELIGHT_MEMORY_DIR, else /dev/shm)"
    parser.add_argument("--memory-dir", metavar="DIR", help=where)


def run(args: argparse.Namespace, out: Output) -> int:
    """Does it; 1 if something that is staged could not be persisted or was not removed."""
    if args.list:
        return _list(regions(args.memory_dir), out)
    if args.remove:
        return _remove(regions(args.memory_dir), args.force, out)
    return _drain(args.memory_dir, out)


def _list(found: list[Json], out: Output) -> int:
    if out.as_json:
        out.document(found)
        return 0
    rows = [
        [one["pid"], "alive" if one["alive"] else "dead", size(one["reserved_bytes"]), _held(one), one["path"]]
        for one in found
    ]
    out.table(["pid", "owner", "bytes", "holds", "region"], rows)
    if not found:
        out.line("no region of the memory tier belongs to you")
    return 0


def _held(region: Json) -> str:
    words = [f"{one['tag']} ({one['state']})" for one in region["checkpoints"]]
    if region["torn"]:
        words.append(f"{region['torn']} unfinished")
    return ", ".join(words) or "nothing"


def _waiting(region: Json) -> list[str]:
    """What would be lost with the region. What is incomplete no reader can use, and no drain can complete."""
    return [_called(one) for one in region["checkpoints"] if one["state"] not in ("persisted", "incomplete")]


def _called(one: Json) -> str:
    return str(one["tag"]) if one["root"] is None else f"{one['tag']} of {one['root']}"


def _remove(found: list[Json], force: bool, out: Output) -> int:
    removed, kept = [], []
    for region in (one for one in found if not one["alive"]):
        if (unsafe := _waiting(region)) and not force:
            kept.append({"region": region["path"], "not_persisted": unsafe})
            continue
        _core.remove_region(region["path"])
        removed.append(region["path"])
        out.line(f"removed {region['path']}: {size(region['reserved_bytes'])} are free again")
    for one in kept:
        waiting = ", ".join(one["not_persisted"])
        out.warning(f"kept {one['region']}: not persisted yet: {waiting}. `relight drain` persists it")
    if out.as_json:
        out.document({"removed": removed, "kept": kept})
    elif not removed and not kept:
        out.line("no region was left by a dead process")
    return 1 if kept else 0


def _drain(memory_dir: str | None, out: Output) -> int:
    started = time.perf_counter()
    with engine(memory_dir) as one:
        found: list[Json] = json.loads(one.drain())
        for region in found:
            for tag in region["tags"]:
                state = "is persisted already" if tag["persisted"] else "is being persisted"
                out.line(f"{_owner(region)} left {_called(tag)}: it {state}")
            for file in region["files"]:
                state = "is persisted already" if file["persisted"] else "is being persisted"
                out.line(f"{_owner(region)} left {file['path']}: it {state}")
            for dropped in region["dropped"]:
                out.warning(f"from {_owner(region)}: {dropped}")
        one.flush(None)
    left = [waiting for region in regions(memory_dir) if not region["alive"] for waiting in _waiting(region)]
    if out.as_json:
        out.document({"regions": found, "left": left, "seconds": time.perf_counter() - started})
    elif not found:
        out.line("no region was left by a dead process")
    for waiting in left:
        out.warning(f"could not persist {waiting}; it stays in memory (`relight history ROOT` has the error)")
    return 1 if left else 0


def _owner(region: Json) -> str:
    """Who had the region last; nobody, if an earlier drain could not persist all of it and let it go."""
    return "a dead process" if region["pid"] is None else f"process {region['pid']}"
