"""What the server's own OpenAPI schema allows, tried at random by schemathesis: no answer may be a failure of ours, and
each is what the schema says."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, seed, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import response_schema_conformance, status_code_conformance

from surefoot import Engine
from surefoot.server.backend import Limits
from tests.server import MODEL, serving

CHECKS = [not_a_server_error, status_code_conformance, response_schema_conformance]


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_random_requests() -> None:
    engine = Engine.from_pretrained(MODEL, drafter="mtp", slots=2, max_len=64)
    with serving(engine, limits=Limits(max_choices=3)) as live:
        schema = schemathesis.openapi.from_url(f"{live.url}/openapi.json")
        tried = set()
        for result in schema.get_all_operations():
            operation = result.ok()  # type: ignore[union-attr]  # raises if it is none

            @seed(0)
            @settings(max_examples=40, deadline=None, database=None, suppress_health_check=list(HealthCheck))
            @given(case=operation.as_strategy())
            def request(case: Any) -> None:
                case.call_and_validate(checks=CHECKS, timeout=60)

            request()
            tried.add(operation.path)
        assert {"/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"} <= tried
        assert live.wait_idle()
