"""Every field of every body has a description and an example that the body takes; documents show them."""

import json
from collections.abc import Iterator
from typing import Any, get_args

import pytest

from engine.frontend.routes import APIS
from router.http.workers_api import NamedWorker, NewWorker, RoleSwitchBody
from service.http.api import document
from service.http.body import Body, field_types, is_body, types_in
from service.http.errors import body_of
from service.http.routes import TracesBody

OF_WORKERS = {route.body for api in APIS for route in api.table if route.body is not None}
OF_ROUTERS = {NamedWorker, NewWorker, RoleSwitchBody, TracesBody}


def inside(hint: Any) -> Iterator[type[Body]]:
    for one in types_in(hint):
        if is_body(one):
            yield one
        for part in get_args(one):
            yield from inside(part)


def all_bodies() -> list[type[Body]]:
    found: dict[type[Body], None] = {}
    left = [*OF_WORKERS, *OF_ROUTERS]
    while left:
        body = left.pop()
        if body not in found:
            found[body] = None
            left += [one for hint in field_types(body).values() for one in inside(hint)]
    return sorted(found, key=lambda body: body.__name__)


ALL = all_bodies()


@pytest.mark.parametrize("body", ALL, ids=lambda body: body.__name__)
def test_every_field_has_a_description_and_examples_that_the_body_takes(body: type[Body]) -> None:
    fields = {field.alias or name: field for name, field in body.model_fields.items()}
    needed = {name: (field.examples or [None])[0] for name, field in fields.items() if field.is_required()}
    for name, field in fields.items():
        assert field.description and field.description.endswith("."), name
        assert field.examples, name
        for example in field.examples:
            body_of({**needed, name: example}, body)


def test_bodies_differ_in_their_names() -> None:
    """Documents name their schemas so."""
    assert len({body.__name__ for body in ALL}) == len(ALL) > 60


def test_the_document_has_each_body() -> None:
    made = document(APIS, title="worker")
    schemas = made["components"]["schemas"]
    for body in OF_WORKERS:
        properties = schemas[body.__name__]["properties"]
        assert properties.keys() == field_types(body).keys()
        assert all(field["description"] and field["examples"] for field in properties.values())
    references = {part.partition('"')[0] for part in json.dumps(made).split('"#/components/schemas/')[1:]}
    assert references <= schemas.keys()
