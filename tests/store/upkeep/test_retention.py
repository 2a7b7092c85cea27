# SPDX-License-Identifier: Apache-2.0
"""Runs deleted on request, old ones thinned to a budget; open runs are left alone."""

from dataclasses import replace

import pytest

from fedvitals.cli.runs import bytes_of
from fedvitals.errors import ConfigError
from fedvitals.records import LayerStats, Metric, Sketch
from fedvitals.store import open_reader, open_store
from fedvitals.store.read import queries
from fedvitals.store.upkeep import retention
from fedvitals.store.upkeep.doctor import examine
from support.store_contract import RUN, TABLE, metric, stats
from support.verbs import result, run


def fill(path, *names, rounds=40):
    """Runs of these names, one after the other; one that ends in «+» stays open."""
    with open_store(path) as store:
        for i, name in enumerate(names):
            identity = f"id-{name.rstrip('+')}"

            def mine(record, identity=identity):
                return replace(record, where=replace(record.where, run=identity))

            finished = None if name.endswith("+") else 100.0 + i
            store.write([replace(RUN, id=identity, name=name, started=50.0 + i, finished=finished)])
            for r in range(rounds):
                batch = [metric(r, f"c{c}", float(r), sequence=40 * r + c + 1) for c in range(8)]
                batch += [stats(r, f"c{c}", c, 40 * r + 9 + c) for c in range(20)]
                step = metric(r, "c1", 7.0, sequence=40 * r + 30)
                batch.append(replace(step, where=replace(step.where, step=3)))
                batch.append(Sketch(step.where, 1.0, (0.5,) * 64, "d", 2, "m", 40 * r + 31))
                store.write([mine(record) for record in batch])


def kinds(path, identity):
    with open_reader(path) as reader:
        return tuple(len(queries.records(reader, identity, kind)) for kind in (Metric, LayerStats, Sketch))


def test_a_deleted_run_is_gone_and_its_space_too(tmp_path, capsys):
    path = tmp_path / "runs.db"
    fill(path, "first", "second")
    before = path.stat().st_size
    cleared = result(capsys, "runs", "delete", "first", "--yes", "--store", path)
    assert [(gone["run"], gone["what"]) for gone in cleared["removed"]] == [("id-first", "run")]
    assert path.stat().st_size <= before - 150_000
    assert kinds(path, "id-first") == (0, 0, 0)
    assert kinds(path, "id-second") == (40 * 9, 40 * 20, 40)
    with open_reader(path) as reader:
        assert reader.history("id-first").rounds() == reader.history("id-first").nodes() == []
        assert queries.get_run(reader, "id-second").tables == RUN.tables
        assert reader.history("id-second").layers("gradient") == TABLE.names
    assert not [sign for sign in examine(path) if sign.state == "trouble"]
    fill(path, "first")  # the same records again: nothing of them is remembered
    assert kinds(path, "id-first") == (40 * 9, 40 * 20, 40)


def test_deleting_asks_first(tmp_path, capsys, monkeypatch):
    path = tmp_path / "runs.db"
    fill(path, "first", rounds=2)
    monkeypatch.setattr("click.confirm", lambda *_, **__: False)
    code, _, err = run(capsys, "runs", "delete", "first", "--store", path)
    assert code == 0
    assert "Nothing was deleted" in err
    assert len(result(capsys, "runs", "--store", path)) == 1
    code, _, err = run(capsys, "runs", "delete", "frist", "--yes", "--store", path)
    assert code == 2
    assert "Did you mean 'first'?" in err


@pytest.mark.thorough
def test_old_runs_lose_their_detail_first_and_open_ones_nothing(tmp_path, capsys, monkeypatch):
    path = tmp_path / "runs.db"
    fill(path, "zero+", "first", "second", "third")
    size = path.stat().st_size
    monkeypatch.setattr(retention, "SMALLEST", 0)
    cleared = result(capsys, "runs", "thin", "--keep-bytes", str(int(0.92 * size)), "--store", path)
    assert [(gone["name"], gone["what"]) for gone in cleared["removed"]] == [("first", "detail")]
    assert cleared["open"] == ["id-zero"]
    assert path.stat().st_size <= 0.92 * size
    assert kinds(path, "id-first") == (40 * 8, 0, 0)  # the scalars
    for untouched in ("id-zero", "id-second", "id-third"):
        assert kinds(path, untouched) == (40 * 9, 40 * 20, 40)
    with open_reader(path) as reader:
        assert reader.history("id-first").series("loss", "c1")[0] == list(range(40))
    code, out, _ = run(capsys, "runs", "thin", "--keep-bytes", f"{size}", "--store", path)
    assert code == 0
    assert "Nothing had to go" in out
    retention.thin(path, 1000)
    assert kinds(path, "id-third") == (0, 0, 0)
    assert kinds(path, "id-zero") == (40 * 9, 40 * 20, 40)
    with open_reader(path) as reader:
        assert [found.id for found in queries.list_runs(reader)] == ["id-zero"]
    assert not [sign for sign in examine(path) if sign.state == "trouble"]


def test_a_slip_of_the_pen_does_not_cost_every_run(tmp_path, capsys):
    path = tmp_path / "runs.db"
    fill(path, "first", rounds=2)
    code, _, err = run(capsys, "runs", "thin", "--keep-bytes", "500", "--store", path)
    assert code == 2
    assert "would keep no run" in err
    assert len(result(capsys, "runs", "--store", path)) == 1


@pytest.mark.parametrize(
    ("text", "size"), [("500MB", 5e8), ("1.5 gb", 1.5e9), ("2GiB", 2**31), ("17", 17), ("3 kB", 3e3)]
)
def test_sizes_are_read_as_people_write_them(text, size):
    assert bytes_of(text) == size


@pytest.mark.parametrize("text", ["", "many", "-5MB", "5 parsecs"])
def test_what_is_no_size_is_answered(text):
    with pytest.raises(ConfigError, match=r"500MB|Known"):
        bytes_of(text)
