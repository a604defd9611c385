"""A buffer that requires keys, on a real socket, and clients without the right ones."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import zmq

from async_rl.base.config import NetworkConfig
from async_rl.base.errors import ConfigError, WaitTimeoutError
from async_rl.cli import main
from buffer.client import LearnerClient
from buffer.keys import (
    check_keys,
    client_keys_to_send,
    drop_client_keys,
    new_keys,
    own_keys,
    take_client_keys,
)
from buffer.server import BufferServer
from buffer.wire import pack_request
from tests.kit.buffer.clients import QUICK, TIMEOUTS
from tests.kit.buffer.serving import serving
from tests.kit.configs import buffer_config, changed, make_config


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    assert main(["keys", "new", str(tmp_path / "keys")]) == 0
    return tmp_path / "keys"


@pytest.fixture
def locked(keys: Path) -> Iterator[BufferServer]:
    network = NetworkConfig(keys=str(keys))
    with serving(buffer_config(network=network)) as server:
        yield server


def is_answered(address: str, server_key: Path | None, client_key: Path | None) -> bool:
    """Whether a client with these keys gets any answer, even a refusal, within a second."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        if server_key and client_key:
            socket.curve_serverkey = zmq.auth.load_certificate(server_key)[0]
            socket.curve_publickey, socket.curve_secretkey = zmq.auth.load_certificate(client_key)
        socket.connect(address)
        socket.send(pack_request("served", 7, version=0))
        return bool(socket.poll(1000))


def test_a_client_with_wrong_keys_is_rejected(locked: BufferServer, keys: Path, tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    new_keys(foreign)
    server, client = "server.key", "client.key_secret"
    assert is_answered(locked.address, keys / server, keys / client)
    before = locked.counters()
    server_keys = [foreign / server, keys / server, keys / server, None]
    client_keys = [keys / client, foreign / client, keys / "server.key_secret", None]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(is_answered, [locked.address] * 4, server_keys, client_keys)) == [False] * 4
    assert locked.counters() == before  # none of their messages was read
    assert is_answered(locked.address, keys / server, keys / client)


def test_a_learner_with_foreign_keys_gets_an_error_instead_of_waiting(
    locked: BufferServer, keys: Path, tmp_path: Path
) -> None:
    new_keys(tmp_path / "foreign")
    learner = LearnerClient(locked.address, QUICK, str(tmp_path / "foreign"))
    with pytest.raises(WaitTimeoutError, match="keys"):
        learner.served(0)
    learner.close()


def test_a_client_with_keys_does_not_talk_to_a_buffer_without(keys: Path) -> None:
    with serving(buffer_config()) as server:
        assert not is_answered(server.address, keys / "server.key", keys / "client.key_secret")
        assert is_answered(server.address, None, None)


def test_secret_keys_are_for_their_owner_only(keys: Path) -> None:
    assert {stat.S_IMODE(file.stat().st_mode) for file in keys.iterdir()} == {0o600}
    assert stat.S_IMODE(keys.stat().st_mode) == 0o700
    (keys / "client.key_secret").chmod(0o644)
    with pytest.raises(ConfigError, match=r"key_secret .*chmod 600"):
        LearnerClient("tcp://127.0.0.1:1", TIMEOUTS, str(keys))


def test_secret_keys_are_never_readable_by_others_not_even_in_a_folder_that_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes = []

    def create_and_look(folder: Path, side: str) -> tuple[str, str]:
        public, secret = create_certificates(folder, side)
        modes.extend(stat.S_IMODE(Path(file).stat().st_mode) for file in (public, secret))
        return public, secret

    create_certificates = zmq.auth.create_certificates
    monkeypatch.setattr("buffer.keys.create_certificates", create_and_look)
    (tmp_path / "shared").mkdir(mode=0o755)
    before = os.umask(0o022)
    try:
        new_keys(tmp_path / "shared")
        assert modes == [0o600] * 4
        assert os.umask(0o022) == 0o022  # as before
    finally:
        os.umask(before)


def test_a_run_has_keys_of_its_own_for_as_long_as_it_goes_on(tmp_path: Path) -> None:
    config = buffer_config()
    secrets = []
    for _ in range(2):
        with own_keys(config, tmp_path / "keys") as decided:
            check_keys(decided["network.keys"])
            assert decided == {"network.keys": str(tmp_path / "keys")}
            secrets.append((tmp_path / "keys" / "client.key_secret").read_bytes())
        assert not (tmp_path / "keys").exists()
        new_keys(tmp_path / "keys")  # as a run that was killed leaves them
    assert secrets[0] != secrets[1]


@pytest.mark.parametrize("network", [NetworkConfig(insecure=True), NetworkConfig(keys="some")])
def test_a_run_with_keys_of_its_user_or_without_any_makes_none(tmp_path: Path, network: NetworkConfig) -> None:
    config = buffer_config(network=network)
    with own_keys(config, tmp_path / "keys") as decided:
        assert decided == {}
        assert not (tmp_path / "keys").exists()


def test_keys_are_never_overwritten(keys: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (keys / "client.key_secret").read_text()
    assert main(["keys", "new", str(keys)]) == 2
    assert str(keys) in capsys.readouterr().err
    assert (keys / "client.key_secret").read_text() == before


def test_missing_and_broken_keys_are_refused_by_name(keys: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"network.keys: .*none/server.key"):
        LearnerClient("tcp://127.0.0.1:1", TIMEOUTS, str(tmp_path / "none"))
    shutil.copy(keys / "client.key", keys / "client.key_secret")
    with pytest.raises(ConfigError, match=r"client.key_secret"):
        LearnerClient("tcp://127.0.0.1:1", TIMEOUTS, str(keys))
    (keys / "server.key").write_text("rubbish")
    with pytest.raises(ConfigError, match=r"network.keys: .*server.key"):
        LearnerClient("tcp://127.0.0.1:1", TIMEOUTS, str(keys))


def test_an_address_off_loopback_needs_keys_or_insecure() -> None:
    for network in ({"keys": "some"}, {"insecure": True}):
        NetworkConfig(host="10.0.0.5", **network)
    with pytest.raises(ConfigError, match=r"^network\.host .*got '10\.0\.0\.5'"):
        NetworkConfig(host="10.0.0.5")
    for host in ("0.0.0.0", "localhost", "", "::1"):
        with pytest.raises(ConfigError, match=r"^network\.host"):
            NetworkConfig(host=host, insecure=True)


def test_the_buffer_binds_where_the_config_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("buffer.server.BIND_S", 0.3)
    with serving(buffer_config()) as first:
        port = int(first.address.rpartition(":")[2])
        taken = NetworkConfig(host="127.0.0.1", port=port)
        with pytest.raises(ConfigError, match=rf"network\.port = {port}"):
            BufferServer(buffer_config(network=taken))
    with serving(buffer_config(network=NetworkConfig(host="127.0.0.2", port=port))) as second:
        assert second.address == f"tcp://127.0.0.2:{port}"
        assert is_answered(second.address, None, None)


def test_a_host_without_the_runs_folder_gets_the_keys_of_a_client_and_no_others(tmp_path: Path) -> None:
    placement = {"rollout": {"nodes": 1}}
    config = make_config(run={"dir": tmp_path}, placement=placement)
    with own_keys(config, tmp_path / "keys") as made:
        files = client_keys_to_send(config, made)
        assert sorted(files) == ["client.key_secret", "server.key"]
        with serving(changed(config, network={"keys": made["network.keys"]}, buffer={"journal": False})) as server:
            there = tmp_path / "of another host" / "keys"
            take_client_keys(str(there), files)
            client = LearnerClient(server.address, TIMEOUTS, str(there))
            client.served(0)
            client.close()
        modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in there.iterdir()}
        assert modes == {"client.key_secret": 0o600, "server.key": 0o600}
        assert stat.S_IMODE(there.stat().st_mode) == 0o700


def test_a_stopped_server_leaves_no_keys_on_its_host_but_those_of_others_stay(keys: Path, tmp_path: Path) -> None:
    files = {name: (keys / name).read_bytes() for name in ("server.key", "client.key_secret")}
    there = tmp_path / "of another host" / "keys"
    take_client_keys(str(there), files)
    drop_client_keys(str(there), {})  # the user has put them there: the driver has sent none
    assert sorted(file.name for file in there.iterdir()) == sorted(files)
    for folder in (there, there, keys):  # twice, as by two servers of the host; `keys` is on a disk of the driver
        drop_client_keys(str(folder), files)
    assert not there.exists()
    assert (keys / "client.key_secret").exists()


def test_keys_that_a_user_gives_to_every_host_or_that_one_host_needs_are_not_sent(keys: Path) -> None:
    placement = {"rollout": {"nodes": 1}}
    assert client_keys_to_send(make_config(network={"keys": str(keys)}, placement=placement), {}) == {}
    with own_keys(config := make_config(), keys / "own") as made:
        assert client_keys_to_send(config, made) == {}
