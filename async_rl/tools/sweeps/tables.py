"""A table of a report, written as Markdown or HTML."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Table:
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    best: tuple[int, ...] = ()
    """The indices of the rows shown in bold."""

    def markdown(self) -> str:
        lines = ["| " + " | ".join(self.header) + " |", "| " + " | ".join(["---:"] * len(self.header)) + " |"]
        for number, row in enumerate(self.rows):
            is_best = number in self.best
            texts = [f"**{text}**" if is_best else text for text in row]
            lines.append("| " + " | ".join(texts) + " |" + (" best" if is_best else ""))
        return "\n".join(lines) + "\n"

    def html(self) -> str:
        title = f"<h2>{html.escape(self.title)}</h2>" if self.title else ""
        header = "".join(f"<th>{html.escape(text)}</th>" for text in self.header)
        body = "".join(
            ('<tr class="best">' if number in self.best else "<tr>")
            + "".join(f"<td>{html.escape(text)}</td>" for text in row) + "</tr>"
            for number, row in enumerate(self.rows)
        )
        return f"{title}<table><thead><tr>{header}</tr></thead><tbody>{body}</tbody></table>"


def tables_in(markdown: str) -> list[Table]:
    """Parse the tables in a Markdown text that `Table.markdown` wrote, with their titles."""
    found = []
    for part in re.split(r"^## ", markdown, flags=re.MULTILINE)[1:]:
        lines = [line for line in part.splitlines() if line.startswith("|")]
        header, _, *rows = [[text.strip(" *") for text in line[1:].split("|")[:-1]] for line in lines]
        best = tuple(number for number, line in enumerate(lines[2:]) if line.endswith(" best"))
        found.append(Table(header, rows, part.partition("\n")[0].strip(), best))
    return found
