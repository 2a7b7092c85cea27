# SPDX-License-Identifier: Apache-2.0
"""The models in NVFlare's messages as arrays by name.

A message holds a DXO: weights, or the difference from the weights that were sent. Entries that are encrypted, or on
disk until needed, are not arrays, and are left alone.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.shareable import Shareable
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.abstract.model import ModelLearnableKey

from fedvitals.hosts.array_models import BUFFERS, Values

WEIGHT_KINDS = (DataKind.WEIGHTS, DataKind.WEIGHT_DIFF)


@dataclass(frozen=True, slots=True)
class Arrays:
    """The trained arrays of a message. `is_difference`: whether they are an update rather than a model.

    `unread`: the number of entries that are not readable arrays.
    """

    values: dict[str, Values]
    is_difference: bool
    unread: int = 0


def dxo_of(message: Any) -> DXO | None:
    """Return the DXO of a successful message; None if it has none or reports a failure."""
    if not isinstance(message, Shareable) or message.get_return_code() != ReturnCode.OK:
        return None
    try:
        return from_shareable(message)
    except ValueError:
        return None


def arrays_of(message: Any) -> Arrays | None:
    """Return the arrays of a message; None if it holds no model."""
    dxo = dxo_of(message)
    if dxo is None or dxo.data_kind not in WEIGHT_KINDS or not isinstance(dxo.data, Mapping):
        return None
    return _arrays(dxo.data, is_difference=dxo.data_kind == DataKind.WEIGHT_DIFF)


def arrays_of_model(model: Any) -> Arrays | None:
    """Return the arrays of NVFlare's model, or of the result of an aggregation; None if it is neither."""
    if isinstance(model, FLModel):
        weights = model.params
        is_difference = model.params_type == ParamsType.DIFF
        return _arrays(weights, is_difference=is_difference) if isinstance(weights, Mapping) else None
    if isinstance(model, Shareable):
        return arrays_of(model)
    weights = model.get(ModelLearnableKey.WEIGHTS) if isinstance(model, Mapping) else None
    return _arrays(weights, is_difference=False) if isinstance(weights, Mapping) else None


def _arrays(entries: Mapping[Any, Any], *, is_difference: bool) -> Arrays:
    read = {str(name): _values(entry) for name, entry in entries.items()}
    trained = {
        name: values
        for name, values in read.items()
        if values is not None and np.issubdtype(values.dtype, np.floating) and not BUFFERS.search(name)
    }
    return Arrays(trained, is_difference, sum(values is None for values in read.values()))


def _values(entry: Any) -> Values | None:
    """Return an entry as an array over its own memory, if it is an array or a tensor."""
    if isinstance(entry, np.ndarray):
        return entry
    if isinstance(entry, np.floating | float):
        return np.asarray(entry, np.float64)
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(entry, torch.Tensor):
        return None
    tensor = entry.detach()
    tensor = tensor.cpu() if tensor.device.type != "cpu" else tensor
    values: Values = (tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor).numpy()
    return values


def bytes_of(message: Any) -> int:
    """Return the bytes of a message's arrays, buffers included; 0 if it holds no model."""
    dxo = dxo_of(message)
    if dxo is None or not isinstance(dxo.data, Mapping):
        return 0
    return sum(int(getattr(entry, "nbytes", 0) or 0) for entry in dxo.data.values())


def ends_of_update(start: Mapping[str, Values], sent: Arrays) -> tuple[dict[str, Values], dict[str, Values]]:
    """Return subtrahend and minuend whose difference is the client's update.

    Layers that the client left out (a filter may hold some back) count as unchanged.
    """
    if sent.is_difference:
        known = {name: sent.values.get(name, np.zeros_like(before)) for name, before in start.items()}
        return {}, known if set(sent.values) <= set(start) and start else dict(sent.values)
    if not start or not set(sent.values) <= set(start):
        return dict(start), dict(sent.values)
    return dict(start), {name: sent.values.get(name, before) for name, before in start.items()}


def added(start: Mapping[str, Values], change: Mapping[str, Values]) -> dict[str, Values]:
    """Return a model after a change, as FedAvg computes it."""
    return {name: before + change[name] if name in change else before for name, before in start.items()}
