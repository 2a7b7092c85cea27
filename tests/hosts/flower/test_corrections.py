# SPDX-License-Identifier: Apache-2.0
"""Corrections on a Flower run: each does what it says to messages and models, and what cannot be done is refused."""

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, MetricRecord
from flwr.serverapp.strategy import FedAvg

import fedvitals as fv
from fedvitals.diagnosis.corrections.correction_trials import FIRST_MODEL
from fedvitals.diagnosis.finding import finding
from fedvitals.records import Action, Span, Where
from support.conditions import holds_for_each
from support.flower.federation import (
    HandGrid,
    client_app,
    federate,
    flower_run,
    is_round,
    model,
    node_of,
    numbers,
    requests_for,
    training,
    watched,
    with_mod,
)

ILL = "102"


def action(kind, target=None, **arguments):
    return Action(Where("r"), 0.0, "TEST", kind, target, {"id": kind, **arguments})


def prescribing(monitor, *actions, since=1):
    """A monitor that prescribes what a test wants; what it is told of refusals."""
    refusals = []

    def prescribed(number):
        keep = Action(Where("r", number), 0.0, "", "checkpoint", None, {"keep": list(range(-1, number))})
        return [keep, *(actions if number >= since else ())]

    monitor.host.prescribed = prescribed
    monitor.host.refused = lambda refused, why: refusals.append((refused.kind, why))
    return refusals


def corrected(*actions, since=1, app=with_mod, rounds=3, **more):
    """The result, the grid and the sink of a run under orders, and what was refused."""
    with watched() as (monitor, sink):
        refusals = prescribing(monitor, *actions, since=since)
        result, grid = federate(FedAvg(), app(), monitor, rounds=rounds, **more)
    return result, grid, sink, refusals


def plain(train=training, **more):
    return federate(FedAvg(), client_app(train=train), **{"rounds": 3, **more})[0]


def values(arrays):
    return {name: array.numpy() for name, array in arrays.items()}


def claiming(samples):
    def train(message, context):
        reply = training(message, context)
        if str(context.node_id) == ILL:
            reply.content["metrics"] = MetricRecord({**reply.content["metrics"], "num-examples": samples})
        return reply

    return train


# -- each kind --------------------------------------------------------------------------------------------------------


def test_who_is_in_quarantine_does_not_count_and_is_still_seen():
    result, _, sink, refusals = corrected(action("quarantine", ILL), since=2)

    def lost(request, reply):
        away = node_of(request) == ILL and (is_round(request, 2) or is_round(request, 3))
        return None if away else reply

    assert numbers(result.arrays) == numbers(plain(fate=lost).arrays)
    assert numbers(result.arrays) != numbers(plain().arrays)
    assert len(sink.of(Span, "client", node=ILL)) == len(sink.metrics("update.norm", node=ILL)) == 3
    assert not refusals


@pytest.mark.thorough
@pytest.mark.parametrize(("how", "samples"), [({"factor": 0.5}, 11), ({"samples": 5}, 5), ({"factor": 1e-9}, 1)])
def test_reweighted_it_counts_as_if_it_had_claimed_so(how, samples):
    """It claims 22."""
    result, *_ = corrected(action("reweight", ILL, **how))
    assert numbers(result.arrays) == numbers(plain(claiming(samples)).arrays)
    assert numbers(result.arrays) != numbers(plain().arrays)


def test_updates_are_cut_to_a_length():
    lengths = []

    class Measuring(FedAvg):
        def aggregate_train(self, server_round, replies):
            replies = [*replies]
            before = values(self.begun)
            for reply in replies:
                after = values(reply.content["arrays"])
                lengths.append(np.sqrt(sum(((after[n] - before[n]) ** 2).sum() for n in after)))
            return super().aggregate_train(server_round, replies)

        def configure_train(self, server_round, arrays, config, grid):
            self.begun = arrays
            return super().configure_train(server_round, arrays, config, grid)

    with watched() as (monitor, _):
        prescribing(monitor, action("clip_updates", norm=0.25), since=2)
        federate(Measuring(), with_mod(), monitor, rounds=2)
    assert min(lengths[:4]) > 0.3
    assert lengths[4:] == pytest.approx([0.25] * 4, rel=1e-4)


def test_the_server_takes_shorter_steps():
    result, *_ = corrected(action("server_rate", factor=0.5), rounds=1)
    start, whole = values(model()), values(plain(rounds=1).arrays)
    assert values(result.arrays).keys() == start.keys()
    for name, found in values(result.arrays).items():
        assert np.allclose(found, start[name] + 0.5 * (whole[name] - start[name]), atol=1e-6)


def test_a_robust_rule_takes_the_place_of_the_mean():
    def train(message, context):
        reply = training(message, context)
        if str(context.node_id) == ILL:
            shouted = {n: Array(a.numpy() * np.float32(1e6)) for n, a in reply.content["arrays"].items()}
            reply.content["arrays"] = ArrayRecord(shouted)
        return reply

    def app():
        return client_app(fv.flower.client_mod(), train=train)

    models = []

    def keep(request, reply):
        models.extend([values(reply.content["arrays"])] if is_round(request, 1) else [])
        return reply

    result, _, _, refusals = corrected(
        action("robust_aggregator", rule="median"), app=app, rounds=1, nodes=5, fate=keep
    )
    for name, found in values(result.arrays).items():
        assert np.allclose(found, np.median([m[name] for m in models], axis=0), atol=1e-5)
    assert not refusals


def test_rolled_back_the_clients_begin_from_the_earlier_model():
    result, grid, _, refusals = corrected(action("roll_back", restore=1), since=3)
    sent = {n: {told for m in grid.requests if is_round(m, n) for told in [arrays_of(m)]} for n in (1, 2, 3)}
    assert holds_for_each(len(models) == 1 for models in sent.values())
    assert sent[3] == sent[2] != sent[1]
    again = values(plain(rounds=2).arrays)  # the third round is the second once more
    assert holds_for_each(np.allclose(found, again[name], atol=1e-6) for name, found in values(result.arrays).items())
    assert not refusals


def test_rolled_back_to_the_first_model_it_is_that_of_the_beginning():
    _, grid, _, refusals = corrected(action("roll_back", restore=FIRST_MODEL), since=3)
    sent = [arrays_of(m) for m in grid.requests if is_round(m, 3)]
    assert sent == [tuple(sorted(numbers(model()).items()))] * 4
    assert not refusals


def arrays_of(message):
    return tuple(sorted(numbers(message.content["arrays"]).items()))


# -- what cannot be done ----------------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("prescribed", "words"),
    [
        (action("clip_gradients", limit=1.0), "up to the clients"),
        (action("client_rate", factor=0.5), "up to the clients"),
        (action("shorten_local_training", factor=0.5), "up to the clients"),
        (action("quarantine"), "needs a target"),
        (action("reweight", ILL, factor=-1.0), "above 0; got -1"),
        (action("clip_updates", norm=float("nan")), "above 0; got nan"),
        (action("roll_back", restore=17), "no checkpoint of round 17"),
        (action("robust_aggregator", rule="astrology"), "Known:"),
    ],
    ids=lambda value: getattr(value, "kind", ""),
)
def test_what_cannot_be_done_is_refused_with_a_sentence_and_training_goes_on(prescribed, words):
    result, _, _, refusals = corrected(prescribed)
    assert [kind for kind, _ in refusals] == [prescribed.kind] * 3
    assert holds_for_each(words in why for _, why in refusals)
    assert numbers(result.arrays) == numbers(plain().arrays)


@pytest.mark.parametrize("kind", ["server_rate", "robust_aggregator", "roll_back"])
def test_in_a_loop_of_ones_own_nobody_but_the_user_aggregates(kind):
    with watched() as (monitor, _), flower_run():
        refusals = prescribing(monitor, action(kind, factor=0.5, rule="median", restore=0))
        grid = fv.flower.attach(HandGrid(with_mod()), monitor)
        grid.send_and_receive(requests_for(grid, model()))
    ((refused, why),) = refusals
    assert refused == kind
    assert "flwr.serverapp" in why


# -- from finding to cure ---------------------------------------------------------------------------------------------


def planted(issue, node, since=2):
    """A detector that says the same from some round on."""

    def detector(history, number):
        if number >= since:
            yield finding(issue, number, f"{issue}, as planted.", confidence=0.95, node=node, since=since)

    return detector


def evaluate(number, arrays):
    return MetricRecord({"loss": 1.0 / (1 + number), "accuracy": 0.1 * number})


def test_what_a_detector_finds_is_corrected_by_itself_and_written_down():
    detectors = [planted("BYZANTINE", ILL)]
    with watched(detectors=detectors, cure="auto") as (monitor, sink):
        result, _ = federate(FedAvg(), with_mod(), monitor, rounds=5, evaluate_fn=evaluate)
    trial = next(a for a in sink.of(Action) if a.kind == "quarantine")
    assert (trial.target, trial.status, trial.where.round) == (ILL, "trial", 4)  # with three rounds to compare with

    def lost(request, reply):
        away = node_of(request) == ILL and (is_round(request, 4) or is_round(request, 5))
        return None if away else reply

    assert numbers(result.arrays) == numbers(plain(rounds=5, fate=lost).arrays)


def test_a_client_side_cure_is_told_as_refused():
    with watched(detectors=[planted("EXPLODING_GRADIENT", None)], cure="auto") as (monitor, sink):
        worse = {"evaluate_fn": lambda number, _: MetricRecord({"loss": 1.0 + number})}
        result, _ = federate(FedAvg(), with_mod(), monitor, rounds=6, **worse)
    refused = [a for a in sink.of(Action) if a.status == "refused"]
    assert "clip_gradients" in {a.kind for a in refused}
    assert holds_for_each("up to the clients" in a.arguments["why"] for a in refused)
    assert not [a for a in sink.of(Action) if a.status == "applied"]
    assert result.arrays


def test_an_update_that_is_not_finite_is_left_out_without_any_guard():
    def train(message, context):
        reply = training(message, context)
        if str(context.node_id) == ILL and is_round(message, 2):
            ill = {n: Array(np.full_like(a.numpy(), np.nan)) for n, a in reply.content["arrays"].items()}
            reply.content["arrays"] = ArrayRecord(ill)
        return reply

    app = client_app(fv.flower.client_mod(), train=train)
    with watched(detectors="standard", cure={"NAN_UPDATE": "auto"}) as (monitor, sink):
        result, _ = federate(FedAvg(), app, monitor, rounds=3)
    lost = lambda request, reply: None if node_of(request) == ILL and is_round(request, 2) else reply  # noqa: E731
    assert numbers(result.arrays) == numbers(plain(fate=lost).arrays)
    left = [a for a in sink.of(Action) if a.kind == "exclude"]
    assert [(a.target, a.status, a.where.round) for a in left] == [(ILL, "applied", 2)]


@pytest.mark.parametrize("cure", ["off", "suggest"])
def test_unless_it_is_auto_nothing_is_touched(cure):
    detectors = [planted("BYZANTINE", ILL, 1), planted("DIVERGENCE", None, 1)]
    with watched(detectors=detectors, cure=cure) as (monitor, sink):
        result, _ = federate(FedAvg(), with_mod(), monitor, rounds=3)
    assert numbers(result.arrays) == numbers(plain().arrays)
    assert {a.status for a in sink.of(Action)} == (set() if cure == "off" else {"suggested"})
