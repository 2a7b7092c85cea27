# SPDX-License-Identifier: Apache-2.0
"""Every public name says what goes in and what comes out: each parameter is explained, and so is what is returned."""

import inspect

import pytest

from documentation.docstrings import docstring_of, parameters_of, parse
from documentation.public_names import public_names

for package in ("torch", "flwr", "matplotlib", "transformers", "lightning", "nvflare"):
    pytest.importorskip(package, reason="the public names need all extras")

NAMES = [name for name in public_names() if name.kind not in ("alias", "value")]


def test_every_public_name_has_a_docstring():
    assert len(NAMES) > 250
    assert [name.path for name in NAMES if not docstring_of(name.public).text] == []


def test_every_parameter_is_explained():
    unexplained = {}
    for name in NAMES:
        if name.kind in ("class", "function", "method"):
            known = docstring_of(name.public).arguments
            parameters = [parameter.name for parameter in parameters_of(name.public)]
            if missing := [parameter for parameter in parameters if not known.get(parameter)]:
                unexplained[name.path] = missing
    assert unexplained == {}


def test_no_parameter_is_explained_that_does_not_exist():
    invented = {}
    for name in NAMES:
        if name.kind in ("function", "method"):
            parameters = {parameter.name for parameter in parameters_of(name.public)}
            if extra := set(docstring_of(name.public).arguments) - parameters:
                invented[name.path] = extra
        elif name.kind == "class":
            own = set(parse(name.public.__dict__.get("__doc__")).arguments)
            if extra := own - {parameter.name for parameter in parameters_of(name.public)}:
                invented[name.path] = extra
    assert invented == {}


def test_what_is_returned_is_explained():
    unexplained = []
    for name in NAMES:
        if name.kind not in ("function", "method"):
            continue
        returned = inspect.signature(name.public).return_annotation
        docstring = docstring_of(name.public)
        explained = docstring.returns or docstring.text.startswith(("Return", "Yield"))
        if returned not in (None, "None", inspect.Signature.empty) and not explained:
            unexplained.append(name.path)
    assert unexplained == []
