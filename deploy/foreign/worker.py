"""Flags of `sglang serve` (launch_server) and `vllm serve` that `tandem serve` and `tandem up`
lack.
"""

from deploy.foreign.translate import Entry, Fixed, ForeignFlags, Ignored, Missing, Renamed, Values, each

ONE, MANY = Values.ONE, Values.MANY
ONE_RANK = "a worker has the ranks of --tp-size, --pp-size and --dp-size; start more workers behind the router"
NO_GROUP = "the ranks of a worker find one another by themselves"
SPEED_ALONE = "it changes speed alone, and this engine has no such choice"
NO_VLM = "images are encoded in one way, by the first ranks of the model; --mm-enable-dp-encoder has these divide them"
ROUTER_NAMES = (
    "the router names an encoder worker for each image: tandem router --encode URL; give --feature-fetch here"
)
ONE_WAY = "experts are computed and exchanged in one way, which the device decides"
NO_BALANCE = "experts move by DeepSeek's algorithm, by the loads of all steps since the last time"
OTHER_DRAFTS = "drafts are chains of --speculative-num-steps tokens: see --speculative-algorithm and --speculative-draft-model-path"
TLS = "put a proxy that ends TLS in front"
ALWAYS = "this is always so"
CHECKPOINT = "the checkpoint decides; change its files"
ROUTES = "prefill and decode workers serve whole requests, too (the router's --route); leave it out"

_SAME_AS_ONE = Fixed(("1",), ONE_RANK)

_RENAMED: dict[str, Entry] = {
    "--model": Renamed(("--model-path",), ONE),
    "--max-model-len": Renamed(("--context-length",), ONE),
    **each(Renamed(("--mem-fraction-static",), ONE), "--gpu-memory-utilization --device-memory-utilization"),
    "--max-num-seqs": Renamed(("--max-running-requests",), ONE),
    "--max-num-queued-reqs": Renamed(("--max-queued-requests",), ONE),
    "--max-num-batched-tokens": Renamed(("--chunked-prefill-size",), ONE),
    "--no-enable-chunked-prefill": Renamed(("--chunked-prefill-size=-1",)),
    "--block-size": Renamed(("--page-size",), ONE),
    **each(Renamed(("--dp-size",), ONE), "--dp --data-parallel-size -dp"),
    **each(Renamed(("--quantization",), ONE), "-q --torchao-config"),
    "--seed": Renamed(("--random-seed",), ONE),
    "--api-server-count": Renamed(("--tokenizer-worker-num",), ONE),
    **each(Renamed(("--tp-size",), ONE), "--tp --tensor-parallel-size -tp"),
    **each(Renamed(("--pp-size",), ONE), "--pp --pipeline-parallel-size -pp"),
    **each(Renamed(("--ep-size",), ONE), "--ep --expert-parallel-size"),
    "--nccl-init-addr": Renamed(("--dist-init-addr",), ONE),
    "--distributed-timeout-seconds": Renamed(("--dist-timeout",), ONE),
    **each(Renamed(("--disable-cuda-graph",)), "--enforce-eager --disable-decode-cuda-graph"),
    "--disable-prefill-cuda-graph": Missing("give --disable-cuda-graph, which is for prompts and decodes"),
    **each(Renamed(("--cuda-graph-bs",), MANY), "--cudagraph-capture-sizes --cuda-graph-bs-decode"),
    **each(Renamed(("--cuda-graph-max-bs",), ONE), "--cuda-graph-max-bs-decode --max-cudagraph-capture-size"),
    "--no-enable-prefix-caching": Renamed(("--disable-radix-cache",)),
    "--no-async-scheduling": Renamed(("--disable-overlap-schedule",)),
    "--enable-hicache": Renamed(("--enable-hierarchical-cache",)),
    "--lora-modules": Renamed(("--lora-paths",), MANY),
    "--max-loras": Renamed(("--max-loras-per-batch",), ONE),
    "--max-cpu-loras": Renamed(("--max-loaded-loras",), ONE),
    **each(Renamed(("--log-level",), ONE), "--uvicorn-log-level --log-level-http"),
    "--shutdown-timeout": Renamed(("--drain-timeout",), ONE),
    "--language-only": Renamed(("--feature-fetch",)),
    "--disaggregation-enable-kv-checksum": Renamed(("--disaggregation-kv-checksum",)),
}
_IGNORED: dict[str, Entry] = {
    "--trust-remote-code": Ignored("no code of a checkpoint runs here"),
    "--enable-metrics": Ignored("/metrics is always there"),
    "--enable-metrics-for-all-schedulers": Ignored("/metrics always shows each scheduler of a worker"),
    **each(Ignored("texts of requests are never logged"), "--disable-log-requests --no-enable-log-requests"),
    **each(Ignored("each request has a line in the log, without its text"), "--log-requests --enable-log-requests"),
    **each(Ignored("texts of requests are never logged", ONE), "--log-requests-level --max-log-len"),
    "--disable-log-stats": Ignored(
        "figures are at /metrics; --decode-log-interval sets how often the log has some", Values.NONE
    ),
    "--disable-uvicorn-access-log": Ignored("--log-level warning leaves the lines of requests out"),
    **each(
        Ignored(ALWAYS),
        "--enable-prefix-caching --speculative-adaptive --enable-chunked-prefill --async-scheduling --disaggregation-decode-enable-radix-cache",
    ),
    "--enable-cache-report": Ignored("usage always says how many tokens were cached"),
    "--enable-prompt-tokens-details": Ignored("usage always says how many tokens were cached"),
    "--enable-auto-tool-choice": Ignored("--tool-call-parser is enough"),
    "--enable-request-id-headers": Ignored("answers always have X-Request-Id"),
    "--enable-response-store": Ignored("--max-stored-responses bounds what /v1/responses keeps"),
    "--warmups": Ignored("a worker computes a request before it is ready", ONE),
    "--disable-fastapi-docs": Ignored("there are no such pages; /openapi.json describes the API"),
    "--max-logprobs": Ignored("OpenAI's routes show at most 20 alternatives, /generate 100", ONE),
    "--watchdog-config": Ignored("--watchdog-timeout bounds a turn of the scheduler", ONE),
    "--soft-watchdog-timeout": Ignored("--watchdog-timeout bounds a turn of the scheduler", ONE),
    "--scheduler-recv-interval": Ignored("new requests are read before each step", ONE),
    "--disaggregation-decode-polling-interval": Ignored("a decode worker looks at its queues before each step", ONE),
    "--prefill-delayer-max-delay-passes": Ignored("prompts of a DP rank wait for at most 30 steps", ONE),
    "--prefill-delayer-token-usage-low-watermark": Ignored("prompts wait whatever memory is in use", ONE),
    "--lora-drain-wait-threshold": Ignored("a request's adapter gets the next free place after 10 s", ONE),
    "--swap-space": Ignored("retracted requests are computed again", ONE),
    "--pp-max-micro-batch-size": Ignored("a step has its share of the running requests, one for each stage", ONE),
    **each(Ignored(NO_GROUP, ONE), "--nccl-port --gpu-id-step"),
    **each(Ignored("machines meet at --dist-init-addr HOST:PORT", ONE), "--master-addr --master-port"),
    "--enable-dp-lm-head": Ignored("with --enable-dp-attention a DP rank's own ranks always compute its logits"),
    **each(
        Ignored(SPEED_ALONE),
        """--disable-custom-all-reduce --enable-p2p-check --enable-nccl-nvls --enable-symm-mem --enable-mscclpp
        --disable-cascade-attn --disable-chunked-prefix-cache --disable-cuda-graph-padding
        --disable-flashinfer-autotune --disable-outlines-disk-cache --disable-tokenizer-batch-decode
        --enable-cudagraph-gc --enable-dynamic-batch-tokenizer --enable-tokenizer-batch-encode
        --enable-two-batch-overlap --enable-dbo --enable-torch-compile --weight-loader-disable-mmap
        --disable-hybrid-kv-cache-manager --enable-flashinfer-autotune --weight-loader-prefetch-checkpoints""",
    ),
    **each(Ignored(NO_GROUP), "--pre-warm-nccl --ray-workers-use-nsight"),
    **each(
        Ignored(SPEED_ALONE, ONE),
        """--torch-compile-max-bs --compilation-config --optimization-level --performance-mode --sampling-backend
        --max-parallel-loading-workers --detokenizer-worker-num --triton-attention-num-kv-splits
        --gc-warning-threshold-secs --kernel-config --renderer-num-workers --safetensors-load-strategy
        --lora-backend --hicache-io-backend --hicache-mem-layout --swa-full-tokens-ratio""",
    ),
    "--enable-multimodal": Ignored("a model that sees takes images"),
    "--sleep-on-idle": Ignored("an idle scheduler always sleeps"),
    "--triton-attention-reduce-in-fp32": Ignored("attention always adds in float32"),
    "--use-tqdm-on-load": Ignored("`tandem up` shows the progress of loading"),
    **each(Ignored("texts of answers are never logged"), "--enable-log-outputs --enable-log-deltas"),
    "--log-error-stack": Ignored("stacks are in the log"),
    "--disable-access-log-for-endpoints": Ignored(
        "health checks and the like are in the log at level debug alone", ONE
    ),
    "--enable-server-load-tracking": Ignored("/v1/loads always shows the load"),
    "--enable-mfu-metrics": Ignored("/metrics has what this server measures"),
    "--kv-cache-metrics": Ignored("/metrics has what this server measures"),
    "--cudagraph-metrics": Ignored("/metrics has what this server measures"),
    "--show-hidden-metrics-for-version": Ignored("/metrics has what this server measures", ONE),
    "--collect-detailed-traces": Ignored("--enable-trace sends all spans", ONE),
    "--prefix-caching-hash-algo": Ignored("prefixes below the device are found by SHA-256", ONE),
    "--h11-max-incomplete-event-size": Ignored("the bounds of HTTP heads are fixed", ONE),
    "--h11-max-header-count": Ignored("the bounds of HTTP heads are fixed", ONE),
    "--all2all-backend": Ignored(ONE_WAY, ONE),
    "--fully-sharded-loras": Ignored("adapters are cut as the layers that they change"),
    "--enable-pd-role-switch": Ignored("workers can always change their roles (/switch_role)"),
    "--enable-request-time-stats-logging": Ignored("meta_info and `tandem trace` show the times of requests"),
    "--show-time-cost": Ignored("meta_info and `tandem trace` show the times of requests"),
    "--crash-dump-folder": Ignored("errors and stacks are in the log", ONE),
}
_FIXED: dict[str, Entry] = {
    **each(_SAME_AS_ONE, "--dcp-size --attn-cp-size --decode-context-parallel-size --prefill-context-parallel-size"),
    "--convert": Fixed(("auto", "none"), "a model is served as it is"),
    "--base-gpu-id": Fixed(("0",), "CUDA_VISIBLE_DEVICES chooses the GPU"),
    "--tokenizer-mode": Fixed(("auto", "hf"), "the tokenizer is the checkpoint's tokenizer.json"),
    "--tokenizer-backend": Fixed(("huggingface",), "the tokenizer is the checkpoint's tokenizer.json"),
    "--model-impl": Fixed(("auto", "sglang", "vllm"), "this engine has its own models"),
    "--config-format": Fixed(("auto", "hf"), "the configuration is the checkpoint's config.json"),
    "--runner": Fixed(("auto", "generate"), "a worker generates; embeddings are beside that"),
    "--generation-config": Fixed(("auto",), "defaults come from the checkpoint's generation_config.json"),
    "--sampling-defaults": Fixed(("model",), "defaults come from the checkpoint's generation_config.json"),
    "--distributed-executor-backend": Fixed(("mp", "uni"), NO_GROUP),
    "--scheduling-policy": Fixed(("fcfs",), "give --enable-priority-scheduling for priorities"),
    "--num-continuous-decode-steps": Fixed(("1",), "new requests may enter at every step"),
    "--num-scheduler-steps": Fixed(("1",), "new requests may enter at every step"),
    "--cpu-offload-gb": Fixed(("0",), "weights stay on the device"),
    "--response-role": Fixed(("assistant",), "answers are the assistant's"),
    "--chat-template-content-format": Fixed(("auto", "string"), "templates get texts"),
    "--retraction-policy": Fixed(("length", "default"), "the engine chooses which request it retracts"),
    "--logprobs-mode": Fixed(("raw_logprobs",), "logprobs are the model's, before penalties and masks"),
}
_MISSING: dict[str, Entry] = {
    **each(
        Missing(CHECKPOINT),
        """--tokenizer --tokenizer-path --hf-overrides --hf-config-path --json-model-override-args
        --override-generation-config --preferred-sampling-params --disable-sliding-window""",
    ),
    **each(Missing(ROUTES), "--mixed --mixed-ttft --mixed-itl"),
    "--prefix-copy-bytes-per-second": Missing("prefixes are fetched where a request needs them; leave it out"),
    "--tokenizer-revision": Missing("--revision names model and tokenizer"),
    "--code-revision": Missing("no code of a checkpoint runs here"),
    "--chat-template": Missing("put it into the checkpoint as chat_template.jinja"),
    "--hf-chat-template-name": Missing("put the template into the checkpoint as chat_template.jinja"),
    "--completion-template": Missing("this server completes at the end alone"),
    "--default-chat-template-kwargs": Missing("send chat_template_kwargs with each chat"),
    "--trust-request-chat-template": Missing("requests bring no templates; they may render chats themselves"),
    "--download-dir": Missing("set HF_HOME"),
    "--hf-token": Missing("set HF_TOKEN"),
    **each(Missing("give --max-images-per-request"), "--limit-mm-per-prompt --limit-mm-data-per-request"),
    "--mm-encoder-tp-mode": Missing("give --mm-enable-dp-encoder for data; without it each rank encodes all images"),
    "--allowed-local-media-path": Missing("files of the server are not read; send data URLs"),
    "--language-model-only": Missing(NO_VLM),
    "--encoder-only": Missing("give --disaggregation-mode encode; `tandem up --encode N` starts N such workers"),
    **each(Missing(ROUTER_NAMES), "--encoder-urls --encoder-bootstrap-url"),
    "--encoder-transfer-backend": Missing("features go by --disaggregation-transfer-backend"),
    "--ec-transfer-config": Missing("--disaggregation-mode encode makes an encoder worker; --feature-fetch asks them"),
    "--allow-auto-truncate": Missing("a prompt that is too long is refused; cut it before you send it"),
    "--enable-custom-logit-processor": Missing(
        "no code of requests runs here; logit_bias, allowed_token_ids and bad_words shape answers"
    ),
    **each(
        Missing("no code of others runs here"),
        """--logits-processors --tool-parser-plugin --reasoning-parser-plugin --worker-cls
        --worker-extension-cls --scheduler-cls --io-processor-plugin""",
    ),
    "--enable-deterministic-inference": Missing(
        "tokens depend on nothing but the request on one CPU; on a GPU that is not promised"
    ),
    "--decode-attention-backend": Missing("--attention-backend is for prompts and decodes"),
    "--prefill-attention-backend": Missing("--attention-backend is for prompts and decodes"),
    "--attn-dp-size": Missing("give --enable-dp-attention and --dp-size"),
    **each(Missing("give --ep-size, the ranks of --tp-size"), "--enable-expert-parallel --enable-ep-moe -ep"),
    "--enable-sleep-mode": Renamed(("--enable-memory-saver",)),
    "--kv-transfer-config": Missing("give --disaggregation-mode prefill or decode"),
    "--kv-offloading-size": Missing("give --enable-hierarchical-cache and --hicache-size, in units of 10^9 bytes"),
    "--mamba-full-memory-ratio": Missing("give --max-mamba-cache-size"),
    "--kv-cache-memory-bytes": Missing("give --max-total-tokens, or --mem-fraction-static"),
    "--num-gpu-blocks-override": Missing("give --max-total-tokens"),
    "--structured-outputs-config": Missing("give --grammar-backend and --constrained-json-disable-any-whitespace"),
    "--enable-prompt-embeds": Missing("a worker reads text and token ids"),
    "--tool-server": Missing("a server calls no tools; clients do"),
    **each(Missing("give --log-level and --log-format"), "--log-config-file --logging-config"),
    "--device-ids": Missing("set CUDA_VISIBLE_DEVICES"),
    **each(Missing("start the worker under numactl"), "--numa-bind --numa-node"),
    "--disable-priority-preemption": Missing("raise --priority-scheduling-preemption-threshold"),
    "--incremental-streaming-output": Missing("/generate streams whole texts; OpenAI's routes stream what is new"),
    "--enable-http2": Missing("put a proxy that speaks HTTP/2 in front"),
    "--headless": Missing(ONE_RANK),
    "--uds": Missing("give --host and --port"),
    **each(Missing("let the proxy in front strip it"), "--root-path --fastapi-root-path"),
    "--allow-credentials": Missing("cookies are never read; send a key"),
    **each(Missing("--allowed-origins is enough"), "--allowed-methods --allowed-headers"),
    "--config": Missing("give the flags themselves"),
    "--enable-force-include-usage": Missing("send stream_options with include_usage"),
    "--stream-response-default-include-usage": Missing("send stream_options with include_usage"),
    "--return-tokens-as-token-ids": Missing("send return_token_ids"),
    "--enable-lmcache": Missing("give --enable-hierarchical-cache and --hicache-storage-backend"),
    **each(Missing("decodes get the share that keeps --pdmux-itl"), "--pdmux-config-path --sm-group-num"),
    "--lora-target-modules": Missing("adapters may change any projection that PEFT names"),
}
WORKER = ForeignFlags(
    flags={**_RENAMED, **_IGNORED, **_FIXED, **_MISSING},
    families={
        **each(OTHER_DRAFTS, "--speculative- --spec-"),
        **each(NO_VLM, "--mm- --encoder-"),
        **each(ONE_WAY, "--moe- --deepep-"),
        **each(NO_BALANCE, "--expert- --eplb-"),
        "--elastic-ep-": "a worker ends with any of its ranks",
        "--mamba-": "recurrent states are float32, and their snapshots follow the prefix cache",
        "--data-parallel-": ONE_RANK,
        "--dllm-": "diffusion models are not supported",
        "--modelopt-": "checkpoints are not quantized here; serve one in bfloat16 or float32",
        **each(TLS, "--ssl- --enable-ssl-"),
        **each("this server speaks HTTP", "--grpc- --smg-"),
    },
)
