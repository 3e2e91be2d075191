"""Reads every byte and checks it: against the manifest for checkpoints, against its own checksums for a single file.

relight verify ROOT        all checkpoints
relight verify ROOT TAG    one
relight verify FILE        any file that torch.save or relight wrote
"""

import argparse
import json
import os

from relight import _core
from relight.cli.output import Output, size
from relight.cli.source import Json, checkpoints, find, opened, problems
from relight.exceptions import CheckpointError

HELP = "read every byte and check it"


def arguments(parser: argparse.ArgumentParser) -> None:
    """ROOT [TAG], or FILE."""
    parser.add_argument("path", metavar="ROOT|FILE", help="the directory that holds the tags, or one file")
    parser.add_argument("tag", metavar="TAG", nargs="?", help="only this checkpoint")


def run(args: argparse.Namespace, out: Output) -> int:
    """Prints one line per checkpoint; 1 if anything is not as it was written."""
    if args.tag is None and os.path.isfile(args.path):
        return _verify_file(args.path, out)
    results: list[Json] = []
    with opened(args.path) as root:
        chosen = checkpoints(root) if args.tag is None else [find(root, args.tag)]
        chosen = [one for one in chosen if "persistent" in one["tiers"] or one["foreign"]]
        with out.progress(sum(one["bytes"] for one in chosen), "verifying") as progress:
            for one in chosen:
                progress.now(one["tag"])
                results.append(_verify_foreign(one) if one["foreign"] else _verify_tag(root, one))
                progress.done(one["bytes"])
        broken = problems(root) if args.tag is None else []
    for bad in broken:
        results.append({"tag": bad["tag"], "ok": False, "files": [], "problem": bad["reason"]})
    _report(results, out, args.path)
    return 0 if all(one["ok"] for one in results) else 1


def _verify_tag(root: _core.Root, one: Json) -> Json:
    try:
        result: Json = json.loads(root.verify(one["tag"]))
    except CheckpointError as error:  # this one is bad; the others are still worth a look
        return {"tag": one["tag"], "ok": False, "files": [], "problem": str(error)}
    return result


def _verify_foreign(one: Json) -> Json:
    """No manifest says what should be: each archive is checked against its own checksums, other files are left out."""
    files = []
    for record in one["files"]:
        path = os.path.join(one["path"], record["path"])
        if not _is_archive(path):
            continue
        try:
            found = _core.open_image(path).verify()
        except CheckpointError as error:
            found = [str(error)]
        outcome = {"ok": not found, "problem": "; ".join(found) or None}
        files.append({"name": record["name"], "bytes": record["bytes"], **outcome})
    return {"tag": one["tag"], "ok": all(f["ok"] for f in files), "foreign": True, "files": files}


def _is_archive(path: str) -> bool:
    with open(path, "rb") as file:
        return file.read(4) == b"PK\x03\x04"


def _verify_file(path: str, out: Output) -> int:
    image = _core.open_image(path)
    found = image.verify()
    if out.as_json:
        out.document({"file": path, "ok": not found, "bytes": image.length, "problems": found})
    elif found:
        for sentence in found:
            out.line(f"{path}: {sentence}")
    else:
        out.line(f"{path}: {size(image.length)}, every byte is as it was written")
    return 1 if found else 0


def _report(results: list[Json], out: Output, path: str) -> None:
    if out.as_json:
        out.document({"root": os.path.realpath(path), "ok": all(one["ok"] for one in results), "checkpoints": results})
        return
    for one in results:
        count, total = len(one["files"]), sum(f["bytes"] or 0 for f in one["files"])
        if one["ok"]:
            kind = "foreign, by the files' own checksums" if one.get("foreign") else "every byte is as it was written"
            out.line(f"{one['tag']}: {count} file{'s' * (count != 1)}, {size(total)}: {kind}")
            continue
        if one.get("problem"):
            out.line(f"{one['tag']}: {one['problem']}")
        for file in one["files"]:
            if not file["ok"]:
                out.line(f"{one['tag']}: {file['name']}: {file['problem']}")
    if not results:
        out.line(f"no checkpoints in {path}")
        return
    good = sum(one["ok"] for one in results)
    out.line(f"{good} of {len(results)} checkpoint{'s' * (len(results) != 1)} in order")
