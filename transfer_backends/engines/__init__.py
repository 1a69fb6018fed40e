"""Thin engines that move bytes: nixl, mooncake, fake. Each implements `transfer_backends.ports.Engine`."""
