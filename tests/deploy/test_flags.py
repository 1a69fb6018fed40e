"""Flags derive from dataclasses: every kind of field, both directions, one-line errors."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import pytest

from bootstrap_server.registry import BootstrapConfig
from deploy.bench.config import BenchConfig
from deploy.commands import bench, serve
from deploy.commands import router as router_command
from deploy.commands.trace import TraceConfig
from deploy.flags import Parser, add_flags, config_from, flags_of, given_argv
from deploy.launcher import up_flags
from deploy.launcher.roles import ClusterConfig
from disagg.config import DisaggConfig
from engine.config import EngineConfig, ServerConfig
from planner import command as plan
from planner.config import PlanConfig
from router.config import RouterConfig
from service.flags import ConfigError, FlagSet, FlagSpec, flag, option_of, setting, spec_of, values_by_name

CONFIGS = (
    *(EngineConfig, ServerConfig, DisaggConfig, RouterConfig, BootstrapConfig),
    *(ClusterConfig, BenchConfig, PlanConfig, TraceConfig),
)

# Numbers that may be any: a seed, a difference of priorities; and those that another flag bounds.
NO_RANGE = ("seed", "priority_scheduling_preemption_threshold", "auto_roles_enter", "max_token_id")


@dataclass(frozen=True, kw_only=True)
class Sample(FlagSet):
    page_size: int = flag(16, "tokens per page (100% of it)", least=1, most=1024)
    share: float = flag(0.5, "a share", above=0, below=1)
    dtype: str = flag("auto", "a type", choices=("auto", "float32"), refused={"fp64": "give float32"})
    limit: int | None = flag(None, "a limit", least=1, special={-1: "no limit"})
    wait_s: float = flag(1.5, "a wait", unit="s", least=0, below=math.inf, special={0: "none"})
    queue_timeout_s: float = flag(2.0, "another wait", unit="s", above=0, option="--queue-timeout-secs")
    sizes: tuple[int, ...] = flag((), "some sizes", least=2)
    disable_cache: bool = flag(False, "a switch")
    check: bool = flag(True, "a switch that is on")
    mixed: bool | None = flag(None, "a switch that may be undecided")
    urls: tuple[str, ...] = flag((), "addresses")
    by_hand: tuple[int, ...] = flag((), "parsed by the command", by_hand=True)
    given: int = setting(0, "of tests", least=0)


def parser(*, only_given: bool = False) -> Parser:
    made = Parser(prog="sample")
    add_flags(made, Sample, title="sample", only_given=only_given)
    return made


def parse(*argv: str) -> Sample:
    return config_from(parser().parse_strict(argv), Sample, by_hand=())


def test_a_setting_has_no_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--given", "3")
    assert "unknown argument '--given'" in capsys.readouterr().err
    assert Sample(given=3).given == 3
    with pytest.raises(ConfigError, match="must be at least 0"):
        Sample(given=-1)


def test_every_kind_of_field() -> None:
    argv = "--page-size 64 --share 0.25 --dtype float32 --limit -1 --disable-cache --no-check --urls a b"
    assert parse(*argv.split()) == Sample(
        page_size=64, share=0.25, dtype="float32", limit=-1, disable_cache=True, check=False, urls=("a", "b")
    )


@pytest.mark.parametrize(("argv", "mixed"), [([], None), (["--mixed"], True), (["--no-mixed"], False)])
def test_a_switch_may_be_undecided_and_is_handed_on_as_it_was_given(argv: list[str], mixed: bool | None) -> None:
    assert parse(*argv).mixed is mixed
    assert given_argv(parser(only_given=True).parse_strict(argv), Sample) == argv


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--page-size", "x"], "--page-size: must be a whole number, got 'x'"),
        (["--page-size"], "--page-size: expected one argument"),
        (["--share", "nan"], "--share: must be a number, got nan"),
        (["--dtype", "int3"], "--dtype: invalid choice: 'int3'"),
        (["--dtype", "fp64"], "--dtype: fp64 is not served here: give float32"),
        (["--page-sise", "1"], "unknown argument '--page-sise'; did you mean --page-size?"),
        (["--page", "1"], "unknown argument '--page'"),
        (["--disable-cache=1"], "--disable-cache: ignored explicit argument"),
        (["stray"], "unknown argument 'stray'"),
        (["--by-hand", "1"], "unknown argument '--by-hand'"),
    ],
)
def test_a_bad_flag_is_one_line_and_status_2(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        parse(*argv)
    err = capsys.readouterr().err
    assert exit_info.value.code == 2
    assert said in err and err.count("\n") == 1 and err.startswith("sample: ")


def test_help_shows_text_default_and_choices() -> None:
    text = parser().format_help()
    assert "tokens per page (100% of it) (1 to 1024; default: 16)" in text
    assert "--wait SECONDS" in text and "a wait (0: none; default: 1.5)" in text
    assert "--queue-timeout-secs SECONDS" in text and "--limit N" in text and "a limit (-1: no limit)" in text
    assert "--dtype {auto,float32}" in text and "--no-check" in text and "--by-hand" not in text


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"page_size": 0}, "--page-size: must be 1 to 1024, got 0; the default is 16"),
        ({"share": 1.0}, "--share: must be above 0 and below 1, got 1; the default is 0.5"),
        ({"limit": 0}, "--limit: must be at least 1 (-1: no limit), got 0"),
        ({"wait_s": -1.0}, "--wait: must be at least 0 and finite (0: none), got -1; the default is 1.5"),
        ({"wait_s": math.inf}, "--wait: must be at least 0 and finite (0: none), got inf; the default is 1.5"),
        ({"wait_s": math.nan}, "--wait: must be at least 0 and finite (0: none), got nan; the default is 1.5"),
        ({"queue_timeout_s": 0.0}, "--queue-timeout-secs: must be above 0, got 0; the default is 2"),
        ({"sizes": (2, 1)}, "--sizes: must be at least 2, got 1"),
        ({"dtype": "int3"}, "--dtype: must be one of auto, float32, got 'int3'; the default is auto"),
        ({"dtype": "fp64"}, "--dtype: fp64 is not served here: give float32; the default is auto"),
    ],
)
def test_a_value_out_of_range_names_flag_value_range_and_remedy(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Sample(**values)
    assert str(caught.value) == said


def test_values_are_shown_by_the_names_of_their_flags() -> None:
    shown = values_by_name(Sample())
    assert shown["wait"] == 1.5 and shown["queue_timeout_secs"] == 2.0 and shown["page_size"] == 16


def test_given_flags_travel_to_another_process_unchanged() -> None:
    argv = ["--page-size", "16", "--limit", "-1", "--disable-cache", "--no-check", "--urls", "a", "b"]
    handed_on = given_argv(parser(only_given=True).parse_strict(argv), Sample)
    assert handed_on == ["--page-size=16", "--limit=-1", "--disable-cache", "--no-check", "--urls", "a", "b"]
    assert parse(*handed_on) == parse(*argv)
    assert given_argv(parser(only_given=True).parse_strict([]), Sample) == []


@pytest.mark.parametrize("config_class", CONFIGS)
def test_one_habit_of_units_and_whole_sentences(config_class: type) -> None:
    """Seconds, in fields that end in `_s`; no help text goes on in the next flag's."""
    for field in fields(config_class):
        spec, name = spec_of(field), option_of(field)
        assert (spec.unit == "s") == field.name.endswith("_s") or spec.unit == "GB/s", name
        assert not name.endswith(("-s", "-ms", "-us")) or name == "--transfer-gb-s", name
        assert spec.help and not spec.help.startswith("...") and not spec.help.endswith((",", ".")), name
        if field.type in (int, float):
            assert spec.bounds() or field.name in NO_RANGE, name


def outside(numbers: FlagSpec) -> Iterator[float]:
    """Values next to the bounds that are out of range."""
    near = [numbers.least - 1, numbers.least - 2] if numbers.least is not None else []
    near += [numbers.most + 1] if numbers.most is not None else []
    near += [bound for bound in (numbers.above, numbers.below) if bound is not None]
    yield from (value for value in near if value not in numbers.special)


@pytest.mark.parametrize("config_class", CONFIGS)
def test_every_flag_refuses_what_is_out_of_its_range_by_name(config_class: type) -> None:
    config_class()
    for field in fields(config_class):
        spec = spec_of(field)
        bad = [*outside(spec), *(["no such choice"] if spec.choices else [])]
        for value in bad:
            with pytest.raises(ConfigError, match=f"^{option_of(field)}: must be "):
                config_class(**{field.name: (value,) if field.default == () else value})
        for value in spec.special:
            config_class(**{field.name: value})


# ---- Pages of help, and the model as a word.

COMMANDS_OF_PAGES = {"serve": serve, "up": up_flags, "router": router_command, "bench": bench, "plan": plan}


def shown(command: str, *argv: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as exit_info:
        COMMANDS_OF_PAGES[command].build_parser().parse_strict([*argv])
    assert exit_info.value.code == 0
    return capsys.readouterr().out


def flags_in(page: str) -> set[str]:
    return set(re.findall(r"^  (--[a-z][a-z0-9-]*)", page, re.MULTILINE))


def groups_in(page: str) -> list[str]:
    return [group for group in re.findall(r"^([a-z]+):$", page, re.MULTILINE) if group != "help"]


@pytest.mark.parametrize("command", COMMANDS_OF_PAGES)
def test_help_shows_twenty_flags_and_all_shows_every_one(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    module = COMMANDS_OF_PAGES[command]
    common, everything = shown(command, "--help", capsys=capsys), shown(command, "--help", "all", capsys=capsys)
    parser = module.build_parser()
    options = {action.option_strings[0] for actions in parser.groups().values() for action in actions}
    assert len(flags_in(common)) == len(module.COMMON) == 20 and flags_in(common) < flags_in(everything) == options
    assert groups_in(everything) == list(parser.groups())
    assert shown(command, "-h", capsys=capsys) == common


@pytest.mark.parametrize("command", COMMANDS_OF_PAGES)
def test_help_of_a_group_shows_its_flags(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    groups = COMMANDS_OF_PAGES[command].build_parser().groups()
    for group, actions in groups.items():
        page = shown(command, f"--help={group}", capsys=capsys)
        assert groups_in(page) == [group]
        assert flags_in(page) == {action.option_strings[0] for action in actions}


def test_the_model_and_the_port_come_first() -> None:
    for command, first in {
        "serve": ["model", "server"],
        "up": ["model", "cluster"],
        "router": ["workers", "server"],
    }.items():
        assert list(COMMANDS_OF_PAGES[command].build_parser().groups())[:2] == first


def test_help_of_no_group_names_the_groups(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        serve.build_parser().parse_strict(["--help", "memori"])
    err = capsys.readouterr().err
    assert exit_info.value.code == 2 and err.count("\n") == 1
    assert "--help: there is no group 'memori'; one of: all, model, server, keys" in err


@pytest.mark.parametrize("command", ["serve", "up"])
@pytest.mark.parametrize(
    "argv",
    [
        "a/model",
        "a/model --page-size 4",
        "--page-size 4 a/model",
        "--page-size 4 a/model --disable-radix-cache",
        "a/model --model-path a/model",
        "a/model --model a/model",
    ],
)
def test_the_model_may_be_a_word_anywhere(command: str, argv: str) -> None:
    assert COMMANDS_OF_PAGES[command].build_parser().parse_strict(argv.split()).model_path == "a/model"


@pytest.mark.parametrize("command", ["serve", "up"])
@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("a --model-path b", "MODEL 'a' and --model-path 'b' are two models; give one of them"),
        ("--model b a", "MODEL 'a' and --model-path 'b' are two models; give one of them"),
        ("a b", "unknown argument 'b': the model is 'a'"),
        ("a --page-sise 4", "unknown argument '--page-sise'; did you mean --page-size?"),
    ],
)
def test_two_models_are_one_clear_error(command: str, argv: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        COMMANDS_OF_PAGES[command].build_parser().parse_strict(argv.split())
    err = capsys.readouterr().err
    assert exit_info.value.code == 2 and said in err and err.count("\n") == 1


@pytest.mark.parametrize("config_class", [EngineConfig, ServerConfig, DisaggConfig, RouterConfig, ClusterConfig])
def test_every_flag_has_a_topic(config_class: type[FlagSet]) -> None:
    assert [flag.option for flag in flags_of(config_class) if not flag.topic] == []
