# SPDX-License-Identifier: Apache-2.0
"""Issues of aggregation: what can go wrong where updates become one model."""

from __future__ import annotations

from fedvitals.diagnosis.issues.issue import Issue

AGGREGATION = (
    Issue(
        "NAN_WEIGHTS",
        "Weights are NaN or infinite",
        "aggregation",
        "critical",
        "The global model, or a client's model after training, holds values that are not numbers. Every later round "
        "starts from them.",
        (
            "A client's update was not finite and went into the average: one NaN makes the whole sum NaN.",
            "Training itself overflowed: exploding gradients, a loss of log(0), half precision without scaling.",
            "The server divided by a total weight of zero.",
        ),
        (
            "Go back to the last round whose weights are finite: nothing after it can be used.",
            "Refuse updates with values that are not finite before averaging.",
            "Clip gradients, lower the learning rate, or scale the loss where it is in half precision.",
        ),
        "All weights of the stored model are finite: then the values were lost on the way here.",
        "Flower issue 7645 (NaN aggregates are let through silently)",
        exact=True,
    ),
    Issue(
        "NAN_UPDATE",
        "A client's update is NaN or infinite",
        "aggregation",
        "critical",
        "An update that arrived for averaging holds values that are not numbers.",
        (
            "The client's training overflowed; its NAN_GRADIENT finding names layer and step.",
            "The message was damaged on the way: a flipped bit in an exponent.",
            "Compression or decoding divides by a norm of zero.",
        ),
        (
            "Leave this update out of the average; the rest of the round is good.",
            "Check updates for finite values where they arrive, always.",
            "See where it comes from: with NAN_GRADIENT, from training; without, from the way.",
        ),
        "The update is finite when the client sends it, by its own count, and a hash shows that it arrived unchanged.",
        "Flower issue 7645; McMahan et al. 2017, arXiv 1602.05629",
        exact=True,
    ),
    Issue(
        "WEIGHT_EXPLOSION",
        "The global weights grow without bound",
        "aggregation",
        "critical",
        "The norm of the global weights grows by about the same factor round after round.",
        (
            "The server's learning rate is too high, or updates are summed in place of averaged.",
            "A client scales its updates up.",
            "Weights without decay in front of a normalisation, which hides their size.",
        ),
        (
            "Go back to the round in which the growth began, and halve the server's learning rate.",
            "Check that the aggregation weights sum to one.",
            "Clip updates to the median norm; add weight decay.",
        ),
        "The growth ends by itself, as in a normal start of training; the loss keeps falling meanwhile.",
        "Pascanu, Mikolov, Bengio 2013, arXiv 1211.5063; Reddi et al. 2021, arXiv 2003.00295",
    ),
    Issue(
        "GROUP_LEFT_BEHIND",
        "The global model does not serve some clients",
        "aggregation",
        "warning",
        "The loss of some clients stays high or rises while that of the others falls: two groups, further apart from "
        "round to round.",
        (
            "A minority with other data is outvoted in the average.",
            "These clients are rarely asked, or have little weight.",
            "One edge or cluster has a fault that its members share.",
        ),
        (
            "Weigh the clients with a high loss up (q-FFL, agnostic federated learning).",
            "Let the group have its own model, or its own last layers.",
            "Ask these clients as often as the others.",
            "If it is one edge or cluster, look for what its members share: data source, software, place.",
        ),
        "Trained alone on their own data, these clients end with the same high loss: then their data are harder, not "
        "neglected.",
        "Mohri, Sivek, Suresh 2019, arXiv 1902.00146; Li et al. 2020, q-FFL, arXiv 1905.10497",
    ),
    Issue(
        "DOMINANT_CLIENT",
        "One client decides the average",
        "aggregation",
        "warning",
        "One client has so much of the total weight, or so long an update, that the average is nearly its own update.",
        (
            "It really has most of the data.",
            "Its claimed sample count is wrong.",
            "Its update is far longer than the others'.",
        ),
        (
            "Cap the weight of a single client, or weigh by the square root of the count.",
            "Check the count against its data (see WRONG_SAMPLE_COUNT).",
            "Clip updates to the median norm.",
        ),
        "Without this client, the global model is no better on the other clients' data.",
        "Portnoy, Tirosh, Hendler 2020, arXiv 2004.04986",
    ),
    Issue(
        "BATCH_NORM_STATISTICS",
        "Running statistics are broken",
        "aggregation",
        "warning",
        "Running means or variances of normalisation layers are not finite, negative, or far from the peers' and from "
        "their own past; the model is good in training mode and bad in evaluation.",
        (
            "Buffers are left out of the aggregation, or averaged as if they were weights, counts included.",
            "A client's inputs are on another scale, and its statistics are averaged with the others'.",
            "Very small batches, or momentum 1, or training left in evaluation mode.",
        ),
        (
            "Use group or layer norm, or keep the statistics on each client (FedBN).",
            "Estimate them anew for the global model, on a few batches.",
            "Average variances together with the means' differences, never the counters.",
        ),
        "Estimated again on clean batches, the statistics come out the same.",
        "Li et al. 2021, FedBN, arXiv 2102.07623",
    ),
    Issue(
        "ZERO_TOTAL_WEIGHT",
        "Nothing could be averaged",
        "aggregation",
        "critical",
        "The weights of all updates of a round sum to zero, or no usable update was left: the round has no model of "
        "its own.",
        (
            "All clients claimed zero samples: an empty split, or a field that was not filled in.",
            "Every update was refused, late or lost.",
            "The cohort of the round was empty.",
        ),
        (
            "Keep the model of the round before, and ask again.",
            "Refuse a sample count of zero where it arrives.",
            "Ask more clients than are needed, so that some may fail.",
        ),
        "The counts that arrived have a sum above zero.",
        "McMahan et al. 2017, arXiv 1602.05629 (the weights n_k / n)",
        exact=True,
    ),
    Issue(
        "SHAPE_OR_DTYPE_MISMATCH",
        "An update does not fit the model",
        "aggregation",
        "warning",
        "An update has other tensors, shapes or number types than the global model, and was refused.",
        (
            "The client runs another version of the model or of the code.",
            "Another number of classes on this client.",
            "Half precision or integers from quantisation, not turned back.",
        ),
        (
            "Bring the client's code and configuration up to date.",
            "Send the model's layer table with the model, and compare before training.",
            "Turn the update to the model's number type on the client, explicitly.",
        ),
        "Names, shapes and types of the update equal the model's; then the refusal is a fault of the host.",
        "Beutel et al. 2020, Flower, arXiv 2007.14390",
        exact=True,
    ),
    Issue(
        "TRANSFORMED_UPDATES",
        "Updates are changed on the way, and some rules abstain",
        "aggregation",
        "note",
        "Most clients' updates arrive differing from what the clients trained. Rules that compare the two, and the "
        "evidence learnt on untouched updates, abstain; exact rules such as those about NaN, and an update many times "
        "as large as the others', still speak.",
        (
            "Lossy compression: half precision, 8-bit quantisation, top-k sparsification, pruning.",
            "Clipping and noise for differential privacy.",
            "Code between training and sending that changes the weights of every client.",
        ),
        (
            "Nothing, if the transformation is meant: it is no fault.",
            "Run a few rounds without compression if a single client is under suspicion.",
            "Compare the accuracy with and without it to learn what it costs.",
        ),
        "The hash of what a client sends equals that of what it trained, for most of the clients.",
        "Konečný et al. 2016, arXiv 1610.05492; Aji and Heafield 2017, arXiv 1704.05021",
    ),
)
