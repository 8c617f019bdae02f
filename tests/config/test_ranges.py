"""Every number of every group has a domain: a value outside it is one sentence and exit code 2, a value inside passes."""

import argparse
import inspect
import math
import re
import typing
from pathlib import Path

import pytest
import torch
import yaml
from jsonargparse import Namespace
from lightning.pytorch import Callback
from recipe_runs import RECIPE, TEXT, run

from lit_llm.callbacks import SpikeGuard
from lit_llm.commands import chat, find_batch, find_lr, generate, plan
from lit_llm.commands.own_flags import OwnFlags
from lit_llm.config.class_defaults import all_arguments
from lit_llm.config.groups import CLASSES, OPTIONS, PLAIN
from lit_llm.config.parse import parse
from lit_llm.config.parser import class_at, known_classes
from lit_llm.config.ranges import OF_LIBRARIES, number_problems, range_of
from lit_llm.core.number_domain import Domain, ranges_of, whole
from lit_llm.distributed.mesh_strategy import MeshStrategy

# Numbers that need no domain of their own: ±10^15 and finite.
UNBOUNDED = {
    **dict.fromkeys(
        [f"optimizer.{n}" for n in ("max_iter", "max_eval", "tolerance_grad", "tolerance_change", "history_size")],
        "of LBFGS, which cannot train a model in parameter groups",
    ),
    "model.layers": "GPTConfig.mistakes checks each value under its own name",
    "model.rope_scaling": "GPTConfig.mistakes checks each value under its own name",
    "trainer.precision": "its values are listed in its type",
    "trainer.plugins": "its type has class names that contain 'int' and no number",
}


def holds_numbers(hint) -> bool:
    """Whether a type allows a number, also inside a list, a tuple or a dict."""
    if hint in (int, float):
        return True
    if typing.get_origin(hint) is typing.Literal:
        return False
    return any(holds_numbers(each) for each in typing.get_args(hint))


def numbers_of(key: str, cls: type) -> set[str]:
    found = set()
    for name, parameter in all_arguments(cls).items():
        owner = next(each for each in inspect.getmro(cls) if name in inspect.signature(each.__init__).parameters)
        try:
            hint = typing.get_type_hints(owner.__init__).get(name)
        except NameError:
            hint = (
                eval(parameter.annotation, vars(inspect.getmodule(owner)) | {"Tensor": float}) if parameter.annotation else None
            )
        if holds_numbers(hint):
            found.add(f"{key}.{name}")
    return found


def classes() -> list[tuple[str, type]]:
    """Every class of lit_llm, torch and Lightning that a recipe can name, with its key. Not those of tests."""
    found = [(group, class_at(path)) for group, path in PLAIN.items()]
    found += [(key, cls) for key in (*CLASSES, "data.tokenizer") for cls in known_classes(key).values()]
    found.append(("trainer.strategy", MeshStrategy))
    return [(key, cls) for key, cls in found if cls.__module__.startswith(("lit_llm.", "torch.", "lightning."))]


def ranges() -> dict[tuple[str, type | None], Domain]:
    """Key and class → range, of every number that has one."""
    found = {(option.name, None): option.range for option in OPTIONS if option.range is not None}
    for key, cls in classes():
        for number in sorted(numbers_of(key, cls)):
            if (domain := range_of(key, cls, number.removeprefix(f"{key}."))) is not None:
                found[number, cls] = domain
    return found


RANGES = ranges()
DOMAINS = {key: domain for (key, _), domain in RANGES.items()}


def test_every_number_of_every_class_has_a_range_or_a_reason_to_have_none():
    found = {option.name for option in OPTIONS if holds_numbers(option.type)}
    for key, cls in classes():
        found |= numbers_of(key, cls)
    assert len(found) > 100  # the search has found them
    assert found - DOMAINS.keys() - UNBOUNDED.keys() == set()
    of_libraries = {f"{group}.{name}" for group, table in OF_LIBRARIES.items() for name in table}
    assert of_libraries - found == set(), "a range of a number that no class has"


def test_a_range_is_stated_where_the_argument_is():
    """By hand: of a field, of an argument, of one that a subclass passes on to its base class, and null from the type."""
    cosine = class_at("lit_llm.callbacks.Cosine")
    assert ranges_of(cosine)["warmup_steps"] == whole(0, 10**12)
    assert ranges_of(cosine)["total_steps"] == whole(1, 10**12, null=True)
    assert ranges_of(class_at(PLAIN["model"]))["n_kv_head"] == whole(1, 100_000, null=True)
    assert range_of("optimizer", torch.optim.AdamW, "betas") == OF_LIBRARIES["optimizer"]["betas"]
    assert range_of("optimizer", argparse.Namespace, "betas") is None  # a foreign class


def outside(domain: Domain) -> list[float]:
    """The nearest values beyond each end, and the non-finite ones."""
    low, high = domain.low, domain.high
    if domain.whole or domain.fraction:
        ends: list[float] = [low - 1, high + 1]
    else:
        ends = [
            low if domain.above_low else math.nextafter(low, -math.inf),
            *([1e-320] if domain.above_low and low == 0 else []),  # 0 in float32
            high if domain.below_high else math.nextafter(high, math.inf),
        ]
    return [end for end in [*ends, math.nan, math.inf, -math.inf] if end not in domain.also]


def inside(domain: Domain) -> list[float]:
    low, high = domain.low, domain.high
    if domain.whole or domain.fraction:
        return [low, high, *domain.also, *([1e-9, 1.0] if domain.fraction else [])]
    return [
        max(math.nextafter(low, math.inf), low + torch.finfo(torch.float32).smallest_normal * 2) if domain.above_low else low,
        math.nextafter(high, -math.inf) if domain.below_high else high,
        *domain.also,
    ]


def nested(key: str, value, cls: type | None = None) -> Namespace:
    """A parsed configuration with this value of an argument of the class."""
    config = Namespace()
    parts = key.split(".")
    if len(parts) == 1 or (parts[0] in PLAIN and len(parts) == 2):
        config[key] = value
        return config
    group = ".".join(parts[:-1])
    cls = cls or next(each for name, each in RANGES if name == key)
    config[group] = Namespace(class_path=f"{cls.__module__}.{cls.__qualname__}", init_args=Namespace({parts[-1]: value}))
    return config


@pytest.mark.parametrize(
    ("key", "cls"), RANGES, ids=lambda each: each if isinstance(each, str) else getattr(each, "__name__", "")
)
def test_values_beyond_the_ends_are_refused_and_the_ends_pass(key, cls):
    domain = RANGES[key, cls]
    for value in outside(domain):
        for shape in (value, [value], (1, value), *([] if domain.fraction else [{"any": value}])):
            problems = number_problems(nested(key, shape, cls), set())
            assert key in problems, (key, shape)
            assert problems[key].startswith(f"{key} is ") and problems[key].endswith(f"(--{key})"), problems[key]
    for value in inside(domain):
        assert number_problems(nested(key, value, cls), set()) == {}, (key, value)
    assert domain.accepts(None) == domain.null


def test_the_sentence_has_the_value_the_rule_and_the_flag():
    def said(key, value):
        return number_problems(nested(key, value), set())[key]

    assert said("optimizer.lr", math.inf) == "optimizer.lr is .inf, but must be a finite number of at least 0 (--optimizer.lr)"
    assert said("model.n_layer", 10**9) == "model.n_layer is 1000000000, but must be at most 4,096 (--model.n_layer)"
    assert said("data.num_workers", 100_000) == "data.num_workers is 100000, but must be at most 256 (--data.num_workers)"
    assert said("model.dropout", -0.1) == "model.dropout is -0.1, but must be at least 0 and below 1 (--model.dropout)"
    assert said("trainer.max_steps", 0) == "trainer.max_steps is 0, but must be at least 1 or -1 (--trainer.max_steps)"
    assert said("trainer.limit_train_batches", 0.0) == (
        "trainer.limit_train_batches is 0.0, but must be at least 1, or a fraction above 0 and at most 1.0, or null "
        "(--trainer.limit_train_batches)"
    )


def test_numbers_of_foreign_classes_must_be_finite_where_the_user_gives_them():
    config = Namespace(optimizer=Namespace(class_path="mine.Adam", init_args=Namespace(lr=-5.0, momentum=7.0, cap=math.inf)))
    assert number_problems(config, set()) == {}  # a default of that class
    assert set(number_problems(config, {"optimizer.lr", "optimizer.momentum", "optimizer.cap"})) == {"optimizer.cap"}
    config = Namespace(architecture=Namespace(class_path="mine.Net", init_args=Namespace(width=10**30)))
    assert set(number_problems(config, {"architecture.width"})) == {"architecture.width"}


@pytest.mark.parametrize(("given", "meant"), [("20", 20), ("1", 1), ("1.0", 1.0), ("0.5", 0.5)])
def test_a_count_is_not_taken_for_a_fraction(given, meant):
    assert repr(parse("fit", ["--trainer.limit_val_batches", given]).config.trainer.limit_val_batches) == repr(meant)


# ---- What a class accepts is not narrower than its domain -------------------------------------------------------

NEEDED = {"BatchRamp": {"tokens_per_batch": [(0, 64)]}, "TextSamples": {"prompts": ["a"], "every_n_steps": 5}}
NEEDED["TaskScores"] = {"tasks": ["a.jsonl"]}
NEEDED["ValidateEvery"] = {"every_n_steps": 5}
NEEDED["Mixture"] = {"sources": {}, "phases": []}
NARROWER = {
    "Characters.vocab_size": "3 ids at least",
    "BPE.vocab_size": "257 ids at least",
    "BatchRamp.tokens_per_batch": "pairs in order",
    "SpikeGuard.window": "not below min_steps",
    "SpikeGuard.min_steps": "not above window",
    "WSD.decay_steps": "excludes decay_fraction",
    "MuonAdamW.betas": "a pair",
    "Lion.betas": "a pair",
}


@pytest.mark.parametrize("group", [*(group for group in CLASSES if group != "optimizer"), "data.tokenizer"])
def test_no_class_refuses_what_its_domain_accepts(group):
    for cls in known_classes(group).values():
        if not cls.__module__.startswith("lit_llm."):
            continue
        for key in numbers_of(group, cls):
            name = key.removeprefix(f"{group}.")
            if f"{cls.__name__}.{name}" in NARROWER:
                continue
            domain = RANGES[key, cls]
            for value in inside(domain):
                cls(**{**NEEDED.get(cls.__name__, {}), name: value})
            if not isinstance(cls, type) or not issubclass(cls, Callback) or name == "tokens_per_batch":
                continue
            for value in outside(domain):  # callbacks work without the command line, and check themselves
                with pytest.raises(ValueError, match=rf"^{cls.__name__}\({name}\) is "):
                    cls(**{**NEEDED.get(cls.__name__, {}), name: value})


# ---- Through the command line -----------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LIT_LLM_CACHE", str(tmp_path / "cache"))
    Path("text.txt").write_text(TEXT)
    Path("tiny.yaml").write_text(RECIPE)
    return tmp_path


def refused(capsys, *arguments: str) -> str:
    before = set(Path().rglob("*"))
    code, out, err = run(capsys, *arguments)
    assert code == 2 and out == "", (code, out, err)
    assert set(Path().rglob("*")) == before, "something was written"
    return err


@pytest.mark.parametrize("command", ["fit", "check", "plan"])
def test_each_command_that_takes_a_recipe_refuses_numbers_outside_their_domain_together(folder, capsys, command):
    flags = {"--optimizer.lr": ".inf", "--loss.z_loss": ".nan", "--model.rope_theta": "-.inf", "--checkpoint.keep_last": "0"}
    err = refused(capsys, command, "--config", "tiny.yaml", *(word for flag in flags.items() for word in flag))
    assert sorted(line.split("(")[-1].rstrip(")") for line in err.splitlines()) == sorted(flags)


def test_prepare_refuses_them_too(folder, capsys):
    err = refused(
        capsys, "prepare", "--data", "TextFiles", "--data.paths", "text.txt", "--out", "shards", "--shard_tokens", "0"
    )
    assert err == "error: shard_tokens is 0, but must be at least 1 (--shard_tokens)\n"


@pytest.mark.parametrize("seed", ["-1", str(2**32), str(2**64)])
def test_a_seed_that_numpy_does_not_take_is_refused(folder, capsys, seed):
    assert "seed_everything is" in refused(capsys, "fit", "--config", "tiny.yaml", "--seed_everything", seed)


SIZES = {
    "model.n_layer": 10**9,
    "model.n_embd": 10**12,
    "model.vocab_size": 10**12,
    "model.block_size": 10**12,
    "data.num_workers": 100_000,
    "trainer.devices": 100_000,
}


@pytest.mark.parametrize("key", SIZES)
def test_a_size_far_above_any_real_one_is_refused_by_a_limit_that_is_stated(folder, capsys, key):
    err = refused(capsys, "fit", "--config", "tiny.yaml", f"--{key}", str(SIZES[key]))
    assert err == f"error: {key} is {SIZES[key]}, but must be {DOMAINS[key].rule(SIZES[key])} (--{key})\n"


@pytest.mark.parametrize("command", [find_lr, find_batch, plan, generate, chat], ids=lambda each: each.__name__)
def test_the_own_flags_of_commands_have_ranges_too(command):
    flags: OwnFlags = getattr(command, "_own_flags", None) or command.own_flags
    flags = flags()
    required = ["--run", "x"] if command in (generate, chat) else []
    numbers = [each for each in flags._actions if each.type in (int, float)]
    assert numbers and {each.dest for each in numbers} == flags._ranges.keys()
    for name, domain in flags._ranges.items():
        for value in inside(domain):
            assert getattr(flags.split([*required, f"--{name}={value}"])[0], name) == pytest.approx(value, rel=1e-12)
        for value in outside(domain):
            if domain.whole and not math.isfinite(value):
                continue  # refused as text
            flags.split([*required, f"--{name}={value}"])
            assert len(flags.problems) == 1 and re.search(rf"^{name} is .*\(--{name}\)$", flags.problems[0])


# ---- Null -------------------------------------------------------------------------------------------------------


def null_is_refused(capsys, content: dict, *keys: str) -> None:
    Path("null.yaml").write_text(yaml.safe_dump(content))
    err = refused(capsys, "fit", "--config", "tiny.yaml", "--config", "null.yaml")
    assert sorted(err.splitlines()) == sorted(f"error: {key} is null, but needs a value (--{key})" for key in keys)


def test_an_argument_that_needs_a_value_is_not_null(folder, capsys):
    content = {
        "model": {"n_layer": None, "bias": None, "n_kv_head": None},
        "compute": {"matmul_precision": None},
        "optimizer": {"init_args": {"lr": None, "betas": None}},
        "data": {"init_args": {"global_batch_size": None, "val_fraction": None, "micro_batch_size": None}},
        "schedule": {"init_args": {"warmup_steps": None, "total_steps": None}},
        "spike_guard": {"init_args": {"window": None}},
        "checkpoint": {"init_args": {"keep_last": None, "every_n_minutes": None}},
        "trainer": {"max_steps": None, "strategy": None, "max_time": None},
        "resume": None,
        "replace": None,
        "init_from": None,
    }
    optional = {"n_kv_head", "micro_batch_size", "total_steps", "every_n_minutes", "max_time"}  # None is in their types
    groups = {group: value.get("init_args", value) for group, value in content.items() if value}
    keys = [f"{group}.{name}" for group, values in groups.items() for name in values if name not in optional]
    null_is_refused(capsys, content, *keys, "resume", "replace")


def test_a_group_that_every_run_needs_is_not_null(folder, capsys):
    null_is_refused(capsys, dict.fromkeys(["model", "loss", "compute", "trainer"]), "model", "loss", "compute", "trainer")


# ---- Memory -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        # 2 matrices of 10^8 x 16 fp32 values; AdamW: weights, gradients and two states of each, 51.2 GB
        (["--model.vocab_size", "100000000", "--optimizer", "torch.optim.AdamW"], "optimizer state take 51.4 GB"),
        (["--model.n_embd", "1000000"], "(lower --model.n_layer, --model.n_embd"),
        (["--data.micro_batch_size", "10000000", "--data.global_batch_size", "10000000"], "(lower --data.micro_batch_size"),
        (["--model.block_size", "1000000000"], "--data.block_size"),
        (["--trainer.devices", "1000", "--data.global_batch_size", "2000"], "in 1,000 processes"),
    ],
)
def test_fit_refuses_what_the_memory_cannot_hold_before_building_it(folder, capsys, monkeypatch, flags, words):
    monkeypatch.setattr("lit_llm.plan.host_memory.memory_bytes", lambda device: 25_300_000_000)
    err = refused(capsys, "fit", "--config", "tiny.yaml", *flags)
    assert words in err and "this machine has 25.3 GB" in err and err.count("\n") == 1


class OwnGuard(SpikeGuard):
    """A user's class, with a default beyond the range of its base's argument, which it does not pass on."""

    def __init__(self, window: int = 10**7, sigma: float = 6.0) -> None:
        super().__init__(sigma=sigma)


def test_a_users_subclass_may_have_its_own_default_but_what_is_given_has_the_range():
    config = nested("spike_guard.window", 10**7, OwnGuard)
    assert number_problems(config, set()) == {}
    assert set(number_problems(config, {"spike_guard.window"})) == {"spike_guard.window"}
    assert set(number_problems(nested("spike_guard.window", 10**7, SpikeGuard), set())) == {"spike_guard.window"}
