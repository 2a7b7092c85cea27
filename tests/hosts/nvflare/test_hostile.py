# SPDX-License-Identifier: Apache-2.0
"""Sites that lie: whatever they put into a result costs their own telemetry, and nothing of anybody else."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("nvflare", reason="needs nvflare: pip install 'fedvitals[nvflare]'")

from fedvitals.errors import RecordError
from fedvitals.hosts.nvflare.envelope import FIELDS, KEY, ResultEnvelope, SiteFailure, read_envelope
from fedvitals.hosts.nvflare.site.settings import SiteSettings
from fedvitals.hosts.nvflare.site.task import SiteTask
from fedvitals.transport.sender_limits import MESSAGE_BYTES
from support.nvflare_rounds import JOB, changed, model, result, served

GOOD = ResultEnvelope(b"", 1.0, 2.0, 1.0, 0.1).header()
BAD = {
    "no dict": [1, 2],
    "another version": {**GOOD, "version": 2},
    "a field more": {**GOOD, "node": "site-2"},
    "a field less": {name: GOOD[name] for name in GOOD if name != "cpu"},
    "text for bytes": {**GOOD, "payload": "text"},
    "too much": {**GOOD, "payload": bytes(MESSAGE_BYTES + 1)},
    "no processor time": {**GOOD, "cpu": math.nan},
    "another failure": {**GOOD, "failure": {"exception": "ValueError"}},
    "an exception with markup": {**GOOD, "failure": {"exception": "<b>", "message": "", "traceback": ""}},
    "a payload that is none": {**GOOD, "payload": b"\x80\x04."},
}


def payload_of(site, job=JOB, round_index=0):
    task = SiteTask(SiteSettings(), job, site, round_index)
    return task.finish().payload


@pytest.mark.parametrize("header", BAD.values(), ids=BAD.keys())
def test_a_header_that_cannot_be_is_refused_of_its_sender_and_its_update_counts(header):
    with served() as (server, sink):
        for site in ("site-1", "site-2"):
            task = server.ask(site, model())
            server.answer(site, task, result(changed(model(), 0.5)), header if site == "site-1" else None)
    assert {event.where.node for event in sink.events("telemetry.refused")} == {"site-1"}
    assert {metric.where.node for metric in sink.metrics("update.norm")} == {"site-1", "site-2"}


def test_telemetry_of_another_site_or_job_is_refused():
    for payload in (payload_of("site-2"), payload_of("site-1", job="job-2")):
        with served() as (server, sink):
            header = ResultEnvelope(payload, 1.0, 2.0, 1.0, 0.1).header()
            server.answer("site-1", server.ask("site-1", model()), result(changed(model(), 0.5)), header)
        (event,) = sink.events("telemetry.refused")
        assert event.where.node == "site-1"
        assert not [metric for metric in sink.metrics() if metric.where.node == "site-2"]


def test_a_result_for_another_sites_task_is_not_read():
    with served() as (server, sink):
        task = server.ask("site-1", model())
        assert server.rounds.take_request(task, "site-2") is None
        server.answer("site-2", task, result(changed(model(), 9.0)))
        server.answer("site-1", task, result(changed(model(), 0.5)))
    assert [metric.where.node for metric in sink.metrics("update.norm")] == ["site-1"]


def test_what_an_honest_site_sends_is_taken():
    with served() as (server, sink):
        header = ResultEnvelope(payload_of("site-1"), 1.0, 2.0, 1.0, 0.1).header()
        server.answer("site-1", server.ask("site-1", model()), result(changed(model(), 0.5)), header)
    assert not sink.events("telemetry.refused")
    assert {metric.where.node for metric in sink.metrics("time.client")} == {"site-1"}


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from([*FIELDS, "more"]), plain) | plain)
def test_no_header_does_more_than_be_refused(header):
    try:
        envelope = read_envelope(header, 1.0)
    except RecordError:
        return
    assert isinstance(envelope, ResultEnvelope)


@given(st.text(max_size=30), st.text(max_size=2000), st.text(max_size=30))
def test_an_envelope_comes_back_as_it_was(exception, message, traceback):
    envelope = ResultEnvelope(b"x", 1.0, 2.0, 1.0, 0.1, SiteFailure("ValueError", message[:1000], traceback))
    assert read_envelope(envelope.header(), 1.0) == envelope
    if not exception.isidentifier() or not exception.isascii():
        with pytest.raises(RecordError):
            read_envelope({**GOOD, "failure": {"exception": exception + "!", "message": "", "traceback": ""}}, 1.0)
    assert KEY == "fedvitals"
