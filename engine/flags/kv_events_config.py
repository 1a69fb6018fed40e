"""The value of `--kv-events-config`, with vLLM's and SGLang's field names."""

from typing import Annotated

import msgspec

from service.flags import ConfigError

FLAG = "--kv-events-config"
FREE_PORTS = ("*", "0")  # any port that is free


class KVEventsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """endpoint: tcp://HOST:PORT to bind; HOST * for all addresses, PORT * or 0 for a free one.

    replay_endpoint: for missed batches; buffer_steps: batches kept for it. max_queue_size: unsent
    batches, then drops. hwm: messages queued per slow subscriber.
    """

    publisher: str = "zmq"
    endpoint: str = "tcp://127.0.0.1:5557"
    replay_endpoint: str | None = None
    buffer_steps: Annotated[int, msgspec.Meta(ge=1)] = 10_000
    hwm: Annotated[int, msgspec.Meta(ge=1)] = 100_000
    max_queue_size: Annotated[int, msgspec.Meta(ge=1)] = 100_000
    topic: str = ""
    enable_kv_cache_events: bool = True

    def of_rank(self, dp_rank: int) -> "KVEventsConfig":
        """Ports are counted from the given ones, as in vLLM and SGLang."""
        replay = None if self.replay_endpoint is None else _shifted(self.replay_endpoint, dp_rank)
        return msgspec.structs.replace(self, endpoint=_shifted(self.endpoint, dp_rank), replay_endpoint=replay)

    def hosts(self) -> list[str]:
        """The addresses to bind. Raises ConfigError."""
        return [_host(e) for e in (self.endpoint, self.replay_endpoint) if e is not None]


def parse_kv_events_config(text: str | None) -> KVEventsConfig | None:
    """None if events are off. Raises ConfigError."""
    if text is None:
        return None
    try:
        config = msgspec.json.decode(text, type=KVEventsConfig)
    except msgspec.DecodeError as error:
        raise ConfigError(f'{FLAG}: give JSON such as {{"endpoint": "tcp://127.0.0.1:5557"}}: {error}') from None
    if config.publisher == "null" or not config.enable_kv_cache_events:
        return None
    if config.publisher != "zmq":
        raise ConfigError(f"{FLAG}: publisher must be zmq or null, got {config.publisher!r}")
    config.hosts()
    return config


def check_ports(text: str | None, *, dp_size: int) -> None:
    """Raise ConfigError if ports of DP ranks collide."""
    config = parse_kv_events_config(text)
    if config is None or config.replay_endpoint is None or dp_size == 1:
        return
    ports = [endpoint.rpartition(":")[2] for endpoint in (config.endpoint, config.replay_endpoint)]
    if any(port in FREE_PORTS for port in ports):
        return
    apart = abs(int(ports[0]) - int(ports[1]))
    if apart < dp_size:
        raise ConfigError(
            f"{FLAG}: each of {dp_size} DP ranks (--dp-size) has ports of its own, counted from {ports[0]} and {ports[1]}; "
            f"choose ports that are {dp_size} or more apart"
        )


def _shifted(endpoint: str, by: int) -> str:
    address, _, port = endpoint.rpartition(":")
    return endpoint if port in FREE_PORTS else f"{address}:{int(port) + by}"


def _host(endpoint: str) -> str:
    """The host of tcp://HOST:PORT. Raises ConfigError."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    is_port = port == "*" or (port.isdecimal() and int(port) < 65536)
    if not endpoint.startswith("tcp://") or not host or not is_port:
        raise ConfigError(f"{FLAG}: {endpoint!r} is no address to bind; give tcp://HOST:PORT")
    return host.strip("[]")
