"""Public names, their signatures and the page that lists them change together, and on purpose."""

import public_api

COMMAND = "if the change is intended, run python tests/public_api.py"


def test_signatures_are_those_that_were_promised() -> None:
    assert public_api.signatures() == public_api.SIGNATURES.read_text(encoding="utf-8"), COMMAND


def test_page_lists_everything_that_is_public() -> None:
    assert public_api.page() == public_api.PAGE.read_text(encoding="utf-8"), COMMAND
