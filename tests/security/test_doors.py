"""Who gets in where: worker, router, control plane and bootstrap server, over real HTTP."""

import json
from pathlib import Path
from typing import Any

import pytest

from bootstrap_server.protocol import Registration
from disagg.config import DisaggConfig
from disagg.processes.exposure import make_allowlist
from engine.config import ServerConfig
from engine.frontend.routes import ADMIN_PATHS, ROUTES
from engine.messages import Bootstrap
from router.compose.routes import need_of
from service.flags import ConfigError
from service.http.errors import ApiError
from service.http.routes import UNSERVED
from service.security.keys import VOUCHER_HEADER, Access, bearer, is_vouched
from tests.frontend.conftest import start_worker
from tests.hostile.table import GENERATION
from tests.router.dummies import cluster, key_file

ADMIN_POSTS = tuple(sorted(route.path for route in ROUTES if route.method == "POST" and route.need is Access.ADMIN))
OF_THE_ROUTER = tuple(sorted({*ADMIN_POSTS, "/workers/role"} - {"/switch_role"}))


def test_a_worker_s_admin_routes(tmp_path: Path) -> None:
    keys = key_file(tmp_path, "one", "two", "sésame")
    server = {"api_key_file": keys, "admin_api_key": "r00t-key"}
    with start_worker(tmp_path, server=server) as w:
        for headers in ({}, {"Authorization": "Bearer"}, bearer("wrong"), {"Authorization": b"Bearer \xff\xfe"}):
            answer = w.post("/generate", {"text": "a"}, headers=headers)
            assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
        accented = w.post("/generate", {"text": "a"}, headers={"Authorization": "Bearer sésame".encode()})
        assert accented.status_code == 200
        for path in ADMIN_POSTS:
            assert w.post(path, {}).status_code == 401
            refused = w.post(path, {}, headers=bearer("one"))
            assert refused.status_code == 403 and refused.json()["error"]["code"] == "admin_key_needed", path
        assert w.http.get("/check", headers=bearer("two")).status_code == 403
        assert w.post("/abort_request", {"abort_all": True}, headers=bearer("one")).status_code == 403
        assert w.post("/abort_request", {"abort_all": True}, headers=bearer("r00t-key")).status_code == 200
        assert w.post("/abort_request", {"rid": "x"}, headers=bearer("one")).status_code == 200
        info = w.http.get("/server_info", headers=bearer("two"))
        assert info.status_code == 200 and "r00t-key" not in info.text and keys not in info.text
        for key in ("one", "two", "r00t-key"):
            assert w.post("/generate", {"text": "a"}, headers=bearer(key)).status_code == 200
        for path in ("/health", "/metrics", "/openapi.json"):
            assert w.http.get(path).status_code == 200


def test_every_route_that_changes_a_worker_is_an_admin_s() -> None:
    """A new route has to be put on one side or the other."""
    user = {f"{v1}/{name}" for v1 in ("", "/v1") for name in ("tokenize", "detokenize")}
    user |= {"/v1/models", "/v1/models/{model}", "/model_info", "/get_model_info", "/server_info", "/get_server_info"}
    user |= {
        "/get_weight_version",
        "/get_load",
        "/loads",
        "/v1/loads",
        "/v1/completions/render",
        "/v1/chat/completions/render",
        "/abort_request",
        "/invocations",
        "/expect_return",
        "/close_session",
        "/v1/messages/count_tokens",
        *GENERATION,
        *UNSERVED,
    }
    user |= {f"/api/{name}" for name in ("show", "tags", "ps", "version")}
    user |= {f"/v1/responses{rest}" for rest in ("", "/{id}", "/{id}/cancel", "/{id}/input_items")}
    routers = {"/kept_stream", "/move_out"}  # signed with the cluster's secret
    open_to_all = {"/health", "/health_generate", "/heartbeats", "/liveness", "/metrics", "/ping", "/version"}
    assert {route.path for route in ROUTES} - ADMIN_PATHS - user - routers == open_to_all


def test_a_decode_worker_dials_no_unknown_host(tmp_path: Path) -> None:
    disagg = DisaggConfig(disaggregation_mode="decode", disaggregation_bootstrap_allowed=("10.7.0.0/16",))
    local = make_allowlist(ServerConfig(), disagg, control_host="127.0.0.1")
    public = make_allowlist(ServerConfig(host="10.0.0.1"), disagg, control_host="127.0.0.1")
    local.check([Bootstrap(host="127.0.0.1", port=5, room=1)], voucher="")
    local.check([Bootstrap(host="10.7.1.1", port=5, room=1)], voucher="")
    with pytest.raises(ApiError, match="bootstrap_host"):
        local.check([Bootstrap(host="169.254.169.254", port=80, room=1)], voucher="")
    with pytest.raises(ApiError, match="bootstrap_host"):  # others may send it requests: its own ports are not for them
        public.check([Bootstrap(host="127.0.0.1", port=5, room=1)], voucher="")
    with pytest.raises(ConfigError, match="--disaggregation-bootstrap-allowed"):
        wrong = DisaggConfig(disaggregation_mode="decode", disaggregation_bootstrap_allowed=("1.2.3.4/99",))
        make_allowlist(ServerConfig(), wrong, control_host="127.0.0.1")


async def test_the_router_s_keys_and_what_it_shows_to_workers(tmp_path: Path) -> None:
    flags = {"admin_api_key": "r00t-key", "worker_admin_api_key": "wroot"}
    async with cluster(api_key_file=key_file(tmp_path, "one", "shared"), **flags) as c:
        assert (await c.post("/generate", {"text": "a"}))[0] == 401
        assert (await c.post("/generate", {"text": "a"}, headers=bearer("one")))[0] == 200
        assert c.decodes[0].seen[-1].headers["authorization"] == "Bearer one"
        for path in OF_THE_ROUTER:
            assert (await c.post(path, {}))[0] == 401
            assert (await c.post(path, {}, headers=bearer("one")))[0] == 403
        assert (await c.post("/workers", {"url": "http://10.0.0.1:1"}, headers=bearer("one")))[0] == 403
        assert (await c.post("/abort_request", {"abort_all": True}, headers=bearer("one")))[0] == 403
        assert (await c.post("/abort_request", {"rid": "x"}, headers=bearer("one")))[0] == 200
        assert (await c.post("/pause_generation", {}, headers=bearer("r00t-key")))[0] == 200
        assert c.decodes[0].seen[-1].headers["authorization"] == "Bearer wroot"
        async with c.client.delete(c.url + "/workers?url=http://x", headers=bearer("one")) as response:
            assert response.status == 403
        for path in ("/health", "/metrics", "/liveness", "/openapi.json"):
            assert (await c.get(path))[0] == 200


async def test_a_client_s_bootstrap_fields_never_reach_a_worker() -> None:
    """However they are written: escaped, twice, as lists, in a batch."""
    async with cluster() as c:
        for head in (
            '"bootstrap_host": "evil", "bootstrap_port": 1, "bootstrap_room": 5',
            '"bootstrap_host": ["evil", "evil"], "bootstrap_port": [1, 2], "bootstrap_room": [5, 6]',
            '"bootstrap\\u005fhost": "evil", "bootstrap_\\u0072oom": 5, "bootstrap_pair_key": "x"',
            '"bootstrap_room": 5, "bootstrap_host": "evil", "bootstrap_room": 6, "bootstrap_host": "evil"',
        ):
            for prompt in ('"text": "a"', '"text": ["a", "b"]'):
                body = f"{{{head}, {prompt}, {head}}}".encode()
                assert (await c.post("/generate", body, headers={VOUCHER_HEADER: "forged"}))[0] == 200
        for leg in (*c.prefills[0].seen, *c.decodes[0].seen):
            text = json.dumps(leg.body)
            assert "evil" not in text and "pair_key" not in text and "forged" not in leg.headers.values()
            rooms = leg.body["bootstrap_room"]
            assert all(room > 6 for room in (rooms if isinstance(rooms, list) else [rooms]))


async def test_the_router_vouches_for_the_meeting_place(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("sixteen bytes or more")
    async with cluster(info={"disaggregation_bootstrap_port": 8998}, cluster_secret_file=str(path)) as c:
        await c.post("/generate", {"text": ["a", "b"]})
        seen = c.decodes[0].seen[0]
        host, port, rooms = (seen.body[f"bootstrap_{name}"] for name in ("host", "port", "room"))
        voucher = seen.headers[VOUCHER_HEADER.lower()]
        assert is_vouched(voucher, path.read_bytes(), host=host[0], port=port[0], rooms=rooms)
        assert VOUCHER_HEADER.lower() not in c.prefills[0].seen[0].headers


async def test_rate_limits_are_a_key_s_own(tmp_path: Path) -> None:
    flags: dict[str, Any] = {"rate_limit_requests_per_second": 0.01, "rate_limit_burst": 3}
    async with cluster(api_key_file=key_file(tmp_path, "one", "two"), **flags) as c:
        got = [await c.post("/generate", {"text": "a"}, headers=bearer("one")) for _ in range(4)]
        assert [status for status, _, _ in got] == [200, 200, 200, 429]
        assert 1 <= int(got[-1][1]["Retry-After"]) <= 100
        assert json.loads(got[-1][2])["error"]["code"] == "rate_limit_exceeded"
        assert (await c.post("/generate", {"text": "a"}, headers=bearer("two")))[0] == 200
        assert (await c.get("/health"))[0] == 200
        assert 'tandem_router_refused_total{why="rate"} 1.0' in await c.metrics()
    async with cluster(**flags) as c:  # without keys: by address
        assert [(await c.post("/generate", {"text": "a"}))[0] for _ in range(4)] == [200, 200, 200, 429]


def test_every_admin_route_of_a_worker_is_one_of_the_router_s() -> None:
    """But for /check, which the router does not pass on; one worker's role is changed by a route of its own."""
    passed = {path for path in ADMIN_PATHS if need_of("POST", path) is Access.ADMIN}
    assert passed == ADMIN_PATHS - {"/check", "/switch_role"}
    changing = (("POST", "/workers/role"), ("POST", "/workers"), ("DELETE", "/workers/1"), ("GET", "/flush_cache"))
    assert all(need_of(method, path) is Access.ADMIN for method, path in changing)
    assert need_of("GET", "/workers") is need_of("POST", "/anything/new") is Access.USER


def test_a_registration_holds_no_secret() -> None:
    assert not [name for name in Registration.__struct_fields__ if "secret" in name or "key" in name]
