# SPDX-License-Identifier: Apache-2.0
"""The public interface: every name that `import fedvitals as fv` shows, with its signature, as a golden file.

`PYTHONPATH=scripts .venv/bin/python tests/project/test_public_names.py` writes the file again.
"""

import difflib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fedvitals as fv
from documentation.public_names import public_names

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "public_names.txt"
COMMAND = "PYTHONPATH=scripts .venv/bin/python tests/project/test_public_names.py"
ROOT = GOLDEN.parents[2]
PUBLIC_MODULES = {
    "fedvitals",
    *(f"fedvitals.{name}" for name in ("errors", "flower", "lab", "nvflare", "plot", "probes", "sinks", "testing")),
}
# What pages show of parts that are not public: receiving OpenTelemetry.
DEEP_IMPORTS = {"docs/opentelemetry.md": "fedvitals.hosts.otlp."}

LIGHT = """
import sys
import fedvitals as fv
for module in (fv.sinks, fv.probes, fv.errors):
    dir(module)
fv.Where, fv.Finding, fv.Metric, fv.Event
heavy = {"torch", "opentelemetry", "google", "prometheus_client", "tensorboard", "mlflow", "wandb", "pyarrow"}
heavy |= {"flwr", "nvflare"}
print(*sorted(heavy & {name.partition(".")[0] for name in sys.modules}))
"""

NO_EXTRAS = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in sys.argv[1:]:
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)

sys.meta_path.insert(0, Absent())
import fedvitals as fv

def use(name, work):
    try:
        work()
    except fv.errors.MissingExtraError as error:
        print(name, str(error).rpartition("pip install ")[2])

for name in ("MLflow", "OpenTelemetry", "Prometheus", "WeightsAndBiases"):
    use(name, getattr(fv.sinks, name))
use("TensorBoard", lambda: fv.sinks.TensorBoard("folder"))
use("View", lambda: fv.probes.View)

from fedvitals.cli.main import app

sys.executable = "/nowhere/python"  # the folder in which the verb looks for Flower's programs
sys.modules.update(flwr=None, nvflare=None)
use("flower", lambda: fv.flower)
use("nvflare", lambda: fv.nvflare)
use("flower run", lambda: app.main(["flower", "run", "."], standalone_mode=False))
use("nvflare watch", lambda: app.main(["nvflare", "watch", "."], standalone_mode=False))
"""


def written() -> str:
    """The golden file's text."""
    return "\n".join(name.signature for name in public_names()) + "\n"


def python(code: str, *arguments: str) -> str:
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_public_names_and_signatures_are_those_of_the_golden_file():
    for package in ("torch", "flwr", "matplotlib"):
        pytest.importorskip(package)
    expected, now = GOLDEN.read_text(encoding="utf-8"), written()
    changes = difflib.unified_diff(expected.splitlines(), now.splitlines(), str(GOLDEN.name), "now", lineterm="", n=0)
    assert expected == now, "\n".join(
        ["The public names have changed. If that is meant, write the file again:", f"    {COMMAND}", *changes]
    )


def test_public_modules_load_no_extra():
    assert python(LIGHT).split() == []


def test_missing_extras_are_named_with_the_install_line():
    absent = ("torch", "google", "opentelemetry", "prometheus_client", "tensorboard", "mlflow", "wandb")
    assert python(NO_EXTRAS, *absent).splitlines() == [
        "MLflow 'fedvitals[mlflow]'",
        "OpenTelemetry 'fedvitals[otel]'",
        "Prometheus 'fedvitals[prometheus]'",
        "WeightsAndBiases 'fedvitals[wandb]'",
        "TensorBoard 'fedvitals[tensorboard]'",
        "View 'fedvitals[torch]'",
        "flower 'fedvitals[flower]'",
        "nvflare 'fedvitals[nvflare]'",
        "flower run 'fedvitals[flower]'",
        "nvflare watch 'fedvitals[nvflare]'",
    ]


def test_names_of_public_modules_are_answered_with_what_exists():
    for module in (fv.sinks, fv.probes):
        with pytest.raises(AttributeError, match="It offers") as caught:
            _ = module.Missing
        for name in dir(module):
            assert name in str(caught.value)


def test_probes_of_the_public_module_can_be_given_to_a_monitor():
    torch = pytest.importorskip("torch")
    from fedvitals.testing import MemorySink

    chosen = [(fv.probes.gradient_sums, fv.every(2)), fv.probes.weight_sums, fv.probes.gradient_scale(images=4)]
    sink = MemorySink()
    with fv.Monitor(None, probes=chosen, sinks=[sink], strict=True) as monitor, monitor.round(0):
        model = torch.nn.Linear(3, 2)
        with monitor.client("c0", model, data=(torch.randn(8, 3), torch.zeros(8).long())):
            model(torch.randn(4, 3)).sum().backward()
            torch.optim.SGD(model.parameters(), 0.1).step()
    assert sink.value("weight.norm", node="c0") > 0
    assert sink.value("scale.images", node="c0") == 4


def test_pages_and_examples_import_public_names_only():
    imported = re.compile(r"^ *(?:from|import) (fedvitals[\w.]*)", re.MULTILINE)
    pages = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("docs/guide/*.md"), *ROOT.glob("examples/**/*.py")]
    for path in pages:
        allowed = DEEP_IMPORTS.get(str(path.relative_to(ROOT)), "nothing else")
        for module in {*imported.findall(path.read_text(encoding="utf-8"))} - PUBLIC_MODULES:
            assert module.startswith(allowed), f"{path}: {module} is not public"
            assert importlib.util.find_spec(module) is not None, f"{path}: there is no module {module}"


def test_own_parts_work_as_the_page_on_plug_ins_shows(capsys):
    torch = pytest.importorskip("torch")
    pytest.importorskip("prometheus_client")
    page = (ROOT / "docs" / "plugins.md").read_text(encoding="utf-8")
    snippet = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0]
    names = {}
    shown = snippet.replace("fv.Monitor(", "monitor = fv.Monitor(").replace("Prometheus()", "Prometheus(port=0)")
    exec(shown.replace('"runs.db"', "None"), names)
    with names["monitor"] as monitor:
        with monitor.round(0):
            model = torch.nn.Linear(3, 2)
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            with monitor.client("c0", model):
                model(torch.randn(4, 3)).sum().backward()
                optimizer.step()
        found = monitor.findings()
    assert [finding.issue for finding in found] == ["FEW_CLIENTS"]
    assert found.gaps == ()


if __name__ == "__main__":
    GOLDEN.write_text(written(), encoding="utf-8")
    print(GOLDEN)  # noqa: T201
