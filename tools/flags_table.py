"""`make flags-table`: writes docs/flags.md from the parsers of all commands."""

import argparse
import importlib
from collections.abc import Iterator, Sequence

from deploy.cli import COMMANDS
from deploy.flags import Parser
from tests.packages import ROOT

PAGE = ROOT / "docs" / "flags.md"
HEAD = """# Flags

Written by `make flags-table`; do not edit. `tandem COMMAND --help` shows the flags that most people use, `--help all` all of them,
`--help GROUP` one group. Flags of SGLang and vLLM with other names here are translated.
"""
# `up` passes on the flags of workers and router.
OF_UP = "\nAnd every flag of [tandem serve](#tandem-serve) and [tandem router](#tandem-router) that the cluster does not set itself.\n"


def page() -> str:
    text = HEAD
    for name in COMMANDS:
        parser = parser_of(name)
        groups = parser.groups()
        if name == "up":
            groups = {"cluster": groups["cluster"]}
        summary, usage = COMMANDS[name].summary, parser.format_usage().removeprefix("usage: ").strip()
        text += f"\n## tandem {name}\n\n`{usage}`: {summary}.\n"
        for group, actions in groups.items():
            text += f"\n### {name}: {group}\n" if len(groups) > 1 else ""
            text += "\n" + "".join(_rows(actions))
        text += OF_UP if name == "up" else ""
    return text


def parser_of(command: str) -> Parser:
    parser = importlib.import_module(COMMANDS[command].module).build_parser()
    assert isinstance(parser, Parser)
    return parser


def _rows(actions: Sequence[argparse.Action]) -> Iterator[str]:
    yield "| flag | meaning |\n|---|---|\n"
    for action in actions:
        flags = ", ".join(f"`{option}`" for option in action.option_strings)
        values = "" if action.nargs == 0 else f" {_values(action)}"
        meaning = (action.help or "").replace("%%", "%").replace("|", "\\|")
        yield f"| {flags}{values} | {meaning} |\n"


def _values(action: argparse.Action) -> str:
    """What follows the flag: its choices, or the names of its values."""
    if action.choices:
        return ", ".join(f"`{choice}`" for choice in action.choices)
    names = action.metavar if isinstance(action.metavar, tuple) else (action.metavar or "",)
    return " ".join(names) + (" ..." if action.nargs == "+" and len(names) == 1 else "")


if __name__ == "__main__":
    PAGE.write_text(page())
