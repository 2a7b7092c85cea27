# SPDX-License-Identifier: Apache-2.0
"""The public interface: every name that `import fedvitals as fv` shows, with its signature, as a golden file.

`.venv/bin/python tests/project/test_public_names.py` writes the file again.
"""

import difflib
import functools
import importlib.util
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import fedvitals as fv

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "public_names.txt"
COMMAND = ".venv/bin/python tests/project/test_public_names.py"
ROOT = GOLDEN.parents[2]
WIDTH = 120
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
"""


class Verbatim:
    """Text that a signature shows as it is, without quotes."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def shown_default(default: Any) -> Any:
    """A default value without its address in memory."""
    if default is inspect.Parameter.empty or not (inspect.isroutine(default) or inspect.isclass(default)):
        return default
    return Verbatim(default.__name__)


def as_written(annotation: Any) -> Any:
    """An annotation as it stands in the source, without quotes and without checks."""
    annotation = getattr(annotation, "__origin__", annotation) if hasattr(annotation, "__metadata__") else annotation
    return Verbatim(annotation) if isinstance(annotation, str) else annotation


def signature(name: str, function: Any, *, is_method: bool = False) -> str:
    """A name with its parameters, without `self`; one parameter a line where they do not fit in one."""
    found = inspect.signature(function)
    parameters = [
        parameter.replace(annotation=as_written(parameter.annotation), default=shown_default(parameter.default))
        for parameter in list(found.parameters.values())[is_method:]
    ]
    returned = inspect.Signature.empty if inspect.isclass(function) else as_written(found.return_annotation)
    whole = found.replace(parameters=parameters, return_annotation=returned)
    if len(f"{name}{whole}") <= WIDTH:
        return f"{name}{whole}"
    kinds = [parameter.kind for parameter in parameters]
    rows = [str(parameter) for parameter in parameters]
    if inspect.Parameter.KEYWORD_ONLY in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
        rows.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    result = str(whole.replace(parameters=[])).removeprefix("()")
    return "\n".join([f"{name}(", *(f"    {row}," for row in rows), f"){result}"])


def constructor(name: str, kind: type) -> str:
    has_signature = not issubclass(kind, BaseException) or inspect.isfunction(kind.__init__)
    return signature(name, kind) if has_signature else f"{name}(message)"


def methods(name: str, kind: type) -> Iterator[str]:
    """The public methods and properties of a class, but for those of its bases that are not ours."""
    ours = [owner for owner in kind.__mro__ if owner.__module__.startswith("fedvitals")]
    for attribute in sorted({attribute for owner in ours for attribute in vars(owner)}):
        member = inspect.getattr_static(kind, attribute)
        if attribute.startswith("_"):
            continue
        if isinstance(member, property | functools.cached_property):
            getter = member.fget if isinstance(member, property) else member.func
            yield f"{name}.{attribute}: {inspect.signature(getter).return_annotation}"
        elif isinstance(member, staticmethod | classmethod):
            yield signature(f"{name}.{attribute}", getattr(kind, attribute))
        elif inspect.isfunction(member):
            yield signature(f"{name}.{attribute}", member, is_method=True)


def public_names(module: ModuleType) -> list[str]:
    """The names that a module offers, without what it imports for itself."""
    if hasattr(module, "__all__"):
        return sorted(name for name in module.__all__ if not name.startswith("_"))
    return [
        name
        for name in sorted({*dir(module)})
        if not name.startswith("_") and getattr(getattr(module, name), "__module__", "").startswith("fedvitals")
    ]


def lines_of(path: str, module: ModuleType, seen: dict[int, str]) -> Iterator[str]:
    for name in public_names(module):
        public, shown = getattr(module, name), f"{path}.{name}"
        if id(public) in seen:
            yield f"{shown} = {seen[id(public)]}"
            continue
        seen[id(public)] = shown
        if isinstance(public, ModuleType):
            yield f"{shown}: module"
            yield from lines_of(shown, public, seen)
        elif inspect.isclass(public):
            yield constructor(shown, public)
            if path != "fv.lab":  # of the lab's parts people write the constructor; the lab calls the rest
                yield from methods(shown, public)
        elif callable(public):
            yield signature(shown, public)
        else:
            yield f"{shown}: {type(public).__name__}"


def written() -> str:
    """The golden file's text."""
    return "\n".join(lines_of("fv", fv, {})) + "\n"


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
