"""Generates attacks: command lines and files, and for each whether it is right (exit code 0) or a mistake (2)."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from settings import SETTINGS, Setting

from lit_llm.tokenizers import Bytes

TEXT = "".join(f"line {i} of a text that repeats itself, {i * i} and {i % 7}\n" for i in range(60))
RECIPE = """\
model: {n_layer: 1, n_head: 2, n_embd: 16, block_size: 16}
data:
  class_path: TextFiles
  init_args: {paths: text.txt, tokenizer: Bytes, micro_batch_size: 2, global_batch_size: 4}
schedule: {class_path: Cosine, init_args: {warmup_steps: 1}}
validation: {every_n_steps: 2}
checkpoint: {every_n_steps: 2}
trainer: {max_steps: 3, log_every_n_steps: 1, accelerator: cpu, limit_val_batches: 1}
"""
BYSTANDERS = {"notes.md": b"not the run's\n", "runs/other/config.yaml": b"kept: true\n", "runs/other/weights.bin": b"\0\1\2"}
"""Files that no attack may change."""


@dataclass(frozen=True)
class Case:
    """One attack.

    Attributes:
        words: the arguments of `python -m lit_llm`.
        files: written before, beside recipe.yaml, text.txt and the bystanders.
        right: whether exit code 0 is right; otherwise it is 2.
        names: each must be in the message of a mistake; in a tuple, one of its words.
        family: the kind of attack.
    """

    words: list[str]
    right: bool
    family: str
    names: list[str | list[str]] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    """Latin-1 text, so that any bytes can be written."""
    setup: list[list[str]] = field(default_factory=list)
    """Commands that run before."""
    fault: tuple[str, str] | None = None
    """Fault of the disk, and the kind of file at whose first write it begins (`faults`)."""
    then: list[str] = field(default_factory=list)
    """A command to run after it, without the fault."""


# -- ways of giving a value ---------------------------------------------------------------------------------------------


def as_yaml(value: Any) -> str:
    """A value as YAML, in flow style."""
    if isinstance(value, float) and not math.isfinite(value):
        return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
    if isinstance(value, list):
        return f"[{', '.join(map(as_yaml, value))}]"
    return json.dumps(value)


def as_word(value: Any) -> str:
    """A value as on the command line."""
    return value if isinstance(value, str) else as_yaml(value)


def nested(key: str, text: str) -> str:
    """A dotted key and the YAML of its value, as flow mappings. Arguments of classes are inside `init_args`."""
    group, _, name = key.partition(".")
    if not name:
        return f"{group}: {text}\n"
    if group in ("model", "lora", "loss", "compute", "trainer"):
        return f"{group}: {{{name}: {text}}}\n"
    return f"{group}: {{init_args: {{{name}: {text}}}}}\n"


def flag(key: str, value: Any) -> tuple[list[str], dict[str, str]]:
    return [f"--{key}={as_word(value)}"], {}


def two_words(key: str, value: Any) -> tuple[list[str], dict[str, str]]:
    return [f"--{key}", as_word(value)], {}


def dashes(key: str, value: Any) -> tuple[list[str], dict[str, str]]:
    return [f"--{key.replace('_', '-')}={as_word(value)}"], {}


def with_init_args(key: str, value: Any) -> tuple[list[str], dict[str, str]]:
    group, dot, name = key.partition(".")
    plain = not dot or group in ("model", "lora", "loss", "compute", "trainer")
    return [f"--{key}={as_word(value)}" if plain else f"--{group}.init_args.{name}={as_word(value)}"], {}


def dict_flag(key: str, value: Any) -> tuple[list[str], dict[str, str]]:
    group, dot, _ = key.partition(".")
    if not dot:
        return flag(key, value)
    return [f"--{group}={nested(key, as_yaml(value)).partition(': ')[2].strip()}"], {}


def overlay(key: str, value: Any) -> tuple[list[str], dict[str, str]]:
    return ["--config=overlay.yaml"], {"overlay.yaml": nested(key, as_yaml(value))}


def json_overlay(key: str, value: Any) -> tuple[list[str], dict[str, str]]:
    if as_yaml(value).strip("[]-").startswith("."):  # JSON has no nan and no inf
        return overlay(key, value)
    group, dot, name = key.partition(".")
    plain = group in ("model", "lora", "loss", "compute", "trainer")
    content = {group: value if not dot else {name: value} if plain else {"init_args": {name: value}}}
    return ["--config=overlay.json"], {"overlay.json": json.dumps(content)}


def with_base(key: str, value: Any) -> tuple[list[str], dict[str, str]]:
    return ["--config=top.yaml"], {"below.yaml": nested(key, as_yaml(value)), "top.yaml": "base: below.yaml\n"}


WAYS: list[Callable[[str, Any], tuple[list[str], dict[str, str]]]] = [
    flag, two_words, dashes, with_init_args, dict_flag, overlay, json_overlay, with_base,
]  # fmt: skip


def setting_case(rng: random.Random, setting: Setting, value: Any, right: bool, family: str) -> Case:
    # Flags are the last source: a class that they choose drops arguments of another class from files.
    ways = WAYS[:5] if setting.needs else WAYS
    if setting.kind == "text" and not isinstance(value, str):
        ways = WAYS[5:]  # as a flag it is text
    way = rng.choice(ways)
    if way is two_words and as_word(value).startswith("-"):
        way = flag  # --key -x reads as two flags
    words, files = way(setting.key, value)
    first = [] if setting.key in ("run_dir", "resume") else ["--run_dir=runs/mine"]
    names = [[setting.key.rpartition(".")[2], setting.key.rpartition(".")[2].replace("_", "-")]]
    return Case(["fit", "--config=recipe.yaml", *first, *setting.needs, *words], right, family, names, files)


# -- families -----------------------------------------------------------------------------------------------------------


def types(rng: random.Random) -> Iterator[Case]:
    for setting in SETTINGS:
        for value in setting.wrong:
            number = isinstance(value, int | float) and not isinstance(value, bool)
            family = "type"
            if number and not math.isfinite(value):
                family = "non-finite"
            elif number and setting.kind in ("whole", "real"):
                family = "huge" if abs(value) >= 10**5 else "bounds"
            yield setting_case(rng, setting, value, False, family)


def nulls(rng: random.Random) -> Iterator[Case]:
    for setting in SETTINGS:
        if setting.null is not None:
            yield setting_case(rng, setting, None, setting.null, "null")
    for group in ("model", "loss", "compute", "trainer", "data", "optimizer"):
        yield Case(["fit", "--config=recipe.yaml", f"--{group}=null"], False, "null", [group])


def right_values(rng: random.Random) -> Iterator[Case]:
    for setting in SETTINGS:
        for value in setting.ok:
            yield setting_case(rng, setting, value, True, "right")


def typos(rng: random.Random) -> Iterator[Case]:
    known = {part for setting in SETTINGS for part in (setting.key, *setting.key.split("."))}
    for setting in SETTINGS:
        if not setting.ok or setting.needs:
            continue
        parts = setting.key.split(".")
        which = rng.randrange(len(parts))
        word = parts[which]
        at = rng.randrange(len(word) - 1)
        swapped = word[:at] + word[at + 1] + word[at] + word[at + 2 :]
        edited = rng.choice([word[:at] + word[at + 1 :], word[:at] + "x" + word[at:], swapped, word[:-1]])
        if edited in known or edited in ("n_step", "val", "test", "train"):
            edited = f"{word}x"
        parts[which] = edited
        wrong = Setting(".".join(parts), setting.kind)
        case = setting_case(rng, wrong, setting.ok[0], False, "unknown")
        yield Case(case.words, False, "unknown", [[edited, edited.replace("_", "-")]], case.files)


def classes(rng: random.Random) -> Iterator[Case]:
    ways = [flag, overlay_of_class]
    groups = ["optimizer", "data", "schedule", "gradient_norm", "validation", "throughput", "spike_guard", "checkpoint"]
    wrong = [
        "Nope",
        "nope.Nope",
        "torch.nn.Linear",
        "os.system",
        "builtins.int",
        "lit_llm.data",
        "lit_llm.core.errors.UserError",
    ]
    wrong += ["torch.nn.functional.relu", "lit_llm.", ".lit_llm", "lit_llm.callbacks.Nope", "__import__"]
    wrong += [".", "..", "a b", "1", "WSD()", "üü.ü"]
    for group in groups:
        for name in wrong:
            words, files = rng.choice(ways)(group, name)
            yield Case(["fit", "--config=recipe.yaml", *words], False, "class", [group], files)
    right = [("optimizer", name) for name in ("AdamW", "torch.optim.SGD", "lit_llm.optim.Lion", "Adam")]
    right += [("schedule", name) for name in ("Constant", "lit_llm.callbacks.WSD")]
    for group, name in right:
        words, files = rng.choice(ways)(group, name)
        yield Case(["fit", "--config=recipe.yaml", *words], True, "right", [], files)


def overlay_of_class(group: str, name: Any) -> tuple[list[str], dict[str, str]]:
    return ["--config=overlay.yaml"], {"overlay.yaml": f"{group}: {{class_path: {as_yaml(name)}}}\n"}


ALIASES = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)
)
BROKEN_YAML: dict[str, str] = {
    "unclosed bracket": "model: [1, 2\n",
    "unclosed brace": "model: {n_layer: 2\n",
    "unclosed quote": 'model: "n_layer\n',
    "tab": "model:\n\tn_layer: 2\n",
    "indentation": "model:\n  n_layer: 2\n n_head: 2\n",
    "two colons": "model: n_layer: 2\n",
    "alias bomb": ALIASES,
    "alias bomb in a known key": ALIASES + "model: {n_layer: *a11}\n",
    "unknown alias": "model: *nowhere\n",
    "recursive alias": "model: &m {n_layer: *m}\n",
    "deep brackets": "model: " + "[" * 5000 + "]" * 5000 + "\n",
    "deep braces": "{a: " * 3000 + "1" + "}" * 3000 + "\n",
    "deep blocks": "".join(" " * i + "a:\n" for i in range(2000)),
    "NUL": "model: {n_layer: 2}\n\0\n",
    "control character": "model: {n_layer: 2}\x07\n",
    "invalid UTF-8": "model: {n_layer: 2} # \xff\xfe\xfa\n",
    "gzip": "\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03abc",
    "PNG": "\x89PNG\r\n\x1a\n\0\0\0\rIHDR",
    "two documents": "model: {n_layer: 1}\n---\nmodel: {n_layer: 2}\n",
    "a list": "- model\n- data\n",
    "a number": "3\n",
    "a word": "model\n",
    "empty": "",
    "only a comment": "# nothing\n",
    "null": "null\n",
    "python object": "model: !!python/object/apply:os.system [touch owned]\n",
    "python name": "model: {n_layer: !!python/name:os.system }\n",
    "unknown tag": "model: !thing {n_layer: 2}\n",
    "a list as key": "[1, 2]: 3\n",
    "a number as key": "3: {n_layer: 1}\n",
    "null as key": "null: {n_layer: 1}\n",
    "a boolean as key": "true: {n_layer: 1}\n",
    "a group as a list": "model: [n_layer, 2]\n",
    "a group as a word": "model: large\n",
    "a group as a number": "trainer: 3\n",
    "init_args as a list": "schedule: {class_path: WSD, init_args: [1]}\n",
    "init_args as a word": "schedule: {class_path: WSD, init_args: large}\n",
    "class_path as a number": "schedule: {class_path: 3}\n",
    "class_path as a list": "schedule: {class_path: [WSD]}\n",
    "class_path as a dict": "schedule: {class_path: {a: WSD}}\n",
    "an unknown entry beside class_path": "schedule: {class_path: WSD, inti_args: {decay_fraction: 0.5}}\n",
    "a base that is missing": "base: nowhere.yaml\n",
    "a base that is itself": "base: broken.yaml\n",
    "a base that is a list": "base: [recipe.yaml]\n",
    "a base that is a number": "base: 3\n",
    "an empty base": "base: ''\n",
    "a base that is a folder": "base: runs\n",
}  # fmt: skip


def yaml_files(rng: random.Random) -> Iterator[Case]:
    for content in BROKEN_YAML.values():
        yield Case(["fit", "--config=recipe.yaml", "--config=broken.yaml"], False, "YAML", [], {"broken.yaml": content})
        command = rng.choice(["plan", "check", "prepare", "recipes show", "recipes diff broken.yaml"])
        words = [*command.split(), "broken.yaml"] if " " in command else [command, "--config=broken.yaml"]
        yield Case(words, False, "YAML", [], {"broken.yaml": content})
    fine = {
        "CRLF": RECIPE.replace("\n", "\r\n"),
        "byte order mark": "\xef\xbb\xbf" + RECIPE,
        "comments": RECIPE.replace("\n", "  # \xc3\xa9\n"),
        "end marker": "---\n" + RECIPE + "...\n",
        "an anchor": RECIPE.replace("block_size: 16}", "block_size: &t 16}") + "loss: {chunk_size: *t}\n",
        "quoted keys": RECIPE.replace("model:", '"model":').replace("n_layer", "'n_layer'"),
        "no end of line": RECIPE.rstrip("\n"),
    }
    for content in fine.values():
        yield Case(["fit", "--config=fine.yaml"], True, "right", [], {"fine.yaml": content})


def duplicates(rng: random.Random) -> Iterator[Case]:
    texts = {
        "n_layer": ["model:\n  n_layer: 1\n  n_head: 2\n  n_layer: 2\n", "model: {n_layer: 1, n_layer: 1}\n"],
        "model": ["model: {n_layer: 1}\nloss: {z_loss: 0}\nmodel: {n_head: 2}\n"],
        "warmup_steps": ["schedule: {class_path: WSD, init_args: {warmup_steps: 1, 'warmup_steps': 2}}\n"],
        "class_path": ["optimizer: {class_path: AdamW, class_path: Lion}\n"],
        "max_steps": ['{"trainer": {"max_steps": 1, "max_steps": 2}}\n'],
    }
    for key, contents in texts.items():
        for content in contents:
            files = {"twice.yaml": content}
            yield Case(["fit", "--config=recipe.yaml", "--config=twice.yaml"], False, "duplicate", [key, "line"], files)
            yield Case(["fit", "--config=twice.yaml", "--config=recipe.yaml"], False, "duplicate", [key], files)
            yield Case(["plan", "--config=recipe.yaml", "--config=twice.yaml"], False, "duplicate", [key], files)
    for value in ("{n_layer: 1, n_layer: 2}", '{"n_head": 2, "n_layer": 1, "n_layer": 1}'):
        yield Case(["fit", "--config=recipe.yaml", f"--model={value}"], False, "duplicate", ["n_layer"])


def command_lines(rng: random.Random) -> Iterator[Case]:
    fit = ["fit", "--config=recipe.yaml"]
    wrong: list[tuple[list[str], list[str | list[str]]]] = [
        ([*fit, "extra"], ["extra"]),
        ([*fit, "-x"], ["x"]),
        ([*fit, "-x", "3"], ["x"]),
        ([*fit, "--=3"], []),
        ([*fit, "--"], []),
        ([*fit, ""], []),
        ([*fit, "--model.n_layer"], ["n_layer"]),
        ([*fit, "--model.n_layer", "--model.n_head=2"], ["n_layer"]),
        ([*fit, "--model..n_layer=2"], ["n_layer"]),
        ([*fit, "--.model.n_layer=2"], ["n_layer"]),
        ([*fit, "--model.n_layer.deeper=2"], ["n_layer"]),
        ([*fit, "--n_layer=2"], ["n_layer"]),
        ([*fit, "--trainer.max_steps=3", "4"], ["4"]),
        ([*fit, "--model={n_layer: 2"], ["model"]),
        ([*fit, "--model={n_layer}"], ["n_layer"]),
        ([*fit, "--model=[1]"], ["model"]),
        ([*fit, "--trainer.callbacks=5"], ["callbacks"]),
        ([*fit, "--trainer.callbacks=[Nope]"], ["callbacks"]),
        ([*fit, "--trainer.callbacks+=Nope"], ["callbacks"]),
        ([*fit, "--trainer.logger=nope"], ["logger"]),
        ([*fit, "--trainer.plugins=nope"], ["plugins"]),
        ([*fit, "--trainer.logger+=3"], ["logger"]),
        ([*fit, "--unknown"], ["unknown"]),
        ([*fit, "--unknown=3"], ["unknown"]),
        ([*fit, "--üñ=3"], ["üñ"]),
        ([*fit, "--base=recipe.yaml"], ["base"]),
        ([*fit, "--run=runs/nowhere"], ["runs/nowhere"]),
        ([*fit, "--run=text.txt"], ["text.txt"]),
        ([*fit, "--run="], ["run"]),
        ([*fit, "--resume=auto", "--replace=true"], ["replace"]),
        ([*fit, "--additional_steps=3"], ["additional_steps"]),
        ([*fit, "--additional_steps=-3", "--resume=auto"], ["additional_steps"]),
        ([*fit, "--out=x"], ["out"]),
        (["fit", "--config=nowhere.yaml"], ["nowhere.yaml"]),
        (["fit", "--config="], ["config"]),
        (["fit", "--config=runs"], ["runs"]),
        (["fit", "--config"], ["config"]),
        (["fit", "--config=text.txt"], ["text.txt"]),
        (["fit", "--config=/dev/null"], ["/dev/null"]),
        (["fit", f"--config={'y' * 5000}"], []),
        (["fit", "recipe.yaml"], ["recipe.yaml"]),
        (["fti", "--config=recipe.yaml"], ["fti"]),
        (["--config=recipe.yaml"], ["config"]),
        (["Fit", "--config=recipe.yaml"], ["Fit"]),
        (["plan", "--config=recipe.yaml", "--hardware=h1000"], ["hardware"]),
        (["plan", "--config=recipe.yaml", "--devices=0"], ["devices"]),
        (["plan", "--config=recipe.yaml", "--devices=-8"], ["devices"]),
        (["plan", "--config=recipe.yaml", "--devices=x"], ["devices"]),
        (["plan", "--config=recipe.yaml", "--nope=3"], ["nope"]),
        (["plan", "--config=recipe.yaml", "--sweep=nope"], ["sweep"]),
        (["check", "--config=recipe.yaml", "--nope=3"], ["nope"]),
        (["validate"], []),
        (["validate", "--run=runs/nowhere"], ["runs/nowhere"]),
        (["validate", "--run=runs/other"], []),
        (["test", "--run=runs/nowhere"], ["runs/nowhere"]),
        (["generate"], []),
        (["generate", "--run=runs/nowhere", "--prompt=a"], ["runs/nowhere"]),
        (["generate", "--run=text.txt", "--prompt=a"], ["text.txt"]),
        (["generate", "--nope=3"], []),
        (["doctor"], []),
        (["doctor", "--run=runs/nowhere"], ["runs/nowhere"]),
        (["curve"], []),
        (["curve", "--run=runs/nowhere", "--out=c.csv"], ["runs/nowhere"]),
        (["curve", "--run=runs/other", "--out=notes.md"], []),
        (["curve", "--rnu=runs/other", "--out=c.csv"], []),
        (["export", "--run=runs/nowhere", "--out=hf"], ["runs/nowhere"]),
        (["export", "--run=runs/other", "--out=notes.md"], []),
        (["export", "--nope"], []),
        (["consolidate", "--run=runs/nowhere", "--out=c.ckpt"], ["runs/nowhere"]),
        (["consolidate", "--run=runs/other", "--out=notes.md"], []),
        (["import", "--from=nowhere", "--out=runs/x"], ["nowhere"]),
        (["import", "--from=text.txt", "--out=runs/x"], ["text.txt"]),
        (["import", "--from=runs", "--out=runs/other"], []),
        (["import"], []),
        (["prepare", "--config=recipe.yaml"], ["out"]),
        (["prepare", "--config=recipe.yaml", "--out=text.txt"], ["text.txt"]),
        (["prepare", "--config=recipe.yaml", "--out=runs/other"], ["runs/other"]),
        (["prepare", "--config=recipe.yaml", "--out=s", "--shard_tokens=0"], ["shard_tokens"]),
        (["prepare", "--config=recipe.yaml", "--out=s", "--shard_tokens=-5"], ["shard_tokens"]),
        (["prepare", "--config=recipe.yaml", "--out=s", "--shard_tokens=x"], ["shard_tokens"]),
        (["prepare", "--config=recipe.yaml", "--out=s", "--workers=0"], ["workers"]),
        (["prepare", "--config=recipe.yaml", "--out=s", "--workers=two"], ["workers"]),
        (["recipes", "show", "nowhere"], ["nowhere"]),
        (["recipes", "show"], []),
        (["recipes", "diff", "bytes"], []),
        (["recipes", "copy", "bytes", "text.txt"], ["text.txt"]),
        (["recipes", "nope"], ["nope"]),
        (["certify", "--devices=0"], ["devices"]),
        (["certify", "--budget=nan"], ["budget"]),
        (["certify", "--nope"], ["nope"]),
    ]  # fmt: skip
    for words, names in wrong:
        yield Case(words, False, "command line", names)
    right = [
        [*fit, "--model.n_layer=7", "--model.n_layer=1"],
        ["fit", "--model.n_layer=2", "--config=recipe.yaml"],
        ["fit", "-c", "recipe.yaml"],
        [*fit, "--run-dir=runs/dashed"],
        [*fit, "--run_dir=-dash"],
        [*fit, "--model.n-layer", "2"],
        [*fit, "--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor=val/loss"],
        [*fit, "--checkpoint=null", "--validation=null", "--schedule=null"],
        [*fit, "--throughput=null", "--plan=null", "--page=null", "--progress=null", "--signals=null"],
        [*fit, "--print_config"],
        ["fit", "--help"],
        ["fit", "--help", "schedule"],
        ["--help"],
        ["--version"],
        ["recipes"],
        ["recipes", "show", "bytes"],
        ["plan", "--config=recipe.yaml"],
        ["prepare", "--config=recipe.yaml", "--out=shards"],
    ]
    for words in right:
        yield Case(words, True, "right")


def folders(rng: random.Random) -> Iterator[Case]:
    fit = ["fit", "--config=recipe.yaml"]
    resume = [*fit, "--run_dir=runs/mine", "--resume=auto"]
    yield Case([*fit, "--run_dir=runs/mine"], False, "folder", ["runs/mine"], setup=[[*fit, "--run_dir=runs/mine"]])
    yield Case(resume, True, "folder", setup=[[*fit, "--run_dir=runs/mine"]])
    config = "runs/mine/config.yaml"
    for content in ("\0\0\0\0", "{", "resume: 3\n", "resume: [1]\n", "\xff", "resume: nowhere.ckpt\n"):
        yield Case(resume, False, "folder", [], {config: content})
    for content in ("", "3", "- a\n", "\0", "[" * 5000, "modle: {}\n"):
        yield Case(["fit", "--run=runs/mine", "--resume=auto"], False, "folder", [], {config: content})
        yield Case(["validate", "--run=runs/mine"], False, "folder", [], {config: content})
    checkpoint = "runs/mine/checkpoints/step-00000002.ckpt"
    for content in ("", "garbage", "PK\3\4garbage", "\0" * 100, "\x80\x04."):
        yield Case(resume, False, "folder", ["step-00000002.ckpt"], {checkpoint: content})
        yield Case([*fit, f"--resume={checkpoint}", "--run_dir=runs/b"], False, "folder", [], {checkpoint: content})
    deep, typed = "[" * 100_000, '{"format": "lit_llm checkpoint", "version": "x"}'
    for manifest in ("", "{}", "3", "[]", "null", deep, typed, '{"files": 3}'):
        files = {f"{checkpoint}/manifest.json": manifest, f"{checkpoint}/checkpoint.pt": "x"}
        yield Case(resume, False, "folder", ["step-00000002.ckpt"], files)
        yield Case(["consolidate", f"--checkpoint={checkpoint}", "--out=c.ckpt"], False, "folder", [], files)
    for content in ("", "x", "ab"):
        yield Case([*fit, "--data.paths=small.txt"], False, "folder", [], {"small.txt": content})
    for content in ("", "3", "{}", '{"model": 3}', "[" * 100_000, "\0", '{"model": {"type": "BPE"}}', '{"version": "9.0"}'):
        words = ["--data.tokenizer=TokenizerJSON", "--data.tokenizer.path=t.json"]
        yield Case([*fit, *words], False, "folder", [["t.json", "tokenizer"]], {"t.json": content})
    words = ["--data.tokenizer=TokenizerJSON", "--data.tokenizer.path=t.json"]
    good = Bytes().to_json().encode().decode("latin-1")
    for content in (
        "",
        "3",
        "{}",
        "[" * 100_000,
        '{"bos_id": 0}',
        '{"bos_id": null, "eos_id": 257}',
        '{"bos_id": 1.5, "eos_id": 0}',
    ):
        files = {"t.json": good, "document_ids.json": content}
        yield Case([*fit, *words], False, "folder", ["document_ids.json"], files)
    for name in ("eos_token", "bos_token"):
        yield Case([*fit, *words, f"--data.tokenizer.{name}=<no>"], False, "folder", [name], {"t.json": good})
    configs = ["", "3", "{}", "null", "[]", deep, '{"architectures": 3}', '{"model_type": "gpt2"}', '{"model_type": ["llama"]}']
    configs += ['{"model_type": "gpt2", "n_layer": 1e99, "n_head": {}, "n_embd": 16}']
    configs += [
        '{"model_type": "llama", "hidden_size": "x"}',
        '{"model_type": "llama", "hidden_size": null, "num_hidden_layers": -1}',
    ]
    for content in configs:
        for more in ({}, {"hf/model.safetensors": "\xff" * 20, "hf/tokenizer.json": "{}"}):
            files = {"hf/config.json": content, **more}
            yield Case(["import", "--from=hf", "--out=runs/imported"], False, "folder", [], files)
    for content in ("", "step\n", "a,b\n1,2\n", "step,loss\nx,y\n", "step,loss\n", "\0", "step,loss\n1\n"):
        yield Case([*fit, "--check_against=c.csv"], False, "folder", ["c.csv"], {"c.csv": content})


FAMILIES = (types, nulls, right_values, typos, classes, yaml_files, duplicates, command_lines, folders)


def generate(seed: int) -> list[Case]:
    """Every case of every family. The seed chooses how each value is given, and the order."""
    rng = random.Random(seed)
    cases = [case for family in FAMILIES for case in family(rng)]
    rng.shuffle(cases)
    return cases
