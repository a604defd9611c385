from __future__ import annotations

import os
from pathlib import Path

import pytest

from buffer.journal import PayloadFiles, read_payload
from buffer.past_journal import share_files


def payloads(first: int, number: int) -> list[memoryview]:
    return [memoryview(b"%d " % i * 20) for i in range(first, first + number)]


def test_every_payload_is_read_back_from_its_place(tmp_path: Path) -> None:
    files = PayloadFiles(tmp_path, [])
    written = [*payloads(0, 1000), memoryview(os.urandom(10**5)), *payloads(0, 3)]
    places = files.append(written)
    assert [read_payload(tmp_path, place) for place in places] == written
    assert files.append([]) == []


def test_a_file_is_removed_once_no_payload_in_it_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("buffer.journal.FILE_BYTES", 200)
    files = PayloadFiles(tmp_path, [])
    places = [place for i in range(60) for place in files.append(payloads(i, 1))]
    assert len(os.listdir(tmp_path)) == places[-1].file + 1 > 10
    files.remove(places[:40])
    assert {int(name) for name in os.listdir(tmp_path)} == {place.file for place in places[40:]}
    files.remove(places[40:])
    assert os.listdir(tmp_path) == [str(places[-1].file)], "only the one that is written to"
    for i in range(20):
        files.remove(files.append(payloads(i, 1)))
    assert len(os.listdir(tmp_path)) == 1


def test_after_a_crash_new_payloads_go_into_a_new_file(tmp_path: Path) -> None:
    killed = PayloadFiles(tmp_path, [])
    (kept,) = killed.append(payloads(0, 1))
    with (tmp_path / str(kept.file)).open("ab") as file:
        file.write(b"torn")
    (tmp_path / "7").write_bytes(b"written but never committed")
    files = PayloadFiles(tmp_path, [kept])
    (place,) = files.append(payloads(1, 1))
    assert (place.file, place.start) == (8, 0)
    assert [read_payload(tmp_path, p) for p in (kept, place)] == payloads(0, 2)
    assert sorted(os.listdir(tmp_path)) == ["0", "8"]


def test_files_with_other_names_are_left_alone(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    (place,) = PayloadFiles(source, []).append(payloads(0, 1))
    for name in (".nfs000000a1", ".DS_Store", "1.bak"):
        (source / name).touch()
    (next_place,) = PayloadFiles(source, [place]).append(payloads(1, 1))
    assert (next_place.file, len(os.listdir(source))) == (1, 5)
    target.mkdir()
    assert sorted(share_files(source, target)) == [0, 1]
    assert sorted(os.listdir(target)) == ["0", "1"]


@pytest.mark.parametrize("has_links", [True, False])
def test_a_shared_file_stays_when_the_other_folder_removes_it(
    tmp_path: Path, has_links: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("this disk has no links")

    if not has_links:
        monkeypatch.setattr(Path, "hardlink_to", refuse)
    old = PayloadFiles(tmp_path / "old", [])
    (place,) = old.append([memoryview(b"abc")])
    old.close()
    (tmp_path / "new").mkdir()
    assert share_files(tmp_path / "old", tmp_path / "new") == share_files(tmp_path / "old", tmp_path / "new") == [0]
    new = PayloadFiles(tmp_path / "new", [place])
    assert read_payload(tmp_path / "new", place) == b"abc"
    (later,) = new.append([memoryview(b"de")])
    assert later.file == 1, "a file that is shared is not written to"
    new.remove([place])
    new.close()
    assert not (tmp_path / "new" / "0").exists()
    assert read_payload(tmp_path / "old", place) == b"abc"
    assert share_files(tmp_path / "absent", tmp_path / "new") == []
