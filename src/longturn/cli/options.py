"""Flags of the configuration tree, made from the tree itself.

Every setting `section.field` has the flag `--section-field`, and some have the name that users of other servers type
from habit. Values are taken in this order, later ones win: defaults, `--config FILE.yaml`, flags, `--set a.b=c`.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import json
import math
import textwrap
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from longturn import config as config_module
from longturn.cli.setting_values import byte_count, read_settings, set_value
from longturn.config import EngineConfig, config_from_dict
from longturn.errors import ConfigError

ALIASES: dict[str, tuple[str, ...]] = {
    "model.path": ("--model",),
    "model.served_name": ("--served-model-name",),
    "model.weights": ("--weights",),
    "model.max_context_tokens": ("--max-model-len",),
    "cache.memory_bytes": ("--kv-cache-memory-bytes",),
    "cache.dtype": ("--kv-cache-dtype",),
    "cache.prefix_caching": ("--enable-prefix-caching",),
    "scheduler.max_running": ("--max-num-seqs",),
    "scheduler.step_tokens": ("--max-num-batched-tokens",),
    "executor.device": ("--device",),
    "executor.threads": ("--threads",),
    "server.host": ("--host",),
    "server.port": ("--port",),
    "server.api_keys": ("--api-key",),
    "cache.events_endpoint": ("--kv-events-endpoint",),
    "cache.events_replay_endpoint": ("--kv-events-replay-endpoint",),
    "server.api_keys_file": ("--api-keys-file",),
    "server.ssl_certfile": ("--ssl-certfile",),
    "server.ssl_keyfile": ("--ssl-keyfile",),
    "server.log_level": ("--log-level",),
    "server.log_format": ("--log-format",),
    "server.traces_endpoint": ("--otlp-traces-endpoint",),
    "server.cors_origins": ("--allowed-origin",),
    "server.model_aliases": ("--model-alias",),
}

_DEST = "setting:"
_PRIVATE = frozenset(
    {"server.api_keys", "server.api_keys_file", "server.ssl_certfile", "server.ssl_keyfile", "model.path", "cache_dir"}
)


@dataclass(frozen=True, slots=True)
class Setting:
    """One leaf of the configuration tree."""

    name: str
    """Dotted: `cache.memory_bytes`."""
    hint: Any
    """Its type, without `| None`."""
    default: Any
    help: str


@cache
def settings() -> tuple[Setting, ...]:
    """All leaves of `EngineConfig`, in the order of their definition."""
    return tuple(_leaves(EngineConfig, ""))


def _leaves(cls: type, prefix: str) -> Iterator[Setting]:
    hints = get_type_hints(cls)
    texts = _field_texts().get(cls.__name__, {})
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        if get_origin(hint) in (Union, types.UnionType):
            hint = next(arg for arg in get_args(hint) if arg is not type(None))
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            yield from _leaves(hint, f"{prefix}{field.name}.")
        else:
            yield Setting(f"{prefix}{field.name}", hint, field.default, texts.get(field.name, ""))


@cache
def _field_texts() -> dict[str, dict[str, str]]:
    """Class name -> field name -> the docstring under the field; empty where the source is not at hand."""
    try:
        tree = ast.parse(inspect.getsource(config_module))
    except OSError:
        return {}
    found: dict[str, dict[str, str]] = {}
    for node in tree.body:
        if not isinstance(node, ast.ClassDef):
            continue
        for field, text in zip(node.body, node.body[1:], strict=False):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(text, ast.Expr)
                and isinstance(text.value, ast.Constant)
            ):
                found.setdefault(node.name, {})[field.target.id] = inspect.cleandoc(str(text.value.value))
    return found


def add_config_flags(parser: argparse.ArgumentParser, *, positional: bool = True) -> None:
    """Add a flag for every setting, `--config`, `--set` and (unless `positional` is False) the model's directory."""
    if positional:
        parser.add_argument(
            "model_dir", nargs="?", metavar="DIR", help="model directory or GGUF file; the embedded model if left out"
        )
    add_file_and_sets(parser)
    groups: dict[str, Any] = {}
    for setting in settings():
        section = setting.name.rpartition(".")[0] or "general"
        if section not in groups:
            groups[section] = parser.add_argument_group(section)
        _add_flag(groups[section], setting)


def add_file_and_sets(group: Any) -> None:
    """Add `--config` and `--set` alone, to a parser or a group of one."""
    group.add_argument("--config", metavar="FILE", help="YAML file with settings, nested as in `--set`")
    group.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="A.B=C",
        dest="sets",
        help="any setting by its name, such as cache.prefix_caching=false; may be repeated",
    )


def _add_flag(group: Any, setting: Setting) -> None:
    flags = [*ALIASES.get(setting.name, ()), "--" + setting.name.replace(".", "-").replace("_", "-")]
    default = _default_text(setting)
    help_text = textwrap.shorten(setting.help, 300).replace("%", "%%") + (f" [{default}]" if default else "")
    common: dict[str, Any] = {"dest": _DEST + setting.name, "default": argparse.SUPPRESS, "help": help_text}
    if setting.hint is bool:
        group.add_argument(*flags, action=argparse.BooleanOptionalAction, **common)
    elif get_origin(setting.hint) is tuple:
        group.add_argument(*flags, action="append", metavar="TEXT", **common)
    elif get_origin(setting.hint) is Literal:
        group.add_argument(*flags, choices=get_args(setting.hint), **common)
    elif setting.hint is int and setting.name.endswith("_bytes"):
        group.add_argument(*flags, type=byte_count, metavar="BYTES", **common)
    else:
        metavar = {int: "N", float: "X"}.get(setting.hint, "TEXT")
        group.add_argument(*flags, type=setting.hint, metavar=metavar, **common)


def _default_text(setting: Setting) -> str:
    if setting.default is None or setting.default == ():
        return ""
    if setting.name.endswith("_bytes") and setting.default and setting.default % (1 << 20) == 0:
        return f"{setting.default >> 20}Mi"
    return str(setting.default).lower() if setting.hint is bool else str(setting.default)


def config_from_args(args: argparse.Namespace) -> EngineConfig:
    """The configuration that the parsed flags stand for.

    Raises:
        ConfigError: an unreadable file, an unknown setting, a wrong type, a value out of range, or two models.
    """
    tree: dict[str, Any] = {} if args.config is None else _settings_of(Path(args.config))
    for dest, value in vars(args).items():
        if dest.startswith(_DEST):
            _put(tree, dest.removeprefix(_DEST), value)
    model_dir = getattr(args, "model_dir", None)
    if model_dir is not None:
        named = getattr(args, _DEST + "model.path", None)
        if named not in (None, model_dir):
            raise ConfigError(f"two models: '{model_dir}' and --model '{named}'")
        _put(tree, "model.path", model_dir)
    for assignment in args.sets:
        name, equals, text = assignment.partition("=")
        if not equals or not name:
            raise ConfigError(f"--set needs NAME=VALUE, not '{assignment}'")
        _put(tree, name.strip(), set_value(name, text))
    return config_from_dict(EngineConfig, tree)


def _settings_of(path: Path) -> dict[str, Any]:
    """The settings of a file, each of them checked, so that a complaint names the file and not the flags beside it."""
    tree = read_settings(path)
    try:
        config_from_dict(EngineConfig, tree)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    return tree


def config_from_options(options: Iterable[str], flag: str, *, model_dir: str | None = None) -> EngineConfig:
    """The configuration that `NAME=VALUE` texts stand for, names in full or by their last part.

    Raises:
        ConfigError: as `config_from_args`, and for an ambiguous name; the line begins with `flag`.
    """
    sets = []
    for option in options:
        name, equals, value = option.partition("=")
        if not equals or not name.strip():
            raise ConfigError(f"{flag} needs NAME=VALUE, not '{option}'")
        sets.append(f"{full_name(name.strip(), flag)}={value}")
    return config_from_args(argparse.Namespace(config=None, model_dir=model_dir, sets=sets))


def full_name(name: str, flag: str) -> str:
    """The dotted name of a setting that is named by it, or by its last part.

    Raises:
        ConfigError: no setting has that name, or several have.
    """
    last = name.replace("-", "_")
    found = [full for full in (one.name for one in settings()) if full == name or full.rpartition(".")[2] == last]
    if len(found) > 1:
        raise ConfigError(f"{flag}: '{name}' is ambiguous ({', '.join(found)})")
    if not found:
        raise ConfigError(f"{flag}: unknown setting '{name}'")
    return found[0]


def check_number(flag: str, value: float, least: int) -> None:
    """Raises ConfigError unless the value of a verb's own flag is finite and at least `least`."""
    if not math.isfinite(value):
        raise ConfigError(f"{flag} must be a number of at least {least}, not {value}")
    if value < least:
        raise ConfigError(f"{flag} must be at least {least}, not {value}")


def given(args: argparse.Namespace, name: str) -> Any:
    """The value that a setting's flag was given, or None: for verbs that use a flag for themselves too."""
    return getattr(args, _DEST + name, None)


def repeat_flags(args: argparse.Namespace) -> list[str]:
    """Flags that give the same configuration again, less what must not be published: keys and this machine's paths."""
    flags = ["--config", Path(args.config).name] if args.config is not None else []
    pairs = [
        (dest.removeprefix(_DEST), json.dumps(value)) for dest, value in vars(args).items() if dest.startswith(_DEST)
    ]
    pairs += [(name.strip(), text) for name, _, text in (assignment.partition("=") for assignment in args.sets)]
    for name, text in pairs:
        if name not in _PRIVATE:
            flags += ["--set", f"{name}={text}"]
    return flags


def _put(tree: dict[str, Any], dotted: str, value: Any) -> None:
    *path, leaf = dotted.split(".")
    for part in path:
        tree = tree.setdefault(part, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"unknown setting '{dotted}': '{part}' has no settings of its own")
    tree[leaf] = value
