"""A pytest plugin: every drafter is compiled, by the backend that the environment variable COMPILE_BACKEND names."""

import os

import pytest
from transformers import CompileConfig

from dspark_hf.modeling.draft_context import DraftContext


PASSES = []


@pytest.fixture(autouse=True)
def _compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = os.environ["COMPILE_BACKEND"]
    begin, plan = DraftContext.__init__, DraftContext.plan_static

    def begin_compiled(context, *args, **options):
        begin(context, *args, **options | {"compile_config": CompileConfig(backend=backend, mode="default")})

    def counted(context, *args):
        PASSES.append(context)
        return plan(context, *args)

    monkeypatch.setattr(DraftContext, "__init__", begin_compiled)
    monkeypatch.setattr(DraftContext, "plan_static", counted)


def pytest_sessionfinish() -> None:
    assert PASSES, "no pass was compiled"
