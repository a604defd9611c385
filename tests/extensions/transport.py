"""A transport from outside the packages: every version travels in a folder of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from torch import Tensor

from async_rl.base.seams import TransportEntry
from async_rl.base.weights.checkpoint_names import write_weights
from async_rl.base.weights.transport import Transport


class NewFolderTransport(Transport):
    """Writes every version into a folder of its own and removes it after the push."""

    def send(self, staged: Iterator[tuple[str, Tensor]], version: int) -> int:
        with TemporaryDirectory(dir=self.config.run_dir.resolve()) as folder:
            num_bytes = write_weights(staged, Path(folder), self.dtype, self.bucket_bytes)
            self.members.call(lambda admin: admin.load_folder(Path(folder), version), f"push of version {version}")
            return num_bytes


NEW_FOLDERS = TransportEntry(open=NewFolderTransport, delivers="folder", devices=("cpu", "cuda"), writes_files=True)
