# SPDX-License-Identifier: Apache-2.0
"""Payloads with measurements: what arrives of them is what arrives of their single records."""

import dataclasses

import numpy as np
import pytest
import torch

import fedvitals as fv
from fedvitals.measurements import single_records, stamped
from fedvitals.probes.results import Results, measurements_of
from fedvitals.records import Event, Metric
from fedvitals.testing import MemorySink
from fedvitals.transport.wire.payload import encode


@pytest.mark.parametrize("as_records", [False, True])
def test_labels_told_by_a_second_process_are_left_out_and_the_rest_keeps_its_numbers(as_records):
    sink = MemorySink()
    with fv.Monitor(None, sinks=[sink], machine=False, strict=True) as monitor, monitor.round(0, torch.nn.Linear(2, 2)):
        for worker in ("worker-1", "worker-2"):
            own = Results()
            own.take({"label.entropy": 0.5, "loss": 1.0})
            table = measurements_of(monitor.run.id, 0, 1.0, [(("c0", None), own)], lambda *_: None)
            only = dataclasses.replace(table, present=np.array([[True, False]]))  # nothing is left of it
            event = Event(table.place(0), 1.0, "info", "labels", "", {"histogram": {"a": 1}}, worker, 0)
            batch = [event, stamped(table, worker, 1), stamped(only, worker, 3)]
            monitor.host.absorb(encode(single_records(batch) if as_records else batch))
        assert monitor.flush(5.0)
    answers = [(m.source, m.sequence, m.name) for m in sink.of(Metric) if m.source.startswith("worker")]
    first = [("worker-1", 1, "label.entropy"), ("worker-1", 2, "loss"), ("worker-1", 3, "label.entropy")]
    assert answers == [*first, ("worker-2", 2, "loss")]
