"""LoRA adapters: PEFT files, weights and deltas."""
