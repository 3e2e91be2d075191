"""Waiting for the persistent tier: flush, shutdown and the end of the process.

Owns: which errors of the background are raised, and where.
Must not: seal what waits for `commit()`; wait for other ranks.
Invariant: an error of a persist is raised once, by a call that waits; what nobody was told is printed at the end.
"""

import logging
import sys

from relight.exceptions import CheckpointError
from relight.handle import wait_all
from relight.nebula import roots, shares
from relight.options import Options

logger = logging.getLogger("relight.nebula")


def flush(tag: str | None) -> None:
    """Seals, waits until what is sealed is committed, and raises what failed since the last flush."""
    process = shares.process()
    process.seal_implied(tag)
    _log_incomplete(tag)
    if tag is None:
        roots.wait_until_idle()  # also for what a dead process left and this one persists
    wait_all(process.handles(tag), None)
    shares.raise_first(process.take_errors(tag))


def end_of_process(exception: BaseException | None) -> None:
    """Seals what a clean end seals. `runtime` then waits within the limit, and prints what was not persisted."""
    for share in shares.process().unsealed():
        try:
            remark = share.seal_at_exit(exception)
        except CheckpointError as error:
            remark = f"{share.tag} was NOT saved: {error}"
        if remark is not None:
            # At the end of the process the handlers of logging may be closed, and there is nobody to raise to.
            print(f"relight.nebula: {remark}", file=sys.stderr, flush=True)


def shutdown() -> None:
    """What a normal end of the process does, now."""
    process = shares.process()
    process.seal_implied()
    _log_incomplete(None)
    limit_s = Options().close_timeout_s
    for handle in wait_all(process.handles(), limit_s):
        logger.warning(
            "%s is not persisted after %g s; it stays in memory, and the next process on this node that opens its root "
            "persists it",
            handle.tag,
            limit_s,
        )


def _log_incomplete(tag: str | None) -> None:
    for share in shares.process().unsealed():
        if (tag is None or share.tag == tag) and (remark := share.incomplete()) is not None:
            logger.warning("%s", remark)
