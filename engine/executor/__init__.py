"""Steps on the device: FIFO stream, KV pool, FutureMap, model runner, sampler."""
