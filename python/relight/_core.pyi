"""The Rust engine of relight, as Python sees it. Private: use `relight`.

Errors are the classes of `relight.exceptions`. Long waits free the GIL and notice Ctrl-C within 100 ms.
JSON strings keep this boundary small; `relight` turns them into typed objects.
"""

from collections.abc import Sequence
from typing import final

from typing_extensions import Buffer  # known to every type checker; nothing imports it when relight runs

__all__ = [
    "Engine", "check_tag", "crc32", "escape_file_name", "open_image", "_panic", "regions", "remove_region", "save_file",
    "step_of_tag", "Image", "ImageEntry", "Root", "Share", "StageReport", "Ticket", "__version__",
]  # fmt: skip

__version__: str

# One entry of an archive: its name without the stem, and its bytes in order: `bytes`, or buffers that are concatenated.
_Entry = tuple[str, bytes | Sequence[Buffer]]

@final
class StageReport:
    """What staging (or a blocking write) of one file did."""
    @property
    def bytes(self) -> int: ...            # length of the image
    @property
    def crc32(self) -> int: ...            # of the whole image
    @property
    def seconds(self) -> float: ...        # all of the call
    @property
    def wait_seconds(self) -> float: ...   # of it, waiting for room in the memory tier
    @property
    def streamed(self) -> bool: ...        # larger than the budget: written through, not kept in memory
    @property
    def memory(self) -> str: ...           # "shared" | "private" | "none"

@final
class Engine:
    """One per process: the memory tier, copy threads and the persist thread."""
    def __new__(
        cls,
        *,
        memory_bytes_max: int | None = None,   # None: NEBULA_MEMORY_BUFFER_SIZE, else half of what the node can spare
        memory_dir: str | None = None,         # None: RELIGHT_MEMORY_DIR, else /dev/shm
        memory_keep: int = 2,                  # persisted checkpoints per root that stay in memory
        chunk_bytes: int = 4194304,
        copy_threads: int = 2,
        attempts_max: int = 3,                 # tries of a persist, each on a new file
        retry_delay_s: float = 0.5,            # before the second try; doubles
        lock_timeout_s: float = 30.0,          # wait for a tag that another process is writing
    ) -> Engine: ...
    @property
    def pid(self) -> int: ...
    def open_root(self, root: str, /, *, create: bool = True, drain: bool = True) -> Root: ...
    def stage_file(self, path: str, entries: Sequence[_Entry], /, *, stem: str, compare: bool = False) -> tuple[StageReport, Ticket]:
        """Stages one file for `path` itself (no tag): what save_async to a path does."""
    def pending_path(self, path: str, /) -> Ticket | None:
        """The newest unfinished stage_file to this path (links resolved), if there is one."""
    def drain(self) -> str:
        """Adopts regions of dead processes now; JSON list of {region, pid, tags: [{root, tag, persisted}], dropped: [...]}."""
    def await_drains(self, place: str, /) -> None:
        """Waits until other processes of this node have persisted what a dead one staged for this root or path, at most
        lock_timeout_s; then WaitTimeout names the process."""
    def memory(self) -> str:
        """JSON: {kind, dir, region, capacity_bytes, used_bytes, reserved_bytes, peak_bytes, checkpoints: [...], reason}."""
    def set_memory_keep(self, memory_keep: int, /) -> None: ...
    def next_event(self, timeout_s: float, /) -> str | None:
        """The next event as JSON, or None at the time limit:
        {"event": "log", "level": "info"|"warning"|"error", "message": str, "tag"?: str, "root"?: str}
        {"event": "ticket", "id": int, "state": "committed"|"failed"}
        {"event": "closed"}"""
    def flush(self, timeout_s: float | None = None, /) -> bool:
        """Waits until nothing is queued; False at the time limit. Raises no background error."""
    def close(self, timeout_s: float | None = None, /) -> bool:
        """Waits for queued persists, at most timeout_s, then stops the threads. False if something stays staged (it is left for the drain).
        The region is removed when everything in it is persisted. Idempotent."""

@final
class Root:
    """One directory that holds tags."""
    @property
    def path(self) -> str: ...             # absolute, links resolved
    def begin(
        self, tag: str, /, *, step: int | None = None, rank: int = 0, world_size: int = 1, meta: str = "{}",
        best: bool = False, keep: int | None = None,
    ) -> Share:
        """Opens a new generation of `tag` for this rank; writes nothing yet. step None: from the tag. `meta`: the user's own JSON."""
    def list(self) -> str:
        """JSON list, oldest first by the latest rule, of
        {tag, step, run, sequence, generation, tiers: ["memory","persistent"], complete: true, foreign: bool, left_behind: bool, best, bytes,
         committed_at, staged_at, world_size, meta, path, files: [{name, path, bytes, crc32, codec, rank}]}.
        Foreign ones (no manifest) come first."""
    def latest(self) -> str | None:
        """The tag of the newest complete checkpoint, memory tier included; never a foreign one."""
    def open_image(self, tag: str, file: str, /, *, tier: str | None = None) -> Image:
        """Memory tier first, then persistent; `tier` "memory" or "persistent" asks for one."""
    def verify(self, tag: str, /) -> str:
        """JSON {tag, ok, files: [{name, bytes, ok, problem}]} : every byte is read and checked against the manifest."""
    def problems(self) -> str:
        """JSON list of {tag, reason}: directories that look like checkpoints of relight but are not whole."""
    def delete(self, tag: str, /) -> None: ...
    def start_run(self, resumed_from: str | None, /) -> None:
        """Saves from here on are a new run (the latest rule): called when a checkpoint was loaded into training."""
    def pin(self, tag: str, /) -> None: ...      # retention leaves it alone
    def unpin(self, tag: str, /) -> None: ...
    def history_append(self, event: str, tag: str, file: str, rank: int, tier: str, bytes: int, seconds: float, error: str, /) -> None: ...

@final
class Share:
    """What one rank saves under one tag: a new generation, additive per file."""
    @property
    def tag(self) -> str: ...
    @property
    def files(self) -> list[str]: ...
    def stage(self, file: str, entries: Sequence[_Entry], /, *, stem: str, compare: bool = False) -> StageReport:
        """Copies the bytes; on return the caller may change its tensors. The same file again replaces it."""
    def image(self, file: str, /) -> Image: ...
    def seal(self) -> Ticket:
        """Declares that this rank's files are all there: complete in memory now, persisted and committed in the background."""
    def abandon(self) -> None: ...

@final
class Ticket:
    """One persist under way."""
    @property
    def id(self) -> int: ...
    @property
    def tag(self) -> str | None: ...
    def progress(self) -> str:
        """JSON {state: "queued"|"persisting"|"committed"|"failed", bytes_total, bytes_persisted, attempts, seconds, queued_seconds}"""
    def wait(self, timeout_s: float | None = None, /) -> bool:
        """True when committed or failed; False at the time limit."""
    def check(self) -> None:
        """Raises the error of a failed persist (a new exception each time); returns None if it is under way or committed."""

@final
class ImageEntry:
    @property
    def name(self) -> str: ...             # without the stem
    @property
    def offset(self) -> int: ...           # of the data, from the start of the image
    @property
    def length(self) -> int: ...
    @property
    def crc32(self) -> int: ...
    @property
    def stored(self) -> bool: ...          # False: compressed by a foreign tool

@final
class Image:
    """One readable torch.save archive: a file, or an image in the memory tier (kept from re-use while this object lives).
    In a forked child (a DataLoader worker) a file's image goes on working; one in memory is refused."""
    @property
    def tier(self) -> str: ...             # "memory" | "persistent"
    @property
    def path(self) -> str: ...             # where its bytes are: the file, or what is in memory as "memory:<tag>/<file>"
    @property
    def length(self) -> int: ...
    @property
    def crc32(self) -> int | None: ...     # of the archive, as its manifest or seal says; None: opened by its path, no record
    @property
    def stem(self) -> str: ...
    @property
    def entries(self) -> list[ImageEntry]: ...
    def read(self, index: int, /) -> bytes:
        """One entry, checked against its CRC-32."""
    def read_into(self, targets: Sequence[tuple[int, int, Buffer]], /) -> None:
        """Fills writable buffers with (entry index, offset in the entry, buffer), in parallel, checksums verified: a whole entry
        against its CRC-32, part of one only where the manifest's chunk checksums cover it."""
    def verify(self) -> list[str]:
        """Reads everything; one sentence per problem, empty if all is as written."""

def open_image(path: str, /) -> Image: ...
def save_file(
    path: str, entries: Sequence[_Entry], /, *, stem: str, compare: bool = False, copy_threads: int = 2, chunk_bytes: int = 4194304,
    durable: bool = True,
) -> StageReport:
    """Writes one file through bounded buffers: temporary name in the same directory, fsync, rename, fsync of the directory."""
def regions(memory_dir: str | None = None, /) -> str:
    """JSON list of this user's regions: {path, pid, alive, adopted, capacity_bytes, reserved_bytes, checkpoints: [{root, tag, step, files, bytes, state}], torn}."""
def remove_region(path: str, /) -> None:
    """Removes a region whose owner is dead, with what is staged in it."""
def check_tag(tag: str, /) -> None: ...
def step_of_tag(tag: str, /) -> int | None: ...
def escape_file_name(name: str, /) -> str: ...
def crc32(data: Buffer, /) -> int: ...
def _panic(message: str, /) -> None:
    """Panics inside the engine's door: how the tests prove that a panic becomes EngineClosed and nothing worse."""
