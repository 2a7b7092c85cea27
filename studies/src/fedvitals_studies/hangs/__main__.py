# SPDX-License-Identifier: Apache-2.0
"""`python -m fedvitals_studies.hangs RESULTS [HOST ...]`: plant the hangs of these hosts; `uneven`: healthy rounds."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from fedvitals_studies.hangs import study, uneven
from fedvitals_studies.hangs.plant import HOSTS, KINDS, Plant


def main() -> None:
    """Run the hosts that were asked for; one line of JSON for each hang."""
    results, hosts = Path(sys.argv[1]), sys.argv[2:] or [*HOSTS, "uneven"]
    results.mkdir(parents=True, exist_ok=True)
    for host in hosts:
        if host == "uneven":
            (results / "uneven.json").write_text(json.dumps(uneven.run(), indent=1) + "\n", encoding="utf-8")
            continue
        rows = []
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            for seed, kind in enumerate(KINDS):
                rows.append(study.run_hang(Plant(host, kind, str(Path(folder, kind)), seed)))
                sys.stdout.write(json.dumps(study.as_lines(rows[-1:])[0]) + "\n")
                sys.stdout.flush()
        (results / f"{host}.json").write_text(json.dumps(study.as_lines(rows), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
