"""The prefill and decode roles: queues, KV hand-over, metadata buffers; wires engine and transfer."""
