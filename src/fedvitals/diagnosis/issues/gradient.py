# SPDX-License-Identifier: Apache-2.0
"""Issues of gradients, layer by layer."""

from __future__ import annotations

from fedvitals.diagnosis.issues.issue import Issue

GRADIENT = (
    Issue(
        "NAN_GRADIENT",
        "Gradients are NaN or infinite",
        "gradient",
        "critical",
        "A gradient holds values that are not numbers. The finding names the first client, layer and step.",
        (
            "Overflow after exploding gradients: the norms of the steps before rise steeply.",
            "The loss computes log(0), 0/0 or the root of 0; often for one rare sample.",
            "Half precision without, or with too high, a loss scale.",
            "NaN in the client's own inputs.",
        ),
        (
            "Leave the client's update out of this round.",
            "Look at the inputs of the named step: if they hold NaN, it is the data.",
            "Clip the gradients (norm 1 per tensor) and lower the learning rate.",
            "Use the numerically safe form of the loss, or a GradScaler in half precision.",
        ),
        "Only steps that a GradScaler skipped are affected: these never reached the weights, and a few of them belong "
        "to half precision.",
        "Micikevicius et al. 2018, Mixed precision training, arXiv 1710.03740",
        exact=True,
    ),
    Issue(
        "EXPLODING_GRADIENT",
        "Gradients explode",
        "gradient",
        "critical",
        "Gradients grow steeply from the last layer to the first, or from step to step, against the run's own history; "
        "the gradient scale coefficient grows by orders of magnitude, and the loss jumps with it.",
        (
            "Initial weights that are far too large.",
            "A learning rate that is too high, without clipping.",
            "A deep or recurrent network without normalisation or residual connections.",
            "Local training whose weights are exchanged after each step: one client's jump reaches all of its edge.",
        ),
        (
            "Clip the gradients per tensor to norm 1, before the optimiser's step.",
            "Lower the learning rate by a factor of 10, or warm it up.",
            "Initialise by Glorot or He; add normalisation or residual connections.",
            "Go back to the round before the jump.",
        ),
        "The norms fall back by themselves and the loss does not rise; or the large norm is the first steps' of a "
        "training that then calms down, as is usual.",
        "Bogacka et al. 2024, JAMRIS 3/2024; Philipp, Song, Carbonell 2017, arXiv 1712.05577; Pascanu et al. 2013, "
        "arXiv 1211.5063",
    ),
    Issue(
        "VANISHING_GRADIENT",
        "Gradients vanish",
        "gradient",
        "critical",
        "The first layers' gradients are zero, or smaller by orders of magnitude than the last layer's, while the loss "
        "is still high; the output does not answer to the input any more.",
        (
            "Saturated activations (tanh, sigmoid) after weights that are too large.",
            "Dead units: a step that was too large switched a whole layer off.",
            "A deep network without residual connections or normalisation.",
            "Underflow in half precision.",
        ),
        (
            "Initialise by Glorot (tanh) or He (ReLU), and start again: what was lost does not come back.",
            "Use ReLU-like activations, normalisation or residual connections.",
            "Lower the learning rate, if the layers died during training.",
            "Scale the loss in half precision.",
        ),
        "The loss is near its best: then small gradients are what training aims at; or the layer is frozen on purpose.",
        "Glorot and Bengio 2010, AISTATS; Bogacka et al. 2024, JAMRIS 3/2024",
    ),
    Issue(
        "DEAD_UNITS",
        "Units answer nothing",
        "gradient",
        "warning",
        "A large share of a layer's units gives zero for every sample, on most clients; their weights get no gradient.",
        (
            "A learning rate that was too high pushed the biases far below zero.",
            "Initial weights or biases that put units below zero for all inputs.",
            "Inputs that are all of one sign and not centred.",
        ),
        (
            "Use LeakyReLU, ELU or GELU in that layer.",
            "Lower the learning rate, and begin again from before the layer died.",
            "Initialise biases with zero and weights by He; centre the inputs.",
            "If the model is good nevertheless, make the layer smaller.",
        ),
        "On other samples the units answer; or the layer is sparse by design.",
        "Lu et al. 2020, Dying ReLU and initialization, arXiv 1903.06733",
    ),
    Issue(
        "SATURATED_UNITS",
        "Units are stuck at their limits",
        "gradient",
        "warning",
        "A large share of a layer's units sits at the limits of its activation (−1 and 1, or 0 and 1) for nearly all "
        "samples, so that hardly any gradient passes.",
        (
            "Weights in front of tanh or sigmoid that are too large, from the start or through the learning rate.",
            "Inputs that are not normalised.",
            "Gates of a recurrent network that were driven open or shut.",
        ),
        (
            "Normalise the inputs, and initialise by Glorot.",
            "Lower the learning rate; add weight decay or a normalisation before the activation.",
            "Use an activation without limits inside the network.",
        ),
        "The layer's gradient is as large as that of its neighbours: then the units are decided, not stuck.",
        "Glorot and Bengio 2010, Understanding the difficulty of training deep feedforward networks, AISTATS",
    ),
    Issue(
        "POOR_INITIALISATION",
        "The first weights hinder learning",
        "gradient",
        "warning",
        "Already in the first round, before anything was learnt, weights are constant, far too large or far too small "
        "for their layer, and gradients differ by orders of magnitude between layers.",
        (
            "An initialiser that does not suit layer width or activation, or constants.",
            "Weights loaded from another model, or only in part.",
            "Every client starts from random weights of its own in place of the server's.",
        ),
        (
            "Initialise by He (ReLU-like) or Glorot (tanh), biases with zero.",
            "Start from the server's weights on every client.",
            "Warm the learning rate up over the first rounds.",
        ),
        "The loss falls in the first rounds as fast as in a twin with a standard initialisation.",
        "He et al. 2015, arXiv 1502.01852; Philipp and Carbonell 2018, The nonlinearity coefficient",
    ),
)
