"""Which worker gets a request: policies, prefixes that workers hold, KV events."""
