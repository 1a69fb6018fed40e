"""Settings of engines that no flag sets, for workers that a test starts:

    with cluster(folder, *flags, env=settings(stream_delay_s=0.004)) as c:

The fork server of the test run imports this module (tests/conftest.py), so that `tandem serve`, forked from it, reads them.
"""

import argparse
import dataclasses
import json
import os
from typing import Any

from deploy.commands import serve
from deploy.flags import Config, config_from
from engine.config import EngineConfig
from service.process.child_process import HTTP_SERVER_VARIABLE
from tests.e2e.ranks.leaders import SETTINGS_VARIABLE


def settings(**values: float) -> dict[str, str]:
    """The environment of processes whose engines have them; skips where workers are not forked (beside GPUs)."""
    if not os.environ.get(HTTP_SERVER_VARIABLE):
        import pytest  # not in a fork server

        pytest.skip("no fork server gives workers their settings here")
    return {SETTINGS_VARIABLE: json.dumps(values)}


def with_settings(args: argparse.Namespace, config_class: type[Config], **by_hand: Any) -> Config:
    """As `config_from`, with what `SETTINGS_VARIABLE` holds."""
    config = config_from(args, config_class, **by_hand)
    if config_class is not EngineConfig or SETTINGS_VARIABLE not in os.environ:
        return config
    return dataclasses.replace(config, **json.loads(os.environ[SETTINGS_VARIABLE]))  # type: ignore[type-var]


vars(serve)["config_from"] = with_settings
