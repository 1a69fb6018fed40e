"""Pages of a window: how many a request holds, which prefixes can be used, and which requests wait."""

from engine.core.mem_cache.window_pages import WindowPages
from tests.core.engine_in_a_test import EngineInATest
from tests.core.hash_model import expected_tokens

PROMPT = list(range(1, 42))


def engine_of(**setup: object) -> EngineInATest:
    made = {"window": 6, "chunk": 8, "num_pages": 64, "page_size": 4, "more_window_pages": 64, **setup}
    return EngineInATest(**made)  # type: ignore[arg-type]


def answer(engine: EngineInATest, rid: str, prompt: list[int], new: int = 3) -> int:
    """Run a request to its end; return how many of its tokens came from the cache."""
    request = engine.add(rid, prompt, max_new_tokens=new)
    while engine.turn():
        pass
    assert engine.tokens[rid] == expected_tokens(prompt, new)
    return request.stats.cached_tokens


def test_a_running_request_holds_one_window() -> None:
    engine = engine_of(radix=False)
    request = engine.add("long", PROMPT[:5], max_new_tokens=100)
    while engine.turn():
        live = [page for page in request.windows.pages if page]
        assert len(live) <= 3, "6 tokens lie in at most 3 pages of 4"
    assert engine.tokens["long"] == expected_tokens(PROMPT[:5], 100)
    windows = engine.scheduler.memory.part(WindowPages)
    assert (
        windows is not None and windows.num_retired >= 24 and windows.allocator.num_free == windows.allocator.num_pages
    )


def test_a_prefix_is_used_as_far_as_its_window_reaches() -> None:
    engine = engine_of()
    windows = engine.scheduler.memory.part(WindowPages)
    assert windows is not None and answer(engine, "first", PROMPT) == 0 and answer(engine, "again", PROMPT) == 40
    node = engine.scheduler.memory.cache.match(PROMPT[:40]).node
    windows._evict(node.window[-1])  # pages 9 and 8 hold the window behind 40 tokens
    assert answer(engine, "shorter", PROMPT) == 36, "pages 8 and 7"
    assert answer(engine, "filled", PROMPT) == 40, "the last one has put its page into the hole"


def test_a_hole_far_behind_the_window_is_none() -> None:
    engine = engine_of()
    windows = engine.scheduler.memory.part(WindowPages)
    assert windows is not None and answer(engine, "first", PROMPT) == 0
    path = engine.scheduler.memory.cache.match(PROMPT[:12]).node
    for page in list(path.window):
        windows._evict(page)
    assert answer(engine, "again", PROMPT) == 40 and answer(engine, "begins alike", [*PROMPT[:12], 60, 61]) == 8


def test_requests_wait_for_room_in_the_pool_of_windows() -> None:
    engine = engine_of(more_window_pages=0, radix=False)
    for at in range(4):
        engine.add(str(at), [at + 1, *PROMPT], max_new_tokens=20)
    most = 0
    while engine.turn():
        most = max(most, engine.scheduler.num_running)
    assert most == 1
    assert all(engine.tokens[str(at)] == expected_tokens([at + 1, *PROMPT], 20) for at in range(4))


def test_what_can_never_fit_is_refused() -> None:
    engine = engine_of(chunk=None, num_pages=30, max_prefill_tokens=400)
    windows = engine.scheduler.memory.part(WindowPages)
    assert windows is not None
    windows.allocator.num_pages = 20
    engine.add("large", list(range(90)), max_new_tokens=4)
    assert "80 tokens that layers with a window have room for" in engine.finish["large"].message


def test_a_state_is_used_where_its_last_window_is_there() -> None:
    """Of a model that has both: a state outlives the pages of the window before it."""
    engine = engine_of(state_slots=8, grid=8)
    windows = engine.scheduler.memory.part(WindowPages)
    assert windows is not None and answer(engine, "first", PROMPT) == 0 and answer(engine, "again", PROMPT) == 40
    node = engine.scheduler.memory.cache.match(PROMPT[:40]).node
    windows._evict(node.window[-1])
    assert answer(engine, "without its window", PROMPT) == 0 and answer(engine, "filled", PROMPT) == 40
