"""Makes one HTML page of tables and pictures, which opens without a network."""

from __future__ import annotations

import base64
import contextlib
import html
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from async_rl.errors import ConfigError
from async_rl.sweeps.tables import Table

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; font-size: 13px }
th, td { padding: .3rem .6rem; text-align: right; border-bottom: 1px solid #ddd }
th { border-bottom: 2px solid #444; vertical-align: bottom } tr.best { font-weight: 700; background: #fff6d6 }
.lead { font-size: 17px; background: #eef5fb; padding: .8rem 1rem; border-left: 4px solid #0072b2 }
figure { margin: 2rem 0 } img { max-width: 100% } figcaption, .note { color: #555; font-size: 13px }
"""


@contextlib.contextmanager
def written(folder: Path, instead: str) -> Iterator[None]:
    """Write the files of a report into `folder` in this block.

    Raises:
        ConfigError: a file can't be written; the message ends with `instead`, what else to do.
    """
    try:
        yield
    except OSError as error:
        what = error.filename or folder
        raise ConfigError(f"a report in {folder} can't be written: {what}: {error.strerror}. {instead}") from None


def html_page(
    title: str, tables: Sequence[Table], sentences: Sequence[str], notes: Sequence[str], pictures: Mapping[Path, str],
    tail: str = "",
) -> str:
    """Return the page.

    Args:
        sentences: what the page has to say, at its top.
        pictures: {PNG file: caption}; the pictures are within the page.
        tail: HTML for the end of the page.
    """
    name = html.escape(title)
    parts = [f"<h1>{name}</h1>", *(f'<p class="lead">{html.escape(text)}</p>' for text in sentences)]
    parts += [table.html() for table in tables]
    parts += [f'<p class="note">{html.escape(note)}</p>' for note in notes]
    for picture, text in pictures.items():
        data, caption = base64.b64encode(picture.read_bytes()).decode(), html.escape(text)
        image = f'<img alt="{caption}" src="data:image/png;base64,{data}">'
        parts.append(f"<figure>{image}<figcaption>{caption}</figcaption></figure>")
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{name}</title>'
        f"<style>{STYLE}</style><body>{''.join(parts)}{tail}</body></html>\n"
    )
