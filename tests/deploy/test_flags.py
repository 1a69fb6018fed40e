"""Flags derive from dataclasses: every kind of field, both directions, one-line errors."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from deploy.flags import Parser, add_flags, config_from, flags_of, given_argv
from disagg.config import DisaggConfig
from engine.config import EngineConfig, ServerConfig
from router.config import RouterConfig


def flag(default: Any, help: str = "", **more: Any) -> Any:
    return field(default=default, metadata={"help": help, **more})


@dataclass(frozen=True, kw_only=True)
class Sample:
    page_size: int = flag(16, "tokens in a page (100% of it)")
    share: float = flag(0.5)
    dtype: str = flag("auto", choices=("auto", "float32"))
    limit: int | None = flag(None)
    disable_cache: bool = flag(False)
    check: bool = flag(True)
    mixed: bool | None = flag(None)
    urls: tuple[str, ...] = flag(())
    by_hand: tuple[int, ...] = flag((), cli="special")


def parser(*, only_given: bool = False) -> Parser:
    made = Parser(prog="sample")
    add_flags(made, Sample, title="sample", only_given=only_given)
    return made


def parse(*argv: str) -> Sample:
    return config_from(parser().parse_strict(argv), Sample, by_hand=())


def test_nothing_given_is_the_dataclass_default() -> None:
    assert parse() == Sample()


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
    assert "tokens in a page (100% of it) (default: 16)" in text
    assert "--dtype {auto,float32}" in text and "--no-check" in text and "--by-hand" not in text


def test_given_flags_travel_to_another_process_unchanged() -> None:
    argv = ["--page-size", "16", "--limit", "-1", "--disable-cache", "--no-check", "--urls", "a", "b"]
    handed_on = given_argv(parser(only_given=True).parse_strict(argv), Sample)
    assert handed_on == ["--page-size=16", "--limit=-1", "--disable-cache", "--no-check", "--urls", "a", "b"]
    assert parse(*handed_on) == parse(*argv)
    assert given_argv(parser(only_given=True).parse_strict([]), Sample) == []


@pytest.mark.parametrize("config_class", [EngineConfig, ServerConfig, DisaggConfig, RouterConfig])
def test_the_real_configs_become_flags_with_help(config_class: type) -> None:
    flags = list(flags_of(config_class))
    assert flags and all(flag.help for flag in flags)
    made = Parser(prog="real")
    add_flags(made, config_class, title="real")
    assert "--" in made.format_help()
