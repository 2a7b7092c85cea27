# SPDX-License-Identifier: Apache-2.0
"""Load the user's own app from its folder as Flower does: by the components named in its pyproject.toml.

An app does not name its strategy, which is created inside the ServerApp's `main`. So that is called up to the point
where it would start the strategy, and no further.
"""

from __future__ import annotations

import importlib
import sys
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flwr.app import Context, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import Strategy

from fedvitals.errors import ConfigError
from fedvitals.hosts.flower.replaying import replaying

PROJECT = "pyproject.toml"


def is_app(folder: Path) -> bool:
    """Return whether a folder holds a Flower app."""
    return bool(_components(folder))


def client_app(folder: Path) -> ClientApp:
    """Return the ClientApp of the app in a folder."""
    app = _component(folder, "clientapp")
    if not isinstance(app, ClientApp):
        raise ConfigError(
            f"{_components(folder)['clientapp']} in {folder} is a {type(app).__name__}, and no ClientApp."
        )
    return app


def strategy_of(folder: Path, config: Mapping[str, Any], reference: str | None = None) -> Any:
    """Return the app's strategy.

    `reference`: «module:name» of a strategy, or of a function without arguments that creates one. `config`: known
    settings of the run, which override those of the app's pyproject.toml.
    """
    if reference is not None:
        loaded = _load_reference(folder, reference)
        with replaying():
            return loaded() if isinstance(loaded, type) or not hasattr(loaded, "aggregate_train") else loaded
    app = _component(folder, "serverapp")
    known = {**_flat_config(_project(folder).get("config", {})), **config}
    context = Context(run_id=0, node_id=0, node_config={}, state=RecordDict(), run_config=known)
    try:
        with replaying(), _intercept_start():
            app(_NoGrid(), context)
    except _StrategyStarted as started:
        return started.strategy
    except Exception as error:
        raise ConfigError(
            f"The ServerApp in {folder} did not get as far as starting its strategy: {type(error).__name__}: {error}. "
            "Say where one is made: --strategy module:factory."
        ) from error
    raise ConfigError(
        f"The ServerApp in {folder} starts no strategy. Say where one is made: --strategy module:factory."
    )


class _StrategyStarted(BaseException):
    """Raised when the app starts its strategy.

    A BaseException, so that the app's `except Exception` does not catch it.
    """

    def __init__(self, strategy: Any) -> None:
        self.strategy = strategy


class _NoGrid:
    """A grid without nodes."""

    run = None

    def get_node_ids(self) -> list[int]:
        return []

    def __getattr__(self, name: str) -> Any:
        raise ConfigError(f"The app uses the grid's {name} before it starts its strategy; in a replay there is none")


@contextmanager
def _intercept_start() -> Iterator[None]:
    """Inside the block, starting a strategy raises `_StrategyStarted` with it instead."""

    def start(strategy: Any, *_: Any, **__: Any) -> Any:
        raise _StrategyStarted(strategy)

    kinds = [kind for kind in with_subclasses(Strategy) if "start" in vars(kind)]
    before = [vars(kind)["start"] for kind in kinds]
    for kind in kinds:
        kind.start = start  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for kind, own in zip(kinds, before, strict=True):
            kind.start = own  # type: ignore[attr-defined]


def with_subclasses(kind: type) -> Iterator[type]:
    """Yield a class and all classes derived from it."""
    yield kind
    children: list[type] = kind.__subclasses__()
    for child in children:
        yield from with_subclasses(child)


# -- the folder -------------------------------------------------------------------------------------------------------


def _component(folder: Path, name: str) -> Any:
    reference = _components(folder).get(name)
    if not isinstance(reference, str):
        raise ConfigError(
            f"{folder} is no Flower app: its {PROJECT} has no {name} under [tool.flwr.app.components]. --app DIR is "
            "the folder that `flwr run` takes."
        )
    return _load_reference(folder, reference)


def _components(folder: Path) -> dict[str, Any]:
    components = _project(folder).get("components", {})
    return components if isinstance(components, dict) else {}


def _project(folder: Path) -> dict[str, Any]:
    try:
        project = tomllib.loads((folder / PROJECT).read_text(encoding="utf-8"))
        app: dict[str, Any] = project["tool"]["flwr"]["app"]
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError, KeyError, TypeError):
        return {}
    return app if isinstance(app, dict) else {}


def _flat_config(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the settings under Flower's names for those of tables: «a.b»."""
    flat: dict[str, Any] = {}
    for name, value in config.items():
        flat |= _flat_config(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat


def _load_reference(folder: Path, reference: str) -> Any:
    module, _, attribute = reference.partition(":")
    if not module or not attribute:
        raise ConfigError(f"'{reference}' does not say where something is: module:name, as in pkg.server_app:strategy.")
    place = str(folder.absolute())
    sys.path[:] = [place, *(path for path in sys.path if path != place)]
    _forget_others(folder, module.partition(".")[0])
    try:
        loaded: Any = importlib.import_module(module)
        for name in attribute.split("."):
            loaded = getattr(loaded, name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{reference} of the app in {folder} cannot be loaded: {error}") from error
    return loaded


def _forget_others(folder: Path, package: str) -> None:
    """Unload a package of this name that was loaded from another folder, which would run instead of the app's."""
    if not (folder / package).is_dir() and not (folder / f"{package}.py").is_file():
        return
    loaded = getattr(sys.modules.get(package), "__file__", None)
    if loaded is not None and not Path(loaded).resolve().is_relative_to(folder.resolve()):
        for name in [name for name in sys.modules if name == package or name.startswith(package + ".")]:
            del sys.modules[name]
