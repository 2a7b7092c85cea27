# SPDX-License-Identifier: Apache-2.0
"""Training scripts that use NVFlare's Client API: `flare.receive` begins a task, `flare.send` returns its telemetry.

The methods of the Client API's classes are redirected to `receive` and `send`, in the site's own process by its
component, and in a process that the site starts by `hosts/site/sitecustomize.py`. The model that a script receives and
sends stays the same object; while it is sent, its meta has one more entry, which the site's component removes again.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

from nvflare.app_common.abstract.fl_model import FLModel, ParamsType

from fedvitals.hosts.nvflare import models
from fedvitals.hosts.nvflare.envelope import KEY
from fedvitals.hosts.nvflare.site.settings import SiteSettings
from fedvitals.hosts.nvflare.site.task import SiteTask
from fedvitals.hosts.own_failures import guarded
from fedvitals.transport.privacy import WORDS

MARK = "_fedvitals"  # attribute: of a Client API its open task, of a method that it is redirected
SETTINGS = "_fedvitals_settings"  # attribute of a Client API's class, set by its site's component


def watch_client_api(api_class: Any, settings: SiteSettings) -> None:
    """Redirect the methods of a Client API's class in this process."""
    setattr(api_class, SETTINGS, settings)
    for name, handler in (("receive", receive), ("send", send)):
        original = getattr(api_class, name)
        if not hasattr(original, MARK):
            setattr(api_class, name, _as_method(original, handler))


def _as_method(original: Callable[..., Any], handler: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(api: Any, *arguments: Any, **more: Any) -> Any:
        return handler(original, api, *arguments, **more)

    setattr(method, MARK, True)
    return method


def receive(original: Callable[..., Any], api: Any, *arguments: Any, **more: Any) -> Any:
    """Call `receive`, and begin to watch the task that it returns."""
    model = original(api, *arguments, **more)
    guarded("beginning", lambda: _begin(api, model))
    return model


def send(original: Callable[..., Any], api: Any, model: Any, *arguments: Any, **more: Any) -> Any:
    """Call `send`, with the telemetry of the task in the model's meta."""
    header = guarded("writing home", lambda: _finish(api, model))
    if header is None:
        return original(api, model, *arguments, **more)
    model.meta[KEY] = header
    try:
        return original(api, model, *arguments, **more)
    finally:
        model.meta.pop(KEY, None)


def _begin(api: Any, model: Any) -> None:
    opened = getattr(api, MARK, None)
    if opened is not None and opened[0] is model:
        return  # received again, which a script may do
    if opened is not None:
        setattr(api, MARK, None)
        opened[1].close()  # never sent: the task was given up
    if not isinstance(model, FLModel) or not _trains(api):
        return
    settings = _settings(api)
    start = _values(model) if settings.level >= WORDS else None
    task = SiteTask(settings, str(api.get_job_id()), str(api.get_site_name()), model.current_round, start)
    setattr(api, MARK, (model, task, _bytes(model)))


def _finish(api: Any, model: Any) -> dict[str, Any] | None:
    opened = getattr(api, MARK, None)
    if opened is None or not isinstance(model, FLModel) or not isinstance(model.meta, dict):
        return None
    setattr(api, MARK, None)
    _, task, size = opened
    sent = _values(model) if model.params_type in (None, ParamsType.FULL) else None
    header: dict[str, Any] = task.finish(sent, message_bytes=max(size, _bytes(model))).header()
    return header


def _trains(api: Any) -> bool:
    """Return whether this is a training task, in the process that talks to NVFlare (the first of several ranks)."""
    try:
        return bool(api.is_train())
    except RuntimeError:
        return False


def _settings(api: Any) -> SiteSettings:
    known = getattr(type(api), SETTINGS, None)
    return known if isinstance(known, SiteSettings) else SiteSettings.of_trainer(os.environ)


def _values(model: FLModel) -> dict[str, Any] | None:
    arrays = models.arrays_of_model(model)
    return None if arrays is None or arrays.is_difference else arrays.values


def _bytes(model: FLModel) -> int:
    params = model.params if isinstance(model.params, Mapping) else {}
    return sum(int(getattr(entry, "nbytes", 0) or 0) for entry in params.values())
