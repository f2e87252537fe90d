import pytest

from quanterr.util.background import run_beside


def test_work_beside_ends_with_the_context():
    events = []

    def work(ended):
        ended.wait()
        events.append("work")

    with run_beside(work):
        events.append("context")

    assert events == ["context", "work"]


def test_error_in_the_context_ends_the_work_beside_it():
    events = []

    def work(ended):
        ended.wait()
        events.append("work")

    with pytest.raises(ValueError, match="broken"), run_beside(work):
        raise ValueError("broken")

    assert events == ["work"]
