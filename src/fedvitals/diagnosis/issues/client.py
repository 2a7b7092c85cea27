# SPDX-License-Identifier: Apache-2.0
"""Issues of a single client, as far as they show in its update and in what it measures."""

from __future__ import annotations

from fedvitals.diagnosis.issues.issue import Issue

CLIENT = (
    Issue(
        "LABEL_NOISE",
        "Labels are wrong at random",
        "client",
        "warning",
        "The received model is far worse on the client's own samples than on its peers', training helps little there, "
        "and the update points away from the others', most of all in the last layer.",
        (
            "Labels were shuffled against the inputs on this client: files sorted differently, an index off by one.",
            "Careless or automatic labelling.",
            "The class numbers of this client mean something else than the others'.",
            "Data that somebody poisoned on purpose.",
        ),
        (
            "Look at the samples with the highest loss under the global model: their labels tell.",
            "Leave the client out until its labels have been checked; take it back on probation.",
            "Use a robust aggregation (trimmed mean, median) if many clients are like this.",
            "Train there with a loss that bears noise, or on relabelled samples.",
        ),
        "A sample of its labels checked by hand is right; or the client has data of another kind (other sensor, other "
        "population) and its loss falls once it trains longer.",
        "Gill, Anwar, Gulzar 2023, FedDebug, ICSE, arXiv 2301.03553",
    ),
    Issue(
        "LABEL_FLIP",
        "One class is labelled as another",
        "client",
        "warning",
        "The received model's errors on the client's samples gather in one pair of classes: samples labelled a are "
        "taken, with confidence, for b. The rest of the client is like its peers.",
        (
            "Two class names were mixed up when the data were labelled or exported.",
            "A targeted poisoning: one class is to be mistaken for another.",
            "The two classes really are drawn apart differently by those who label there.",
        ),
        (
            "Look at ten samples of the class in question on this client.",
            "Correct the mapping of labels on the client; nothing else needs to change.",
            "Leave the client out until then: the global model's errors on this pair grow otherwise.",
        ),
        "The samples of that class are labelled rightly; or peers show the same pair of confused classes, so that it "
        "is the model that mixes them up. Below 15 % of samples affected nothing is promised.",
        "Tolpegin et al. 2020, Data poisoning attacks against federated learning systems, arXiv 2007.08432",
    ),
    Issue(
        "INPUT_NOISE",
        "Inputs are noisy",
        "client",
        "warning",
        "The client's model learns its samples less well than its peers learn theirs, its updates vary from round to "
        "round, and the change spreads over more weights, most of all in the first layer.",
        (
            "A defective or dirty sensor, a bad connection, strong compression.",
            "A step of preprocessing is missing or done twice.",
            "Noise was added for privacy, more of it than elsewhere.",
        ),
        (
            "Compare a few raw inputs with a peer's: the eye, or the variance per channel, usually settles it.",
            "Repair or replace the source; denoise on the client.",
            "Lower the client's weight, or leave it out until the inputs are clean.",
        ),
        "Its inputs have the same spread and spectrum as the peers'; or the data are merely harder there, and the loss "
        "falls as the global model becomes better.",
        "Hendrycks and Dietterich 2019, arXiv 1903.12261",
    ),
    Issue(
        "INPUT_SCALE",
        "Inputs are on another scale",
        "client",
        "warning",
        "The first layer's gradients and update are much larger or smaller than the peers', while the labels suit the "
        "model.",
        (
            "Normalisation is missing on this client, or done twice (0 to 255 in place of 0 to 1).",
            "Another unit, another gain of the sensor, another order of the channels.",
            "Normalised with the client's own mean and deviation where the others use shared ones.",
        ),
        (
            "Print mean and standard deviation of one batch of inputs there and on a peer.",
            "Use one preprocessing, with constants that are sent with the model.",
            "Normalise inside the model (a batch, group or layer norm on the input).",
        ),
        "Mean and deviation of the inputs, as they enter the model, are the same as the peers'.",
        "Breck et al. 2019, Data validation for machine learning, MLSys",
    ),
    Issue(
        "MISSING_CLASSES",
        "Classes that others have are missing",
        "client",
        "note",
        "The rows of the last layer for some classes only shrink in this client's update: it has no samples of them.",
        (
            "The client's data really are so: that is a minority, not a fault.",
            "A filter or a split lost classes on the way.",
            "The collection has only begun.",
        ),
        (
            "If it is legitimate, keep the client: the others need what it has.",
            "Balance the loss or leave absent classes out of the softmax on such clients.",
            "Shorten local training there, so that absent classes are not unlearnt.",
        ),
        "A label histogram of the client (privacy level 3) has every class.",
        "Zhao et al. 2018, Federated learning with non-IID data, arXiv 1806.00582; Hsu et al. 2019, arXiv 1909.06335",
    ),
    Issue(
        "BYZANTINE",
        "The update is not what training gives",
        "client",
        "critical",
        "Norm, direction or signs of the update lie far from the peers', and do not fit what the client says of its "
        "own training: reversed, multiplied, replaced by noise, or shifted with others in step.",
        (
            "Code on the client sends gradients for weights, the difference with the wrong sign, or without dividing.",
            "Messages are damaged on the way, or memory is faulty.",
            "A wrong learning rate or labels that are all wrong can look alike; the numbers tell which is nearer.",
            "An attack: sign flip, scaling, noise, «a little is enough», inner product.",
        ),
        (
            "Leave the client out now: one such update can undo a round.",
            "Swap in a robust aggregation (trimmed mean, median, Multi-Krum) while the cause is looked for.",
            "Clip updates to the median norm of the round.",
            "Compare what the client says it sent with what arrived, by a hash.",
        ),
        "Trained again on the same data from the same model, the client gives the same update; or the update fits the "
        "loss and gradients that it measured.",
        "Blanchard et al. 2017, arXiv 1703.02757; Baruch et al. 2019, arXiv 1902.06156; Xie et al. 2020, "
        "arXiv 1903.03936",
    ),
    Issue(
        "STALE_UPDATE",
        "The update starts from an old model",
        "client",
        "warning",
        "The update points back towards the models of earlier rounds: it holds the difference between an old model and "
        "this round's, beside what was learnt.",
        (
            "The client did not load the model that it was sent, but its own last one.",
            "A slow client answers a round that is over, and the server counts it for the present one.",
            "A cache between server and client serves an old model.",
        ),
        (
            "Send the round's number with the model and back with the update, and refuse what does not match.",
            "Weigh late updates down (asynchronous aggregation with a staleness factor).",
            "Have the client compute its update against the model it has really started from.",
        ),
        "The hash of the model the client started from is that of this round's; or the aggregation is meant to be "
        "asynchronous.",
        "Xie, Koyejo, Gupta 2019, Asynchronous federated optimization, arXiv 1903.03934",
    ),
    Issue(
        "FREE_RIDER",
        "The client sends without training",
        "client",
        "warning",
        "The update is exactly zero, or it is the last global step over again, with or without a little noise.",
        (
            "Training fails silently on the client (no data, zero steps, all frozen): the model goes back as it came.",
            "The optimiser holds the parameters of another copy of the model.",
            "A client that wants the model without giving anything.",
        ),
        (
            "Check there that the loss is computed, and that a weight changes in one step.",
            "Leave the client out of the average: a zero update with a high sample count slows everybody.",
            "Ask for a proof of work: the loss before and after on the server's own samples.",
        ),
        "The client's steps, losses and gradients show that it trained, and the update is that training's; near "
        "convergence, honest updates of all clients may be alike.",
        "Fraboni, Vidal, Lorenzi 2021, arXiv 2006.11901",
    ),
    Issue(
        "DUPLICATE_UPDATE",
        "Two clients send the same update",
        "client",
        "warning",
        "Two updates of one round agree to the last bit, or so nearly that two trainings cannot have made them. Who "
        "copied whom cannot be seen from updates: the pair is reported.",
        (
            "One device is registered twice, or two clients read the same data with the same seed.",
            "A retry was counted as a second client.",
            "One client copies another's, or one attacker plays several clients.",
        ),
        (
            "Count only one of the two.",
            "Look at which data folder and which device the two use.",
            "Give every client its own key, and let the server accept one update per key and round.",
        ),
        "The two have different data and seeds, and their updates differ beyond rounding; inside an edge that averages "
        "after every step, equal updates are as they should be.",
        "Fung, Yoon, Beschastnikh 2020, Mitigating sybils in federated learning poisoning, arXiv 1808.04866",
    ),
    Issue(
        "WRONG_SAMPLE_COUNT",
        "The claimed number of samples is wrong",
        "client",
        "warning",
        "The count by which the server weighs the update is not the size of the data that the client trained on, or "
        "it jumped against the client's own first claim.",
        (
            "Batches, tokens or augmented samples were counted in place of samples; or samples times epochs.",
            "A constant that nobody updated.",
            "The client's data really grew; then the count of its loader grew with it.",
            "A client that wants more weight.",
        ),
        (
            "Take the count from the loader, in one place, on every client.",
            "Cap the weight of a single client.",
            "Until then, weigh this client by the median count.",
        ),
        "The size of the training data on the client equals the claim.",
        "Portnoy, Tirosh, Hendler 2020, Towards federated learning with Byzantine-robust client weighting, "
        "arXiv 2004.04986",
    ),
    Issue(
        "WRONG_LEARNING_RATE",
        "The client's learning rate is not the others'",
        "client",
        "warning",
        "The update is much longer or shorter than the client's own gradients and steps explain, compared with its "
        "peers; the direction is ordinary, at least at first.",
        (
            "A setting of its own on this client: an old configuration, another schedule, a lost decimal.",
            "A scheduler that counts steps since its own start, not since the run's.",
            "Another optimiser or batch size than the others'.",
            "The update is scaled after training.",
        ),
        (
            "Send learning rate, optimiser and schedule with each round, and let clients have none of their own.",
            "Clip the client's update to the median norm until it is set right.",
            "Restart its scheduler, or store it with the client's state.",
        ),
        "Its configuration is the same as the peers', and so is update norm divided by gradient norm times steps.",
        "Wang et al. 2020, FedNova, arXiv 2007.07481",
    ),
    Issue(
        "FROZEN_LAYER",
        "A layer does not learn on one client",
        "client",
        "warning",
        "The update of a layer is exactly zero on this client, while it is not for most of its peers.",
        (
            "`requires_grad` is off there, or the layer is missing from the optimiser's parameters.",
            "A partial load of the model replaced a layer's tensor after the optimiser was made.",
            "Every unit of the layer is dead on this client's data.",
            "An adapter or a personal layer that is meant to stay; then name it so.",
        ),
        (
            "Compare the list of trained parameters with a peer's.",
            "Make the optimiser after the model has been loaded.",
            "Leave the layer of this client out of the average.",
        ),
        "The layer is left out on purpose on this client; or its update differs from zero before it is sent.",
        "Jiang et al. 2025, TrainCheck, OSDI (silent training errors)",
        exact=True,
    ),
    Issue(
        "UNUSUAL_CLIENT",
        "A client is unlike its peers, the cause is unclear",
        "client",
        "warning",
        "Several vital signs of the client lie far from its peers' and from its own past, over several rounds, but "
        "none of the known causes explains them well enough.",
        (
            "Data of another kind: another device, place or population. Legitimate, and worth knowing.",
            "A fault that none of the known patterns covers, or two at once.",
            "A fault that has only begun: the cause becomes clear with more rounds.",
        ),
        (
            "Look at the numbers of the finding, then at the client's data.",
            "If it is legitimate, keep it; think of a personal last layer, or of clusters.",
            "If it is not, leave it out and see whether the global model becomes better.",
        ),
        "A model trained without this client is no better on the others' data, and worse on its own: then it was only "
        "different.",
        "Zhang et al. 2024, FLTracer, IEEE TIFS; Sattler, Müller, Samek 2021, Clustered federated learning, "
        "arXiv 1910.01991",
    ),
)
