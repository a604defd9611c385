"""A table of a report, written as Markdown or HTML."""

from __future__ import annotations

import html
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
            texts = [f"**{text}**" if number in self.best else text for text in row]
            lines.append("| " + " | ".join(texts) + " |")
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
