# SPDX-License-Identifier: Apache-2.0
"""The study in pieces: a pack for a bare machine, minutes that suffice or not, results that travel and are merged."""

import dataclasses
import hashlib
import json
import subprocess
import sys
import zipfile

import pytest

from fedvitals.cli.main import main
from fedvitals.errors import ConfigError
from fedvitals.lab.data.datasets import Dataset, load
from fedvitals.lab.data.gtsrb import PACKED
from fedvitals_studies.packs import runner
from fedvitals_studies.packs.pack import pack
from fedvitals_studies.reproduce import bundle, piece
from fedvitals_studies.reproduce import data as reproduce_data
from fedvitals_studies.reproduce.claims import read, verdicts
from fedvitals_studies.reproduce.conditions import BY_NAME, CONDITIONS, FACTORIAL, quick_factorial, richly
from fedvitals_studies.reproduce.conditions import quick as in_quick
from fedvitals_studies.reproduce.pieces import ARGUMENTS, run_pieces
from fedvitals_studies.reproduce.results import Results, save
from fedvitals_studies.reproduce.results import load as load_result
from fedvitals_studies.reproduce.study import measure_all, plan
from fedvitals_studies.reproduce.verdicts import sentences, stand_ins
from support import invented_results as invented

ENTRY = "fedvitals_studies.reproduce.piece:main"
CELLS_OF_TWO_PIECES = tuple(f"under-pool-scaled-fresh-initial-centralized-{word}" for word in ("unclipped", "clipped"))


@pytest.fixture
def wheel(tmp_path):
    """Of a package that nobody has."""
    path = tmp_path / "nothing-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("nothing_at_all/__init__.py", "here = True\n")
    return path


@pytest.fixture
def data(tmp_path):
    (tmp_path / "one.npz").write_bytes(bytes(range(256)) * 10)
    (tmp_path / "two.npz").write_bytes(b"two" * 300)
    return [tmp_path / "one.npz", tmp_path / "two.npz"]


def run(script, *arguments):
    command = [sys.executable, str(script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


# -- the pack ----------------------------------------------------------------------------------------------------------


def test_a_pack_is_whole_and_runs_from_its_own_source(tmp_path, wheel, data):
    made = pack(tmp_path / "pack", data=data, entry=ENTRY, wheels=[wheel], part_bytes=1000)
    assert (made.code / "nothing_at_all" / "__init__.py").exists()
    assert [sum(f.stat().st_size for f in part.iterdir()) for part in made.parts] == [865, 865, 865, 865]
    assert not [*made.code.rglob("__pycache__")]
    done = run(made.script, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "--minutes" in done.stdout
    for file in data:
        assert (tmp_path / "pack" / "joined" / file.name).read_bytes() == file.read_bytes()
    shown = "import fedvitals, os; print(fedvitals.__file__, os.environ['FEDVITALS_DATA'])"
    (made.code / "manifest.json").write_text(
        json.dumps({**json.loads((made.code / "manifest.json").read_text()), "entry": "shown:show"})
    )
    (made.code / "shown.py").write_text(f"def show(arguments):\n    {shown}\n    return len(arguments)\n")
    done = run(made.script, "a", "b")
    assert done.returncode == 2
    assert done.stdout.split() == [str(made.code / "fedvitals" / "__init__.py"), str(tmp_path / "pack" / "joined")]


def test_a_part_that_has_not_arrived_or_is_damaged_is_named(tmp_path, wheel, data):
    made = pack(tmp_path / "pack", data=data, entry=ENTRY, wheels=[wheel], part_bytes=2000)
    away = made.parts[1].rename(tmp_path / "away")
    done = run(made.script, "--help")
    assert done.returncode == 1
    assert "one.npz is not complete: data1/one.npz.1 has not arrived" in done.stderr
    away.rename(made.parts[1])
    (made.parts[1] / "one.npz.1").write_bytes(b"other")
    assert "one.npz was damaged" in run(made.script, "--help").stderr


def test_a_pack_replaces_a_pack_and_nothing_else(tmp_path, wheel, data):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years")
    with pytest.raises(ConfigError, match="not empty, and no pack"):
        pack(tmp_path / "mine", data=data, entry=ENTRY, wheels=[wheel])
    for size in (500, 5000):
        made = pack(tmp_path / "pack", data=data, entry=ENTRY, wheels=[wheel], part_bytes=size)
    assert [*(tmp_path / "pack").glob("data*")] == [*made.parts] == [tmp_path / "pack" / "data0"]


def test_the_command_packs_gtsrb(tmp_path, wheel, capsys, monkeypatch):
    for name in PACKED:
        (tmp_path / name).write_bytes(b"packed")
    with pytest.raises(SystemExit) as done:
        main(["reproduce", "gsc", "--pack", f"{tmp_path}/p", "--data", f"{tmp_path}", "--wheel", str(wheel)])
    assert done.value.code == 0
    told = capsys.readouterr().out
    assert "by Python 3.12: " in told
    assert "code/run.py --minutes 8 --out OUT" in told
    assert "--merge OUT" in told
    assert {f.name for f in (tmp_path / "p" / "data0").iterdir()} == {f"{name}.0" for name in PACKED}


def test_a_pack_that_cannot_be_made_says_why_and_leaves_nothing(tmp_path, wheel, data):
    target = tmp_path / "pack"
    (tmp_path / "bad.whl").write_text("no wheel")
    for given, said in (("absent.whl", "No such file"), ("bad.whl", "not a zip file")):
        with pytest.raises(ConfigError, match=said):
            pack(target, data=data, entry=ENTRY, wheels=[tmp_path / given])
        assert not target.exists()
    with pytest.raises(ConfigError, match="is a file"):
        pack(wheel, data=data, entry=ENTRY, wheels=[wheel])


def test_a_pack_for_another_python_says_so(tmp_path, wheel, data):
    made = pack(tmp_path / "pack", data=data, entry="compiled:main", wheels=[wheel], python="9.9")
    (made.code / "compiled.py").write_text("def main(arguments):\n    import compiled_for_another_python\n")
    done = run(made.script)
    assert done.returncode == 1
    assert "This pack is for Python 9.9" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_rehearsal_does_not_take_the_place_of_the_study(tmp_path):
    small = in_quick("gtsrb")[0]
    out, home = tmp_path / "out", tmp_path / "home"
    bundle.write(out / "results-1.json.gz", [bundle.described(invented.measure(small, 0), small)])
    with pytest.raises(ConfigError, match="merged with --quick"):
        bundle.merge(home, [out], CONDITIONS)
    assert not home.exists()
    assert bundle.merge(home, [out], in_quick("gtsrb")) == 1  # a folder of files will do
    with pytest.raises(ConfigError, match="There is no results-"):
        bundle.merge(home, [home])


def test_images_are_packed_so_that_they_come_back(tmp_path):
    import torch

    rng = torch.Generator().manual_seed(1)
    parts = [torch.randint(0, 256, (n, 3, 32, 32), generator=rng, dtype=torch.uint8) for n in (7, 4)]
    labels = [torch.arange(7) % 3, torch.arange(4) % 3]
    dataset = Dataset("gtsrb", parts[0], labels[0], parts[1], labels[1], labels[0] * 100 + 5, 43, "")
    reproduce_data.write(tmp_path, dataset)
    found = load("gtsrb", tmp_path, cache=tmp_path / "cache")
    assert torch.equal(found.x, parts[0])
    assert torch.equal(found.test_x, parts[1])
    assert torch.equal(found.y, labels[0])
    assert torch.equal(found.groups, dataset.groups)
    with reproduce_data.packed_gtsrb(tmp_path) as files:
        assert [file.name for file in files] == [*PACKED]


@pytest.mark.thorough
def test_over_there_torch_numpy_and_msgspec_are_enough():
    blocked = (
        "import importlib.metadata as m, sys\n"
        "mine = {'torch', 'numpy', 'msgspec', 'fedvitals', 'typing_extensions', 'sympy', 'mpmath', 'functorch', "
        "'torchgen', 'triton', 'networkx', 'jinja2', 'markupsafe', 'filelock', 'fsspec', 'setuptools'}\n"
        "sys.modules.update({n: None for n in m.packages_distributions() if n.isidentifier() and n not in mine"
        " and n not in sys.modules})\n"
        "import fedvitals_studies.reproduce.measure, fedvitals_studies.reproduce.piece\n"
    )
    done = subprocess.run([sys.executable, "-c", blocked], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


# -- minutes -----------------------------------------------------------------------------------------------------------


def small(*names):
    return [dataclasses.replace(BY_NAME[name], clients=4, rounds=6, dataset="synthetic") for name in names]


def taking(seconds):
    """Measures that say how long they took."""

    def measure(condition, repeat, *, data, progress):
        return {**invented.measure(condition, repeat), "seconds": seconds}

    return measure


def test_no_run_is_begun_that_would_not_fit(tmp_path):
    conditions, said = small("initial-rings-clipped", "initial-clustered-clipped"), []
    assert measure_all(tmp_path, conditions, repeats=1, measure=taking(30.0), tell=said.append, minutes=0.5) == []
    assert [str(job) for job in plan(tmp_path, conditions, 1).todo] == ["initial-clustered-clipped, repeat 1"]
    assert said[-1].startswith("Stopped in time: 1 runs are left, about 30 s.")
    measure_all(tmp_path, conditions, repeats=1, measure=taking(30.0), minutes=1.0)
    assert not plan(tmp_path, conditions, 1).todo


def test_the_speed_of_another_device_says_nothing(tmp_path):
    conditions = small("initial-rings-clipped", "initial-clustered-clipped")
    measure_all(tmp_path, conditions[:1], repeats=1, measure=taking(1e6))
    on_cpu, on_gpu = (plan(tmp_path, conditions, 1, device).seconds for device in ("cpu", "cuda"))
    assert on_cpu == pytest.approx(1e6)
    assert on_gpu < 10


# -- results that travel -----------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_pieces_go_on_where_they_stopped_and_are_merged(tmp_path, monkeypatch, capsys):
    asked = []

    def measure(condition, repeat, *, data, progress, device, arrays=False, **_):
        asked.append((condition.name, repeat, condition.every_iteration))
        return {**invented.measure(condition, repeat), "device": device}

    module = type(sys)("fedvitals_studies.reproduce.measure")
    module.measure = measure
    monkeypatch.setitem(sys.modules, module.__name__, module)
    times = iter([1000.0] * 50)
    monkeypatch.setattr(piece.time, "time", lambda: next(times))
    wanted = ["--only", "initial-rings-*", "--device", "cuda", "--repeats", "2"]
    out = tmp_path / "out"
    first = ["--only", "initial-rings-clipped", "--device", "cuda", "--repeats", "1", "--work", f"{tmp_path / 'a'}"]
    assert piece.main([*first, "--out", f"{out}"]) == 0
    (file,) = out.glob(bundle.PATTERN)
    kept = file.rename(tmp_path / "results-1.json.gz")
    again = [*wanted, "--work", f"{tmp_path / 'b'}", "--have", f"{kept}", "--out", f"{out}"]
    assert piece.main(again) == 0
    assert sorted(asked) == sorted(
        (name, repeat, True) for name in ("initial-rings-clipped", "initial-rings-unclipped") for repeat in (0, 1)
    )
    (other,) = out.glob(bundle.PATTERN)
    assert len(bundle.read(other)[0]) == 3
    capsys.readouterr()
    with pytest.raises(SystemExit) as done:
        main(
            ["reproduce", "gsc", "--out", f"{tmp_path / 'home'}", "--merge", f"{kept}", "--merge", f"{other}", "--json"]
        )
    assert done.value.code == 0
    assert "4 results taken into" in capsys.readouterr().err
    found = Results.read(tmp_path / "home", CONDITIONS)  # measured more than is asked for: that will do
    assert found.repeats("initial-rings-clipped") == (0, 1)


def test_what_measured_less_than_is_asked_for_is_refused(tmp_path):
    condition = BY_NAME["initial-rings-clipped"]
    save(tmp_path, invented.measure(condition, 0), condition)
    with pytest.raises(ConfigError, match="measured with every_iteration = False, now True"):
        load_result(tmp_path, richly(condition), 0)


def test_a_results_file_that_is_none_is_refused(tmp_path):
    (tmp_path / "results-1.json.gz").write_bytes(b"none")
    with pytest.raises(ConfigError, match="cannot be read as results"):
        bundle.read(tmp_path / "results-1.json.gz")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"described": {"name": "../../outside"}, "condition": "../../outside"}, "Unknown condition"),
        ({"repeat": "../../outside"}, "expected a number"),
        ({"repeat": -1}, "expected a number"),
        ({"series": 3}, "cannot be read as results"),
        ({"described": {"channels": 3}}, "cannot be read as results"),
    ],
)
def test_results_that_mean_harm_are_refused(tmp_path, change, message):
    condition = BY_NAME["initial-rings-clipped"]
    good = bundle.described(invented.measure(condition, 0), condition)
    path = tmp_path / "in" / "results-1.json.gz"
    described = {**good["described"], **change.get("described", {})}
    bundle.write(path, [{**good, **change, "described": described}])
    with pytest.raises(ConfigError, match=message):
        bundle.merge(tmp_path / "home", [path])
    assert not [*tmp_path.rglob("outside*")]


def test_data_of_an_earlier_pack_are_not_taken_for_todays(tmp_path):
    (tmp_path / "data0").mkdir()
    for content in (b"old", b"new"):
        (tmp_path / "data0" / "a.0").write_bytes(content)
        files = [{"name": "a", "pieces": ["data0/a.0"], "sha256": hashlib.sha256(content).hexdigest()}]
        assert (runner.joined(tmp_path, files) / "a").read_bytes() == content


def test_iterations_are_kept_with_fewer_digits(tmp_path):
    condition = dataclasses.replace(richly(BY_NAME["initial-hierarchical-clipped"]), dataset="synthetic")
    result = invented.measure(condition, 0)
    result["series"]["iteration.gsc"][0] = result["series"]["scale.gsc"][0] = 1.23456789
    path = save(tmp_path, result, condition)
    kept = json.loads(path.read_text())["series"]
    assert (kept["iteration.gsc"][0], kept["scale.gsc"][0]) == (1.235, 1.23457)
    assert path.stat().st_size < 150_000


# -- what holds, and on what it depends --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def invented_results():
    found = Results(invented.all_results(2))
    return found, verdicts(found), read()[1]


def test_a_choice_is_tried_where_it_was_run(invented_results):
    results, _, choices = invented_results
    by_name = {choice.condition: choice for choice in choices}
    kernel = stand_ins(by_name["sensitivity-kernel"], results)
    assert kernel["extended-centralized-exploding"] == "sensitivity-kernel-exploding"
    assert kernel["initial-hierarchical-unclipped"] == "sensitivity-kernel-hierarchical-unclipped"
    slope = stand_ins(by_name["sensitivity-slope"], results)
    assert slope["extended-centralized-vanishing"] == "extended-centralized-vanishing"
    assert "extended-centralized-exploding" not in stand_ins(by_name["sensitivity-keep-adam"], results)


def test_a_sentence_that_another_choice_overturns_depends_on_it(invented_results):
    results, found, choices = invented_results
    told = sentences(found, results, choices)
    assert sum(len(sentence.readings) for sentence in told) == len(found)
    (gsc,) = [s for s in told if s.readings[0].claim.id == "4.2"]
    assert [each.claim.id for each in gsc.readings] == ["4.2", "4.4"]
    assert gsc.kind == "depends"  # the other numbering does not order the scenarios
    (zero,) = [s for s in told if s.readings[0].claim.id == "4.1"]
    assert (zero.kind, zero.tried > 0) == ("holds", True)
    other = {run["condition"]: run for run in results.of("sensitivity-pixels-vanishing")}
    changed = [
        {**run, "series": {**run["series"], "scale.gsc": [1.0] * run["rounds"]}} if run["condition"] in other else run
        for run in results.all()
    ]
    (zero,) = [s for s in sentences(found, Results(changed), choices) if s.readings[0].claim.id == "4.1"]
    assert zero.kind == "depends"
    assert "pixels: 0 to 255: not reproduced (our choice over as many rounds: reproduced)" in zero.words


# -- piece after piece -------------------------------------------------------------------------------------------------


def test_pieces_go_on_until_nothing_is_left(tmp_path):
    """Of two cells the first piece brings one, the second the other; then it ends."""
    cells = [quick_factorial(c, "digits") for c in FACTORIAL if c.name in CELLS_OF_TWO_PIECES]
    (tmp_path / "pack" / "code").mkdir(parents=True)
    calls, script = tmp_path / "calls", tmp_path / "run.py"
    calls.write_text("")
    script.write_text(
        "import sys, pathlib\nfrom fedvitals_studies.reproduce.piece import main\n"
        f"calls = pathlib.Path({str(calls)!r})\n"
        "words = sys.argv[1:]\n"
        "if '--merged' not in words:\n"
        "    calls.write_text(calls.read_text() + 'x')\n"
        f"    words += ['--only', {cells[0].name!r}]\n"
        f"    words += ['--only', {cells[1].name!r}] * (calls.read_text() != 'x')\n"
        "sys.exit(main(words))\n"
    )
    command = f'{sys.executable} {script} $PIECE --device cpu --dataset digits --work {tmp_path / "work"} --out "$OUT"'
    here, words = tmp_path / "here", []

    def pieces(command, left):
        arguments = f"{ARGUMENTS} --quick --repeats 1 --minutes 5"
        run_pieces(command, here, tmp_path / "pack" / "code", left, cells, arguments, words.append)

    pieces(command, lambda: len(plan(here, cells, 1).todo))
    assert words == ["2 runs left.", "1 runs left."]
    assert calls.read_text() == "xx"
    assert not plan(here, cells, 1).todo
    with pytest.raises(ConfigError, match="exit code 3 and brought no results; 1 runs are left"):
        pieces("exit 3", lambda: 1)
