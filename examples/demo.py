"""relight's main job: train, kill -9 in the middle of a save, go on from memory, and prove that nothing changed.

    python examples/demo.py [FOLDER]        about three minutes; FOLDER is demo-run by default

1. A GPT is trained on the Python standard library's sources and is never interrupted: the reference, with torch.save.
2. The same training with relight is killed with SIGKILL from outside while a save is being persisted.
3. A new process goes on from shared memory and persists what the dead one had left.
4. Losses and the whole final state are compared bit for bit with the reference.
5. The same with a script written for Nebula.
6. torch.save + fsync and relight are measured on the same state, in turn.
7. Everything left is verified, and loaded by plain torch in a process where relight cannot be imported.

Exit code 0 if all of it is so, 1 with one sentence if anything is not.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import report
import watch
from screen import Screen

EXAMPLES = Path(__file__).parent
STEPS, EVERY = 100, 10
DISK_BYTES, MEMORY_BYTES = 4 << 30, 700 << 20
MARK = ".made-by-relight-demo"


class NotSo(Exception):
    """Something that the demo promises is not so; the message says what."""


class Demo:
    """The parts of the demo, in order."""

    def __init__(self, folder: Path, memory: Path, screen: Screen) -> None:
        self.folder, self.screen = folder, screen
        hidden = {name: value for name, value in os.environ.items() if not name.startswith(("RELIGHT_", "NEBULA_"))}
        # Passive: threads that spin at their barriers take the core that the writing of the checkpoint needs.
        own = {"RELIGHT_MEMORY_DIR": str(memory), "PYTHONUNBUFFERED": "1", "OMP_WAIT_POLICY": "passive"}
        self.environment = {**hidden, **own}

    def expect(self, holds: bool, text: str, otherwise: str = "") -> None:
        """Shows what is so, or ends the demo."""
        if not holds:
            raise NotSo(otherwise or f"it is not so that {text}")
        self.screen.proved(text)

    def relight(self, *arguments: str) -> Any:
        """The answer of the `relight` command, and its exit code under "code"."""
        command = [sys.executable, "-m", "relight.cli", *arguments, "--json"]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False)
        if not done.stdout:
            raise NotSo(f"`relight {' '.join(arguments)}` said: {done.stderr.strip()}")
        return json.loads(done.stdout)

    # ---- the parts ----

    def reference(self) -> watch.Record:
        """Never interrupted, never meets relight."""
        self.screen.title(f"The reference: {STEPS} steps, never interrupted, torch.save + fsync every {EVERY} steps")
        return self._run("train_plain.py", "reference")

    def killed(self, script: str, name: str, kill_at: int) -> watch.Record:
        """Killed while the save of step `kill_at`, or of a later one, is being persisted."""
        root = self.folder / name
        record = watch.Record()
        for at in range(kill_at, STEPS, EVERY):
            part = self._run(script, name, kill_at=at)
            record.losses.update(part.losses)
            record.stalls.update(part.stalls)
            record.persists.update(part.persists)
            record.killed_at, record.pid = part.killed_at, part.pid
            tag = f"global_step{part.killed_at}"
            if not (root / tag / "complete.txt").exists() and not (root / tag / ".relight" / "manifest.json").exists():
                break
            self.screen.line(f"the disk was faster than the kill: {tag} is committed; once more, with the next save")
        else:
            raise NotSo(f"no kill hit a save of {script} while it was being persisted, in {STEPS // EVERY} tries")
        self.expect(
            True, f"SIGKILL hit process {record.pid} while {tag} was being persisted: on disk it is not committed"
        )
        seen = self.relight("ls", str(root))
        left = [one for one in seen["in_memory"] if (one["tag"], one["alive"], one["state"]) == (tag, False, "staged")]
        self.expect(bool(left), f"`relight ls` finds {tag} whole in the shared memory of the dead process",
                    f"{tag} is not in the memory that process {record.pid} left")  # fmt: skip
        committed = [one["tag"] for one in seen["checkpoints"] if "persistent" in one["tiers"]]
        newest = committed[-1] if committed else "nothing yet"
        self.expect(tag not in committed, f"the newest that is committed on disk is still {newest}")
        return record

    def resumed(self, script: str, name: str, before: watch.Record) -> watch.Record:
        """A new process over the same folder."""
        at, tag = before.killed_at, f"global_step{before.killed_at}"
        drained: list[str] = []

        def look() -> None:
            if not drained and (self.folder / name / tag / "complete.txt").exists():
                drained.append(tag)

        record = self._run(script, name, each=look)
        said = record.resumed or {}
        self.expect(said.get("step") == str(at), f"a new process went on from step {at}: no step is lost",
                    f"{script} went on from step {said.get('step', '0')}, not from {at}")  # fmt: skip
        if "tier" in said:
            self.expect(said["tier"] == "memory", "it resumed from tier: memory (the disk did not have this step)",
                        f"{script} resumed from the {said['tier']} tier, not from memory")  # fmt: skip
        else:  # a script of Nebula's time says no tier; the disk did not have this step, as we saw
            self.screen.proved("it can only have come from memory: the disk did not have this step")
        self.expect(drained == [tag], f"{tag}, which the dead process had left, was persisted by the new one",
                    f"{tag} was not persisted by the process that resumed from it")  # fmt: skip
        return record

    def same(self, reference: watch.Record, before: watch.Record, after: watch.Record) -> None:
        """Losses and final state, bit for bit."""
        losses = {**before.losses, **after.losses}
        for step, loss in reference.losses.items():
            if losses.get(step) != loss:
                raise NotSo(
                    f"the loss of step {step} is {losses.get(step)}, and {loss} in the run that was not interrupted"
                )
        self.screen.proved(f"all {len(losses)} losses are equal to the reference, bit for bit")
        assert reference.fingerprint and after.fingerprint
        different = [part for part, digest in reference.fingerprint.items() if after.fingerprint.get(part) != digest]
        parts = ", ".join(reference.fingerprint)
        self.expect(
            not different,
            f"the final state is equal bit for bit: {parts}",
            f"the final {different} differ from the reference",
        )

    def measured(self) -> dict[str, Any]:
        """torch.save + fsync against relight."""
        self.screen.title("Measuring torch.save + fsync and relight on the same state, in turn")
        command = [sys.executable, str(EXAMPLES / "measure.py"), str(self.folder / "measure")]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise NotSo(f"the measurement ended with an error:\n{done.stderr.strip()}")
        measured: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        self.screen.table(report.COLUMNS, report.rows(measured))
        what = f"{measured['bytes'] / 1e6:.0f} MB, medians of {measured['rounds']} rounds after one to warm up"
        self.screen.line(f"({what}; the page cache is warm for loads; in brackets: times faster than torch)")
        return measured

    def verified(self) -> None:
        """All that is left, byte for byte, and by plain torch."""
        self.screen.title("Checking what is left, without relight and with it")
        roots = [self.folder / name for name in ("relight", "nebula", "measure/relight")]
        for root in roots:
            found = self.relight("verify", str(root))
            bad = [one["tag"] for one in found["checkpoints"] if not one["ok"]]
            count = len(found["checkpoints"])
            self.expect(
                found["ok"] and count > 0,
                f"relight verify {root.relative_to(self.folder)}: {count} checkpoints in order",
                f"relight verify finds {', '.join(bad) or 'nothing'} in {root}",
            )
        files = sorted(str(path) for root in roots for path in root.glob("*/*.pt"))
        final = self.folder / "relight" / f"global_step{STEPS}"
        command = [sys.executable, str(EXAMPLES / "plain_reader.py"), str(self.folder / "reference" / "last.pt"),
                   str(final / "model.pt"), str(final / "optimizer.pt"), *files]  # fmt: skip
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise NotSo(f"plain torch cannot load a file that was left:\n{done.stderr.strip()}")
        read = json.loads(done.stdout)
        what = f"all {read['loaded']} files ({read['tensors']} tensors)"
        self.screen.proved(f"plain torch, in a process where relight cannot be imported, loads {what}")
        self.expect(
            not read["different"],
            "final weights and optimizer, read so, are those of the reference, bit for bit",
            f"these differ from the reference: {', '.join(read['different'][:5])}",
        )
        orphans = self.relight("drain", "--list")
        self.expect(not orphans, "no shared memory is left behind", f"shared memory was left behind: {orphans}")

    def _run(self, script: str, name: str, **more: Any) -> watch.Record:
        try:
            return watch.run(
                script, self.folder / name, self.screen, steps=STEPS, every=EVERY, environment=self.environment, **more
            )
        except watch.Died as error:
            raise NotSo(str(error)) from None


def main() -> int:
    """The whole demo."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=EXAMPLES.parent / "demo-run")
    folder = parser.parse_args().folder.absolute()
    screen, started = Screen(), time.perf_counter()
    memory: Path | None = None
    try:
        prepare(folder)
        memory = memory_folder(folder, screen)
        demo = Demo(folder, memory, screen)
        reference = demo.reference()
        screen.title("The same training with relight, killed with SIGKILL from outside in the middle of a save")
        before = demo.killed("train_gpt.py", "relight", kill_at=STEPS // 2)
        screen.title("Started again")
        after = demo.resumed("train_gpt.py", "relight", before)
        demo.same(reference, before, after)
        screen.title("A script written for Nebula (import nebulaml as nm), killed in the same way")
        nebula_before = demo.killed("train_nebula.py", "nebula", kill_at=7 * STEPS // 10)
        screen.title("Started again")
        nebula_after = demo.resumed("train_nebula.py", "nebula", nebula_before)
        demo.same(reference, nebula_before, nebula_after)
        measured = demo.measured()
        demo.verified()
        report.picture(folder / "report.png", reference, before, after, [nebula_before, nebula_after], measured)
        (folder / "measured.json").write_text(json.dumps(measured, indent=1))
    except NotSo as error:
        screen.failed(str(error))
        return 1
    except KeyboardInterrupt:
        screen.failed("interrupted")
        return 130
    finally:
        screen.pause()
        if memory is not None:
            shutil.rmtree(memory, ignore_errors=True)
    screen.title(f"All of it is so, in {time.perf_counter() - started:.0f} s. The picture: {folder / 'report.png'}")
    return 0


def prepare(folder: Path) -> None:
    """An empty folder: of an earlier demo it is emptied, of anything else it is left alone."""
    if folder.exists() and not (folder / MARK).exists() and any(folder.iterdir()):
        raise NotSo(f"{folder} holds something that is not from an earlier demo; name another folder")
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    (folder / MARK).touch()
    if (free := shutil.disk_usage(folder).free) < DISK_BYTES:
        raise NotSo(
            f"the demo needs {DISK_BYTES >> 30} GiB on disk, and {folder} has {free / 2**30:.1f}; name another folder"
        )


def memory_folder(folder: Path, screen: Screen) -> Path:
    """A folder of our own for the memory tier: what other trainings of this user left there is none of ours."""
    shared = Path("/dev/shm")
    if shared.is_dir() and shutil.disk_usage(shared).free >= MEMORY_BYTES:
        return Path(tempfile.mkdtemp(prefix="relight-demo-", dir=shared))
    screen.line(f"/dev/shm has less than {MEMORY_BYTES >> 20} MiB (Docker: --shm-size=1g gives more):")
    screen.line(
        f"the memory tier of this demo is a mapped file in {folder} instead, which outlives a SIGKILL just as well"
    )
    return Path(tempfile.mkdtemp(prefix="memory-", dir=folder))


if __name__ == "__main__":
    raise SystemExit(main())
