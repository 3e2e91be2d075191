"""A process that has imported torch and relight and forks one child for each script it is given.

Owns: the forks, and the exit codes of the children. Must not: use relight's engine itself, or start a thread.
Invariant: a child is as good as a fresh interpreter: relight has no engine yet, and its end runs the exit handlers.

Importing torch costs more than a whole test of these, and so does taking its modules down at the end; a fork costs a
hundredth of it. So a script that comes to its end leaves right after the exit handlers, unless it asks for more.
"""

import array
import atexit
import gc
import json
import os
import socket
import sys
import warnings

import numpy  # noqa: F401  # loaded before the forks, as torch loads it at first use
import relight
import relight.torch.pickling
import relight.torch.unpickling
import torch


def serve(door: socket.socket) -> tuple[str, bool] | None:
    """Serves requests; in a child, the script to run and whether to end as Python does. None: the tester is gone."""
    while True:
        data, ancillary, _, _ = door.recvmsg(1 << 20, socket.CMSG_SPACE(3 * 4))
        if not data:
            return None
        request = json.loads(data)
        if "wait" in request:
            _, status = os.waitpid(request["wait"], 0)
            door.send(json.dumps({"code": os.waitstatus_to_exitcode(status)}).encode())
            continue
        streams = array.array("i")
        for _, _, payload in ancillary:
            streams.frombytes(payload[: len(payload) - len(payload) % 4])
        child = os.fork()
        if child == 0:
            os.setsid()
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
                os.close(stream)
            os.environ.update(request["environment"])
            sys.argv = ["script", *request["arguments"]]
            return str(request["source"]), bool(request["whole_exit"])
        for stream in streams:
            os.close(stream)
        door.send(json.dumps({"pid": child}).encode())


def say(*words: object) -> None:
    """One line to the tester, in one write: a killed process has said it or has not."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])  # the first one imports torch's compiler
    warnings.simplefilter("error")
    gc.freeze()
    with socket.socket(fileno=int(sys.argv[1])) as door:
        work = serve(door)
    if work is not None:
        source, whole_exit = work
        exec(  # the whole purpose
            compile(source, "<script>", "exec"),
            {"__name__": "__main__", "torch": torch, "relight": relight, "os": os, "sys": sys, "say": say},
        )
        if not whole_exit:
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
