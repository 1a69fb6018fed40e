"""The secret that the workers of a cluster share (`--cluster-secret-file`)."""

from pathlib import Path

from disagg.config import DisaggConfig
from engine.config import ConfigError

MIN_SECRET_BYTES = 16


def read_secret(disagg: DisaggConfig) -> bytes | None:
    """The cluster's shared secret, or None. Raises ConfigError for a file that cannot serve as one."""
    if disagg.cluster_secret_file is None:
        return None
    try:
        secret = Path(disagg.cluster_secret_file).read_bytes().strip()
    except OSError as error:
        raise ConfigError(
            f"--cluster-secret-file: cannot read {disagg.cluster_secret_file}: {error.strerror}"
        ) from error
    if len(secret) < MIN_SECRET_BYTES:
        raise ConfigError(
            f"--cluster-secret-file: {disagg.cluster_secret_file} holds {len(secret)} bytes, at least {MIN_SECRET_BYTES} are needed"
        )
    return secret
