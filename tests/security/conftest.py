"""Coroutines run as in tests/router."""

from tests.router.conftest import pytest_pyfunc_call as pytest_pyfunc_call
