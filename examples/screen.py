"""What the demo prints: with rich where it is installed and a terminal is there, else plain lines.

Owns: titles, the progress of a run, tables, the list of what was proved.
Must not: decide anything.
"""

import sys
import time
from collections.abc import Sequence

try:
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text
except ImportError:  # the extra `cli` of relight; the plain lines say the same
    Console = None  # type: ignore[assignment, misc]


class Screen:
    """The terminal, or the log file that stands in for it."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._rich = Console(highlight=False) if Console is not None and sys.stdout.isatty() else None
        self._live: Live | None = None

    def title(self, text: str) -> None:
        """The next part of the demo."""
        clock = f"[{time.perf_counter() - self._started:5.1f} s]"
        if self._rich:
            self._rich.print(Text.assemble(("\n" + clock + " ", "dim"), (text, "bold")))
        else:
            print(f"\n{clock} {text}", flush=True)

    def line(self, text: str) -> None:
        """One line under the title."""
        if self._rich:
            self._rich.print(Text("          " + text))
        else:
            print("          " + text, flush=True)

    def training(self, step: int, steps: int, loss: float, seconds: float) -> None:
        """How far a run is: a line that changes in place, or one line every 20 steps."""
        text = f"step {step:3} of {steps}  loss {loss:.3f}  {seconds:.2f} s a step"
        if not self._rich:
            if step % 20 == 0:
                self.line(text)
            return
        if self._live is None:
            self._live = Live(console=self._rich, transient=True)
            self._live.start()
        filled = 30 * step // steps
        self._live.update(
            Text.assemble("          ", ("━" * filled, "green"), ("━" * (30 - filled), "dim"), "  " + text)
        )

    def pause(self) -> None:
        """Ends the line that changes in place."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """A table whose first column is text and whose others are numbers."""
        if self._rich:
            table = Table(header_style="bold")
            for index, name in enumerate(columns):
                table.add_column(name, justify="right" if index else "left")
            for row in rows:
                table.add_row(*row)
            self._rich.print(table)
            return
        widths = [max(len(row[i]) for row in [columns, *rows]) for i in range(len(columns))]
        for row in [columns, *rows]:
            cells = [c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
            print("          " + "  ".join(cells))

    def proved(self, text: str) -> None:
        """One thing that is so."""
        if self._rich:
            self._rich.print(Text.assemble("        ", ("✓ ", "bold green"), text))
        else:
            print(f"        ok {text}", flush=True)

    def failed(self, text: str) -> None:
        """What is not so: the reason that the demo ends with an error."""
        self.pause()
        message = f"demo failed: {text}"
        if self._rich:
            self._rich.print(Text("\n" + message, style="bold red"))
        else:
            print("\n" + message, flush=True)
