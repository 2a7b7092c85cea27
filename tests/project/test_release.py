# SPDX-License-Identifier: Apache-2.0
"""What a release consists of: workflows and citation by their schemas, versions that agree, notes of the changelog."""

import importlib.machinery
import importlib.util
import json
import re
import subprocess
import sys
import tomllib

import pytest

from fedvitals import __version__
from support.paths import ROOT

yaml = pytest.importorskip("ruamel.yaml")
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def release():
    loader = importlib.machinery.SourceFileLoader("release_script", str(ROOT / "scripts/release"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("release_script", loader))
    loader.exec_module(module)
    return module


def valid(schema: str, *paths) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, *map(str, paths)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_workflows_and_citation_are_valid(tmp_path):
    checked = valid("vendor.github-workflows", *WORKFLOWS)
    assert checked.returncode == 0, checked.stdout
    checked = valid("vendor.citation-file-format", ROOT / "CITATION.cff")
    assert checked.returncode == 0, checked.stdout
    broken = tmp_path / "broken.yml"
    broken.write_text(WORKFLOWS[0].read_text(encoding="utf-8").replace("runs-on:", "runs-at:"), encoding="utf-8")
    assert valid("vendor.github-workflows", broken).returncode == 1, "a check that cannot fail"


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_have_few_rights_and_run_what_is_there(path):
    text = path.read_text(encoding="utf-8")
    workflow = yaml.YAML(typ="safe").load(text)
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] <= 90
        assert set(job.get("needs", "").split()) <= set(workflow["jobs"])
    assert "secrets." not in text
    assert not re.search(r"\$\{\{\s*github\.event", text), "text of strangers would become part of a script"
    for script in re.findall(r"\bscripts/\w+", text):
        assert (ROOT / script).is_file()
    for mentioned in re.findall(r"\btests/[\w/.]+", text):
        assert (ROOT / mentioned).exists()
    for extras in re.findall(r'-e "\.\[([\w,]+)\]"', text):
        assert set(extras.split(",")) <= set(PROJECT["project"]["optional-dependencies"])


def test_linux_macos_windows_and_arm_are_tested():
    text = (ROOT / ".github/workflows/tests.yml").read_text(encoding="utf-8")
    assert all(runner in text for runner in ("ubuntu-24.04,", "ubuntu-24.04-arm", "macos-", "windows-"))
    assert "id-token: write" in (ROOT / ".github/workflows/release.yml").read_text(encoding="utf-8")


def test_what_the_tests_on_other_systems_import_is_installed_there():
    text = (ROOT / ".github/workflows/tests.yml").read_text(encoding="utf-8")
    (installed,) = re.findall(r"pip install (-e .*)$", text, re.MULTILINE)
    (places,) = re.findall(r"pytest -n 2 .*?((?: tests/\S+)+)$", text, re.MULTILINE)
    files = [file for place in places.split() for file in (ROOT / place, *(ROOT / place).rglob("*.py"))]
    imported = "".join(file.read_text(encoding="utf-8") for file in files if file.is_file())
    assert "fedvitals_studies" in imported
    assert "-e studies" in installed


def test_versions_agree(release):
    assert release.versions() == __version__
    citation = yaml.YAML(typ="safe").load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == __version__
    assert citation["license"] == PROJECT["project"]["license"]


def test_core_has_at_most_five_dependencies():
    assert len(PROJECT["project"]["dependencies"]) <= 5


def test_no_place_is_claimed_that_does_not_exist():
    assert set(PROJECT["project"]["urls"]) == {"Licence"}, "with a public place, rewrite docs/release.md and the README"
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "There is no release on PyPI yet" in readme
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
    claims = [page.name for page in pages if re.search(r"pip install '?fedvitals", page.read_text(encoding="utf-8"))]
    assert claims == [], "nothing is published: install from a clone or a wheel"


def test_notes_come_from_the_changelog(release):
    changelog = (
        "# Changelog\n\n## Unreleased\n\n- New.\n\n## 0.2.0 - 2027-01-01\n\n### Added\n\n- Two.\n\n## 0.1.0\n\n- One.\n"
    )
    assert release.notes(changelog, "0.2.0", dry=False) == "# fedvitals 0.2.0\n\n### Added\n\n- Two.\n"
    assert release.notes(changelog, "0.3.0.dev0", dry=True) == "# fedvitals 0.3.0.dev0\n\n- New.\n"
    with pytest.raises(release.ReleaseError, match="no section"):
        release.notes(changelog, "0.3.0", dry=False)
    ours = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert "### Added" in release.notes(ours, __version__, dry=True)


def test_licences_are_those_of_what_is_installed(release):
    listed = subprocess.run([sys.executable, "-c", release.LICENCES], capture_output=True, text=True, check=True)
    rows = {name: licence for name, _, licence in json.loads(listed.stdout)}
    assert rows["click"] == "BSD-3-Clause"
    assert not {"pip", "setuptools"} & {*rows}, "every environment has them, whatever is installed"


def test_a_development_version_is_never_released(release):
    with pytest.raises(release.ReleaseError, match="development version"):
        release.check_releasable("0.1.0.dev0")


def test_foreign_files_are_refused(release, tmp_path):
    import zipfile

    wheel = tmp_path / "fedvitals-0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("fedvitals/__init__.py", "")
        archive.writestr("elsewhere/x.py", "")
    with pytest.raises(release.ReleaseError, match="elsewhere"):
        release.check_contents(wheel)
