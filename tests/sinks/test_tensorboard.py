# SPDX-License-Identifier: Apache-2.0
"""TensorBoard: what is written is read back by TensorBoard's own reader."""

import errno
import sys

import numpy as np
import pytest

from fedvitals.errors import MissingExtraError
from fedvitals.records import LayerStats, Metric, Where
from fedvitals.stats import empty_sums
from fedvitals.testing import check_sink
from support.exported_runs import RUN, TABLE, round_of, run_of, small
from support.sinks import ending_queues
from support.waiting import wait_until

pytest.importorskip("tensorboard")
from fedvitals.sinks.curves import Curves, Point, link_of
from fedvitals.sinks.tensorboard import TensorBoard


def read(folder):
    """The run's folder, by TensorBoard's own reader."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder), size_guidance={"tensors": 0, "scalars": 0, "histograms": 0})
    return found.Reload()


@pytest.fixture
def written(tmp_path):
    sink = TensorBoard(tmp_path / "tb", store="postgresql://me:hidden@host/db")
    sink.write(small())
    sink.close()
    return read(sink.folder_of(RUN))


def test_scalars_over_rounds(written):
    """The whole by its name, a node by its prefix, a layer by family and statistic; the step is the round."""
    accuracy = written.Scalars("accuracy")
    assert [one.step for one in accuracy] == [0, 1, 2]
    assert [one.value for one in accuracy] == pytest.approx([0.5, 0.6, 0.7])
    assert [one.value for one in written.Scalars("c1/update.norm")] == [50.0] * 3
    assert [one.value for one in written.Scalars("layers/gradient.mean/fc.weight")] == pytest.approx([0.5] * 3)
    assert written.Scalars("layers/gradient.l2/fc.bias")[0].value == pytest.approx(np.sqrt(3))
    assert accuracy[0].wall_time == pytest.approx(1.79e9 + 1)


def test_histograms_of_layers(written):
    """The bars lie where the values were, and count as many."""
    (first, *_) = written.Histograms("layers/gradient.histogram/fc.weight")
    histogram = first.histogram_value
    assert histogram.num == 4
    filled = {limit: count for limit, count in zip(histogram.bucket_limit, histogram.bucket, strict=True) if count}
    assert filled == {-0.5: 1, 0.5: 2, 4.0: 1}  # −0.5 lies in (−1, −0.5], 0.25 and 0.3 up to 0.5, 2 up to 4
    assert histogram.min == -1.0


def test_text_has_the_link_the_settings_and_the_findings(written):
    """The run's id and store, without a password; its configuration; and what was found."""
    text = written.Tensors("run")[0].tensor_proto.string_val[0].decode()
    assert f"fedvitals show {RUN} --store 'postgresql://me:***@host/db'" in text
    assert "| local.epochs | 2 |" in text
    found = written.Tensors("findings/UPDATE_TOO_LARGE")
    assert [one.step for one in found] == [0, 1, 2]
    assert b"stands" in found[0].tensor_proto.string_val[0]


def test_many_clients_are_a_spread():
    """Beyond the bound there are no more curves of single nodes, but the spread over all of them."""
    curves = Curves(nodes=10)
    drawn = curves.of([run_of(), *round_of(0, clients=100)])
    tags = {one.tag for one in drawn}
    assert {"c9/update.norm", "clients/update.norm/median", "clients/update.norm/p95"} <= tags
    assert "c10/update.norm" not in tags
    (largest,) = [one for one in drawn if one.tag == "clients/update.norm/max"]
    assert isinstance(largest, Point)
    assert largest.value == 50.0
    assert len(tags) < 150
    named = {one.tag for one in Curves(nodes=["c42"]).of([run_of(), *round_of(0, clients=100)])}
    assert "c42/update.norm" in named
    assert "c1/update.norm" not in named


def test_layers_of_a_chosen_node():
    where = Where(RUN, 0, "c7")
    stats = LayerStats(where, 0.0, "gradient", empty_sums(2), TABLE.digest)
    assert not Curves().of([run_of(), stats])
    tags = {one.tag for one in Curves(layers_of=["c7"]).of([run_of(), stats])}
    assert "c7/layers/gradient.std/fc.weight" in tags


def test_single_steps_are_left_out():
    """Of a value that stands for one step of many, only those that speak for the round are drawn."""
    step = [Metric(Where(RUN, 0, "c0", 3), 0.0, name, 1.0) for name in ("weight.difference", "gradient.norm_max")]
    assert {one.tag for one in Curves().of(step)} == {"c0/gradient.norm_max"}


class FullDisk:
    """A file whose disk is full after some bytes, until there is room again."""

    def __init__(self, file, room):
        self.file, self.room = file, room

    def write(self, data):
        if self.room is not None and len(data) > self.room:
            self.file.write(data[: self.room])
            raise OSError(errno.ENOSPC, "No space left on device")
        return self.file.write(data)

    def __getattr__(self, name):
        return getattr(self.file, name)


def test_a_full_disk_harms_nobody_and_nothing_is_written_twice(tmp_path):
    """The queue tells and tries again; half a batch is taken back, so every point is there once."""
    with ending_queues() as make:
        sink = TensorBoard(tmp_path)
        queue = make(sink)
        queue.put_many([run_of(), *round_of(0)])
        assert queue.flush()
        file = sink._files[RUN]
        full = file._file = FullDisk(file._file, room=50)
        queue.put_many(round_of(1))
        wait_until(lambda: queue._attempts_failed > 0)
        full.room = None
        assert queue.flush()
        assert not queue.lost
    found = read(sink.folder_of(RUN))
    assert [one.step for one in found.Scalars("accuracy")] == [0, 1]


def test_the_sinks_contract(tmp_path):
    check_sink(lambda: TensorBoard(tmp_path))


def test_names_cannot_leave_the_folder(tmp_path):
    """A run called ../../x has its folder where the others have theirs."""
    sink = TensorBoard(tmp_path / "tb")
    sink.write(small(run="../../up", name="../../../etc")[:3])
    sink.close()
    assert sink.folder_of("../../up").resolve().parent == (tmp_path / "tb").resolve()
    assert not [path for path in tmp_path.iterdir() if path.name != "tb"]


def test_the_link_hides_passwords():
    assert "hidden" not in link_of(run_of(), "postgresql://me:hidden@host/db?sslpassword=hidden")


def test_a_missing_package_is_said_at_once(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard.summary.writer.record_writer", None)
    with pytest.raises(MissingExtraError, match=r"fedvitals\[tensorboard\]"):
        TensorBoard("tb")


def test_neither_torch_nor_tensorflow_is_loaded(tmp_path):
    """It writes by the package alone."""
    import subprocess

    code = (
        "import sys\nfrom fedvitals.records import Run\nfrom fedvitals.sinks.tensorboard import TensorBoard\n"
        f"sink = TensorBoard({str(tmp_path)!r}); sink.write([Run('r', 'r')]); sink.close()\n"
        "assert not {'torch', 'tensorflow'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
