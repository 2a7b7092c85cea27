# SPDX-License-Identifier: Apache-2.0
"""What an NVFlare server's rounds tell: who took part and how, what their updates are, and what the guard changes."""

import math

import numpy as np
import pytest

pytest.importorskip("nvflare", reason="needs nvflare: pip install 'fedvitals[nvflare]'")

from nvflare.apis.dxo import DataKind, from_shareable
from nvflare.apis.fl_constant import ReturnCode
from nvflare.app_common.aggregators.weighted_aggregation_helper import WeightedAggregationHelper

from fedvitals.hosts.nvflare.envelope import ResultEnvelope, SiteFailure
from fedvitals.records import Action, Where
from support.nvflare_rounds import changed, failed, model, result, served

SITES = ("site-1", "site-2", "site-3")
TRAINED = 16  # values of the model that are trained: not the running statistics


def cohorts(sink):
    return [event.data for event in sink.events("cohort")]


def test_who_was_asked_answered_failed_and_was_late_stands_in_the_cohort():
    with served() as (server, sink):
        start = model()
        tasks = {site: server.ask(site, start, targets=(*SITES, "site-4")) for site in SITES}
        server.answer("site-1", tasks["site-1"], result(changed(start, 0.1)))
        server.answer("site-2", tasks["site-2"], failed())
        server.rounds.end()
        assert server.answer("site-3", tasks["site-3"], result(changed(start, 0.1))) is None
    (cohort,) = cohorts(sink)
    assert cohort["asked"] == [*SITES, "site-4"]
    assert (cohort["answered"], cohort["failed"]) == (["site-1"], ["site-2"])
    assert set(cohort["late"]) == {"site-3", "site-4"}
    late = {event.where.node: event.message for event in sink.events("update.late")}
    assert "did not come for its task" in late["site-4"]
    assert [event.where.node for event in sink.events("client.answered_late")] == ["site-3"]


def test_a_site_that_nvflare_takes_for_gone_is_reported_as_such_and_as_back():
    with served() as (server, sink):
        start = model()
        tasks = {site: server.ask(site, start, targets=SITES) for site in SITES[:2]}
        server.rounds.disconnected("site-3")
        for site, task in tasks.items():
            server.answer(site, task, result(changed(start, 0.1)))
        server.rounds.end()
        server.rounds.reconnected("site-3")
    assert [event.where.node for event in sink.events("client.disconnected")] == ["site-3"]
    assert [event.where.node for event in sink.events("client.dropped_out")] == ["site-3"]
    assert [event.where.node for event in sink.events("client.connected")] == ["site-3"]
    assert not sink.events("update.late")


@pytest.mark.parametrize("kind", [DataKind.WEIGHTS, DataKind.WEIGHT_DIFF])
def test_an_update_measures_the_same_as_weights_and_as_a_difference(kind):
    start = model()
    sent = changed(start, 0.5)
    if kind == DataKind.WEIGHT_DIFF:
        sent = {name: values - start[name] for name, values in sent.items()}
    with served() as (server, sink):
        for site in SITES:
            server.answer(site, server.ask(site, start), result(sent, kind))
    norms = sink.metrics("update.norm")
    assert len(norms) == len(SITES)
    assert all(metric.value == pytest.approx(0.5 * math.sqrt(TRAINED), rel=1e-5) for metric in norms)


def test_layers_that_a_filter_holds_back_count_as_unchanged():
    start = model()
    sent = {name: values for name, values in changed(start, 0.5).items() if name != "dense.bias"}
    with served() as (server, sink):
        server.answer("site-1", server.ask("site-1", start), result(sent))
    (norm,) = sink.metrics("update.norm")
    assert norm.value == pytest.approx(0.5 * math.sqrt(12), rel=1e-5)


def test_the_exception_that_a_site_tells_is_in_the_event_and_its_words_need_leave():
    secret = "patient 4711"
    failure = SiteFailure("ValueError", secret, f"Traceback ...\nValueError: {secret}")
    header = ResultEnvelope(b"", 1.0, 2.0, 1.0, 0.1, failure).header()
    for allowed in (False, True):
        with served(tracebacks=allowed) as (server, sink):
            server.answer("site-1", server.ask("site-1", model()), failed(ReturnCode.TASK_ABORTED), header)
        (event,) = sink.events("client.failed")
        assert (event.data["exception"], event.data["code"]) == ("ValueError", "TASK_ABORTED")
        assert (secret in event.message) is allowed
        assert ("traceback" in event.data) is allowed


def test_an_evaluation_after_the_last_round_is_reported_at_the_end():
    with served() as (server, sink):
        server.answer("site-1", server.ask("site-1", model()), result(changed(model(), 0.1)))
        server.rounds.end()
        server.answer("site-1", server.ask("site-1", model(), task="evaluate"), result(model(), metrics={"loss": 2.0}))
        server.rounds.close()
    assert [(data["phase"], data["answered"]) for data in cohorts(sink)] == [
        ("train", ["site-1"]),
        ("evaluate", ["site-1"]),
    ]
    assert [metric.value for metric in sink.metrics("local.loss")] == [2.0]


def test_rounds_without_a_number_begin_when_a_site_is_asked_again():
    with served() as (server, sink):
        for _ in range(3):
            for site in SITES:
                server.answer(site, server.ask(site, model(), round_index=None), result(changed(model(), 0.1)))
    assert len(cohorts(sink)) == 3
    assert sorted({metric.where.round for metric in sink.metrics("update.norm")}) == [0, 1, 2]


def test_metrics_of_a_site_keep_their_names_only_where_these_are_its_own():
    metrics = {"train_loss": 0.5, "update.norm": 9.0, "flag": True, "words": "no number", "mean": np.float64(2)}
    with served() as (server, sink):
        server.answer("site-1", server.ask("site-1", model()), result(changed(model(), 0.1), metrics=metrics))
    own = {metric.name: metric.value for metric in sink.metrics() if metric.where.node == "site-1"}
    assert own["loss"] == 0.5
    assert own["user.update.norm"] == 9.0
    assert own["user.mean"] == 2.0
    assert "user.flag" not in own


def aggregate(replies):
    """What FedAvg makes of them."""
    helper = WeightedAggregationHelper()
    for site, reply in replies.items():
        dxo = from_shareable(reply)
        helper.add(dxo.data, dxo.meta["NUM_STEPS_CURRENT_ROUND"], site, 0)
    return helper.get_result()


@pytest.mark.parametrize("kind", [DataKind.WEIGHTS, DataKind.WEIGHT_DIFF])
@pytest.mark.parametrize("ill", [("site-2",), SITES])
def test_the_guard_leaves_an_update_with_nan_out_and_the_model_is_that_of_the_others(kind, ill):
    start = model()

    def reply(site):
        sent = changed(start, 0.1 * int(site[-1]))
        sent = {n: v - start[n] for n, v in sent.items()} if kind == DataKind.WEIGHT_DIFF else sent
        if site in ill:
            sent["dense.weight"] = np.full_like(sent["dense.weight"], np.nan)
        return result(sent, kind)

    replies = {site: reply(site) for site in SITES}
    others = {site: reply(site) for site in SITES if site not in ill}
    with served(guard="drop") as (server, sink):
        for site, sent in replies.items():
            assert server.answer(site, server.ask(site, start), sent) is None
    nothing = {name: np.zeros_like(values) for name, values in start.items()}
    expected = aggregate(others) if others else nothing if kind == DataKind.WEIGHT_DIFF else start
    for name, values in aggregate(replies).items():
        assert values == pytest.approx(expected[name], abs=1e-5), name
    assert [event.where.node for event in sink.events("update.left_out")] == [*ill]


def test_the_guard_can_end_the_job_and_says_why():
    bad = changed(model(), math.nan)
    with served(guard="fail") as (server, _):
        why = server.answer("site-1", server.ask("site-1", model(), 7), result(bad))
    assert "round 7" in why
    assert "site-1" in why
    assert "guard='drop'" in why


def test_a_site_in_quarantine_is_left_out_and_other_corrections_are_refused_with_a_sentence():
    start, refusals = model(), []
    ordered = [
        Action(Where("r"), 0.0, "TEST", kind, target, {"keep": []})
        for kind, target in (("checkpoint", None), ("quarantine", "site-2"), ("server_rate", None))
    ]
    replies = {site: result(changed(start, number)) for number, site in enumerate(SITES, 1)}
    others = {site: result(changed(start, number)) for number, site in enumerate(SITES, 1) if site != "site-2"}
    with served(cure="auto") as (server, sink):
        server.rounds.monitor.host.prescribed = lambda _: ordered
        server.rounds.monitor.host.refused = lambda action, why: refusals.append((action.kind, why))
        for site, sent in replies.items():
            assert server.answer(site, server.ask(site, start), sent) is None
    for name, values in aggregate(replies).items():
        assert values == pytest.approx(aggregate(others)[name], abs=1e-5), name
    assert [event.where.node for event in sink.events("update.left_out")] == ["site-2"]
    assert refusals == [("server_rate", "'server_rate' is not applied to NVFlare jobs; quarantine is.")]


def test_without_a_guard_nothing_of_a_result_changes():
    sent = result(changed(model(), math.nan), metrics={"loss": 1.0})
    before = {name: values.copy() for name, values in from_shareable(sent).data.items()}
    with served() as (server, _):
        server.answer("site-1", server.ask("site-1", model()), sent)
    after = from_shareable(sent).data
    assert [*after] == [*before]
    assert all(np.array_equal(after[name], before[name], equal_nan=True) for name in before)


def test_tensors_are_read_in_place_and_what_is_encrypted_is_left_alone():
    torch = pytest.importorskip("torch")
    start = {name: torch.tensor(values) for name, values in model().items()}
    sent = {name: values + 0.5 if values.is_floating_point() else values for name, values in start.items()}
    with served() as (server, sink):
        server.answer("site-1", server.ask("site-1", start), result(sent))
        server.answer("site-2", server.ask("site-2", start), result({"dense.weight": b"ciphertext"}))
    (norm,) = sink.metrics("update.norm")
    assert norm.where.node == "site-1"
    assert norm.value == pytest.approx(0.5 * math.sqrt(TRAINED), rel=1e-5)
