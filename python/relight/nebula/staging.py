"""Between a client's object and the engine's images.

Owns: the calls of torch's pickling for one Nebula file.
Must not: be imported before an object is saved or loaded (it brings torch).
"""

import threading
from typing import Any, Final

from relight import _core
from relight.torch import pickling, unpickling

_STEM: Final = "archive"  # torch.save's own word for the folder inside the file, where it has no path to name it after
_OWN_THREADS: Final = "relight-"


def stage(share: _core.Share, file: str, obj: object) -> _core.StageReport:
    """Copies `obj` into the open generation of its tag.

    Raises:
        NotPicklable, StorageFull, TornSnapshot: as `Checkpoint.save` says.
    """
    snapshot = pickling.plan_object(obj, pickle_module=None, pickle_protocol=None, stem=_STEM)
    report = share.stage(file, snapshot.entries, stem=_STEM, compare=_other_threads_run())
    snapshot.check_torn()
    return report


def _other_threads_run() -> bool:
    """Whether a thread of the caller might change tensors past torch's version counters while they are copied."""
    return any(
        thread is not threading.current_thread() and not thread.name.startswith(_OWN_THREADS)
        for thread in threading.enumerate()
    )


def unpickle(image: _core.Image, map_location: Any, weights_only: bool) -> Any:
    """The object in an image."""
    return unpickling.load_image(image, map_location=map_location, weights_only=weights_only, mmap=False, allow=())
