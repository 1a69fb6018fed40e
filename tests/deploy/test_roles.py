"""Sizes of each role in `tandem up`: which flags its workers get, and which core and GPU. Literals, and the shipped models' configs."""

from dataclasses import fields
from itertools import product

import pytest

from deploy.flags import config_from
from deploy.launcher.plan import num_ports, plan_cluster
from deploy.launcher.roles import OF_ENCODERS, ClusterConfig, RoleFlags, values_by_role
from deploy.launcher.up_flags import build_parser, flags_by_role
from engine.config import EngineConfig
from engine.model_files.model_config import WIDE_MODEL_PATH, ModelConfig
from engine.parallel.layout import check_layout, common_units
from service.flags import ConfigError
from tests.parallel.some_config import some_config

WIDE = ("--model-path", WIDE_MODEL_PATH)  # 8 heads, 4 KV heads, 4 layers


def roles(*argv: str) -> dict[str, RoleFlags]:
    args = build_parser().parse_strict(argv)
    return flags_by_role(config_from(args, ClusterConfig), args)


def sizes(flags: RoleFlags) -> list[str]:
    return [arg for arg in flags.args if "size" in arg or "units" in arg or "partition" in arg]


def test_one_size_is_for_both_roles_and_needs_no_units() -> None:
    found = roles("--tp-size", "2", *WIDE)
    assert {role: (sizes(flags), flags.ranks) for role, flags in found.items()} == {
        "prefill": (["--tp-size=2"], 2),
        "decode": (["--tp-size=2"], 2),
    }
    assert roles("--unified", "--tp", "2", "--dp", "2", *WIDE)["unified"].ranks == 4
    assert [flags.ranks for flags in roles("--page-size", "4").values()] == [1, 1]


def test_a_role_s_own_size_counts_before_that_of_all_and_kv_is_cut_for_both() -> None:
    found = roles("--tp-size", "4", "--decode-tp-size", "2", "--prefill-dp-size", "2", *WIDE)
    assert sizes(found["prefill"]) == ["--tp-size=4", "--dp-size=2", "--kv-units=4"]
    assert sizes(found["decode"]) == ["--tp-size=2", "--kv-units=4"]
    assert (found["prefill"].ranks, found["decode"].ranks) == (8, 2)
    given = roles("--prefill-tp-size", "2", "--kv-units", "4", *WIDE)
    assert all("--kv-units=4" in flags.args for flags in given.values())
    assert sizes(roles("--prefill-tp-size", "8", *WIDE)["decode"]) == ["--kv-units=4"]  # no more units than KV heads


def test_encoder_workers_have_one_rank_and_the_others_ask_them() -> None:
    config = ClusterConfig(encode=2, decode_tp_size=4)
    given = {"tp_size": 2, "ep_size": 2, "enable_eplb": True, "kv_units": 4, "speculative_algorithm": "NGRAM"}
    given |= {"dtype": "float32", "vlm_cache_size_mb": 7, "log_level": "debug", "disaggregation_kv_checksum": True}
    found = values_by_role(config, given)
    asking = {**given, "feature_fetch": True}
    assert found == {
        "prefill": asking,
        "decode": {**asking, "tp_size": 4},  # it may become a prefill worker
        "encode": {
            name: given[name] for name in ("dtype", "vlm_cache_size_mb", "log_level", "disaggregation_kv_checksum")
        },
    }
    assert "encode" not in values_by_role(ClusterConfig(), given)
    assert {field.name for field in fields(EngineConfig)} >= set(OF_ENCODERS)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("--unified --encode 2", "--encode 2: --unified starts one worker alone"),
        ("--encode 2 --transfer-backend fake", "--encode 2: --transfer-backend fake moves no features"),
        ("--encode 2", "--encode 2: the model sees no images"),
    ],
)
def test_encoder_workers_that_could_do_nothing_are_refused(argv: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"^{said}"):
        roles(*argv.split())


def test_with_dp_attention_the_dp_ranks_share_the_ranks() -> None:
    found = roles(
        "--enable-dp-attention", "--enable-prefill-delayer", "--tp-size", "4", "--prefill-dp-size", "2", *WIDE
    )
    assert (found["prefill"].ranks, found["decode"].ranks) == (4, 4)
    assert sizes(found["prefill"]) == [
        "--tp-size=4",
        "--dp-size=2",
        "--kv-units=4",
    ]  # two ranks attend there, four here
    assert sizes(found["decode"]) == ["--tp-size=4", "--kv-units=4"]
    assert {"--enable-dp-attention", "--enable-prefill-delayer"} <= set(found["prefill"].args)
    assert not any("dp-attention" in arg or "delayer" in arg for arg in found["decode"].args), "it has one DP rank"


def test_stages_of_one_role_alone_may_be_chosen_by_hand() -> None:
    found = roles("--prefill-pp-size", "2", "--pp-layer-partition", "1", "3", *WIDE)
    assert "--pp-layer-partition" in found["prefill"].args and "--pp-layer-partition" not in found["decode"].args
    assert found["prefill"].ranks == 2 and not any("units" in arg for arg in found["decode"].args)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("--tp-size", "3"), "--tp-size 3: does not divide the model's 8 attention heads; choose 1, 2, 4 or 8"),
        (("--decode-tp-size", "3"), "--decode-tp-size 3: does not divide the model's 8 attention heads; choose"),
        (
            ("--enable-dp-attention", "--decode-tp-size", "6", "--decode-dp-size", "2"),
            "--decode-tp-size 6 with --decode-dp-size 2: a DP rank's 3 does not divide the model's 8 attention heads; choose 2, 4",
        ),
        (("--prefill-pp-size", "5"), "--prefill-pp-size 5: the model has 4 layers; choose at most 4"),
        (
            ("--tp-size", "2", "--decode-tp-size", "4", "--kv-units", "2"),
            "--kv-units 2: is not a multiple of --decode-tp-size 4; choose 4",
        ),
        (("--unified", "--encode", "1"), "--encode 1: --unified starts one worker alone; leave one of them out"),
        (("--unified", "--tp-size", "3", *WIDE), "--tp-size 3: does not divide the model's 8 attention heads"),
        (("--unified", "--prefill-tp-size", "2"), "--prefill-tp-size 2: --unified has no such worker; give --tp-size"),
        (
            ("--pp-size", "2", "--decode-pp-size", "3", "--pp-layer-partition", "2", "2"),
            "--pp-layer-partition 2,2: names 2 stages, --decode-pp-size is 3; give 3 numbers",
        ),
    ],
)
def test_what_does_not_fit_the_model_is_refused_by_the_flag_that_was_given(argv: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        roles(*argv, *WIDE)
    assert str(caught.value).startswith(said)


def test_cores_are_divided_over_ranks() -> None:
    config = ClusterConfig(prefill=1, decode=2)
    ranks = {"prefill": RoleFlags(ranks=4), "decode": RoleFlags(ranks=2)}
    for cores, shares in ((16, ["8", "4", "4"]), (3, ["1", "1", "1"])):
        *workers, _ = plan_cluster(config, front=9, free=range(num_ports(config)), cores=cores, flags=ranks)
        assert [worker.env["OMP_NUM_THREADS"] for worker in workers] == shares
        assert {worker.env["OMP_THREAD_LIMIT"] for worker in workers} == {str(max(1, cores // 8))}, "of a rank"


def test_units_for_both_fit_both_and_are_as_few_as_can_be() -> None:
    tried = 0
    for kv_heads, first, second in product((1, 2, 3, 4, 6, 8), (1, 2, 3, 4, 6, 8, 12), (1, 2, 3, 4, 6, 8, 12)):
        model = some_config(num_heads=24, num_kv_heads=kv_heads, intermediate_size=48, vocab_size=64)
        if all(fits(model, tp, None) for tp in (first, second)):
            units = common_units(model, tp_sizes=(first, second))
            assert [n for n in range(1, units + 1) if fits(model, first, n) and fits(model, second, n)] == [units]
            tried += 1
    assert tried > 100


def fits(model: ModelConfig, tp: int, units: int | None) -> bool:
    try:
        check_layout(model, tp_size=tp, pp_size=1, kv_units=units)
    except ConfigError:
        return False
    return True


def test_two_streams_are_for_workers_that_decode() -> None:
    given = ("--enable-pdmux", "--pdmux-itl", "0.03")
    found = roles(*given)
    assert not any("pdmux" in arg for arg in found["prefill"].args)
    for role in (found["decode"], roles(*given, "--unified")["unified"]):
        assert {arg.split("=")[0] for arg in role.args} >= {"--enable-pdmux", "--pdmux-itl"}
