"""Command-line flags derived from config dataclasses (service/flags.py), and one-line errors."""

import argparse
import dataclasses
import math
import sys
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn, TypeVar

from deploy.foreign.translate import CannotFollow, ForeignFlags, translate
from service.flags import FlagSet, FlagSpec, nearest, option_of, shown, spec_of, topic_of

# Groups of help of what a worker computes, in their order.
ENGINE_TOPICS = ("parallel", "memory", "scheduling", "cache", "speculative", "lora", "output")

Config = TypeVar("Config", bound=FlagSet)
Parse = Callable[[str], Any]


@dataclasses.dataclass(frozen=True)
class Flag:
    """`value_type`: bool is a switch. `topic`: group of help."""

    name: str
    option: str
    topic: str
    value_type: type
    is_list: bool
    default: Any
    spec: FlagSpec

    @property
    def is_switch(self) -> bool:
        return self.value_type is bool


def flags_of(config_class: type[FlagSet], *, skip: Collection[str] = ()) -> Iterator[Flag]:
    """Without `skip` and those parsed by hand."""
    hints = typing.get_type_hints(config_class)
    for field in dataclasses.fields(config_class):
        spec = spec_of(field)
        if field.name not in skip and not spec.by_hand:
            topic = topic_of(config_class, field.name)
            yield Flag(field.name, option_of(field), topic, *_value_type(hints[field.name]), field.default, spec)


def add_flags(
    parser: "Parser", config_class: type[FlagSet], *, title: str, skip: Collection[str] = (), only_given: bool = False
) -> None:
    """Add flags by topic, else as `title`. `only_given` omits untyped flags (for `given_argv`)."""
    for flag in flags_of(config_class, skip=skip):
        parser.add(flag.topic or title, flag.option, **_argparse_keywords(flag, only_given=only_given))


def config_from(args: argparse.Namespace, config_class: type[Config], **by_hand: Any) -> Config:
    """Raises ConfigError."""
    values = {flag.name: getattr(args, flag.name) for flag in flags_of(config_class, skip=by_hand)}
    frozen = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    return config_class(**frozen, **by_hand)


def given_argv(args: argparse.Namespace, config_class: type[FlagSet], *, skip: Collection[str] = ()) -> list[str]:
    """Argv that passes typed flags on."""
    argv: list[str] = []
    for flag in flags_of(config_class, skip=skip):
        if hasattr(args, flag.name):
            argv += _written(flag, getattr(args, flag.name))
    return argv


class Parser(argparse.ArgumentParser):
    """An argparse parser without abbreviations, with one-line errors and pages of help.

    - foreign: flags of other servers
    - topics: groups of help in their order; others follow
    - common: fields that `--help` shows; (): all
    - model: the field that a word without a flag sets, and its help
    """

    def __init__(
        self,
        *,
        foreign: ForeignFlags | None = None,
        topics: Sequence[str] = (),
        common: Collection[str] = (),
        model: tuple[str, str] | None = None,
        **keywords: Any,
    ) -> None:
        self._foreign = foreign
        self._common = common
        self._model = None if model is None else model[0]
        self._model_help = "" if model is None else model[1]
        self._groups: dict[str, list[argparse.Action]] = {topic: [] for topic in topics}
        keywords.setdefault("formatter_class", partial(argparse.HelpFormatter, max_help_position=38, width=120))
        keywords.setdefault("usage", "%(prog)s [MODEL] [FLAGS]" if model else "%(prog)s [FLAGS]")
        super().__init__(allow_abbrev=False, add_help=False, **keywords)
        self._help = self.add_argument(
            *("-h", "--help"),
            action=_Help,
            nargs="?",
            const="",
            default=argparse.SUPPRESS,
            metavar="GROUP",
            help="show the flags that most people use, all of them (--help all), or a group",
        )

    def add(self, topic: str, *names: str, **keywords: Any) -> None:
        self._groups.setdefault(topic, []).append(self.add_argument(*names, **keywords))

    def groups(self) -> dict[str, list[argparse.Action]]:
        return {topic: actions for topic, actions in self._groups.items() if actions}

    def format_help(self, page: str = "") -> str:
        """`page`: "" (common flags), "all" or a group."""
        groups = self.groups()
        if page not in ("", "all", *groups):
            self.error(f"--help: there is no group {page!r}; one of: all, {', '.join(groups)}")
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, [], [])
        if page in ("", "all"):
            formatter.add_text(self.description)
        for topic, actions in groups.items():
            shown = [action for action in actions if page or not self._common or action.dest in self._common]
            if shown and page in ("", "all", topic):
                formatter.start_section(topic)
                formatter.add_arguments([*self._positional(topic), *shown])
                formatter.end_section()
        formatter.start_section("help")
        formatter.add_arguments([self._help])
        formatter.end_section()
        if len(groups) > 1:
            formatter.add_text(f"Groups: {', '.join(groups)}.")
        return formatter.format_help()

    def error(self, message: str) -> NoReturn:
        text = message.removeprefix("argument ")
        print(f"{self.prog}: {text} (see {self.prog} --help)", file=sys.stderr)
        raise SystemExit(2)

    @property
    def options(self) -> Collection[str]:
        """Names with their dashes."""
        return self._option_string_actions.keys()

    def parse_strict(self, argv: Sequence[str]) -> argparse.Namespace:
        """The nearest flag is suggested for an unknown one."""
        args, unknown = self.parse_known_args(self._ours(argv))
        flags = [word for word in unknown if word.startswith("-")]
        if unknown and (flags or self._model is None):
            others = () if self._foreign is None else self._foreign.flags
            text = (flags or unknown)[0]
            near = nearest(text.partition("=")[0], [*self._option_string_actions, *others])
            self.error(f"unknown argument {text!r}{near}")
        if unknown:
            self._set_model(args, *unknown)
        return args

    def _set_model(self, args: argparse.Namespace, word: str, *more: str) -> None:
        # argparse itself takes a word before all flags only
        assert self._model is not None
        if more:
            self.error(f"unknown argument {more[0]!r}: the model is {word!r}")
        given = getattr(args, self._model, None)
        if given and given != word:
            option = "--" + self._model.replace("_", "-")
            self.error(f"MODEL {word!r} and {option} {given!r} are two models; give one of them")
        setattr(args, self._model, word)

    def _positional(self, topic: str) -> list[argparse.Action]:
        if self._model is None or topic != next(iter(self.groups())):
            return []
        return [argparse.Action([], self._model, metavar="MODEL", help=self._model_help)]

    def _ours(self, argv: Sequence[str]) -> Sequence[str]:
        if self._foreign is None:
            return argv
        try:
            translated = translate(argv, known=self._option_string_actions, foreign=self._foreign)
        except CannotFollow as error:
            self.error(str(error))
        for warning in translated.warnings:
            print(f"{self.prog}: warning: {warning}", file=sys.stderr)
        return translated.argv


class _Help(argparse.Action):
    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, page: Any, option: str | None = None
    ) -> NoReturn:
        assert isinstance(parser, Parser)
        print(parser.format_help(str(page)), end="")
        raise SystemExit(0)


def _value_type(hint: Any) -> tuple[type, bool]:
    if isinstance(hint, types.UnionType):
        (hint,) = [arm for arm in typing.get_args(hint) if arm is not types.NoneType]
    if typing.get_origin(hint) is tuple:
        return typing.get_args(hint)[0], True
    return hint, False


def _argparse_keywords(flag: Flag, *, only_given: bool) -> dict[str, Any]:
    keywords: dict[str, Any] = {
        "dest": flag.name,
        "default": argparse.SUPPRESS if only_given else flag.default,
        "help": _help_text(flag),
    }
    if flag.is_switch and flag.default is False:
        return keywords | {"action": "store_true"}
    if flag.is_switch:
        return keywords | {"action": argparse.BooleanOptionalAction}
    if flag.is_list:
        keywords |= {"nargs": "+"}
    return keywords | {"type": _parser_of(flag), "choices": flag.spec.choices, "metavar": _metavar(flag)}


def _parser_of(flag: Flag) -> Parse:
    """Values of other servers are refused with a remedy."""

    def parsed(text: str) -> Any:
        if (refusal := flag.spec.refusal(text)) is not None:
            raise argparse.ArgumentTypeError(refusal)
        return _PARSERS[flag.value_type](text)

    return parsed if flag.spec.refused else _PARSERS[flag.value_type]


def _metavar(flag: Flag) -> str:
    spec = flag.spec
    if spec.choices:
        return "{" + ",".join(spec.choices) + "}"
    return _UNITS.get(spec.unit, spec.unit.upper()) if spec.unit else _METAVARS[flag.value_type]


def _help_text(flag: Flag) -> str:
    spec = flag.spec
    notes = [spec.bounds()] if _has_two_ends(spec) else []
    notes += spec.meanings()
    if not (flag.is_switch or flag.default in (None, "", ()) or "default:" in spec.help):
        notes.append(f"default: {shown(flag.default)}")
    return (spec.help + (f" ({'; '.join(notes)})" if notes else "")).replace("%", "%%")


def _has_two_ends(spec: FlagSpec) -> bool:
    lower = spec.above if spec.least is None else spec.least
    upper = spec.below if spec.most is None else spec.most
    return None not in (lower, upper) and upper != math.inf


def _written(flag: Flag, value: Any) -> list[str]:
    if flag.is_switch:
        return [flag.option if value else flag.option.replace("--", "--no-", 1)] if value != flag.default else []
    if flag.is_list:
        return [flag.option, *(str(item) for item in value)] if value else []
    return [] if value is None else [f"{flag.option}={value}"]


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}") from None


def _real(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, got {text!r}") from None
    if value != value:
        raise argparse.ArgumentTypeError("must be a number, got nan")
    return value


_PARSERS: Mapping[type, Parse] = {int: _whole, float: _real, str: str}
_UNITS = {"s": "SECONDS"}
_METAVARS = {int: "N", float: "X", str: "TEXT"}
