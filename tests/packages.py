"""The product's import packages, for tests that read all of its source."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = (
    "engine",
    "disagg",
    "router",
    "bootstrap_server",
    "transfer_backends",
    "service",
    "deploy",
    "planner",
    "tandem",
)
