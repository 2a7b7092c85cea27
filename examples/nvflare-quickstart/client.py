# SPDX-License-Identifier: Apache-2.0
"""The site's script: trains the model that it is sent on digits that stay here."""

import argparse

import nvflare.client as flare
import torch
from task import DigitsModel, accuracy, load_share, load_test, train


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--sites", type=int, default=6)
    parser.add_argument("--ill", default="", help="the site whose labels somebody has mixed up")
    options = parser.parse_args()

    flare.init()
    site = flare.get_site_name()
    share = int(site.removeprefix("site-")) - 1
    torch.manual_seed(share)
    x, y = load_share(share, options.sites)
    if site == options.ill:
        y = y[torch.randperm(len(y), generator=torch.Generator().manual_seed(1))]
    test = load_test()
    model = DigitsModel()
    while flare.is_running():
        received = flare.receive()
        if received is None:
            break
        model.load_state_dict(received.params)
        metrics = {"accuracy": accuracy(model, *test)}  # of the global model, on data that is nobody's own
        loss, steps = train(model, x, y)
        metrics["loss"] = loss
        meta = {"NUM_STEPS_CURRENT_ROUND": steps}
        flare.send(flare.FLModel(params=model.cpu().state_dict(), metrics=metrics, meta=meta))


if __name__ == "__main__":
    main()
