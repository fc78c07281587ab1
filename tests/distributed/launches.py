"""Start the processes of a test, and start them again after a check that failed: each check fails alone."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"


def reports_of(worker, count, folder, checks, patience=900):
    """What each process reports of each check: `[{check: "passed in ..." or a traceback}]`, one dict per process.

    A process that fails cannot answer the others, so all stop at the first check that fails. The checks after it run
    in new processes.
    """
    reports, rest = [{} for _ in range(count)], list(checks)
    while rest:
        (folder / "store").unlink(missing_ok=True)
        files = [folder / f"{number}.json" for number in range(count)]
        for file in files:
            file.unlink(missing_ok=True)
        done = subprocess.run(
            [sys.executable, str(worker), str(count), str(folder), *rest],
            capture_output=True,
            text=True,
            timeout=patience,
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])},
        )
        assert all(file.exists() for file in files), done.stderr[-4000:]
        found = [json.loads(file.read_text()) for file in files]
        for report, new in zip(reports, found, strict=True):
            report.update(new)
        failed = [check for check in rest if not all(new.get(check, "").startswith("passed") for new in found)]
        rest = rest[rest.index(failed[0]) + 1 :] if failed else []
    return reports


def checks_in(*files):
    """The names of the functions `check_...` in these files, without importing them."""
    lines = [line for file in files for line in file.read_text().splitlines()]
    return [line[len("def check_") : line.index("(")] for line in lines if line.startswith("def check_")]


def assert_passed(reports, check):
    for number, report in enumerate(reports):
        assert report.get(check, "not reached").startswith("passed"), f"rank {number}: {report.get(check)}"
