"""Exported names of the scheduler's metrics (docs/observability.md).

`sglang:` and `vllm:` where those servers export the quantity, for dashboards and autoscalers; else
`tandem_`.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from engine.messages import StateReply


class Figure(NamedTuple):
    """`name`: as exported, for a counter without `_total`."""

    name: str
    help: str


QUEUES = {
    "waiting": Figure("sglang:num_queue_reqs", "requests in the waiting queue"),
    "grammar": Figure("sglang:num_grammar_queue_reqs", "requests whose grammar is being compiled"),
    "bootstrap": Figure("sglang:num_prefill_bootstrap_queue_reqs", "requests in the prefill bootstrap queue"),
    "inflight": Figure("sglang:num_prefill_inflight_queue_reqs", "requests in the prefill inflight queue"),
    "prealloc": Figure("sglang:num_decode_prealloc_queue_reqs", "requests in the decode prealloc queue"),
    "transfer": Figure("sglang:num_decode_transfer_queue_reqs", "requests in the decode transfer queue"),
    "retracted": Figure("sglang:num_retracted_reqs", "retracted requests that wait"),
    "held": Figure("tandem_num_held_reqs", "requests that wait while generation is paused"),
    "resuming": Figure("tandem_num_resuming_reqs", "retracted requests whose KV prefill computes"),
    "moving": Figure(
        "tandem_num_moving_reqs", "requests that go to another decode worker, which does not have all their KV"
    ),
    "fetching": Figure("tandem_num_fetching_prefixes", "prefixes on their way from other workers"),
    "sending": Figure("tandem_num_sending_prefixes", "prefixes on their way to other workers"),
    "fetching_features": Figure("tandem_num_fetching_features", "images whose features come from encode workers"),
    "quarantined_features": Figure(
        "tandem_num_quarantined_features", "images whose features an encode worker may still write, too late"
    ),
    "encoding": Figure("tandem_num_encoding_images", "images of other workers that a step encodes"),
    "sending_features": Figure(
        "tandem_num_sending_features", "images whose features are on their way to other workers"
    ),
    "quarantined": Figure("tandem_num_quarantined_reqs", "ended requests whose memory a peer may still write"),
}
GAUGES = {
    "memory_weights_bytes": Figure(
        "tandem_memory_weights_bytes", "memory of weights, of the leader's rank like the rest"
    ),
    "memory_steps_bytes": Figure("tandem_memory_steps_bytes", "memory of the largest steps at their peak, measured"),
    "memory_graphs_bytes": Figure("tandem_memory_graphs_bytes", "memory of recorded steps"),
    "memory_kv_pages_bytes": Figure("tandem_memory_kv_pages_bytes", "memory of KV pages"),
    "memory_window_pages_bytes": Figure("tandem_memory_window_pages_bytes", "memory of pages of layers with a window"),
    "memory_states_bytes": Figure("tandem_memory_states_bytes", "memory of recurrent states"),
    "memory_image_features_bytes": Figure("tandem_memory_image_features_bytes", "memory of features of images"),
    "memory_host_copies_bytes": Figure("tandem_memory_host_copies_bytes", "host memory of cached and retracted KV"),
    "memory_rest_bytes": Figure("tandem_memory_rest_bytes", "memory that was free at start and has no use"),
    "gen_throughput": Figure("sglang:gen_throughput", "generated tokens per second"),
    "spec_accept_length": Figure(
        "sglang:spec_accept_length", "tokens of a request in a decode step, with accepted drafts"
    ),
    "spec_accept_rate": Figure("sglang:spec_accept_rate", "share of drafted tokens that the model sampled, too"),
    "new_token_ratio": Figure("sglang:new_token_ratio", "share of the possible answer that admission reserves"),
    "kv_transfer_speed_gb_s": Figure("sglang:kv_transfer_speed_gb_s", "GB/s of the last transfers"),
    "kv_transfer_latency_ms": Figure("sglang:kv_transfer_latency_ms", "last chunk sent until all has landed, mean"),
    "kv_transfer_total_mb": Figure("sglang:kv_transfer_total_mb", "MB of the last transfers' last chunks, mean"),
    "kv_transfer_bootstrap_ms": Figure(
        "sglang:kv_transfer_bootstrap_ms", "from arrival until decode sent its pages, mean"
    ),
    "pending_prealloc_token_usage": Figure(
        "sglang:pending_prealloc_token_usage", "KV that requests in the prealloc queue want / capacity"
    ),
    "hicache_host_used_tokens": Figure("sglang:hicache_host_used_tokens", "tokens of prefixes in host memory"),
    "hicache_host_total_tokens": Figure("sglang:hicache_host_total_tokens", "tokens that host memory has room for"),
    "storage_read_gb_s": Figure("tandem_storage_read_gb_s", "GB/s of the last reads of files or a store"),
    "swa_token_usage": Figure("sglang:swa_token_usage", "used share of the KV of layers with a window (1: all)"),
    "mamba_usage": Figure("sglang:mamba_usage", "used share of the slots of recurrent states (1: all)"),
    "mamba_cached_slots": Figure("tandem_mamba_cached_slots", "slots that keep the recurrent state of a prefix"),
    "mm_cache_used_bytes": Figure("tandem_mm_cache_used_bytes", "features of images that are on the device"),
    "mm_cache_total_bytes": Figure("tandem_mm_cache_total_bytes", "those that there is room for"),
    "mm_cache_hit_rate": Figure("tandem_mm_cache_hit_rate", "share of needed images whose features were there"),
    "decode_share": Figure("tandem_decode_share", "with PD multiplexing: decodes' share of the device beside prompts"),
    "expert_imbalance": Figure("tandem_expert_imbalance", "most tokens of an expert / mean, mean of the layers"),
    "expert_rank_imbalance": Figure(
        "tandem_expert_rank_imbalance", "most tokens of a rank's experts / mean, since experts moved last"
    ),
    "expert_rank_imbalance_before": Figure(
        "tandem_expert_rank_imbalance_before", "the same of the loads before experts moved last"
    ),
    "expert_rank_imbalance_after": Figure(
        "tandem_expert_rank_imbalance_after", "the same of these loads over the places that followed"
    ),
    "expert_rebalances": Figure("tandem_expert_rebalances", "times that places of experts were computed"),
    "expert_moved_layers": Figure("tandem_expert_moved_layers", "layers whose experts moved"),
    "expert_failed_layers": Figure(
        "tandem_expert_failed_layers", "layers whose experts a rank could not read, and stayed"
    ),
    "prefix_fetch_gb_s": Figure("tandem_prefix_fetch_gb_s", "bandwidth of prefixes that came lately"),
    "conversations": Figure("tandem_num_conversations", "conversations that requests have named, of those remembered"),
    "live": Figure("tandem_num_live_reqs", "requests that have not ended"),
    "waiting_tokens": Figure("tandem_waiting_tokens", "tokens to compute in the waiting queue"),
    "paused": Figure("tandem_paused", "1: generation is paused"),
    "batch_is_full": Figure("tandem_batch_is_full", "1: no waiting request fits"),
}
LEVELS = {  # that the transfer backend reports beside its counters
    "rooms": Figure("tandem_num_transfer_rooms", "transfers that have not ended"),
    "exposed_rooms": Figure("tandem_num_exposed_rooms", "ended transfers whose pages a peer may still write"),
    "farewells": Figure("tandem_num_transfer_farewells", "aborted transfers whose peer is not known yet"),
    "peers": Figure("tandem_num_transfer_peers", "connected workers of the other side"),
}
COUNTERS = {
    "requests": Figure("tandem_num_scheduled_reqs", "requests that entered the scheduler, also for other workers"),
    "aborted": Figure("tandem_num_aborted_scheduled_reqs", "of them, those that were aborted"),
    "generation_tokens": Figure("tandem_num_sampled_tokens", "tokens of answers that the scheduler has collected"),
    "bootstrap_failed": Figure("sglang:num_bootstrap_failed_reqs", "requests whose bootstrap failed"),
    "transfer_failed": Figure("sglang:num_transfer_failed_reqs", "requests whose KV transfer failed"),
    "prealloc_timeouts": Figure("tandem_num_prealloc_timeouts", "requests that found no KV memory in time"),
    "metadata_corrupt": Figure("tandem_num_corrupt_metadata", "transfers whose metadata row was corrupt"),
    "retried": Figure("sglang:num_prefill_retries", "transfers that were written once more"),
    "grammar_cache_hits": Figure("sglang:num_grammar_cache_hit", "requests whose grammar was compiled before"),
    "grammar_timeouts": Figure("sglang:num_grammar_timeout", "requests whose grammar did not compile in time"),
    "prompt_tokens": Figure("vllm:prefix_cache_queries", "prompt tokens that were looked up in the prefix cache"),
    "cached_tokens": Figure("vllm:prefix_cache_hits", "prompt tokens found in the prefix cache"),
    "grammar_compiled": Figure("tandem_num_grammar_compiled", "grammars that were compiled"),
    "grammar_failed": Figure("tandem_num_grammar_failed", "requests whose grammar did not compile"),
    "kv_sent_bytes": Figure("tandem_kv_transferred_bytes", "bytes of KV that decode workers have"),
    "kv_transfers": Figure("tandem_num_kv_transfers", "requests whose KV went to a decode worker"),
    "kv_skipped_bytes": Figure("tandem_kv_skipped_bytes", "bytes of KV that decode workers had cached"),
    "kv_checksum_verified": Figure("tandem_num_kv_checksum_verified", "transfers whose KV has the sender's checksum"),
    "kv_checksum_failed": Figure("tandem_num_kv_checksum_failed_reqs", "requests whose KV arrived corrupted"),
    "moved_out": Figure("tandem_num_moved_out", "running requests whose KV waited here for another decode worker"),
    "moved_in": Figure("tandem_num_moved_in", "requests that go on here with the KV of another decode worker"),
    "moves_failed": Figure("tandem_num_failed_moves", "requests that moved out and whose KV no worker fetched"),
    "posts": Figure("tandem_num_transfer_posts", "writes that were posted to the transfer engine"),
    "posts_of_followers": Figure("tandem_num_follower_transfer_posts", "of them, those of follower ranks"),
    "bytes": Figure("tandem_transfer_bytes", "bytes of completed writes"),
    "failed_posts": Figure("tandem_num_failed_transfer_posts", "writes that failed"),
    "late_completions": Figure("tandem_num_late_transfer_completions", "writes that completed after a new try began"),
    "late_messages": Figure("tandem_num_late_transfer_messages", "reports of earlier tries, dropped"),
    "succeeded": Figure("tandem_num_transfers_succeeded", "transfers that succeeded, also for other workers"),
    "failed": Figure("tandem_num_transfers_failed", "transfers that failed, also for other workers"),
    "stuck_rooms": Figure("tandem_num_stuck_transfers", "ended transfers whose pages stayed exposed for long"),
    "sessions_lost": Figure("tandem_num_lost_transfer_sessions", "prefill workers that were lost or began again"),
    "peers_lost": Figure("tandem_num_lost_transfer_peers", "decode workers that were lost"),
    "orphans_expired": Figure("tandem_num_expired_transfer_offers", "pages offered for rooms that no request opened"),
    "fence_failures": Figure("tandem_num_failed_transfer_fences", "paths whose fence failed"),
    "nudges": Figure("tandem_num_transfer_poll_requests", "requests to peers to poll their engine"),
    "refused": Figure("tandem_num_refused_transfer_peers", "peers that were refused"),
    "connect_failures": Figure("tandem_num_failed_transfer_connections", "paths to peers that could not be opened"),
    "control_errors": Figure("tandem_num_transfer_control_errors", "internal errors of the control thread"),
    "refused_connections": Figure("tandem_num_refused_control_connections", "control connections of strangers"),
    "junk_frames": Figure("tandem_num_malformed_control_frames", "malformed control frames, dropped"),
    "protocol_errors": Figure("tandem_num_transfer_protocol_errors", "control messages out of turn, dropped"),
    "retractions": Figure("tandem_num_retractions", "times that a request lost its memory"),
    "out_of_memory": Figure("tandem_num_out_of_memory_retractions", "retractions because memory ran out"),
    "out_of_memory_tokens": Figure("tandem_out_of_memory_tokens", "tokens whose KV these retractions gave up"),
    "preemptions": Figure("tandem_num_preemptions", "times that a request lost its place to one of higher priority"),
    "busy_s": Figure("tandem_busy_seconds", "time in which the engine had something to compute"),
    "steps": Figure("tandem_num_steps", "steps that were planned"),
    "prefill_steps": Figure("tandem_num_prefill_steps", "steps that computed a part of a prompt"),
    "mixed_steps": Figure("tandem_num_mixed_steps", "prefill steps in which decodes rode along"),
    "joined_steps": Figure("tandem_num_joined_steps", "steps that only other DP ranks had tokens in (DP attention)"),
    "delayed_steps": Figure(
        "tandem_num_delayed_prefill_steps", "steps for which a prompt waited for prompts of other DP ranks"
    ),
    "wasted_samples": Figure("tandem_num_wasted_samples", "tokens sampled after their request had ended, and dropped"),
    "failed_steps": Figure("tandem_num_failed_steps", "steps without device memory, whose requests were aborted"),
    "late_compiles": Figure("tandem_num_late_compiles", "kernels compiled while serving: each stops every request"),
    "deferred_samples": Figure(
        "tandem_num_delayed_samples", "steps whose sampling waited for grammar masks while their forward ran"
    ),
    "draft_steps": Figure("tandem_num_draft_steps", "steps in which a model drafted, before a decode step"),
    "verify_steps": Figure("tandem_num_verify_steps", "decode steps that verified drafted tokens"),
    "verified_runs": Figure("vllm:spec_decode_num_drafts", "drafts that were verified: one a request and step"),
    "drafts": Figure("vllm:spec_decode_num_draft_tokens", "drafted tokens that were verified"),
    "accepted_drafts": Figure("vllm:spec_decode_num_accepted_tokens", "drafted tokens that the model sampled, too"),
    "wrong_drafts": Figure(
        "tandem_num_wrong_drafts", "drafted tokens that were wrong behind right ones, so the last to count"
    ),
    "backup_saved_tokens": Figure("tandem_retraction_saved_tokens", "retracted tokens whose KV was copied to the host"),
    "backup_restored_tokens": Figure(
        "tandem_retraction_restored_tokens", "retracted tokens whose KV came back from the host"
    ),
    "resumed_computed": Figure("tandem_num_resumed_computed", "retracted requests whose KV this worker computed again"),
    "resumed_restored": Figure("tandem_num_resumed_restored", "retracted requests whose KV came back from the host"),
    "resumed_through_prefill": Figure(
        "tandem_num_resumed_through_prefill", "retracted requests whose KV a prefill worker computed"
    ),
    "prefix_fetches": Figure("tandem_num_prefix_fetches", "prefixes that this worker asked another one for"),
    "prefix_fetched": Figure("tandem_num_prefix_fetched", "of them, those that came"),
    "prefix_fetched_tokens": Figure("tandem_prefix_fetched_tokens", "tokens of prefixes that came from other workers"),
    "prefix_fetches_refused": Figure(
        "tandem_num_prefix_fetches_refused", "prefixes that the other worker did not send"
    ),
    "prefix_fetches_late": Figure("tandem_num_prefix_fetches_late", "prefixes that took longer than to compute them"),
    "prefix_fetches_aborted": Figure("tandem_num_prefix_fetches_aborted", "prefixes that were not needed any more"),
    "prefix_fetches_forgone": Figure(
        "tandem_num_prefix_fetches_forgone", "prefixes that cost less to compute, or more than may come at a time"
    ),
    "prefixes_sent": Figure("tandem_num_prefixes_sent", "prefixes that other workers got from this one"),
    "prefix_sent_bytes": Figure("tandem_prefix_sent_bytes", "bytes of KV in them"),
    "prefixes_refused": Figure(
        "tandem_num_prefixes_refused", "prefixes that this worker did not send: not cached, or too many at a time"
    ),
    "prefixes_unsent": Figure("tandem_num_prefixes_unsent", "prefixes whose transfer failed"),
    "recompute_failed": Figure("tandem_num_recompute_failed", "recomputations by prefill that failed"),
    "recompute_refused": Figure("tandem_num_recompute_refused", "requests of decode workers for KV that were refused"),
    "recomputed": Figure("tandem_num_recomputed", "retracted requests of decode workers whose KV was computed here"),
    "recomputed_tokens": Figure(
        "tandem_recomputed_tokens", "tokens that were computed for them, cached ones not counted"
    ),
    "mm_cache_queries": Figure("vllm:mm_cache_queries", "images whose features prompts needed"),
    "mm_cache_hits": Figure("vllm:mm_cache_hits", "of them, those whose features were on the device"),
    "mm_cache_evictions": Figure("tandem_mm_cache_evictions", "images whose features made room for others"),
    "mm_encoded_images": Figure("tandem_num_encoded_images", "images that the vision tower encoded"),
    "mm_encoded_tokens": Figure("tandem_num_encoded_image_tokens", "tokens that these images have"),
    "feature_fetches": Figure("tandem_num_feature_fetches", "images that this worker asked encode workers for"),
    "features_fetched": Figure("tandem_num_features_fetched", "of them, those whose features came"),
    "feature_fetched_tokens": Figure("tandem_feature_fetched_tokens", "tokens that these images have"),
    "feature_fetches_refused": Figure(
        "tandem_num_feature_fetches_refused", "images that the encode worker did not send, or did not compute well"
    ),
    "feature_fetches_late": Figure("tandem_num_feature_fetches_late", "images whose features took longer than 10 s"),
    "feature_fetches_aborted": Figure(
        "tandem_num_feature_fetches_aborted", "images whose features were not needed any more, or found no room"
    ),
    "feature_fetches_forgone": Figure(
        "tandem_num_feature_fetches_forgone",
        "images encoded here since they are too large, too many, or their encode worker failed just now",
    ),
    "features_sent": Figure("tandem_num_features_sent", "images whose features other workers got from this one"),
    "feature_sent_bytes": Figure("tandem_feature_sent_bytes", "bytes of features in them"),
    "features_refused": Figure("tandem_num_features_refused", "images that other workers sent and this one refused"),
    "features_unsent": Figure("tandem_num_features_unsent", "images whose transfer failed"),
    "hicache_device_hit_tokens": Figure("tandem_hicache_device_hit_tokens", "prompt tokens found on the device"),
    "hicache_host_hit_tokens": Figure("tandem_hicache_host_hit_tokens", "prompt tokens that came from host memory"),
    "hicache_disk_hit_tokens": Figure(
        "tandem_hicache_disk_hit_tokens", "prompt tokens that came from files or a store"
    ),
    "hicache_saved_pages": Figure("tandem_hicache_saved_pages", "pages copied to host memory"),
    "hicache_loaded_pages": Figure("tandem_hicache_loaded_pages", "pages copied back from host memory"),
    "hicache_loaded_ahead_pages": Figure(
        "tandem_hicache_loaded_ahead_pages", "of them, those copied back while their requests waited"
    ),
    "hicache_written_pages": Figure("tandem_hicache_written_pages", "pages written to files or a store"),
    "hicache_read_pages": Figure("tandem_hicache_read_pages", "pages read from files or a store"),
    "conversation_turns": Figure("tandem_conversation_turns", "second and later turns of named conversations"),
    "conversation_hit_tokens": Figure("tandem_conversation_hit_tokens", "cached tokens of their prompts"),
    "hicache_skipped_pages": Figure("tandem_hicache_skipped_pages", "pages not copied: all of host memory was in use"),
    "hicache_unwritten_pages": Figure(
        "tandem_hicache_unwritten_pages", "pages not written: no room, or the storage is too slow"
    ),
    "hicache_failed_writes": Figure("tandem_hicache_failed_writes", "pages that could not be written"),
    "hicache_storage_pauses": Figure("tandem_hicache_storage_pauses", "pauses of a store that failed or was late"),
    "hicache_bad_files": Figure("tandem_hicache_bad_files", "stored pages that were wrong and were deleted"),
}
# vLLM's names of our metrics; its stages are separate histograms.
VLLM_NAMES = {
    "sglang:prompt_tokens": "vllm:prompt_tokens",
    "sglang:generation_tokens": "vllm:generation_tokens",
    "sglang:time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
    "sglang:inter_token_latency_seconds": "vllm:inter_token_latency_seconds",
    "sglang:request_time_per_output_token_seconds": "vllm:request_time_per_output_token_seconds",
    "sglang:e2e_request_latency_seconds": "vllm:e2e_request_latency_seconds",
    "sglang:queue_time_seconds": "vllm:request_queue_time_seconds",
}
VLLM_STAGES = {"prefill": "vllm:request_prefill_time_seconds", "decode": "vllm:request_decode_time_seconds"}
_BEFORE_THE_BATCH = ("waiting", "grammar", "bootstrap", "prealloc", "transfer", "retracted", "held", "resuming")


def num_waiting(state: StateReply) -> int:
    """vLLM's `num_requests_waiting`: requests not computing yet, in any queue."""
    return sum(state.queues.get(queue, 0) for queue in _BEFORE_THE_BATCH)


def gauge_of(name: str) -> Figure | None:
    """A gauge, unless it cannot be exported or has another name."""
    if name in ("used_tokens", "cache_hit_rate") or not (name.isidentifier() and name.isascii()):
        return None
    return GAUGES.get(name) or Figure(f"tandem_{name}", "reported by the scheduler")


def check_exported(counters: Iterable[str], queues: Iterable[str]) -> None:
    """Raise ValueError for names without a metric, which would be counted in vain."""
    missing = {*counters} - COUNTERS.keys() - LEVELS.keys() | {*queues} - QUEUES.keys()
    if missing:
        raise ValueError(f"no metric exports {', '.join(sorted(missing))}: add each to engine/metric_names.py")


def sums(*tables: Mapping[str, float]) -> dict[str, float]:
    """Add counters of equal names."""
    return {name: sum(table.get(name, 0) for table in tables) for name in dict.fromkeys(n for t in tables for n in t)}
