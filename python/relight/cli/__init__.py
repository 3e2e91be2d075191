"""The `relight` command: looks at checkpoints, checks them, rescues what a dead process left, takes files out.

Owns: the verbs, what they print, the exit codes.
Must not: import torch, or unpickle anything but by the inert reader in `contents`.
Invariant: exit code 0 = all is well; 1 = a checkpoint, a file or the storage has a problem; 2 = the command line is
wrong, or names a root, tag or file that is not there; 130 = interrupted. Errors are one line on stderr.
"""

from relight.cli.main import main

__all__ = ["main"]
