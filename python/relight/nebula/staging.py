"""Between a client's object and the engine's images.

Owns: the calls of torch's pickling for one Nebula file.
Must not: be imported before an object is saved or loaded (it brings torch).
"""

from typing import Any, Final

from relight import _core
from relight.options import Options
from relight.parts import others_run, stem_of
from relight.torch import pickling, unpickling

_STEM_LENGTH_MAX: Final = 100


def stage(share: _core.Share, file: str, obj: object) -> _core.StageReport:
    """Copies `obj` into the open generation of its tag.

    Raises:
        NotPicklable, StorageFull, TornSnapshot: as `Checkpoint.save` says.
    """
    check = Options().torn_check
    compare = check == "compare" or (check == "auto" and others_run())
    stem = _stem_of(file)
    snapshot = pickling.plan_object(obj, stem=stem)
    report = share.stage(file, snapshot.entries, stem=stem, compare=compare)
    snapshot.check_torn()
    return report


def _stem_of(file: str) -> str:
    # Nebula's names may hold line ends and more: inside an archive they would trip the tools that list it.
    stem = stem_of(file)
    return stem if stem.isprintable() and "\\" not in stem and len(stem) <= _STEM_LENGTH_MAX else "archive"


def unpickle(image: _core.Image, map_location: Any, weights_only: bool) -> Any:
    """The object in an image."""
    return unpickling.load_image(image, map_location=map_location, weights_only=weights_only, mmap=False, allow=())
