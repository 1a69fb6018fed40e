"""The secret that the workers of a cluster share (`--cluster-secret-file`)."""

from disagg.config import DisaggConfig
from service.security.secret import read_secret_file


def read_secret(disagg: DisaggConfig) -> bytes | None:
    """The cluster's shared secret, or None. Raises `ConfigError` for a file that cannot serve as one."""
    return None if disagg.cluster_secret_file is None else read_secret_file(disagg.cluster_secret_file)
