"""Moving KV pages from prefill to decode: the contract, the protocol both sides share, and the engines below it."""
