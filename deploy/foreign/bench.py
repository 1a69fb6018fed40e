"""Flags of `vllm bench serve` and `sglang.bench_serving` that `tandem bench` lacks."""

from deploy.foreign.translate import Entry, ForeignFlags, Ignored, Missing, Renamed, RenamedValue, Values, each

ONE, MANY = Values.ONE, Values.MANY
COMPLETIONS, CHAT, GENERATE = ("--api=completions",), ("--api=chat",), ("--api=generate",)
TEXTS_ALONE = "prompts are texts or token ids"
NO_PROFILE = "call /start_profile and /stop_profile of the server, or `tandem trace`"
NO_LORA = "give the adapter as --model; one run measures one model"
SHARED = "give --shared-prefix-len, which counts within --input-len, and --shared-prefix-groups"
WRITE_LINES = "write its requests as JSON lines of prompt and output_tokens, and give --dataset-name custom"

_FLAGS: dict[str, Entry] = {
    "--backend": RenamedValue(
        {
            **dict.fromkeys(("openai", "vllm", "sglang-oai", "lmdeploy"), COMPLETIONS),
            **dict.fromkeys(("openai-chat", "vllm-chat", "sglang-oai-chat", "lmdeploy-chat"), CHAT),
            **dict.fromkeys(("sglang", "sglang-native"), GENERATE),
        },
        "requests go to OpenAI's API or to SGLang's /generate",
    ),
    "--endpoint": RenamedValue(
        {"/v1/completions": COMPLETIONS, "/v1/chat/completions": CHAT, "/generate": GENERATE},
        "the path follows from --api; a prefix belongs to --url",
    ),
    "--base-url": Renamed(("--url",), ONE),
    "--num-prompts": Renamed(("--num-requests",), ONE),
    "--max-concurrency": Renamed(("--concurrency",), ONE),
    **each(Renamed(("--input-len",), ONE), "--random-input-len --random-input"),
    **each(Renamed(("--output-len",), ONE), "--random-output-len --random-output --gsp-output-len"),
    **each(Renamed(("--dataset-output-len",), ONE), "--sharegpt-output-len --custom-output-len"),
    "--sharegpt-context-len": Renamed(("--dataset-context-len",), ONE),
    **each(Renamed(("--warmup",), ONE), "--num-warmups --warmup-requests"),
    "--disable-tqdm": Renamed(("--disable-progress",)),
    "--disable-stream": Renamed(("--no-stream",)),
    "--disable-ignore-eos": Renamed(("--no-ignore-eos",)),
    "--extra-body": Renamed(("--extra-request-body",), ONE),
    "--tag": Renamed(("--label",), ONE),
    "--tokenize-prompt": Renamed(("--prompt=ids",)),
    "--gsp-num-groups": Renamed(("--shared-prefix-groups",), ONE),
    "--gsp-system-prompt-len": Renamed(("--shared-prefix-len",), ONE),
    "--mooncake-slowdown-factor": Renamed(("--time-scale",), ONE),
    "--gsp-question-len": Missing("give --input-len, which counts --shared-prefix-len too"),
    "--gsp-prompts-per-group": Missing("give --num-requests; groups take turns"),
    **each(Missing(SHARED), "--random-prefix-len --prefix-len"),
    **each(Ignored("nothing of a checkpoint runs here", ONE), "--tokenizer-mode"),
    "--trust-remote-code": Ignored("nothing of a checkpoint runs here"),
    "--skip-tokenizer-init": Ignored("a tokenizer is loaded only with --tokenizer"),
    "--no-oversample": Ignored("a request of a file is never sent twice"),
    "--skip-chat-template": Ignored("prompts are sent as they are"),
    "--pd-separated": Ignored("the router knows its workers"),
    "--ready-check-timeout-sec": Ignored("the server is asked once, before the load", ONE),
    "--request-id-prefix": Ignored("requests have no names", ONE),
    "--apply-chat-template": Missing("give --api chat: the server applies its template"),
    "--flush-cache": Missing("send POST /flush_cache before the run: curl -X POST URL/flush_cache"),
    **each(Missing(NO_PROFILE), "--profile --profile-activities --profile-num-steps --profile-by-stage"),
    **each(Missing(NO_LORA), "--lora-name --lora-modules --lora-assignment --lora-request-distribution"),
    **each(
        Missing("give --request-rate in one run for each rate"),
        "--ramp-up-strategy --ramp-up-start-rps --ramp-up-end-rps",
    ),
    "--probe-request-rate": Missing("start a second `tandem bench --request-rate` of short prompts"),
    **each(
        Missing("give --extra-request-body"), "--logprobs --return-logprob --use-beam-search --chat-template-kwargs"
    ),
    "--prompt-suffix": Missing("write the prompts with it, and give --dataset-name custom"),
    "--insecure": Missing("give the address behind the proxy that ends TLS"),
    **each(
        Missing("draw it from --output, which holds each request"),
        "--plot-timeline --plot-throughput --plot-dataset-stats",
    ),
    **each(Missing("give --trace FILE; it has its own times"), "--use-trace-timestamps --self-timed"),
}
BENCH = ForeignFlags(
    flags=_FLAGS,
    families={
        **each(WRITE_LINES, "--hf- --sonnet- --spec-bench- --blazedit- --txt-slices-"),
        **each(SHARED, "--prefix-repetition- --gsp-"),
        "--mooncake-": "give --trace FILE",
        **each(TEXTS_ALONE, "--image- --random-image- --random-mm-"),
        "--profile-": NO_PROFILE,
        "--lora-": NO_LORA,
        **each("draw it from --output, which holds each request", "--plot- --timeline-"),
        "--ramp-up-": "give --request-rate in one run for each rate",
    },
)
