"""KV transfer from prefill to decode: contract, protocol of both sides, engines."""
