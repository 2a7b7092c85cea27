# SPDX-License-Identifier: Apache-2.0
"""Issues of convergence: what can go wrong with the training as a whole."""

from __future__ import annotations

from fedvitals.diagnosis.issues.issue import Issue

CONVERGENCE = (
    Issue(
        "DIVERGENCE",
        "The loss runs away",
        "convergence",
        "critical",
        "The global loss rises round after round, far above the best value that the run has had, and does not come "
        "back.",
        (
            "The server's learning rate is too high for the number of clients or for the server's momentum.",
            "The clients' learning rate is too high, or local training too long for data that differ between clients.",
            "One client's update is so large or so wrong that it pulls the average away.",
            "Gradients explode inside local training because nothing clips them.",
        ),
        (
            "Go back to the model of the best round and halve the server's learning rate.",
            "Lower the clients' learning rate by a factor of 3 to 10, or shorten local training.",
            "Clip the clients' gradients (norm 1 per tensor) and clip the updates to their median norm.",
            "Look at the client findings of the same rounds; leave the client they name out for a few rounds.",
        ),
        "The loss comes back under its level at the onset within the next rounds, with nothing changed; or the loss is "
        "measured on other data than before.",
        "Reddi et al. 2021, Adaptive federated optimization, arXiv 2003.00295",
    ),
    Issue(
        "OSCILLATION",
        "The loss swings to and fro",
        "convergence",
        "warning",
        "The global loss goes up and down between rounds by far more than the run's own usual change, without getting "
        "better on the whole.",
        (
            "The server's or the clients' learning rate is at the edge of what is stable.",
            "Each round draws few clients, and these differ strongly: every round learns something else.",
            "Gradients spike now and then in local training without clipping; averaging heals it, partly, each time.",
            "Server momentum overshoots.",
        ),
        (
            "Lower the server's learning rate by half, or let it decay over the rounds.",
            "Ask more clients in each round.",
            "Clip the clients' gradients (norm 1 per tensor).",
            "Lower the server's momentum.",
        ),
        "The swings shrink by themselves over the next ten rounds, or they are as large as the sampling error of the "
        "test set that the loss is measured on.",
        "Bogacka et al. 2024, Gradient scale monitoring for federated learning systems, JAMRIS 3/2024 (Figures 6 to "
        "11); Cohen et al. 2021, arXiv 2103.00065",
    ),
    Issue(
        "SLOW_PROGRESS",
        "Learning is far slower than it could be",
        "convergence",
        "warning",
        "Clients improve much on their own samples in every round, but the global model keeps only a small part of it.",
        (
            "The server's learning rate is far below 1, or the aggregation takes only a part of the step.",
            "The clients' learning rate is too low, or they take too few local steps.",
            "The clients' updates cancel each other out, since their data differ strongly.",
            "Clipping, noise for privacy or compression removes most of each update.",
        ),
        (
            "Raise the server's learning rate towards 1.",
            "Raise the clients' learning rate by a factor of 3, or let them take more steps.",
            "Use a server optimiser with momentum (FedAvgM, FedAdam).",
            "Compare `update.norm` with the norm that clipping allows.",
        ),
        "A twin run with three times the learning rate is not faster; or the loss is already near the best that this "
        "model can reach on these data.",
        "Charles and Konečný 2020, On the outsized importance of learning rates in local update methods, "
        "arXiv 2007.00878",
    ),
    Issue(
        "PLATEAU",
        "Learning has stopped early",
        "convergence",
        "warning",
        "The global loss has not become better for many rounds, while it is still high and the clients still find "
        "something to learn.",
        (
            "The learning rate has become too small, or the server hardly applies the updates.",
            "The updates cancel each other out: the mean of the updates is far shorter than the updates.",
            "Part of the model does not learn: dead or saturated units, a vanishing gradient, a frozen layer.",
            "The model is too small for the task, or the labels carry no more information.",
        ),
        (
            "Raise the learning rate of server or clients, or restart its schedule.",
            "Look at the gradient findings: layers without a gradient explain a plateau.",
            "Use more clients per round, or an aggregation for data that differ (SCAFFOLD, FedProx).",
            "Try a larger model on pooled or public data first.",
        ),
        "The loss falls again without a change; or a centrally trained model of the same kind stops at the same loss: "
        "then this is simply the end of what can be learnt.",
        "Zhang et al. 2021, AUTOTRAINER, ICSE; Reddi et al. 2021, arXiv 2003.00295",
    ),
    Issue(
        "OVERFITTING",
        "Clients learn by heart what the global model cannot use",
        "convergence",
        "warning",
        "The trained models fit the clients' own samples ever better, while the global model's loss on data that it "
        "was not trained on rises.",
        (
            "Too many local passes over too few samples.",
            "The clients have very little data, or each has the same samples many times over.",
            "The model is far too large for the data, and nothing regularises it.",
        ),
        (
            "Shorten local training: fewer epochs, or a fixed number of steps.",
            "Stop at the round with the best held-out loss.",
            "Add weight decay, dropout or augmentation; pull towards the global model (FedProx).",
            "Use more clients per round, so that each round sees more samples.",
        ),
        "The loss on fresh data still falls; or the «held-out» loss was measured on data of another distribution than "
        "the training's.",
        "Rauschmayr et al. 2021, Amazon SageMaker Debugger, MLSys; Li et al. 2020, FedProx, arXiv 1812.06127",
    ),
    Issue(
        "CLIENT_DRIFT",
        "Clients pull apart",
        "convergence",
        "warning",
        "Updates are long but point in different directions: their mean is far shorter than they are, and what "
        "clients gain locally the averaged model loses again.",
        (
            "Data differ strongly between clients, and local training is long.",
            "The clients' learning rate is too high for so many local steps.",
            "The clients belong to groups with different tasks that share one model.",
        ),
        (
            "Shorten local training or lower the clients' learning rate.",
            "Correct the drift: SCAFFOLD, FedProx, or a server with momentum.",
            "Let clients form clusters with a model each, if groups show in the findings.",
            "Share a small public data set that has every class.",
        ),
        "With half the local steps the global model learns no faster per round; or the cosines between updates rise "
        "again as training goes on.",
        "Karimireddy et al. 2020, SCAFFOLD, arXiv 1910.06378; Zhao et al. 2018, arXiv 1806.00582",
    ),
)
