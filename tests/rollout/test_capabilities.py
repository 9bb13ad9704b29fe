"""What two versions of SGLang say of themselves, and one that lacks something."""

from grpo_mp.rollout.client import REQUIRED_ROUTES, read_capabilities


def test_versions_with_and_without_sessions() -> None:
    routes = dict.fromkeys(REQUIRED_ROUTES)
    older = read_capabilities({"version": "0.5.17"}, {"paths": routes})
    newer = read_capabilities(
        {"version": "0.5.23"}, {"paths": routes | {"/begin_weight_update": {}, "/end_weight_update": {}}}
    )
    assert (older.weight_update_session, newer.weight_update_session) == (False, True)
    assert older.missing == newer.missing == ()
    assert newer.sentence == "engines: SGLang 0.5.23, weights in sessions"


def test_what_is_missing_is_named() -> None:
    routes = {route: {} for route in REQUIRED_ROUTES if route != "/weights_checker"}
    assert read_capabilities({}, {"paths": routes}).missing == ("/weights_checker",)
