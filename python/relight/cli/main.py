"""The way in: parses the command line, runs one verb, turns errors into one line and an exit code.

Owns: the parser, the exit codes, what a closed pipe and Ctrl-C do.
Must not: know what a verb does.
"""

import argparse
import os
import sys
from collections.abc import Sequence

from relight.cli import drain, export, history, ls, show, verify
from relight.cli.output import Output, printable
from relight.exceptions import CheckpointError, CheckpointNotFound, InvalidArgument

_VERBS = (ls, show, verify, history, drain, export)
_EPILOG = (
    "exit codes: 0 all is well; 1 a problem was found or the storage failed; "
    "2 the command line is wrong or names what is not there"
)


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    purpose = "Looks after checkpoints of PyTorch training."
    whole = argparse.ArgumentParser(prog="relight", description=purpose, epilog=_EPILOG)
    whole.add_argument("--version", action="store_true", help="print the version and leave")
    verbs = whole.add_subparsers(dest="verb", metavar="VERB")
    for verb in _VERBS:
        name = verb.__name__.rpartition(".")[2]
        one = verbs.add_parser(name, help=verb.HELP, description=verb.__doc__, epilog=_EPILOG,
                               formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
        one.add_argument("--json", action="store_true", help="print JSON, for machines")
        verb.arguments(one)
        one.set_defaults(run=verb.run)
    return whole


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `relight` with these arguments (those of the process by default); the exit code."""
    whole = parser()
    args = whole.parse_args(argv)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a tag that the terminal cannot show is no reason to fail
    if args.version:
        from relight import _core

        print(f"relight {_core.__version__}")
        return 0
    if args.verb is None:
        whole.print_help()
        return 2
    try:
        code: int = args.run(args, Output(as_json=args.json))
        sys.stdout.flush()
    except BrokenPipeError:  # `relight ls ROOT | head`: the reader has what it wanted
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains at its exit
        return 0
    except KeyboardInterrupt:
        return 130
    except (InvalidArgument, CheckpointNotFound) as error:
        return _complain(error, 2)
    except CheckpointError as error:
        return _complain(error, 1)
    except OSError as error:
        return _complain(error, 1)
    return code


def _complain(error: Exception, code: int) -> int:
    name = type(error).__name__ if isinstance(error, CheckpointError) else "error"
    print(f"relight: {name}: {printable(str(error))}", file=sys.stderr)
    return code
