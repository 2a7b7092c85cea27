# SPDX-License-Identifier: Apache-2.0
"""A run keeps all its findings for whoever asks, in little memory: an ill client has one in every round, for days."""

import gc
import tracemalloc

import fedvitals as fv
from fedvitals.diagnosis.finding import Number, finding

COUNT = 400
NUMBERS = [Number(f"metric.{i}", 1.5 * i, 2.5 * i, 3.5 * i) for i in range(10)]


def ill(round_index):
    return finding("LABEL_NOISE", round_index, "It is ill.", confidence=0.9, node="c1", numbers=NUMBERS)


def test_findings_are_kept_in_a_fraction_of_the_memory_that_they_take(tmp_path):
    with fv.Monitor(tmp_path / "runs.db", detectors=()) as monitor:
        with monitor.round(0):
            pass
        tracemalloc.start()
        try:
            sizes = []
            for first in (0, COUNT, 2 * COUNT):  # at first, buffers on the way to the store grow, too
                for number in range(first, first + COUNT):
                    monitor._run.findings._take(ill(number))
                assert monitor.flush()
                gc.collect()
                sizes.append(tracemalloc.get_traced_memory()[0])
            before = tracemalloc.get_traced_memory()[0]
            findings = [ill(number) for number in range(COUNT)]
            as_objects = tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()
        assert sizes[2] - sizes[1] < 0.7 * as_objects
        assert {f.where.round for f in monitor.findings()} == set(range(3 * COUNT))
        assert monitor.findings()[0].evidence == findings[0].evidence
