from tests.one_thread import one_thread, plays  # noqa: F401 (fixtures of every test here)
