# SPDX-License-Identifier: Apache-2.0
"""A strategy's state between rounds, read from its attributes: arrays as states, plain values as JSON.

Examples are FedAdam's `m_t`, `v_t` and `current_arrays`, or numbers that a custom strategy keeps. Other attributes are
listed by name, so that a replay can say what was not restored.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import Array, ArrayRecord

from fedvitals.errors import StoreError
from fedvitals.hosts.flower.grid_hooks import MARK
from fedvitals.hosts.flower.tape.records import (
    KINDS,
    LEFT_OUT,
    Outline,
    Tensors,
    array_of,
    json_value,
    record_of,
    tensor_of,
    tensors_of,
    value_from_json,
)

if TYPE_CHECKING:
    from torch import Tensor

STATE = "strategy/"  # prefix of the names of such states
MOST = 1000  # values in a list or a dict that are read
OWN = "flwr.serverapp.strategy"  # where the strategies are that can be recreated by name


def read_attributes(strategy: Any) -> tuple[dict[str, Tensors], Outline, list[str]]:
    """Return states by name, an outline of all attributes, and the names of unreadable ones.

    Arrays are copied.
    """
    states: dict[str, Tensors] = {}
    outline, unknown = Outline(), list[str]()
    for name, value in vars(strategy).items() if strategy is not None else ():
        if name == MARK or callable(value):
            continue
        arrays = _arrays(value)
        if arrays is not None:
            states[STATE + name], outline[name] = arrays
        elif _is_simple(value):
            outline[name] = {"kind": "value", "value": _json_of(value)}
        else:
            unknown.append(name)
    return states, outline, unknown


def restore_attributes(strategy: Any, outline: Outline, states: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Restore the attributes. Each array is a copy, which the strategy may change."""
    for name, attribute in outline.items():
        try:
            if attribute["kind"] == "value":
                value = _value_of_json(attribute["value"])
                if value is not LEFT_OUT:
                    setattr(strategy, name, value)
            else:
                setattr(strategy, name, _value_of_arrays(attribute, states[STATE + name]))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise StoreError(f"The strategy's «{name}» on the tape cannot be read: {error}") from error


def description_of(strategy: Any) -> dict[str, Any]:
    """Return the class and settings from which a strategy can be recreated.

    `foreign`: settings that are not plain values.
    """
    kind = type(strategy)
    settings, foreign = dict[str, Any](), list[str]()
    for name, parameter in inspect.signature(kind.__init__).parameters.items():
        if name == "self" or not hasattr(strategy, name):
            continue
        value = getattr(strategy, name)
        if _is_simple(value):
            settings[name] = _json_of(value)
        elif not (callable(value) and getattr(value, "__module__", "").startswith(OWN)):
            foreign += [name] if parameter.default is not value else []
    return {"module": kind.__module__, "class": kind.__qualname__, "settings": settings, "foreign": foreign}


def rebuild_strategy(description: Mapping[str, Any]) -> Any:
    """Return a strategy of Flower's own from its class and settings; None for the user's own."""
    module, name = str(description.get("module", "")), str(description.get("class", ""))
    if not (module == OWN or module.startswith(OWN + ".")) or description.get("foreign"):
        return None
    import flwr.serverapp.strategy as own  # noqa: PLC0415 - the one module whose classes are made by name

    kind = getattr(own, name, None) if name in own.__all__ else None
    if not isinstance(kind, type):
        return None
    known = inspect.signature(kind).parameters
    settings = {
        key: _value_of_json(value) for key, value in dict(description.get("settings", {})).items() if key in known
    }
    return kind(**settings)


# -- one attribute ----------------------------------------------------------------------------------------------------


def _arrays(value: Any) -> tuple[Tensors, Outline] | None:
    """Return copies of the arrays with their outline, or None.

    The value must have one of the forms in which strategies keep arrays.
    """
    import torch  # noqa: PLC0415 - a server without a tape does not need it

    if isinstance(value, ArrayRecord):
        tensors, outline = tensors_of(value)
        return tensors, {**outline, "kind": "record"}
    if isinstance(value, np.ndarray | torch.Tensor):
        return _arrays_outline("array", {"": value})
    if isinstance(value, Mapping) and value and all(isinstance(key, str) for key in value):
        return _arrays_outline("dict", value) if _all_arrays([*value.values()]) else None
    if isinstance(value, list | tuple) and value and _all_arrays(value):
        return _arrays_outline(
            "tuple" if isinstance(value, tuple) else "list", {str(i): v for i, v in enumerate(value)}
        )
    return None


def _all_arrays(values: Sequence[Any]) -> bool:
    """Return whether all are arrays.

    NumPy scalars count, since they were arrays of no dimension before a computation.
    """
    import torch  # noqa: PLC0415

    any_array = any(isinstance(value, np.ndarray | torch.Tensor) for value in values)
    return any_array and all(
        isinstance(v, np.ndarray | np.generic | torch.Tensor) and not _holds_objects(v) for v in values
    )


def _holds_objects(value: Any) -> bool:
    return isinstance(value, np.ndarray | np.generic) and value.dtype.hasobject


def _arrays_outline(kind: str, values: Mapping[str, Any]) -> tuple[Tensors, Outline] | None:
    import torch  # noqa: PLC0415

    tensors, arrays = Tensors(), []
    for name, value in values.items():
        if _holds_objects(value):
            return None
        if isinstance(value, torch.Tensor):
            how: dict[str, Any] | None = {"torch": True}
            tensors[name] = value.detach().cpu().clone()
        else:
            tensors[name], how = _copied(np.array(value, order="C"))
            how = {**(how or {}), "scalar": True} if isinstance(value, np.generic) else how
        arrays.append([name, name] if how is None else [name, name, how])
    return tensors, {"kind": kind, "arrays": arrays}


def _copied(own: np.ndarray[Any, Any]) -> tuple[Tensor, dict[str, Any] | None]:
    """Return a tensor of an array that nobody else holds."""
    import torch  # noqa: PLC0415

    return (torch.from_numpy(own), None) if own.dtype.str in KINDS else tensor_of(Array(own))


def _value_of_arrays(outline: Outline, tensors: Mapping[str, Tensor]) -> Any:
    if outline["kind"] == "record":
        return record_of(outline, tensors)
    values: dict[str, Any] = {}
    for name, key, *how in outline["arrays"]:
        own = dict(how[0]) if how else {}
        if own.pop("torch", False):
            values[name] = tensors[key].clone()
        else:
            is_scalar = own.pop("scalar", False)
            array = array_of(tensors[key], own or None).numpy()
            values[name] = array[()] if is_scalar else array
    match outline["kind"]:
        case "array":
            return values[""]
        case "dict":
            return values
        case "list":
            return [*values.values()]
        case "tuple":
            return tuple(values.values())
    raise ValueError(f"a kind that nobody knows: {outline['kind']}")


def _is_simple(value: Any) -> bool:
    if isinstance(value, bool | int | float | str | bytes | np.generic | None):
        return not (isinstance(value, np.generic) and value.dtype.hasobject)
    if isinstance(value, list | tuple) and len(value) <= MOST:
        return all(_is_simple(entry) for entry in value)
    if isinstance(value, dict) and len(value) <= MOST:
        return all(_is_simple(key) and _is_simple(entry) for key, entry in value.items())
    return False


def _json_of(value: Any) -> Any:
    if isinstance(value, np.generic):
        return {"scalar": value.dtype.str, "bytes_of": json_value(value.tobytes())}
    if isinstance(value, tuple):
        return {"tuple": [_json_of(entry) for entry in value]}
    if isinstance(value, list):
        return [_json_of(entry) for entry in value]
    if isinstance(value, dict):
        return {"dict": [[_json_of(key), _json_of(entry)] for key, entry in value.items()]}
    return json_value(value)


def _value_of_json(document: Any) -> Any:
    if isinstance(document, list):
        return [_value_of_json(entry) for entry in document]
    if isinstance(document, dict):
        if "scalar" in document:
            dtype = np.dtype(str(document["scalar"]))
            if dtype.hasobject:
                raise ValueError("numbers have no objects in them")
            return np.frombuffer(value_from_json(document["bytes_of"]), dtype)[0]
        if "tuple" in document:
            return tuple(_value_of_json(entry) for entry in document["tuple"])
        if "dict" in document:
            return {_value_of_json(key): _value_of_json(entry) for key, entry in document["dict"]}
    return value_from_json(document)
