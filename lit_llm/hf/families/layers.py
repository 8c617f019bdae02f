"""Settings that may differ between layers: `layer_types`, sliding windows. A window of W: the position and W - 1 before."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lit_llm.hf.fields import Fields, shown
from lit_llm.models.config import LayerSettings
from lit_llm.models.gpt import GPTConfig

SLIDING, FULL = "sliding_attention", "full_attention"


def layer_settings(config: GPTConfig) -> list[LayerSettings]:
    return [config.layer(i) for i in range(config.n_layer)]


def with_patterns(by_layer: Mapping[str, Sequence[Any]], block_size: int) -> dict[str, Any]:
    """Return {setting of GPTConfig: value} from `by_layer`, {setting: list of its value in each layer}.

    A value that all layers share becomes the setting's value. Otherwise the entry `layers` of the result has, for the setting,
    the shortest list that gives all values when repeated. A window of `block_size` or more becomes None: no sequence is longer.
    """
    settings: dict[str, Any] = {}
    patterns: dict[str, list[Any]] = {}
    for name, values in by_layer.items():
        if name == "window":
            values = [None if value is None or value >= block_size else value for value in values]
        lengths = range(1, len(values) + 1)
        length = next(k for k in lengths if all(value == values[i % k] for i, value in enumerate(values)))
        if length > 1 or (name == "rope" and not values[0]):
            patterns[name] = list(values[:length])
        elif name != "rope":
            settings[name] = values[0]
    return settings | ({"layers": patterns} if patterns else {})


@dataclass(frozen=True)
class Window:
    """`Part` of a family: translates the key `sliding_window`, the window of all layers. Null: none; missing: `default`."""

    default: int | None = None

    def read(self, fields: Fields) -> dict[str, Any]:
        default = None if fields.has("sliding_window") else self.default
        window = fields.optional_size("sliding_window", default)
        return {"layers": {"window": [window]}}

    def write(self, config: GPTConfig) -> dict[str, Any]:
        return {"sliding_window": config.layer(0).window}


def every(count: int) -> Callable[[int], list[str]]:
    """Return a function from n to the kinds of n layers: each `count`-th layer has full attention, others sliding windows."""
    return lambda n_layer: [FULL if (i + 1) % count == 0 else SLIDING for i in range(n_layer)]


def layer_kinds(fields: Fields, default: Callable[[int], list[str]]) -> list[str]:
    """Return each layer's kind, `SLIDING` or `FULL`: the key `layer_types`, or without it `default(number of layers)`."""
    n_layer = fields.size("num_hidden_layers")
    kinds = fields.raw("layer_types")
    if kinds is None:
        return default(n_layer)
    if not isinstance(kinds, list) or len(kinds) != n_layer or any(kind not in (SLIDING, FULL) for kind in kinds):
        fields.refuse(
            f"'layer_types' is {shown(kinds)}, but lit_llm supports only a list of {SLIDING} and {FULL}, one for each layer"
        )
        return [FULL] * n_layer
    return kinds


@dataclass(frozen=True)
class WindowByKind:
    """`Part` of a family: translates the window of layers of kind `SLIDING`. Missing keys mean `default_kinds(number of
    layers)` and a window of `default`."""

    default_kinds: Callable[[int], list[str]]
    default: int = 4096

    def read(self, fields: Fields) -> dict[str, Any]:
        kinds = layer_kinds(fields, self.default_kinds)
        window = fields.optional_size("sliding_window", None if fields.has("sliding_window") else self.default)
        if fields.has("sliding_window") and fields.raw("sliding_window") is None and SLIDING in kinds:
            fields.refuse(f"'sliding_window' is null, but 'layer_types' has {SLIDING}")
        return {"layers": {"window": [window if kind == SLIDING else None for kind in kinds]}}

    def write(self, config: GPTConfig) -> dict[str, Any]:
        windows = [layer.window for layer in layer_settings(config)]
        window = next((window for window in windows if window is not None), config.block_size)
        return {"layer_types": kinds_of(config), "sliding_window": window}


def kinds_of(config: GPTConfig) -> list[str]:
    """Return each layer's kind: `SLIDING` if the layer has a window, else `FULL`. If no layer has one, but layers differ in
    rotary settings, layers with the rotary settings of the first layer are `SLIDING`.
    """
    layers = layer_settings(config)
    if any(layer.window is not None for layer in layers):
        return [FULL if layer.window is None else SLIDING for layer in layers]
    ropes = [(layer.rope_theta, layer.rope_scaling) for layer in layers]
    varied = any(rope != ropes[0] for rope in ropes)
    return [SLIDING if varied and rope == ropes[0] else FULL for rope in ropes]


@dataclass(frozen=True)
class OptionalWindow:
    """`Part` of a family: translates a window that the key `use_sliding_window` turns on, in the layers that `layer_types`
    lists or, without this key, in the layers from number `max_window_layers` on."""

    def read(self, fields: Fields) -> dict[str, Any]:
        first = fields.number("max_window_layers", 28)
        kinds = layer_kinds(fields, lambda n_layer: [SLIDING if i >= first else FULL for i in range(n_layer)])
        window = fields.optional_size("sliding_window", 4096)
        if not fields.flag("use_sliding_window", False):
            return {}
        return {"layers": {"window": [window if kind == SLIDING else None for kind in kinds]}}

    def write(self, config: GPTConfig) -> dict[str, Any]:
        windows = [layer.window for layer in layer_settings(config)]
        window = next((window for window in windows if window is not None), None)
        return {
            "use_sliding_window": window is not None,
            "sliding_window": window,
            "layer_types": [FULL if each is None else SLIDING for each in windows],
            "max_window_layers": config.n_layer if window is None else windows.index(window),  # for transformers below 4.53
        }
