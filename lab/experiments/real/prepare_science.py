"""From the files of a package to the arrays of a data set: molecules, concepts, patients, a brain, currents, genes."""

from __future__ import annotations

import gzip
import re
from collections.abc import Callable
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from real.prepare import Arrays, Files, split, standardised

MOLECULES = 24_000
ATOMS = 26
"""Larger molecules are left out."""
KINDS = ("C", "N", "O", "S", "F", "Cl", "Br", "c", "n", "o", "s")
"""Of atoms, from 1 on; small letters are in aromatic rings. 0 is padding."""
SINGLE, DOUBLE, TRIPLE, AROMATIC = 1, 2, 3, 4
PATIENTS_HELD_OUT = 2048
YEAR = 365.25
SLICE = 3
"""Of the slices of a brain every third is taken; of these every fifth is held out."""
GREY, WHITE, WATER = 1, 2, 3
"""Kinds of tissue; 0 is outside, and what is neither grey nor white inside is mostly water."""
INTERGENIC = 0
"""1 to 3: the place in a codon of a gene that is read forwards, 4 to 6: of one that is read backwards."""
GENES_BLOCK, GENES_HELD_OUT = 4096, 10
"""Of a genome every tenth block of 4096 bases is held out."""


# Molecules -----------------------------------------------------------------------------------------------------------


class Molecule(NamedTuple):
    """Atoms by their kind, and bonds (atom, atom, kind)."""

    atoms: list[int]
    bonds: list[tuple[int, int, int]]


def molecules(files: Files) -> Arrays:
    """Kinds of atoms [molecule, atom] and of the bonds between them [molecule, atom, atom]."""
    (packed,) = files.values()
    lines = (line.split(",")[0] for line in gzip.decompress(packed).decode().splitlines()[1:])
    read = (molecule_of(line) for line in lines)
    fit = (one for one in read if one is not None and len(one.atoms) <= ATOMS)
    found = list(islice(fit, MOLECULES))
    atoms = np.zeros((len(found), ATOMS), np.uint8)
    bonds = np.zeros((len(found), ATOMS, ATOMS), np.uint8)
    for row, one in enumerate(found):
        atoms[row, : len(one.atoms)] = one.atoms
        for first, second, kind in one.bonds:
            bonds[row, first, second] = bonds[row, second, first] = kind
    return split({"atoms": atoms, "bonds": bonds})


def molecule_of(smiles: str) -> Molecule | None:
    """A molecule from its SMILES; None if it has more than plain atoms, bonds, branches and rings.

    >>> molecule_of("CC(=O)O")
    Molecule(atoms=[1, 1, 3, 3], bonds=[(0, 1, 1), (1, 2, 2), (1, 3, 1)])
    """
    atoms: list[int] = []
    bonds: list[tuple[int, int, int]] = []
    branches: list[int] = []
    rings: dict[str, tuple[int, int]] = {}
    last, bond = -1, 0

    def join(first: int, second: int, kind: int) -> None:
        both = all(KINDS[atoms[atom] - 1].islower() for atom in (first, second))
        bonds.append((first, second, kind or (AROMATIC if both else SINGLE)))

    for word in re.findall(r"\[nH\]|Cl|Br|.", smiles):
        name = "n" if word == "[nH]" else word
        if name in KINDS:
            atoms.append(KINDS.index(name) + 1)
            if last >= 0:
                join(last, len(atoms) - 1, bond)
            last, bond = len(atoms) - 1, 0
        elif word in "-=#":
            bond = {"-": SINGLE, "=": DOUBLE, "#": TRIPLE}[word]
        elif word == "(":
            branches.append(last)
        elif word == ")":
            last = branches.pop()
        elif word.isdigit() and word in rings:
            other, kind = rings.pop(word)
            join(other, last, bond or kind)
            bond = 0
        elif word.isdigit():
            rings[word], bond = (last, bond), 0
        else:
            return None
    return Molecule(atoms, bonds)


# Tables --------------------------------------------------------------------------------------------------------------


def concepts(files: Files) -> Arrays:
    """Statements (subject, relation, object) of medicine by number, and each of them turned around."""
    parts = {name.rpartition("/")[2]: _statements(content) for name, content in files.items()}
    every = np.concatenate(list(parts.values()))
    entities, relations = np.unique(every[:, [0, 2]]), np.unique(every[:, 1])
    found: Arrays = {}
    for part, rows in (
        ("train", parts["train.txt"]),
        ("test", np.concatenate([parts["valid.txt"], parts["test.txt"]])),
    ):
        subject, thing = (np.searchsorted(entities, rows[:, k]) for k in (0, 2))
        relation = np.searchsorted(relations, rows[:, 1])
        turned = (np.stack([subject, relation, thing], 1), np.stack([thing, relation + len(relations), subject], 1))
        found[f"{part}_statements"] = np.concatenate(turned).astype(np.uint8)
    return found


def _statements(content: bytes) -> NDArray[np.str_]:
    return np.array([line.split("\t") for line in content.decode().splitlines() if line])


def patients(files: Files) -> Arrays:
    """Seven numbers, standardised, the years that someone was seen, and whether that ended with death."""
    (content,) = files.values()
    _, _, body = content.decode().partition("@data\n")
    table = np.array([line.split(",") for line in body.splitlines() if line])
    age, year, kappa, light = (table[:, k].astype(np.float64) for k in (0, 2, 3, 4))
    known = table[:, 6] != "?"
    creatinine = np.where(known, table[:, 6], "1").astype(np.float64)
    sex, days = table[:, 1] == "M", table[:, 8].astype(np.float64)
    columns = [age, year, np.log(kappa), np.log(light), np.log(creatinine), known.astype(float), sex.astype(float)]
    return split(
        {
            "numbers": standardised(columns).astype(np.float32),
            "years": (days / YEAR).astype(np.float32),
            "deaths": (table[:, 9] == "dead").astype(np.uint8),
        },
        PATIENTS_HELD_OUT,
    )


# Signals -------------------------------------------------------------------------------------------------------------


def brain(files: Files) -> Arrays:
    """Slices of a head (the mean of 152 people), and the tissue at each point: outside, grey, white, water."""
    found = {re.sub(r".*_icbm152_(\w\w)_.*", r"\1", name): volume(content) for name, content in files.items()}
    seen, grey, white = found["t1"], found["gm"].astype(int), found["wm"].astype(int)
    tissue = np.select([seen == 0, np.maximum(grey, white) < 96, white > grey], [0, WATER, WHITE], GREY)
    inside = [z for z in range(seen.shape[2]) if (seen[:, :, z] > 0).mean() > 0.1][::SLICE]
    held = np.arange(len(inside)) % 5 == 4
    slices = {"slices": seen[:, :, inside].transpose(2, 0, 1), "tissue": tissue[:, :, inside].transpose(2, 0, 1)}
    train = {f"train_{name}": values[~held].astype(np.uint8) for name, values in slices.items()}
    return train | {f"test_{name}": values[held].astype(np.uint8) for name, values in slices.items()}


def volume(packed: bytes) -> NDArray[np.uint8]:
    """The numbers of a NIfTI-1 file of bytes, by its three axes."""
    content = gzip.decompress(packed)
    dimensions = np.frombuffer(content, "<i2", 8, 40)
    (kind,) = np.frombuffer(content, "<i2", 1, 70)
    (start,) = np.frombuffer(content, "<f4", 1, 108)
    if dimensions[0] != 3 or kind != 2:
        raise ValueError(f"a volume must have 3 axes of bytes (kind 2), but has {dimensions[0]} of kind {kind}")
    numbers = np.frombuffer(content, np.uint8, int(np.prod(dimensions[1:4], dtype=int)), int(start))
    return numbers.reshape(dimensions[1:4], order="F")


def appliances(files: Files) -> Arrays:
    """Power that appliances draw, one series each, standardised."""
    found = {}
    for name, content in sorted(files.items()):
        lines = [line for line in content.decode().splitlines() if line and line[0] not in "@#"]
        rows = [line.rpartition(":")[0].split(",") for line in lines]
        found["train" if "TRAIN" in name else "test"] = np.array(rows, np.float32)
    return {"train_power": found["train"], "test_power": found["test"]}


def genes(files: Files) -> Arrays:
    """Bases of a piece of a genome (A, C, G, T: 0 to 3), and what is read there."""
    texts = {name.endswith(".single.fna.gz"): gzip.decompress(content).decode() for name, content in files.items()}
    letters = "".join(texts[False].splitlines()[1:]).encode()
    bases = np.searchsorted(np.frombuffer(b"ACGT", np.uint8), np.frombuffer(letters, np.uint8)).astype(np.uint8)
    frames = np.full(len(bases), INTERGENIC, np.uint8)
    for first, last, strand in re.findall(r"^>\S+ # (\d+) # (\d+) # (-?1) ", texts[True], re.MULTILINE):
        length = int(last) - int(first) + 1
        place = np.arange(length) % 3
        frames[int(first) - 1 : int(last)] = place + 1 if strand == "1" else place[::-1] + 4
    count = len(bases) // GENES_BLOCK
    held = np.arange(count) % GENES_HELD_OUT == GENES_HELD_OUT - 1
    found: Arrays = {}
    for name, values in (("bases", bases), ("frames", frames)):
        blocks = values[: count * GENES_BLOCK].reshape(count, GENES_BLOCK)
        found |= {f"train_{name}": blocks[~held], f"test_{name}": blocks[held]}
    return found


PREPARE_SCIENCE: dict[str, Callable[[Files], Arrays]] = {
    "molecules": molecules,
    "concepts": concepts,
    "patients": patients,
    "brain": brain,
    "appliances": appliances,
    "genes": genes,
}
"""By the name of the data set."""
