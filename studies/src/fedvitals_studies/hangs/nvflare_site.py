# SPDX-License-Identifier: Apache-2.0
"""The script of the sites: evaluate the received model, train it, send it back. NVFlare copies this file."""

from __future__ import annotations

import argparse

import nvflare.client as flare

from fedvitals_studies.hangs.plant import Plant


def main() -> None:
    """Work until the server has no more rounds."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", required=True)
    plant = Plant.read(parser.parse_args().folder)
    flare.init()
    client = int(flare.get_site_name().removeprefix("site-")) - 1
    while flare.is_running():
        received = flare.receive()
        if received is None:
            break
        round_index = int(received.current_round or 0)
        plant.work("evaluate", round_index, client)
        plant.work("train", round_index, client)
        flare.send(flare.FLModel(params=received.params, meta={"NUM_STEPS_CURRENT_ROUND": 1}))


if __name__ == "__main__":
    main()
