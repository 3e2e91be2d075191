"""How the training scripts of the demo report: one line an event, for people and for the driver that reads it.

`step step=12 loss=3.25 seconds=0.31`. Floats are written in full, so that equal text means equal bits.
"""

import sys


def say(event: str, **facts: object) -> None:
    """Prints one event in one write, and at once: the driver acts on it, and another thread may report too."""
    sys.stdout.write(" ".join([event, *(f"{name}={value}" for name, value in facts.items())]) + "\n")
    sys.stdout.flush()


def heard(line: str) -> tuple[str, dict[str, str]]:
    """The event of one line and its facts as text."""
    event, *facts = line.split() or [""]
    return event, dict(fact.split("=", 1) for fact in facts if "=" in fact)
