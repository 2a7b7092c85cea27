# SPDX-License-Identifier: Apache-2.0
"""«What if»: recorded rounds aggregated again with a change, and true re-runs that are runs of their own."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

import fedvitals as fv
from fedvitals import lab
from fedvitals.errors import ConfigError
from fedvitals.replay.counterfactual.change import WhatIfChange, change_from, parse
from fedvitals.replay.counterfactual.fork import fork
from fedvitals.replay.counterfactual.reaggregate import DriftEstimate, RecordedRounds, reaggregate
from fedvitals.replay.debugger.debugger_output import table_output
from fedvitals.replay.player.player import Player, flattened
from fedvitals.replay.player.reused_updates import ChangeObserver, ReusingFederation, copy_of_server
from fedvitals.replay.shares import Points, Share, metric_in_words
from fedvitals.replay.tape.reader import open_tape
from fedvitals.store import open_reader
from fedvitals.store.read import queries

FAULT = lab.sign_flip(nodes=["c2"], strength=6.0, since=2)


def record(folder: Path, tape: fv.Tape, **fields: object) -> tuple[str, Player]:
    settings = {"clients": 6, "rounds": 6, "faults": [FAULT], **fields}
    experiment = lab.Experiment(dataset="digits", model="mlp", name="parent", **settings)
    store = str(folder / "runs.db")
    with fv.Monitor(store, run="parent", host="lab", tape=tape) as monitor:
        lab.run(experiment, monitor, workers=1)
    return store, Player(open_tape(store, monitor.run.id))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Player]:
    """A run of which everything is on the tape."""
    return record(tmp_path_factory.mktemp("whole"), fv.Tape(every=1, updates=100))


@pytest.fixture(scope="module")
def thin(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Player]:
    """The same run, of which little is."""
    return record(tmp_path_factory.mktemp("thin"), fv.Tape(every=4, updates=0))


# -- what is said -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("drop c7", WhatIfChange(drop=("c7",))),
        ("without c7, c8", WhatIfChange(drop=("c7", "c8"))),
        ("learning_rate / 10", WhatIfChange(client_rate=0.1)),
        ("learning rate ÷ 10", WhatIfChange(client_rate=0.1)),
        ("server_rate * 2", WhatIfChange(server_rate=2.0)),
        ("no fault", WhatIfChange(no_faults=True)),
        ("aggregator median", WhatIfChange(aggregator=lab.median())),
        ("aggregator trimmed_mean fraction=0.2", WhatIfChange(aggregator=lab.trimmed_mean(0.2))),
        ("clip 1.5", WhatIfChange(clip=1.5)),
        ("weight c7 0.5", WhatIfChange(weights={"c7": 0.5})),
        ("drop c1; clip 2 and no faults", WhatIfChange(drop=("c1",), clip=2.0, no_faults=True)),
    ],
)
def test_a_change_is_what_a_person_says_and_says_itself_again(text: str, meant: WhatIfChange) -> None:
    assert parse(text) == meant
    assert parse(meant.text) == meant


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("kick c7", "Examples: drop c7"),
        ("clip much", "needs a number"),
        ("clip -1", "above 0"),
        ("learning_rate / 0", "above 0"),
        ("aggregator medean", "Did you mean 'median'"),
        ("aggregator krum 2", "name=value"),
    ],
)
def test_what_is_no_change_is_answered_with_what_is_one(text: str, answer: str) -> None:
    with pytest.raises(ConfigError, match=answer):
        parse(text)


def test_a_change_in_parts_of_a_wrong_name_is_refused() -> None:
    assert change_from(drop="c7") == change_from("drop c7")
    with pytest.raises(ConfigError, match="Did you mean 'clip'"):
        change_from(clips=1.5)


# -- without training -------------------------------------------------------------------------------------------------


def models(player: Player, first: int, last: int, change: WhatIfChange) -> tuple[list[torch.Tensor], list[float]]:
    """The changed models after each round, and their stated errors."""
    start = player.server(first)
    path = ReusingFederation(
        player.site, player.engine(), ChangeObserver(player.tape, first, change), copy_of_server(start)
    )
    drift, found, errors = DriftEstimate(player.site.layout.weights), [], []
    for number, before, answers, after in RecordedRounds(player, first, last, start):
        stood = path.server.model
        path.play(number, answers, examined=False)
        drift.add(before.model, after, stood, path.server.model)
        found.append(path.server.model.clone())
        errors.append(drift.error)
    return found, errors


def same_bits(player: Player) -> None:
    found, errors = models(player, 0, 5, WhatIfChange())
    for number, model in enumerate(found):
        recorded = flattened(player.tape.state(number + 1)["model"])
        assert model.numpy().tobytes() == recorded.numpy().tobytes()
    assert errors == [0.0] * 6


@pytest.mark.thorough
def test_with_no_change_the_recorded_models_come_out_bit_by_bit(whole: tuple[str, Player]) -> None:
    same_bits(whole[1])
    answer = reaggregate(whole[1], 1, 4, parse("nothing"))
    assert [turn.changed for turn in answer.turns] == [turn.recorded for turn in answer.turns]
    assert (answer.read, answer.executed) == (24, 0)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "fields",
    [
        {"topology": lab.Hierarchical(edges=2)},
        {"topology": "rings"},
        {"topology": "clustered"},
        {"topology": lab.Asynchronous(buffer=3), "network": lab.Network()},
        {"aggregator": "fedadam", "participation": 0.7},
        {"faults": [lab.server_rate_too_high(factor=2.0, since=2)], "compression": "top_k"},
    ],
)
def test_so_it_is_in_every_topology(tmp_path: Path, fields: dict[str, object]) -> None:
    _, player = record(tmp_path, fv.Tape(every=1, updates=100), **fields)
    same_bits(player)


@pytest.mark.thorough
def test_updates_that_are_not_on_the_tape_are_computed_again(
    whole: tuple[str, Player], thin: tuple[str, Player]
) -> None:
    read, executed = (reaggregate(player, 2, 5, parse("drop c2")) for _, player in (whole, thin))
    assert read.turns == executed.turns
    assert (read.read, read.executed, executed.read, executed.executed) == (24, 0, 0, 24)


def test_the_first_round_without_a_client_is_exact_and_the_others_say_how_far_they_may_be_off(
    whole: tuple[str, Player],
) -> None:
    store, player = whole
    answer = reaggregate(player, 2, 5, parse("drop c2"))
    truth = fork(player, 2, parse("drop c2"), store=store)
    assert answer.turns[0].changed == truth.forked[2]
    assert answer.turns[0].error == 0
    assert answer.differences()[2] > 0.05
    found, stated = models(player, 2, 5, parse("drop c2"))
    tape, weights = open_tape(store, truth.run), player.site.layout.weights
    for place, number in enumerate((4, 5, 6), start=1):
        true = found[place][:weights] - flattened(tape.state(number)["model"])[:weights]
        assert 0.2 < stated[place] / float(true.norm()) < 5
        assert 0 < answer.turns[place].relative < 1


def test_clip_weight_rates_and_aggregator_change_the_model(whole: tuple[str, Player]) -> None:
    for said in ("clip 0.3", "weight c2 0.1", "server_rate / 2", "learning_rate / 2", "aggregator median"):
        answer = reaggregate(whole[1], 2, 3, parse(said))
        assert answer.turns[0].moved > 0.01, said
    assert "first order" in reaggregate(whole[1], 2, 2, parse("learning_rate / 2")).note


@pytest.mark.parametrize("aggregator", ["scaffold", "feddyn", "fednova"])
def test_rules_that_need_training_are_forked(aggregator: str, tmp_path: Path) -> None:
    """A what-if of recorded updates is refused; a fork that changes nothing gives the same model."""
    store, player = record(tmp_path, fv.Tape(), rounds=4, aggregator=aggregator)
    with pytest.raises(ConfigError, match="needs more of clients"):
        reaggregate(player, 1, 2, parse("drop c2"))
    assert set(fork(player, 2, parse("nothing"), store=store).differences().values()) == {0.0}


def test_what_cannot_be_known_without_training_is_refused(whole: tuple[str, Player], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a fork does"):
        reaggregate(whole[1], 2, 3, parse("no faults"))
    with pytest.raises(ConfigError, match="Unknown client 'c9'"):
        reaggregate(whole[1], 2, 3, parse("drop c9"))
    with pytest.raises(ConfigError, match="leave at least one in"):
        reaggregate(whole[1], 2, 3, parse("drop c0 c1 c2 c3 c4 c5"))
    with pytest.raises(ConfigError, match="needs more of clients"):
        reaggregate(whole[1], 2, 3, parse("aggregator fednova"))
    _, player = record(tmp_path, fv.Tape(), topology=lab.Hierarchical(edges=2), rounds=3)
    with pytest.raises(ConfigError, match="exchanged models with"):
        reaggregate(player, 1, 2, parse("drop c2"))
    assert reaggregate(player, 1, 2, parse("drop edge-0")).turns[0].moved > 0


# -- with training ----------------------------------------------------------------------------------------------------


def test_a_fork_without_a_change_is_its_parent_bit_by_bit_and_linked_to_it(thin: tuple[str, Player]) -> None:
    store, player = thin
    found = fork(player, 3, parse("nothing"), store=store)
    tape = open_tape(store, found.run)
    assert tape.rounds == [3, 4, 5]
    for number in tape.rounds:
        was, now = player.tape.entry(number), tape.entry(number)
        assert (was.state, was.came, was.after, was.metrics) == (now.state, now.came, now.after, now.metrics)
    assert found.forked == found.recorded
    with open_reader(store) as reader:
        config = queries.get_run(reader, found.run).config
        assert (config["parent"], config["forked_at"], config["change"]) == (found.parent, 3, "nothing")
        assert "faults" not in config["experiment"]


@pytest.mark.thorough
def test_a_fork_without_the_culprit_or_its_fault_is_better_and_stops_where_it_is_told(thin: tuple[str, Player]) -> None:
    store, player = thin
    heard: list[int] = []
    for said in ("drop c2", "no faults"):
        found = fork(
            player, 2, parse(said), store=store, until=4, name="better", progress=lambda number, _: heard.append(number)
        )
        assert [*found.forked] == [2, 3, 4]
        assert found.differences()[4] > 0.1
    assert heard == [2, 3, 4] * 2
    assert any(one.issue == "BYZANTINE" and one.node == "c2" for one in found.gone)


@pytest.mark.thorough
def test_a_fork_can_be_forked_and_replayed(thin: tuple[str, Player]) -> None:
    from fedvitals.replay.player.proof import verify

    store, player = thin
    first = fork(player, 2, parse("aggregator median; drop c2"), store=store)
    with Player(open_tape(store, first.run)) as again:
        assert verify(again).holds
        second = fork(again, 4, parse("clip 0.05"), store=store)
    assert [*second.forked] == [4, 5]
    assert second.forked[4] != first.forked[4]


def test_a_change_that_a_topology_has_no_place_for_is_refused(tmp_path: Path) -> None:
    store, player = record(tmp_path, fv.Tape(), topology="clustered", rounds=3)
    with pytest.raises(ConfigError, match="no one server step"):
        fork(player, 1, parse("server_rate / 2"), store=store)
    with pytest.raises(ConfigError, match="ends in round"):
        fork(player, 1, parse("drop c2"), store=store, until=9)


def test_shares_are_printed_as_everywhere_and_stay_numbers_in_files():
    row = (6, Share(0.61842), Points(-0.00557), 2.074)
    output = table_output("what if", ("round", "accuracy", "difference", "loss"), [row])
    assert "61.8 %  -0.557 points  2.074" in str(output)
    assert "6,0.61842,-0.00557,2.074" in output.as_csv()
    assert [metric_in_words("accuracy", value) for value in (0.7159, math.nan, None)] == ["71.6 %", "NaN", "–"]
