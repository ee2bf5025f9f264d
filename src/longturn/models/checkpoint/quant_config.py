"""Which format each weight is declared to have, in config.json or in ModelOpt's hf_quant_config.json.

Publishers spell this in three ways: compressed-tensors has groups of targets and a list of ignored modules, ModelOpt
has one algorithm and exclusions or, as `MIXED_PRECISION`, an entry for each layer, and MiniMax-M3.1-Flash has one
method with another for experts. Entries may name the *fused* modules of an engine (`qkv_proj`) where the checkpoint
has its parts, or the other way round; both are resolved here.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from longturn.errors import ModelError


class Format(StrEnum):
    """How a weight is stored."""

    PLAIN = "plain"
    """bf16, fp16 or fp32."""
    MXFP8 = "mxfp8"
    NVFP4 = "nvfp4"
    """As compressed-tensors or as ModelOpt writes it: the tensors' names tell."""


FUSED: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj", "index_q_proj", "index_k_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "w13": ("w1", "w3"),
}
"""Names that engines give to weights they join, and the published parts, in their order."""

_MODELOPT = {"NVFP4": Format.NVFP4, "MXFP8": Format.MXFP8}
_PREFIX = "language_model."


@dataclass(frozen=True, slots=True)
class Rule:
    """Modules whose name matches have this format."""

    pattern: re.Pattern[str]
    format: Format


@dataclass(frozen=True, slots=True)
class QuantConfig:
    """Declared formats of modules. The first rule that matches counts."""

    method: str
    """`none`, or the declared method for people to read."""
    rules: tuple[Rule, ...] = ()

    def declared(self, module: str) -> Format | None:
        """Format of a module such as `model.layers.3.self_attn.q_proj`; None where nothing is said about it.

        Tries the name, then the fused module that it is part of, then its parts if it is fused, then its parents.

        Raises:
            ModelError: the parts of a fused module have different formats.
        """
        if (found := self._match(module)) is not None:
            return found
        parent, _, leaf = module.rpartition(".")
        for fused, parts in FUSED.items():
            if leaf in parts and (found := self._match(f"{parent}.{fused}")) is not None:
                return found
            if leaf == fused:
                formats = {p: f for p in parts if (f := self._match(f"{parent}.{p}")) is not None}
                if len(set(formats.values())) > 1:
                    text = ", ".join(f"{part} {form}" for part, form in formats.items())
                    raise ModelError(f"{module} cannot be one weight: its parts have different formats ({text})")
                if formats:
                    return next(iter(formats.values()))
        while parent:
            if (found := self._match(parent)) is not None:
                return found
            parent = parent.rpartition(".")[0]
        return None

    def _match(self, module: str) -> Format | None:
        # Some publishers name modules with the prefix of the whole model, some without.
        names = {module, module.removeprefix(_PREFIX), _PREFIX + module.removeprefix(_PREFIX)}
        for rule in self.rules:
            if any(rule.pattern.fullmatch(name) for name in names):
                return rule.format
        return None


def quant_config(declared: Mapping[str, Any] | None) -> QuantConfig:
    """Read a declaration.

    Args:
        declared: the value of `quantization_config`, or the contents of hf_quant_config.json; None if there is none.

    Raises:
        ModelError: the method or one of its formats is unknown.
    """
    if not declared:
        return QuantConfig("none")
    if "quantization" in declared:  # hf_quant_config.json wraps what config.json has flat
        declared = {"quant_method": "modelopt", **_mapping(declared["quantization"], "quantization")}
    method = declared.get("quant_method")
    if method == "mxfp8":
        return _minimax(declared)
    if isinstance(method, str) and method.startswith("modelopt"):
        return _modelopt(declared)
    if method == "compressed-tensors":
        return _compressed_tensors(declared)
    raise ModelError(
        f"quantisation '{method or 'unnamed'}' is not supported (supported: mxfp8, modelopt, compressed-tensors)"
    )


def _minimax(declared: Mapping[str, Any]) -> QuantConfig:
    """M3.1-Flash: MXFP8, and `moe_quant_algo` for routed experts."""
    rules = []
    experts = declared.get("moe_quant_algo")
    if experts is not None:
        rules.append(Rule(re.compile(r".*\.experts\.\d+\.\w+"), _algorithm(str(experts), "moe_quant_algo")))
        form = declared.get("moe_quant_format", "nvfp4-pack-quantized")
        if form != "nvfp4-pack-quantized":
            raise ModelError(f"moe_quant_format '{form}' is not supported (supported: nvfp4-pack-quantized)")
    rules.append(Rule(re.compile(r".*"), Format.MXFP8))
    return QuantConfig(f"mxfp8{' + ' + str(experts).lower() if experts else ''}", tuple(rules))


def _modelopt(declared: Mapping[str, Any]) -> QuantConfig:
    algorithm = declared.get("quant_algo")
    layers = _mapping(declared.get("quantized_layers") or {}, "quantized_layers")
    excluded = _texts(declared.get("exclude_modules") or declared.get("ignore") or [], "exclude_modules")
    rules = [Rule(re.compile(fnmatch.translate(glob)), Format.PLAIN) for glob in excluded]
    if algorithm == "MIXED_PRECISION":
        if not layers:
            raise ModelError("quantisation MIXED_PRECISION has no quantized_layers")
        for name, value in layers.items():
            entry = _mapping(value, f"quantized_layers.{name}")
            group = entry.get("group_size")
            form = _algorithm(str(entry.get("quant_algo")), f"quantized_layers.{name}")
            if form == Format.NVFP4 and group not in (None, 16):
                raise ModelError(f"quantized_layers.{name}: NVFP4 groups of {group} are not supported (supported: 16)")
            rules.append(Rule(re.compile(re.escape(name)), form))
    else:
        rules.append(Rule(re.compile(r".*"), _algorithm(str(algorithm), "quant_algo")))
    return QuantConfig(f"modelopt {algorithm}", tuple(rules))


def _algorithm(name: str, where: str) -> Format:
    if name not in _MODELOPT:
        raise ModelError(f"{where}: quantisation '{name}' is not supported (supported: {', '.join(_MODELOPT)})")
    return _MODELOPT[name]


def _compressed_tensors(declared: Mapping[str, Any]) -> QuantConfig:
    rules = [Rule(_target(text), Format.PLAIN) for text in _texts(declared.get("ignore") or [], "ignore")]
    groups = _mapping(declared.get("config_groups") or {}, "config_groups")
    if not groups:
        raise ModelError("quantisation compressed-tensors has no config_groups")
    formats: list[Format] = []
    wide: list[Rule] = []
    for name, value in groups.items():
        group = _mapping(value, f"config_groups.{name}")
        form = _scheme(name, _mapping(group.get("weights") or {}, f"config_groups.{name}.weights"))
        formats.append(form)
        for target in _texts(group.get("targets") or [], f"config_groups.{name}.targets"):
            # A class of modules says less than a name does, so it counts last.
            (wide if target == "Linear" else rules).append(Rule(_target(target), form))
    return QuantConfig(f"compressed-tensors {' + '.join(dict.fromkeys(formats))}", (*rules, *wide))


def _scheme(name: str, weights: Mapping[str, Any]) -> Format:
    kind = (weights.get("type"), weights.get("num_bits"), weights.get("group_size"))
    if kind == ("float", 4, 16):
        return Format.NVFP4
    if kind == ("float", 8, 32):
        return Format.MXFP8
    raise ModelError(
        f"config_groups.{name}: weights of type {kind[0]}, {kind[1]} bits, groups of {kind[2]} are not supported "
        "(supported: float 4 bits groups of 16, float 8 bits groups of 32)"
    )


def _target(text: str) -> re.Pattern[str]:
    if text == "Linear":
        return re.compile(r".*")
    if text.startswith("re:"):
        try:
            return re.compile(f"(?:{text[3:]}).*")  # matched from the start only, as compressed-tensors does
        except re.error as error:
            raise ModelError(f"quantisation target '{text}' is no regular expression ({error})") from error
    return re.compile(re.escape(text))


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ModelError(f"{where} must be a mapping, not {value!r}")
    return value


def _texts(value: Any, where: str) -> Sequence[str]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ModelError(f"{where} must be a list of names, not {value!r}")
    return value
