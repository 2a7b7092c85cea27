# SPDX-License-Identifier: Apache-2.0
"""Plant faults in NVFlare's simulator and list what is found: `python -m fedvitals_studies.nvflare.faults --fault nan`.

One run for each fault and seed, each in a folder of its own, whose store can be looked at afterwards.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fedvitals_studies.nvflare.jobs import WORKFLOWS, JobSettings, make_job, run_job

# Fault → issues, one of which must be found for the faulty site.
EXPECTED = {
    "none": (),
    "fail": ("CRASH",),
    "slow": ("TIMEOUT",),
    "kill": ("DROP_OUT", "TIMEOUT", "CRASH"),
    "nan": ("NAN_UPDATE",),
    "noise": ("LABEL_NOISE", "LABEL_FLIP"),
}


def one_run(settings: JobSettings, folder: Path) -> list[dict[str, Any]]:
    """Run one job in a separate process. Returns the findings of its run that are no notes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "settings.json").write_text(json.dumps(asdict(settings)), encoding="utf-8")
    with (folder / "log.txt").open("w", encoding="utf-8") as log:
        command = [sys.executable, "-m", __spec__.name, "--one", str(folder)]
        subprocess.run(command, stdout=log, stderr=log, check=False, timeout=900)  # noqa: S603 - our own module
    return findings_of(folder / "runs.db")


def findings_of(store: Path) -> list[dict[str, Any]]:
    """Return issue, node and severity of each case of the store's newest run that is no note."""
    from fedvitals.store import open_reader  # noqa: PLC0415 - the parent process needs nothing else
    from fedvitals.store.read.queries import list_runs  # noqa: PLC0415
    from fedvitals.views.cases import cases_of  # noqa: PLC0415

    with open_reader(store) as reader:
        run = list_runs(reader)[0]
        cases = cases_of(reader, run.id)
    return [{"issue": case.issue, "node": case.node, "severity": case.severity, "since": case.since} for case in cases]


def run_in_here(folder: Path) -> None:
    """Run the job that a folder describes."""
    import fedvitals as fv  # noqa: PLC0415 - only in the child

    settings = JobSettings(**json.loads((folder / "settings.json").read_text(encoding="utf-8")))
    job = make_job(settings)
    fv.nvflare.attach(job, folder / "runs.db", tracebacks=True)
    run_job(job, settings, folder / "workspace")


def main() -> None:
    """Run what the command line requests, and print one line for each run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fault", choices=[*EXPECTED, "all"], default="all")
    parser.add_argument("--seeds", default="0", help="as 0,1,2,3,4")
    parser.add_argument("--workflow", choices=WORKFLOWS, default="scatter-and-gather")
    parser.add_argument("--external", action="store_true", help="train in processes of their own")
    parser.add_argument("--sites", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--folder", type=Path, default=Path("nvflare-faults"))
    parser.add_argument("--one", type=Path, help="run the job of this folder, in this process")
    options = parser.parse_args()
    if options.one is not None:
        run_in_here(options.one)
        return
    faults = [*EXPECTED] if options.fault == "all" else [options.fault]
    for fault in faults:
        for seed in map(int, options.seeds.split(",")):
            settings = JobSettings(
                options.workflow, options.sites, options.rounds, seed, fault, external=options.external
            )
            place = options.folder.absolute() / f"{options.workflow}-{fault}-{seed}{'-external' * options.external}"
            began = time.time()
            findings = one_run(settings, place)
            named = [f for f in findings if f["node"] == settings.faulty and f["issue"] in EXPECTED[fault]]
            others = [f for f in findings if f not in named]
            verdict = "clean" if fault == "none" and not findings else "named" if named else "MISSED"
            words = ", ".join(f"{f['issue']} {f['node'] or ''} since {f['since']}" for f in (*named, *others))
            print(f"{fault:6} seed {seed}: {verdict:7} {words or '–'}  ({time.time() - began:.0f} s)", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
