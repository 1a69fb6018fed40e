"""PD multiplexing: prefill and decode steps run concurrently, in two streams of one device."""
