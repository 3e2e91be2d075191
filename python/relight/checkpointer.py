"""Checkpointer: the checkpoints of one training, in one directory.

Owns: what `save` puts into a tag, which checkpoint `resume` takes, and who is told of a failed save, and when.
Must not: import torch at module level; write below the root itself (the engine does); hold a lock while it waits.
Invariant: `save` returns only when the state is staged; an error of an earlier save never costs a later one.
"""

from __future__ import annotations

import json
import logging
import os
import time
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from relight import runtime
from relight.arguments import allowed, local_path, step_of_tag, tag_and_step, world_of
from relight.checkpoint import Checkpoint, Resumed, Verification
from relight.exceptions import (
    CheckpointError,
    CheckpointNotFound,
    EngineClosed,
    InvalidArgument,
    NotPicklable,
    ResumeWarning,
    SaveFailedWarning,
    WaitTimeout,
)
from relight.handle import Handle, wait_all
from relight.meta import meta_to_json
from relight.options import OnError, Options, TornCheck, check_keep
from relight.parts import others_run, part_of, plan_parts, stem_of
from relight.reading import SINGLE_FILE, Loading, Reader, TagSource
from relight.reports import joined_error, log_save, untold
from relight.state import STATE_FILE, Part, Restore, TrainState

if TYPE_CHECKING:
    from relight import _core
    from relight.torch.pickling import Snapshot

__all__ = ["Checkpointer"]

_log = logging.getLogger("relight.checkpointer")


class Checkpointer:
    """Saves into one directory and resumes from it.

    ```python
    with relight.Checkpointer("runs/exp1", keep=3) as ckpt:
        state = relight.TrainState(model=model, optimizer=optimizer)
        for step in range(ckpt.resume(state), steps):
            train_step()
            if step % 100 == 99:
                ckpt.save(step + 1, state)
    ```

    Several Checkpointers on one directory in one process are fine, and one Checkpointer may be used by several threads.
    It belongs to the process that made it: it cannot be pickled, and a forked child is refused.

    Args:
        path: the directory; made if it is not there.
        keep: how many checkpoints stay, the newest ones; None keeps all. Tags with a step and tags without are counted
            apart. What was just saved, the newest that was saved as `best`, what is being read and what relight did not
            write is never deleted. Older runs count: if a run that was started anew has saved, its checkpoints are
            newer than those of a run before it, whatever their step.
        rank, world_size: which process of how many this is. None: as `torch.distributed` or the launcher says.
        on_error, torn_check: as in `Options`; these go before it.
        options: how relight works in this process; see `Options`.

    Raises:
        InvalidArgument: a value cannot be meant so, or there are several processes, which is not built yet.
        StorageDenied, StorageFull, StorageUnavailable: the directory cannot be made or read.
        EngineClosed: this process was forked from one that uses relight.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        keep: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        on_error: OnError | None = None,
        torn_check: TornCheck | None = None,
        options: Options | None = None,
    ) -> None:
        runtime.check_fork()
        self._keep = check_keep(keep)
        if not (options is None or isinstance(options, Options)):
            raise InvalidArgument(f"options={options!r:.100} cannot be used; give a relight.Options, or None")
        self._options = (options or Options()).replaced(on_error=on_error, torn_check=torn_check)
        self._world = world_of(rank, world_size)
        self._pid = os.getpid()
        self._closed = False
        self._pending: dict[int, Handle] = {}  # single dict operations only: the event thread takes out of it
        self._failed: deque[Handle] = deque()
        self._unwarned: deque[Handle] = deque()
        self.resumed: Resumed | None = None
        """What the last `resume` did; None before, and on a fresh run."""
        engine = runtime.engine(options)
        self._root: _core.Root = engine.open_root(local_path(path), create=True, drain=False)
        self._drained = tuple(_drained_tags(json.loads(engine.drain()), self._root.path))
        engine.await_drains(self._root.path)

    @property
    def path(self) -> str:
        """The directory: absolute, links resolved."""
        return self._root.path

    @property
    def keep(self) -> int | None:
        """How many checkpoints stay; None: all."""
        return self._keep

    # ---- saving ----

    def save(
        self,
        tag: int | str,
        state: object = None,
        *,
        files: Mapping[str, object] | None = None,
        step: int | None = None,
        meta: Mapping[str, Any] | None = None,
        best: bool = False,
        blocking: bool = False,
    ) -> Handle:
        """Copies the state and returns; persisting and committing go on in the background.

        What becomes which file: a `TrainState` becomes its files. Any other object, a dict or state dict included,
        becomes the one file `state.pt`. Several objects under names of their own are given as
        `files={"model.pt": ..., "ema.pt": ...}`, alone or beside `state`. Nothing is guessed from the keys of a dict.

        Saving to a tag that exists adds to it, file by file; the old content stays whole until the new is committed.

        Args:
            tag: a step number, which becomes the tag `global_step<n>`; or a name, whose step is the number in it.
            step: the step of a tag without a number in it. Such a tag without a step is never the newest.
            meta: facts of your own, as JSON; a number that is not finite becomes "NaN", "Infinity" or "-Infinity".
            best: marks the checkpoint as the best one so far.
            blocking: wait for the commit; errors are raised here.

        Returns:
            A handle on the save; `result()` waits until the checkpoint is durable.

        Raises:
            InvalidArgument: the tag, a file name or `meta` cannot be used, or there is nothing to save.
            NotPicklable: a part of the state cannot be pickled; nothing was written.
            TornSnapshot: a tensor changed during the call; nothing is committed.
            StorageFull, StorageUnavailable: a checkpoint larger than the memory tier could not be written.
            CheckpointError: with `on_error="raise"`, the error of an earlier save; this one is under way all the same.
        """
        runtime.check_fork()
        started = time.perf_counter()
        self._check_usable()
        name, number = tag_and_step(tag, step)
        facts = meta_to_json(meta)
        parts, finish = self._parts(state, files, number)
        snapshots = plan_parts(parts, name)
        if finish is not None:
            left_out = {part.file for part in parts} - {file for file, _ in snapshots}
            snapshots += plan_parts([finish(left_out)], name)
        if not snapshots:
            raise InvalidArgument(f"there is nothing to save under {name}; give a state or files={{...}}", tag=name)
        share = self._root.begin(
            name,
            step=number,
            rank=self._world.rank,
            world_size=self._world.world_size,
            meta=facts,
            best=bool(best),
            keep=self._keep,
        )
        try:
            reports = self._stage(share, snapshots)
            ticket = share.seal()
        except BaseException:
            share.abandon()
            raise
        stall_s = time.perf_counter() - started
        handle = self._handle(ticket, name, [file for file, _ in snapshots], reports, stall_s)
        log_save(handle, reports)
        self._tell_of_failures(handle)
        if blocking:
            handle.result()
        return handle

    def _parts(
        self, state: object, files: Mapping[str, object] | None, step: int | None
    ) -> tuple[list[Part], Callable[[Collection[str]], Part] | None]:
        """The files of this save; for a TrainState also what makes its small file once it is known what is left out."""
        parts: list[Part] = []
        finish = None
        if isinstance(state, TrainState):
            capture = state.capture()
            parts += capture.parts
            world = self._world
            for remark in capture.remarks:
                warnings.warn(remark, ResumeWarning, stacklevel=3)

            def finish(left_out: Collection[str]) -> Part:
                return capture.facts(step=step, rank=world.rank, world_size=world.world_size, left_out=left_out)

        elif state is not None:
            parts.append(part_of(SINGLE_FILE, state))
        if files is not None:
            if not isinstance(files, Mapping):
                raise InvalidArgument(f"files is a {type(files).__name__}; give a mapping of file name to object")
            parts += [part_of(file, value) for file, value in files.items()]
        names = [part.file for part in parts] + ([STATE_FILE] if finish is not None else [])
        twice = sorted({file for file in names if names.count(file) > 1})
        if twice:
            raise InvalidArgument(f"{', '.join(twice)} would be saved twice; choose another name in files={{...}}")
        return parts, finish

    def _stage(self, share: _core.Share, snapshots: Sequence[tuple[str, Snapshot]]) -> list[_core.StageReport]:
        check = self._options.torn_check
        compare = check == "compare" or (check == "auto" and others_run())
        reports = []
        for file, snapshot in snapshots:
            reports.append(share.stage(file, snapshot.entries, stem=stem_of(file), compare=compare))
        # All files are of one moment: a change of the first while the last was copied tears them too.
        for _, snapshot in snapshots:
            snapshot.check_torn()
        return reports

    def _handle(
        self, ticket: _core.Ticket, tag: str, files: Sequence[str], reports: Sequence[_core.StageReport], stall_s: float
    ) -> Handle:
        def ended(handle: Handle, error: CheckpointError | None) -> None:
            if error is not None:
                self._failed.append(handle)
                self._unwarned.append(handle)
            self._pending.pop(handle.id, None)  # last: who no longer finds it there must find its failure

        def started(handle: Handle) -> None:
            self._pending[handle.id] = handle

        return Handle(
            ticket,
            tag=tag,
            path=os.path.join(self._root.path, tag),
            files=files,
            reports=reports,
            stall_s=stall_s,
            on_start=started,
            on_done=ended,
        )

    def _tell_of_failures(self, current: Handle) -> None:
        """An earlier save has failed and this one has done its work: warns, once for each, or raises."""
        failures = [handle for handle in untold(self._unwarned) if handle is not current]
        if not failures:
            return
        if self._options.on_error == "raise":
            raise joined_error(failures)
        for handle in failures:
            error = handle.error()
            warnings.warn(
                f"an earlier save failed: {handle.what}: {type(error).__name__}: {error} ({current.what} is staged and "
                "under way)",
                SaveFailedWarning,
                stacklevel=3,
            )

    # ---- waiting and closing ----

    def wait(self, timeout: float | None = None) -> None:
        """Waits until every save of this Checkpointer is committed.

        Raises:
            WaitTimeout: some are not after `timeout` seconds; they go on.
            CheckpointError: a save failed whose error nobody was given yet; those of others are in its notes.
        """
        runtime.check_fork()
        self._raise_for(wait_all(list(self._pending.values()), timeout), timeout)

    def close(self, timeout: float | None = None) -> None:
        """Waits for saves under way and ends this Checkpointer. A second call does nothing more.

        Args:
            timeout: longest wait in seconds. None: `Options.close_timeout_s`. What is not persisted by then stays in
                memory, where the next process that opens the directory finds and persists it.

        Raises:
            WaitTimeout, CheckpointError: as `wait`.
        """
        runtime.check_fork()
        self._closed = True
        limit = self._options.close_timeout_s if timeout is None else timeout
        left = wait_all(list(self._pending.values()), limit)
        for handle in left:
            handle.given_up = True
            self._pending.pop(handle.id, None)
        self._raise_for(left, limit)

    def _raise_for(self, unfinished: Sequence[Handle], timeout: float | None) -> None:
        late = None
        if unfinished:
            names = ", ".join(handle.what for handle in unfinished)
            late = WaitTimeout(
                f"not persisted after {timeout:g} s: {names}. Saves under way go on while the process lives, and what "
                "is staged in shared memory outlives it; wait longer, or look at the storage",
                path=self._root.path,
                tag=unfinished[0].tag,
            )
        failures = untold(self._failed)
        if failures:
            error = joined_error(failures)
            if late is not None:
                error.add_note(f"relight: {late}")
            raise error
        if late is not None:
            raise late

    def __enter__(self) -> Self:
        self._check_usable()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if os.getpid() != self._pid:
            return  # a forked child on its way out: what is under way is the parent's
        try:
            self.close()
        except CheckpointError as ours:
            if error is None:
                raise
            # The caller's own error is the news; ours goes with it.
            error.add_note(f"relight: {type(ours).__name__} at the end of the with block: {ours}")
            _log.error("at the end of the with block: %s: %s", type(ours).__name__, ours)

    # ---- reading ----

    def resume(
        self,
        state: TrainState,
        tag: int | str | None = None,
        *,
        weights_only: bool = True,
        allow: Iterable[object] = (),
    ) -> int:
        """Restores the newest complete checkpoint into the live objects, from memory if it is there.

        A checkpoint that is damaged is passed over for the next older one, with a `ResumeWarning` that names it and the
        reason; one that was asked for by `tag` is not. All files are read and checked before an object is changed.
        Saves from here on are a new run: they are newer than what was saved after the checkpoint that was resumed from.

        Args:
            tag: take this one and no other.
            weights_only, allow: as in `load`.

        Returns:
            The step to go on from: that of the checkpoint, 0 if there is none.

        Raises:
            CheckpointNotFound: there is no such tag.
            CorruptCheckpoint: it is damaged, or every checkpoint is.
            CommitConflict: it is saved again all the time, by another process.
            InvalidArgument: an object differs from what was saved.
            ObjectNotAllowed: a file has a type that loading refuses.
        """
        runtime.check_fork()
        self._check_usable()
        if not isinstance(state, TrainState):
            raise InvalidArgument(
                f"resume takes a relight.TrainState, not a {type(state).__name__}; wrap your objects as "
                "TrainState(model=model, optimizer=optimizer), or use load()"
            )
        started = time.perf_counter()
        self._wait_for_streamed()
        loading = Loading(weights_only=weights_only, allow=tuple(allowed(allow)))
        reader = Reader(self._root)

        def restored(source: TagSource) -> tuple[Restore, int]:
            if source.checkpoint.foreign:
                raise InvalidArgument(
                    f"{source.tag} was not completed by relight (it has no manifest), so it cannot be resumed from; "
                    "load what you want of it with load(tag, file)",
                    path=source.checkpoint.path,
                    tag=source.tag,
                )
            with source.held():
                restore = state.read(source, rank=self._world.rank, world_size=self._world.world_size)
            step = source.checkpoint.step if source.checkpoint.step is not None else restore.step
            if step is None:
                restore.remarks.append(
                    "it has no step, so 0 is returned: save such a tag with step=, or keep TrainState.step up to date"
                )
            return restore, step or 0

        if tag is None:
            found = reader.newest(loading, restored)
        else:
            found = reader.one(tag_and_step(tag, None)[0], loading, restored)
        if found is None:
            self.resumed = None
            self._root.start_run(None)
            _log.info("nothing to resume from in %s: starting at step 0", self._root.path)
            for reason in self._passed_over(reader, None):
                _warn_resume(f"starting at step 0: {reason}")
            return 0
        source, (restore, step) = found
        restore.apply()
        self._root.start_run(source.tag)
        skipped = [*reader.skipped, *(self._passed_over(reader, source.checkpoint) if tag is None else ())]
        self.resumed = Resumed(
            tag=source.tag,
            step=step,
            tier=source.tier,
            seconds=time.perf_counter() - started,
            drained=self._drained,
            skipped=tuple(skipped),
        )
        died = " (left in memory by a process that died)" if source.tag in self._drained else ""
        _log.info("resumed from %s, %s tier%s, in %.2f s", source.tag, source.tier, died, self.resumed.seconds)
        # All warnings come last: one that is turned into an error must not leave a resume half done.
        for reason in skipped:
            _warn_resume(f"resumed from {source.tag}, an older checkpoint: {reason}")
        for remark in restore.remarks:
            _warn_resume(f"resumed from {source.tag}: {remark}")
        return step

    def load(
        self,
        tag: int | str | None = None,
        file: str | None = None,
        *,
        map_location: Any = None,
        weights_only: bool = True,
        mmap: bool = False,
        allow: Iterable[object] = (),
    ) -> Any:
        """Loads one file of a checkpoint, from memory if it is there, every checksum verified.

        Args:
            tag: which checkpoint. None: the newest complete one; if it is damaged, an older one and a `ResumeWarning`.
            file: which file. None: `state.pt`, or the only one.
            map_location, mmap: as in `torch.load`.
            weights_only: refuse whatever could run code. False runs it: only for files that you trust.
            allow: classes, functions or their full names that are trusted beside those that always are.

        Raises:
            CheckpointNotFound: no such checkpoint, or no such file in it.
            CorruptCheckpoint: it is damaged.
            InvalidArgument: it has several files and `file` does not say which.
            ObjectNotAllowed: it has a type that loading refuses.
        """
        runtime.check_fork()
        self._check_usable()
        self._wait_for_streamed()
        loading = Loading(map_location=map_location, weights_only=weights_only, mmap=mmap, allow=tuple(allowed(allow)))
        reader = Reader(self._root)

        def loaded(source: TagSource) -> Any:
            return source.load(source.only_file() if file is None else file)

        if tag is not None:
            return reader.one(tag_and_step(tag, None)[0], loading, loaded)[1]
        found = reader.newest(loading, loaded)
        if found is None:
            raise CheckpointNotFound(f"there is no complete checkpoint in {self._root.path}", path=self._root.path)
        source, result = found
        for reason in (*reader.skipped, *self._passed_over(reader, source.checkpoint)):
            _warn_resume(f"loaded {source.tag}, an older checkpoint: {reason}")
        return result

    def list(self) -> list[Checkpoint]:
        """All complete checkpoints, oldest first; foreign directories before them."""
        runtime.check_fork()
        self._check_usable()
        self._wait_for_streamed()
        return Reader(self._root).checkpoints()

    def latest(self) -> Checkpoint | None:
        """The newest complete checkpoint, in memory or persisted; None if there is none. Never a foreign one."""
        checkpoints = self.list()
        tag = self._root.latest()
        return next((one for one in checkpoints if one.tag == tag), None)

    def verify(self, tag: int | str) -> Verification:
        """Reads every byte of a checkpoint and compares it with its checksums.

        Raises:
            CheckpointNotFound: there is no such tag.
        """
        runtime.check_fork()
        self._check_usable()
        name, _ = tag_and_step(tag, None)
        self._wait_for_tag(name)
        return Verification.from_json(json.loads(self._root.verify(name)))

    def delete(self, tag: int | str) -> None:
        """Deletes a checkpoint; if it is being saved, when that has ended. Files that relight did not write stay.

        Raises:
            CheckpointNotFound: there is no such tag.
        """
        runtime.check_fork()
        self._check_usable()
        name, _ = tag_and_step(tag, None)
        self._wait_for_tag(name)
        self._root.delete(name)

    # ---- inside ----

    def _check_usable(self) -> None:
        if self._closed:
            raise EngineClosed("this Checkpointer is closed; make a new one", path=self._root.path)

    def _wait_for_streamed(self) -> None:
        """What is larger than the memory tier is read only once committed: an older one must not pass for it."""
        wait_all([handle for handle in list(self._pending.values()) if handle.streamed], None)

    def _wait_for_tag(self, tag: str) -> None:
        wait_all([handle for handle in list(self._pending.values()) if handle.tag == tag], None)

    def _passed_over(self, reader: Reader, resumed: Checkpoint | None) -> Sequence[str]:
        """What lies in the root, seems newer than what was resumed from, and is no complete checkpoint of relight."""

        def newer(step: int | None) -> bool:
            return resumed is None or resumed.step is None or (step is not None and step > resumed.step)

        problems = reader.problems()
        under_way = {handle.tag for handle in list(self._pending.values())}
        if problems:  # after the look at the root: what another process has begun since is no problem of it either
            under_way |= self._being_saved_elsewhere()
        found = [
            f"{one.tag} cannot be used: {one.reason}"
            for one in problems
            if one.tag not in under_way and newer(step_of_tag(one.tag))
        ]
        return found + [
            f"{one.tag} was not completed by relight (it has no manifest); it is taken by name only: load(tag, file)"
            for one in reader.checkpoints()
            if one.foreign and one.step is not None and newer(one.step)
        ]

    def _being_saved_elsewhere(self) -> set[str]:
        """Tags that other living processes of this node are saving here: not complete yet is not damaged."""
        from relight import _core

        return {
            one["tag"]
            for region in json.loads(_core.regions(self._options.memory_dir))
            for one in region["checkpoints"]
            if region["alive"] and region["pid"] != os.getpid() and one["root"] == self._root.path
        }

    def __repr__(self) -> str:
        return f"<relight.Checkpointer {self._root.path}{' closed' if self._closed else ''}>"

    def __reduce__(self) -> Any:
        raise NotPicklable(
            "a relight.Checkpointer belongs to its process and cannot be pickled; pass its path and make one there"
        )


def _drained_tags(report: Iterable[Mapping[str, Any]], root: str) -> Iterable[str]:
    for region in report:
        for tag in region.get("tags", ()):
            if tag["root"] == root and not tag["persisted"]:
                yield tag["tag"]


def _warn_resume(text: str) -> None:
    _log.warning("%s", text)
    warnings.warn(text, ResumeWarning, stacklevel=3)
