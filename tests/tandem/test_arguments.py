"""What `LLM` and its calls take: flags as keywords, parameters by all their names, and errors that name the argument."""

import asyncio
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

import tandem
from deploy.launcher.up_flags import build_parser
from service.flags import ConfigError
from service.http.errors import ApiError
from tandem.errors import RequestError
from tandem.flags import argv_of, parse_flags
from tandem.llm import _plan_all, conversations, each_fields, listed, score_inputs
from tandem.params import Sampling, WantedLogprobs, encoded, fields_of, take_logprobs

# ---- the package


def test_the_package_is_cheap_to_import() -> None:
    """Nor do flags and parameters need torch."""
    code = (
        "import sys, tandem; heavy = {'torch', 'aiohttp', 'msgspec', 'numpy'} & set(sys.modules); assert not heavy, heavy;"
        "tandem.LLM, tandem.AsyncLLM, tandem.Cluster; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_each_public_name_leads_somewhere() -> None:
    assert {name: getattr(tandem, name) for name in tandem.__all__} and set(tandem.__all__) <= set(dir(tandem))
    assert tandem.asgi.app
    with pytest.raises(AttributeError, match=r"'Llm'; it has LLM, AsyncLLM, .* asgi$"):
        tandem.Llm  # noqa: B018


# ---- flags


def test_flags_are_those_of_a_worker() -> None:
    found = parse_flags(
        "smollm2", {"tp_size": 2, "disable_radix_cache": True, "lora_paths": {"a": "/x"}, "dtype": None}
    )
    engine = found.engine
    assert (engine.model_path, engine.tp_size, engine.disable_radix_cache) == ("smollm2", 2, True)
    assert (engine.lora_paths, engine.dtype) == (("a=/x",), "auto")
    assert (found.server.log_level, parse_flags("", {"log_level": "info"}).server.log_level) == ("warning", "info")


def test_other_servers_names_work() -> None:
    engine = parse_flags("m", {"tensor_parallel_size": 2, "max_model_len": 512, "enable_prefix_caching": False}).engine
    assert (engine.tp_size, engine.context_length, engine.disable_radix_cache) == (2, 512, True)
    assert not parse_flags("m", {"enforce_eager": False}).engine.disable_cuda_graph


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"tp_sise": 2}, "unknown argument 'tp_sise=2'; did you mean tp_size?"),
        ({"tensor_paralel_size": 2}, r"unknown .*; did you mean tensor_parallel_size\?"),
        ({"dtype": torch.float16}, "dtype: invalid choice: 'float16'"),
        ({"tp_sise": False}, "unknown argument 'tp_sise'; did you mean tp_size?"),
        ({"page_size": 0}, "page_size: must be .*, got 0"),
        ({"page_size": "many"}, "page_size: must be a whole number, got 'many'"),
        ({"model_path": "m"}, "model: is given twice"),
        ({"port": 8000}, r"port: an LLM has no HTTP server; leave it out, or start a server with it: .*Cluster\(...\)"),
        ({"api_server_count": 2}, "tokenizer_worker_num: an LLM has no HTTP server"),
        ({"disaggregation_mode": "prefill"}, "disaggregation_mode: an LLM is one worker for both phases"),
        ({"nnodes": 2, "node_rank": 1, "dist_init_addr": "h:1"}, "node_rank: an LLM is the first machine; start the others"),
    ],
)  # fmt: skip
def test_a_wrong_flag_names_the_argument(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_flags("smollm2", flags)


def test_a_command_in_a_remedy_keeps_its_dashes() -> None:
    with pytest.raises(ConfigError, match="tandem serve --node-rank N"):
        parse_flags("m", {"nnodes": 2, "node_rank": 1, "dist_init_addr": "h:1"})


def test_a_cluster_has_its_own_flags() -> None:
    known = build_parser().options
    assert argv_of("m", {"decode": 2, "auto_roles": False, "gpu_ids": ["0", "1"]}, known=known) == [
        *("--decode=2", "--gpu-ids", "0", "1", "--model-path=m"),
    ]


# ---- parameters


class Theirs(msgspec.Struct):
    """As vLLM's `SamplingParams` is."""

    temperature: float = 1.0
    max_tokens: int | None = 16
    stop: list[str] = []
    detokenize: bool = True
    output_kind: int = 0
    _all_stop_token_ids: set[int] = msgspec.field(default_factory=set)


@dataclass
class Constraint:
    json: dict[str, Any] | None = None
    choice: list[str] | None = None


def test_parameters_come_in_many_forms() -> None:
    whole = {"temperature": 0.5, "max_tokens": 4}
    assert fields_of(None, whole) == whole
    assert fields_of(whole, {}) == fields_of(Sampling(**whole), {}) == whole
    assert fields_of({"temperature": 0.5, "max_new_tokens": 4}, {}) == whole
    assert fields_of(Theirs(), {"max_tokens": 2}) == {"temperature": 1.0, "max_tokens": 2, "stop": []}
    assert encoded(fields_of(None, {"structured_outputs": Constraint(choice=["a"])})) == (
        b'{"structured_outputs":{"json":null,"choice":["a"]}}'
    )


def test_a_constructor_names_an_unknown_field() -> None:
    for fields, message in (
        ({"temprature": 1}, r"temprature: is no sampling parameter; did you mean temperature\?"),
        ({"max_new_tokens": 1}, r"max_new_tokens: is no sampling parameter; did you mean max_tokens\?"),
        ({"xyz": 1}, "xyz: is no sampling parameter; leave it out"),
        ({"max_tokens": "x"}, "max_tokens: must be a valid integer, .* got 'x'"),
    ):
        with pytest.raises(RequestError, match=message) as wrong:
            Sampling(**fields)
        assert wrong.value.field == next(iter(fields))


@pytest.mark.parametrize(
    ("params", "more", "message"),
    [
        (3, {}, "sampling_params: must be a SamplingParams or a dict, got int"),
        (Sampling, {}, "sampling_params: must be a SamplingParams or a dict, got a class, not an object"),
        ({"max_tokens": 1, "max_new_tokens": 2}, {}, "max_new_tokens: is another name of max_tokens; give one"),
        (None, {"stream": True}, "stream: is no argument here: AsyncLLM streams"),
        (None, {"bootstrap_room": 3}, "bootstrap_room: is no argument here"),
    ],
)
def test_a_wrong_parameter_is_named(params: Any, more: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        fields_of(params, more)


def test_a_value_without_json_is_named() -> None:
    with pytest.raises(RequestError, match="stop: cannot be sent as JSON: object has no JSON") as wrong:
        encoded({"temperature": 1.0, "stop": object()})
    assert wrong.value.field == "stop"


def test_logprobs_are_counts() -> None:
    fields: dict[str, Any] = {"logprobs": 3, "prompt_logprobs": 5, "n": 2}
    wanted = take_logprobs(fields, chat=False)
    assert (wanted, fields) == (WantedLogprobs(3, 5), {"n": 2})
    assert wanted.options is not None and (wanted.options.start_len, wanted.options.top_num) == (0, 5)
    assert WantedLogprobs().options is None
    fields = {"logprobs": True, "top_logprobs": 2}
    assert (take_logprobs(fields, chat=True), fields) == (WantedLogprobs(), {"logprobs": True, "top_logprobs": 2})
    for wrong, message in ((True, "must be a number of alternatives"), (21, "must be between 0 and 20")):
        with pytest.raises(ApiError, match=f"logprobs: {message}"):
            take_logprobs({"logprobs": wrong}, chat=False)


# ---- inputs


def test_one_input_or_several() -> None:
    assert (
        listed("a") == ["a"]
        and listed(["a", [1, 2]]) == ["a", [1, 2]]
        and listed([1, 2]) == [[1, 2]]
        and listed([]) == []
    )
    assert listed({"prompt": "a"}) == [{"prompt": "a"}]
    assert listed(np.array([1, 2])) == [[1, 2]] and listed(iter("ab")) == ["a", "b"]
    for wrong in (None, 5, b"a"):
        with pytest.raises(RequestError, match=f"prompts: must be a text, .*, got {type(wrong).__name__}"):
            listed(wrong)
    message = {"role": "user", "content": "a"}
    assert conversations([message]) == conversations([[message]]) == [[message]]
    for wrong, got in ((None, "NoneType"), ("a", "str"), (message, "dict"), (["a"], "texts")):
        with pytest.raises(RequestError, match=f"messages: must be a list of messages, .* got {got}"):
            conversations(wrong)
    assert score_inputs("q", ["a", "b"], {}) == ({}, [("q", "a"), ("q", "b")])
    named = {"query": ["q", "r"], "items": ["a", "b"], "apply_softmax": True}
    assert score_inputs(None, None, named) == ({"apply_softmax": True}, [("q", "a"), ("r", "b")])
    for texts, more, message in (
        ((["q", "r"], ["a", "b", "c"]), {}, "text_1: has 2 texts, text_2 has 3; give one, or as many"),
        (("q", None), {}, "text_2: is missing"),
        (("q", "a"), {"query": "q"}, "text_1: is given by two names"),
    ):
        with pytest.raises(RequestError, match=message):
            score_inputs(*texts, more)


async def test_other_calls_get_in_between_the_plans_of_many_prompts() -> None:
    order: list[str] = []

    async def plan(s: object, prompt: str, fields: object) -> None:
        order.append(prompt)

    async def other() -> None:
        order.append("other")

    call = asyncio.create_task(other())
    await _plan_all(plan, None, ["a", "b"], [{}, {}])  # type: ignore[arg-type]
    assert order == ["a", "other", "b"] and call.done()


def test_parameters_for_all_or_one_each() -> None:
    assert each_fields({"n": 2}, {"seed": 1}, 2) == [{"n": 2, "seed": 1}] * 2
    assert each_fields([{"n": 2}, None], {"seed": 1}, 2) == [{"n": 2, "seed": 1}, {"seed": 1}]
    with pytest.raises(
        RequestError, match="sampling_params: has 1 entries for 2 prompts; give one for all, or one each"
    ):
        each_fields([None], {}, 2)
