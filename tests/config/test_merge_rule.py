"""Generated recipes and flags against a second implementation of the rule that lit_llm/config/class_defaults.py states.

A case is a list of sources (files, some with a base, and flags) that name classes and give arguments of several groups. The
reference below follows the sentences of the rule, and shares no code with lit_llm: it has the defaults from the signatures.
"""

import inspect
import json
import random

import pytest
import torch

import lit_llm.callbacks
import lit_llm.config.parse
import lit_llm.data
import lit_llm.optim
from lit_llm.config.parse import parse
from lit_llm.core.errors import UserError
from lit_llm.distributed.mesh_strategy import MeshStrategy
from lit_llm.reporting.doctor.watch import Doctor
from lit_llm.training.plan_monitor import PlanMonitor

COUNT = [1, 2, 3, 5, 8, 40, 300]
RATE = [1e-3, 0.25, 0.5, 0.0625, 1e-05, 0.9]
PAIR = [[0.8, 0.9], [0.5, 0.25]]
SWITCH = [True, False]

# Group → classes → arguments with the values to choose from. The first class is the default; a leading None: off by default.
GROUPS = {
    "schedule": {
        "Cosine": {"warmup_steps": COUNT, "final_ratio": RATE, "total_steps": COUNT},
        "WSD": {"warmup_steps": COUNT, "final_ratio": RATE, "decay_fraction": RATE, "decay_steps": COUNT, "shape": ["linear"]},
        "Linear": {"warmup_steps": COUNT, "final_ratio": RATE, "total_steps": COUNT},
        "Constant": {"warmup_steps": COUNT},
        "InverseSquareRoot": {"warmup_steps": COUNT},
    },
    "optimizer": {
        "MuonAdamW": {"lr": RATE, "weight_decay": RATE, "betas": PAIR},
        "AdamW": {"lr": RATE, "weight_decay": RATE, "betas": PAIR, "amsgrad": SWITCH},
        "Adam": {"lr": RATE, "weight_decay": RATE, "betas": PAIR, "eps": RATE},
        "Lion": {"lr": RATE, "weight_decay": RATE, "betas": PAIR},
        "SGD": {"lr": RATE, "momentum": RATE, "nesterov": SWITCH},
    },
    "data": {
        "PythonStdlib": {"global_batch_size": COUNT, "seed": COUNT, "cache_dir": ["c", "d"]},
        "TextFiles": {"global_batch_size": COUNT, "num_workers": COUNT, "val_fraction": RATE, "cache_dir": ["c", "d"]},
        "TokenShards": {"global_batch_size": COUNT, "micro_batch_size": COUNT, "headerless": SWITCH, "vocab_size": COUNT},
    },
    "health": {"HealthSignals": {"every_n_steps": COUNT}},
    "gradient_norm": {"GradientNorm": {"clip": RATE}},
    "validation": {"ValidateEvery": {"every_n_steps": COUNT}},
    "checkpoint": {"StepCheckpoint": {"every_n_steps": COUNT, "keep_last": COUNT}},
    "samples": {None: {}, "TextSamples": {"every_n_steps": COUNT, "max_new_tokens": COUNT}},
    "ema": {None: {}, "EMA": {"decay": RATE, "every_n_steps": COUNT}},
    "tasks": {None: {}, "TaskScores": {"every_n_steps": COUNT, "batch_size": COUNT}},
    "batch_ramp": {None: {}, "BatchRamp": {"tokens_per_batch": [[[0, 16]], [[0, 32], [100, 64]]]}},
    **{
        group: {name: {}}
        for group, name in {
            "throughput": "Throughput", "plan": "PlanMonitor", "stragglers": "Stragglers", "page": "TensorBoardPage",
            "doctor": "Doctor",
            "progress": "TrainingProgress", "spike_guard": "SpikeGuard", "signals": "StopOnSignal",
        }.items()
    },
    "time_breakdown": {None: {}, "TimeBreakdown": {}},
    "gradient_noise": {None: {}, "GradientNoise": {}},
    "histograms": {None: {}, "Histograms": {"every_n_steps": COUNT}},
    "profile": {None: {}, "Profile": {}},
}  # fmt: skip
REQUIRED = {
    "TextFiles": {"paths": "a.txt"},
    "TokenShards": {"train": "x.bin"},
    "TextSamples": {"every_n_steps": 7, "prompts": ["a", "b"]},
    "TaskScores": {"tasks": ["a.jsonl"]},
    "BatchRamp": {"tokens_per_batch": [[0, 8]]},
    "ValidateEvery": {"every_n_steps": 9},  # after null
}
CHANGED_DEFAULTS = {"ValidateEvery": {"every_n_steps": 1000}}
TOKENIZERS = {"Bytes": {}, "BPE": {"vocab_size": [300, 400, 500]}}
MESH = "lit_llm.distributed.mesh_strategy.MeshStrategy"
PLAIN = {
    "model": {"n_layer": COUNT, "n_head": COUNT, "dropout": RATE, "mlp": ["gelu", "swiglu"], "tie_embeddings": SWITCH},
    "loss": {"chunk_size": COUNT, "z_loss": RATE},
    "compute": {"compile": SWITCH},
    "trainer": {"max_steps": COUNT, "log_every_n_steps": COUNT, "limit_val_batches": COUNT, "gradient_clip_val": RATE},
}
PLACES = (lit_llm.callbacks, lit_llm.optim, lit_llm.data, torch.optim)


def cls_of(name):
    apart = {"PlanMonitor": PlanMonitor, "Doctor": Doctor, MESH: MeshStrategy}
    return apart[name] if name in apart else next(getattr(place, name) for place in PLACES if hasattr(place, name))


def declared(cls):
    """The arguments in the signature that the class itself defines."""
    init = vars(cls).get("__init__")
    parameters = inspect.signature(init).parameters.values() if inspect.isfunction(init) else ()
    return {p.name: p for p in parameters if p.name != "self" and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}


def defaults(cls):
    found = {}
    for each in cls.__mro__:
        found = {name: p.default for name, p in declared(each).items() if p.default is not p.empty} | found
        init = vars(each).get("__init__")
        if init is not None and not any(p.kind is p.VAR_KEYWORD for p in inspect.signature(init).parameters.values()):
            break
    return {name: value for name, value in found.items() if name not in ("params",)}


def shared(one, other, argument):
    """Sentence 3: a public class that both classes extend declares it."""
    both = [cls for cls in cls_of(one).__mro__ if cls in cls_of(other).__mro__]
    return any(argument in declared(cls) for cls in both if not cls.__name__.startswith("_"))


# -- the reference ------------------------------------------------------------------------------------------------------


class Group:
    """What is known of a group after some sources."""

    def __init__(self, default, fallback):
        self.cls, self.fallback, self.arguments = default, fallback, {}

    def apply(self, source):
        """`source` may have the keys `class` (a name or None) and `arguments`."""
        if "class" in source:
            new = source["class"]
            if new is None or self.cls is None:
                self.arguments = {}
            elif new != self.cls:
                self.arguments = {k: v for k, v in self.arguments.items() if shared(self.cls, new, k)}
            self.cls = new
        elif self.cls is None:
            self.cls = self.fallback
        for name, value in source["arguments"].items():
            if isinstance(value, dict):  # a class as a value
                group = self.arguments.get(name)
                group = group if isinstance(group, Group) else Group(None, None)
                group.apply(value)
                value = group
            self.arguments[name] = value

    def result(self):
        if self.cls is None:
            return None
        values = defaults(cls_of(self.cls)) | CHANGED_DEFAULTS.get(self.cls, {}) | self.arguments
        values = {name: value.result() if isinstance(value, Group) else value for name, value in values.items()}
        return {"class": self.cls.rpartition(".")[2], **values}


# -- generated cases ----------------------------------------------------------------------------------------------------


MONITORS = ["a", "b", "val/loss"]


class Generator:
    """Writes the files of one case, and lets the reference apply each source. `words` are the command line."""

    def __init__(self, seed, folder):
        self.rng, self.folder = random.Random(seed), folder
        large = ["schedule", "optimizer", "data"]
        self.state = {}
        for group in self.rng.sample(large, 2) + self.rng.sample([g for g in GROUPS if g not in large], 3):
            first, *others = GROUPS[group]
            self.state[group] = Group(first, first or others[0])
        self.plain = {group: {} for group in self.rng.sample(list(PLAIN), 2)}
        self.callbacks = []
        self.words = self.write(self.rng.randint(1, 4))

    def write(self, files):
        named, base = [], None
        for i in range(files):
            content = self.tree(self.source())
            if base is not None:
                content["base"] = base
            file = self.folder / f"{i}.yaml"
            file.write_text(json.dumps(content))
            base = file.name if base is None and i + 1 < files and self.rng.random() < 0.25 else None
            if base is None:
                named.append(["--config", str(file)])
        flags = self.flags(self.source())
        for offset, place in enumerate(sorted(self.rng.randint(0, len(named)) for _ in flags)):
            named.insert(place + offset, flags[offset])  # before, between and after the files, in their own order
        return [word for words in named for word in words]

    def source(self):
        """What one source says, by group; the reference knows it then."""
        said = {}
        for group, state in self.state.items():
            if self.rng.random() < 0.65:
                said[group] = self.choice(group, state)
                state.apply(said[group])
        for group, values in self.plain.items():
            said[group] = {name: self.rng.choice(choices) for name, choices in PLAIN[group].items() if self.rng.random() < 0.4}
            values.update(said[group])
        if self.rng.random() < 0.3:
            added = [
                ("EarlyStopping", {"monitor": m, "patience": self.rng.choice(COUNT)}) for m in self.rng.sample(MONITORS, 2)
            ]
            self.callbacks += added
            said["callbacks+"] = [{"class_path": name, "init_args": arguments} for name, arguments in added]
        return said

    def choice(self, group, state):
        """A class, a class with arguments, arguments alone, or null."""
        kind = self.rng.choice(["class", "class", "arguments", "arguments", "null"])
        if kind == "null" and group not in ("optimizer", "data"):
            return {"class": None, "arguments": {}}
        source = {"arguments": {}}
        cls = state.cls or state.fallback
        if kind == "class":
            cls = source["class"] = self.rng.choice([name for name in GROUPS[group] if name is not None])
        if cls != state.cls:
            source["arguments"] |= REQUIRED.get(cls, {})
        for name, values in GROUPS[group][cls].items():
            if self.rng.random() < 0.4:
                source["arguments"][name] = self.rng.choice(values)
        if group == "data" and cls != "TokenShards" and self.rng.random() < 0.5:
            tokenizer = self.rng.choice(list(TOKENIZERS))
            values = {n: self.rng.choice(v) for n, v in TOKENIZERS[tokenizer].items() if self.rng.random() < 0.5}
            source["arguments"]["tokenizer"] = {"class": tokenizer, "arguments": values}
        return source

    # -- ways of writing it

    def tree(self, said):
        trees = {group: self.group_tree(source) for group, source in said.items() if group in self.state}
        trees |= {group: values for group, values in said.items() if group in self.plain and values}
        if "callbacks+" in said:
            trees["trainer"] = {**trees.get("trainer", {}), "callbacks+": said["callbacks+"]}
        return trees

    def group_tree(self, source):
        arguments = {name: self.group_tree(v) if isinstance(v, dict) else v for name, v in source["arguments"].items()}
        if "class" not in source:
            return self.rng.choice([{"init_args": arguments}, arguments]) if arguments else {}
        if source["class"] is None:
            return None
        name = self.spelled(source["class"])
        if not arguments and self.rng.random() < 0.5:
            return name
        return {"class_path": name, **({"init_args": arguments} if arguments else {})}

    def flags(self, said):
        flags = []
        for key, value in said.items():
            if key in self.state:
                flags += self.group_flags(key, value)
            elif key == "callbacks+":
                flags += [self.flag("trainer.callbacks+", each) for each in value]
            elif value and self.rng.random() < 0.4:
                flags.append(self.flag(key, value))
            else:
                flags += [self.flag(f"{key}.{name}", each) for name, each in value.items()]
        return flags

    def group_flags(self, key, source):
        """In one dict, or one flag each in any order."""
        if self.rng.random() < 0.35:
            tree = self.group_tree(source)
            return [self.flag(key, tree)]
        flags = []
        for name, value in source["arguments"].items():
            below = self.rng.choice([f"{key}.{name}", f"{key}.init_args.{name}"])
            flags += self.group_flags(below, value) if isinstance(value, dict) else [self.flag(below, value)]
        if "class" not in source:
            return flags or [self.flag(key, {})]
        name = source["class"] and self.spelled(source["class"])
        at = self.rng.randint(0, len(flags))
        flags.insert(at, self.flag(self.rng.choice([key, f"{key}.class_path"]) if name else key, name))
        if name and key in GROUPS and self.rng.random() < 0.2:  # an earlier flag that this one replaces
            flags.insert(self.rng.randint(0, at), self.flag(key, self.rng.choice([n for n in GROUPS[key] if n])))
        return flags

    def spelled(self, name):
        cls = cls_of(name)
        return self.rng.choice([name, name, f"{cls.__module__}.{cls.__name__}"])

    def flag(self, key, value):
        text = value if isinstance(value, str) else json.dumps(value)
        key = self.rng.choice([key, key.replace("_", "-")])
        return self.rng.choice([["--" + key, text], [f"--{key}={text}"]])


def seen(value):
    """What `parse` made of a group, in the form of the reference."""
    if isinstance(value, dict) and "class_path" in value:
        return {"class": value["class_path"].rpartition(".")[2], **{k: seen(v) for k, v in value.get("init_args", {}).items()}}
    return list(value) if isinstance(value, tuple) else [seen(each) for each in value] if isinstance(value, list) else value


def plain(value):
    return {k: list(v) if isinstance(v, tuple) else plain(v) for k, v in value.items()} if isinstance(value, dict) else value


def check(seed, folder):
    """Returns the number of values compared."""
    folder.mkdir()
    case = Generator(seed, folder)
    recipe = parse("fit", case.words)
    files = [p.read_text() for p in sorted(folder.iterdir())]
    assert recipe.problems == [], (seed, case.words, files)
    found, compared = plain(recipe.config.as_dict()), 0
    for group, state in case.state.items():
        wanted = plain(state.result())
        assert seen(found[group]) == wanted, (seed, group, case.words, files)
        compared += len(wanted or [None])
    for group, values in case.plain.items():
        assert {name: found[group][name] for name in values} == values, (seed, group, case.words, files)
        compared += len(values)
    listed = recipe.config.trainer.callbacks or []
    pairs = [(each.class_path.rpartition(".")[2], each.init_args.monitor, each.init_args.patience) for each in listed]
    assert pairs == [(name, a["monitor"], a["patience"]) for name, a in case.callbacks], (seed, case.words, files)
    return compared + len(pairs)


def test_the_values_of_generated_recipes_follow_the_rule(tmp_path):
    assert sum(check(seed, tmp_path / str(seed)) for seed in range(4)) > 90


@pytest.mark.slow
def test_the_values_of_many_generated_recipes_follow_the_rule(tmp_path):
    assert sum(check(seed, tmp_path / str(seed)) for seed in range(1000, 1020)) > 500


def test_flags_that_turn_a_group_off_and_give_its_arguments_contradict_each_other():
    for words in (["--schedule", "null", "--schedule.warmup_steps", "3"], ["--schedule.warmup_steps=3", "--schedule=null"]):
        with pytest.raises(UserError, match=r"schedule is null, but schedule.warmup_steps is given too.* \(--schedule\)"):
            parse("fit", words)


def test_a_strategy_follows_the_rule_too(tmp_path):
    def strategy(*words):
        value = parse("fit", ["--config", str(tmp_path / "mesh.yaml"), *words]).config.trainer.strategy
        return value if isinstance(value, str) else dict(value.init_args.as_dict(), name=value.class_path)

    mesh = {"class_path": MESH, "init_args": {"tensor_parallel": 4}}
    (tmp_path / "mesh.yaml").write_text(json.dumps({"trainer": {"strategy": mesh}}))
    (tmp_path / "ddp.yaml").write_text("trainer: {strategy: ddp}")
    own = {name: value for name, value in defaults(MeshStrategy).items()}
    assert strategy() == own | {"tensor_parallel": 4, "name": MESH}
    more = ["--trainer.strategy", json.dumps({"class_path": MESH, "init_args": {"replicate": 2}})]
    assert strategy(*more) == own | {"tensor_parallel": 4, "replicate": 2, "name": MESH}
    assert strategy("--config", str(tmp_path / "ddp.yaml"), *more) == own | {"replicate": 2, "name": MESH}
    assert strategy("--config", str(tmp_path / "ddp.yaml")) == "ddp"


def test_what_another_class_drops_is_announced_in_one_line(tmp_path, capsys):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("schedule: {class_path: WSD, init_args: {warmup_steps: 3, decay_fraction: 0.4, shape: linear}}")
    parse("fit", ["--config", str(recipe), "--schedule", "Linear"]).raise_problems()
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        "note: schedule is Linear instead of WSD, so these do not apply: "
        f"schedule.decay_fraction=0.4, schedule.shape=linear (in {recipe})"
    )
    for words in (["--schedule", "WSD"], ["--schedule", "null"], ["--schedule.decay_fraction", "0.5"], ["--optimizer", "Lion"]):
        parse("fit", ["--config", str(recipe), *words]).raise_problems()
        assert capsys.readouterr().err == ""


def test_flags_override_files_wherever_they_stand(tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text("model: {n_layer: 3}\nschedule: WSD")
    for words in (["--model.n_layer", "5", "--config", str(file)], ["--config", str(file), "--model.n_layer", "5"]):
        assert parse("fit", words).config.model.n_layer == 5
    found = parse("fit", ["--schedule.decay_fraction", "0.5", "--config", str(file)]).config.schedule
    assert found.init_args.decay_fraction == 0.5


def test_a_later_dict_overrides_an_earlier_flag():
    words = ["--schedule", "WSD", "--schedule.decay_fraction", "0.5", "--schedule", "{init_args: {decay_fraction: 0.7}}"]
    assert parse("fit", words).config.schedule.init_args.decay_fraction == 0.7


def test_settings_without_keys_are_refused():
    for words in (["--model", "large"], ["--trainer", "3"], ["--loss", "[1]"]):
        (problem,) = parse("fit", words).problems
        assert problem.startswith(f"{words[0][2:]} is {words[1]!r}, but must be a dict of settings")


def test_arguments_beside_class_path_are_those_in_init_args(tmp_path):
    text = "{class_path: WSD, decay_fraction: 0.7, init_args: {warmup_steps: 3}}"
    (tmp_path / "recipe.yaml").write_text(f"schedule: {text}")
    for words in (["--config", str(tmp_path / "recipe.yaml")], ["--schedule", text]):
        found = parse("fit", words).config.schedule.init_args
        assert (found.decay_fraction, found.warmup_steps) == (0.7, 3)
