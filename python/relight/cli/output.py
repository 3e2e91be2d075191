"""What the verbs print: tables for people, JSON for machines, progress for those who wait.

Owns: form and width, units, how odd characters are shown.
Must not: know what a checkpoint is.
Invariant: with `--json`, stdout holds one JSON document and nothing else. A name never moves the cursor.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

_RIGHT = frozenset({"step", "run", "files", "bytes", "seconds", "MB/s", "offset", "pid"})


def printable(text: str) -> str:
    """The text with control characters and line breaks shown as escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def size(count: int | float | None) -> str:
    """Bytes for people: `1.3 GiB`."""
    if count is None:
        return ""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


class Output:
    """Where a verb prints to."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json

    def document(self, value: Any) -> None:
        """One JSON document."""
        json.dump(value, sys.stdout, indent=1, ensure_ascii=True)
        print()

    def line(self, text: str) -> None:
        """One line for people."""
        if not self.as_json:
            print(printable(text))

    def warning(self, text: str) -> None:
        """One line on stderr: stdout stays clean for pipes."""
        print(f"relight: {printable(text)}", file=sys.stderr)

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Aligned columns; framed where rich is installed and somebody looks at a terminal."""
        cells = [["" if cell is None else printable(str(cell)) for cell in row] for row in rows]
        if sys.stdout.isatty() and _framed(columns, cells):
            return
        widths = [max([len(name), *(len(row[i]) for row in cells)]) for i, name in enumerate(columns)]
        for row in [list(columns), *cells]:
            fields = [
                cell.rjust(width) if name in _RIGHT else cell.ljust(width)
                for name, cell, width in zip(columns, row, widths, strict=True)
            ]
            print("  ".join(fields).rstrip())

    @contextmanager
    def progress(self, total: int, what: str) -> Iterator["Progress"]:
        """Counts to `total` on stderr, where a terminal is there to see it."""
        progress = Progress(total, what, shown=sys.stderr.isatty() and total > 0)
        try:
            yield progress
        finally:
            progress.clear()


class Progress:
    """One line that is written over: what is being done now, and how much of the whole is done."""

    def __init__(self, total: int, what: str, *, shown: bool) -> None:
        self._total, self._what, self._shown, self._done = total, what, shown, 0

    def now(self, name: str) -> None:
        """Begins with one thing."""
        if self._shown:
            done = f"{size(self._done)} of {size(self._total)}, {100 * self._done // self._total} %"
            sys.stderr.write(f"\r\x1b[K{self._what} {printable(name)}: {done}")
            sys.stderr.flush()

    def done(self, amount: int) -> None:
        """Some of the whole is done."""
        self._done += amount

    def clear(self) -> None:
        """Takes the line away."""
        if self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def _framed(columns: Sequence[str], cells: Sequence[Sequence[str]]) -> bool:
    """Draws the table; False where rich is missing or the terminal is too narrow to show a row on a line."""
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:  # it belongs to the extra `cli`; the plain table says the same
        return False
    table = Table(header_style="bold", box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="right" if name in _RIGHT else "left", no_wrap=True)
    for row in cells:
        table.add_row(*(Text(cell) for cell in row))  # Text: a name with [brackets] is a name, no markup
    console = Console()
    wanted = console.measure(table, options=console.options.update(width=10_000)).maximum
    if wanted > console.width:
        return False
    console.print(table)
    return True
