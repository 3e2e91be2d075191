"""The end of the process, and a fork of it.

Owns: being called at both, also in `multiprocessing` children, which leave by `os._exit` and run no `atexit`.
Must not: raise; decide what is sealed (`persistence` and `shares` do).
Invariant: a forked child starts with no share of its parent's, and with no lock that nobody will release.
"""

import atexit
import os
import sys
from multiprocessing import util

from relight.nebula import persistence, roots, settings, shares

_watched_pid = 0


def watch() -> None:
    """Seals and flushes when this process ends. Once per process.

    Called when a checkpoint is opened, so after the engine was started, whose own end must come later: `atexit` runs
    the newest first.
    """
    global _watched_pid
    if _watched_pid == os.getpid():
        return
    _watched_pid = os.getpid()
    atexit.register(_at_exit)
    # A child of multiprocessing runs these and no `atexit`; elsewhere they are part of `atexit` and find nothing left
    # to do. Those of higher priority run first: the caller's queues and pools may go after our checkpoints are safe.
    util.Finalize(None, _at_exit, exitpriority=200)


def _at_exit() -> None:
    # In a child of multiprocessing a `finally` calls this while the exception that ends the child is on its way.
    exception = sys.exc_info()[1]
    persistence.end_of_process(None if isinstance(exception, SystemExit) else exception)


def forget() -> None:
    """Forgets every share and root; keeps what `init` set."""
    shares.forget()
    roots.forget()


def _in_forked_child() -> None:
    settings.renew_lock()
    forget()


os.register_at_fork(after_in_child=_in_forked_child)
