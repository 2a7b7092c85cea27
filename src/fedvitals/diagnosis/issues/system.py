# SPDX-License-Identifier: Apache-2.0
"""Issues of the system: machines, links and clocks."""

from __future__ import annotations

from fedvitals.diagnosis.issues.issue import Issue

SYSTEM = (
    Issue(
        "COMMUNICATION_FAILURE",
        "Messages get lost or damaged",
        "system",
        "warning",
        "A client took part, but its update did not arrive, or arrived damaged.",
        (
            "An unstable connection, or a message above the limit of a gateway (gRPC: 4 MB unless set).",
            "The client was killed while it sent.",
            "A proxy or firewall in between changes or cuts what it does not know.",
        ),
        (
            "Send again, with a growing delay, and with a checksum.",
            "Compress the update, or raise the limit of the message size.",
            "Leave the client out of this round; the average over the others is sound.",
        ),
        "The update is found at the server with a valid checksum: it was counted wrongly as missing.",
        "Bonawitz et al. 2019, Towards federated learning at scale, arXiv 1902.01046",
        exact=True,
    ),
    Issue(
        "TIMEOUT",
        "A client misses the deadline",
        "system",
        "warning",
        "The client's update came after the round's deadline, or not before it was given up.",
        (
            "A slow or hanging connection: the upload takes far longer than the training.",
            "Too much local work for this machine.",
            "A deadline that suits only the fastest clients.",
        ),
        (
            "Set the deadline by the slowest client that shall count, for example the 95th percentile.",
            "Give slow clients fewer steps, or a compressed update.",
            "Aggregate asynchronously, so that late updates still count.",
        ),
        "The time from request to arrival is below the deadline on the server's own clock.",
        "Nishio and Yonetani 2019, arXiv 1804.08333; Bonawitz et al. 2019, arXiv 1902.01046",
        exact=True,
    ),
    Issue(
        "STRAGGLER",
        "A client is far slower than the others",
        "system",
        "warning",
        "The client needs several times as long as its peers, over several rounds, so that the whole round waits for "
        "it.",
        (
            "A weaker or busy machine, or thermal throttling.",
            "More samples or more steps than the others.",
            "A slow link; then sending, not training, takes the time.",
            "Reading the data from a slow disk or over the network.",
        ),
        (
            "Give it fewer steps, or a deadline with partial work (FedProx).",
            "Aggregate asynchronously, or without the slowest few.",
            "Look at `time.step` against `time.client`: steps slow means compute, the rest is data and link.",
        ),
        "Its time for one sample is the peers': then it simply has more to do.",
        "Li et al. 2020, FedProx, arXiv 1812.06127; Deng et al. 2025, Minder, NSDI, arXiv 2411.01791",
    ),
    Issue(
        "DROP_OUT",
        "A client has left",
        "system",
        "warning",
        "A client that used to answer does not any more, round after round, although it is asked, or is announced as "
        "unavailable.",
        (
            "The device is off, out of charge or off the network.",
            "Its process has ended; look for CRASH or OUT_OF_MEMORY before.",
            "It was taken out on purpose.",
        ),
        (
            "Ask more clients than are needed.",
            "Watch whether those that leave share something: their data will be missing from the model.",
            "Let the client come back in with the present model.",
        ),
        "The client answers when it is asked the next time; with partial participation, not being asked is no "
        "drop-out.",
        "Bonawitz et al. 2019, arXiv 1902.01046",
    ),
    Issue(
        "CRASH",
        "A client fails with an error",
        "system",
        "warning",
        "The client's training ended with an exception. The finding has its class alone; its words and the traceback "
        "stand in the event, where privacy allows them.",
        (
            "A fault in the client's code or data: an unreadable sample, a wrong shape.",
            "A missing or different version of a library.",
            "A device that was lost: driver, memory error, power.",
        ),
        (
            "Read the traceback's last line of your own code.",
            "Run the client alone on the same round's model and data.",
            "Leave the client out until it runs; its last update is not used again.",
        ),
        "The exception is raised and handled on purpose, for example to stop early.",
        "the exception itself, as `client.failed` events have it",
        exact=True,
    ),
    Issue(
        "OUT_OF_MEMORY",
        "A client runs out of memory",
        "system",
        "warning",
        "The client's training ended because memory could not be had, on the device or in the machine, or its process "
        "was killed for it.",
        (
            "The batch, or one unusually large sample, does not fit.",
            "Memory is kept from step to step: losses summed with their graph, results held in a list.",
            "Several clients share the machine or the device.",
        ),
        (
            "Where the finding says what would fit, take that: a smaller batch, 16 or 8 bits, pruning.",
            "Sum `loss.item()`, never `loss`; free what the step before left.",
            "Use mixed precision or checkpointing of activations.",
            "Let fewer clients train at once on one machine.",
        ),
        "Memory in use (`memory.peak`) was far below what the machine has when it failed.",
        "Chen et al. 2016, Training deep nets with sublinear memory cost, arXiv 1604.06174",
        exact=True,
    ),
    Issue(
        "MEMORY_LEAK",
        "Memory grows from round to round",
        "system",
        "warning",
        "The process that trains, or the server's, holds more after each round, and it does not level off. Where the "
        "growth happens while one client trains, that client is named; where tensors pile up that fedvitals has seen "
        "(inputs, outputs, parameters and gradients of clients' models, and the graphs of outputs), so are they.",
        (
            "Losses or outputs kept with their graph: `total += loss`, or a list of them.",
            "A list, cache or log of tensors, of batches or of models that nobody empties.",
            "Hooks, closures or exceptions that keep a model of an earlier round alive.",
            "Models or tensors in reference cycles, which Python's garbage collector frees late or never.",
            "If none are named: tensors that fedvitals has not seen, a library's own cache, memory outside of torch.",
        ),
        (
            "Sum `loss.item()` or `loss.detach()`, never `loss`.",
            "Look for what holds the tensors that are named: by shape they are a batch, an output or a weight.",
            "Train each client in a process that ends with it, until the leak is found.",
        ),
        "Memory levels off when the run goes on, or `gc.collect()` brings it down.",
        "docs/profile.md, «Memory»",
    ),
    Issue(
        "DISK_FULL",
        "A disk is full",
        "system",
        "critical",
        "Writing failed for want of space (error 28), on a client or where the run is kept.",
        (
            "Checkpoints, logs or data sets have filled the disk.",
            "A quota or a small temporary folder.",
            "The store of many long runs; `fedvitals doctor` says its size.",
        ),
        (
            "Free space, or point checkpoints and store to another disk.",
            "Keep only the newest checkpoints.",
            "Thin the store: `fedvitals runs thin --keep-bytes 2GB`.",
        ),
        "There is space on the disk that the error names, and a file can be written there.",
        "POSIX errno ENOSPC",
        exact=True,
    ),
    Issue(
        "CLOCK_SKEW",
        "A clock is wrong",
        "system",
        "warning",
        "What a client tells bears times that lie outside of the round in which it took part, always by about the same "
        "amount.",
        (
            "The machine's clock is not synchronised, or was set by hand.",
            "A wrong time zone, taken for universal time.",
            "A virtual machine that was paused.",
        ),
        (
            "Turn time synchronisation (NTP) on there.",
            "Trust durations, not times of day, of this client until then.",
            "Where certificates or tokens expire, expect failures that look like others.",
        ),
        "The client's clock, asked now, agrees with the server's within a second.",
        "Mills et al. 2010, Network time protocol, RFC 5905",
    ),
    Issue(
        "TELEMETRY_LOST",
        "Telemetry is missing",
        "system",
        "warning",
        "A client took part, but nothing or not everything of what it measured came home, or records were lost on the "
        "way to the store. What is not measured cannot be judged.",
        (
            "The worker process ended before it had sent what it measured.",
            "A firewall or a mod of the host lets only models through.",
            "The client sent what cannot be its own telemetry, and it was refused (event `telemetry.refused`).",
            "The queue was full, or the store could not be written for a while.",
        ),
        (
            "See `fedvitals doctor` for the store, and the events of the named round for the cause.",
            "Treat the client by what the server sees alone: updates are still compared.",
            'Measure less on that client (`probes="light"`) if the link is narrow.',
        ),
        "The client is set to tell nothing on purpose (privacy level 0).",
        "docs/metrics.md, `monitor.lost`",
        exact=True,
    ),
    Issue(
        "BOTTLENECK",
        "Rounds are bound by one thing",
        "system",
        "note",
        "In each of the last rounds, at least half of the time on the critical path went to the same thing, and that "
        "is not computing: to sending, loading, the server, or waiting for the slowest few.",
        (
            "A narrow link, or a model that is large for it: `bottleneck.upload`, `bottleneck.download`.",
            "A few clients that are much slower than the rest: `bottleneck.straggler`.",
            "Data that is read or prepared in the training process: `bottleneck.data_loading`.",
            "A costly aggregation, or an evaluation in every round: `bottleneck.aggregation`, `bottleneck.server`.",
        ),
        (
            "See `fedvitals profile RUN`: it ranks the remedies by the gain computed for this run.",
            "Uploads: quantise or compress updates. Stragglers: a deadline, over-selection, or asynchronous.",
            "Loading: more workers. Server: evaluate less often, or a faster device.",
        ),
        "The part in question is taken away (no evaluation, a faster link), and the round takes as long as before.",
        "Bonawitz et al. 2019, arXiv 1902.01046; Nguyen et al. 2022, FedBuff, arXiv 2106.06639",
    ),
)
