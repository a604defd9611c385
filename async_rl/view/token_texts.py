"""Turns the token ids of a run back into text, with the tokenizer that the run used."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from async_rl.view.run_files import RunFiles

TOKENIZER_FILE = "tokenizer.json"


class TokenTexts:
    """Decodes token ids of a run. Without a tokenizer every text is None, and `missing` says what to do about it."""

    def __init__(self, run: RunFiles) -> None:
        self._tokenizer: Any = None
        self.missing = ""
        """One sentence for the user if there is no tokenizer; else empty."""
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the run needs the cores more
        file = find_tokenizer(run)
        if file is None:
            self.missing = (
                f"Token ids are shown without text: no {TOKENIZER_FILE} is in the run's folder model, in its "
                f"checkpoints, or at model.path, {run.setting('model.path', 'which config.yaml does not tell')}. Copy "
                f"the model's {TOKENIZER_FILE} to {run.folder / 'model'}."
            )
            return
        try:
            from tokenizers import Tokenizer

            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exceptions for files that it can't read
            self.missing = f"Token ids are shown without text: {file} can't be read: {error}."

    def decode(self, ids: Sequence[int]) -> str | None:
        """Return the text of a sequence, special tokens included; None without a tokenizer."""
        return None if self._tokenizer is None else str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def pieces(self, ids: Sequence[int]) -> list[str] | None:
        """Return the text that each token adds. The token that completes a character adds all of it, others of it "".

        None without a tokenizer.
        """
        if self._tokenizer is None:
            return None
        from tokenizers.decoders import DecodeStream

        stream = DecodeStream(skip_special_tokens=False)
        pieces = []
        for token in ids:
            try:
                pieces.append(stream.step(self._tokenizer, token) or "")
            except Exception:  # an id outside of the vocabulary, or bytes that never become a character
                stream = DecodeStream(skip_special_tokens=False)
                pieces.append("\N{REPLACEMENT CHARACTER}")
        return pieces


def find_tokenizer(run: RunFiles) -> Path | None:
    """Return the tokenizer file of a run, its own copy or that of the model that it began with; None without any.

    A relative model.path is looked for in the working directory and in the folders above the run directory.
    """
    folders = [run.folder / "model", *sorted((run.folder / "checkpoints").glob("step_*/model"), reverse=True)]
    model = run.setting("model.path")
    if isinstance(model, str) and model:
        folders += [Path(model), *(above / model for above in run.folder.absolute().parents)]
    return next((folder / TOKENIZER_FILE for folder in folders if (folder / TOKENIZER_FILE).is_file()), None)
