"""Converts the token ids of a run to text, with the tokenizer that the run used."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from async_rl.base.models_and_data.hub import cached_folder

TOKENIZER_FILE = "tokenizer.json"
_INVISIBLE = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060\u2066-\u2069\ufeff]"
)
"""Control characters except tabs and line ends, marks that change the direction of text, and spaces without width."""
_ROLE = re.compile(r"\A\s*(system|developer|user|assistant|model|tool|ipython|observation)\s*(\n|\Z)")
_TAG_LINE = re.compile(r"^[ \t]*</?\w+>[ \t]*$", re.MULTILINE)


def visible(text: str) -> str:
    """Replace each invisible character in a text by its code, e.g. ⟨U+202E⟩.

    Such characters hide what a model wrote, or change how other text is shown.
    """
    return _INVISIBLE.sub(lambda found: f"⟨U+{ord(found[0]):04X}⟩", text)


class TokenTexts:
    """Decodes token ids of a run to text without invisible characters.

    Args:
        run_dir: the run's directory.
        model: the run's model.path.
    """

    def __init__(self, run_dir: Path, model: object) -> None:
        self._tokenizer: Any = None
        self._marks: re.Pattern[str] | None = None
        self.missing = ""
        """One sentence for the user if there is no tokenizer, and every text is its ids; else empty."""
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the run needs the cores more
        file = find_tokenizer(run_dir, model)
        if file is None:
            self.missing = (
                f"Token ids are shown without text: no {TOKENIZER_FILE} is in the run's folder model, in its "
                f"checkpoints, or at model.path, {model or 'which config.yaml does not tell'}. Copy the model's "
                f"{TOKENIZER_FILE} to {run_dir / 'model'}."
            )
            return
        try:
            from tokenizers import Tokenizer

            self._tokenizer = Tokenizer.from_file(str(file))
            marks = [token.content for token in self._tokenizer.get_added_tokens_decoder().values()]
            self._marks = re.compile("|".join(map(re.escape, sorted(marks, key=len, reverse=True)))) if marks else None
        except Exception as error:  # the library raises bare Exceptions for files that it can't read
            self.missing = f"Token ids are shown without text: {file} can't be read: {error}."

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of a sequence, special tokens included."""
        if self._tokenizer is None:
            return " ".join(map(str, ids))
        return visible(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def messages(self, ids: Sequence[int]) -> list[str]:
        """Split a part of a conversation into messages, without the marks of the chat template.

        Marks are the tokens that were added to the tokenizer's vocabulary, names of roles, and lines with nothing but
        a tag.
        """
        text = self.decode(ids)
        parts = self._marks.split(text) if self._marks else [text]
        said = (_TAG_LINE.sub("", _ROLE.sub("", part)).strip() for part in parts)
        return [message for message in said if message]

    def question(self, prompt: Sequence[int]) -> str:
        """Return the last message of a prompt: that is where prompts differ. Without messages: the whole text."""
        messages = self.messages(prompt)
        return messages[-1] if messages else self.decode(prompt)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Return the text that each token adds.

        If several tokens form a character, the last one has all of it, the others "".
        """
        if self._tokenizer is None:
            return [f"{token} " for token in ids]
        from tokenizers.decoders import DecodeStream

        stream = DecodeStream(skip_special_tokens=False)
        pieces = []
        for token in ids:
            try:
                pieces.append(visible(stream.step(self._tokenizer, token) or ""))
            except Exception:  # an id outside of the vocabulary, or bytes that never become a character
                stream = DecodeStream(skip_special_tokens=False)
                pieces.append("\N{REPLACEMENT CHARACTER}")
        return pieces


def find_tokenizer(run_dir: Path, model: object) -> Path | None:
    """Return the tokenizer file of a run: its own copy, or the file of model.path; None if there is none.

    A relative model.path is searched in the working directory and in the folders above the run directory, a name on the
    hub in this host's cache.
    """
    folders = [run_dir / "model", *sorted((run_dir / "checkpoints").glob("step_*/model"), reverse=True)]
    if isinstance(model, str) and model:
        folders += [Path(model), *(above / model for above in run_dir.absolute().parents)]
        folders += filter(None, [cached_folder(model)])
    return next((folder / TOKENIZER_FILE for folder in folders if (folder / TOKENIZER_FILE).is_file()), None)
