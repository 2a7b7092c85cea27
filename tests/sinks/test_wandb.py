# SPDX-License-Identifier: Apache-2.0
"""Weights & Biases, offline: its file is read back by the messages that the package ships."""

import json
import struct
import sys

import pytest

from fedvitals.errors import ConfigError, MissingExtraError
from fedvitals.testing import check_sink
from support.exported_runs import RUN, small
from support.waiting import wait_until

pytest.importorskip("wandb")
from fedvitals.sinks.wandb import WeightsAndBiases

pytestmark = pytest.mark.thorough


@pytest.fixture(autouse=True)
def nothing_is_sent(monkeypatch):
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.delenv("WANDB_MODE", raising=False)


def read(folder):
    """The messages of a run's `.wandb` file: W&B's own, in the frames of a LevelDB log (blocks of 32 KiB)."""
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = folder.glob("*.wandb")
    data = path.read_bytes()
    assert data[:4] == b":W&B"
    at, part, found = 7, b"", []
    while at < len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        part += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            found.append(Record.FromString(part))
            part = b""
    return found


def kinds(messages):
    return [message.WhichOneof("record_type") for message in messages]


def test_an_offline_run_is_read_back(tmp_path, capfd):
    """Rows by round with scalars and histograms; configuration, tags and notes with the link; not a word on screen."""
    sink = WeightsAndBiases("federation", folder=tmp_path, store="/data/runs.db")
    sink.write(small())
    sink.close()
    # `finish` comes back before W&B's helper process has written all (3 of 40 times here): its last word is «exit».
    wait_until(lambda: "exit" in kinds(read(sink.folders[RUN])))
    messages = read(sink.folders[RUN])
    (run,) = [m.run for m in messages if m.WhichOneof("record_type") == "run"]
    assert (run.run_id, run.display_name, run.project) == (RUN, "digits", "federation")
    assert RUN in run.tags
    assert f"fedvitals show {RUN} --store '/data/runs.db'" in run.notes
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert config["local"] == {"epochs": 2}
    rows = [
        {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in m.history.item}
        for m in messages
        if m.WhichOneof("record_type") == "history"
    ]
    assert [(row["round"], row["accuracy"], row["c1/update.norm"]) for row in rows] == [
        (0, 0.5, 50),
        (1, 0.6, 50),
        (2, 0.7, 50),
    ]
    assert sum(rows[0]["layers/gradient.histogram/fc.weight/values"]) == 4
    assert rows[0]["_timestamp"] == pytest.approx(1.79e9 + 2)
    steps = [m.metric for m in messages if m.WhichOneof("record_type") == "metric"]
    assert any(metric.step_metric == "round" for metric in steps)
    shown = capfd.readouterr()
    assert shown.out + shown.err == ""


def test_the_sinks_contract(tmp_path):
    check_sink(lambda: WeightsAndBiases(folder=tmp_path))


def test_modes_are_few():
    with pytest.raises(ConfigError, match="offline"):
        WeightsAndBiases(mode="ofline")


def test_a_missing_package_is_said_at_once(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingExtraError, match=r"fedvitals\[wandb\]"):
        WeightsAndBiases()
