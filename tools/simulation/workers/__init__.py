"""The workers of a simulated cluster: their processes, engines, ranks and executors."""
