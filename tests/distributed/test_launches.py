"""A check that fails does not hide those after it."""

from launches import reports_of

WORKER = """
import json, sys
from pathlib import Path

count, folder, *checks = sys.argv[1:]
for number in range(int(count)):
    done = {}
    for check in checks:
        bad = check == "bad" and number == 1
        done[check] = "Traceback" if bad else "passed"
        if bad:
            break
    Path(folder, f"{number}.json").write_text(json.dumps(done))
"""


def test_checks_after_a_failure_run_in_new_processes(tmp_path):
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    found = reports_of(worker, 2, tmp_path, ["first", "bad", "after", "last"])
    good = {"first": "passed", "bad": "passed", "after": "passed", "last": "passed"}
    assert found == [good, good | {"bad": "Traceback"}]


def test_a_check_that_fails_last_ends_the_run(tmp_path):
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    assert reports_of(worker, 2, tmp_path, ["first", "bad"])[1] == {"first": "passed", "bad": "Traceback"}
