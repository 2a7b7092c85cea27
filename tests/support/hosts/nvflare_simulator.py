# SPDX-License-Identifier: Apache-2.0
"""NVFlare's simulator runs the federations of `check_host`, with a process for each site."""

import subprocess
import sys
from pathlib import Path

RUN = "import sys; from fedvitals_studies.nvflare.scripted_job import run_scripted; run_scripted(*sys.argv[1:])"


class NVFlareHost:
    name = "nvflare"
    cannot = {"rounds without a barrier": "the workflows that are watched close a round for all sites at once"}  # noqa: RUF012

    def client_names(self, count):
        return [f"site-{i + 1}" for i in range(count)]

    def run(self, script, store):
        folder = Path(script.folder) / script.name
        folder.mkdir()
        file, log = folder / "script.json", folder / "log.txt"
        file.write_text(script.to_json())
        command = [sys.executable, "-c", RUN, file, store, folder / "workspace"]
        with log.open("w") as output:
            ended = subprocess.run(command, cwd=folder, stdout=output, stderr=output, timeout=300, check=False)
        if ended.returncode:
            raise RuntimeError(log.read_text()[-4000:])
