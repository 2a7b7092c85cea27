# SPDX-License-Identifier: Apache-2.0
"""A run that is taken up again by its id: one run, all its rounds, and nothing taken for what was stored before."""

import pytest
import torch

import fedvitals as fv
from fedvitals.cli.main import main
from fedvitals.store import open_reader
from fedvitals.store.read.ask import query
from fedvitals.store.read.queries import get_run, list_runs
from support.models import make, make_data, train


def rounds(monitor, numbers, through_worker=False):
    model = make("mlp")
    for number in numbers:
        with monitor.round(number, model):
            observer = monitor.host.for_worker() if through_worker else monitor
            for seed, node in enumerate(("c0", "c1")):
                local = make("mlp")
                with observer.client(node, local):
                    train(local, torch.optim.SGD(local.parameters(), 0.1), make_data(seed=seed), 2)
            if through_worker:
                monitor.host.absorb(observer.payload())
            monitor.log(accuracy=number / 10)


@pytest.mark.parametrize("through_worker", [False, True])
def test_resumed_run_is_one_run(tmp_path, capsys, through_worker):
    store = tmp_path / "runs.db"
    with fv.Monitor(store, "digits", strict=True) as first:
        rounds(first, (0, 1), through_worker)
    with fv.Monitor(store, "digits", id=first.run.id, strict=True) as second:
        rounds(second, (2,), through_worker)
        assert second.flush()
        with open_reader(store) as reader:
            assert get_run(reader, first.run.id).finished is None  # it is running again
    with open_reader(store) as reader:
        (summary,) = list_runs(reader)
        assert (summary.id, summary.rounds) == (first.run.id, 3)
        run = get_run(reader, first.run.id)
        assert run.started == first.run.started
        assert run.finished is not None
        assert run.finished > first.run.finished
        assert {t.digest for t in run.tables} == {t.digest for t in first.run.tables}
        history = reader.history(run.id)
        assert history.rounds() == [0, 1, 2]
        assert history.series("accuracy", None) == ([0, 1, 2], [0.0, 0.1, 0.2])
        found, nodes, matrix = history.matrix("gradient", "l2", "0.weight")
        assert (found, nodes, matrix.shape) == ([0, 1, 2], ["c0", "c1"], (3, 2))
        assert (matrix > 0).all()
    with pytest.raises(SystemExit) as ended:
        main(["show", run.id, "--store", str(store)])
    assert ended.value.code == 0
    assert "3 rounds" in capsys.readouterr().out


def test_first_model_of_a_resumed_run_is_not_the_one_that_it_has_now(tmp_path):
    store = tmp_path / "runs.db"
    with fv.Monitor(store, strict=True) as first:
        rounds(first, (0,))
    with fv.Monitor(store, id=first.run.id, strict=True) as second:
        rounds(second, (1,))
    with open_reader(store) as reader:
        assert reader.history(first.run.id).series("weight.drift_init", "c0")[0] == [0]


def test_id_that_no_store_knows_begins_a_run(tmp_path):
    store = tmp_path / "runs.db"
    for name in ("lab-7", "lab-8"):  # the store is not there, and then has another run only
        with fv.Monitor(store, id=name, strict=True) as monitor:
            rounds(monitor, (0,))
        assert monitor.run.id == name
        with open_reader(store) as reader:
            assert reader.history(name).rounds() == [0]
            assert reader.history(name).series("weight.drift_init", "c0")[0] == [0]


def test_resumed_round_may_come_again(tmp_path):
    """A lab that was killed after its round was written, and saved no state since, runs it once more."""
    store = tmp_path / "runs.db"
    with fv.Monitor(store, strict=True) as first:
        rounds(first, (0, 1))
    with fv.Monitor(store, id=first.run.id, strict=True) as second:
        rounds(second, (1, 2))
    with open_reader(store) as reader:
        answer = query(reader, "SELECT source, COUNT(*) FROM metrics WHERE name = 'steps' GROUP BY source")
        assert [count for _, count in answer.rows] == [4, 4]
        assert reader.history(first.run.id).rounds() == [0, 1, 2]
