"""Steps on the device: a FIFO stream, the KV pool, the FutureMap, the model runner and the sampler."""
