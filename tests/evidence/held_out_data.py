"""Real data that packages bring along: columns of pydataset's tables, molecules of rdkit, signals of mnist1d.

Nothing is fetched. What takes long to compute is kept in `build/evidence`.
"""

import csv
import tarfile
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from study_problem import Split
from torch import Tensor

KEPT = Path(__file__).parents[2] / "build" / "evidence"
MISSING = "expected the package {0}, which brings the data. Install the extra: pip install -e '.[evidence]'"


def folder_of(package: str) -> Path:
    """Where a package lies; it is not imported."""
    found = find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError(MISSING.format(package))
    return Path(found.submodule_search_locations[0])


@cache
def table(name: str) -> list[dict[str, str]]:
    """A table of pydataset, such as `Ecdat/Hdma`: a dict a row; rows with a missing value are left out."""
    with tarfile.open(folder_of("pydataset") / "resources.tar.gz") as archive:
        file = archive.extractfile(f"resources/rdata/csv/{name}.csv")
        if file is None:
            raise ValueError(f"expected a table of pydataset, found {name!r}")
        rows = list(csv.DictReader(file.read().decode("utf-8", "replace").splitlines()))
    return [row for row in rows if not {"", "NA"} & {value for key, value in row.items() if key}]


def numbers(rows: list[dict[str, str]], *names: str) -> Tensor:
    """Columns as numbers `[n, k]`; yes and no are 1 and 0."""
    known = {"yes": "1", "no": "0"}
    return torch.tensor([[float(known.get(row[name], row[name])) for name in names] for row in rows])


def classes(rows: list[dict[str, str]], name: str) -> Tensor:
    """A column as classes `[n]`, in the order of their names."""
    values = sorted({row[name] for row in rows})
    return torch.tensor([values.index(row[name]) for row in rows])


def one_hot(rows: list[dict[str, str]], *names: str) -> Tensor:
    """Columns of classes, each as columns of 0 and 1."""
    return torch.cat([torch.nn.functional.one_hot(classes(rows, name)).float() for name in names], dim=1)


def _read_molecules() -> list[Any]:
    """The first 5000 compounds of the NCI, as rdkit reads them."""
    from rdkit import Chem, RDLogger

    RDLogger.DisableLog("rdApp.*")
    lines = (folder_of("rdkit") / "Data" / "NCI" / "first_5K.smi").read_text().splitlines()
    found = [Chem.MolFromSmiles(line.split()[0]) for line in lines]
    return [one for one in found if one is not None and one.GetNumHeavyAtoms() > 1]


def _properties(molecule: Any) -> Tensor:
    """LogP, polar surface, refractivity, drug-likeness, share of sp3 carbons."""
    from rdkit.Chem import Crippen, Descriptors, rdMolDescriptors

    values = [Crippen.MolLogP(molecule), rdMolDescriptors.CalcTPSA(molecule), Crippen.MolMR(molecule)]
    return torch.tensor([*values, Descriptors.qed(molecule), rdMolDescriptors.CalcFractionCSP3(molecule)])


def _kept(name: str, make: Callable[[], Split]) -> Split:
    """What was computed before, or is now."""
    path = KEPT / f"{name}.pt"
    if not path.exists():
        KEPT.mkdir(parents=True, exist_ok=True)
        torch.save(make(), path)
    return tuple(torch.load(path))


def molecules() -> Split:
    """Counts of fragments (Morgan, radius 2, 256 bins), and five properties."""

    def make() -> Split:
        from rdkit.Chem import rdFingerprintGenerator

        generator = rdFingerprintGenerator.GetMorganGenerator(radius=2, fpSize=256)
        found = _read_molecules()
        counts = [torch.tensor(generator.GetCountFingerprintAsNumPy(one).tolist()).float() for one in found]
        return torch.stack(counts).log1p(), torch.stack([_properties(one) for one in found])

    return _kept("molecules", make)


ELEMENTS = (6, 7, 8, 9, 15, 16, 17, 35)


def graphs(most: int = 20) -> Split:
    """Of molecules with so many atoms at most: kinds of atoms `[n, most, 9]`, bonds `[n, most, most]`, properties."""

    def make() -> Split:
        found = [one for one in _read_molecules() if one.GetNumHeavyAtoms() <= most]
        atoms, bonds = torch.zeros(len(found), most, len(ELEMENTS) + 1), torch.zeros(len(found), most, most)
        for i, one in enumerate(found):
            for atom in one.GetAtoms():
                number = atom.GetAtomicNum()
                atoms[i, atom.GetIdx(), ELEMENTS.index(number) if number in ELEMENTS else len(ELEMENTS)] = 1
            for bond in one.GetBonds():
                ends = bond.GetBeginAtomIdx(), bond.GetEndAtomIdx()
                bonds[i, ends[0], ends[1]] = bonds[i, ends[1], ends[0]] = bond.GetBondTypeAsDouble()
        return atoms, bonds, torch.stack([_properties(one) for one in found])

    return _kept("graphs", make)


def characters(length: int = 32, rows: int = 12_000) -> Split:
    """Windows `[n, length]` of the topics of Python's manual: characters, the following ones, the kinds of those after
    them, and how far the end of the word is. The text is that of the running Python: other versions differ in places.
    """
    from pydoc_data.topics import topics

    text = " ".join(" ".join(topics[name].split()) for name in sorted(topics))
    codes = torch.tensor([min(max(ord(c) - 32, 0), 95) for c in text])
    kinds = torch.tensor([0 if c.isalpha() else 1 if c.isdigit() else 2 if c == " " else 3 for c in text])
    ends = [0] * len(text)
    for i in range(len(text) - 2, -1, -1):
        ends[i] = 0 if text[i] == " " else min(ends[i + 1] + 1, 20)
    starts = torch.arange(rows) * (length + 2)
    if int(starts[-1]) + length + 2 > len(text):
        raise ValueError(f"expected a manual of {rows * (length + 2)} characters, found {len(text)}")
    at = starts[:, None] + torch.arange(length)
    return codes[at], codes[at + 1], kinds[at + 2], torch.tensor(ends)[at].float()


def signals(seed: int, rows: int = 3000) -> Split:
    """Signals `[n, 40]` of mnist1d, made anew from a seed, and the digits that they stand for."""

    def make() -> Split:
        folder_of("mnist1d")
        from mnist1d.data import get_dataset_args, make_dataset

        options = get_dataset_args()
        options.num_samples, options.seed, options.train_split = rows, seed, 1.0
        found = make_dataset(options)
        return torch.tensor(found["x"], dtype=torch.float32), torch.tensor(found["y"])

    return _kept(f"signals_{rows}_{seed}", make)
