from tests.one_thread import one_thread  # noqa: F401 (a fixture of every test here)
