"""ZMQ CURVE keys in a folder. With them the buffer and its clients authenticate each other.

A run makes its own keys when it starts (`own_keys`), unless network.keys names a folder made by `async-rl keys new`.

    server.key   server.key_secret     the buffer's keys: its clients talk to nobody else
    client.key   client.key_secret     the keys of learner and workers: the buffer admits nobody else

Everything on the wire is encrypted with them. The buffer's host needs server.key_secret and client.key, the other hosts
client.key_secret and server.key. If the run made its keys, the driver sends the latter two files to all hosts, where
server processes delete them when they are stopped.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import zmq
from zmq.auth import create_certificates, load_certificate
from zmq.auth.thread import ThreadAuthenticator

from async_rl.base.config import Config
from async_rl.base.config.resolve import Decided
from async_rl.base.errors import ConfigError

DOMAIN = "buffer"
"""The ZAP domain of the socket. Without a domain ZMQ does not ask the authenticator."""


class CurveAuthenticator:
    """Lets a client connect to the socket only if it has the client key in `folder`. ZMQ checks it in a thread.

    Raises ConfigError if client.key or server.key_secret is missing in `folder` or not usable.
    """

    def __init__(self, socket: zmq.Socket[bytes], folder: Path) -> None:
        self._client_key, _ = _load(folder / "client.key")
        public, secret = _load(folder / "server.key_secret")
        self._authenticator = ThreadAuthenticator(socket.context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(DOMAIN, self)
        socket.zap_domain = DOMAIN.encode()
        socket.curve_publickey, socket.curve_secretkey = public, secret
        socket.curve_server = True

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether a client with this Z85 public key may connect. ZMQ's authenticator calls this method."""
        return key == self._client_key

    def stop(self) -> None:
        self._authenticator.stop()


def new_keys(folder: Path) -> None:
    """Write a key pair for the server and one for the clients into `folder`. Only the owner can ever read the files.

    A missing folder is made. Raises ConfigError if the folder already has keys or can't be written.
    """
    umask = os.umask(0o077)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        taken = sorted(file.name for file in folder.glob("*.key*"))
        if taken:
            raise ConfigError(f"{folder} holds {', '.join(taken)} already: name another folder, or delete them first")
        for side in ("server", "client"):
            create_certificates(folder, side)
    except OSError as error:
        raise ConfigError(f"keys can't be written to {folder}: {error}") from None
    finally:
        os.umask(umask)


@contextmanager
def own_keys(config: Config, folder: Path) -> Iterator[Decided]:
    """Make keys for one run in `folder`, yield {"network.keys": folder}, and delete them at the end of the block.

    Makes no keys and yields {} if the configuration sets network.keys or network.insecure.

    Raises ConfigError if the keys can't be written.
    """
    network = config.network
    if network.keys or network.insecure:
        yield {}
        return
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed
    new_keys(folder)
    try:
        yield {"network.keys": str(folder)}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def check_keys(folder: str) -> None:
    """Raise ConfigError unless the folder exists and has usable keys of server and clients."""
    if not Path(folder).is_dir():
        raise ConfigError(
            f"network.keys must be a folder with keys, got {folder}: there is no such folder. "
            f"Make it with `async-rl keys new {folder}`"
        )
    for name in ("server.key", "server.key_secret", "client.key", "client.key_secret"):
        _load(Path(folder) / name)


def client_keys_to_send(config: Config, made: Decided) -> dict[str, bytes]:
    """Return {file name: content} of the key files that the driver sends to the run's other hosts.

    {} if the run is on one host or `own_keys` made no keys: users copy the keys of network.keys to the hosts
    themselves.
    """
    if config.placement.num_nodes == 1 or not made:
        return {}
    folder = Path(made["network.keys"])
    return {name: (folder / name).read_bytes() for name in ("server.key", "client.key_secret")}


def take_client_keys(folder: str, files: Mapping[str, bytes]) -> None:
    """Write key files, {name: content}, into `folder`. Files with equal content, as on a shared disk, are left alone.

    Only the owner can read them. Several processes of a host may call this simultaneously.
    """
    for name, content in files.items():
        file = Path(folder) / name
        if file.exists() and file.read_bytes() == content:
            continue
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        partial = file.with_name(f".{name}.{os.getpid()}")
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as opened:
            opened.write(content)
        partial.replace(file)


def drop_client_keys(folder: str, files: Mapping[str, bytes]) -> None:
    """Delete the folder of keys that `take_client_keys` wrote, at the end of a run.

    The driver's own folder, which also has the buffer's secret key, is left to `own_keys`.
    """
    if files and not (Path(folder) / "server.key_secret").exists():
        shutil.rmtree(folder, ignore_errors=True)  # another process of this host may do the same


def use_client_keys(socket: zmq.Socket[Any], folder: str) -> None:
    """Make a socket connect with the client keys in `folder`; "" leaves it without keys."""
    if folder:
        socket.curve_serverkey, _ = _load(Path(folder) / "server.key")
        socket.curve_publickey, socket.curve_secretkey = _load(Path(folder) / "client.key_secret")


def _load(file: Path) -> tuple[bytes, bytes]:
    """Return (public key, secret key) of a key file; the secret key is empty if the file has only a public one.

    Raises:
        ConfigError: the file is missing or has no key, or other users can read a secret key.
    """
    is_secret = file.suffix == ".key_secret"
    try:
        if is_secret and file.stat().st_mode & 0o077:
            raise ConfigError(f"network.keys: {file} can be read by other users than its owner. Run chmod 600 {file}")
        public, secret = load_certificate(file)
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"network.keys: {error}. Make keys with `async-rl keys new DIR`") from None
    if len(public) != 40 or (is_secret and len(secret or b"") != 40):
        raise ConfigError(f"network.keys: {file} holds no CURVE key. Make keys with `async-rl keys new DIR`")
    return public, secret or b""
