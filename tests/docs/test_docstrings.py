"""The docstrings of the public names: their examples run, and their sections are about the function they stand in.

`help(relight.Checkpointer)` is the manual of somebody at a prompt: what it says must be true, and readable there.
"""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import relight
import relight.nebula

EXAMPLE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SECTION = re.compile(r"^(Args|Raises|Attributes):\n((?:(?: {4}.*)?\n)+)", re.MULTILINE)
ENTRY = re.compile(r"^(\w+(?:, \w+)*): \S")

# What somebody has who reads the examples.
READY = """
import torch
import relight
steps = 200
model = torch.nn.Sequential()
model.layer = torch.nn.Linear(4, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def train_step():
    model.layer(torch.randn(2, 4)).sum().backward()
    optimizer.step()
relight.save({"model": model.state_dict()}, "model.pt")
"""


def documented() -> Iterator[tuple[str, Any]]:
    """Every public class and function, and the public methods of the classes."""
    for module in (relight, relight.nebula):
        for name in sorted(set(module.__all__) - {"__version__"}):
            thing = getattr(module, name)
            yield f"{module.__name__}.{name}", thing
            if inspect.isclass(thing):
                for member, value in vars(thing).items():
                    value = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
                    if not member.startswith("_") and (inspect.isfunction(value) or isinstance(value, property)):
                        yield f"{module.__name__}.{name}.{member}", value


DOCUMENTED = dict(documented())
EXAMPLES = {
    f"{name}[{number}]": example
    for name, thing in DOCUMENTED.items()
    for number, example in enumerate(EXAMPLE.findall(inspect.getdoc(thing) or ""))
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_runs(name: str, tmp_path: Path) -> None:
    """Guards: an example in a docstring that stopped working when the API moved on."""
    command = [sys.executable, "-W", "error", "-c", READY + EXAMPLES[name]]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not done.stderr


def test_the_examples_are_found() -> None:
    """Guards: the test above passing because it looks at nothing."""
    assert {"relight.Checkpointer[0]", "relight.open[0]"} <= set(EXAMPLES)


@pytest.mark.parametrize("name", DOCUMENTED)
def test_every_public_name_says_what_it_is(name: str) -> None:
    thing = DOCUMENTED[name]
    if inspect.isclass(thing) and issubclass(thing, dict):
        return  # a TypedDict: its keys are its documentation
    assert thing.__doc__, f"{name} has no docstring"


@pytest.mark.parametrize("name", DOCUMENTED)
def test_the_sections_are_whole(name: str) -> None:
    """Guards: lines that a reflow tore apart, arguments that were renamed or are gone, errors that do not exist."""
    thing = DOCUMENTED[name]
    for title, body in SECTION.findall((inspect.getdoc(thing) or "") + "\n"):
        entries: list[str] = []
        for line in (line.removeprefix("    ") for line in body.splitlines() if line.strip()):
            if line.startswith(" "):
                continue  # goes on with the entry above
            entry = ENTRY.match(line)
            assert entry, f"{name}: {title}: this line begins no entry and continues none: {line!r}"
            entries += entry[1].split(", ")
        if title == "Args":
            assert set(entries) <= set(inspect.signature(thing).parameters), f"{name}: arguments that it does not have"
        if title == "Raises":
            known = {one for one in entries if hasattr(relight, one)}
            assert set(entries) == known, f"{name}: errors that relight does not have"
