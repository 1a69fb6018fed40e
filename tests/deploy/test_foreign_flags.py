"""Flags of SGLang's and vLLM's users: taken as ours, answered by a warning, or refused with the reason."""

from collections.abc import Callable

import pytest

from deploy.commands import bench, router, serve, up
from deploy.flags import Parser
from deploy.foreign.bench import BENCH
from deploy.foreign.router import ROUTER
from deploy.foreign.translate import (
    CannotFollow,
    Fixed,
    ForeignFlags,
    Ignored,
    Missing,
    Renamed,
    RenamedValue,
    Values,
    translate,
)
from deploy.foreign.worker import WORKER

Capture = pytest.CaptureFixture[str]
COMMANDS: list[tuple[Callable[[], Parser], ForeignFlags]] = [
    (serve.build_parser, WORKER),
    (up.build_parser, WORKER),
    (router.build_parser, ROUTER),
    (bench.build_parser, BENCH),
]


@pytest.mark.parametrize(("build", "foreign"), COMMANDS)
def test_each_entry_does_what_it_says(build: Callable[[], Parser], foreign: ForeignFlags, capsys: Capture) -> None:
    known = set(build()._option_string_actions)
    for name, entry in foreign.flags.items():
        if name in known:
            of_routers = router.build_parser()._option_string_actions
            assert build is up.build_parser and name in of_routers, f"{name} is ours: the table never sees it"
            continue
        match entry:
            case Renamed(to, values):
                assert to[0].partition("=")[0] in known, name
                assert translate([name, "1"], known=known, foreign=foreign).argv[-1] == "1"
                assert (values is Values.NONE) == ("=" in to[0] or build()._option_string_actions[to[0]].nargs == 0)
            case Ignored(why, values):
                words = [name, *["x"] * min(values.value, 1)]
                done = translate([*words, "--port", "1"], known=known, foreign=foreign)
                assert done.argv == ["--port", "1"] and done.warnings == [f"{name} is ignored: {why}"]
            case Fixed(same, why):
                for value in same:
                    assert translate([name, value], known=known, foreign=foreign).argv == []
                    assert translate([f"{name}={value}"], known=known, foreign=foreign).warnings == []
                with pytest.raises(CannotFollow, match=f"^{name}: .*got 'other'"):
                    translate([name, "other"], known=known, foreign=foreign)
            case RenamedValue(words, why):
                for value, ours in words.items():
                    assert translate([name, value], known=known, foreign=foreign).argv == list(ours)
                    build().parse_strict([name, value])
                with pytest.raises(CannotFollow, match=f"^{name}: .*; got 'other', and .* are known"):
                    translate([name, "other"], known=known, foreign=foreign)
            case Missing(why):
                with pytest.raises(CannotFollow) as refused:
                    translate([name, "x"], known=known, foreign=foreign)
                assert str(refused.value) == f"{name}: {why}"
        assert not why.endswith(".") if not isinstance(entry, Renamed) else True
    for start in foreign.families:
        with pytest.raises(CannotFollow, match=f"^{start}anything: "):
            translate([f"{start}anything", "x"], known=known, foreign=foreign)


@pytest.mark.parametrize("backend", ["xgrammar", "outlines"])
@pytest.mark.parametrize("build", [serve.build_parser, up.build_parser])
def test_grammar_compilers_of_other_servers_are_refused_with_the_remedy(
    build: Callable[[], Parser], backend: str, capsys: Capture
) -> None:
    for served in ("llguidance", "none"):
        assert build().parse_strict(["--grammar-backend", served]).grammar_backend == served
    with pytest.raises(SystemExit):
        build().parse_strict(["--grammar-backend", backend])
    said = f"--grammar-backend: {backend} is not served here: llguidance compiles all grammars; leave the flag out"
    assert said in capsys.readouterr().err


def test_a_command_line_of_sglangs_users(capsys: Capture) -> None:
    argv = (
        "--model-path /m --trust-remote-code --tp-size 1 --enable-metrics --mem-fraction-static 0.8 --tensor_parallel_size=1 "
        "--log-requests-level 2 --disaggregation-mode prefill --dist-init-addr 10.0.0.1:5000 --enable_mixed_chunk"
    )
    args = serve.build_parser().parse_strict(argv.split())
    assert (args.model_path, args.mem_fraction_static, args.disaggregation_mode) == ("/m", 0.8, "prefill")
    assert args.tp_size == 1
    for words, field in (
        ("--tp 2", "tp_size"),
        ("--pp 2", "pp_size"),
        ("--pipeline_parallel_size=2", "pp_size"),
        ("-dp 2", "dp_size"),
    ):
        assert getattr(serve.build_parser().parse_strict(words.split()), field) == 2
    assert args.enable_mixed_chunk is True
    lines = capsys.readouterr().err.splitlines()
    ignored = ("--trust-remote-code", "--enable-metrics", "--log-requests-level")
    assert [line.split(" is ignored: ")[0] for line in lines] == [f"tandem serve: warning: {name}" for name in ignored]


def test_a_command_line_of_vllms_users(capsys: Capture) -> None:
    argv = (
        "--model /m --max-model-len 2048 --gpu-memory-utilization=0.85 --max-num-seqs 32 --block-size 32 --enforce-eager "
        "--no-enable-prefix-caching --lora-modules a=/a b=/b --seed -1 -tp 1 --dtype bfloat16 --disable-log-requests"
    )
    for build in (serve.build_parser, up.build_parser):
        args = build().parse_strict(argv.split())
        assert (args.model_path, args.context_length, args.mem_fraction_static) == ("/m", 2048, 0.85)
        assert (args.max_running_requests, args.page_size, args.random_seed) == (32, 32, -1)
        assert args.disable_cuda_graph and args.disable_radix_cache and args.lora_paths == ["a=/a", "b=/b"]
        assert capsys.readouterr().err.count("\n") == 1


def test_a_command_line_of_a_routers_users(capsys: Capture) -> None:
    argv = "--pd-disaggregation --prefill http://p 8998 --decode http://d --disable-retries --max-payload-size 99 --backend sglang"
    args = router.build_parser().parse_strict([*argv.split(), "--cors-allowed-origins", "https://a", "https://b"])
    assert (args.retry_max, args.max_body_bytes, args.allowed_origins) == (0, 99, ["https://a", "https://b"])
    assert args.prefill == [["http://p", "8998"]] and capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--dcp-size", "8"], "--dcp-size: a worker has the ranks of --tp-size, --pp-size and --dp-size"),
        (["--quantization", "fp8"], "--quantization: "),
        (
            ["--kv-cache-dtype=fp8_e5m2"],
            "--kv-cache-dtype: invalid choice: 'fp8_e5m2' (choose from 'auto', 'bf16', 'bfloat16', 'float32', 'fp8_e4m3')",
        ),
        (["--speculative-draft-window-size", "4"], "--speculative-draft-window-size: drafts are chains of"),
        (["--speculative_config", "{}"], "--speculative-config: drafts are chains of"),
        (["--quantization"], "--quantization: expected one argument"),
        (["--quantization", "--port", "1"], "--quantization: expected one argument"),
        (["--enable-expert-parallel"], "--enable-expert-parallel: give --ep-size, the ranks of --tp-size"),
        (["m", "--trust-remote-code", "yes"], "unknown argument 'yes': the model is 'm'"),
        (["--max-model-len", "x"], "--context-length: must be a whole number, got 'x'"),
        (
            ["--max-runing-requests", "1"],
            "unknown argument '--max-runing-requests'; did you mean --max-running-requests?",
        ),
        (["--modle", "m"], "unknown argument '--modle'; did you mean --model?"),
        (["--enable-metric"], "unknown argument '--enable-metric'"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(argv: list[str], said: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit) as exited:
        serve.build_parser().parse_strict(argv)
    err = capsys.readouterr().err
    assert exited.value.code == 2 and said in err.splitlines()[-1] and err.startswith("tandem serve: ")
