"""Formats of tool calls, by SGLang's and vLLM's parser names.

qwen25       text <tool_call>\\n{...}\\n</tool_call>\\n<tool_call>...      (Qwen 2.5 and 3, Hermes)
llama3       {...}; {...}      or  text <|python_tag|>{...}; {...}        (Llama 3.1, 3.2, 3.3)
mistral      text [TOOL_CALLS] [{...}, {...}]  or  [TOOL_CALLS]NAME[ARGS]{...}
pythonic     [NAME(key=value), NAME()]
llama4       the same, or  text <|python_start|>[...]<|python_end|>
deepseekv3, deepseekv31, kimi_k2: a section of calls, the name before the arguments
glm45, qwen3_coder: <tool_call> with a tag for each argument (tagged_call.py)
array        [{...}, {...}]                                               (a forced call, any model)
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from engine.text.headed_call import HeadedCall
from engine.text.json_call import JsonCall
from engine.text.python_call import PythonCall
from engine.text.tagged_call import GLM_TAGS, QWEN_TAGS, Schemas, TaggedCall


class CallScanner(Protocol):
    """Parser of one call. `name`: set once the text surely is a call. `broken`: it is none."""

    @property
    def name(self) -> str | None: ...
    @property
    def id(self) -> str: ...
    @property
    def broken(self) -> bool: ...
    @property
    def done(self) -> bool: ...

    def feed(self, text: str) -> int:
        """Return how many characters were consumed; negative gives back earlier ones."""

    def end(self) -> None:
        """Close a started call."""

    def new_arguments(self) -> str:
        """New JSON of the arguments, in total one object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """How a model writes calls as JSON.

    `marker`: text before calls. `bare`: text that starts with it is calls. `bracket`: optional.
    `opener`: starts a call. `separator`: between calls, empty if the opener suffices. `fillers`:
    allowed after a call. `closer`: after the last. `trigger`, `begin`, `after_number`, `end`: the
    structural tag with NAME for the function's; empty if strict schemas are unsupported.
    """

    scanner: Callable[[Schemas], CallScanner] = lambda _: JsonCall()
    marker: str = ""
    bare: str = ""
    bracket: str = ""
    opener: str = "{"
    separator: str = ""
    fillers: tuple[str, ...] = ()
    closer: str = ""
    trigger: str = ""
    begin: str = ""
    after_number: str = ""
    end: str = ""

    @property
    def marks(self) -> tuple[str, ...]:
        """Marker and unambiguous opener; models may omit the marker."""
        return tuple(mark for mark in (self.marker, self.opener if len(self.opener) > 1 else "") if mark)


def _headed(pattern: str) -> Callable[[Schemas], CallScanner]:
    header = re.compile(pattern, re.DOTALL)
    return lambda _: HeadedCall(header)


class MistralCall:
    """Either Mistral format, by the first character."""

    def __init__(self) -> None:
        self._call: JsonCall | HeadedCall | None = None

    @property
    def name(self) -> str | None:
        return None if self._call is None else self._call.name

    @property
    def id(self) -> str:
        return "" if self._call is None else self._call.id

    @property
    def broken(self) -> bool:
        return self._call is not None and self._call.broken

    @property
    def done(self) -> bool:
        return self._call is not None and self._call.done

    def feed(self, text: str) -> int:
        if self._call is None:
            self._call = JsonCall() if text.startswith("{") else HeadedCall(_MISTRAL_HEADER)
        return self._call.feed(text)

    def end(self) -> None:
        if self._call is not None:
            self._call.end()

    def new_arguments(self) -> str:
        return "" if self._call is None else self._call.new_arguments()


_MISTRAL_HEADER = re.compile(r"(?P<name>[\w.-]+)(?:\[CALL_ID\](?P<id>\w+))?\[ARGS\]\s*")

QWEN25 = CallFormat(
    marker="<tool_call>",
    closer="</tool_call>",
    trigger="<tool_call>",
    begin='<tool_call>\n{"name": "NAME", "arguments": ',
    end="}\n</tool_call>",
)
LLAMA3 = CallFormat(
    marker="<|python_tag|>",
    bare="{",
    separator=";",
    trigger="<|python_tag|>",
    begin='<|python_tag|>{"name": "NAME", "parameters": ',
    end="}",
)
MISTRAL = CallFormat(
    scanner=lambda _: MistralCall(),
    marker="[TOOL_CALLS]",
    bracket="[",
    opener="",
    separator=",",
    closer="]",
    trigger="[TOOL_CALLS]",
    begin='[TOOL_CALLS] [{"name": "NAME", "arguments": ',
    end="}]",
)
PYTHONIC = CallFormat(scanner=lambda _: PythonCall(), bare="[", bracket="[", opener="", separator=",", closer="]")
LLAMA4 = CallFormat(
    scanner=lambda _: PythonCall(),
    marker="<|python_start|>",
    bare="[",
    bracket="[",
    opener="",
    separator=",",
    fillers=("]",),
    closer="<|python_end|>",
)
DEEPSEEK_V3 = CallFormat(
    scanner=_headed(r"<｜tool▁call▁begin｜>\s*function\s*<｜tool▁sep｜>(?P<name>[^\n]+)\n```json\s*"),
    marker="<｜tool▁calls▁begin｜>",
    opener="<｜tool▁call▁begin｜>",
    fillers=("```", "<｜tool▁call▁end｜>"),
    closer="<｜tool▁calls▁end｜>",
    trigger="<｜tool▁call▁begin｜>",
    begin="<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n",
    end="\n```<｜tool▁call▁end｜>",
)
DEEPSEEK_V31 = CallFormat(
    scanner=_headed(r"<｜tool▁call▁begin｜>\s*(?P<name>[^\n]+?)<｜tool▁sep｜>\s*"),
    marker="<｜tool▁calls▁begin｜>",
    opener="<｜tool▁call▁begin｜>",
    fillers=("<｜tool▁call▁end｜>",),
    closer="<｜tool▁calls▁end｜>",
    trigger="<｜tool▁call▁begin｜>",
    begin="<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>",
    end="<｜tool▁call▁end｜>",
)
KIMI_K2 = CallFormat(
    scanner=_headed(
        r"<\|tool_call_begin\|>\s*(?P<id>(?:functions\.)?(?P<name>[\w.-]+):\d+)\s*<\|tool_call_argument_begin\|>\s*"
    ),
    marker="<|tool_calls_section_begin|>",
    opener="<|tool_call_begin|>",
    fillers=("<|tool_call_end|>",),
    closer="<|tool_calls_section_end|>",
    trigger="<|tool_call_begin|>",
    begin="<|tool_call_begin|>functions.NAME:",
    after_number="<|tool_call_argument_begin|>",
    end="<|tool_call_end|>",
)
GLM45 = CallFormat(scanner=lambda schemas: TaggedCall(GLM_TAGS, schemas), marker="<tool_call>", opener="")
QWEN3_CODER = CallFormat(
    scanner=lambda schemas: TaggedCall(QWEN_TAGS, schemas),
    marker="<tool_call>",
    opener="<function=",
    closer="</tool_call>",
)
ARRAY = CallFormat(bare="[", bracket="[", separator=",", closer="]")
CALL_FORMATS = {
    "deepseekv3": DEEPSEEK_V3,
    "deepseek_v3": DEEPSEEK_V3,
    "deepseekv31": DEEPSEEK_V31,
    "deepseek_v31": DEEPSEEK_V31,
    "glm": GLM45,
    "glm45": GLM45,
    "glm47": GLM45,
    "hermes": QWEN25,
    "kimi_k2": KIMI_K2,
    "llama3": LLAMA3,
    "llama3_json": LLAMA3,
    "llama4": LLAMA4,
    "llama4_pythonic": LLAMA4,
    "mistral": MISTRAL,
    "pythonic": PYTHONIC,
    "qwen": QWEN25,
    "qwen25": QWEN25,
    "qwen3_coder": QWEN3_CODER,
}
