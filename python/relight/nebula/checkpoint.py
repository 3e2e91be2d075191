"""`Checkpoint`: the handle that clients save to and load from.

Owns: the order of one save and of one load; what a client may pass.
Must not: decide when a tag is complete (`shares`) or which is the latest (`find`).
Invariant: a handle holds no state but its name: any number of handles of a tag act as one.
"""

import os
from typing import Any, Final

from relight import _core, runtime
from relight.distributed.world import World, find_world, require_one_process
from relight.exceptions import CheckpointNotFound, CorruptCheckpoint, InvalidArgument
from relight.nebula import api, find, lifetime, roots, shares
from relight.nebula.roots import NebulaRoot

LOAD_WAIT_S: Final = 600.0
"""How long `load` waits for a persist under way when the file is in no tier yet."""


class Checkpoint:
    """One checkpoint by its tag: `save` files into it, `load` them, `commit` it.

    Args:
        tag: the name of the checkpoint, `str(tag)`. None: `global_step<k>`, k one above the largest complete step at
            this process's first such call, then one more with each call.
        num_of_files: when the checkpoint is complete. -2: at `commit()`. n: with its n-th file. None (or -1): with the
            next sign that the save is over: an optimizer step, another tag, a getter, a flush, the end of the process.

    Raises:
        InvalidArgument: the tag is no directory name, or the count is none of these.
    """

    __slots__ = ("_count", "_root", "_tag")

    def __init__(self, tag: object = None, num_of_files: int | None = None) -> None:
        world = _world()
        api.ensure_init()
        self._count = shares.read_count(num_of_files)
        self._root = roots.configured()
        lifetime.watch()
        if tag is None:
            self._tag = shares.process().next_tag(self._root)
        else:
            self._tag = str(tag)
            _core.check_tag(self._tag)
        shares.process().open(self._root, self._tag, world)

    @classmethod
    def of_found(cls, root: NebulaRoot, tag: str) -> "Checkpoint":
        """A handle of what a getter found. It opens no share: whoever only reads does not take part in the tag."""
        self = cls.__new__(cls)
        self._count = None
        self._root = root
        self._tag = tag
        return self

    @property
    def tag(self) -> str:
        """The name of the checkpoint."""
        return self._tag

    def __repr__(self) -> str:
        return f"Checkpoint(tag={self._tag!r})"

    def save(self, name: str, obj: object) -> None:
        """Saves `obj` as the file `name`. On return it is copied, and may be changed.

        Raises:
            InvalidArgument: `name` is no file name.
            NotPicklable: a part of `obj` cannot be pickled; the message names its key.
            StorageFull: it fits neither into memory nor on the storage.
            TornSnapshot: `obj` was changed meanwhile. Nothing of this call is committed; save again.
        """
        runtime.check_fork()  # first: in a forked child even an import may wait for a lock that nobody holds any more
        from relight.nebula import staging  # brings torch, which a process that only lists does not need

        file = _file_name(name)
        share = shares.process().of(self._root, self._tag, _world())
        lifetime.watch()  # a handle from a getter opened none
        share.save(file, self._count, lambda target: staging.stage(target, file, obj))
        shares.process().warn_of_failed_persists()

    def load(self, name: str, map_location: Any = None, weights_only: bool = False) -> Any:
        """The object that was saved as `name`, with its checksums verified.

        Args:
            map_location: as in `torch.load`: a string, a `torch.device`, a dict or a function of (storage, location).
            weights_only: False, as clients of Nebula expect, makes any object, which can run code: True for files from
                people you do not trust.

        Raises:
            CheckpointNotFound: there is no such file; the message names those there are.
            CorruptCheckpoint: its bytes are not what was saved, in any tier. Getters skip this checkpoint from then on.
        """
        file = _file_name(name)
        share = shares.process().known(self._root, self._tag)
        own = None if share is None else share.image(file)
        if own is not None:
            return _unpickle(own, map_location, weights_only)
        try:
            loaded = self._load_from_tiers(file, map_location, weights_only)
        except CheckpointNotFound:
            # Larger than the memory tier, it may be on its way to the disk.
            if share is None or not share.has_published(file) or not share.wait_for_persists(LOAD_WAIT_S):
                raise self._no_such_file(file) from None
            loaded = self._load_from_tiers(file, map_location, weights_only)
        self._note_resume()
        return loaded

    def commit(self) -> bool:
        """Declares that this process's files of the tag are all saved. Waits for no disk.

        Returns:
            True if they are; False if a save failed and was not repeated: then the tag stays incomplete.
        """
        return shares.process().of(self._root, self._tag, _world()).seal()

    def _load_from_tiers(self, file: str, map_location: Any, weights_only: bool) -> Any:
        image = self._open(file)
        try:
            return _unpickle(image, map_location, weights_only)
        except CorruptCheckpoint as first:
            if image.tier != "persistent":
                return self._load_second_copy(file, map_location, weights_only, first)
            self._skip_from_now_on()
            raise

    def _open(self, file: str) -> _core.Image:
        try:
            return self._root.core.open_image(self._tag, file)
        except CheckpointNotFound:
            found = find.by_tag(self._root, self._tag)
            path = found.path_of(file) if found is not None and found.foreign else None
            if path is None:
                raise
            return _core.open_image(path)  # left by Nebula: no manifest names it

    def _load_second_copy(self, file: str, map_location: Any, weights_only: bool, first: CorruptCheckpoint) -> Any:
        """Memory went bad: the file on disk may be good."""
        try:
            image = self._root.core.open_image(self._tag, file, tier="persistent")
            return _unpickle(image, map_location, weights_only)
        except (CheckpointNotFound, CorruptCheckpoint):
            self._skip_from_now_on()
            raise first from None

    def _skip_from_now_on(self) -> None:
        found = find.by_tag(self._root, self._tag)
        if found is not None:
            find.skip_from_now_on(found)

    def _no_such_file(self, file: str) -> CheckpointNotFound:
        found = find.by_tag(self._root, self._tag)
        where = self._root.path or "the memory tier"
        if found is None:
            known = ", ".join(each.tag for each in find.complete(self._root)) or "none"
            reason = find.damaged(self._root).get(self._tag)
            return CheckpointNotFound(
                f"there is no complete checkpoint {self._tag} in {where}{f' ({reason})' if reason else ''}; "
                f"complete ones: {known}",
                path=self._root.path,
                tag=self._tag,
            )
        names = ", ".join(map(repr, found.names)) or "none"
        return CheckpointNotFound(
            f"{self._tag} in {where} has no file {file!r}; its files: {names}", path=found.directory, tag=self._tag
        )

    def _note_resume(self) -> None:
        """What is saved after a load outranks what the load went back behind, also with a smaller step."""
        self._root.core.start_run(self._tag)
        configured = roots.configured()
        if configured is not self._root:
            configured.core.start_run(None)


def _world() -> World:
    world = find_world()
    require_one_process(world, "relight.nebula")
    return world


def _file_name(name: object) -> str:
    if isinstance(name, os.PathLike):
        name = os.fspath(name)
    if not isinstance(name, str):
        raise InvalidArgument(f"the name of a file is {name!r}, a {type(name).__name__}; give a str")
    if not name:
        raise InvalidArgument("the name of a file is empty; give it one, as 'model.pt'")
    return name


def _unpickle(image: _core.Image, map_location: Any, weights_only: bool) -> Any:
    from relight.nebula import staging  # brings torch, which a process that only lists does not need

    return staging.unpickle(image, map_location, weights_only)
