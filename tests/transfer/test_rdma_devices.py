"""RDMA devices by flag, from literals: no machine of the suite has one."""

import pytest

from transfer_backends.contract import BackendUnavailable
from transfer_backends.engines.rdma_devices import named_devices, ucx_settings

HERE = ["mlx5_0", "mlx5_1", "mlx5_2"]


@pytest.mark.parametrize(
    ("text", "names"),
    [(None, ()), ("mlx5_1", ("mlx5_1",)), ("mlx5_2, mlx5_0,mlx5_2", ("mlx5_2", "mlx5_0"))],
)
def test_named_devices(text: str | None, names: tuple[str, ...]) -> None:
    assert named_devices(text, here=HERE) == names


@pytest.mark.parametrize(
    ("text", "here", "message"),
    [
        ("mlx5_0,mlx5_7", HERE, "there is no 'mlx5_7'; /sys/class/infiniband has mlx5_0, mlx5_1, mlx5_2$"),
        ("mlx5_0", [], "there is no 'mlx5_0'; /sys/class/infiniband is empty or absent$"),
        ("mlx5_0,", HERE, "'mlx5_0,' holds an empty name"),
        ("", HERE, "'' holds an empty name"),
        ("../mlx5_0", HERE, "there is no '../mlx5_0'"),
    ],
)
def test_an_absent_device_is_refused(text: str, here: list[str], message: str) -> None:
    with pytest.raises(BackendUnavailable, match=f"^--disaggregation-ib-device: {message}"):
        named_devices(text, here=here)


def test_ucx_takes_the_first_port_of_each() -> None:
    wanted = {"UCX_NET_DEVICES": "mlx5_0:1,mlx5_2:1"}
    assert ucx_settings((), {"UCX_NET_DEVICES": "eth0"}) == {}
    assert ucx_settings(("mlx5_0", "mlx5_2"), {}) == ucx_settings(("mlx5_0", "mlx5_2"), wanted) == wanted
    with pytest.raises(BackendUnavailable, match="mlx5_1 contradicts UCX_NET_DEVICES=eth0; unset one"):
        ucx_settings(("mlx5_1",), {"UCX_NET_DEVICES": "eth0"})
